"""K-EXAONE: EXAONE 4's attention behind norms, and DeepSeek's experts where the configuration says so."""

from typing import Any

from saltus.models.common_layers import deepseek_mlp, head_norms, llama_attention, llama_decoder, llama_layer
from saltus.models.decoder_description import Angles, DecoderDescription

CLASSES = {"ExaoneMoeForCausalLM"}


def describe(config: Any) -> DecoderDescription:
    """See saltus.models.architectures."""
    layers = []
    for layer, kind in enumerate(config.layer_types):
        angles = Angles() if config.sliding_window is None or kind == "sliding_attention" else None
        attention = llama_attention(config, layer, angles=angles, **head_norms(config, layer))
        mlp = deepseek_mlp(config, layer, config.mlp_layer_types[layer] == "sparse")
        layers.append(llama_layer(config, layer, mixer=attention, mlp=mlp))
    return llama_decoder(config, layers)
