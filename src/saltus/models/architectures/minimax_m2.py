"""MiniMax M2: norms of all heads together, a part of each head is rotated; experts by sigmoids and a bias."""

from typing import Any

from saltus.models.common_layers import head_norms, llama_attention, llama_decoder, llama_layer, mixture
from saltus.models.decoder_description import DecoderDescription
from saltus.models.gguf_architecture import (
    SIGMOID,
    GgufArchitecture,
    GgufModel,
    check_gates,
    expert_counts,
    expert_tensors,
    llama_config,
    partial_rope,
)

CLASSES = {"MiniMaxM2ForCausalLM"}


def describe(config: Any) -> DecoderDescription:
    """See saltus.models.architectures."""
    layers = []
    for layer in range(config.num_hidden_layers):
        attention = llama_attention(config, layer, norm_per_head=False, span=None, **head_norms(config, layer))
        bias = f"layers.{layer}.mlp.e_score_correction_bias"
        mlp = mixture(config, layer, scoring="sigmoid", is_normalized=True, selection_bias=bias)
        layers.append(llama_layer(config, layer, mixer=attention, mlp=mlp))
    return llama_decoder(config, layers)


def gguf_config(model: GgufModel) -> dict[str, Any]:
    """See GgufArchitecture."""
    check_gates(model, SIGMOID)
    counts = expert_counts(model, "num_local_experts")
    return llama_config(
        model, "minimax_m2", "MiniMaxM2ForCausalLM", rope_parameters=partial_rope(model),
        intermediate_size=counts.pop("moe_intermediate_size"), **counts,
    )  # fmt: skip


TENSORS = expert_tensors() | {"exp_probs_b.bias": "mlp.e_score_correction_bias"}
GGUF = GgufArchitecture("minimax-m2", gguf_config, TENSORS)
