"""Describe what a decoder computes: its layers as data, each weight by its path in the Transformers model.

A file of saltus.models.architectures makes a description of a configuration; NativeDecoder makes kernel calls of it.
Paths are relative to the model without its output layer (`get_decoder()`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from saltus.models.mixer_description import KimiDeltaNet, LatentAttention, Mixer, Norm, ParallelMixers, Weight

Activation = Literal["silu", "gelu_tanh", "gelu", "relu", "relu_squared", "sigmoid"]

LLAMA_DECODERS = {"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"}  # Llama's layers


class NotDescribed(ValueError):
    """A configuration asks for something that descriptions do not say; Transformers' layers compute it.

    A `setting` that Transformers' class for the configuration does not list is computed by nothing.
    """

    def __init__(self, what: str, setting: str = "") -> None:
        super().__init__(what)
        self.setting = setting


@dataclass(frozen=True)
class PositionEmbedding:
    """Learned embeddings of positions, which are added to inputs: that of position 0 is row `first`."""

    path: str
    first: int = 0


@dataclass(frozen=True)
class MLP:
    """down(activation(gate x) · up x), or down(activation(up x)) without a gate.

    With a `gate_cutoff` only what the gate gives above mean + `gate_cutoff` · standard deviation counts, less that
    (the Gaussian top-k of Gemma 3n).
    """

    gate: Weight | None
    up: Weight
    down: Weight
    activation: Activation | Literal["xielu", "clamped_silu"] = "silu"
    gate_scale: float = 1.0  # of what the gate gives, before the activation
    output_scale: float = 1.0
    gate_cutoff: float | None = None
    # if not 0, what the activation gives is at most this, or with "clamped_silu" what it reads; what it multiplies is
    # within ± this
    limit: float = 0.0
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
class HyperConnection:
    """Hyper-connections around a mixer or an MLP (Zhu et al. 2024).

    It reads a mean of a token's streams x, and is added to all. With u = (`mix` x) / √(mean x² + ε) of all x, it reads
    Σ_i (σ(s₀ u_i + b_i) + `least`) x_i. What it gives is added to stream j times `magnitude` · σ(s₁ u_j + b_j) +
    `written_least`. A stream stays as it is, or with `rounds` becomes Σ_i M_ij x_i: M is the softmax of the rows of
    s₂ u + b plus `least`, divided by the sums of columns, then in turns by those of rows and columns, so often in all
    (Xie et al. 2026).
    """

    mix: str  # the path of a tensor [gates, streams · hidden]; those of `base` [gates] and `scale` [kinds of gates]
    base: str
    scale: str
    epsilon: float
    least: float
    magnitude: float = 1.0
    written_least: float = 0.0
    rounds: int = 0


@dataclass(frozen=True)
class HyperStreams:
    """A token has `count` streams of hidden states, at first its embedding each; layers have hyper-connections.

    The last norm reads a mean of them, with weights as those that a mixer reads by, or all 1 / `count` without. What
    drafters read after a layer is what the next mixer, or the last norm, reads.
    """

    count: int
    last: HyperConnection | None = None


@dataclass(frozen=True)
class Experts:
    """A mixture: Σ weight · down(activation(gate x) · up x) over the `top_k` experts that the router chooses.

    `router` is the path of a module with `weight` [experts, hidden] and perhaps `bias`; `experts` that of a module with
    `gate_up_proj` (or `gate_proj` and `up_proj`) and `down_proj` [experts, out, in], or [experts, in, out] if
    `is_transposed`, and perhaps their biases `…_bias`. Scores are the softmax of the router's logits or the sigmoid of
    each. Experts are chosen by score (or logit, `biases_logits`) plus the selection bias, of equal ones the first; with
    groups, only from those whose `best_of_group` best scores have the greatest sums. A weight is the score, divided by
    `least_sum` plus the sum of the chosen ones if `is_normalized`, times `scale` and the expert's own `expert_scale`.
    "sparse_mixer" chooses two, one after the other (Liu et al. 2024): a weight is the softmax over the logits that are
    left and at most `margin` below the greatest, as a part of this one or of their own size.
    The last `zero_experts` have no weights, and give what they read (LongCat-Flash).

    The router reads what the experts read, or the layer's input through `router_norm`; each of its inputs is multiplied
    by `router_scale` (the path of a tensor) and `router_factor`.
    """

    router: str
    experts: str
    top_k: int
    activation: Activation | Literal["clamped_swiglu", "clamped_silu"] = "silu"
    has_gate: bool = True
    scoring: Literal["softmax", "sigmoid", "sparse_mixer"] = "softmax"
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
    # of clamped_swiglu: min(gate, limit) · sigmoid(alpha · gate) · (clamp(up, ± limit) + 1); else as that of an MLP
    limit: float = 0.0
    alpha: float = 0.0
    shared: MLP | None = None  # added to the sum, times the sigmoid of what `shared_gate` gives
    shared_gate: Weight | None = None
    biases_logits: bool = False
    margin: float = 0.0  # of sparse_mixer
    output_scale: float = 1.0  # of what all experts and the shared one give
    zero_experts: int = 0
    # experts read what the first of two projections gives, and their sum goes through the second
    latent: tuple[Weight, Weight] | None = None


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

    A layer may be one of both alone, or add nothing. `parallel`: both read the layer's input. The layer's output is
    multiplied by the number `output_scale`, by its path. `altup`: this is done to one stream of several, and others
    follow.
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
    mixer_streams: HyperConnection | None = None  # around the mixer, and around the MLP; there is no other residual
    mlp_streams: HyperConnection | None = None
    shortcut: Experts | None = None  # reads what the MLP reads, and is added after the next layer (LongCat-Flash)


@dataclass(frozen=True)
class DecoderDescription:
    """A whole decoder. Logits are multiplied by `logit_scale`, then limited to ± `logit_softcap`.

    `embedding_scale` is part of the embedding, and multiplies tokens alone; `input_scale` multiplies all inputs; then
    come their `input_norm` and `position_embedding`.
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
    hyper_streams: HyperStreams | None = None  # layers have hyper-connections
    position_embedding: PositionEmbedding | None = None


