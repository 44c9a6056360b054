"""Qwen3-Next: the gated delta rule in most layers, attention with a gate in the others; experts; norms plus one."""

from collections.abc import Callable
from typing import Any

from saltus.models.architectures.qwen2_moe import experts
from saltus.models.decoder_description import (
    MLP,
    DecoderDescription,
    DeltaNet,
    Experts,
    Norm,
    NotDescribed,
    Weight,
    head_norms,
    llama_attention,
    llama_layer,
    llama_mlp,
    sparse_layers,
)

CLASSES = {"Qwen3NextForCausalLM"}


def norm(config: Any, path: str) -> Norm:
    """Qwen's norm since Qwen3-Next."""
    return Norm(path, config.rms_norm_eps, "rms-float32", offset=1.0)


def delta_net(config: Any, path: str, inputs: tuple[Weight, ...] = ()) -> DeltaNet:
    """A layer with a state; by default its products stand by groups of heads."""
    return DeltaNet(
        inputs or (Weight(f"{path}.in_proj_qkvz"), Weight(f"{path}.in_proj_ba")), path, Weight(f"{path}.out_proj"),
        heads=config.linear_num_value_heads, groups=config.linear_num_key_heads,
        key_dim=config.linear_key_head_dim, value_dim=config.linear_value_head_dim, epsilon=config.rms_norm_eps,
    )  # fmt: skip


def decoder(
    config: Any, recurrent: Callable[[Any, str], DeltaNet], mlp: Callable[[Any, int], MLP | Experts]
) -> DecoderDescription:
    """A decoder whose layers are of two kinds."""
    layers = []
    if config.hidden_act != "silu":
        raise NotDescribed(f"the activation {config.hidden_act}")
    for number, kind in enumerate(config.layer_types):
        path = f"layers.{number}"
        if kind == "linear_attention":
            mixer = recurrent(config, f"{path}.linear_attn")
        else:
            norms = head_norms(config, number, kind="rms-float32", offset=1.0)
            mixer = llama_attention(config, number, gated=True, span=None, **norms)
        layers.append(
            llama_layer(
                config, number, mixer=mixer, mlp=mlp(config, number),
                mixer_norm=norm(config, f"{path}.input_layernorm"),
                mlp_norm=norm(config, f"{path}.post_attention_layernorm"),
            )
        )  # fmt: skip
    return DecoderDescription(tuple(layers), norm(config, "norm"))


def mlp_of(config: Any, layer: int) -> MLP | Experts:
    """The experts or the MLP of a layer."""
    is_sparse = sparse_layers(config)[layer]
    return experts(config, layer, is_normalized=config.norm_topk_prob) if is_sparse else llama_mlp(config, layer)


def describe(config: Any) -> DecoderDescription:
    """See saltus.models.architectures."""
    return decoder(config, delta_net, mlp_of)
