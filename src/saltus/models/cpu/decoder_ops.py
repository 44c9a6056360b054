"""Make the operations of a described decoder: the kernels' arguments, with buffers and weights that fit each other."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from saltus.kernels import native
from saltus.kernels.packed_weight import kernel_arguments, select_outputs
from saltus.models.cpu.attention import AttentionCall
from saltus.models.cpu.hybrid_kv_cache import HybridKVCache, RecurrentCall, StateSizes
from saltus.models.cpu.mixer_ops import MixerOps
from saltus.models.decoder_description import (
    MLP,
    Attention,
    DecoderDescription,
    Layer,
    Mixer,
    Norm,
    Weight,
)
from saltus.models.packed_decoder import check_decoder_sizes


@dataclass(frozen=True)
class Matrix:
    """The weights [outputs, inputs] and biases of some outputs of a linear layer."""

    weight: Any
    bias: Tensor | None


@dataclass(frozen=True)
class NormWeights:
    """What a kernel needs of a norm; `values` are kept alive by whoever keeps this."""

    values: Tensor
    kind: int
    epsilon: float

    def arguments(self, weight: str = "norm", kind: str = "norm_kind") -> dict[str, Any]:
        """The fields of a struct, by the names that it has for the weights and the kind."""
        return {weight: self.values.data_ptr(), kind: self.kind, "epsilon": self.epsilon}


@dataclass
class Resolver:
    """Finds the tensors of a description in a model, and keeps those that are made of them."""

    base: Any  # the model without its output layer
    made: list[Tensor] = field(default_factory=list)

    def module(self, path: str) -> Any:
        return self.base.get_submodule(path)

    def matrix(self, weight: Weight) -> Matrix:
        module = self.module(weight.path)
        bias = getattr(module, "bias", None)
        if weight.stop is None:
            return Matrix(module.weight, bias)
        rows = slice(weight.start, weight.stop)
        assert weight.stop <= len(module.weight)
        return Matrix(select_outputs(module.weight, rows), None if bias is None else bias.detach()[rows])

    def output_layer(self, model: Any) -> Matrix:
        return Matrix(model.lm_head.weight, getattr(model.lm_head, "bias", None))

    def norm(self, norm: Norm, size: int) -> NormWeights:
        """Errors: AssertionError for a norm of another size."""
        module = self.module(norm.path)
        values = module.weight.detach()
        assert values.shape == (size,)
        if norm.kind != "rms":
            values = values.float() + norm.offset
            if norm.kind == "layer":
                bias = getattr(module, "bias", None)
                values = torch.cat([values, torch.zeros(size) if bias is None else bias.detach().float()])
            self.made.append(values)
        return NormWeights(values, native.NORM_KINDS[norm.kind], norm.epsilon)


@dataclass(frozen=True)
class _AttentionKind:
    """What calls of a kernel have in common: the first fields, and which memory they use."""

    struct: bytes
    window: int | None
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
        attention = [each.mixer for each in description.layers if isinstance(each.mixer, Attention)]
        self.angles = list(dict.fromkeys(each.angles for each in attention if each.angles))
        self.kinds: list[_AttentionKind] = []
        self.main_sizes = (attention[0].kv_heads, attention[0].dim) if attention else (0, 0)
        self.num_main_layers = 0  # whose keys and values have these sizes
        self.states = StateSizes(0, 0)  # of the layers that keep a state
        self.structs: list[Any] = []  # that operations point to
        self.list: list[tuple[int, Any, int, int]] = []
        if description.input_scale != 1:
            self._add(hidden, None, description.input_scale)
        for number, layer in enumerate(description.layers):
            self._layer(number, layer)
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

    def _normalize(self, x: Tensor, norm: Norm, out: Tensor, add: Tensor | None = None) -> None:
        given = self.weights.norm(norm, x.shape[1])
        assert x.shape == out.shape and (add is None or add.shape == x.shape)
        added = None if add is None else add.data_ptr()
        self.op(native.NORMALIZE, native.Norm(
            x=x.data_ptr(), out=out.data_ptr(), size=x.shape[1], add=added, **given.arguments("weight", "kind"),
        ))  # fmt: skip

    def _add(self, x: Tensor, add: Tensor | None, scale: float) -> None:
        """hidden = add + scale · x"""
        assert x.shape == self.hidden.shape
        added = None if add is None else add.data_ptr()
        struct = native.Addition(x=x.data_ptr(), add=added, out=self.hidden.data_ptr(), size=x.shape[1], scale=scale)
        self.op(native.ADD, struct)

    def _layer(self, number: int, layer: Layer) -> None:
        self.op(native.LAYER_BEGINS, which=number)
        mixed = self._mixer(number, layer.mixer, layer.mixer_norm)
        if not layer.parallel:
            self._to_hidden(mixed, layer.mixer.output, layer.mixer_output_norm, layer.residual_scale)
        x, settings = self._inner(layer.mlp, layer.mlp_norm)
        if layer.parallel:
            self._to_hidden(mixed, layer.mixer.output, layer.mixer_output_norm, layer.residual_scale)
        self._to_hidden(x, layer.mlp.down, layer.mlp_output_norm, layer.residual_scale, **settings)

    def _inner(self, mlp: MLP, norm: Norm | None) -> tuple[Tensor, dict[str, Any]]:
        """What the last product of an MLP multiplies, and how it is prepared."""
        width = len(self.weights.matrix(mlp.up).weight)
        up = self.buffer("up", width)
        if mlp.gate is None:
            self.product(self.hidden, [(mlp.up, up)], norm)
            alone = native.SILU_ALONE if mlp.activation == "silu" else native.ACTIVATION_NUMBERS[mlp.activation]
            return up, {"activation": alone}
        gate = self.buffer("gate", width)
        self.product(self.hidden, [(mlp.gate, gate), (mlp.up, up)], norm)
        return up, {"gate": gate, "activation": native.ACTIVATION_NUMBERS[mlp.activation]}

    def _to_hidden(self, x: Tensor, weight: Weight, norm: Norm | None, scale: float, **settings: Any) -> None:
        """Add the product of x, through its norm and scaled, to the hidden states."""
        if norm is None and scale == 1:
            self.product(x, [(weight, self.hidden)], add=self.hidden, **settings)
            return
        made = self.buffer("made", self.hidden.shape[1])
        self.product(x, [(weight, made)], **settings)
        if norm is None:
            self._add(made, self.hidden, scale)
        else:
            assert scale == 1
            self._normalize(made, norm, self.hidden, add=self.hidden)

    def _mixer(self, number: int, mixer: Mixer, norm: Norm | None) -> Tensor:
        """What the output layer of a mixer multiplies."""
        if isinstance(mixer, Attention):
            return self._attention(number, mixer, norm)
        return MixerOps(self).add(mixer, norm)

    def _attention(self, number: int, layer: Attention, norm: Norm | None) -> Tensor:
        """The outputs of attention [rows, heads · size]."""
        check_decoder_sizes(layer.heads, layer.kv_heads, head_dim=layer.dim)
        dim, width = layer.dim, layer.dim * (1 + layer.gated)  # of a head's query, and perhaps its gate
        q, out = self.buffer("q", layer.heads * width), self.buffer("out", layer.heads * dim)
        k, v = (self.buffer(name, layer.kv_heads * dim) for name in ("k", "v"))
        self.product(self.hidden, [(layer.query, q), (layer.key, k), (layer.value, v)], norm)
        for x, heads, head_norm in ((q, layer.heads, layer.query_norm), (k, layer.kv_heads, layer.key_norm)):
            if head_norm is not None and not layer.norms_heads:
                self._normalize(x, head_norm, x)
                head_norm = None
            self._rotate(x, heads, layer, head_norm)
        wide, *views = q.view(len(q), -1, width), *(x.view(len(x), -1, dim) for x in (k, v, out))
        self._attend(number, layer, wide[..., :dim], *views)
        if layer.gated:
            MixerOps(self).gate(out, wide[..., dim:], dim, None, activation=native.ACTIVATION_NUMBERS["sigmoid"])
        return out

    def _rotate(self, x: Tensor, heads: int, layer: Attention, norm: Norm | None) -> None:
        if norm is None and layer.angles is None:
            return
        assert x.shape[1] % heads == 0 and (layer.norms_heads or not layer.gated)
        rotation = native.Rotary(
            x=x.data_ptr(), heads=heads, dim=layer.dim, stride=x.shape[1] // heads, neighbours=layer.rotates_neighbours
        )
        if norm is not None:
            given = self.weights.norm(norm, layer.dim)
            rotation.norm, rotation.norm_kind, rotation.epsilon = given.values.data_ptr(), given.kind, given.epsilon
        self.op(native.ROTATE, rotation, -1 if layer.angles is None else self.angles.index(layer.angles))

    def set_angle_widths(self, widths: Sequence[int]) -> None:
        """How many dimensions of a head each kind of angles rotates."""
        for kind, struct, which, _ in self.list:
            if kind == native.ROTATE and which >= 0:
                assert widths[which] % 2 == 0 and 0 < widths[which] <= struct.dim
                struct.turned = widths[which]

    def _attend(self, number: int, layer: Attention, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
        own = None if (layer.kv_heads, layer.dim) == self.main_sizes else number
        struct = native.Attention(
            **{name: x.data_ptr() for name, x in zip(("query", "key", "value", "out"), (q, k, v, out), strict=True)},
            **{f"{name}_row": x.stride(0) for name, x in zip(("query", "key", "value"), (q, k, v), strict=True)},
            **{f"{name}_head": x.stride(1) for name, x in zip(("query", "key", "value"), (q, k, v), strict=True)},
            heads=layer.heads, kv_heads=layer.kv_heads, dim=layer.dim, value_dim=v.shape[-1], scale=layer.scale,
            softcap=layer.softcap or 0.0, same_everywhere=self.same_everywhere,
        )  # fmt: skip
        row_bytes = tuple(x.stride(0) * x.element_size() for x in (q, k, v, out))
        new_rows = k.transpose(0, 1), v.transpose(0, 1)
        kind = _AttentionKind(bytes(struct), layer.window, own, row_bytes, new_rows)
        known = [(each.struct, each.window, each.own_memory) for each in self.kinds]
        if (same := (kind.struct, kind.window, own)) not in known:
            self.kinds.append(kind)
            known.append(same)
        self.op(native.ATTEND, None, known.index(same), 0 if own is not None else self.num_main_layers)
        self.num_main_layers += own is None

    def attention_structs(self, call: AttentionCall) -> tuple[ctypes.Array, ctypes.Array, ctypes.Array]:
        """Kernel arguments by kind and text, and the bytes between layers of each text's keys and values."""
        texts, start = len(call.sequences), 0
        structs = (native.Attention * (texts * len(self.kinds))).from_buffer_copy(
            b"".join(kind.struct * texts for kind in self.kinds)
        )
        key_steps, value_steps = ((native.INTEGER * texts)() for _ in range(2))
        if not self.kinds:
            return structs, key_steps, value_steps
        main_rows = next(kind.new_rows for kind in self.kinds if kind.own_memory is None)
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
                        setattr(struct, name, getattr(struct, name) + start * step)
                sequence.fill_rows(struct, kind.window)
            start += sequence.num_rows
        return structs, key_steps, value_steps

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


