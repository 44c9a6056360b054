"""Hunyuan 3: norms of heads; experts by sigmoids and a bias, beside shared ones."""

from typing import Any

from saltus.models.common_layers import head_norms, llama_attention, llama_decoder, llama_layer, llama_mlp, mixture
from saltus.models.decoder_description import DecoderDescription

CLASSES = {"HYV3ForCausalLM"}


def describe(config: Any) -> DecoderDescription:
    """See saltus.models.architectures."""
    layers = []
    for layer, kind in enumerate(config.mlp_layer_types):
        experts = mixture(
            config, layer, scoring="sigmoid", is_normalized=True, least_sum=1e-20, scale=config.router_scaling_factor,
            selection_bias=f"layers.{layer}.mlp.e_score_correction_bias",
            shared=llama_mlp(config, layer, "mlp.shared_experts"),
        )  # fmt: skip
        mixer = llama_attention(config, layer, **head_norms(config, layer))
        mlp = experts if kind == "sparse" else llama_mlp(config, layer)
        layers.append(llama_layer(config, layer, mixer=mixer, mlp=mlp))
    return llama_decoder(config, layers)
