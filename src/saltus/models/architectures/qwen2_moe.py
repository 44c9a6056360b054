"""Qwen2-MoE: mixtures with a shared expert that has a gate of its own; some layers have a plain MLP."""

from typing import Any

from saltus.models.decoder_description import (
    DecoderDescription,
    Experts,
    Weight,
    llama_decoder,
    llama_layer,
    llama_mlp,
    mixture,
    sparse_layers,
)

CLASSES = {"Qwen2MoeForCausalLM"}


def experts(config: Any, layer: int, **changes: Any) -> Experts:
    """A mixture with a shared expert that has a gate, changed in places."""
    shared = llama_mlp(config, layer, "mlp.shared_expert")
    return mixture(
        config, layer, shared=shared, shared_gate=Weight(f"layers.{layer}.mlp.shared_expert_gate"), **changes
    )


def describe(config: Any) -> DecoderDescription:
    """See saltus.models.architectures."""
    layers = []
    for layer, is_sparse in enumerate(sparse_layers(config)):
        mlp = experts(config, layer, is_normalized=config.norm_topk_prob) if is_sparse else llama_mlp(config, layer)
        layers.append(llama_layer(config, layer, mlp=mlp))
    return llama_decoder(config, layers)