def linear_struct(
    x: Tensor,
    weights: Sequence[tuple[Any, Tensor | None]],
    norm: NormWeights | None = None,
    gate: Tensor | None = None,
    add: Tensor | None = None,
    activation: int = 0,
) -> native.Linear:
    """The kernel's arguments of a product but its rows: of `x` with matrices (or linear layers), to their outputs."""
    inputs = weights[0][0].weight.shape[1]
    _check_widths(x, inputs, weights, norm, gate, add)
    struct = native.Linear(x=x.data_ptr(), inputs=inputs, count=len(weights), activation=activation)
    for i, (matrix, out) in enumerate(weights):
        struct.weight[i], struct.format[i] = kernel_arguments(matrix.weight)
        struct.out[i], struct.outs[i] = None if out is None else out.data_ptr(), len(matrix.weight)
        struct.bias[i] = None if matrix.bias is None else matrix.bias.data_ptr()
    if norm is not None:
        struct.norm, struct.norm_kind, struct.epsilon = norm.values.data_ptr(), norm.kind, norm.epsilon
    struct.gate = None if gate is None else gate.data_ptr()
    struct.add = None if add is None else add.data_ptr()
    return struct


def _check_widths(
    x: Tensor,
    inputs: int,
    weights: Sequence[tuple[Any, Tensor | None]],
    norm: NormWeights | None,
    gate: Tensor | None,
    add: Tensor | None,
) -> None:
    """Fail unless weights fit the rows that the kernel reads and writes; `x` of one dimension only holds a place."""
    assert x.dim() == 1 or x[0].numel() == inputs
    assert norm is None or len(norm.values) == inputs * (1 + (norm.kind == native.NORM_KINDS["layer"]))
    assert gate is None or gate[0].numel() == inputs
    for matrix, out in weights:
        outputs = len(matrix.weight)
        assert matrix.weight.shape == (outputs, inputs)
        assert matrix.bias is None or len(matrix.bias) == outputs
        assert all(each is None or each[0].numel() == outputs for each in (out, add))
