"""OpenAI's client against the server: every text is the one that the engine writes alone."""

# ruff: noqa: F811  fixtures

import json

import httpx
import openai
import pytest

from tiny_server import MESSAGES, PROMPT, alone, client, engine, server  # noqa: F401


def test_chat_is_what_the_engine_writes_alone(client, engine):
    answer = client.chat.completions.create(model="tiny", messages=MESSAGES, seed=3, max_tokens=24)
    expected = alone(engine, seed=3)
    assert answer.choices[0].message.content == expected.text
    assert answer.choices[0].finish_reason == expected.finish_reason
    assert answer.usage.prompt_tokens == len(engine.encode(MESSAGES))
    assert answer.usage.completion_tokens == len(expected.tokens)


def test_a_stream_is_the_same_text(client, engine):
    stream = client.chat.completions.create(
        model="tiny", messages=MESSAGES, seed=3, max_tokens=24, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert (
        "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == alone(engine, seed=3).text
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [chunk.usage is not None for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert chunks[-2].choices[0].finish_reason == "length"


def test_choices_have_seeds_that_follow_one_another(client, engine):
    answer = client.chat.completions.create(model="tiny", messages=MESSAGES, seed=3, max_tokens=9, n=3)
    assert [choice.message.content for choice in answer.choices] == [
        alone(engine, seed=3 + i, max_new_tokens=9).text for i in range(3)
    ]


def test_token_ids_are_a_prompt(client, engine):
    tokens = engine.encode(PROMPT, raw=True)
    answer = client.completions.create(model="tiny", prompt=tokens, seed=1, max_tokens=12)
    assert answer.choices[0].text == alone(engine, PROMPT, raw=True, seed=1, max_new_tokens=12).text


def test_responses_whole_and_streamed(client, engine):
    asked = {"model": "tiny", "input": PROMPT, "instructions": "the dog", "max_output_tokens": 24}
    messages = [{"role": "system", "content": "the dog"}, {"role": "user", "content": PROMPT}]
    expected = alone(engine, messages, seed=3)
    answer = client.responses.create(**asked, extra_body={"seed": 3})
    assert answer.output_text == expected.text
    assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert answer.usage.output_tokens == 24
    with client.responses.stream(**asked, extra_body={"seed": 3}) as stream:
        events = list(stream)
    assert (events[-1].type, events[-1].response.output_text) == ("response.incomplete", expected.text)
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == expected.text
    assert [event.sequence_number for event in events] == list(range(len(events)))
    parts = [{"role": "user", "content": [{"type": "input_text", "text": PROMPT}]}]
    assert client.responses.create(**{**asked, "input": parts}, extra_body={"seed": 3}).output_text == expected.text
    with pytest.raises(openai.BadRequestError, match="previous_response_id"):
        client.responses.create(**asked, previous_response_id="resp_1")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("ended_by", ["string", "token", "end", "limit"])
def test_vllms_stop_reason(server, engine, ended_by, stream):
    whole = alone(engine, PROMPT, raw=True, seed=3)
    word, token = whole.text[8:11], whole.tokens[5]
    fields, expected = {
        "string": ({"stop": [word]}, word), "token": ({"stop_token_ids": [token]}, token),
        "end": ({"logit_bias": {str(engine.tokenizer.eos_token_id): 100}}, None), "limit": ({"max_tokens": 3}, None),
    }[ended_by]  # fmt: skip
    asked = {"prompt": PROMPT, "seed": 3, "max_tokens": 24, "stream": stream, **fields}
    answer = httpx.post(server[1] + "/v1/completions", json=asked)
    if stream:
        chunks = [json.loads(line[6:])["choices"][0] for line in answer.text.splitlines() if line.startswith("data: {")]
        assert not any("stop_reason" in chunk for chunk in chunks[:-1])
        choice = chunks[-1]
    else:
        choice = answer.json()["choices"][0]
    assert choice["finish_reason"] == ("length" if ended_by == "limit" else "stop")
    assert choice["stop_reason"] == expected


def test_stop_strings_end_a_text_and_are_cut_off(client, engine):
    whole = alone(engine, temperature=0.0).text
    stop = whole[5:7]
    answer = client.chat.completions.create(model="tiny", messages=MESSAGES, temperature=0.0, max_tokens=24, stop=stop)
    assert answer.choices[0].message.content == whole[: whole.find(stop)]
    assert answer.choices[0].finish_reason == "stop"


def test_openais_penalties_and_bias_are_the_engines(client, engine):
    settings = {"presence_penalty": 0.5, "frequency_penalty": 0.7}
    answer = client.chat.completions.create(
        model="tiny", messages=MESSAGES, seed=3, max_tokens=24, logit_bias={"269": 6, "9": -100}, **settings
    )
    expected = alone(engine, seed=3, logit_bias=((269, 6.0), (9, -100.0)), **settings).text
    assert answer.choices[0].message.content == expected != alone(engine, seed=3).text


def test_a_request_may_switch_drafting_off_and_name_its_method(client, engine):
    def metrics(speculative) -> dict:
        answer = client.chat.completions.create(
            model="tiny", messages=MESSAGES, temperature=0.0, max_tokens=24,
            extra_body={"speculative": speculative, "include_metrics": True},
        )  # fmt: skip
        assert answer.choices[0].message.content == alone(engine, temperature=0.0).text
        return answer.model_extra["metrics"]["speculative_decoding"]

    assert metrics(False)["num_draft_tokens"] == 0
    drafted = metrics({"method": "jacobi+lookup"})
    assert drafted["num_draft_tokens"] > 0
    assert sum(drafted["acceptance_histogram"]) * drafted["mean_acceptance_length"] == pytest.approx(24)
    with pytest.raises(openai.BadRequestError, match="unknown method 'jacoby'"):
        metrics({"method": "jacoby"})
    narrow = metrics({"method": "jacobi+lookup", "max_draft_tokens": 1})
    assert 0 < narrow["num_draft_tokens"] <= narrow["num_calls"]
    assert metrics({"max_draft_tokens": 0})["num_draft_tokens"] == 0


def test_usage_may_come_with_every_chunk(client):
    options = {"include_usage": True, "continuous_usage_stats": True}
    asked = {"model": "tiny", "messages": MESSAGES, "seed": 3, "max_tokens": 9, "ignore_eos": True}
    body = {"ignore_eos": asked.pop("ignore_eos"), "stream_options": options}
    counts = [chunk.usage.completion_tokens for chunk in client.chat.completions.create(
        **asked, stream=True, extra_body=body
    )]  # fmt: skip
    assert counts[0] == 0
    assert counts == sorted(counts)
    assert counts[-1] == 9


def test_how_much_of_a_prediction_came_true_is_counted_once(client):
    asked = {"model": "tiny", "messages": MESSAGES, "max_tokens": 9, "prediction": {"type": "content", "content": "a"}}
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = [*client.chat.completions.create(**asked, stream=True, extra_body={"stream_options": options})]
    unfinished = [chunk for chunk in chunks if chunk.choices and not chunk.choices[0].finish_reason]
    assert unfinished
    assert not any(chunk.usage.completion_tokens_details for chunk in unfinished), "to count takes long in a long text"
    assert chunks[-1].usage.completion_tokens_details.rejected_prediction_tokens is not None


def test_fields_that_clients_send_and_that_change_nothing(server, engine):
    nulls = dict.fromkeys(("n", "stream", "logprobs", "stop", "tools", "functions", "logit_bias", "temperature"))
    ignored = {"user": "u", "store": True, "metadata": {"a": "b"}, "stream_options": {"include_obfuscation": False}}
    body = {"model": "tiny", "messages": MESSAGES, "seed": 3, "max_tokens": 24, **nulls, **ignored}
    answer = httpx.post(server[1] + "/v1/chat/completions", json=body).json()
    assert answer["choices"][0]["message"]["content"] == alone(engine, seed=3).text
    body = {"model": "tiny", "input": PROMPT, "seed": 3, "max_output_tokens": 24, "previous_response_id": None}
    answer = httpx.post(server[1] + "/v1/responses", json={**body, **ignored}).json()
    assert answer["output"][0]["content"][0]["text"] == alone(engine, seed=3).text


def test_a_developer_is_the_system_to_chat_templates(client, engine):
    said = [{"role": "developer", "content": "the dog"}, *MESSAGES]
    answer = client.chat.completions.create(model="tiny", messages=said, seed=3, max_tokens=24)
    assert answer.choices[0].message.content == alone(engine, [{**said[0], "role": "system"}, *MESSAGES], seed=3).text


def test_a_prediction_saves_calls_and_changes_no_text(client, engine):
    words = dict.fromkeys(engine.encode(PROMPT, raw=True), 30.0)  # a text whose tokens can be told from it
    settings = {"temperature": 0.7, "seed": 2}
    expected = alone(engine, max_new_tokens=60, logit_bias=tuple(words.items()), **settings).text

    def ask(**more):
        asked = {"model": "tiny", "messages": MESSAGES, "max_tokens": 60, "logit_bias": words, **settings}
        answer = client.chat.completions.create(**asked, **more, extra_body={"include_metrics": True})
        assert answer.choices[0].message.content == expected
        return answer, answer.model_extra["metrics"]["speculative_decoding"]["mean_acceptance_length"]

    answer, length = ask(prediction={"type": "content", "content": expected})
    details = answer.usage.completion_tokens_details
    assert length > 4 > 2 > ask()[1]
    assert details.accepted_prediction_tokens > 40
    wrong, _ = ask(prediction={"type": "content", "content": [{"type": "text", "text": "a dog sat on a dog"}]})
    assert wrong.usage.completion_tokens_details.rejected_prediction_tokens > 0


def test_a_huge_top_k_is_all_tokens(client, engine):
    answer = client.chat.completions.create(
        model="tiny", messages=MESSAGES, seed=3, max_tokens=24, extra_body={"top_k": 10**30}
    )
    assert answer.choices[0].message.content == alone(engine, seed=3).text


def test_nothing_to_write_is_an_answer(client, engine):
    asked = {"model": "tiny", "prompt": PROMPT, "max_tokens": 0}
    answer = client.completions.create(**asked, echo=True)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == (PROMPT, "length")
