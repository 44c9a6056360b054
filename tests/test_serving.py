"""The server: OpenAI's client against it, the same texts at any load, and clients that do harm."""

import concurrent.futures
import json
import logging
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager

import httpx
import openai
import pytest
import torch
import uvicorn
from typer.testing import CliRunner

import saltus
from conftest import TEMPLATE
from saltus.cli.app import app
from saltus.serving import batching
from saltus.serving.app import MAX_BODY_BYTES, make_app
from saltus.serving.batching import Limits
from saltus.serving.service import Service

PROMPT = "the cat sat on the mat and the cat sat on the log and the"
JSON = {"content-type": "application/json"}
MESSAGES = [{"role": "user", "content": PROMPT}]


@contextmanager
def serving(engine, limits=None, remember_bytes=0, **settings):
    """A service, and the address that it listens on."""
    service = Service(engine, "tiny", limits or Limits(), remember_bytes)
    server = uvicorn.Server(uvicorn.Config(make_app(service, **settings), port=0, log_level="error"))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            time.sleep(0.01)
        yield service, f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()


@pytest.fixture(scope="module")
def engine(tiny_folder, partners) -> saltus.Engine:
    made = saltus.load(str(tiny_folder()), "lookup", options=partners, adaptive=False)
    made.tokenizer.chat_template = TEMPLATE
    return made


@pytest.fixture(scope="module")
def server(engine):
    with serving(engine) as (service, url):
        yield service, url


@pytest.fixture
def client(server) -> openai.OpenAI:
    return openai.OpenAI(base_url=server[1] + "/v1", api_key="any", max_retries=0)


def alone(engine, prompt=MESSAGES, **settings) -> saltus.Generation:
    settings = {"temperature": 1.0, "max_new_tokens": 24, **settings}
    return engine.generate(prompt, method="plain", **settings)


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
    assert logprobs == [text.logprobs for text in texts]


@pytest.mark.parametrize("stream", [False, True])
def test_offsets_say_where_each_token_stands_in_the_text(client, stream):
    words = {str(token): 100 for token in range(97, 105)}  # letters, each of a character
    asked = {"prompt": PROMPT, "seed": 1, "max_tokens": 8, "echo": True, "logprobs": 0, "logit_bias": words}
    answer = client.completions.create(model="tiny", stream=stream, **asked)
    choices = [part.choices[0] for part in (answer if stream else [answer])]
    text = "".join(choice.text for choice in choices)
    offsets = [
        (offset, token) for choice in choices if choice.logprobs is not None
        for offset, token in zip(choice.logprobs.text_offset, choice.logprobs.tokens, strict=True)
    ]  # fmt: skip
    assert len(offsets) == 8
    for offset, token in offsets:
        assert text[offset:].startswith(token)
    assert offsets[0][0] == len(PROMPT)


def test_the_likeliest_tokens_of_each_position(client, engine):
    settings = {"model": "tiny", "temperature": 0.0, "max_tokens": 6}
    chat = client.chat.completions.create(messages=MESSAGES, logprobs=True, top_logprobs=3, **settings)
    for entry in chat.choices[0].logprobs.content:
        assert len(entry.top_logprobs) == 3
        assert (entry.top_logprobs[0].token, entry.top_logprobs[0].logprob) == (entry.token, entry.logprob)
    assert len(chat.choices[0].logprobs.content) == 6
    text = client.completions.create(prompt=PROMPT, logprobs=2, **settings).choices[0].logprobs
    assert [max(likely.values()) for likely in text.top_logprobs] == text.token_logprobs


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
    narrow = metrics({"method": "jacobi+lookup", "budget": 1})
    assert 0 < narrow["num_draft_tokens"] <= narrow["num_calls"]
    assert metrics({"budget": 0})["num_draft_tokens"] == 0


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


