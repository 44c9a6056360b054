"""Jamba: Mamba in most layers, attention without angles in the others; experts in some."""

from typing import Any

from saltus.models.architectures.mamba import mamba
from saltus.models.common_layers import llama_attention, llama_decoder, llama_layer, llama_mlp, mixture
from saltus.models.decoder_description import DecoderDescription, NotDescribed
from saltus.models.mixer_description import Norm

CLASSES = {"JambaForCausalLM"}


def describe(config: Any) -> DecoderDescription:
    """See saltus.models.architectures."""
    if config.hidden_act not in ("silu", "swish"):
        raise NotDescribed(f"the activation {config.hidden_act}")
    layers = []
    for layer, (kind, experts) in enumerate(zip(config.layers_block_type, config.layers_num_experts, strict=True)):
        path = f"layers.{layer}"
        if kind == "attention":
            mixer = llama_attention(config, layer, angles=None, span=None)
        else:
            first, second, third = (
                Norm(f"{path}.mamba.{name}_layernorm", config.rms_norm_eps) for name in ("dt", "b", "c")
            )
            mixer = mamba(
                f"{path}.mamba", config.mamba_expand * config.hidden_size, config.mamba_d_state, config.mamba_dt_rank,
                (first, second, third),
            )  # fmt: skip
        names = {"router": f"{path}.feed_forward.router", "experts": f"{path}.feed_forward.experts"}
        mlp = mixture(config, layer, **names) if experts > 1 else llama_mlp(config, layer, "feed_forward")
        layers.append(
            llama_layer(
                config, layer, mixer=mixer, mlp=mlp,
                mixer_norm=Norm(f"{path}.input_layernorm", config.rms_norm_eps),
                mlp_norm=Norm(f"{path}.pre_ff_layernorm", config.rms_norm_eps),
            )
        )  # fmt: skip
    return llama_decoder(config, layers, norm=Norm("final_layernorm", config.rms_norm_eps))