def mixers_of(layer: Layer) -> tuple[tuple[Mixer, float], ...]:
    """The mixers of a layer, and what their outputs are multiplied by."""
    if layer.mixer is None:
        return ()
    return layer.mixer.parts if isinstance(layer.mixer, ParallelMixers) else ((layer.mixer, 1.0),)


def experts_of(layer: Layer) -> Experts | None:
    """The mixture of a layer, if it has one."""
    experts = layer.mlp.experts if isinstance(layer.mlp, MLPAndExperts) else layer.shortcut or layer.mlp
    return experts if isinstance(experts, Experts) else None


def mlp_of(layer: Layer) -> MLP | None:
    """The MLP of a layer, perhaps beside experts; None if it has none."""
    if isinstance(layer.mlp, MLPAndExperts):
        return layer.mlp.mlp
    return layer.mlp.shared if isinstance(layer.mlp, Experts) else layer.mlp


def weights_perhaps_in_float32(description: DecoderDescription) -> tuple[str, ...]:
    """How parameters end that may be in float32 beside the model's dtype, as Transformers keeps some.

    They are those of routers, sinks, the constants and kernels of recurrences, what weighs the heads of indexers, and
    what scales angles.
    """
    found = [".A_log", ".dt_bias", ".D", ".sinks", "rotary_emb.alpha"]
    for mixer in (mixer for layer in description.layers for mixer, _ in mixers_of(layer)):
        if isinstance(mixer, LatentAttention) and mixer.indexer is not None:
            found += [
                f"{mixer.indexer.weights}.weight",
                *(f"{mixer.indexer.key_norm.path}.{part}" for part in ("weight", "bias")),
            ]
        if isinstance(mixer, KimiDeltaNet):
            found.append(f"{mixer.kernel}.weight")
    connections = [each for layer in description.layers for each in (layer.mixer_streams, layer.mlp_streams)]
    connections.append(description.hyper_streams and description.hyper_streams.last)
    found += [path for each in connections if each is not None for path in (each.mix, each.base, each.scale)]
    for experts in filter(None, map(experts_of, description.layers)):
        named = experts.selection_bias, experts.expert_scale, experts.router_scale
        found += [f"{experts.router}.weight", f"{experts.router}.bias", *filter(None, named)]
    return tuple(found)
