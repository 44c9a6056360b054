"""Jais 2: LayerNorm, biases, and an MLP without a gate."""

from typing import Any

from saltus.models.common_layers import layer_norm_decoder
from saltus.models.decoder_description import DecoderDescription
from saltus.models.gguf_architecture import GgufArchitecture, GgufModel, decoder_config

CLASSES = {"Jais2ForCausalLM"}


def describe(config: Any) -> DecoderDescription:
    """See saltus.models.architectures."""
    return layer_norm_decoder(config, config.layer_norm_eps, "up_proj", "down_proj")


def gguf_config(model: GgufModel) -> dict[str, Any]:
    """See GgufArchitecture."""
    return decoder_config(
        model, "jais2", "Jais2ForCausalLM", hidden_act="relu2",
        layer_norm_eps=model.number("attention.layer_norm_epsilon"),
        attention_bias="blk.0.attn_q.bias" in model.shapes, mlp_bias="blk.0.ffn_up.bias" in model.shapes,
    )  # fmt: skip


GGUF = GgufArchitecture("jais2", gguf_config)
