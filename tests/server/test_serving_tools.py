"""Tools over HTTP, as agents use them: many at once, calls that are cut off, and what templates refuse."""

# ruff: noqa: F811  fixtures

import json
import runpy
import shutil
import sys
from pathlib import Path

import httpx
import jsonschema
import openai
import pytest
from agent_tools import agent_tools
from test_grammar import TOOLS
from test_tool_messages import ALTERNATING, SHORT_IDS
from transformers import AutoTokenizer

import saltus
from saltus.engine.json_schemas import OPTIONS, followed_schema
from saltus.server.responses import response_messages
from saltus.server.responses_request import ResponsesRequest
from tiny_models import TEMPLATE
from tiny_server import JSON, MESSAGES, client, server, serving  # noqa: F401


@pytest.fixture(scope="module")
def engine(tiny_folder, partners) -> saltus.Engine:
    """With room for forty tools, a byte a token."""
    made = saltus.load(str(tiny_folder(max_position_embeddings=2**15)), "lookup", options=partners, adaptive=False)
    made.tokenizer.chat_template = TEMPLATE
    return made


@pytest.fixture
def template(engine):
    """Sets the chat template for a test."""
    yield lambda text: setattr(engine.tokenizer, "chat_template", text)
    engine.tokenizer.chat_template = TEMPLATE


def streamed(chunks) -> tuple[str, list[str], str]:
    """Content, names of calls, and finish reason of a streamed chat completion."""
    choices = [chunk.choices[0] for chunk in chunks if chunk.choices]
    calls = [call.function.name for choice in choices for call in choice.delta.tool_calls or ()]
    return "".join(choice.delta.content or "" for choice in choices), calls, choices[-1].finish_reason


@pytest.mark.parametrize("length", [1, 6, 14, 40])
def test_a_call_that_is_cut_off_is_no_text(client, length):
    asked = {"model": "tiny", "messages": MESSAGES, "max_tokens": length, "tools": TOOLS[:1], "tool_choice": "required"}
    choice = client.chat.completions.create(**asked).choices[0]
    assert (choice.message.content, choice.message.tool_calls, choice.finish_reason) == ("", None, "length")
    assert streamed(client.chat.completions.create(**asked, stream=True)) == ("", [], "length")
    flat = [{"type": "function", **TOOLS[0]["function"]}]
    response = client.responses.create(
        model="tiny", input="a", tools=flat, tool_choice="required", max_output_tokens=length
    )
    assert (response.output_text, response.status) == ("", "incomplete")


def test_an_agents_list_of_tools(client):
    tools = agent_tools()
    assert len(tools) == 40
    asked = {"model": "tiny", "messages": MESSAGES, "tools": tools, "max_tokens": 400, "temperature": 1.0}
    for seed in range(3):
        answer = client.chat.completions.create(
            **asked, seed=seed, tool_choice="required", parallel_tool_calls=False
        ).choices[0]
        for call in answer.message.tool_calls or ():
            function = next(one["function"] for one in tools if one["function"]["name"] == call.function.name)
            followed = followed_schema(function["parameters"], strict=False)
            jsonschema.validate(json.loads(call.function.arguments), {**followed, OPTIONS: None})
    asked |= {"max_tokens": 8, "seed": 0}
    assert client.chat.completions.create(**asked).choices[0].finish_reason
    text, _, reason = streamed(client.chat.completions.create(**asked, stream=True))
    assert (bool(text), reason) == (True, "length")


def test_a_schema_that_no_grammar_follows_names_tool_and_keyword(server):
    for route, wrap in (("chat/completions", lambda one: {"type": "function", "function": one}),
                        ("responses", lambda one: {"type": "function", **one})):  # fmt: skip
        body = {"messages": MESSAGES, "max_tokens": 2} if "chat" in route else {"input": "a", "max_output_tokens": 2}
        parameters = {"properties": {"x": {"type": "array", "uniqueItems": True}}}
        tools = [wrap({"name": "good"}), wrap({"name": "other", "parameters": parameters})]
        ask = lambda: httpx.post(f"{server[1]}/v1/{route}", headers=JSON, timeout=100, json={**body, "tools": tools})  # noqa: B023, E731
        assert ask().status_code == 200
        (tools[1].get("function") or tools[1])["strict"] = True
        error = ask().json()["error"]
        assert error["param"] == "tools"
        assert "'other'" in error["message"]
        assert "uniqueItems" in error["message"]


