"""Names of models: which ones cannot be those of one model."""

import pytest

from saltus.loading.model_names import surely_differ


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("Qwen/Qwen3-8B", "Qwen/Qwen3-4B"),
        ("meta-llama/Meta-Llama-3-8B-Instruct", "Llama-3.1-8B-Instruct"),
        ("Qwen/Qwen3-4B", "Qwen/Qwen3-4B-Instruct-2507"),
        ("Qwen3-4B-Thinking-2507", "qwen3-4b-instruct-2507-q4_0.gguf"),
        ("Qwen/Qwen3-8B", "deepseek-ai/DeepSeek-R1-Distill-Llama-8B"),
        ("Qwen/Qwen2.5-7B-Instruct", "unsloth/Qwen2.5-Coder-7B-GGUF:model.gguf"),
    ],
)
def test_names_of_other_sizes_versions_or_kinds_differ(first, second):
    assert surely_differ(first, second)
    assert surely_differ(second, first)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("Qwen/Qwen3-8B", "/models/qwen3-8b-Q4_K_M.gguf"),
        ("Qwen/Qwen3-8B", "bartowski/Qwen_Qwen3-8B-GGUF"),
        ("Qwen/Qwen3-8B", "Qwen/Qwen3-8B-AWQ"),
        ("meta-llama/Meta-Llama-3.1-8B-Instruct", "hugging-quants/Llama-3.1-8B-Instruct-AWQ-INT4"),
        ("RedHatAI/Qwen3-8B-FP8-dynamic", "unsloth/Qwen3-8B-GGUF:Qwen3-8B-UD-Q4_K_XL.gguf"),
        ("Qwen/Qwen3-8B", "Qwen/Qwen3-8B-GGUF:model-00001-of-00002.gguf"),
        ("Qwen/Qwen3-8B-Base", "/models/Qwen3-8B-Q8_0-00001-of-00002.gguf"),
        ("mistralai/Mixtral-8x7B-Instruct-v0.1", "mixtral-8x7b-instruct-v0.1.Q4_K_M.gguf"),
        ("/cache/models--Qwen--Qwen3-8B/snapshots/0a4b1c", "qwen3_8b"),
        ("HuggingFaceTB/SmolLM2-135M-Instruct", "smollm2-135m"),
    ],
)
def test_copies_and_precisions_of_a_model_do_not_differ(first, second):
    assert not surely_differ(first, second)
    assert not surely_differ(second, first)


@pytest.mark.parametrize("name", ["", "/", "target", "/home/me/checkpoint-500", "DeepSeek-V3"])
def test_a_name_without_a_size_may_be_any_model(name):
    assert not surely_differ(name, "Qwen/Qwen3-8B")
    assert not surely_differ("Qwen/Qwen3-8B", name)
