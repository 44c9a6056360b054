"""Earlier answers: found by the last tokens, bounded, apart by group, and without influence on a text."""

import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

import saltus
from saltus.methods.shared.answer_memory import BYTES_PER_TOKEN, AnswerMemories, AnswerMemory
from tiny_models import TEMPLATE
from tiny_server import MESSAGES, alone, serving


def test_later_occurrences_come_first_with_what_agrees():
    memory = AnswerMemory(1 << 20)
    memory.add([9, 9], [1, 2, 3, 4, 5])
    memory.add([8], [2, 3, 4, 7])
    ((tokens, found),) = memory.repeats([0, 1, 2, 3, 4], 16, 8)
    assert [(tokens[at], size) for at, size in found] == [(7, 3), (5, 4)]
    assert memory.repeats([3, 4], 16, 8) == memory.repeats([1, 2, 4], 16, 8) == []
    ((_, found),) = memory.repeats([0, 1, 2, 3, 4], 16, 1)
    assert len(found) == 1


@given(st.lists(st.lists(st.integers(0, 2), max_size=9), max_size=6), st.lists(st.integers(0, 2), max_size=5))
def test_all_places_after_the_last_three_tokens_are_found(answers, text):
    memory, expected, begin = AnswerMemory(1 << 20), [], 0
    for answer in answers:
        memory.add([], answer)
        expected += [begin + end for end in range(3, len(answer) + 1) if answer[end - 3 : end] == text[-3:]]
        begin += len(answer) + 1
    found = [at for _, repeats in memory.repeats(text, 16, 99) for at, _ in repeats]
    assert found == expected[::-1]


def test_texts_do_not_run_into_each_other():
    memory = AnswerMemory(1 << 20)
    memory.add([], [1, 2])
    memory.add([], [3, 4, 5])
    assert memory.repeats([1, 2, 3], 16, 8) == []
    ((tokens, [(at, size)]),) = memory.repeats([3, 4, 5], 16, 8)
    assert (tokens[at], size) == (-1, 3)


def test_memory_is_bounded_and_forgets_the_oldest():
    memory = AnswerMemory(BYTES_PER_TOKEN * 200)
    for start in range(0, 1000, 20):
        memory.add([], range(start, start + 20))
        assert memory.num_bytes <= BYTES_PER_TOKEN * 200
    assert memory.repeats([985, 986, 987], 16, 8)
    assert not memory.repeats([5, 6, 7], 16, 8)
    memory.add([], range(5000, 6000))  # more than fits
    assert memory.num_bytes <= BYTES_PER_TOKEN * 200


def test_groups_share_the_room_and_nothing_else():
    memories = AnswerMemories(BYTES_PER_TOKEN * 400)
    memories.of("a").add([], range(100))
    assert not memories.of("b").repeats([5, 6, 7], 16, 8)
    assert memories.of("a").repeats([5, 6, 7], 16, 8)
    memories.of("b").add([], range(150))
    memories.of("c").add([], range(190))
    memories.of("c").add([], range(190))
    memories.of("c")
    assert list(memories.memories) == ["c"]


@pytest.fixture(scope="module")
def engine(tiny_folder, partners) -> saltus.Engine:
    made = saltus.load(str(tiny_folder()), "lookup", options=partners, adaptive=False)
    made.tokenizer.chat_template = TEMPLATE
    return made


def test_a_repeated_request_takes_fewer_calls_and_keys_keep_their_answers_apart(engine):
    asked = {"model": "tiny", "messages": MESSAGES, "max_tokens": 40, "extra_body": {"include_metrics": True}}
    with serving(engine, api_keys=("one", "two"), ngram_cache_bytes=1 << 20) as (_, url):
        clients = {key: openai.OpenAI(base_url=url + "/v1", api_key=key, max_retries=0) for key in ("one", "two")}
        steps = {}
        for key, number in (("one", 0), ("one", 1), ("two", 0)):
            answer = clients[key].chat.completions.create(**asked, seed=3)
            assert answer.choices[0].message.content == alone(engine, seed=3, max_new_tokens=40).text
            steps[key, number] = answer.model_extra["metrics"]["speculative_decoding"]["mean_acceptance_length"]
    assert steps["one", 1] > 2 * steps["one", 0]
    assert steps["two", 0] == steps["one", 0]
