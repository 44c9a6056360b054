"""LFM3: LFM2 with norms of outputs, windows in some layers of attention, and a gate of each head."""

from typing import Any

from saltus.models.architectures import lfm2
from saltus.models.common_layers import head_norms, llama_attention
from saltus.models.decoder_description import DecoderDescription
from saltus.models.mixer_description import Angles, Attention, Weight

CLASSES = {"Lfm3ForCausalLM"}


def attention(config: Any, layer: int) -> Attention:
    """Attention of a layer; each kind of layers has angles of its own."""
    gate = Weight(f"layers.{layer}.self_attn.g_proj") if config.use_attention_gate else None
    return llama_attention(
        config, layer, angles=Angles(layer_type=config.layer_types[layer]), head_gate=gate,
        **head_norms(config, layer),
    )  # fmt: skip


def describe(config: Any) -> DecoderDescription:
    """See saltus.models.architectures."""
    return lfm2.decoder(config, lfm2.mlp, attention, output_norms=config.use_sandwich_norm)
