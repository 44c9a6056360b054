"""EXAONE 4: norms of outputs and of heads; where some layers have a window, the others are not rotated."""

from typing import Any

from saltus.models.decoder_description import (
    Angles,
    DecoderDescription,
    Norm,
    head_norms,
    llama_attention,
    llama_decoder,
    llama_layer,
)

CLASSES = {"Exaone4ForCausalLM"}


def describe(config: Any) -> DecoderDescription:
    """See saltus.models.architectures."""
    layers = []
    for layer, kind in enumerate(config.layer_types):
        angles = Angles() if config.sliding_window is None or kind == "sliding_attention" else None
        mixer, path = llama_attention(config, layer, angles=angles, **head_norms(config, layer)), f"layers.{layer}"
        layers.append(
            llama_layer(
                config, layer, mixer=mixer, mixer_norm=None, mlp_norm=None,
                mixer_output_norm=Norm(f"{path}.post_attention_layernorm", config.rms_norm_eps),
                mlp_output_norm=Norm(f"{path}.post_feedforward_layernorm", config.rms_norm_eps),
            )
        )  # fmt: skip
    return llama_decoder(config, layers)
