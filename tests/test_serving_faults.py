"""Clients and calls that do harm: they hurt no other text, and what they held is free again."""

# ruff: noqa: F811  fixtures

import concurrent.futures
import json
import time

import httpx
import pytest

from saltus.serving.batching import Limits
from tiny_server import JSON, PROMPT, alone, engine, serving  # noqa: F401


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
