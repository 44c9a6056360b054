"""Laguna: heads by layer, with norms and gates; other rotation in windows; experts by sigmoids beside a shared one."""

from typing import Any

from saltus.models.common_layers import head_norms, llama_attention, llama_decoder, llama_layer, llama_mlp, mixture
from saltus.models.decoder_description import DecoderDescription, NotDescribed
from saltus.models.mixer_description import Angles, Weight

CLASSES = {"LagunaForCausalLM"}


def describe(config: Any) -> DecoderDescription:
    """See saltus.models.architectures."""
    if config.moe_router_logit_softcapping:
        raise NotDescribed("a router with capped logits")
    gate, layers = "head_gate" if config.gating in (True, "per-head") else "gate", []
    for layer, kind in enumerate(config.layer_types):
        path = f"layers.{layer}"
        mixer = llama_attention(
            config, layer, heads=config.num_attention_heads_per_layer[layer], angles=Angles(layer_type=kind),
            gate_activation="softplus", **{gate: Weight(f"{path}.self_attn.g_proj")}, **head_norms(config, layer),
        )  # fmt: skip
        experts = mixture(
            config, layer, scoring="sigmoid", is_normalized=True, scale=config.moe_routed_scaling_factor,
            selection_bias=f"{path}.mlp.gate.e_score_correction_bias",
            shared=llama_mlp(config, layer, "mlp.shared_experts") if config.shared_expert_intermediate_size else None,
        )  # fmt: skip
        is_sparse = config.mlp_layer_types[layer] == "sparse"
        layers.append(llama_layer(config, layer, mixer=mixer, mlp=experts if is_sparse else llama_mlp(config, layer)))
    return llama_decoder(config, layers)
