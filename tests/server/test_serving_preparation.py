"""Requests are prepared off the event loop, a few at a time, and within limits that are checked before the work."""

# ruff: noqa: F811  fixtures

import asyncio
import concurrent.futures
import json
import threading

import httpx
import pytest
from test_serving_faults import eventually, post

from saltus.engine.engine import Engine
from saltus.server import bodies, preparation
from saltus.server.app import make_app
from saltus.server.bodies import MAX_VALUES
from saltus.server.served_request import Limits
from saltus.server.service import Service
from tiny_server import JSON, PROMPT, engine, server, serving  # noqa: F401

ASKED = {"model": "tiny", "prompt": "the", "max_tokens": 2}


@pytest.fixture
def gate(engine, monkeypatch):
    """Holds up the preparation of texts until it is told to let them through; knows how many came and are in it."""

    class Gate:
        count = inside = most = 0
        lock, opened = threading.Lock(), threading.Event()

    found, prepare = Gate(), Engine.text_request
    found.opened = threading.Event()

    def held_up(self, *given, **settings):
        with found.lock:
            found.count += 1
            found.inside += 1
            found.most = max(found.most, found.inside)
        found.opened.wait(20)
        with found.lock:
            found.inside -= 1
        return prepare(self, *given, **settings)

    monkeypatch.setattr(Engine, "text_request", held_up)
    yield found
    found.opened.set()


def test_a_prompt_is_tokenised_once_for_all_of_its_choices(server, gate):
    gate.opened.set()
    answer = httpx.post(f"{server[1]}/v1/completions", json={**ASKED, "prompt": ["the", "a cat"], "n": 5})
    assert len(answer.json()["choices"]) == 10
    assert gate.count == 2


def test_two_requests_are_prepared_at_a_time_and_others_are_answered_meanwhile(server, gate):
    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        answers = [pool.submit(httpx.post, f"{server[1]}/v1/completions", json=ASKED, timeout=30) for _ in range(6)]
        assert eventually(lambda: gate.inside == 2)
        assert httpx.get(f"{server[1]}/health").status_code == 200
        gate.opened.set()
        assert [answer.result().status_code for answer in answers] == [200] * 6
    assert (gate.count, gate.most) == (6, 2)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_is_not_prepared_for(server, gate, stream, caplog):
    caplog.set_level("INFO", logger="saltus.server")
    body = json.dumps({**ASKED, "prompt": ["the"] * 9, "stream": stream}).encode()
    service, url = server
    connections = [post(url, body) for _ in range(4)]
    assert eventually(lambda: gate.inside == 2)
    for connection in connections:
        connection.close()
    assert eventually(lambda: caplog.text.count('"status": 499') == 4)
    gate.opened.set()
    assert httpx.post(f"{url}/v1/completions", json=ASKED).status_code == 200
    assert gate.count == 2 + 1  # of 36 + 1
    assert service.engine_thread.num_open == 0


def test_small_requests_do_not_wait_for_large_ones(server, gate, monkeypatch):
    monkeypatch.setattr(preparation, "LARGE_BYTES", 400)
    body = json.dumps({**ASKED, "prompt": PROMPT * 10}).encode()
    connections = [post(server[1], body) for _ in range(3)]
    assert eventually(lambda: gate.inside == 1)
    answer = httpx.post(f"{server[1]}/tokenize", json={"prompt": "the"})
    assert (answer.status_code, gate.inside) == (200, 1)
    gate.opened.set()
    for connection in connections:
        assert connection.recv(100).startswith(b"HTTP/1.1 200")
        connection.close()
    assert gate.most == 1


def test_texts_are_tokenised_off_the_event_loop(server, monkeypatch):
    service, url = server
    names = []
    for name in ("tokenize", "detokenize"):
        make = getattr(service, name)

        def noted(asked, make=make):
            names.append(threading.current_thread().name)
            return make(asked)

        monkeypatch.setattr(service, name, noted)
    httpx.post(f"{url}/tokenize", json={"prompt": "the"})
    httpx.post(f"{url}/detokenize", json={"tokens": [5]})
    assert all(name.startswith("saltus-prepare") for name in names)
    assert len(names) == 2


