"""Many texts at once: each is that of its request alone, prompts are read in pieces, and memory has limits."""

# ruff: noqa: F811  fixtures

import concurrent.futures
import json
import threading
from functools import partial

import httpx
import pytest
import torch

import saltus
from saltus.server.served_request import Limits
from tiny_server import MESSAGES, PROMPT, alone, engine, serving  # noqa: F401


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
        assert (service.engine_thread.num_open, service.engine_thread.scheduler.requests) == (0, [])


@pytest.mark.parametrize("method", ["small_model", "auto"])
def test_other_texts_go_on_while_a_draft_network_is_loaded(method, tiny_folder, partners, monkeypatch):
    for module in ("auto_method", "decoder"):
        monkeypatch.setattr(f"saltus.engine.{module}.auto_candidates", lambda *given: ["small_model"])
    engine = saltus.load(str(tiny_folder()), "lookup", options=partners, adaptive=False)
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 12, "temperature": 0}
    expected = engine.generate(PROMPT, raw=True, method="plain", max_new_tokens=12).text
    begun, may_end, loaded = threading.Event(), threading.Event(), []

    def slowly(method, name, spec):
        begun.set()
        assert may_end.wait(60)
        loaded.append(name)
        return load_network(method, name, spec)

    load_network = engine.decoder._load_draft_network
    monkeypatch.setattr(engine.decoder, "_load_draft_network", slowly)
    with serving(engine) as (_, url), concurrent.futures.ThreadPoolExecutor() as pool:
        ask = partial(httpx.post, url + "/v1/completions", timeout=60)
        waiting = [pool.submit(ask, json={**body, "speculative": {"method": method}}) for _ in range(2)]
        try:
            assert begun.wait(60)
            for other in ({}, {"speculative": False}):
                assert ask(json=body | other, timeout=30).json()["choices"][0]["text"] == expected
            assert not any(one.done() for one in waiting)
        finally:
            may_end.set()
        assert [one.result().json()["choices"][0]["text"] for one in waiting] == [expected] * 2
    assert loaded == ["small_model"]


def test_a_draft_network_that_does_not_load_is_an_error_before_a_stream_begins(tiny_folder, tmp_path):
    engine = saltus.load(str(tiny_folder()), "lookup", options={"ptp": {"model": str(tmp_path / "nothing")}})
    with serving(engine) as (_, url):
        body = {"prompt": "the", "stream": True, "speculative": {"method": "ptp"}}
        answer = httpx.post(f"{url}/v1/completions", json=body)
        assert httpx.post(f"{url}/v1/completions", json={"prompt": "the"}).status_code == 200
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "speculative.method"
    assert "nothing" in answer.json()["error"]["message"]


def test_a_long_prompt_is_read_chunk_by_piece(engine, monkeypatch):
    monkeypatch.setattr("saltus.server.engine_thread.PREFILL_CHUNK_TOKENS", 50)
    prompt = "the cat sat on the mat " * 30
    expected = alone(engine, prompt, raw=True, seed=5).text
    with serving(engine) as (_, url):
        body = {"model": "tiny", "prompt": prompt, "seed": 5, "max_tokens": 24}
        assert len(engine.encode(prompt, raw=True)) > 150
        for _ in range(2):  # the second time from the prefix cache
            answer = httpx.post(url + "/v1/completions", json=body).json()
            assert answer["choices"][0]["text"] == expected


def test_a_stream_waits_for_one_piece_of_a_prompt_at_a_time(engine, monkeypatch):
    monkeypatch.setattr("saltus.server.engine_thread.PREFILL_CHUNK_TOKENS", 20)
    happened = []
    with serving(engine) as (service, url), concurrent.futures.ThreadPoolExecutor(1) as pool:
        scheduler, read = service.engine_thread.scheduler, service.engine_thread.scheduler.prompts.read_chunk
        monkeypatch.setattr(scheduler.prompts, "read_chunk", lambda job: (happened.append("piece"), read(job)))
        body = {"model": "tiny", "prompt": "the", "max_tokens": 200, "ignore_eos": True, "speculative": False}
        with httpx.stream("POST", url + "/v1/completions", json={**body, "stream": True}) as answer:
            lines = answer.iter_lines()
            next(lines)
            deliver = scheduler.running[0].deliver
            scheduler.running[0].deliver = lambda part: (happened.append("text"), deliver(part))
            long = {**body, "prompt": "a dog sat on the mat " * 30, "max_tokens": 1}
            other = pool.submit(httpx.post, url + "/v1/completions", json=long)
            assert other.result().status_code == 200
            assert happened.count("piece") > 10
            assert "piece piece" not in " ".join(happened[: len(happened) - happened[::-1].index("text")])


def test_a_full_queue_says_so_at_once(engine, monkeypatch):
    with serving(engine, Limits(max_batch=1, max_queue=2)) as (service, url):
        body = {"model": "tiny", "prompt": "the", "max_tokens": 4, "n": 3}
        monkeypatch.setattr(service.engine_thread, "num_open", 1)
        answer = httpx.post(url + "/v1/completions", json=body)
        assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")
        assert httpx.post(url + "/v1/completions", json={**body, "n": 2}).status_code == 200


@pytest.mark.parametrize("route", ["completions", "chat/completions"])
def test_more_texts_than_the_queue_holds_are_refused_before_they_are_prepared(engine, monkeypatch, route):
    prompts = {"prompt": ["the"] * 50} if route == "completions" else {"messages": MESSAGES}
    with serving(engine, Limits(max_batch=16, max_queue=16)) as (_, url):
        monkeypatch.setattr(type(engine), "text_request", lambda *_, **__: 1 / 0)
        answer = httpx.post(f"{url}/v1/{route}", json={"model": "tiny", "n": 128, **prompts})
        assert answer.status_code == 400
        assert "the server takes 32; split it" in answer.json()["error"]["message"]


def test_a_text_that_cannot_fit_is_refused(engine):
    with serving(engine, Limits(max_cached_bytes=1000)) as (_, url):
        answer = httpx.post(url + "/v1/completions", json={"model": "tiny", "prompt": "the", "max_tokens": 100})
        assert answer.status_code == 400
        assert "memory" in answer.json()["error"]["message"]
