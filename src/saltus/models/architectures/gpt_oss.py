"""gpt-oss: attention sinks, windows in every other layer, and experts with biases."""

from typing import Any

from saltus.models.common_layers import llama_attention, llama_decoder, llama_layer
from saltus.models.decoder_description import DecoderDescription, Experts
from saltus.models.gguf_architecture import (
    FULL,
    SLIDING,
    GgufArchitecture,
    GgufModel,
    expert_counts,
    expert_tensors,
    llama_config,
    num_layers,
    rope,
)
from saltus.models.mixer_description import Angles

CLASSES = {"GptOssForCausalLM"}


def describe(config: Any) -> DecoderDescription:
    """See saltus.models.architectures."""
    layers = []
    for layer in range(config.num_hidden_layers):
        path = f"layers.{layer}"
        sinks = f"{path}.self_attn.sinks"
        experts = Experts(
            f"{path}.mlp.router", f"{path}.mlp.experts", config.num_experts_per_tok, activation="clamped_swiglu",
            is_normalized=True, is_transposed=True, gate_up_interleaved=True,
            limit=getattr(config, "swiglu_limit", 7.0),  # constants of older releases of Transformers
            alpha=getattr(config, "swiglu_alpha", 1.702),
        )  # fmt: skip
        mixer = llama_attention(config, layer, angles=Angles(layout="once"), sinks=sinks)
        layers.append(llama_layer(config, layer, mixer=mixer, mlp=experts))
    return llama_decoder(config, layers)


def gguf_config(model: GgufModel) -> dict[str, Any]:
    """See GgufArchitecture; ends of the range that YaRN scales are not rounded."""
    counts = expert_counts(model, "num_local_experts")
    parameters = rope(model)
    return llama_config(
        model, "gpt_oss", "GptOssForCausalLM", sliding_window=model.size("attention.sliding_window"),
        layer_types=[FULL if layer % 2 else SLIDING for layer in range(num_layers(model))],
        rope_parameters=parameters | ({"truncate": False} if parameters["rope_type"] == "yarn" else {}),
        intermediate_size=counts.pop("moe_intermediate_size"), **counts,
    )  # fmt: skip


TENSORS = {
    **expert_tensors(router="mlp.router", alternating=True), "attn_sinks.weight": "self_attn.sinks",
    "post_attention_norm": "post_attention_layernorm",
}  # fmt: skip
GGUF = GgufArchitecture("gpt-oss", gguf_config, TENSORS)
