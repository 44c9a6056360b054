"""Describe what a decoder computes: its layers as data, each weight by its path in the Transformers model.

A file of saltus.models.architectures makes a description of a configuration; NativeDecoder makes kernel calls of it.
Paths are relative to the model without its output layer (`get_decoder()`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from saltus.models.attention_span import AttentionSpan

Activation = Literal["silu", "gelu_tanh", "gelu", "relu", "relu_squared", "sigmoid"]
GateActivation = Literal["sigmoid", "softplus"]  # of what attention gives

LLAMA_DECODERS = {"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"}  # Llama's layers


class NotDescribed(ValueError):
    """A configuration asks for something that descriptions do not say; Transformers' layers compute it.

    A `setting` that Transformers' class for the configuration does not list is computed by nothing.
    """

    def __init__(self, what: str, setting: str = "") -> None:
        super().__init__(what)
        self.setting = setting


@dataclass(frozen=True)
class Weight:
    """A linear layer, or its outputs from `start` to `stop`."""

    path: str
    start: int = 0
    stop: int | None = None
    has_bias: bool = True  # if the layer has one


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
    1 + `growth` · log(1 + ⌊(position + `shift`) / `steps`⌋) (Nakanishi 2025), or that alone: `zeros` dimensions have
    angles of 0. `backwards`: the other way around.
    """

    path: str = "rotary_emb"
    layer_type: str | None = None
    layout: Literal["halves", "interleaved", "once"] = "halves"
    growth: float = 0.0
    steps: int = 1
    shift: int = 0
    zeros: int = 0
    backwards: bool = False


@dataclass(frozen=True)
class Positions:
    """Learned embeddings of positions, which are added to inputs: that of position 0 is row `first`."""

    path: str
    first: int = 0


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
    fused: bool = False  # `query`, which is also `key` and `value`, gives a query, a key and a value of each head
    gated: bool = False  # `query` gives a query and a gate of each head; outputs are multiplied by the gate's sigmoid
    gate: Weight | None = None  # gives a number for each output, by whose activation it is multiplied
    head_gate: Weight | None = None  # the same with one number for each head
    gate_activation: GateActivation = "sigmoid"  # of `gate` and `head_gate`


@dataclass(frozen=True)
class LatentAttention:
    """Multi-head latent attention: keys and values are linear in a latent vector of each token (DeepSeek-AI 2024).

    A head's query and key have `nope_dim` dimensions, then `rope_dim` rotated ones; of keys the latter are shared by
    all heads; without angles nothing is rotated. `latent` gives the latent vector and these; `expand` each head's other
    key dimensions and its value. The kernels multiply queries and outputs by these matrices, and attend to latent
    vectors, which alone are kept. Queries may go through a latent vector, too: `query_latent`, with a norm. All their
    dimensions grow with the position, as `Angles` says.
    """

    query: Weight
    latent: Weight
    latent_norm: Norm
    expand: Weight
    output: Weight
    heads: int
    latent_dim: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    scale: float
    angles: Angles | None
    rope_interleaved: bool
    query_latent: Weight | None = None
    query_norm: Norm | None = None
    growth: float = 0.0
    steps: int = 1


@dataclass(frozen=True)
class ShortConvolution:
    """C · conv(B · x), a causal convolution of each channel over `width` tokens; `inputs` gives B, C and x beside."""

    inputs: Weight
    kernel: str  # the path of a convolution of PyTorch, [channels, 1, width]
    output: Weight


@dataclass(frozen=True)
class DeltaNet:
    """The gated delta rule (Yang et al. 2025) over queries, keys and values that went through a convolution and SiLU.

    `inputs` give queries, keys and values beside each other, or by a layer each; gates; weights of values, β; steps, a.
    Or there are two whose outputs are those of one head of keys after the other: its query, key, values and gates;
    weights and steps.
    """

    inputs: tuple[Weight, ...]
    path: str  # of the kernel conv1d, A_log, dt_bias and the norm
    output: Weight
    heads: int  # of values
    groups: int  # heads of queries and keys
    key_dim: int
    value_dim: int
    epsilon: float  # of the norm
    norm: str = "norm"  # its name
    weight_scale: float = 1.0  # of β, after the sigmoid


@dataclass(frozen=True)
class KimiDeltaNet:
    """The gated delta rule with channel-wise decays, of each number of a key (Kimi Team 2025); heads share no keys.

    Queries, keys and values have a linear layer each, and parts of one convolution, in this order; decays and the gate
    of outputs, a sigmoid after a norm, two, one after the other.
    """

    query: Weight
    key: Weight
    value: Weight
    decay: tuple[Weight, Weight]
    gate: tuple[Weight, Weight]
    weight: Weight  # of values, β
    kernel: str  # the path of the convolution
    decays: str  # of A_log and dt_bias
    norm: str
    output: Weight
    heads: int
    dim: int
    epsilon: float


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


@dataclass(frozen=True)
class Mamba:
    """A selective state space with a step for each channel, and a decay for each number of its state (Gu & Dao 2024).

    `inputs` gives channels and gates beside each other. Of the convolved channels `selection` gives a vector of `rank`
    numbers, from which `steps` makes those of all channels, B and C; each of these three may have a norm.
    """

    inputs: Weight
    path: str  # of the kernel conv1d, A_log and D
    selection: Weight
    steps: Weight  # without its bias
    step_bias: str  # the path of it
    output: Weight
    channels: int
    state: int
    rank: int
    norms: tuple[Norm, Norm, Norm] | None = None


