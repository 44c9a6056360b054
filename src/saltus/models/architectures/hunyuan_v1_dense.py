"""Hunyuan without experts: Llama's layers; queries and keys have norms after they are rotated."""

from typing import Any

from saltus.models.decoder_description import (
    Attention,
    DecoderDescription,
    Norm,
    llama_attention,
    llama_decoder,
    llama_layer,
)

CLASSES = {"HunYuanDenseV1ForCausalLM"}


def attention(config: Any, layer: int) -> Attention:
    """Attention with norms of rotated heads."""
    path = f"layers.{layer}.self_attn"
    norms = {f"{name}_norm": Norm(f"{path}.{name}_layernorm", config.rms_norm_eps) for name in ("query", "key")}
    return llama_attention(config, layer, norms_rotated=True, **norms)


def describe(config: Any) -> DecoderDescription:
    """See saltus.models.architectures."""
    layers = [
        llama_layer(config, layer, mixer=attention(config, layer)) for layer in range(config.num_hidden_layers)
    ]  # fmt: skip
    return llama_decoder(config, layers)
