"""Phi-3.5-MoE, Phi-mini-MoE and Phi-tiny-MoE: LayerNorm, and two experts by SparseMixer."""

from typing import Any

from saltus.models.common_layers import layer_norms, llama_layer, mixture
from saltus.models.decoder_description import DecoderDescription, NotDescribed
from saltus.models.gguf_architecture import (
    GgufArchitecture,
    GgufModel,
    expert_counts,
    expert_tensors,
    llama_config,
    rope,
)
from saltus.models.mixer_description import Norm

CLASSES = {"PhimoeForCausalLM"}
SCALE = 1.243163121016122  # of angles in Phi-3.5-MoE, which GGUF files lack


def describe(config: Any) -> DecoderDescription:
    """See saltus.models.architectures."""
    angles = config.rope_parameters
    if angles["rope_type"] != "default" and angles["short_mscale"] != angles["long_mscale"]:
        raise NotDescribed("angles that are scaled by the length of a text")
    layers = []
    for layer in range(config.num_hidden_layers):
        norms = layer_norms(
            f"layers.{layer}", config.rms_norm_eps, "input_layernorm", "post_attention_layernorm"
        )  # fmt: skip
        experts = mixture(
            config, layer, router=f"layers.{layer}.mlp.router", top_k=2, scoring="sparse_mixer",
            margin=2 * config.router_jitter_noise,
        )  # fmt: skip
        layers.append(llama_layer(config, layer, mixer_norm=norms[0], mlp_norm=norms[1], mlp=experts))
    return DecoderDescription(tuple(layers), Norm("norm", config.rms_norm_eps, "layer"))


def gguf_config(model: GgufModel) -> dict[str, Any]:
    """See GgufArchitecture."""
    counts, angles = expert_counts(model, "num_local_experts"), rope(model)
    if counts["num_experts_per_tok"] != 2:
        raise ValueError(f"it chooses {counts['num_experts_per_tok']} experts a token; SparseMixer chooses 2")
    if angles["rope_type"] != "default":
        angles |= {"short_mscale": SCALE, "long_mscale": SCALE}
    return llama_config(
        model, "phimoe", "PhimoeForCausalLM", rope_parameters=angles,
        sliding_window=model.size("attention.sliding_window", 0, least=0) or None,
        intermediate_size=counts.pop("moe_intermediate_size"), lm_head_bias="output.bias" in model.shapes, **counts,
    )  # fmt: skip


GGUF = GgufArchitecture("phimoe", gguf_config, expert_tensors(router="mlp.router"))