def test_bodies_have_a_limit_together(engine, monkeypatch):
    monkeypatch.setattr(bodies, "MAX_BODIES_BYTES", 500)
    with serving(engine) as (_, url):
        large = {**ASKED, "prompt": "the " * 25, "max_tokens": 1}
        with post(url, b" " * 400, 10_000):
            assert eventually(lambda: httpx.post(f"{url}/v1/completions", json=large).status_code == 503)
            answer = httpx.post(f"{url}/v1/completions", json=large)
            assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
            assert httpx.post(f"{url}/v1/completions", json=ASKED).status_code == 200
        for _ in range(3):  # more than the limit, one after the other
            assert eventually(lambda: httpx.post(f"{url}/v1/completions", json=large).status_code == 200)


def test_a_body_of_a_million_values_is_not_parsed(server):
    body = b'{"prompt": [' + b"[],".join([b""] * (MAX_VALUES + 1)) + b"[]]}"
    answer = httpx.post(f"{server[1]}/v1/completions", content=body, headers=JSON, timeout=30)
    assert answer.status_code == 413
    assert "values" in answer.json()["error"]["message"]


def test_a_client_that_is_still_sending_what_is_refused_reads_why(server):
    async def post() -> httpx.Response:
        async with httpx.AsyncClient() as client:
            body = b'{"prompt": [' + b"0," * (6 * MAX_VALUES) + b"0]}"
            return await client.post(f"{server[1]}/v1/completions", content=body, headers=JSON, timeout=30)

    assert asyncio.run(post()).status_code == 413


@pytest.mark.parametrize(
    ("route", "fields"),
    [
        ("/v1/completions", {"prompt": [1.5] * 30_000}),
        ("/v1/completions", {"prompt": "the", "logit_bias": {f"a{number}": 1 for number in range(5_000)}}),
        ("/v1/completions", {"prompt": "the", **{f"a{number}": 1 for number in range(5_000)}}),
        ("/v1/chat/completions", {"messages": [{}] * 30_000}),
        ("/v1/responses", {"input": [{"role": "user", "content": [{"type": "text"}] * 30_000}]}),
    ],
    ids=["prompts", "biases", "fields", "messages", "parts"],
)
def test_many_wrong_values_are_one_error(server, route, fields, monkeypatch):
    from fastapi.exceptions import RequestValidationError

    found = []
    errors = RequestValidationError.errors
    monkeypatch.setattr(RequestValidationError, "errors", lambda self: found.extend(errors(self)) or errors(self))
    answer = httpx.post(server[1] + route, json=fields, timeout=30)
    assert answer.status_code == 400
    assert 0 < len(found) < 20
    assert len(answer.text) < 1000


def test_prompts_have_a_limit(server):
    answer = httpx.post(f"{server[1]}/v1/completions", json={**ASKED, "prompt": ["the"] * 5000})
    assert answer.status_code == 400
    assert "at most 4096 items" in answer.json()["error"]["message"]


@pytest.mark.parametrize("stop", [["a"] * 65, "a" * 257, ["a" * 257]])
def test_stop_strings_have_limits(server, stop):
    answer = httpx.post(f"{server[1]}/v1/completions", json={**ASKED, "stop": stop})
    assert (answer.status_code, answer.json()["error"]["param"][:4]) == (400, "stop")
    assert "at most" in answer.json()["error"]["message"]
    assert httpx.post(f"{server[1]}/v1/completions", json={**ASKED, "stop": ["a" * 256] * 64}).status_code == 200


def test_preparation_without_memory_is_an_answer(server, monkeypatch):
    def fail(*_, **__):
        raise MemoryError

    monkeypatch.setattr(Engine, "text_request", fail)
    answer = httpx.post(f"{server[1]}/v1/completions", json=ASKED)
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")


def test_an_empty_key_is_refused(engine):
    for key in ("", " ", "secret "):
        with pytest.raises(ValueError, match="an API key is empty or has spaces around it"):
            make_app(Service(engine, "tiny", Limits()), api_keys=("one", key))
