"""End tokens that the tokenizer does not call special, as Qwen2.5-Coder's <|file_sep|>, are not text on any route."""

import shutil

import pytest
from starlette.testclient import TestClient
from tokenizers import AddedToken
from transformers import AutoTokenizer, GenerationConfig

import saltus
from saltus.engine.fim_formats import FORMATS
from saltus.engine.grammar import Grammar
from saltus.server.app import make_app
from saltus.server.served_request import Limits
from saltus.server.service import Service

END = "<|file_sep|>"


@pytest.fixture(scope="module")
def engine(tiny_folder, tmp_path_factory) -> saltus.Engine:
    folder = tmp_path_factory.mktemp("ends") / "model"
    shutil.copytree(tiny_folder(vocab_size=320), folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    names = [FORMATS[0].before, FORMATS[0].after, FORMATS[0].middle, END]
    tokenizer.add_tokens([AddedToken(name, special=False, normalized=False) for name in names])
    tokenizer.save_pretrained(folder)
    ends = [tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids(END)]
    GenerationConfig(eos_token_id=ends).save_pretrained(folder)
    return saltus.load(str(folder), "lookup", adaptive=False)


@pytest.fixture(scope="module")
def client(engine):
    with TestClient(make_app(Service(engine, "tiny", Limits()))) as client:
        yield client


@pytest.fixture
def asked(engine) -> dict:
    """A request whose text ends by that token after nothing else."""
    return {"temperature": 0, "logit_bias": {str(engine.tokenizer.convert_tokens_to_ids(END)): 1000}}


ROUTES = {
    "/infill": ({"input_prefix": "a", "input_suffix": "b"}, lambda body: body["content"]),
    "/v1/completions": ({"prompt": "a"}, lambda body: body["choices"][0]["text"]),
    "/v1/chat/completions": (
        {"messages": [{"role": "user", "content": "a"}]}, lambda body: body["choices"][0]["message"]["content"],
    ),
    "/v1/responses": ({"input": "a"}, lambda body: body["output"][0]["content"][0]["text"]),
}  # fmt: skip


@pytest.mark.parametrize("route", ROUTES)
def test_an_end_token_is_no_text(client, asked, route):
    given, text = ROUTES[route]
    assert text(client.post(route, json={**given, **asked}).json()) == ""


@pytest.mark.parametrize("route", ["/v1/completions", "/v1/chat/completions", "/infill"])
def test_an_end_token_is_no_text_of_a_stream(client, asked, route):
    streamed = client.post(route, json={**ROUTES[route][0], **asked, "stream": True}).text
    assert "data: " in streamed
    assert END not in streamed


@pytest.mark.parametrize("route", ["/v1/completions", "/v1/chat/completions"])
def test_an_end_token_is_no_text_of_a_form(client, asked, route):
    given, text = ROUTES[route]
    for form in ({"guided_choice": ["yes"]}, {"guided_regex": "y.*s"}):  # the middle must not be the end token's name
        assert text(client.post(route, json={**given, **asked, **form, "max_tokens": 8}).json())[:1] == "y"
        assert END not in text(client.post(route, json={**given, **asked, **form, "max_tokens": 8}).json())


def test_after_ignored_end_tokens_a_text_goes_on_without_them(client, asked):
    given, text = ROUTES["/v1/completions"]
    body = client.post("/v1/completions", json={**given, **asked, "ignore_eos": True, "max_tokens": 3}).json()
    assert (text(body), body["usage"]["completion_tokens"]) == ("", 3)


def test_an_end_token_is_no_text_in_python(engine):
    end = engine.tokenizer.convert_tokens_to_ids(END)
    settings = {"temperature": 0.0, "logit_bias": ((end, 1000.0),)}
    assert engine.generate("a", **settings).text == ""
    assert engine.generate("a", grammar=Grammar.choice(["yes"]), **settings).text == "yes"
    assert engine.generate("a", suffix="b", grammar=Grammar.choice(["yes"]), **settings).text == "yes"
    assert "".join(chunk.text for chunk in engine.stream("a", **settings)) == ""
    filled = engine.infill("a[[…]]b", **settings)
    assert (filled.text, filled.token_texts) == ("ab", [[""]])
