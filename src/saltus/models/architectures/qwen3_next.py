"""Qwen3-Next: the gated delta rule in most layers, attention with a gate in the others; experts; norms plus one."""

from collections.abc import Callable, Mapping
from typing import Any

from saltus.models.architectures import qwen2_moe
from saltus.models.architectures.qwen2_moe import experts
from saltus.models.common_layers import head_norms, llama_attention, llama_layer, llama_mlp, sparse_layers
from saltus.models.decoder_description import MLP, DecoderDescription, Experts, NotDescribed
from saltus.models.gguf_architecture import (
    FULL,
    GgufArchitecture,
    GgufModel,
    Rows,
    Target,
    TensorPart,
    expert_counts,
    llama_config,
    partial_rope,
)
from saltus.models.mixer_description import DeltaNet, Norm, Weight

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


def delta_net_sizes(model: GgufModel) -> dict[str, Any]:
    """Sizes of layers with a state, and which they are."""
    heads = model.size("ssm.time_step_rank")
    return {
        "layer_types": ["linear_attention" if each else FULL for each in model.layers_with("ssm_a")],
        "linear_num_value_heads": heads, "linear_num_key_heads": model.size("ssm.group_count"),
        "linear_key_head_dim": model.size("ssm.state_size"),
        "linear_value_head_dim": model.size("ssm.inner_size") // heads,
        "linear_conv_kernel_dim": model.size("ssm.conv_kernel"), "rope_parameters": partial_rope(model),
    }  # fmt: skip


def delta_net_tensors(rows: Callable[[Mapping[str, Any], int], Rows] | None) -> dict[str, Target]:
    """Of a layer with a state; `rows` are those of queries, keys and values."""
    path = "linear_attn"
    return {
        "attn_qkv.weight": TensorPart(f"{path}.in_proj_qkv.weight", rows=rows), "attn_gate": f"{path}.in_proj_z",
        "ssm_beta": f"{path}.in_proj_b", "ssm_alpha": f"{path}.in_proj_a", "ssm_out": f"{path}.out_proj",
        "ssm_norm": f"{path}.norm", "ssm_dt.bias": f"{path}.dt_bias",
        "ssm_a": TensorPart(f"{path}.A_log", is_negative_exponential=True),
        "ssm_conv1d.weight": TensorPart(f"{path}.conv1d.weight", rows=rows, is_reshaped=True),
        "post_attention_norm": "post_attention_layernorm",
    }  # fmt: skip


def moe_config(model: GgufModel, sizes: dict[str, Any]) -> dict[str, Any]:
    """Of Qwen3.5 with experts in every layer."""
    experts = expert_counts(model) | qwen2_moe.shared_width(model)
    return llama_config(model, "qwen3_5_moe_text", "Qwen3_5MoeForCausalLM", **experts, **sizes)


def gguf_config(model: GgufModel) -> dict[str, Any]:
    """See GgufArchitecture; files have the products of Qwen3.5, whose layers are otherwise the same."""
    return moe_config(model, delta_net_sizes(model))


def rows_of_groups(*parts: str) -> Callable[[Mapping[str, Any], int], Rows]:
    """Rows that stand by groups of heads (`delta_net`): of queries, keys, values, gates, or of "b" and "a"."""

    def rows(config: Mapping[str, Any], count: int) -> Rows:
        groups, dim = config["linear_num_key_heads"], config["linear_key_head_dim"]
        heads = config["linear_num_value_heads"] // groups
        values = heads * config["linear_value_head_dim"]
        small = {"b": heads, "a": heads}
        sizes = small if parts[0] in small else {"query": dim, "key": dim, "value": values, "gate": values}
        starts = {name: sum([*sizes.values()][:number]) for number, name in enumerate(sizes)}
        step = sum(sizes.values())
        return tuple(
            (group * step + starts[part], group * step + starts[part] + sizes[part])
            for part in parts
            for group in range(groups)
        )

    return rows


IN = "linear_attn.in_proj"
TENSORS: dict[str, Target] = {
    **qwen2_moe.TENSORS, **delta_net_tensors(None),
    "ssm_ba.weight": (
        TensorPart(f"{IN}_b.weight", rows=rows_of_groups("b")), TensorPart(f"{IN}_a.weight", rows=rows_of_groups("a")),
    ),
    "ssm_in.weight": (
        TensorPart(f"{IN}_qkv.weight", rows=rows_of_groups("query", "key", "value")),
        TensorPart(f"{IN}_z.weight", rows=rows_of_groups("gate")),
    ),
}  # fmt: skip
GGUF = GgufArchitecture("qwen3next", gguf_config, TENSORS, added_to_norms=1)