@pytest.mark.parametrize("seed", range(3))
def test_an_answer_with_tools_and_a_format_is_calls_or_follows_it(client, seed):
    schema = {
        "type": "object",
        "properties": {"x": {"type": "integer"}},
        "required": ["x"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    asked = {
        "model": "tiny",
        "messages": MESSAGES,
        "max_tokens": 400,
        "tools": TOOLS[:1],
        "seed": seed,
        "temperature": 1.5,
    }
    choice = client.chat.completions.create(**asked, response_format=form).choices[0]
    if choice.finish_reason == "stop":
        jsonschema.validate(json.loads(choice.message.content), schema)
    else:
        assert choice.finish_reason == "length" or choice.message.tool_calls
    required = client.chat.completions.create(**asked, response_format=form, tool_choice="required").choices[0]
    assert required.finish_reason == "length" or required.message.tool_calls


@pytest.mark.parametrize(
    "marker", ["[TOOL_CALLS]", "to=functions.", "<|tool_call>", "<|tool_call|>", "<｜tool▁calls▁begin｜>", "<TOOLCALL>"]
)
def test_a_template_whose_calls_are_not_read_gets_tools_in_words(engine, template, marker):
    template("{{ tools }}" + TEMPLATE + "{#" + marker + "#}")
    words = engine.tokenizer.decode(engine.encode(MESSAGES, tools=TOOLS[:1]))
    assert "<tool_call>" in words
    assert "[{'type'" not in words, "the template itself writes none"


def test_arguments_in_tags_arrive_as_json(client, template):
    """As Qwen3-Coder's and Qwen3.5's."""
    template("{{ tools }}" + TEMPLATE + "{# <tool_call><function=a><parameter=b> #}")
    asked = {"model": "tiny", "messages": MESSAGES, "max_tokens": 400, "tools": TOOLS[:1], "tool_choice": "required"}
    asked |= {"temperature": 1.0, "parallel_tool_calls": False}
    ended = 0
    for seed in range(4):
        choice = client.chat.completions.create(**asked, seed=seed).choices[0]
        assert choice.message.content in ("", None)
        for call in choice.message.tool_calls or ():
            jsonschema.validate(json.loads(call.function.arguments), TOOLS[0]["function"]["parameters"])
            ended += 1
        _, calls, reason = streamed(client.chat.completions.create(**asked, seed=seed, stream=True))
        assert (len(calls), reason) == (len(choice.message.tool_calls or ()), choice.finish_reason)
    assert ended


def test_a_form_of_an_answer_is_strict_if_asked_to_be(server):
    schema = {"type": "object", "properties": {"x": {"type": "string", "format": "path"}}}
    for strict, status in ((True, 400), (False, 200), (None, 200)):
        form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema, "strict": strict}}
        body = {"messages": MESSAGES, "response_format": form, "max_tokens": 4}
        answer = httpx.post(f"{server[1]}/v1/chat/completions", headers=JSON, timeout=100, json=body)
        assert answer.status_code == status
        assert ("path" in answer.text) == (status == 400)
        form = {"type": "json_schema", **form["json_schema"]}
        body = {"input": "a", "text": {"format": form}, "max_output_tokens": 4}
        assert httpx.post(f"{server[1]}/v1/responses", headers=JSON, timeout=100, json=body).status_code == status


@pytest.mark.parametrize("text", [SHORT_IDS, ALTERNATING], ids=["ids", "alternating"])
def test_a_conversation_goes_on_with_the_calls_of_an_answer(client, template, text):
    template(text)
    asked = {"model": "tiny", "tools": TOOLS[:1], "seed": 1, "max_tokens": 400}
    messages = [{"role": "system", "content": "Be brief."}, *MESSAGES]
    answer = client.chat.completions.create(messages=messages, tool_choice="required", **asked).choices[0].message
    results = [{"role": "tool", "tool_call_id": call.id, "content": "a cat"} for call in answer.tool_calls]
    messages = [*messages, answer.model_dump(exclude_none=True), *results, *MESSAGES]
    assert client.chat.completions.create(messages=messages, **{**asked, "max_tokens": 4}).choices[0].finish_reason


def test_calls_in_openais_older_form(server):
    """`function_call` and the role `function`: a call without an id, and its result."""

    def tokens(call, result):
        said = {"role": "assistant", "content": None, **call}
        messages = [*MESSAGES, said, {"content": "a cat", **result}]
        answer = httpx.post(server[1] + "/tokenize", headers=JSON, json={"messages": messages})
        return answer.json().get("tokens", answer.json())

    function = {"name": "look", "arguments": '{"at": "it"}'}
    newer = tokens({"tool_calls": [{"id": "1", "function": function}]}, {"role": "tool", "tool_call_id": "1"})
    assert tokens({"function_call": function}, {"role": "function", "name": "look"}) == newer
    refused = tokens({"function_call": {"name": 5}}, {"role": "function", "name": "look"})
    assert "messages[1].tool_calls" in refused["error"]["message"]


