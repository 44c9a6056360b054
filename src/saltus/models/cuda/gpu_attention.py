"""Softmax attention of a GPU's layers: their weights as our kernels take them, and what a call's layers share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from torch import Tensor

from saltus.models.attention_span import AttentionSpan
from saltus.models.cpu.decoder_weights import Resolver
from saltus.models.cuda.described_layers import kinds_of_angles, projections_of
from saltus.models.cuda.fixed_shape_attention import StaticInputs
from saltus.models.cuda.kv_pages import KVPagePool
from saltus.models.cuda.layer_weights import layers_of, linear_layer, merged, norm_of, one_weight
from saltus.models.mixer_description import Angles, Attention, GateActivation

KindOfAngles = tuple[Angles, bool]  # and whether pairs of dimensions lie beside each other
ShapesOfKeys = tuple[tuple[int, int], tuple[int, int]]  # of a token's keys and values: heads and size


@dataclass(frozen=True)
class GPUAttention:
    """Attention of a layer; the weights of queries, keys, values and gates lie beside each other."""

    heads: int
    kv_heads: int  # whose keys and values it reads
    dim: int
    scale: float
    span: AttentionSpan
    qkv: Sequence[Tensor]  # one, or several where packed ones have several formats
    qkv_blocks: Any
    bias: Tensor | None
    output: Sequence[Tensor]
    output_blocks: Any
    head_norms: tuple[Any, Any] | None  # of queries and keys
    angles: tuple[int, ...] = (0, 0)  # which tables, of queries and keys; without them no rotation and no growth
    value_epsilon: float | None = None  # of a norm without weights
    softcap: float | None = None
    sinks: Tensor | None = None
    shares: int | None = None  # the layer whose keys and values it reads, if they are not its own
    output_bias: Tensor | None = None
    gated: bool = False  # a gate of outputs follows each query
    gate_columns: int = 0  # after queries, keys and values the product gives gates: of heads, or of all their outputs
    gate_activation: GateActivation = "sigmoid"
    grouped: bool = False  # the queries of a key, the key and its value stand together

    @property
    def shapes(self) -> ShapesOfKeys:
        """Of a token's keys and values."""
        return (self.kv_heads, self.dim), (self.kv_heads, self.dim)

    @classmethod
    def of_llama(cls, a: Any, window: int | None) -> GPUAttention:
        """That of a layer whose modules have Llama's names."""
        norms = (a.q_norm, a.k_norm) if getattr(a, "q_norm", None) is not None else None
        heads, kv_heads = (len(each.weight) // a.head_dim for each in (a.q_proj, a.k_proj))
        return cls(
            heads, kv_heads, a.head_dim, a.scaling, window, *merged([a.q_proj, a.k_proj, a.v_proj]),
            *one_weight(a.o_proj), norms,
        )  # fmt: skip

    @classmethod
    def described(cls, a: Attention, weights: Resolver, kinds: Sequence[KindOfAngles]) -> GPUAttention:
        """That of a description which `described_for_gpu` knows; `kinds`: the tables of angles."""
        norms = None
        if a.query_norm is not None:
            every = not a.norm_per_head
            sizes = (each * a.dim for each in ((a.heads, a.kv_heads) if every else (1, 1)))
            both = zip((a.query_norm, a.key_norm or a.query_norm), sizes, strict=True)
            norms = (norm_of(norm, weights, every, size) for norm, size in both)
            norms = tuple(replace(norm, rotated=a.norms_rotated) for norm in norms)
        projections = layers_of(projections_of(a), weights.base)
        output = linear_layer(weights.module(a.output.path))
        return cls(
            a.heads, a.kv_heads, a.dim, a.scale, a.span, *merged(projections),
            *one_weight(output), norms, tuple(map(kinds.index, kinds_of_angles(a))),
            None if a.value_norm is None else a.value_norm.epsilon, a.softcap,
            None if a.sinks is None else weights.tensor(a.sinks), a.shares, output.bias,
            gated=a.gated, gate_columns=a.heads * a.dim if a.gate else a.heads if a.head_gate else 0,
            gate_activation=a.gate_activation, grouped=a.fused or a.grouped,
        )  # fmt: skip

    def parts(self, x: Tensor, number: int, angles: Sequence[Any], call: AttentionOfCall) -> Tensor:
        """[parts, rows, hidden], float32, of what layer `number` reads [padded rows, inputs]."""
        from saltus.models.cuda import linear_kernels, recurrent_kernels, row_kernels

        rows, inputs = call.rows, call.inputs
        parts = linear_kernels.linear_parts(x, self.qkv, self.qkv_blocks, rows)
        memory = call.memory(x, self.heads, *self.shapes)
        keys, values = call.pool.of_layer(number if self.shares is None else self.shares)
        new = (keys, values) if self.shares is None else (None, None)
        row_kernels.rotate_and_store(
            parts, self.bias, self.head_norms, angles, inputs.positions, inputs.slots, memory.queries, *new,
            self.value_epsilon, self.gated, self.gate_columns, self.grouped,
        )  # fmt: skip
        call.attend(
            memory, keys, values, scale=self.scale, span=self.span, softcap=self.softcap, sinks=self.sinks
        )  # fmt: skip
        if self.gated or self.gate_columns:
            recurrent_kernels.gate_heads(
                memory.attended[:rows], parts, self.bias, self.gate_columns, self.gate_activation == "softplus"
            )
        return output_parts(memory.attended, self.output, self.output_blocks, self.output_bias, rows)


class MemoryOfHeads(NamedTuple):
    """Queries [padded rows, heads, dim], what they attended to [.., value_dim], and the sums of splits."""

    queries: Tensor
    attended: Tensor
    sums: Any


class AttentionOfCall:
    """What the attention of a call's layers has in common: inputs, and memory that they use in turn."""

    def __init__(self, inputs: StaticInputs, pool: KVPagePool, last_seen: Tensor | None) -> None:
        self.inputs, self.pool, self.rows = inputs, pool, inputs.shape.num_rows
        self.seen = inputs.positions if last_seen is None else last_seen
        self.recent = inputs.recent_slots.view(self.rows, -1)
        self.memories: dict[Any, MemoryOfHeads] = {}

    def memory(self, like: Tensor, heads: int, keys: tuple[int, int], values: tuple[int, int]) -> MemoryOfHeads:
        """For rows like these [padded rows, ..] and so many heads, whose keys and values [kv_heads, size] have these
        shapes."""
        from saltus.models.cuda.attention_kernels import SplitSums

        if (key := (heads, keys, values)) not in self.memories:
            shape, (kv_heads, dim), value_dim = self.inputs.shape, keys, values[1]
            queries = like.new_empty(len(like), heads, dim)
            positions = shape.num_pages * self.pool.page_size
            sums = SplitSums.empty(queries, kv_heads, shape.num_groups, positions, value_dim)
            self.memories[key] = MemoryOfHeads(queries, like.new_empty(len(like), heads, value_dim), sums)
        return self.memories[key]

    def attend(self, memory: MemoryOfHeads, keys: Tensor, values: Tensor, **settings: Any) -> None:
        """Let queries attend to a layer's keys and values; settings are those of `attention_kernels.attend`."""
        from saltus.models.cuda import attention_kernels

        inputs = self.inputs
        attention_kernels.attend(
            memory.queries[: self.rows], keys, values, inputs.block_tables, self.recent, self.seen, memory.sums,
            memory.attended, rows_per_group=inputs.shape.rows_per_group, page=self.pool.page_size, **settings,
        )  # fmt: skip


def output_parts(x: Tensor, weights: Sequence[Tensor], blocks: Any, bias: Tensor | None, rows: int) -> Tensor:
    """The parts of attention's last product in float32, [parts, rows, hidden], of x [padded rows, heads, dim]."""
    from saltus.models.cuda import linear_kernels

    return linear_kernels.linear_parts(x.flatten(1), weights, blocks, rows, bias)


def places_of_keys(shapes: Sequence[ShapesOfKeys | int | None]) -> tuple[list[ShapesOfKeys], list[tuple[int, int]]]:
    """The shapes of keys and values that layers have, and of each layer which and its place among those that have it.

    Given are each layer's shapes, or the layer whose keys it reads, or None without attention, which is at −1.
    """
    kinds = list(dict.fromkeys(each for each in shapes if isinstance(each, tuple)))
    places: list[tuple[int, int]] = []
    for each in shapes:
        if each is None:
            places.append((-1, -1))
        elif isinstance(each, int):
            places.append(places[each])
        else:
            which = kinds.index(each)
            places.append((which, len({place for place in places if place[0] == which})))
    return kinds, places
