"""Clients and calls that do harm: they hurt no other text, and what they held is free again."""

# ruff: noqa: F811  fixtures

import concurrent.futures
import gc
import json
import queue
import socket
import threading
import time
import weakref

import httpx
import pytest
import torch

from saltus.core.forward import TARGET
from saltus.server import bodies
from saltus.server.engine_thread import EngineThread
from saltus.server.errors import ApiError
from saltus.server.served_request import Limits, serve_text
from tiny_server import JSON, PROMPT, alone, engine, serving  # noqa: F401

OUT_OF_MEMORY = (
    MemoryError(),
    torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 20.00 MiB."),
    RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory: you tried to\n..."),
)


def eventually(condition) -> bool:
    until = time.monotonic() + 20
    while not condition() and time.monotonic() < until:
        time.sleep(0.01)
    return bool(condition())


def post(url: str, body: bytes, length: int | None = None) -> socket.socket:
    """An open connection on which a request was sent, of whose body `length` bytes are announced."""
    host, port = url.removeprefix("http://").split(":")
    made = socket.create_connection((host, int(port)), timeout=20)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
    made.sendall(f"{head}Content-Length: {len(body) if length is None else length}\r\n\r\n".encode() + body)
    return made


def read(connection: socket.socket) -> bytes:
    """All that comes until the server closes the connection."""
    return b"".join(iter(lambda: connection.recv(65536), b""))


def calls_that_wait(engine, monkeypatch) -> tuple[threading.Semaphore, threading.Semaphore]:
    """From now on each call of the model is counted as it begins, and waits for a permit."""
    begun, permits, forward = threading.Semaphore(0), threading.Semaphore(0), engine.network.forward

    def one_call_a_permit(*given):
        begun.release()
        permits.acquire()
        return forward(*given)

    monkeypatch.setattr(engine.network, "forward", one_call_a_permit)
    return begun, permits


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_vanishes_frees_its_memory_within_two_calls(engine, monkeypatch, stream):
    begun, permits = calls_that_wait(engine, monkeypatch)
    body = {"model": "tiny", "prompt": "the", "max_tokens": 400, "ignore_eos": True, "stream": stream}
    with serving(engine) as (service, url):
        try:
            connection = post(url, json.dumps(body).encode())
            permits.release(3)
            assert all(begun.acquire(timeout=20) for _ in range(4))  # three calls were made, and the fourth has begun
            (job,) = service.engine_thread.scheduler.running
            memory = weakref.ref(job.sequence.kv_caches[TARGET])
            connection.close()
            assert eventually(lambda: job.cancelled)
            permits.release(2)  # and no more
            assert eventually(lambda: not service.engine_thread.num_open)
            gc.collect()
            assert memory() is None
        finally:
            permits.release(1000)


def test_a_client_that_vanishes_while_it_waits_leaves_the_queue(engine, monkeypatch):
    _, permits = calls_that_wait(engine, monkeypatch)
    body = json.dumps(
        {"model": "tiny", "prompt": "the", "max_tokens": 9, "ignore_eos": True, "speculative": False}
    ).encode()
    with serving(engine, Limits(max_batch=1)) as (service, url):
        cancelled, cancel = [], service.engine_thread.cancel
        monkeypatch.setattr(service.engine_thread, "cancel", lambda job: (cancelled.append(job), cancel(job)))
        try:
            connections = []
            for number in range(3):
                connections.append(post(url, body))
                assert eventually(lambda number=number: service.engine_thread.num_open == number + 1)
            connections.pop().close()
            assert eventually(lambda: cancelled)
            permits.release(2)  # a text of nine tokens is not finished by them
            assert eventually(lambda: service.engine_thread.num_open == 2)
        finally:
            permits.release(1000)
        for connection in connections:
            connection.close()


def test_a_body_that_comes_slowly_delays_nobody(engine):
    asked = {"model": "tiny", "prompt": PROMPT, "max_tokens": 5, "seed": 1}
    expected = alone(engine, PROMPT, raw=True, seed=1, max_new_tokens=5).text
    body = json.dumps(asked).encode()
    with serving(engine) as (_, url), post(url, body[:20], len(body)) as slow:
        for place in range(20, len(body)):
            slow.sendall(body[place : place + 1])
            if place % 10 == 0:
                other = httpx.post(f"{url}/v1/completions", json=asked, timeout=20)
                assert other.json()["choices"][0]["text"] == expected
        answer = slow.recv(65536)
        assert answer.startswith(b"HTTP/1.1 200")


def test_a_body_has_a_time_limit(engine, monkeypatch):
    monkeypatch.setattr(bodies, "MAX_BODY_SECONDS", 0.3)
    with serving(engine) as (_, url), post(url, b'{"model":', 1000) as slow:
        head, _, body = read(slow).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 408")
        assert "send it faster" in json.loads(body)["error"]["message"]
        assert httpx.post(f"{url}/v1/completions", json={"prompt": "the", "max_tokens": 2}).status_code == 200


