"""What requests may ask for, on a CUDA device that does not exist: texts are those of plain decoding and of the CPU."""

import itertools
import random

import pytest
import torch

import saltus
from engine.test_random_requests import check_random_requests
from fake_cuda import fake_cuda

pytest.importorskip("triton")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.unchecked,
    pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device"),
]
PROMPT = "the cat sat on the mat and the cat sat on"
SCHEMA = {"type": "object", "properties": {"a": {"enum": ["cat", "dog"]}}, "required": ["a"]}
FEATURES = {
    "regex": {"grammar": saltus.Grammar.regex("[a-e ]{4,30}")},
    "schema": {"grammar": saltus.Grammar.json_schema(SCHEMA)},
    "penalties": {"repetition_penalty": 1.3, "presence_penalty": 0.7, "frequency_penalty": 0.4},
    "biases": {"logit_bias": {5: 3.0, 263: -100.0}, "banned": [260], "ignore_eos": True},
    "n-grams": {"no_repeat_ngram_size": 2, "min_new_tokens": 4},
    "stop": {"stop": ["e", "at"], "stop_token_ids": [7]},
    "truncated": {"top_k": 20, "top_p": 0.9, "min_p": 0.01},
    "inverse": {"coupling": "probability"},
}


@pytest.fixture
def device(monkeypatch):
    with fake_cuda(monkeypatch) as state:
        yield state


def load(folder, options=None, device="cuda", **settings) -> saltus.Engine:
    return saltus.load(
        str(folder), "plain", device=device, dtype="float32", options=options, adaptive=False, **settings
    )


def written(engine: saltus.Engine, method: str) -> dict[str, tuple[list[int], str, list[float]]]:
    """What a batch of requests gets, one with each setting: tokens, text and their log-probabilities."""
    texts = {}
    for temperature, (name, settings) in itertools.product((0, 0.8), FEATURES.items()):
        given = {"raw": True, "max_new_tokens": 8, "seed": 4, "temperature": temperature, "logprobs": True, **settings}
        texts[f"{name} at {temperature}"] = engine.text_request(PROMPT, **given)
    for _ in engine._run([text.request for text in texts.values()], method):
        pass
    return {
        name: (text.request.tokens, text.output.text, text.request.log_probabilities) for name, text in texts.items()
    }


def test_requests_of_mixed_settings_have_the_cpus_texts_by_each_method(device, tiny_folder, partners):
    engine, twin = (load(tiny_folder(), partners, device=each) for each in ("cuda", "cpu"))
    plain, expected = written(engine, "plain"), written(twin, "plain")
    assert {name: own[:2] for name, own in plain.items()} == {name: own[:2] for name, own in expected.items()}
    for name, (*_, logprobs) in plain.items():
        assert logprobs == pytest.approx(expected[name][2], rel=1e-3, abs=1e-4), name
    for method in ("lookup", "token_recycling", "small_model", "ptp+lookup"):
        assert written(engine, method) == plain, method


def test_rejection_sampling_accepts_what_it_accepts_on_the_cpu(device, tiny_folder, partners):
    engines = [load(tiny_folder(), partners, device=each, rule="reject") for each in ("cuda", "cpu")]
    for method, settings in (("small_model", {}), ("small_model", {"top_k": 20}), ("ptp", {}), ("mtpc", {})):
        given = {"raw": True, "max_new_tokens": 8, "seed": 4, "temperature": 0.8, "ignore_eos": True, **settings}
        found, expected = (engine.generate([PROMPT] * 2, method=method, **given) for engine in engines)
        assert [each.tokens for each in found] == [each.tokens for each in expected], method
        assert all(each.statistics.nodes_per_call > 0 for each in found), method


def test_random_requests_in_one_batch_are_answered_as_alone(device, tiny_folder):
    options = {"small_model": {"model": str(tiny_folder(seed=1)), "min_probability": 0.0}}
    check_random_requests(load(tiny_folder(), options), random.Random(1), 1)
