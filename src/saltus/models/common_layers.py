"""Describe the layers that many architectures share, by Transformers' configurations and names, changed in places."""

from __future__ import annotations

import math
from typing import Any

from saltus.models.decoder_description import MLP, Activation, DecoderDescription, Experts, Layer, NotDescribed
from saltus.models.mixer_description import Angles, Attention, Indexer, LatentAttention, Norm, Weight

ACTIVATIONS: dict[str, Activation] = {  # by their names in configurations
    "silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh", "gelu": "gelu", "relu": "relu", "relu2": "relu_squared",
}  # fmt: skip


def head_dim(config: Any) -> int:
    """The size of a head of a configuration."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def sliding_window(config: Any, layer: int) -> int | None:
    """How many of the last positions a layer sees; None: all."""
    types = getattr(config, "layer_types", None)
    if types is not None and types[layer] != "sliding_attention":
        return None
    return getattr(config, "sliding_window", None)


def activation(name: str) -> Activation:
    """Errors: NotDescribed for one that the kernels do not compute."""
    if name not in ACTIVATIONS:
        raise NotDescribed(f"the activation {name}")
    return ACTIVATIONS[name]


def llama_attention(config: Any, layer: int, **changes: Any) -> Attention:
    """Attention as Llama names it, changed in places."""
    path, dim = f"layers.{layer}.self_attn", head_dim(config)
    settings: dict[str, Any] = {
        "query": Weight(f"{path}.q_proj"), "key": Weight(f"{path}.k_proj"), "value": Weight(f"{path}.v_proj"),
        "output": Weight(f"{path}.o_proj"), "heads": config.num_attention_heads,
        "kv_heads": config.num_key_value_heads, "dim": dim, "scale": dim**-0.5,
    }  # fmt: skip
    if "span" not in changes:
        settings["span"] = sliding_window(config, layer)
    return Attention(**settings | changes)


def latent_attention(config: Any, layer: int, name: str = "self_attn", **changes: Any) -> LatentAttention:
    """Attention as DeepSeek names it, changed in places."""
    path, rope = f"layers.{layer}.{name}", getattr(config, "rope_parameters", None) or {}
    size = config.qk_nope_head_dim + config.qk_rope_head_dim
    growth = rope.get("mscale_all_dim", 0) if rope.get("rope_type", "default") != "default" else 0
    stretch = 1 + 0.1 * growth * math.log(rope["factor"]) if growth and rope["factor"] > 1 else 1.0
    epsilon = 1e-6  # of the norms of latent vectors, whatever the configuration says
    settings: dict[str, Any] = {
        "query": Weight(f"{path}.q_proj"), "latent": Weight(f"{path}.kv_a_proj_with_mqa"),
        "latent_norm": Norm(f"{path}.kv_a_layernorm", epsilon), "expand": Weight(f"{path}.kv_b_proj"),
        "output": Weight(f"{path}.o_proj"), "heads": config.num_attention_heads, "latent_dim": config.kv_lora_rank,
        "nope_dim": config.qk_nope_head_dim, "rope_dim": config.qk_rope_head_dim, "value_dim": config.v_head_dim,
        "scale": size**-0.5 * stretch**2, "angles": Angles(),
        "rope_interleaved": getattr(config, "rope_interleave", True),
    }  # fmt: skip
    if getattr(config, "q_lora_rank", None) is not None:
        settings |= {
            "query": Weight(f"{path}.q_b_proj"), "query_latent": Weight(f"{path}.q_a_proj"),
            "query_norm": Norm(f"{path}.q_a_layernorm", epsilon),
        }  # fmt: skip
    return LatentAttention(**settings | changes)


def indexer(config: Any, layer: int, rope_interleaved: bool, epsilon: float = 1e-6, **changes: Any) -> Indexer:
    """What chooses the keys of a layer, as DeepSeek V3.2 names it, changed in places."""
    path = f"layers.{layer}.self_attn.indexer"
    return Indexer(
        Weight(f"{path}.wq_b"), Weight(f"{path}.wk"), Norm(f"{path}.k_norm", epsilon, "layer"), f"{path}.weights_proj",
        config.index_n_heads, config.index_head_dim, rope_interleaved, config.index_topk, **changes,
    )  # fmt: skip


def fused_attention(config: Any, layer: int) -> Attention:
    """Llama's attention where one linear layer gives queries, keys and values, in this order."""
    path, dim = f"layers.{layer}.self_attn.qkv_proj", head_dim(config)
    queries, keys = config.num_attention_heads * dim, config.num_key_value_heads * dim
    return llama_attention(
        config, layer, query=Weight(path, 0, queries), key=Weight(path, queries, queries + keys),
        value=Weight(path, queries + keys, queries + 2 * keys),
    )  # fmt: skip


def head_norms(config: Any, layer: int, **settings: Any) -> dict[str, Norm]:
    """Norms of queries and keys by their usual names."""
    path, epsilon = f"layers.{layer}.self_attn", config.rms_norm_eps
    return {f"{name}_norm": Norm(f"{path}.{name[0]}_norm", epsilon, **settings) for name in ("query", "key")}


