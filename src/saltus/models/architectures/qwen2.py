"""Qwen2: layers as Llama's."""

from saltus.models.architectures import llama
from saltus.models.gguf_architecture import GgufArchitecture, llama_config

CLASSES = {"Qwen2ForCausalLM"}
describe = llama.describe
GGUF = GgufArchitecture("qwen2", lambda model: llama_config(model, "qwen2", "Qwen2ForCausalLM"))
