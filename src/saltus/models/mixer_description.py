"""Describe what mixes the tokens of a layer, as data: attention, convolutions, recurrences; weights and norms by path.

See decoder_description.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from saltus.models.attention_span import AttentionSpan

GateActivation = Literal["sigmoid", "softplus"]  # of what attention gives


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
class PositionLogarithms:
    """log(1 + position), rounded, by which `head_scale` of latent attention multiplies."""


@dataclass(frozen=True)
class Attention:
    """Softmax attention of `heads` queries over `kv_heads` keys of size `dim` and values of this or another size.

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
    value_dim: int | None = None  # the size of values where it is not that of keys
    value_scale: float = 1.0  # values are multiplied by it
    grouped: bool = False  # `query`, which is also `key` and `value`, gives a group's queries, its key and its value

    @property
    def size_of_values(self) -> int:
        """The size of a head's values, and of what it gives."""
        return self.dim if self.value_dim is None else self.value_dim


@dataclass(frozen=True)
class KeyPools:
    """Whole pools of `size` tokens after each other are chosen, by one key each; a token attends to its last ones, too.

    A pool's key is the mean of its tokens' keys, weighted for each number by the softmax of what `gate` gives of a
    token plus the `offsets` [size, numbers] of its place (GLM-5.3 Flash).
    """

    size: int
    gate: Weight
    offsets: str  # the path of a tensor


@dataclass(frozen=True)
class Indexer:
    """Chooses the keys that a token attends to: DeepSeek Sparse Attention's lightning indexer (DeepSeek-AI 2025).

    A token's score of a key is Σ over `heads` of weight · max(0, query · key), whose queries come from the latent
    vector of queries, after its norm; keys and weights from what the layer reads. Their first dimensions, or the last,
    are rotated by the layer's angles. The `top_k` keys of the greatest scores are chosen, of equal ones the first.
    """

    query: Weight
    key: Weight
    key_norm: Norm
    weights: str  # the path of the layer that gives a weight for each head; perhaps in float32
    heads: int
    dim: int
    rope_interleaved: bool
    top_k: int
    rotates_last: bool = False
    pools: KeyPools | None = None  # `top_k` counts their tokens
    query_norm: Norm | None = None  # of what the layer reads: queries come from it, not from their latent vector
    head_scale: str | None = None  # as that of the layer's queries, before they are rotated

    @property
    def kept(self) -> int:
        """Numbers that are kept of a token: its key, or with pools its gate and a pool's key, too."""
        return self.dim if self.pools is None else 3 * self.dim


@dataclass(frozen=True)
class LatentAttention:
    """Multi-head latent attention: keys and values are linear in a latent vector of each token (DeepSeek-AI 2024).

    A head's query and key have `nope_dim` dimensions, then `rope_dim` rotated ones; of keys the latter are shared by
    all heads; without angles nothing is rotated. `latent` gives the latent vector and these; `expand` each head's other
    key dimensions and its value. The kernels multiply queries and outputs by these matrices, and attend to latent
    vectors, which alone are kept. Queries may go through a latent vector, too: `query_latent`, with a norm. All their
    dimensions grow with the position, as `Angles` says. An indexer, or that of the layer `shares_choice`, chooses the
    keys.

    Without `latent`, the layer reads the latent vectors of the layer `shares`. With a `head_scale`, the path of `scale`
    and `bias` of each head, its queries are multiplied by scale · log(1 + position) + bias (Nakanishi 2025).
    """

    query: Weight
    latent: Weight | None
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
    head_gate: Weight | None = None  # gives a number for each head, by whose sigmoid its output is multiplied
    gate: Weight | None = None  # the same with a number for each output
    sinks: str | None = None  # the path of a score of each head that takes weight and has no value
    query_scale: float = 1.0  # of queries
    latent_scale: float = 1.0  # of latent vectors, after their norm
    indexer: Indexer | None = None
    shares_choice: int | None = None
    shares: int | None = None
    head_scale: str | None = None


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
    of outputs, a sigmoid after a norm, one, or two, one after the other. The logarithm of a decay is −exp(A_log) ·
    softplus(x + dt_bias), or, where there is a `least_decay`, this number times sigmoid(exp(A_log) · (x + dt_bias)).
    With `rounds_decay` it is rounded to the model's dtype.
    """

    query: Weight
    key: Weight
    value: Weight
    decay: tuple[Weight, ...]
    gate: tuple[Weight, ...]
    weight: Weight  # of values, β
    kernel: str  # the path of the convolution
    decays: str  # of A_log and dt_bias
    norm: str
    output: Weight
    heads: int
    dim: int
    epsilon: float
    least_decay: float = 0.0
    rounds_decay: bool = False


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