def llama_mlp(config: Any, layer: int, name: str = "mlp") -> MLP:
    """A gated MLP as Llama names it."""
    path = f"layers.{layer}.{name}"
    active = activation(getattr(config, "hidden_activation", None) or config.hidden_act)  # Gemma 2 has both
    return MLP(Weight(f"{path}.gate_proj"), Weight(f"{path}.up_proj"), Weight(f"{path}.down_proj"), active)


def fused_mlp(config: Any, layer: int) -> MLP:
    """The same where one linear layer gives gates and values, in this order."""
    path, size = f"layers.{layer}.mlp", config.intermediate_size
    fused = f"{path}.gate_up_proj"
    return MLP(
        Weight(fused, 0, size), Weight(fused, size, 2 * size), Weight(f"{path}.down_proj"),
        activation(config.hidden_act),
    )  # fmt: skip


def mixture(config: Any, layer: int, **changes: Any) -> Experts:
    """Experts as most architectures name them, changed in places."""
    path = f"layers.{layer}.mlp"
    settings: dict[str, Any] = {"router": f"{path}.gate", "experts": f"{path}.experts"}
    if "top_k" not in changes:
        settings["top_k"] = config.num_experts_per_tok
    if "activation" not in changes:
        settings["activation"] = activation(config.hidden_act)
    return Experts(**settings | changes)


def deepseek_mixture(config: Any, layer: int, **changes: Any) -> Experts:
    """Experts as DeepSeek V3 has them: by sigmoids and groups, beside shared experts (DeepSeek-AI 2024)."""
    path = f"layers.{layer}.mlp"
    settings: dict[str, Any] = {
        "scoring": "sigmoid", "is_normalized": getattr(config, "norm_topk_prob", True), "least_sum": 1e-20,
        "scale": config.routed_scaling_factor, "selection_bias": f"{path}.gate.e_score_correction_bias",
        "groups": config.n_group, "top_groups": config.topk_group, "best_of_group": 2,
    }  # fmt: skip
    if "shared" not in changes:
        count = getattr(config, "num_shared_experts", None) or getattr(config, "n_shared_experts", None)
        settings["shared"] = llama_mlp(config, layer, "mlp.shared_experts") if count else None
    return mixture(config, layer, **settings | changes)


def deepseek_mlp(config: Any, layer: int, is_sparse: bool) -> MLP | Experts:
    """DeepSeek V3's experts, or Llama's MLP in layers without."""
    return deepseek_mixture(config, layer) if is_sparse else llama_mlp(config, layer)


def sparse_layers(config: Any) -> list[bool]:
    """Which layers have experts, where some have a plain MLP (Qwen's architectures)."""
    dense, step = config.mlp_only_layers or (), config.decoder_sparse_step
    return [
        layer not in dense and config.num_experts > 0 and (layer + 1) % step == 0
        for layer in range(config.num_hidden_layers)
    ]


def llama_layer(config: Any, layer: int, **changes: Any) -> Layer:
    """A layer as Llama names it, changed in places."""
    path = f"layers.{layer}"
    if "mixer_norm" not in changes:
        changes["mixer_norm"] = Norm(f"{path}.input_layernorm", config.rms_norm_eps)
        changes["mlp_norm"] = Norm(f"{path}.post_attention_layernorm", config.rms_norm_eps)
    if "mixer" not in changes:
        changes["mixer"] = llama_attention(config, layer)
    if "mlp" not in changes:
        changes["mlp"] = llama_mlp(config, layer)
    return Layer(**changes)


def float32_norm(config: Any, path: str) -> Norm:
    """An RMSNorm that is rounded once, after the product with its weight."""
    return Norm(path, config.rms_norm_eps, "rms-float32")


def layer_norms(path: str, epsilon: float, mixer: str, mlp: str, offset: float = 0.0) -> tuple[Norm, Norm]:
    """LayerNorm before the mixer and before the MLP of the layer with this path, by their names."""
    return Norm(f"{path}.{mixer}", epsilon, "layer", offset), Norm(f"{path}.{mlp}", epsilon, "layer", offset)


def layer_norm_decoder(config: Any, epsilon: float, up: str, down: str, offset: float = 0.0) -> DecoderDescription:
    """Llama's attention with LayerNorm before it and before MLPs without gates, whose layers have these names."""
    layers = []
    for layer in range(config.num_hidden_layers):
        path = f"layers.{layer}"
        mlp = MLP(None, Weight(f"{path}.mlp.{up}"), Weight(f"{path}.mlp.{down}"), activation(config.hidden_act))
        norms = layer_norms(path, epsilon, "input_layernorm", "post_attention_layernorm", offset)
        layers.append(llama_layer(config, layer, mlp=mlp, mixer_norm=norms[0], mlp_norm=norms[1]))
    return DecoderDescription(tuple(layers), Norm("norm", epsilon, "layer", offset))


def llama_decoder(config: Any, layers: list[Layer], **changes: Any) -> DecoderDescription:
    """A decoder whose last norm is Llama's, changed in places."""
    settings: dict[str, Any] = {"layers": tuple(layers), "norm": Norm("norm", config.rms_norm_eps)}
    return DecoderDescription(**settings | changes)