@pytest.mark.parametrize("arguments", ['{"at": "i', "[1]", "5", "", '{"at": NaN}', "[" * 10**5])
def test_arguments_that_are_no_object_count_as_empty(server, arguments):
    """Clients repeat what they have of an answer that was cut off in all later requests."""
    counts = []
    for given in (arguments, "{}"):
        said = {"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "look", "arguments": given}}]}
        messages = [*MESSAGES, said, {"role": "tool", "tool_call_id": "1", "content": "no JSON"}]
        counts.append(httpx.post(server[1] + "/tokenize", json={"messages": messages}).json()["tokens"])
    assert counts[0] == counts[1]


def test_tools_as_other_clients_describe_them(server, template):
    """Names of MCP servers, hints for caches, and what Transformers writes of a function's result."""
    template("{{ tools }}" + TEMPLATE)
    function = {"name": "files/read:2", "return": {"type": "string"}, "parameters": {}}
    tools = [{"type": "function", "function": function, "cache_control": {"type": "ephemeral"}}]
    answer = httpx.post(server[1] + "/tokenize", json={"messages": MESSAGES, "tools": tools}).json()
    text = httpx.post(server[1] + "/detokenize", json={"tokens": answer["tokens"]}).json()["prompt"]
    assert "files/read:2" in text
    assert "'return'" in text
    assert "cache_control" not in text
    flat = [{"type": "function", **function}]
    for route, body in (
        ("chat/completions", {"messages": MESSAGES, "max_tokens": 2, "tools": tools}),
        ("responses", {"input": "a", "max_output_tokens": 2, "tools": flat}),
    ):
        assert httpx.post(f"{server[1]}/v1/{route}", timeout=100, json=body).status_code == 200


FUNCTION = {"type": "function", "name": "read", "strict": False, "parameters": {"type": "object", "properties": {},
            "additionalProperties": False}}  # fmt: skip
CUSTOM = {"type": "custom", "name": "patch", "description": "Edit files.",
          "format": {"type": "grammar", "syntax": "lark", "definition": 'start: "a"'}}  # fmt: skip
NAMESPACE = {"type": "namespace", "name": "mcp__files", "description": "My files.",
             "tools": [FUNCTION, CUSTOM]}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "item"),
    [
        ("read", {"type": "function_call", "name": "read", "arguments": "{}"}),
        ("mcp__files__read", {"type": "function_call", "name": "read", "namespace": "mcp__files", "arguments": "{}"}),
        ("patch", {"type": "custom_tool_call", "name": "patch", "input": ""}),
    ],
)
def test_the_tools_of_agents_that_speak_responses(client, engine, name, item):
    """As Codex offers them; what OpenAI's servers run is left out."""
    (quote,) = engine.tokenizer.encode('"', add_special_tokens=False)
    asked = {
        "model": "tiny", "input": "a", "max_output_tokens": 200, "tool_choice": {"type": "function", "name": name},
        "tools": [FUNCTION, CUSTOM, NAMESPACE, {"type": "web_search", "external_web_access": False}],
        "extra_body": {"logit_bias": {quote: 50}, "seed": 1, "client_metadata": {"x": "y"}},
    }  # fmt: skip
    response = client.responses.create(**asked)
    (call,) = response.output
    assert item.items() <= call.to_dict().items()
    assert [tool.type for tool in response.tools] == ["function", "custom", "namespace"]
    events = list(client.responses.create(**asked, stream=True))
    (done,) = [event for event in events if event.type.endswith(("input.done", "arguments.done"))]
    assert done.to_dict().items() >= {field: item[field] for field in item.keys() & {"input", "arguments"}}.items()
    earlier = [
        {"role": "user", "content": "a"}, {"type": "web_search_call", "status": "completed", "action": {"type": "x"}},
        {"type": "reasoning", "summary": [], "encrypted_content": "gAAA"}, call.to_dict(),
        {"type": call.type + "_output", "call_id": call.call_id, "output": "b"},
    ]  # fmt: skip
    assert client.responses.create(**asked | {"input": earlier}).status == "completed"


def test_the_model_reads_what_agents_say_of_their_tools():
    body = ResponsesRequest.model_validate({"input": "a", "tools": [NAMESPACE, CUSTOM]})
    functions = {tool.function.name: tool.function for tool in body.tool_fields().tools}
    assert [*functions] == ["mcp__files__read", "mcp__files__patch", "patch"]
    assert functions["mcp__files__read"].description == "My files."
    assert functions["patch"].description == 'Edit files.\nThe input follows this lark grammar:\nstart: "a"'
    call = {"type": "custom_tool_call", "call_id": "1", "namespace": "mcp__files", "name": "patch", "input": 'a "b"'}
    (message,) = response_messages(ResponsesRequest.model_validate({"input": [call]}))
    function = message["tool_calls"][0]["function"]
    assert (function["name"], json.loads(function["arguments"])) == ("mcp__files__patch", {"input": 'a "b"'})


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"tools": [{"type": "mcp"}]}, "tools.0.type: 'mcp' is unknown; choose from 'function', 'custom'"),
        ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice is required, but there are no"),
        ({"previous_response_id": "resp_1"}, "previous_response_id: nothing is stored here between requests"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input: nothing is stored here between requests"),
    ],
)  # fmt: skip
def test_what_this_server_cannot_do_for_agents_is_refused(server, body, message):
    answer = httpx.post(f"{server[1]}/v1/responses", json={"input": "a", **body})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["message"].startswith(message)
    assert error["param"] in (message.split(":")[0], "tool_choice")


