"""Describe what a decoder computes: its layers as data, each weight by its path in the Transformers model.

A file of saltus.models.architectures makes a description of a configuration; NativeDecoder makes kernel calls of it.
Paths are relative to the model without its output layer (`get_decoder()`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

from saltus.models.attention_span import AttentionSpan

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
    and biases are added. Without a path w is 1.
    """

    path: str | None
    epsilon: float
    kind: Literal["rms", "rms-float32", "layer"] = "rms"
    offset: float = 0.0


@dataclass(frozen=True)
class Angles:
    """Where cosines and sines come from: a module of Transformers, for some kind of layers where it has several.

    `layout`: it gives each angle in both halves, twice in a row, or once. What is rotated is also multiplied by
    1 + `growth` · log(1 + ⌊(position + `shift`) / `steps`⌋) (Nakanishi 2025), or that alone where all angles are 0.
    """

    path: str = "rotary_emb"
    layer_type: str | None = None
    layout: Literal["halves", "interleaved", "once"] = "halves"
    growth: float = 0.0
    steps: int = 1
    shift: int = 0
    are_zero: bool = False


@dataclass(frozen=True)
class Attention:
    """Softmax attention of `heads` queries over `kv_heads` keys and values of size `dim`.

    Queries and keys may have a norm, of each head or of all heads together (`norm_per_head`), before they are rotated,
    or after it (`norms_rotated`). Without a key, the layer reads the keys and values of the layer `shares`; without a
    value, values are the keys before their norm.
    """

    query: Weight
    key: Weight | None
    value: Weight | None
    output: Weight
    heads: int
    kv_heads: int
    dim: int
    scale: float
    angles: Angles | None = Angles()
    query_angles: Angles | None = None  # where they are not those of keys
    rope_interleaved: bool = False  # pairs of dimensions lie beside each other, not half the rotated ones apart
    query_norm: Norm | None = None
    key_norm: Norm | None = None
    value_norm: Norm | None = None
    norm_per_head: bool = True
    norms_rotated: bool = False
    span: AttentionSpan = None  # how far back it sees
    softcap: float | None = None  # of scores
    sinks: str | None = None  # the path of a score of each head that takes weight and has no value
    shares: int | None = None
    gated: bool = False  # `query` gives a query and a gate of each head; outputs are multiplied by the gate's sigmoid


@dataclass(frozen=True)
class LatentAttention:
    """Multi-head latent attention: keys and values are expanded from a latent vector of each token (DeepSeek-AI 2024).

    A head's query and key have `nope_dim` dimensions, then `rope_dim` rotated ones; of keys the latter are shared by
    all heads. `latent` gives the latent vector and these; `expand` each head's other key dimensions and its value.
    Queries may go through a latent vector, too: `query_latent`, with a norm.
    """

    query: Weight
    latent: Weight
    latent_norm: Norm
    expand: Weight
    output: Weight
    heads: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    scale: float
    angles: Angles
    rope_interleaved: bool
    query_latent: Weight | None = None
    query_norm: Norm | None = None


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


Mixer = Attention | LatentAttention | ShortConvolution | DeltaNet | Mamba2


@dataclass(frozen=True)
class ParallelMixers:
    """Mixers that read the same; their outputs are added, each times its number."""

    parts: tuple[tuple[Mixer, float], ...]


@dataclass(frozen=True)
class MLP:
    """down(activation(gate x) · up x), or down(activation(up x)) without a gate."""

    gate: Weight | None
    up: Weight
    down: Weight
    activation: Activation = "silu"
    gate_scale: float = 1.0  # of what the gate gives, before the activation
    output_scale: float = 1.0


@dataclass(frozen=True)
class PerLayerInput:
    """The per-layer embedding of a token (Gemma 3n, 4) enters: x + norm(output(activation(gate x) · t)).

    t is √½ (norm(P e) + E), with e the input embedding; P e and E are a layer's part of `PerLayerEmbeddings`.
    """

    gate: Weight
    output: Weight
    output_norm: Norm
    activation: Activation


@dataclass(frozen=True)
class PerLayerEmbeddings:
    """The parts of all layers: a scaled embedding, and a projection of input embeddings with a norm of each part."""

    embedding: str
    embedding_scale: float
    projection: Weight
    norm: Norm


@dataclass(frozen=True)
class Experts:
    """A mixture: Σ weight · down(activation(gate x) · up x) over the `top_k` experts that the router chooses.

    `router` is the path of a module with `weight` [experts, hidden] and perhaps `bias`; `experts` that of a module with
    `gate_up_proj` (or `gate_proj` and `up_proj`) and `down_proj` [experts, out, in], or [experts, in, out] if
    `is_transposed`, and perhaps their biases `…_bias`. Scores are the softmax of the router's logits or the sigmoid of
    each. Experts are chosen by score plus the selection bias, of equal ones the first; with groups, only from those
    whose `best_of_group` best scores have the greatest sums. A weight is the score, divided by `least_sum` plus the sum
    of the chosen ones if `is_normalized`, times `scale` and the expert's own `expert_scale`.

    The router reads what the experts read, or the layer's input through `router_norm`; each of its inputs is multiplied
    by `router_scale` (the path of a tensor) and `router_factor`.
    """

    router: str
    experts: str
    top_k: int
    activation: Activation | Literal["clamped_swiglu"] = "silu"
    has_gate: bool = True
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    is_normalized: bool = False
    least_sum: float = 0.0
    scale: float = 1.0
    selection_bias: str | None = None  # the path of a tensor [experts]
    expert_scale: str | None = None  # likewise
    router_norm: Norm | None = None
    router_scale: str | None = None
    router_factor: float = 1.0
    groups: int = 1
    top_groups: int = 1
    best_of_group: int = 1
    scales_inputs: bool = False  # weights multiply what an expert reads, not what it gives
    is_transposed: bool = False
    gate_up_interleaved: bool = False  # outputs of gate and up alternate; else the first half is the gate's
    limit: float = 0.0  # of clamped_swiglu: min(gate, limit) · sigmoid(alpha · gate) · (clamp(up, ± limit) + 1)
    alpha: float = 0.0
    shared: MLP | None = None  # added to the sum, times the sigmoid of what `shared_gate` gives
    shared_gate: Weight | None = None


