"""What the server refuses, and by which words; keys, logs, and the small routes."""

# ruff: noqa: F811  fixtures

import json

import httpx
import openai
import pytest

import saltus
from saltus.server.bodies import MAX_BODY_BYTES
from saltus.server.protocol import Message
from saltus.server.translation import conversation
from tiny_server import JSON, MESSAGES, PROMPT, alone, client, engine, server, serving  # noqa: F401

TOOLS = [{"type": "function", "function": {"name": "a"}}]


def test_a_base_url_with_or_without_v1_is_named_where_it_is_wrong(server):
    for path, words in (
        ("/chat/completions", "/v1/chat/completions is meant; end the client's base URL with /v1"),
        ("/v1/v1/messages", "/v1/messages is meant; leave /v1 out of the client's base URL"),
        ("/v1/embeddings", "/openapi.json lists what there is"),
    ):
        answer = httpx.post(server[1] + path, json={})
        assert answer.status_code == 404
        assert answer.json()["error"]["message"] == f"there is no {path}; {words}"


@pytest.mark.parametrize(
    ("changed", "field"),
    [
        ({"functions": [{"name": "look"}]}, "functions"),
        ({"web_search_options": {"search_context_size": "low"}}, "web_search_options"),
        ({"repeat_last_n": 64, "repeat_penalty": 1.1}, "repeat_last_n"),
        ({"penalty_last_n": 64, "presence_penalty": 1}, "penalty_last_n"),
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
        ({"speculative": {"max_draft_tokens": 9999}}, "speculative.max_draft_tokens"),
        ({"speculative": {"method": "lookup+lookup"}}, "speculative.method"),
        ({"speculative": {"method": "lookup+" * 100_000}}, "speculative.method"),
        ({"prediction": {"content": "\ud800"}}, "prediction"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages.0.content.0.type"),
        ({"top_p": -0.1}, "top_p"),
        ({"seed": -(2**63) - 1}, "seed"),
        ({"seed": 2**63}, "seed"),
        ({"logit_bias": {"5": 1e39}}, "logit_bias"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"min_tokens": 5}, "min_tokens"),
        ({"stop_token_ids": [10**6]}, "stop_token_ids"),
        ({"stop_token_ids": [5] * 1025}, "stop_token_ids"),
        ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": [5]}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"tokenizer": 1}}, "chat_template_kwargs"),
        ({"add_generation_prompt": True, "continue_final_message": True}, "add_generation_prompt"),
        ({"reasoning_effort": "enormous"}, "reasoning_effort"),
        ({"reasoning_format": "xml"}, "reasoning_format"),
        ({"mirostat": 2}, "mirostat"),
        ({"use_beam_search": True}, "use_beam_search"),
        ({"include_stop_str_in_output": True}, "include_stop_str_in_output"),
        ({"stop": ""}, "stop"),
        ({"stop": ["a"] * 65}, "stop"),
        ({"stop": "a" * 257}, "stop"),
        ({"stop": ["a", "b" * 257]}, "stop"),
        ({"n": 0}, "n"),
        ({"n": "2"}, "n"),
        ({"temperature": "0.7"}, "temperature"),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"logit_bias": {"5": "1"}}, "logit_bias.5"),
        ({"stop_token_ids": ["5"]}, "stop_token_ids"),
        ({"speculative": {"max_draft_tokens": "4"}}, "speculative.max_draft_tokens"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"top_logprobs": 30, "logprobs": True}, "top_logprobs"),
        ({"max_tokens": -2}, "max_tokens"),
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
    assert (error["param"] or "").startswith(field), error
    assert "\n" not in error["message"]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {"messages": [{"role": "user", "content": {"type": "text"}}]},
            "messages.0.content: Input should be a valid s",
        ),
        ({"messages": None}, "messages is missing; add it"),
        ({"messages": [{"content": "a"}]}, "messages.0.role is missing; add it"),
        ({"messages": []}, "messages has 0 items, but needs 1 or more; add some"),
        ({"messages": [5]}, "messages.0: Input should be a valid object"),
        ({"response_format": {}}, "response_format: the field 'type' is missing"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs has several forms; give one"),
        ({"tools": [{"type": "mcp"}]}, "tools.0.type: Input should be 'function'"),
        (
            {"response_format": {"type": "xml"}},
            "response_format.type: 'xml' is unknown; choose from 'text', 'json_object', 'json_schema'",
        ),
        (
            {"messages": [{"role": "usr", "content": "a"}]},
            "messages.0.role: 'usr' is unknown; choose from system, developer, user, assistant, tool, function",
        ),
        ({"messages": [{"role": "user", "text": "a"}]}, "a message of the role 'user' has no content; add one"),
        (
            {"tools": TOOLS, "tool_choice": {"type": "tool"}},
            "tool_choice.type: Input should be 'function' or 'allowed_tools'",
        ),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "name": "a"}}, "tool_choice.function is missing; add it"),
    ],
)
def test_a_refusal_says_what_is_wrong_in_words_of_json(server, changed, message):
    body = {"model": "tiny", "messages": MESSAGES, "max_tokens": 4, **changed}
    error = httpx.post(server[1] + "/v1/chat/completions", json=body).json()["error"]
    assert error["message"].startswith(message), error
    if [*changed] == ["tools"]:
        message = message.replace("Input should be", "'mcp' is unknown; choose from")
        error = httpx.post(server[1] + "/v1/responses", json={"input": "a", **changed}).json()["error"]
        assert error["message"].startswith(message), error


