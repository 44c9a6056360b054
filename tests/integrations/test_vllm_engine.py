"""Texts of vLLM's own engine with our drafters. Skipped where vLLM is missing; CONTRIBUTING.md says how to run it."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec

import pytest
import torch

from tiny_models import tiny_llama

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed"),
]

SHAPE = {"hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 64}
PROMPTS = [[5, 6, 7, 8] * 6, [9, 8, 20, 31], [44, 45, 44, 45, 44], list(range(30, 80))]

SCRIPT = """
import json, sys
from vllm import LLM, SamplingParams

given = json.loads(sys.argv[1])
engine = LLM(
    given["model"], skip_tokenizer_init=True, dtype="float32", max_model_len=256, max_num_seqs=3, enforce_eager=True,
    gpu_memory_utilization=0.3, speculative_config=given["speculative"], additional_config=given["options"],
    disable_log_stats=False, seed=0,
)
settings = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True, detokenize=False)
answers = engine.generate([{"prompt_token_ids": ids} for ids in given["prompts"]], settings, use_tqdm=False)
counts = {one.name: one.value for one in engine.get_metrics() if one.name.endswith(("drafts", "accepted_tokens"))}
print("RESULT", json.dumps([[list(answer.outputs[0].token_ids) for answer in answers], counts]))
"""


def decode(model, speculative=None, options=None) -> tuple[list[list[int]], dict[str, float], str]:
    """The texts, vLLM's counters, and its log."""
    given = {"model": str(model), "speculative": speculative, "options": options or {}, "prompts": PROMPTS}
    environment = os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, json.dumps(given)], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-4000:]
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    return *json.loads(line.removeprefix("RESULT ")), done.stderr


@pytest.fixture(scope="module")
def folder(tiny_folder):
    return tiny_folder(**SHAPE)


@pytest.fixture(scope="module")
def plain_texts(folder) -> list[list[int]]:
    return decode(folder)[0]


@pytest.mark.parametrize("method", ["Lookup", "Ptp", "Mtpc"])
def test_texts_in_float32_are_those_of_plain_decoding_in_vllm(folder, plain_texts, tiny_drafter, tiny_heads, method):
    model = tiny_llama(**SHAPE)
    options = {
        "ptp": {"model": str(tiny_drafter(model, hidden=128))},
        "mtpc": {"model": str(tiny_heads(model, hidden=128))},
    }
    speculative = {"method": "custom_class", "model": f"saltus.vllm.{method}", "num_speculative_tokens": 4}
    texts, counts, log = decode(folder, speculative, {"saltus": options})
    assert texts == plain_texts
    assert counts["vllm:spec_decode_num_accepted_tokens"] > 0
    assert "no hidden states" not in log


def test_plain_decoding_in_vllm_is_that_of_transformers(folder, plain_texts):
    """Else the test above would compare two wrong texts."""
    text = list(PROMPTS[0])
    model = tiny_llama(**SHAPE)
    with torch.inference_mode():
        for _ in range(16):
            text.append(int(model(torch.tensor([text])).logits[0, -1].argmax()))
    assert plain_texts[0][:16] == text[len(PROMPTS[0]) :]
