"""Command R7B (Cohere 2): mixer and MLP read one norm; layers without a window are not rotated."""

from typing import Any

from saltus.models.common_layers import llama_attention, llama_mlp
from saltus.models.decoder_description import DecoderDescription, Layer
from saltus.models.gguf_architecture import GgufArchitecture, GgufModel, decoder_config, layer_types
from saltus.models.mixer_description import Angles, Norm

CLASSES = {"Cohere2ForCausalLM"}
ANGLES = Angles(layout="interleaved")


def layer(config: Any, number: int, angles: Angles | None) -> Layer:
    """Cohere's layer."""
    norm = Norm(f"layers.{number}.input_layernorm", config.layer_norm_eps, "layer")
    mixer = llama_attention(config, number, angles=angles, rope_interleaved=True)
    return Layer(mixer, llama_mlp(config, number), norm, norm, parallel=True)


def decoder(config: Any, layers: list[Layer]) -> DecoderDescription:
    """Cohere's logits after layers."""
    return DecoderDescription(
        tuple(layers), Norm("norm", config.layer_norm_eps, "layer"), logit_scale=config.logit_scale
    )  # fmt: skip


def describe(config: Any) -> DecoderDescription:
    """See saltus.models.architectures."""
    layers = [
        layer(config, number, ANGLES if kind == "sliding_attention" else None)
        for number, kind in enumerate(config.layer_types)
    ]
    return decoder(config, layers)


def gguf_config(model: GgufModel) -> dict[str, Any]:
    """See GgufArchitecture."""
    return decoder_config(
        model, "cohere2", "Cohere2ForCausalLM", sliding_window=model.size("attention.sliding_window"),
        layer_types=layer_types(model, 4), logit_scale=model.number("logit_scale", 0.0) or 1.0,
        layer_norm_eps=model.number("attention.layer_norm_epsilon"),
    )  # fmt: skip


GGUF = GgufArchitecture("cohere2", gguf_config)