@pytest.mark.parametrize("error", OUT_OF_MEMORY, ids=["python", "cuda", "cpu"])
def test_a_call_without_memory_is_an_answer_and_the_next_request_works(engine, monkeypatch, error):
    def fail(*_):
        raise error

    body = {"model": "tiny", "prompt": "the", "max_tokens": 4}
    with serving(engine) as (service, url):
        with monkeypatch.context() as broken:
            broken.setattr(engine.network, "forward", fail)
            answer = httpx.post(url + "/v1/completions", json=body)
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        assert "memory" in answer.json()["error"]["message"]
        assert "\n" not in answer.json()["error"]["message"]
        assert httpx.post(url + "/v1/completions", json=body).status_code == 200
        assert service.engine_thread.num_open == 0


def decoded(engine, prompts: list[str], limits: Limits = Limits(), method: str = "plain") -> list:  # noqa: B008
    """The text of each prompt, or the error that ended it, all of them submitted at once."""
    ended: queue.Queue = queue.Queue()
    texts = [""] * len(prompts)

    def deliver_to(number: int):
        def deliver(part) -> None:
            if isinstance(part, ApiError):
                ended.put((number, part))
                return
            texts[number] += part.text
            if part.finish_reason is not None:
                ended.put((number, texts[number]))

        return deliver

    requests = [engine.text_request(prompt, raw=True, max_new_tokens=24, temperature=1.0) for prompt in prompts]
    engine_thread = EngineThread(engine, limits)
    engine_thread.submit(*(serve_text(one, method, deliver_to(number)) for number, one in enumerate(requests)))
    engine_thread.start()
    try:
        found = dict(ended.get(timeout=60) for _ in prompts)
    finally:
        engine_thread.close()
    assert engine_thread.num_open == 0
    return [found[number] for number in range(len(prompts))]


@pytest.mark.parametrize("error", OUT_OF_MEMORY, ids=["python", "cuda", "cpu"])
def test_without_memory_the_newest_texts_end_and_the_others_go_on(engine, monkeypatch, error):
    forward = engine.network.forward
    expected = [alone(engine, f"{PROMPT} {number}", raw=True).text for number in range(4)]

    def of_two_texts(batch, kv_caches):
        if len(batch) > 2:
            raise error
        return forward(batch, kv_caches)

    monkeypatch.setattr(engine.network, "forward", of_two_texts)
    found = decoded(engine, [f"{PROMPT} {number}" for number in range(4)])
    assert found[:2] == expected[:2]
    assert [each.status for each in found[2:]] == [503, 503]


def test_a_prompt_that_cannot_be_read_ends_its_own_text_only(engine, monkeypatch):
    monkeypatch.setattr("saltus.server.engine_thread.PREFILL_CHUNK_TOKENS", 20)
    forward, expected = engine.network.forward, alone(engine, PROMPT, raw=True).text

    def of_short_texts(batch, kv_caches):
        if any(len(inputs.canvas.decided_prefix) > 90 for inputs in batch):
            raise RuntimeError("a long\nstory")
        return forward(batch, kv_caches)

    monkeypatch.setattr(engine.network, "forward", of_short_texts)
    text, error, other = decoded(engine, [PROMPT, "the cat sat on the mat " * 30, PROMPT])
    assert text == other == expected
    assert (error.status, error.message) == (500, "a call failed: a long")


def test_a_call_that_fails_is_an_error_for_its_texts_alone(engine, monkeypatch):
    with serving(engine) as (service, url):
        body = {"model": "tiny", "prompt": "the", "max_tokens": 4}
        with monkeypatch.context() as broken:
            broken.setattr(type(engine.network), "forward", lambda *_: 1 / 0)
            assert httpx.post(url + "/v1/completions", json=body).status_code == 500
        assert httpx.post(url + "/v1/completions", json=body).status_code == 200
        assert service.engine_thread.num_open == 0


def test_a_request_that_cannot_be_decoded_hurts_no_other(engine):
    good = {"model": "tiny", "prompt": PROMPT, "max_tokens": 40, "seed": 1}
    vocabulary = len(engine.decoder.target.model.lm_head.weight)
    bias = dict.fromkeys(map(str, range(vocabulary)), "BIAS")
    bad = json.dumps({**good, "logit_bias": bias}).replace('"BIAS"', "-1e999")  # nothing is left to choose
    expected = alone(engine, PROMPT, raw=True, seed=1, max_new_tokens=40).text
    with serving(engine) as (service, url), concurrent.futures.ThreadPoolExecutor(8) as pool:
        others = [pool.submit(httpx.post, url + "/v1/completions", json=good) for _ in range(6)]
        poisoned = [pool.submit(httpx.post, url + "/v1/completions", content=bad, headers=JSON) for _ in range(3)]
        assert [answer.result().json()["choices"][0]["text"] for answer in others] == [expected] * 6
        for answer in poisoned:
            assert answer.result().status_code == 400
            assert "no token is left to choose" in answer.result().json()["error"]["message"]
        assert service.engine_thread.num_open == 0


def test_a_gpu_that_answers_no_more_ends_the_engines_thread(engine, monkeypatch):
    """After an illegal address every call of CUDA fails in this process, so that no other text could be decoded."""

    def fail(*_):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(engine.network, "forward", fail)
    (error,) = decoded(engine, ["the"])
    assert (error.status, error.message) == (500, "a call failed: CUDA error: an illegal memory access was encountered")
    monkeypatch.setattr("saltus.engine.scheduler.answers", lambda device: False)
    (error,) = decoded(engine, ["the"])
    assert (error.status, error.message) == (503, "the server has failed and stops; try another one")
