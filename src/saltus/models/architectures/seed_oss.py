"""Seed-OSS: layers as Llama's, with biases."""

from typing import Any

from saltus.models.architectures import llama
from saltus.models.gguf_architecture import GgufArchitecture, GgufModel, llama_config

CLASSES = {"SeedOssForCausalLM"}
describe = llama.describe


def gguf_config(model: GgufModel) -> dict[str, Any]:
    """See GgufArchitecture."""
    has_output_bias = "blk.0.attn_output.bias" in model.shapes
    return llama_config(model, "seed_oss", "SeedOssForCausalLM", attention_out_bias=has_output_bias)


GGUF = GgufArchitecture("seed_oss", gguf_config, {"post_attention_norm": "post_attention_layernorm"})
