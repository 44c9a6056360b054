"""gpt-oss: attention sinks, windows in every other layer, and experts with biases."""

from typing import Any

from saltus.models.decoder_description import (
    Angles,
    DecoderDescription,
    Experts,
    llama_attention,
    llama_decoder,
    llama_layer,
)

CLASSES = {"GptOssForCausalLM"}


def describe(config: Any) -> DecoderDescription:
    """See saltus.models.architectures."""
    layers = []
    for layer in range(config.num_hidden_layers):
        path = f"layers.{layer}"
        sinks = f"{path}.self_attn.sinks"
        experts = Experts(
            f"{path}.mlp.router", f"{path}.mlp.experts", config.num_experts_per_tok, activation="clamped_swiglu",
            is_normalized=True, is_transposed=True, gate_up_interleaved=True, limit=config.swiglu_limit,
            alpha=config.swiglu_alpha,
        )  # fmt: skip
        mixer = llama_attention(config, layer, angles=Angles(layout="once"), sinks=sinks)
        layers.append(llama_layer(config, layer, mixer=mixer, mlp=experts))
    return llama_decoder(config, layers)
