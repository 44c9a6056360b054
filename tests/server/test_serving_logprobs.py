"""Log-probabilities over HTTP: of new tokens, of echoed prompts, and of the likeliest tokens beside."""

# ruff: noqa: F811  fixtures

import shutil

import openai
import pytest
import torch
from test_token_texts import TOKENIZERS

import saltus
from saltus.core.canvas import continuation
from saltus.core.forward import ForwardInputs
from saltus.core.sampling import log_probability
from saltus.engine import prompt_scores
from tiny_models import TEMPLATE
from tiny_server import MESSAGES, PROMPT, alone, client, engine, server, serving  # noqa: F401


def prompt_logprobs(engine, prompt: list[int]) -> list[float | None]:
    """The network's own, a call for each token."""
    found: list[float | None] = [None]
    for end in range(1, len(prompt)):
        inputs = ForwardInputs(continuation(prompt[:end], 1))
        (outputs,) = engine.network.forward([inputs], [engine.network.new_kv_cache()])
        found.append(log_probability(outputs.logits[0], prompt[end]))
    return found


@pytest.mark.parametrize("stream", [False, True])
def test_completions_of_several_prompts_with_echo_and_logprobs(client, engine, stream):
    asked = {"prompt": [PROMPT, "a dog"], "seed": 1, "max_tokens": 12, "n": 2, "echo": True, "logprobs": 0}
    answer = client.completions.create(model="tiny", stream=stream, **asked)
    found, logprobs = [""] * 4, [[] for _ in range(4)]
    for part in answer if stream else [answer]:
        for choice in part.choices:
            found[choice.index] += choice.text
            if choice.logprobs is not None:
                logprobs[choice.index] += choice.logprobs.token_logprobs
    texts = [
        alone(engine, prompt, raw=True, seed=1 + i, max_new_tokens=12, logprobs=True)
        for prompt in asked["prompt"] for i in range(2)
    ]  # fmt: skip
    assert found == [text.prompt + text.text for text in texts]
    of_prompts = [prompt_logprobs(engine, engine.encode(prompt, raw=True)) for prompt in asked["prompt"]]
    assert logprobs == [of_prompts[number // 2] + text.logprobs for number, text in enumerate(texts)]


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_the_logprobs_of_a_prompt_longer_than_a_call(client, engine, monkeypatch, max_tokens):
    monkeypatch.setattr(prompt_scores, "SCORED_ROWS", 7)
    words = "the cat sat on the mat " * 9
    prompt = engine.encode(words, raw=True)
    asked = {"prompt": prompt, "max_tokens": max_tokens, "echo": True, "logprobs": 2, "temperature": 0}
    for _ in range(2):  # the second time the tree of prefixes has the prompt
        found = client.completions.create(model="tiny", **asked).choices[0].logprobs
        text = alone(engine, words, raw=True, temperature=0.0, max_new_tokens=max_tokens, logprobs=True)
        assert found.token_logprobs == prompt_logprobs(engine, prompt) + text.logprobs
    assert found.top_logprobs[0] is None
    for value, likely in zip(found.token_logprobs[1:], found.top_logprobs[1:], strict=True):
        assert max(likely.values()) >= value
    with torch.inference_mode():
        laws = engine.model(torch.tensor([prompt])).logits[0].log_softmax(-1)
    expected = [float(laws[place, token]) for place, token in enumerate(prompt[1:])]
    assert found.token_logprobs[1 : len(prompt)] == pytest.approx(expected, abs=1e-4)


def test_a_prompt_of_one_token_has_no_logprob(client, engine):
    asked = {"prompt": engine.encode("the", raw=True)[:1], "max_tokens": 0, "echo": True, "logprobs": 1}
    found = client.completions.create(model="tiny", **asked).choices[0].logprobs
    assert (found.token_logprobs, found.top_logprobs, found.text_offset) == ([None], None, [0])


def test_scoring_a_prompt_changes_no_text_and_drafters_still_read_its_states(client, engine):
    asked = {"prompt": PROMPT * 3, "seed": 2, "max_tokens": 24, "echo": True, "logprobs": 1}
    expected = alone(engine, asked["prompt"], raw=True, seed=2).text
    for method in ("plain", "lookup", "ptp+lookup", "mtpc"):
        extra = {"speculative": {"method": method}}
        assert (
            client.completions.create(model="tiny", **asked, extra_body=extra).choices[0].text == PROMPT * 3 + expected
        )


def test_a_suffix_excludes_the_logprobs_of_a_prompt(client):
    with pytest.raises(openai.BadRequestError, match="suffix"):
        client.completions.create(model="tiny", prompt="a", suffix="b", echo=True, logprobs=1)


@pytest.mark.parametrize("stream", [False, True])
def test_offsets_say_where_each_token_stands_in_the_text(client, engine, stream):
    words = {str(token): 100 for token in range(97, 105)}  # letters, each of a character
    asked = {"prompt": PROMPT, "seed": 1, "max_tokens": 8, "echo": True, "logprobs": 0, "logit_bias": words}
    answer = client.completions.create(model="tiny", stream=stream, **asked)
    choices = [part.choices[0] for part in (answer if stream else [answer])]
    text = "".join(choice.text for choice in choices)
    offsets = [
        (offset, token) for choice in choices if choice.logprobs is not None
        for offset, token in zip(choice.logprobs.text_offset, choice.logprobs.tokens, strict=True)
    ]  # fmt: skip
    assert len(offsets) == len(engine.encode(PROMPT, raw=True)) + 8
    for offset, token in offsets:
        assert text[offset:].startswith(token)
    assert (offsets[0][0], offsets[-8][0]) == (0, len(PROMPT))


def test_the_likeliest_tokens_of_each_position(client, engine):
    settings = {"model": "tiny", "temperature": 0.0, "max_tokens": 6}
    chat = client.chat.completions.create(messages=MESSAGES, logprobs=True, top_logprobs=3, **settings)
    for entry in chat.choices[0].logprobs.content:
        assert len(entry.top_logprobs) == 3
        assert (entry.top_logprobs[0].token, entry.top_logprobs[0].logprob) == (entry.token, entry.logprob)
    assert len(chat.choices[0].logprobs.content) == 6
    text = client.completions.create(prompt=PROMPT, logprobs=2, **settings).choices[0].logprobs
    assert [max(likely.values()) for likely in text.top_logprobs] == text.token_logprobs


def test_a_response_has_the_log_probabilities_of_chat_completions(client):
    asked = {"model": "tiny", "temperature": 0.0, "top_logprobs": 2, "extra_body": {"seed": 3}}
    chat = client.chat.completions.create(messages=MESSAGES, logprobs=True, max_tokens=9, **asked).choices[0]
    asked |= {"input": MESSAGES, "include": ["message.output_text.logprobs"], "max_output_tokens": 9}
    expected = [one.model_dump() for one in chat.logprobs.content if one.bytes]
    events = list(client.responses.create(stream=True, **asked))
    for answer in (client.responses.create(**asked), events[-1].response):
        assert answer.output_text == chat.message.content
        assert [one.model_dump() for one in answer.output[0].content[0].logprobs] == expected
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    assert [one.token for delta in deltas for one in delta.logprobs] == [one["token"] for one in expected]
    (done,) = (event for event in events if event.type == "response.output_text.done")
    assert [one.logprob for one in done.logprobs] == [one["logprob"] for one in expected]


# What the tokens are in the text, for tokenizers of several kinds. The vocabularies are padded: some ids have no token.


@pytest.fixture(scope="module", params=["added", "llama-2"])
def kind(request, tiny_folder, tmp_path_factory):
    """A client and an engine with a tokenizer of that kind."""
    folder = tmp_path_factory.mktemp("kind") / "model"
    shutil.copytree(tiny_folder(vocab_size=320, eos_token_id=2), folder)
    TOKENIZERS[request.param].save_pretrained(folder)
    engine = saltus.load(str(folder), "lookup", adaptive=False)
    engine.tokenizer.chat_template = TEMPLATE
    with serving(engine) as (_, url):
        yield openai.OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0), engine


def parts_of(answer, stream):
    return [part.choices[0] for part in (answer if stream else [answer])]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "fields", [{}, {"stop": ["e", "\ufffd", "t "]}, {"extra_body": {"skip_special_tokens": False}}, {"n": 1}],
    ids=["plain", "stop", "special", "n"],
)  # fmt: skip
def test_the_bytes_of_all_tokens_are_the_text(kind, stream, fields):
    client, _ = kind
    for seed in range(4):
        asked = {"model": "tiny", "messages": MESSAGES, "seed": seed, "max_tokens": 24, "logprobs": True, **fields}
        choices = parts_of(client.chat.completions.create(**asked, top_logprobs=2, stream=stream), stream)
        text = "".join((choice.delta if stream else choice.message).content or "" for choice in choices)
        content = [one for choice in choices if choice.logprobs is not None for one in choice.logprobs.content]
        assert b"".join(bytes(one.bytes) for one in content) == text.encode()
        for one in content:
            assert len({likely.token for likely in one.top_logprobs}) == 2
            assert not one.bytes or one.token.startswith("\\x") or one.token.encode() == bytes(one.bytes)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", [PROMPT, "😀 and ok", " é", [5, 9, 280, 14, 15, 199]])
