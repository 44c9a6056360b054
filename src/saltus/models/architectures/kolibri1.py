"""Kolibri 1: norms before and after mixer and MLP, and of heads; rotation in windows; experts by biased logits."""

from typing import Any

from saltus.models.common_layers import head_norms, llama_attention, llama_decoder, llama_layer, llama_mlp, mixture
from saltus.models.decoder_description import DecoderDescription
from saltus.models.mixer_description import Angles, Norm

CLASSES = {"Kolibri1ForCausalLM"}


def describe(config: Any) -> DecoderDescription:
    """See saltus.models.architectures."""
    layers = []
    for layer, kind in enumerate(config.layer_types):
        path = f"layers.{layer}"
        angles = Angles() if config.sliding_window is None or kind == "sliding_attention" else None
        experts = mixture(
            config, layer, scoring="sigmoid", is_normalized=config.norm_topk_prob, biases_logits=True,
            selection_bias=f"{path}.mlp.gate.e_score_correction_bias",
            shared=llama_mlp(config, layer, "mlp.shared_experts"),
        )  # fmt: skip
        layers.append(
            llama_layer(
                config, layer, mixer=llama_attention(config, layer, angles=angles, **head_norms(config, layer)),
                mlp=experts, mixer_norm=Norm(f"{path}.input_layernorm", config.rms_norm_eps),
                mixer_output_norm=Norm(f"{path}.post_self_attn_layernorm", config.rms_norm_eps),
                mlp_norm=Norm(f"{path}.post_attention_layernorm", config.rms_norm_eps),
                mlp_output_norm=Norm(f"{path}.post_mlp_layernorm", config.rms_norm_eps),
            )
        )  # fmt: skip
    return llama_decoder(config, layers)