@pytest.mark.parametrize(
    ("item", "param", "message"),
    [
        ({"role": "usr", "content": "a"}, "input.0.role", "input.0.role: Input should be 'user', "),
        ({"type": "image"}, "input.0.type", "input.0.type: Input should be 'function_call' or 'custom_tool_call'"),
        ({"type": "function_call", "call_id": "1", "name": "a", "arguments": {}}, "input.0.arguments",
         "input.0.arguments: Input should be a valid string"),
    ],
)  # fmt: skip
def test_a_refusal_is_about_the_form_that_was_meant(server, item, param, message):
    error = httpx.post(server[1] + "/v1/responses", json={"input": [item]}).json()["error"]
    assert (error["param"], error["message"][: len(message)]) == (param, message)


def test_a_role_that_the_chat_template_names_is_known():
    template = "{% if messages[0]['role'] == \"critic\" %}{% endif %}"
    assert conversation([Message(role="critic", content="a")], template) == [{"role": "critic", "content": "a"}]


def test_a_choice_of_a_function_that_is_no_tool_is_named(server):
    body = {"messages": MESSAGES, "tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "b"}}}
    error = httpx.post(server[1] + "/v1/chat/completions", json=body).json()["error"]
    assert (error["param"], error["message"]) == ("tool_choice", "tool_choice names 'b', which is not among the tools")


def test_a_number_that_is_too_long_is_named(server):
    body = b'{"messages": [], "seed": ' + b"1" * 5000 + b"}"
    error = httpx.post(server[1] + "/v1/chat/completions", content=body, headers=JSON).json()["error"]
    assert error["message"] == "a number in the body has more than 4,300 digits; shorten it"


def test_likeliest_tokens_without_log_probabilities_are_refused(server):
    error = httpx.post(server[1] + "/v1/responses", json={"input": "a", "top_logprobs": 3}).json()["error"]
    assert (error["param"], error["message"]) == (
        "top_logprobs", "top_logprobs needs include: ['message.output_text.logprobs']"
    )  # fmt: skip


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
    assert httpx.post(url + "/detokenize", json={"tokens": tokens["tokens"]}).json()["prompt"] == PROMPT
    assert httpx.post(url + "/tokenize", json={"messages": MESSAGES}).json()["tokens"] == engine.encode(MESSAGES)
    assert httpx.post(url + "/detokenize", json={"tokens": [10**9]}).status_code == 400
    bare = {"prompt": PROMPT, "add_special_tokens": False, "return_token_strs": True}
    found = httpx.post(url + "/tokenize", json=bare).json()
    assert found["token_strs"] == engine.tokenizer.convert_ids_to_tokens(found["tokens"])
    for special in (True, False):
        body = json.dumps({"prompt": "\ud800", "add_special_tokens": special})
        answer = httpx.post(url + "/tokenize", content=body, headers=JSON)
        assert (answer.status_code, "surrogate" in answer.text) == (400, True), answer.text


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
    caplog.set_level("INFO", logger="saltus.server")
    with serving(engine, log_requests=log_requests) as (_, url):
        asked = {"model": "tiny", "prompt": "the dog", "max_tokens": 2}
        httpx.post(url + "/v1/completions", json=asked, headers={"X-Request-Id": "mine"})
    line = json.loads(caplog.messages[-1])
    assert (line["request_id"], line["path"], line["status"]) == ("mine", "/v1/completions", 200)
    assert ("body" in line) == log_requests
    assert not log_requests or json.loads(line["body"]) == asked


def test_a_fault_is_an_error_object_with_an_id_and_says_that_the_connection_ends(engine, monkeypatch, caplog):
    caplog.set_level("INFO", logger="saltus.server")
    with serving(engine) as (service, url):
        monkeypatch.setattr(service, "check_model", lambda _: 1 / 0)
        answer = httpx.post(url + "/detokenize", json={"tokens": [5]}, headers={"X-Request-Id": "mine"})
        assert (answer.status_code, answer.json()["error"]["type"]) == (500, "server_error")
        assert (answer.headers["connection"], answer.headers["x-request-id"]) == ("close", "mine")
    assert json.loads(caplog.messages[-1])["status"] == 500


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


def test_a_method_without_its_draft_model_is_refused_before_a_stream_begins(tiny_folder):
    with serving(saltus.load(str(tiny_folder()), "lookup")) as (_, url):
        body = {"prompt": "the", "stream": True, "speculative": {"method": "small_model"}}
        answer = httpx.post(f"{url}/v1/completions", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "speculative.method"


def test_bodies_have_a_limit(server):
    answer = httpx.post(server[1] + "/v1/completions", content=b" " * (MAX_BODY_BYTES + 1))
    assert answer.status_code == 413
    pieces = (b" " * 2**20 for _ in range(MAX_BODY_BYTES // 2**20 + 1))  # of a length that is not told before
    answer = httpx.post(server[1] + "/v1/completions", content=pieces, headers=JSON)
    assert answer.status_code == 413, answer.text


def test_a_prompt_that_is_too_long_is_refused(client):
    with pytest.raises(openai.BadRequestError, match="reads at most"):
        client.completions.create(model="tiny", prompt="cat " * 5000, max_tokens=4)


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
