"""Phi-3 and Phi-4: Llama's layers with fused weights; a part of each head may be rotated."""

from typing import Any

from saltus.models.common_layers import fused_attention, fused_mlp, llama_decoder, llama_layer
from saltus.models.decoder_description import DecoderDescription
from saltus.models.gguf_architecture import GgufArchitecture, GgufModel, llama_config, original_length, partial_rope

CLASSES = {"Phi3ForCausalLM"}


def describe(config: Any) -> DecoderDescription:
    """See saltus.models.architectures."""
    layers = [
        llama_layer(config, layer, mixer=fused_attention(config, layer), mlp=fused_mlp(config, layer))
        for layer in range(config.num_hidden_layers)
    ]
    return llama_decoder(config, layers)


def gguf_config(model: GgufModel) -> dict[str, Any]:
    """See GgufArchitecture."""
    window = model.size("attention.sliding_window", 0, least=0)
    return llama_config(
        model, "phi3", "Phi3ForCausalLM", sliding_window=window or None, rope_parameters=partial_rope(model),
        original_max_position_embeddings=original_length(model),
    )  # fmt: skip


GGUF = GgufArchitecture("phi3", gguf_config, {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"})
