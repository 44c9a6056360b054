"""Mellum 2: Qwen3-MoE's layers, most of them with a window, and angles of their own for each kind of layer."""

from typing import Any

from saltus.models.common_layers import head_norms, llama_attention, llama_decoder, llama_layer, llama_mlp, mixture
from saltus.models.decoder_description import DecoderDescription
from saltus.models.gguf_architecture import (
    FULL,
    SLIDING,
    GgufArchitecture,
    GgufModel,
    expert_counts,
    expert_tensors,
    layer_types,
    llama_config,
    rope,
)
from saltus.models.mixer_description import Angles

CLASSES = {"MellumForCausalLM"}


def describe(config: Any) -> DecoderDescription:
    """See saltus.models.architectures."""
    layers = []
    for layer, kind in enumerate(config.layer_types):
        attention = llama_attention(config, layer, angles=Angles(layer_type=kind), **head_norms(config, layer))
        mlp = llama_mlp(config, layer)
        if config.mlp_layer_types[layer] == "sparse":
            mlp = mixture(config, layer, is_normalized=config.norm_topk_prob)
        layers.append(llama_layer(config, layer, mixer=attention, mlp=mlp))
    return llama_decoder(config, layers)


def gguf_config(model: GgufModel) -> dict[str, Any]:
    """See GgufArchitecture; positions are scaled where layers see all of the text."""
    window, full = model.size("attention.sliding_window", 0, least=0), rope(model)
    local = {"rope_theta": model.number("rope.freq_base_swa", full["rope_theta"]), "rope_type": "default"}
    return llama_config(
        model, "mellum", "MellumForCausalLM", norm_topk_prob=True, sliding_window=window or None,
        layer_types=layer_types(model, 4 if window else 1), rope_parameters={FULL: full, SLIDING: local},
        **expert_counts(model),
    )  # fmt: skip


GGUF = GgufArchitecture("mellum", gguf_config, expert_tensors())
