"""EXAONE 3 and 3.5: layers as Llama's."""

from typing import Any

from saltus.models.architectures import llama
from saltus.models.gguf_architecture import GgufArchitecture, GgufModel, llama_config

CLASSES = {"LlamaForCausalLM"}
describe = llama.describe


def gguf_config(model: GgufModel) -> dict[str, Any]:
    """See GgufArchitecture."""
    return llama_config(model, "exaone", "LlamaForCausalLM")


GGUF = GgufArchitecture("exaone", gguf_config)