Mixer = Attention | LatentAttention | ShortConvolution | DeltaNet | KimiDeltaNet | Mamba | Mamba2


@dataclass(frozen=True)
class ParallelMixers:
    """Mixers that read the same; their outputs are added, each times its number."""

    parts: tuple[tuple[Mixer, float], ...]


@dataclass(frozen=True)
class MLP:
    """down(activation(gate x) · up x), or down(activation(up x)) without a gate.

    With a `gate_cutoff` only what the gate gives above mean + `gate_cutoff` · standard deviation counts, less that
    (the Gaussian top-k of Gemma 3n).
    """

    gate: Weight | None
    up: Weight
    down: Weight
    activation: Activation | Literal["xielu"] = "silu"
    gate_scale: float = 1.0  # of what the gate gives, before the activation
    output_scale: float = 1.0
    gate_cutoff: float | None = None
    xielu: str | None = None  # the path of this activation's numbers (Huang & Schlag 2024)


@dataclass(frozen=True)
class PerLayerInput:
    """The per-layer embedding of a token (Gemma 3n, 4) enters: x + norm(output(activation(gate x) · t)).

    In a layer with AltUp, x is the corrected active stream, scaled, and the norm is added to all streams but the first.
    t is √½ (norm(P e) + E), with e the input embedding; P e and E are a layer's part of `PerLayerEmbeddings`.
    """

    gate: Weight
    output: Weight
    output_norm: Norm
    activation: Activation


@dataclass(frozen=True)
class PerLayerEmbeddings:
    """The parts of all layers: a scaled embedding, and a projection of input embeddings with a norm of each part.

    With `others_are_first`, tokens beyond the embedding have that of token 0; else there may be none.
    """

    embedding: str
    embedding_scale: float
    projection: Weight
    norm: Norm
    others_are_first: bool = False


@dataclass(frozen=True)
class Laurel:
    """A low-rank branch beside the mixer (LAuReL, Menghani et al. 2024): (x + mixer n + n + norm(up(down n))) / √2.

    n is what the mixer reads: x through its norm.
    """

    down: Weight
    up: Weight
    norm: Norm


@dataclass(frozen=True)
class AltUp:
    """Alternating updates (Baykal et al. 2023): a layer computes one of several streams of a token's hidden states.

    The router says r = tanh(router(norm(x) / size)) of a stream x. With r of the active one, stream i is predicted as
    p_i = x_i + Σ_j (P r)_ij x_j. The layer makes y of the active prediction p, and with r of y the streams are
    p_i + (1 + (C r)_i) (y − p).
    """

    path: str  # of router_norm, modality_router, prediction_coefs, correction_coefs and correct_output_scale
    epsilon: float  # of the norm
    scales_output: bool  # what the per-layer input reads is multiplied by correct_output_scale


@dataclass(frozen=True)
class Streams:
    """The streams of hidden states of a token. The embedding is the first one.

    The others are projections of it, and give the last hidden states through projections of their own: the mean of all.
    Each projection is scaled to the root mean square of the first stream.
    """

    active: int  # which one layers compute; its states are those after a layer that drafters read
    projections: tuple[Weight, ...]
    last_projections: tuple[Weight, ...]


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
    number `output_scale`, by its path. `altup`: this is done to one stream of several, and others follow.
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
    laurel: Laurel | None = None
    altup: AltUp | None = None


@dataclass(frozen=True)
class DecoderDescription:
    """A whole decoder. Logits are multiplied by `logit_scale`, then limited to ± `logit_softcap`.

    `embedding_scale` is part of the embedding, and multiplies tokens alone; `input_scale` multiplies all inputs; then
    come their `input_norm` and `positions`.
    """

    layers: tuple[Layer, ...]
    norm: Norm
    embedding: str = "embed_tokens"
    embedding_scale: float = 1.0
    input_scale: float = 1.0
    input_norm: Norm | None = None
    logit_scale: float = 1.0
    logit_softcap: float = 0.0
    per_layer_embeddings: PerLayerEmbeddings | None = None
    streams: Streams | None = None  # layers have AltUp
    positions: Positions | None = None


def mixers_of(layer: Layer) -> tuple[tuple[Mixer, float], ...]:
    """The mixers of a layer, and what their outputs are multiplied by."""
    if layer.mixer is None:
        return ()
    return layer.mixer.parts if isinstance(layer.mixer, ParallelMixers) else ((layer.mixer, 1.0),)


def experts_of(layer: Layer) -> Experts | None:
    """The mixture of a layer, if it has one."""
    experts = layer.mlp.experts if isinstance(layer.mlp, MLPAndExperts) else layer.mlp
    return experts if isinstance(experts, Experts) else None


def mlp_of(layer: Layer) -> MLP | None:
    """The MLP of a layer, perhaps beside experts; None if it has none."""
    if isinstance(layer.mlp, MLPAndExperts):
        return layer.mlp.mlp
    return layer.mlp.shared if isinstance(layer.mlp, Experts) else layer.mlp


def weights_perhaps_in_float32(description: DecoderDescription) -> tuple[str, ...]:
    """How parameters end that may be in float32 beside the model's dtype, as Transformers keeps some.

    They are those of routers, and the constants of recurrences.
    """
    found = [".A_log", ".dt_bias", ".D"]
    for experts in filter(None, map(experts_of, description.layers)):
        named = experts.selection_bias, experts.expert_scale, experts.router_scale
        found += [f"{experts.router}.weight", f"{experts.router}.bias", *filter(None, named)]
    return tuple(found)
