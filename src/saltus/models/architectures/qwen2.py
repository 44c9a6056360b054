"""Qwen2: layers as Llama's."""

from saltus.models.architectures import llama

CLASSES = {"Qwen2ForCausalLM"}
describe = llama.describe
