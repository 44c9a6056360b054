"""Describe what a decoder computes: its layers as data, each weight by its path in the Transformers model.

A file of saltus.models.architectures makes a description of a configuration; NativeDecoder makes kernel calls of it.
Paths are relative to the model without its output layer (`get_decoder()`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

Activation = Literal["silu", "gelu_tanh", "gelu", "relu_squared", "sigmoid"]
ACTIVATIONS: dict[str, Activation] = {  # by their names in configurations
    "silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh", "gelu": "gelu",
    "relu2": "relu_squared",
}  # fmt: skip


LLAMA_DECODERS = {"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"}  # Llama's layers


class NotDescribed(ValueError):
    """A configuration asks for something that descriptions do not say; Transformers' layers compute it."""


@dataclass(frozen=True)
class Weight:
    """A linear layer, or its outputs from `start` to `stop`."""

    path: str
    start: int = 0
    stop: int | None = None


@dataclass(frozen=True)
class Norm:
    """A norm of rows, y = x / √(mean x² + ε) · w ("rms"), which first rounds the quotient.

    "rms-float32" rounds once, after the product with w + `offset`. "layer" is LayerNorm: the mean is taken off before,
    and biases are added.
    """

    path: str
    epsilon: float
    kind: Literal["rms", "rms-float32", "layer"] = "rms"
    offset: float = 0.0


@dataclass(frozen=True)
class Angles:
    """Where cosines and sines come from: a module of Transformers, for some kind of layers where it has several.

    `repeats_neighbours`: it gives each angle twice in a row, not once in each half.
    """

    path: str = "rotary_emb"
    layer_type: str | None = None
    repeats_neighbours: bool = False


@dataclass(frozen=True)
class Attention:
    """Softmax attention of `heads` queries over `kv_heads` keys and values of size `dim`.

    Queries and keys may have a norm, of each head or of all heads together (`norms_heads`), before they are rotated.
    """

    query: Weight
    key: Weight
    value: Weight
    output: Weight
    heads: int
    kv_heads: int
    dim: int
    scale: float
    angles: Angles | None = Angles()
    rotates_neighbours: bool = False  # pairs of dimensions are neighbours, not half the rotated ones apart
    query_norm: Norm | None = None
    key_norm: Norm | None = None
    norms_heads: bool = True
    window: int | None = None  # how many of the last positions it sees
    softcap: float | None = None  # of scores
    gated: bool = False  # `query` gives a query and a gate of each head; outputs are multiplied by the gate's sigmoid


@dataclass(frozen=True)
class ShortConvolution:
    """C · conv(B · x), a causal convolution of each channel over `width` tokens; `inputs` gives B, C and x beside."""

    inputs: Weight
    kernel: str  # the path of a convolution of PyTorch, [channels, 1, width]
    output: Weight


@dataclass(frozen=True)
class DeltaNet:
    """The gated delta rule (Yang et al. 2025) over queries, keys and values that went through a convolution and SiLU.

    `inputs` give queries, keys and values beside each other; gates; weights of values, β; steps, a. Or there are two
    whose outputs are those of one head of keys after the other: its query, key, values and gates; weights and steps.
    """

    inputs: tuple[Weight, ...]
    path: str  # of the kernel conv1d, A_log, dt_bias and the norm
    output: Weight
    heads: int  # of values
    groups: int  # heads of queries and keys
    key_dim: int
    value_dim: int
    epsilon: float  # of the norm


@dataclass(frozen=True)
class Mamba2:
    """A selective state space with one decay a head (Dao & Gu 2024); `inputs` gives gates, x, B, C and steps beside.

    The norm of its outputs is of `norm_groups` parts, after the gate or before it; without a norm the gate is alone.
    """

    inputs: Weight
    path: str  # of the kernel conv1d, A_log, dt_bias, D and the norm
    output: Weight
    heads: int
    head_dim: int
    groups: int  # of B and C
    state: int
    epsilon: float
    limits: tuple[float, float] = (0.0, float("inf"))  # of steps
    has_norm: bool = True
    norm_groups: int = 1
    gate_first: bool = True
    scales: tuple[tuple[float, int], ...] = ()  # what so many of the inputs' outputs are multiplied by, in turn


Mixer = Attention | ShortConvolution | DeltaNet | Mamba2


@dataclass(frozen=True)
class MLP:
    """down(activation(gate x) · up x), or down(activation(up x)) without a gate."""

    gate: Weight | None
    up: Weight
    down: Weight
    activation: Activation = "silu"


@dataclass(frozen=True)
class Layer:
    """x + mixer(norm(x)), then the same with the MLP; each output may have a norm of its own, or be scaled.

    `parallel`: both read the layer's input.
    """

    mixer: Mixer
    mlp: MLP
    mixer_norm: Norm | None
    mlp_norm: Norm | None
    mixer_output_norm: Norm | None = None
    mlp_output_norm: Norm | None = None
    residual_scale: float = 1.0
    parallel: bool = False


@dataclass(frozen=True)
class DecoderDescription:
    """A whole decoder. Logits are multiplied by `logit_scale`, then limited to ± `logit_softcap`.

    `embedding_scale` is part of the embedding, and multiplies tokens alone; `input_scale` multiplies all inputs.
    """

    layers: tuple[Layer, ...]
    norm: Norm
    embedding: str = "embed_tokens"
    embedding_scale: float = 1.0
    input_scale: float = 1.0
    logit_scale: float = 1.0
    logit_softcap: float = 0.0


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
        "window": sliding_window(config, layer),
    }  # fmt: skip
    return Attention(**settings | changes)


def fused_attention(config: Any, layer: int, name: str = "qkv_proj", **changes: Any) -> Attention:
    """The same where one linear layer gives queries, keys and values, in this order."""
    path, dim = f"layers.{layer}.self_attn.{name}", head_dim(config)
    queries, keys = config.num_attention_heads * dim, config.num_key_value_heads * dim
    return llama_attention(
        config, layer, query=Weight(path, 0, queries), key=Weight(path, queries, queries + keys),
        value=Weight(path, queries + keys, queries + 2 * keys), **changes,
    )  # fmt: skip


def head_norms(config: Any, layer: int, **settings: Any) -> dict[str, Norm]:
    """Norms of queries and keys by their usual names."""
    path, epsilon = f"layers.{layer}.self_attn", config.rms_norm_eps
    return {f"{name}_norm": Norm(f"{path}.{name[0]}_norm", epsilon, **settings) for name in ("query", "key")}


def llama_mlp(config: Any, layer: int) -> MLP:
    """A gated MLP as Llama names it."""
    path = f"layers.{layer}.mlp"
    name = getattr(config, "hidden_act", None) or config.hidden_activation
    return MLP(
        Weight(f"{path}.gate_proj"), Weight(f"{path}.up_proj"), Weight(f"{path}.down_proj"), activation(name)
    )  # fmt: skip


def fused_mlp(config: Any, layer: int) -> MLP:
    """The same where one linear layer gives gates and values, in this order."""
    path, size = f"layers.{layer}.mlp", config.intermediate_size
    fused = f"{path}.gate_up_proj"
    return MLP(
        Weight(fused, 0, size), Weight(fused, size, 2 * size), Weight(f"{path}.down_proj"),
        activation(config.hidden_act),
    )  # fmt: skip


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


def llama_decoder(config: Any, layers: list[Layer], **changes: Any) -> DecoderDescription:
    """A decoder whose last norm is Llama's, changed in places."""
    settings: dict[str, Any] = {"layers": tuple(layers), "norm": Norm("norm", config.rms_norm_eps)}
    return DecoderDescription(**settings | changes)
