"""Nemotron-H and Nemotron 3: a layer is Mamba-2, attention without angles, an MLP or a mixture of experts alone."""

from typing import Any

from saltus.models.common_layers import activation, deepseek_mixture, llama_attention
from saltus.models.decoder_description import (
    MLP,
    DecoderDescription,
    Experts,
    Layer,
    Mamba2,
    Norm,
    NotDescribed,
    Weight,
)

CLASSES = {"NemotronHForCausalLM"}


def mamba(config: Any, path: str) -> Mamba2:
    """A layer with a state; its steps have the least one that the configuration draws them from."""
    return Mamba2(
        Weight(f"{path}.in_proj"), path, Weight(f"{path}.out_proj"), heads=config.mamba_num_heads,
        head_dim=config.mamba_head_dim, groups=config.n_groups, state=config.ssm_state_size,
        epsilon=config.layer_norm_epsilon, limits=(config.time_step_min, float("inf")), norm_groups=config.n_groups,
    )  # fmt: skip


def mlp(config: Any, path: str) -> MLP:
    """Without a gate."""
    return MLP(None, Weight(f"{path}.up_proj"), Weight(f"{path}.down_proj"), activation(config.mlp_hidden_act))


def experts(config: Any, number: int, path: str) -> Experts:
    """DeepSeek's mixture, of experts without gates."""
    if config.moe_latent_size is not None:
        raise NotDescribed("experts of latent vectors")
    return deepseek_mixture(
        config, number, router=f"{path}.gate", experts=f"{path}.experts", has_gate=False,
        activation=activation(config.mlp_hidden_act), selection_bias=f"{path}.gate.e_score_correction_bias",
        shared=mlp(config, f"{path}.shared_experts"),
    )  # fmt: skip


def describe(config: Any) -> DecoderDescription:
    """See saltus.models.architectures."""
    if config.mamba_hidden_act not in ("silu", "swish"):
        raise NotDescribed(f"the activation {config.mamba_hidden_act}")
    layers, epsilon = [], config.layer_norm_epsilon
    for number, kind in enumerate(config.layers_block_type):
        path, norm = f"layers.{number}.mixer", Norm(f"layers.{number}.norm", epsilon, "rms-float32")
        if kind in ("mlp", "moe"):
            layers.append(
                Layer(None, mlp(config, path) if kind == "mlp" else experts(config, number, path), None, norm)
            )
            continue
        query, key, value, output = (Weight(f"{path}.{name}_proj") for name in "qkvo")
        attention = llama_attention(
            config, number, query=query, key=key, value=value, output=output, angles=None, span=None
        )  # fmt: skip
        layers.append(Layer(mamba(config, path) if kind == "linear_attention" else attention, None, norm, None))
    return DecoderDescription(tuple(layers), Norm("norm_f", epsilon, "rms-float32"), embedding="embeddings")