@dataclass(frozen=True)
class MLPAndExperts:
    """norm(mlp) + norm(experts) of the same layer's input; the experts' own comes through `experts_norm` (Gemma 4)."""

    mlp: MLP
    experts: Experts
    experts_norm: Norm
    mlp_output_norm: Norm
    experts_output_norm: Norm


@dataclass(frozen=True)
class Layer:
    """x + mixer(norm(x)), then the same with the MLP; each output may have a norm of its own, or be scaled.

    A layer may be one of both alone. `parallel`: both read the layer's input. The layer's output is multiplied by the
    number `output_scale`, by its path.
    """

    mixer: Mixer | ParallelMixers | None
    mlp: MLP | Experts | MLPAndExperts | None
    mixer_norm: Norm | None
    mlp_norm: Norm | None
    mixer_output_norm: Norm | None = None
    mlp_output_norm: Norm | None = None
    residual_scale: float = 1.0
    parallel: bool = False
    per_layer_input: PerLayerInput | None = None
    output_scale: str | None = None


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
    per_layer_embeddings: PerLayerEmbeddings | None = None


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


def latent_attention(config: Any, layer: int, **changes: Any) -> LatentAttention:
    """Attention as DeepSeek names it, changed in places."""
    path, rope = f"layers.{layer}.self_attn", config.rope_parameters
    size = config.qk_nope_head_dim + config.qk_rope_head_dim
    growth = rope.get("mscale_all_dim", 0) if rope.get("rope_type", "default") != "default" else 0
    stretch = 1 + 0.1 * growth * math.log(rope["factor"]) if growth and rope["factor"] > 1 else 1.0
    epsilon = 1e-6  # of the norms of latent vectors, whatever the configuration says
    settings: dict[str, Any] = {
        "query": Weight(f"{path}.q_proj"), "latent": Weight(f"{path}.kv_a_proj_with_mqa"),
        "latent_norm": Norm(f"{path}.kv_a_layernorm", epsilon), "expand": Weight(f"{path}.kv_b_proj"),
        "output": Weight(f"{path}.o_proj"), "heads": config.num_attention_heads, "nope_dim": config.qk_nope_head_dim,
        "rope_dim": config.qk_rope_head_dim, "value_dim": config.v_head_dim, "scale": size**-0.5 * stretch**2,
        "angles": Angles(), "rope_interleaved": getattr(config, "rope_interleave", True),
    }  # fmt: skip
    if config.q_lora_rank is not None:
        settings |= {
            "query": Weight(f"{path}.q_b_proj"), "query_latent": Weight(f"{path}.q_a_proj"),
            "query_norm": Norm(f"{path}.q_a_layernorm", epsilon),
        }  # fmt: skip
    return LatentAttention(**settings | changes)


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


def llama_mlp(config: Any, layer: int, name: str = "mlp") -> MLP:
    """A gated MLP as Llama names it."""
    path = f"layers.{layer}.{name}"
    active = activation(
        getattr(config, "hidden_activation", None) or config.hidden_act
    )  # Gemma 2 has both, and uses this
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
        "scoring": "sigmoid", "is_normalized": config.norm_topk_prob, "least_sum": 1e-20,
        "scale": config.routed_scaling_factor, "selection_bias": f"{path}.gate.e_score_correction_bias",
        "groups": config.n_group, "top_groups": config.topk_group, "best_of_group": 2,
    }  # fmt: skip
    if "shared" not in changes:
        settings["shared"] = llama_mlp(config, layer, "mlp.shared_experts")
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


def llama_decoder(config: Any, layers: list[Layer], **changes: Any) -> DecoderDescription:
    """A decoder whose last norm is Llama's, changed in places."""
    settings: dict[str, Any] = {"layers": tuple(layers), "norm": Norm("norm", config.rms_norm_eps)}
    return DecoderDescription(**settings | changes)


def mixers_of(layer: Layer) -> tuple[tuple[Mixer, float], ...]:
    """The mixers of a layer, and what their outputs are multiplied by."""
    if layer.mixer is None:
        return ()
    return layer.mixer.parts if isinstance(layer.mixer, ParallelMixers) else ((layer.mixer, 1.0),)


def router_weights(layer: Layer) -> list[str]:
    """Parameters of a router, which are taken in the model's dtype or in float32, as Transformers keeps some."""
    experts = layer.mlp.experts if isinstance(layer.mlp, MLPAndExperts) else layer.mlp
    if not isinstance(experts, Experts):
        return []
    named = experts.selection_bias, experts.expert_scale, experts.router_scale
    return [f"{experts.router}.weight", f"{experts.router}.bias", *filter(None, named)]
