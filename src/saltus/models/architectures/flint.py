"""Flint: norms of heads, attention sinks, rotation in windows alone; experts by sigmoids beside a shared one."""

from typing import Any

from saltus.models.common_layers import (
    float32_norm,
    head_norms,
    llama_attention,
    llama_decoder,
    llama_layer,
    llama_mlp,
    mixture,
    sparse_layers,
)
from saltus.models.decoder_description import DecoderDescription
from saltus.models.mixer_description import Angles

CLASSES = {"FlintForCausalLM"}


def describe(config: Any) -> DecoderDescription:
    """See saltus.models.architectures."""
    layers = []
    for layer, is_sparse in enumerate(sparse_layers(config)):
        path = f"layers.{layer}"
        mixer = llama_attention(
            config, layer, angles=Angles() if config.layer_types[layer] == "sliding_attention" else None,
            sinks=f"{path}.self_attn.sinks", **head_norms(config, layer, kind="rms-float32"),
        )  # fmt: skip
        experts = mixture(
            config, layer, scoring="sigmoid", is_normalized=config.norm_topk_prob,
            shared=llama_mlp(config, layer, "mlp.shared_expert") if config.shared_expert_intermediate_size else None,
        )  # fmt: skip
        layers.append(
            llama_layer(
                config, layer, mixer=mixer, mlp=experts if is_sparse else llama_mlp(config, layer),
                mixer_norm=float32_norm(config, f"{path}.input_layernorm"),
                mlp_norm=float32_norm(config, f"{path}.post_attention_layernorm"),
            )
        )  # fmt: skip
    return llama_decoder(config, layers, norm=float32_norm(config, "norm"))
