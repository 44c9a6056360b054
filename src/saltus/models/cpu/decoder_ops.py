"""Make the operations of a described decoder: the kernels' arguments, with buffers and weights that fit each other."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from saltus.kernels import native
from saltus.kernels.native import altup
from saltus.models.attention_span import AttentionSpan
from saltus.models.cpu.altup_ops import StreamOps
from saltus.models.cpu.attention import AttentionCall
from saltus.models.cpu.decoder_weights import Resolver, linear_struct
from saltus.models.cpu.expert_ops import experts_struct
from saltus.models.cpu.hybrid_kv_cache import HybridKVCache, RecurrentCall, StateSizes
from saltus.models.cpu.mixer_ops import MixerOps
from saltus.models.cpu.per_layer_ops import PerLayerOps
from saltus.models.decoder_description import (
    MLP,
    Angles,
    Attention,
    DecoderDescription,
    Experts,
    LatentAttention,
    Laurel,
    Layer,
    Mixer,
    MLPAndExperts,
    Norm,
    Weight,
    mixers_of,
)
from saltus.models.packed_decoder import check_heads


@dataclass(frozen=True)
class _AttentionKind:
    """What calls of a kernel have in common: the first fields, and which memory they use."""

    struct: bytes
    span: AttentionSpan
    own_memory: int | None  # the layer of the memory that this kind alone uses; None: that of most layers
    row_bytes: tuple[int, ...]  # of queries, keys, values and outputs
    new_rows: tuple[Tensor, Tensor]  # keys and values, [kv_heads, rows, size]


class DecoderOps:
    """The operations of a decoder's layers over buffers of as many rows as `hidden` has."""

    def __init__(
        self, description: DecoderDescription, weights: Resolver, hidden: Tensor, same_everywhere: bool
    ) -> None:
        self.weights, self.hidden, self.same_everywhere = weights, hidden, same_everywhere
        self.buffers: dict[tuple[str, int], Tensor] = {}
        self.products: list[tuple[native.Linear, Sequence[Weight]]] = []  # and the layers whose outputs they are
        self.angles: list[Angles] = []  # of rotations
        self.kinds: list[_AttentionKind] = []
        mixers = [mixer for layer in description.layers for mixer, _ in mixers_of(layer)]
        attention = [mixer for mixer in mixers if isinstance(mixer, Attention)]
        self.main_sizes = next(filter(None, map(_memory_sizes, mixers)), (0, 0, 0))
        self.num_main_layers = 0  # whose keys and values have these sizes
        self.states = StateSizes(0, 0, tuple((each.kv_heads, each.dim) for each in attention))
        self.structs: list[Any] = []  # that operations point to
        self.list: list[tuple[int, Any, int, int]] = []
        if description.input_scale != 1:
            self.add(hidden, None, description.input_scale)
        self.per_layer = None
        if (inputs := description.per_layer_embeddings) is not None:
            tokens = len(weights.module(description.embedding).weight)
            self.per_layer = PerLayerOps(self, inputs, len(description.layers), tokens)
        self.streams = None if description.streams is None else StreamOps(self, description.streams)
        if self.streams is not None:
            self.streams.begin()
        # of layers' keys and values: in the main memory, or their own
        self.places: dict[int, tuple[int, int | None]] = {}
        for number, layer in enumerate(description.layers):
            self._layer(number, layer)
        self.op(native.LAYER_BEGINS, which=len(description.layers))  # none does, but the states may be wanted
        if self.streams is not None:
            self.streams.end()
        self.ops = (native.Op * len(self.list))()
        for op, (kind, struct, which, place) in zip(self.ops, self.list, strict=True):
            op.kind, op.which, op.place = kind, which, place
            op.of = None if struct is None else ctypes.addressof(struct)

    def buffer(self, name: str, width: int) -> Tensor:
        """[rows, width]; the same memory for the same name and width."""
        if (name, width) not in self.buffers:
            self.buffers[name, width] = torch.zeros(len(self.hidden), width, dtype=self.hidden.dtype)
        return self.buffers[name, width]

    def op(self, kind: int, struct: Any = None, which: int = 0, place: int = 0) -> None:
        if struct is not None:
            self.structs.append(struct)
        self.list.append((kind, struct, which, place))

    def product(
        self, x: Tensor, outputs: Sequence[tuple[Weight, Tensor]], norm: Norm | None = None, **settings: Any
    ) -> None:
        given = None if norm is None else self.weights.norm(norm, x.shape[1])
        matrices = [(self.weights.matrix(weight), out) for weight, out in outputs]
        struct = linear_struct(x, matrices, given, **settings)
        self.products.append((struct, [weight for weight, _ in outputs]))
        self.op(native.PRODUCT, struct)

    def normalize(self, x: Tensor, norm: Norm, out: Tensor, add: Tensor | None = None) -> None:
        given = self.weights.norm(norm, x.shape[1])
        assert x.shape == out.shape and (add is None or add.shape == x.shape)
        added = None if add is None else add.data_ptr()
        self.op(native.NORMALIZE, native.Norm(
            x=x.data_ptr(), out=out.data_ptr(), size=x.shape[1], add=added, **given.arguments("weight", "kind"),
        ))  # fmt: skip

    def add(self, x: Tensor, add: Tensor | None, scale: float, out: Tensor | None = None) -> None:
        """out = add + scale · x; the hidden states without another output."""
        out = self.hidden if out is None else out
        assert x.shape == out.shape
        added = None if add is None else add.data_ptr()
        struct = native.Addition(x=x.data_ptr(), add=added, out=out.data_ptr(), size=x.shape[1], scale=scale)
        self.op(native.ADD, struct)

    def copy(self, x: Tensor, out: Tensor, first: int = 0) -> None:
        """Columns of x from the first one on."""
        assert 0 <= first <= x.shape[1] - out.shape[1]
        self.op(native.COPY_COLUMNS, native.Columns(
            x=x.data_ptr(), out=out.data_ptr(), width=x.shape[1], first=first, size=out.shape[1],
        ))  # fmt: skip

    def _layer(self, number: int, layer: Layer) -> None:
        self.op(native.LAYER_BEGINS, which=number)
        x, outputs, streams = self.hidden, [self.hidden], self.streams
        if streams is None or layer.altup is None:
            self._mixer_and_mlp(number, layer)
        else:
            prediction = streams.predict(layer.altup)
            self._mixer_and_mlp(number, layer)
            streams.correct(prediction)
            x, outputs = streams.output(layer.altup), streams.every[1:]
        if self.per_layer is not None and layer.per_layer_input is not None:
            self.per_layer.add(number, layer.per_layer_input, x, outputs)
        if layer.output_scale is not None:
            self.add(self.hidden, None, float(self.weights.tensor(layer.output_scale)))

    def _mixer_and_mlp(self, number: int, layer: Layer) -> None:
        beside = None if layer.laurel is None else self._laurel(layer.laurel, layer.mixer_norm)
        mixed = [
            (self._mixer(number, mixer, layer.mixer_norm), mixer.output, layer.mixer_output_norm, scale)
            for mixer, scale in mixers_of(layer)
        ]
        if not layer.parallel:
            self._add_mixed(mixed, layer.residual_scale)
        if beside is not None:
            self.add(beside, self.hidden, 1.0)
            self.add(self.hidden, None, 0.5**0.5)
        assert isinstance(layer.mlp, MLP) or not layer.parallel
        if isinstance(layer.mlp, Experts):
            self._experts(layer.mlp, layer.mlp_norm, layer.mlp_output_norm, layer.residual_scale)
        elif isinstance(layer.mlp, MLPAndExperts):
            self._mlp_and_experts(layer.mlp, layer.mlp_norm, layer.mlp_output_norm, layer.residual_scale)
        elif layer.mlp is not None:
            x, settings = self._inner(layer.mlp, layer.mlp_norm)
            if layer.parallel:
                self._add_mixed(mixed, layer.residual_scale)
            scale = layer.residual_scale * layer.mlp.output_scale
            self._to_hidden(x, layer.mlp.down, layer.mlp_output_norm, scale, **settings)

    def _laurel(self, branch: Laurel, norm: Norm | None) -> Tensor:
        """n + norm(up(down n)) of the hidden states' norm n."""
        size = self.hidden.shape[1]
        assert norm is not None
        normed, out = self.buffer("laurel normed", size), self.buffer("laurel", size)
        low = self.buffer("laurel low", len(self.weights.matrix(branch.down).weight))
        self.normalize(self.hidden, norm, normed)
        self.product(normed, [(branch.down, low)])
        self.product(low, [(branch.up, out)])
        self.normalize(out, branch.norm, out, add=normed)
        return out

    def _add_mixed(self, mixed: Sequence[tuple[Tensor, Weight, Norm | None, float]], scale: float) -> None:
        """Add the outputs of mixers to the hidden states."""
        for x, output, norm, own_scale in mixed:
            self._to_hidden(x, output, norm, scale * own_scale)

    def _inner(
        self, mlp: MLP, norm: Norm | None, others: Sequence[tuple[Weight, Tensor]] = ()
    ) -> tuple[Tensor, dict[str, Any]]:
        """What the last product of an MLP multiplies, and how it is prepared; other outputs are computed beside it."""
        width = len(self.weights.matrix(mlp.up).weight)
        up = self.buffer("up", width)
        if mlp.gate is None:
            self.product(self.hidden, [(mlp.up, up), *others], norm)
            alone = native.SILU_ALONE if mlp.activation == "silu" else native.ACTIVATION_NUMBERS[mlp.activation]
            return up, {"activation": alone}
        gate = self.buffer("gate", width)
        self.product(self.hidden, [(mlp.gate, gate), (mlp.up, up), *others], norm)
        if mlp.gate_scale != 1:
            self.add(gate, None, mlp.gate_scale, gate)
        if mlp.gate_cutoff is not None:
            self.op(altup.CUT_OFF, altup.Cutoff(x=gate.data_ptr(), size=width, deviations=mlp.gate_cutoff))
        return up, {"gate": gate, "activation": native.ACTIVATION_NUMBERS[mlp.activation]}

    def _to_hidden(self, x: Tensor, weight: Weight, norm: Norm | None, scale: float, **settings: Any) -> None:
        """Add the product of x, through its norm and scaled, to the hidden states."""
        if norm is None and scale == 1:
            self.product(x, [(weight, self.hidden)], add=self.hidden, **settings)
            return
        made = self.buffer("made", self.hidden.shape[1])
        self.product(x, [(weight, made)], **settings)
        self._add_normed(made, norm, scale)

    def _add_normed(self, made: Tensor, norm: Norm | None, scale: float) -> None:
        if norm is None:
            self.add(made, self.hidden, scale)
        else:
            assert scale == 1
            self.normalize(made, norm, self.hidden, add=self.hidden)

    def _experts(self, experts: Experts, norm: Norm | None, output_norm: Norm | None, scale: float) -> None:
        """Add what a mixture of experts gives, through its norm and scaled, to the hidden states."""
        if output_norm is None and scale == 1:
            self._mix(experts, norm, self.hidden, add=self.hidden)
            return
        made = self.buffer("made", self.hidden.shape[1])
        self._mix(experts, norm, made)
        self._add_normed(made, output_norm, scale)

    def _mix(self, experts: Experts, norm: Norm | None, out: Tensor, add: Tensor | None = None) -> None:
        """out = a mixture of experts of the hidden states + add"""
        size = self.hidden.shape[1]
        given = {} if norm is None else self.weights.norm(norm, size).arguments()
        struct = experts_struct(experts, self.weights, size, given)
        if experts.shared is not None:
            shared, gate = self.buffer("shared", size), self.buffer("shared gate", 1)
            beside = [] if experts.shared_gate is None else [(experts.shared_gate, gate)]
            x, settings = self._inner(experts.shared, norm, beside)
            self.product(x, [(experts.shared.down, shared)], **settings)
            struct.shared = shared.data_ptr()
            struct.shared_gate = gate.data_ptr() if beside else None
        if experts.router_norm is not None:
            routed = self.buffer("routed", size)
            self.normalize(self.hidden, experts.router_norm, routed)
            struct.routed = routed.data_ptr()
        struct.x, struct.out = self.hidden.data_ptr(), out.data_ptr()
        struct.add = None if add is None else add.data_ptr()
        self.op(native.MIX_EXPERTS, struct)

    def _mlp_and_experts(self, both: MLPAndExperts, norm: Norm | None, output_norm: Norm | None, scale: float) -> None:
        """Add the sum of both, through its norm and scaled, to the hidden states."""
        made, mixed = (self.buffer(name, self.hidden.shape[1]) for name in ("made", "mixed"))
        x, settings = self._inner(both.mlp, norm)
        self.product(x, [(both.mlp.down, made)], **settings)
        self.normalize(made, both.mlp_output_norm, made)
        self._mix(both.experts, both.experts_norm, mixed)
        self.normalize(mixed, both.experts_output_norm, made, add=made)
        self._add_normed(made, output_norm, scale)

    def _mixer(self, number: int, mixer: Mixer, norm: Norm | None) -> Tensor:
        """What the output layer of a mixer multiplies."""
        if isinstance(mixer, Attention):
            return self._attention(number, mixer, norm)
        if isinstance(mixer, LatentAttention):
            return self._latent_attention(number, mixer, norm)
        return MixerOps(self).add(mixer, norm)

    def _attention(self, number: int, layer: Attention, norm: Norm | None) -> Tensor:
        """The outputs of attention [rows, heads · size]."""
        check_heads(layer.heads, layer.kv_heads, layer.dim)
        dim, width = layer.dim, layer.dim * (1 + layer.gated)  # of a head's query, and perhaps its gate
        q, out = self.buffer("q", layer.heads * width), self.buffer("out", layer.heads * dim)
        k, v = (self.buffer(name, layer.kv_heads * dim) for name in ("k", "v"))
        given = [
            (weight, x) for weight, x in ((layer.query, q), (layer.key, k), (layer.value, v)) if weight is not None
        ]
        self.product(self.hidden, given, norm)
        if layer.key is not None and layer.value is None:
            self.copy(k, v)
        self._prepare_heads(q, layer.heads, layer, layer.query_norm, layer.query_angles or layer.angles)
        if layer.key is not None:
            self._prepare_heads(k, layer.kv_heads, layer, layer.key_norm, layer.angles)
            if layer.value_norm is not None:
                self._rotate(v, layer.kv_heads, dim, layer.value_norm)
        wide, *views = q.view(len(q), -1, width), *(x.view(len(x), -1, dim) for x in (k, v, out))
        self._attend(number, layer, wide[..., :dim], *views)
        if layer.gated:
            MixerOps(self).gate(out, wide[..., dim:], dim, None, activation=native.ACTIVATION_NUMBERS["sigmoid"])
        return out

    def _latent_attention(self, number: int, layer: LatentAttention, norm: Norm | None) -> Tensor:
        """The same, with keys and values that are expanded from latent vectors."""
        nope, rope, heads, value = layer.nope_dim, layer.rope_dim, layer.heads, layer.value_dim
        check_heads(heads, heads, nope + rope)
        q, out = self.buffer("q", heads * (nope + rope)), self.buffer("out", heads * value)
        latent = self.buffer("latent", len(self.weights.matrix(layer.latent).weight))
        normed, k = self.buffer("latent normed", latent.shape[1] - rope), self.buffer("k", q.shape[1])
        expanded, rotated = self.buffer("expanded", heads * (nope + value)), self.buffer("rotated", rope)
        if layer.query_latent is None:
            self.product(self.hidden, [(layer.query, q), (layer.latent, latent)], norm)
        else:
            made = self.buffer("query latent", len(self.weights.matrix(layer.query_latent).weight))
            self.product(self.hidden, [(layer.query_latent, made), (layer.latent, latent)], norm)
            self.product(made, [(layer.query, q)], layer.query_norm)
        self.copy(latent, normed)
        self.copy(latent, rotated, normed.shape[1])
        self.product(normed, [(layer.expand, expanded)], layer.latent_norm)
        self._rotate(rotated, 1, rope, None, layer.angles, layer.rope_interleaved)
        self._rotate(q[:, nope:], heads, rope, None, layer.angles, layer.rope_interleaved)
        width = expanded.shape[1]
        runs = [run for head in range(heads) for run in ((head * (nope + value), nope), (width, rope))]
        self.weights.made.append(torch.tensor(runs))
        self.op(native.REARRANGE, native.Rearrangement(
            x=expanded.data_ptr(), other=rotated.data_ptr(), out=k.data_ptr(), runs=self.weights.made[-1].data_ptr(),
            inputs=width, others=rope, size=k.shape[1], num_runs=len(runs),
        ))  # fmt: skip
        views = [x.view(len(x), heads, -1) for x in (q, k, expanded, out)]
        simple = Attention(
            layer.query, layer.latent, layer.expand, layer.output, heads, heads, nope + rope, layer.scale
        )  # fmt: skip
        self._attend(number, simple, views[0], views[1], views[2][..., nope:], views[3])
        return out

    def _prepare_heads(self, x: Tensor, heads: int, layer: Attention, norm: Norm | None, angles: Angles | None) -> None:
        """Norms and angles of queries or keys."""
        assert layer.norm_per_head or not (layer.gated or layer.norms_rotated)
        if norm is not None and not layer.norm_per_head:
            self.normalize(x, norm, x)
            norm = None
        if layer.norms_rotated:
            self._rotate(x, heads, layer.dim, None, angles, layer.rope_interleaved)
            angles = None
        self._rotate(x, heads, layer.dim, norm, angles, layer.rope_interleaved)

    def _rotate(
        self,
        x: Tensor,
        heads: int,
        dim: int,
        norm: Norm | None,
        angles: Angles | None = None,
        interleaved: bool = False,
    ) -> None:
        """Norm the first `dim` numbers of each head, and rotate them where there are angles."""
        if norm is None and angles is None:
            return
        assert x.stride(0) % heads == 0
        rotation = native.Rotary(
            x=x.data_ptr(), heads=heads, dim=dim, stride=x.stride(0) // heads, interleaved=interleaved
        )  # fmt: skip
        if norm is not None:
            given = self.weights.norm(norm, dim)
            rotation.norm, rotation.norm_kind, rotation.epsilon = given.values.data_ptr(), given.kind, given.epsilon
        if angles is not None and angles not in self.angles:
            self.angles.append(angles)
        self.op(native.ROTATE, rotation, -1 if angles is None else self.angles.index(angles))

    def set_angle_widths(self, widths: Sequence[int]) -> None:
        """How many dimensions of a head each kind of angles rotates."""
        for kind, struct, which, _ in self.list:
            if kind == native.ROTATE and which >= 0:
                assert widths[which] % 2 == 0 and 0 < widths[which] <= struct.dim
                struct.turned = widths[which]

    def _attend(self, number: int, layer: Attention, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
        if layer.shares is None:
            own = None if (layer.kv_heads, layer.dim, v.shape[-1]) == self.main_sizes else number
            self.places[number] = self.num_main_layers if own is None else 0, own
            self.num_main_layers += own is None
        else:
            self.places[number] = self.places[layer.shares]
        place, own = self.places[number]
        sinks = None
        if layer.sinks is not None:
            sinks = self.weights.tensor(layer.sinks).float().contiguous()
            assert sinks.shape == (layer.heads,)
            self.weights.made.append(sinks)
        struct = native.Attention(
            **{name: x.data_ptr() for name, x in zip(("query", "key", "value", "out"), (q, k, v, out), strict=True)},
            **{f"{name}_row": x.stride(0) for name, x in zip(("query", "key", "value"), (q, k, v), strict=True)},
            **{f"{name}_head": x.stride(1) for name, x in zip(("query", "key", "value"), (q, k, v), strict=True)},
            heads=layer.heads, kv_heads=layer.kv_heads, dim=layer.dim, value_dim=v.shape[-1], scale=layer.scale,
            softcap=layer.softcap or 0.0, same_everywhere=self.same_everywhere,
            sinks=None if sinks is None else sinks.data_ptr(),
        )  # fmt: skip
        if layer.key is None:
            assert layer.shares is not None and layer.shares < number
            struct.key = None
        row_bytes = tuple(x.stride(0) * x.element_size() for x in (q, k, v, out))
        new_rows = k.transpose(0, 1), v.transpose(0, 1)
        kind = _AttentionKind(bytes(struct), layer.span, own, row_bytes, new_rows)
        known = [(each.struct, each.span, each.own_memory) for each in self.kinds]
        if (same := (kind.struct, kind.span, own)) not in known:
            self.kinds.append(kind)
            known.append(same)
        self.op(native.ATTEND, None, known.index(same), place)

    def attention_structs(self, call: AttentionCall) -> tuple[ctypes.Array, ctypes.Array, ctypes.Array]:
        """Kernel arguments by kind and text, and the bytes between layers of each text's keys and values."""
        texts, start = len(call.sequences), 0
        if texts > 1:
            structs, key_steps, value_steps = self.new_attention_structs(texts)
        else:  # all that differs from call to call is written again
            structs, key_steps, value_steps = self.structs_of_one_text
        if not self.kinds:
            return structs, key_steps, value_steps
        main_rows = self.main_rows
        for number, sequence in enumerate(call.sequences):
            cache, slots = sequence.kv_cache, sequence.past_length + sequence.num_rows
            cache.reserve(self.num_main_layers, slots, *main_rows)
            assert cache.keys is not None and cache.values is not None
            main = cache.keys, cache.values
            key_steps[number], value_steps[number] = (x.stride(0) * x.element_size() for x in main)
            for index, kind in enumerate(self.kinds):
                struct, (keys, values) = structs[index * texts + number], main
                if kind.own_memory is not None:
                    keys, values = cache.reserve_odd_layer(kind.own_memory, slots, *kind.new_rows)
                struct.keys, struct.values, struct.capacity = keys.data_ptr(), values.data_ptr(), keys.shape[-2]
                if start:
                    for name, step in zip(("query", "key", "value", "out"), kind.row_bytes, strict=True):
                        if getattr(struct, name) is not None:
                            setattr(struct, name, getattr(struct, name) + start * step)
                sequence.fill_rows(struct, kind.span)
            start += sequence.num_rows
        return structs, key_steps, value_steps

    @cached_property
    def structs_of_one_text(self) -> tuple[ctypes.Array, ctypes.Array, ctypes.Array]:
        return self.new_attention_structs(1)

    @cached_property
    def main_rows(self) -> tuple[Tensor, Tensor]:
        """New keys and values of the layers that share a memory."""
        return next(kind.new_rows for kind in self.kinds if kind.own_memory is None)

    def new_attention_structs(self, texts: int) -> tuple[ctypes.Array, ctypes.Array, ctypes.Array]:
        """What `attention_structs` fills in."""
        structs = (native.Attention * (texts * len(self.kinds))).from_buffer_copy(
            b"".join(kind.struct * texts for kind in self.kinds)
        )
        return structs, (native.INTEGER * texts)(), (native.INTEGER * texts)()

    def recurrent_calls(self, call: AttentionCall) -> list[RecurrentCall]:
        """What layers that keep a state get of each text; to be ended after the call."""
        if not self.states.state:
            return []
        calls, first = [], 0
        for sequence in call.sequences:
            cache, decided = sequence.kv_cache, sequence.num_rows - len(sequence.parents)
            assert isinstance(cache, HybridKVCache) and cache.sizes == self.states
            calls.append(cache.begin_call(first, sequence.past_length, decided, sequence.parents, sequence.ends_text))
            first += sequence.num_rows
        return calls


def _memory_sizes(mixer: Mixer) -> tuple[int, int, int] | None:
    """The heads of a layer's keys and values, and the sizes of both; None: it has none."""
    if isinstance(mixer, LatentAttention):
        return mixer.heads, mixer.nope_dim + mixer.rope_dim, mixer.value_dim
    return (mixer.kv_heads, mixer.dim, mixer.dim) if isinstance(mixer, Attention) else None
