"""EXAONE 4: norms of outputs and of heads; where some layers have a window, the others are not rotated."""

from typing import Any

from saltus.models.common_layers import head_norms, llama_attention, llama_decoder, llama_layer
from saltus.models.decoder_description import DecoderDescription
from saltus.models.gguf_architecture import GgufArchitecture, GgufModel, layer_types, llama_config
from saltus.models.mixer_description import Angles, Norm

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


def gguf_config(model: GgufModel) -> dict[str, Any]:
    """See GgufArchitecture."""
    window = model.size("attention.sliding_window", 0, least=0)
    return llama_config(
        model, "exaone4", "Exaone4ForCausalLM", sliding_window=window or None, sliding_window_pattern=4,
        layer_types=layer_types(model, 4 if window else 1),
        num_nextn_predict_layers=model.size("nextn_predict_layers", 0, least=0),
    )  # fmt: skip


TENSORS = {"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"}
GGUF = GgufArchitecture("exaone4", gguf_config, TENSORS)
