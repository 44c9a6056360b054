"""Nemotron 4 and Minitron: LayerNorm, whose weights are one more than stored, and an MLP without a gate."""

from typing import Any

from saltus.models.common_layers import layer_norm_decoder
from saltus.models.decoder_description import DecoderDescription
from saltus.models.gguf_architecture import GgufArchitecture, GgufModel, decoder_config, partial_rope

CLASSES = {"NemotronForCausalLM"}


def describe(config: Any) -> DecoderDescription:
    """See saltus.models.architectures."""
    return layer_norm_decoder(config, config.norm_eps, "up_proj", "down_proj", offset=1.0)


def gguf_config(model: GgufModel) -> dict[str, Any]:
    """See GgufArchitecture."""
    return decoder_config(
        model, "nemotron", "NemotronForCausalLM", hidden_act="relu2", rope_parameters=partial_rope(model),
        norm_eps=model.number("attention.layer_norm_epsilon"), attention_bias="blk.0.attn_q.bias" in model.shapes,
        mlp_bias="blk.0.ffn_up.bias" in model.shapes,
    )  # fmt: skip


GGUF = GgufArchitecture("nemotron", gguf_config, added_to_norms=1)
