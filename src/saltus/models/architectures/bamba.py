"""Bamba: Mamba-2 in most layers, attention in the others."""

from typing import Any

from saltus.models.architectures.granitemoehybrid import mamba
from saltus.models.common_layers import llama_attention, llama_mlp
from saltus.models.decoder_description import DecoderDescription, Layer, NotDescribed
from saltus.models.mixer_description import Norm

CLASSES = {"BambaForCausalLM"}


def describe(config: Any) -> DecoderDescription:
    """See saltus.models.architectures."""
    if config.hidden_act != "silu":
        raise NotDescribed(f"the activation {config.hidden_act}")
    layers, epsilon = [], config.rms_norm_eps
    for number, kind in enumerate(config.layers_block_type):
        path = f"layers.{number}"
        is_recurrent = kind == "linear_attention"
        mixer = mamba(config, f"{path}.mamba") if is_recurrent else llama_attention(config, number, span=None)
        norms = Norm(f"{path}.input_layernorm", epsilon), Norm(f"{path}.pre_ff_layernorm", epsilon)
        layers.append(Layer(mixer, llama_mlp(config, number, "feed_forward"), *norms))
    return DecoderDescription(tuple(layers), Norm("final_layernorm", epsilon))