def test_each_token_stands_at_its_offset(kind, stream, prompt):
    client, _ = kind
    for fields in ({}, {"echo": True}, {"echo": True, "stop": ["e", "\ufffd"]}, {"logprobs": 0, "echo": True}):
        asked = {"model": "tiny", "prompt": prompt, "seed": 2, "max_tokens": 16, "logprobs": 3, **fields}
        choices = parts_of(client.completions.create(**asked, stream=stream), stream)
        text = "".join(choice.text for choice in choices)
        listed = [choice.logprobs for choice in choices if choice.logprobs is not None]
        tokens, offsets, values, top = (
            [one for logprobs in listed for one in (getattr(logprobs, name) or [None] * len(logprobs.tokens))]
            for name in ("tokens", "text_offset", "token_logprobs", "top_logprobs")
        )
        assert "".join(tokens) == text
        for token, offset, value, likely in zip(tokens, offsets, values, top, strict=True):
            assert text[offset : offset + len(token)] == token
            if likely is not None:
                assert len(likely) in (3, 4)  # keys of different tokens differ
                assert likely[token] == value


@pytest.mark.parametrize("stream", [False, True])
def test_the_bytes_of_a_character_in_several_tokens(kind, stream):
    client, _ = kind
    asked = {"model": "tiny", "messages": MESSAGES, "logprobs": True, "extra_body": {"guided_choice": ["😀é"]}}
    choices = parts_of(client.chat.completions.create(**asked, stream=stream), stream)
    content = [one for choice in choices if choice.logprobs is not None for one in choice.logprobs.content]
    assert [one.bytes for one in content] == [*([byte] for byte in "😀é".encode()), []]
    assert content[0].token == "\\xf0"
