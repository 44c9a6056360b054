"""Qwen2: layers as Llama's."""

from saltus.models.architectures import llama
from saltus.models.gguf_architecture import GgufArchitecture, llama_config

CLASSES = {"Qwen2ForCausalLM"}
describe = llama.describe
GGUF = tuple(  # also the text part of Qwen2-VL and Qwen2.5-VL
    GgufArchitecture(name, lambda model: llama_config(model, "qwen2", "Qwen2ForCausalLM"))
    for name in ("qwen2", "qwen2vl")
)