@pytest.mark.parametrize("calls", [[{"id": "x"}], [5], "x", {}, [{"id": 1, "function": {"name": "a"}}]])
def test_calls_of_another_form_are_refused_by_their_field(server, calls):
    messages = [*MESSAGES, {"role": "assistant", "tool_calls": calls}, {"role": "tool", "content": "3"}]
    for route, body in (("/v1/chat/completions", {"messages": messages}), ("/tokenize", {"messages": messages})):
        answer = httpx.post(server[1] + route, headers=JSON, timeout=100, json=body)
        assert answer.status_code == 400
        assert "messages[1].tool_calls" in answer.json()["error"]["message"]


@pytest.fixture(scope="module")
def marked(tiny_folder, tmp_path_factory) -> saltus.Engine:
    """An engine whose markers of calls are special tokens."""
    folder = tmp_path_factory.mktemp("marked") / "model"
    shutil.copytree(tiny_folder(vocab_size=320, max_position_embeddings=4096), folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_special_tokens({"extra_special_tokens": ["<tool_call>", "</tool_call>"]})
    tokenizer.save_pretrained(folder)
    return saltus.load(str(folder), "lookup", adaptive=False)


@pytest.mark.parametrize("choice", ["required", "auto"])
def test_markers_that_are_special_tokens(marked, choice):
    begin, end = marked.tokenizer.convert_tokens_to_ids(["<tool_call>", "</tool_call>"])
    asked = {"messages": MESSAGES, "tools": TOOLS[:1], "tool_choice": choice, "max_tokens": 400, "seed": 1}
    asked |= {"parallel_tool_calls": False, "logit_bias": {str(begin): 50, str(end): 50}}
    with serving(marked) as (_, url):
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0)
        message = client.chat.completions.create(model="tiny", **asked).choices[0].message
        assert not message.content
        assert json.loads(message.tool_calls[0].function.arguments).keys() == {"animal", "number"}
        content, names, _ = streamed(client.chat.completions.create(model="tiny", **asked, stream=True))
        assert (content, names) == ("", [call.function.name for call in message.tool_calls])


@pytest.mark.unchecked
@pytest.mark.slow
def test_answers_of_many_clients_at_once_are_valid(marked, monkeypatch, capsys):
    """A small run of the benchmark: each kind of request, greedy and sampled, streamed and not."""
    program = str(Path(__file__).parents[2] / "benchmarks/serve_valid.py")
    with serving(marked) as (_, url):
        asked = ["--endpoint", url, "--requests", "80", "--clients", "16", "--max-tokens", "200"]
        monkeypatch.setattr(sys, "argv", [program, *asked])
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(program, run_name="__main__")
    printed = capsys.readouterr()
    assert ended.value.code == 0, printed.err
    (counts,) = [line.split()[1:] for line in printed.out.splitlines() if line.startswith("all ")]
    assert int(counts[0]) > 40
    assert int(counts[2]) == 0


@pytest.mark.external
@pytest.mark.slow
def test_litellm_calls_tools(server, monkeypatch):
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # else it asks the network when it is imported
    litellm = pytest.importorskip("litellm")
    asked = {"model": "openai/tiny", "api_base": f"{server[1]}/v1", "api_key": "any", "seed": 1, "max_tokens": 400}
    asked |= {"tools": TOOLS[:1], "tool_choice": "required", "parallel_tool_calls": False}
    message = litellm.completion(messages=MESSAGES, **asked).choices[0].message
    (call,) = message.tool_calls
    assert json.loads(call.function.arguments).keys() == {"animal", "number"}
    whole = litellm.stream_chunk_builder([*litellm.completion(messages=MESSAGES, stream=True, **asked)])
    assert whole.choices[0].message.tool_calls[0].function.arguments == call.function.arguments
    messages = [*MESSAGES, message, {"role": "tool", "tool_call_id": call.id, "name": "look", "content": "a cat"}]
    assert litellm.completion(messages=messages, **{**asked, "max_tokens": 4, "tool_choice": "auto"}).choices
