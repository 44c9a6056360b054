"""Granite 4: Mamba-2 in most layers, attention without angles in the others; experts beside a shared one, or an MLP."""

from dataclasses import replace
from typing import Any

from saltus.models.architectures import granite
from saltus.models.decoder_description import (
    MLP,
    DecoderDescription,
    Mamba2,
    Weight,
    activation,
    llama_attention,
    mixture,
)

CLASSES = {"GraniteMoeHybridForCausalLM"}


def describe(config: Any) -> DecoderDescription:
    """See saltus.models.architectures."""
    plain, layers = granite.describe(config), []
    for number, (kind, layer) in enumerate(zip(config.layer_types, plain.layers, strict=True)):
        path, size = f"layers.{number}", config.shared_intermediate_size
        fused = f"{path}.shared_mlp.input_linear"
        mlp = MLP(
            Weight(fused, 0, size), Weight(fused, size, 2 * size), Weight(f"{path}.shared_mlp.output_linear"),
            activation(config.hidden_act),
        )  # fmt: skip
        if config.num_local_experts:
            names = {"router": f"{path}.block_sparse_moe.router", "experts": f"{path}.block_sparse_moe.experts"}
            mlp = mixture(config, number, is_normalized=True, shared=mlp, **names)
        if kind == "linear_attention":
            layer = replace(layer, mixer=mamba(config, f"{path}.mamba"))
        elif config.position_embedding_type != "rope":
            attention = llama_attention(config, number, scale=config.attention_multiplier, angles=None)
            layer = replace(layer, mixer=attention)
        layers.append(replace(layer, mlp=mlp))
    return replace(plain, layers=tuple(layers))


def mamba(config: Any, path: str) -> Mamba2:
    """A layer with a state."""
    return Mamba2(
        Weight(f"{path}.in_proj"), path, Weight(f"{path}.out_proj"), heads=config.mamba_n_heads,
        head_dim=config.mamba_d_head, groups=config.mamba_n_groups, state=config.mamba_d_state,
        epsilon=config.rms_norm_eps, limits=tuple(config.time_step_limit), norm_groups=config.mamba_n_groups,
    )  # fmt: skip