@pytest.mark.parametrize(
    ("changed", "field"),
    [
        ({"functions": []}, "functions"),
        ({"temperature": 3}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"frequency_penalty": 5}, "frequency_penalty"),
        ({"logit_bias": {"five": 3}}, "logit_bias"),
        ({"logit_bias": {"-5": 3}}, "logit_bias"),
        ({"logit_bias": {"9999999": 3}}, "logit_bias"),
        ({"logit_bias": {"5": float("nan")}}, "logit_bias"),
        ({"temperature": float("nan")}, "temperature"),
        ({"min_p": float("nan")}, "min_p"),
        ({"repetition_penalty": float("inf")}, "repetition_penalty"),
        ({"speculative": {"budget": 9999}}, "speculative.budget"),
        ({"prediction": {"content": "\ud800"}}, "prediction"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages.0.content.0.type"),
        ({"top_p": 0}, "top_p"),
        ({"seed": -1}, "seed"),
        ({"seed": 2**64}, "seed"),
        ({"stop": ""}, "stop"),
        ({"n": 0}, "n"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"top_logprobs": 30, "logprobs": True}, "top_logprobs"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages"),
        ({"stream_options": {"include": True}}, "stream_options"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(server, changed, field):
    body = {"model": "tiny", "messages": MESSAGES, "max_tokens": 4, **changed}
    answer = httpx.post(server[1] + "/v1/chat/completions", content=json.dumps(body), headers=JSON)
    error = answer.json()["error"]
    assert (answer.status_code, error["type"]) == (400, "invalid_request_error"), error
    assert (error["param"] or "").startswith(field) or "surrogate" in error["message"], error
    assert "\n" not in error["message"]


@pytest.mark.parametrize("body", [b"", b"{", b"[" * 100_000, b"null", b'{"messages": 5}', b"\xff\xfe"])
def test_broken_bodies_are_refused_and_hurt_nobody(server, client, body):
    answer = httpx.post(server[1] + "/v1/chat/completions", content=body, headers=JSON)
    assert answer.status_code == 400
    assert "JSON" in answer.json()["error"]["message"] or answer.json()["error"]["param"], answer.text
    assert client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=2).usage.completion_tokens == 2


def test_another_model_is_not_found(client):
    with pytest.raises(openai.NotFoundError, match="'tiny' is"):
        client.chat.completions.create(model="gpt-9", messages=MESSAGES)
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"


def test_texts_and_tokens_are_translated(server, engine):
    url = server[1]
    tokens = httpx.post(url + "/tokenize", json={"prompt": PROMPT}).json()
    assert tokens["tokens"] == engine.encode(PROMPT, raw=True)
    assert httpx.post(url + "/detokenize", json={"tokens": tokens["tokens"]}).json() == {"prompt": PROMPT}
    assert httpx.post(url + "/tokenize", json={"messages": MESSAGES}).json()["tokens"] == engine.encode(MESSAGES)
    assert httpx.post(url + "/detokenize", json={"tokens": [10**9]}).status_code == 400
    bare = {"prompt": PROMPT, "add_special_tokens": False, "return_token_strs": True}
    found = httpx.post(url + "/tokenize", json=bare).json()
    assert found["token_strs"] == engine.tokenizer.convert_ids_to_tokens(found["tokens"])
    for special in (True, False):
        body = json.dumps({"prompt": "\ud800", "add_special_tokens": special})
        answer = httpx.post(url + "/tokenize", content=body, headers=JSON)
        assert (answer.status_code, "surrogate" in answer.text) == (400, True), answer.text


def test_a_huge_top_k_is_all_tokens(client, engine):
    answer = client.chat.completions.create(
        model="tiny", messages=MESSAGES, seed=3, max_tokens=24, extra_body={"top_k": 10**30}
    )
    assert answer.choices[0].message.content == alone(engine, seed=3).text


def test_pages_of_others_may_not_use_the_server(server):
    asked = {"origin": "http://elsewhere", "access-control-request-method": "POST"}
    for answer in (
        httpx.options(server[1] + "/v1/chat/completions", headers=asked),
        httpx.get(server[1] + "/v1/models", headers=asked),
    ):
        assert not [name for name in answer.headers if name.startswith("access-control")]
    body = json.dumps({"model": "tiny", "messages": MESSAGES, "max_tokens": 2})  # what a page may send without asking
    plain = httpx.post(server[1] + "/v1/chat/completions", content=body, headers={"content-type": "text/plain"})
    assert plain.status_code == 400


@pytest.mark.parametrize("log_requests", [False, True])
def test_prompts_are_in_the_log_only_if_asked_for(engine, caplog, log_requests):
    caplog.set_level("INFO", logger="saltus.serving")
    with serving(engine, log_requests=log_requests) as (_, url):
        asked = {"model": "tiny", "prompt": "the dog", "max_tokens": 2}
        httpx.post(url + "/v1/completions", json=asked, headers={"X-Request-Id": "mine"})
    line = json.loads(caplog.messages[-1])
    assert (line["request_id"], line["path"], line["status"]) == ("mine", "/v1/completions", 200)
    assert ("body" in line) == log_requests
    assert not log_requests or json.loads(line["body"]) == asked


def test_a_fault_is_an_error_object(engine, monkeypatch):
    with serving(engine) as (service, url):
        monkeypatch.setattr(service, "check_model", lambda _: 1 / 0)
        answer = httpx.post(url + "/detokenize", json={"tokens": [5]})
        assert (answer.status_code, answer.json()["error"]["type"]) == (500, "server_error")


def test_keys_are_asked_for_where_the_server_has_some(engine):
    with serving(engine, api_keys=["one", "two"]) as (_, url):
        asked = {"model": "tiny", "messages": MESSAGES, "max_tokens": 2}
        for key in ("one", "two"):
            openai.OpenAI(base_url=url + "/v1", api_key=key).chat.completions.create(**asked)
        for headers in ({}, {"Authorization": "Bearer three"}, {"Authorization": "one"}, {"Authorization": "Bearer é"}):
            encoded = {name: value.encode() for name, value in headers.items()}
            answer = httpx.post(url + "/v1/chat/completions", json=asked, headers=encoded)
            assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")
        assert httpx.get(url + "/health").status_code == 200


def test_every_answer_has_a_request_id(server):
    assert httpx.get(server[1] + "/health", headers={"X-Request-Id": "mine"}).headers["x-request-id"] == "mine"
    assert len(httpx.get(server[1] + "/nowhere").headers["x-request-id"]) == 32


def test_bodies_have_a_limit(server):
    answer = httpx.post(server[1] + "/v1/completions", content=b" " * (MAX_BODY_BYTES + 1))
    assert answer.status_code == 413
    pieces = (b" " * 2**20 for _ in range(MAX_BODY_BYTES // 2**20 + 1))  # of a length that is not told before
    answer = httpx.post(server[1] + "/v1/completions", content=pieces, headers=JSON)
    assert answer.status_code == 413, answer.text


def test_a_prompt_that_is_too_long_is_refused(client):
    with pytest.raises(openai.BadRequestError, match="reads at most"):
        client.completions.create(model="tiny", prompt="cat " * 5000, max_tokens=4)


def mixed_request(engine, number: int) -> tuple[dict, str]:
    """A request of some kind, and the text that it has alone."""
    method = (None, "plain", "lookup", "jacobi+lookup")[number % 4]
    sampling = ({"temperature": 0.0}, {"temperature": 0.7, "top_k": 20}, {"temperature": 1.0, "top_p": 0.9})[number % 3]
    prompt = f"{PROMPT} {'and the log ' * (number % 7)}{number}"
    asked = {"model": "tiny", "prompt": prompt, "seed": number, "max_tokens": 8 + number % 25, **sampling}
    extra = {} if method is None else {"speculative": {"method": method}}
    expected = engine.generate(
        prompt, raw=True, seed=number, method="plain", max_new_tokens=asked["max_tokens"], **sampling
    )
    return {**asked, **extra, "stream": number % 2 == 0}, expected.text


def written(url: str, body: dict) -> str:
    if not body["stream"]:
        return httpx.post(url + "/v1/completions", json=body, timeout=120).json()["choices"][0]["text"]
    with httpx.stream("POST", url + "/v1/completions", json=body, timeout=120) as answer:
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    assert lines[-1] == "[DONE]"
    return "".join(choice["text"] for line in lines[:-1] for choice in json.loads(line)["choices"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "requests"), [(torch.float32, 60), (torch.bfloat16, 30)], ids=["float32", "bfloat16"]
)
def test_texts_of_many_clients_at_once_are_those_of_each_alone(tiny_folder, partners, dtype, requests):
    engine = saltus.load(str(tiny_folder(dtype=dtype)), "lookup", options=partners, adaptive=False)
    assert engine.network.model.dtype == dtype
    asked = [mixed_request(engine, number) for number in range(requests)]
    with serving(engine, Limits(max_batch=8)) as (service, url), concurrent.futures.ThreadPoolExecutor(20) as pool:
        found = list(pool.map(lambda one: written(url, one[0]), asked))
        assert found == [text for _, text in asked]
        assert (service.batcher.num_open, service.batcher.running) == (0, [])


def test_a_long_prompt_is_read_piece_by_piece(engine, monkeypatch):
    monkeypatch.setattr(batching, "PREFILL_ROWS", 50)
    prompt = "the cat sat on the mat " * 30
    expected = alone(engine, prompt, raw=True, seed=5).text
    with serving(engine) as (_, url):
        body = {"model": "tiny", "prompt": prompt, "seed": 5, "max_tokens": 24}
        assert len(engine.encode(prompt, raw=True)) > 150
        for _ in range(2):  # the second time from the prefix cache
            answer = httpx.post(url + "/v1/completions", json=body).json()
            assert answer["choices"][0]["text"] == expected


def test_a_stream_waits_for_one_piece_of_a_prompt_at_a_time(engine, monkeypatch):
    monkeypatch.setattr(batching, "PREFILL_ROWS", 20)
    happened = []
    with serving(engine) as (service, url), concurrent.futures.ThreadPoolExecutor(1) as pool:
        read, batcher = service.batcher._read_piece, service.batcher
        monkeypatch.setattr(batcher, "_read_piece", lambda job: (happened.append("piece"), read(job)))
        body = {"model": "tiny", "prompt": "the", "max_tokens": 200, "ignore_eos": True, "speculative": False}
        with httpx.stream("POST", url + "/v1/completions", json={**body, "stream": True}) as answer:
            lines = answer.iter_lines()
            next(lines)
            deliver = batcher.running[0].deliver
            batcher.running[0].deliver = lambda part: (happened.append("text"), deliver(part))
            long = {**body, "prompt": "a dog sat on the mat " * 30, "max_tokens": 1}
            other = pool.submit(httpx.post, url + "/v1/completions", json=long)
            assert other.result().status_code == 200
            assert happened.count("piece") > 10
            assert "piece piece" not in " ".join(happened[: len(happened) - happened[::-1].index("text")])


def test_a_client_that_vanishes_frees_its_place(engine):
    with serving(engine, Limits(max_batch=1)) as (service, url):
        body = {"model": "tiny", "prompt": "the", "max_tokens": 400, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", url + "/v1/completions", json=body) as answer:
            next(answer.iter_lines())
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(url + "/v1/completions", json={**body, "stream": False}, timeout=0.2)
        until = time.monotonic() + 5
        while service.batcher.num_open and time.monotonic() < until:
            time.sleep(0.01)
        assert service.batcher.num_open == 0


def test_a_full_queue_says_so_at_once(engine):
    with serving(engine, Limits(max_batch=1, max_queue=1)) as (_, url):
        body = {"model": "tiny", "prompt": "the", "max_tokens": 4, "n": 3}
        answer = httpx.post(url + "/v1/completions", json=body)
        assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")
        assert httpx.post(url + "/v1/completions", json={**body, "n": 2}).status_code == 200


def test_a_text_that_cannot_fit_is_refused(engine):
    with serving(engine, Limits(max_cached_bytes=1000)) as (_, url):
        answer = httpx.post(url + "/v1/completions", json={"model": "tiny", "prompt": "the", "max_tokens": 100})
        assert answer.status_code == 400
        assert "memory" in answer.json()["error"]["message"]


def test_a_call_that_fails_is_an_error_for_its_texts_alone(engine, monkeypatch):
    with serving(engine) as (service, url):
        body = {"model": "tiny", "prompt": "the", "max_tokens": 4}
        with monkeypatch.context() as broken:
            broken.setattr(type(engine.network), "forward", lambda *_: 1 / 0)
            assert httpx.post(url + "/v1/completions", json=body).status_code == 500
        assert httpx.post(url + "/v1/completions", json=body).status_code == 200
        assert service.batcher.num_open == 0


def test_a_request_that_cannot_be_decoded_hurts_no_other(engine):
    good = {"model": "tiny", "prompt": PROMPT, "max_tokens": 40, "seed": 1}
    bad = json.dumps({**good, "logit_bias": {"5": "BIAS"}}).replace('"BIAS"', "1e999")  # an infinite logit
    expected = alone(engine, PROMPT, raw=True, seed=1, max_new_tokens=40).text
    with serving(engine) as (service, url), concurrent.futures.ThreadPoolExecutor(8) as pool:
        others = [pool.submit(httpx.post, url + "/v1/completions", json=good) for _ in range(6)]
        poisoned = [pool.submit(httpx.post, url + "/v1/completions", content=bad, headers=JSON) for _ in range(3)]
        assert [answer.result().json()["choices"][0]["text"] for answer in others] == [expected] * 6
        for answer in poisoned:
            assert answer.result().status_code == 400
            assert "infinite logits" in answer.result().json()["error"]["message"]
        assert service.batcher.num_open == 0


def test_nothing_to_write_is_an_answer(client, engine):
    asked = {"model": "tiny", "prompt": PROMPT, "max_tokens": 0}
    answer = client.completions.create(**asked, echo=True)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == (PROMPT, "length")


def test_metrics_have_vllms_names(server, client):
    same = {"269": 100}  # always this token, so that lookup's drafts are accepted
    client.chat.completions.create(model="tiny", messages=MESSAGES, temperature=0.0, max_tokens=24, logit_bias=same)
    page = httpx.get(server[1] + "/metrics").text
    for name in (
        "spec_decode_num_drafts_total", "spec_decode_num_draft_tokens_total", "spec_decode_num_accepted_tokens_total",
        "num_requests_running", "num_requests_waiting", "time_to_first_token_seconds_count", "prompt_tokens_total",
        "inter_token_latency_seconds_count", "e2e_request_latency_seconds_count", "generation_tokens_total",
        "kv_cache_usage_perc", "prefix_cache_queries_total", "prefix_cache_hits_total",
    ):  # fmt: skip
        assert f'vllm:{name}{{model_name="tiny"}}' in page, name
    assert 'vllm:spec_decode_num_accepted_tokens_per_pos_total{model_name="tiny",position="0"}' in page
    assert 'vllm:request_success_total{finished_reason="length",model_name="tiny"}' in page


def test_texts_without_a_limit_fit_the_memory(tiny_folder, monkeypatch):
    apps = []
    monkeypatch.setattr(uvicorn.Server, "run", lambda server: apps.append(server.config.app))
    monkeypatch.setattr(logging, "basicConfig", lambda **_: None)
    command = ["serve", "-m", str(tiny_folder(max_position_embeddings=65536)), "--method", "plain", "--kv-memory"]
    found = [CliRunner().invoke(app, [*command, memory]).output for memory in ("0.001", "4")]
    assert ["which fit into --kv-memory" in " ".join(output.split()) for output in found] == [True, False], found
    assert len(apps) == 2


@pytest.mark.slow
@pytest.mark.parametrize("kind", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "Ctrl-C"])
def test_a_signal_lets_what_runs_finish_and_a_second_one_stops(tiny_folder, kind):
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    command = [sys.executable, "-c", "from saltus.cli import main; main()", "serve", "-m", str(tiny_folder())]
    url = f"http://127.0.0.1:{port}"
    body = {"prompt": "the", "max_tokens": 1000, "ignore_eos": True, "stream": True, "speculative": False}
    for signals in (1, 2):
        started = subprocess.Popen(
            [*command, "--method", "plain", "--port", str(port)], stderr=subprocess.PIPE, text=True
        )
        try:
            while "http://" not in started.stderr.readline():
                assert started.poll() is None
            answers = httpx.HTTPTransport(retries=8)  # uvicorn listens soon after the line
            with (
                httpx.Client(transport=answers) as http,
                http.stream("POST", f"{url}/v1/completions", json=body) as stream,
            ):
                lines = stream.iter_lines()
                next(lines)
                started.send_signal(kind)
                if signals == 1:
                    assert [line for line in lines if line][-1] == "data: [DONE]"
                else:
                    time.sleep(0.3)
                    started.send_signal(kind)
                    with pytest.raises(httpx.HTTPError):
                        list(lines)
            assert started.wait(20) in (0, -kind)
        finally:
            started.kill()
            started.stderr.close()
