"""Recurrent layers of described decoders by our kernels for GPUs: the gated delta rule, Mamba-2, short convolutions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from saltus.models.cpu.decoder_weights import Resolver
from saltus.models.cuda.layer_weights import one_weight
from saltus.models.cuda.packed_weight import GPUPackedWeight, joined_packed
from saltus.models.cuda.recurrent_inputs import RecurrentInputs
from saltus.models.cuda.state_pages import StatePool, StateShape
from saltus.models.mixer_description import DeltaNet, KimiDeltaNet, Mamba2, Mixer, ShortConvolution

L2_EPSILON = 1e-6  # of the gated delta rule's keys and queries


@dataclass(frozen=True)
class StatesOfCall:
    """The states of all texts, and what a call's rows read of them."""

    pool: StatePool
    inputs: RecurrentInputs


@dataclass(frozen=True)
class _Inputs:
    """Some linear layers of the same inputs, whose outputs lie beside each other."""

    weights: Sequence[Tensor]
    blocks: Any

    @classmethod
    def of(cls, layers: Sequence[Any], order: Tensor | None = None) -> _Inputs:
        """With `order` the outputs change places, and weights are copied."""
        from saltus.models.cuda.linear_kernels import blocks_of

        if order is not None:
            weights = [torch.cat([each.weight.detach() for each in layers])[order].contiguous()]
        else:
            weights = [each.detach() for each in joined_packed([layer.weight for layer in layers])]
        return cls(weights, blocks_of(*weights, parts=False))

    @property
    def size(self) -> int:
        """How many outputs there are."""
        return sum(map(len, self.weights))

    def write(self, x: Tensor, out: Tensor, rows: int, first: int = 0) -> None:
        """Columns of out [rows, ..], from `first` on, of x [padded rows, inputs]."""
        from saltus.models.cuda import linear_kernels

        linear_kernels.linear(x, self.weights, out, self.blocks, rows, first)

    def __call__(self, x: Tensor, rows: int) -> Tensor:
        """[rows, outputs] of x [padded rows, inputs]."""
        out = x.new_empty(rows, self.size)
        self.write(x, out, rows)
        return out


@dataclass(frozen=True)
class _KimiInputs:
    """Of `KimiDeltaNet`: queries, keys, values, decays, weights of values and gates, beside each other."""

    projections: _Inputs
    low: _Inputs  # what decays and gates are made of
    decay: _Inputs
    weight: _Inputs
    gate: _Inputs

    @classmethod
    def of(cls, mixer: KimiDeltaNet, weights: Resolver) -> _KimiInputs:
        groups = (
            (mixer.query, mixer.key, mixer.value), (mixer.decay[0], mixer.gate[0]), (mixer.decay[1],), (mixer.weight,),
            (mixer.gate[1],),
        )  # fmt: skip
        return cls(*(_Inputs.of([weights.module(each.path) for each in group]) for group in groups))

    def __call__(self, x: Tensor, rows: int) -> Tensor:
        """[rows, outputs] of x [padded rows, inputs]."""
        low = x.new_empty(2, len(x), self.low.size // 2)  # whole tiles of rows are read
        low[:, :rows] = self.low(x, rows).unflatten(1, (2, -1)).transpose(0, 1)
        given = (self.projections, x), (self.decay, low[0]), (self.weight, x), (self.gate, low[1])
        out, first = x.new_empty(rows, sum(each.size for each, _ in given)), 0
        for each, read in given:
            each.write(read, out, rows, first)
            first += each.size
        return out


@dataclass(frozen=True)
class GPURecurrence:
    """The gated delta rule, or Mamba-2: columns `first` and on of its inputs go through a convolution."""

    inputs: _Inputs | _KimiInputs
    first: int
    gate: int  # the first column of gates
    kernel: Tensor  # [width, channels]
    kernel_bias: Tensor | None
    constants: tuple[Tensor, Tensor, Tensor | None]
    places: tuple[int, int, int]  # of queries, keys and values among what was convolved
    groups: int
    state: tuple[int, int, int]  # heads, keys, values
    settings: dict[str, Any]
    norm: Tensor | None
    norm_epsilon: float
    norm_size: int
    gate_first: bool
    silu: bool  # of gates; else their sigmoids
    scales: Tensor | None  # of all inputs, in float32
    output: Sequence[Tensor]
    output_blocks: Any

    @classmethod
    def of_delta_net(cls, mixer: DeltaNet, weights: Resolver) -> GPURecurrence:
        """Of a description which `is_known_recurrence` knows."""
        keys, values = mixer.groups * mixer.key_dim, mixer.heads * mixer.value_dim
        layers, order = [weights.module(each.path) for each in mixer.inputs], None
        if len(layers) == 2:
            order = _ungrouped(mixer)
        else:
            *qkv, gate, weight, step = layers
            layers = [*qkv, step, weight, gate]
        heads = (mixer.heads, mixer.key_dim, mixer.value_dim)
        settings = {
            "delta": True, "scale": mixer.key_dim**-0.5, "epsilon": L2_EPSILON, "weight_scale": mixer.weight_scale
        }  # fmt: skip
        return cls(
            _Inputs.of(layers, None if order is None else order.to(layers[0].weight.device)), 0,
            2 * keys + values + 2 * mixer.heads, *convolution_of(weights, f"{mixer.path}.conv1d"),
            _constants(weights, mixer.path, False), (0, keys, 2 * keys), mixer.groups, heads, settings,
            weights.module(f"{mixer.path}.{mixer.norm}").weight.detach(), mixer.epsilon, mixer.value_dim, False, True,
            None,
            *one_weight(weights.module(mixer.output.path)),
        )  # fmt: skip

    @classmethod
    def of_kimi(cls, mixer: KimiDeltaNet, weights: Resolver) -> GPURecurrence:
        """The same."""
        size = mixer.heads * mixer.dim
        settings = {"delta": True, "scale": mixer.dim**-0.5, "epsilon": L2_EPSILON}
        return cls(
            _KimiInputs.of(mixer, weights), 0, 4 * size + mixer.heads, *convolution_of(weights, mixer.kernel),
            _constants(weights, mixer.decays, False), (0, size, 2 * size), mixer.heads,
            (mixer.heads, mixer.dim, mixer.dim), settings, weights.module(mixer.norm).weight.detach(), mixer.epsilon,
            mixer.dim, False, False, None, *one_weight(weights.module(mixer.output.path)),
        )  # fmt: skip

    @classmethod
    def of_mamba(cls, mixer: Mamba2, weights: Resolver) -> GPURecurrence:
        """The same."""
        size, keys = mixer.heads * mixer.head_dim, mixer.groups * mixer.state
        settings = {"delta": False, "limits": mixer.limits}
        norm, scales = weights.module(f"{mixer.path}.norm").weight.detach() if mixer.has_norm else None, None
        if mixer.scales:
            scales = torch.cat([torch.full((count,), scale) for scale, count in mixer.scales])
            scales = scales.to(weights.module(mixer.inputs.path).weight.device)
        return cls(
            _Inputs.of([weights.module(mixer.inputs.path)]), size, 0, *convolution_of(weights, f"{mixer.path}.conv1d"),
            _constants(weights, mixer.path, True), (size + keys, size, 0), mixer.groups,
            (mixer.heads, mixer.state, mixer.head_dim), settings, norm, mixer.epsilon, size // mixer.norm_groups,
            mixer.has_norm and mixer.gate_first, True, scales, *one_weight(weights.module(mixer.output.path)),
        )  # fmt: skip

    @property
    def shape(self) -> StateShape:
        width, channels = self.kernel.shape
        steps = len(self.constants[0]) + self.state[0] * self.settings["delta"]
        return StateShape(width - 1, channels, channels + steps, self.state)

    def parts(self, x: Tensor, number: int, call: StatesOfCall) -> Tensor:
        """[parts, rows, hidden], float32, of x [padded rows, hidden]; `number` counts the recurrent layers."""
        from saltus.models.cuda import linear_kernels, recurrent_kernels

        tables, pool, (heads, _, values) = call.inputs, call.pool, self.state
        rows = tables.shape.num_rows
        columns = self.inputs(x, rows)
        if self.scales is not None:
            columns = (columns * self.scales).to(x.dtype)
        mixed, gate = columns[:, self.first :], columns[:, self.gate : self.gate + heads * values]
        windows, states = pool.windows[number], pool.states[number]
        kept, kept_x = pool.kept[number], pool.convolved[number]
        convolved = recurrent_kernels.convolve(
            mixed, windows, kept, tables.row_sources, self.kernel, self.kernel_bias, True
        )
        recurrent_kernels.keep_window(mixed, windows, kept, tables.text_sources, tables.texts.slots)
        out = x.new_empty(len(x), heads * values)
        for jobs, writes in ((tables.texts, True), (tables.nodes, False)):
            recurrent_kernels.recur(
                mixed, convolved, kept, kept_x, self.constants, states, jobs, out, self.places, self.groups,
                writes=writes, **self.settings,
            )  # fmt: skip
        recurrent_kernels.keep_nodes(mixed, kept, tables.node_places)
        recurrent_kernels.keep_nodes(convolved, kept_x, tables.node_places)
        recurrent_kernels.gate_outputs(
            out[:rows], gate, self.norm, self.norm_epsilon, self.norm_size, self.gate_first, self.silu
        )  # fmt: skip
        return linear_kernels.linear_parts(out, self.output, self.output_blocks, rows)


@dataclass(frozen=True)
class GPUShortConvolution:
    """What `ShortConvolution` describes."""

    inputs: _Inputs
    kernel: Tensor
    kernel_bias: Tensor | None
    output: Sequence[Tensor]
    output_blocks: Any

    @classmethod
    def of(cls, mixer: ShortConvolution, weights: Resolver) -> GPUShortConvolution:
        """Of a description which `is_known_recurrence` knows."""
        inputs = _Inputs.of([weights.module(mixer.inputs.path)])
        return cls(inputs, *convolution_of(weights, mixer.kernel), *one_weight(weights.module(mixer.output.path)))

    @property
    def shape(self) -> StateShape:
        width, channels = self.kernel.shape
        return StateShape(width - 1, channels, channels)

    def parts(self, x: Tensor, number: int, call: StatesOfCall) -> Tensor:
        """As `GPURecurrence.parts`."""
        from saltus.models.cuda import linear_kernels, recurrent_kernels

        tables, windows, kept = call.inputs, call.pool.windows[number], call.pool.kept[number]
        rows = tables.shape.num_rows
        before, after, given = self.inputs(x, rows).chunk(3, 1)
        given = before * given
        found = recurrent_kernels.convolve(
            given, windows, kept, tables.row_sources, self.kernel, self.kernel_bias, False
        )
        recurrent_kernels.keep_window(given, windows, kept, tables.text_sources, tables.texts.slots)
        recurrent_kernels.keep_nodes(given, kept, tables.node_places)
        out = x.new_empty(len(x), found.shape[1])
        out[:rows] = found * after
        return linear_kernels.linear_parts(out, self.output, self.output_blocks, rows)


def recurrence_of(mixer: Mixer, weights: Resolver) -> GPURecurrence | GPUShortConvolution:
    """Of a description which `is_known_recurrence` knows."""
    if isinstance(mixer, ShortConvolution):
        return GPUShortConvolution.of(mixer, weights)
    if isinstance(mixer, DeltaNet):
        return GPURecurrence.of_delta_net(mixer, weights)
    if isinstance(mixer, KimiDeltaNet):
        return GPURecurrence.of_kimi(mixer, weights)
    assert isinstance(mixer, Mamba2)
    return GPURecurrence.of_mamba(mixer, weights)


def is_known_recurrence(mixer: Mixer | None, base: Any) -> bool:
    """True for a recurrent mixer that our kernels compute. `base` is the model without its output layer."""
    if isinstance(mixer, KimiDeltaNet):
        if len(mixer.decay) == 1 or mixer.least_decay:
            return False
        inputs = mixer.query, mixer.key, mixer.value, mixer.weight, *mixer.decay, *mixer.gate
    elif isinstance(mixer, ShortConvolution | DeltaNet | Mamba2):
        inputs = mixer.inputs if isinstance(mixer, DeltaNet) else (mixer.inputs,)
    else:
        return False
    layers = [base.get_submodule(each.path) for each in (*inputs, mixer.output)]
    if any(layer.bias is not None for layer in layers) or any(each.stop is not None for each in inputs):
        return False
    packed = any(isinstance(layer.weight, GPUPackedWeight) for layer in layers)
    return not (packed and len(inputs) == 2)


def convolution_of(weights: Resolver, path: str) -> tuple[Tensor, Tensor | None]:
    """The kernel [width, channels] of a convolution, and its bias [channels]."""
    module = weights.module(path)
    bias = None if module.bias is None else module.bias.detach()
    return module.weight.detach()[:, 0].T.contiguous(), bias


def _constants(weights: Resolver, path: str, skips: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    """The bias of steps, the rate of decay, what the value is multiplied by where outputs read it."""
    bias, rate = (weights.tensor(f"{path}.{name}").float().flatten() for name in ("dt_bias", "A_log"))
    return bias.contiguous(), -rate.exp(), weights.tensor(f"{path}.D").float().contiguous() if skips else None


def _ungrouped(mixer: DeltaNet) -> Tensor:
    """Where outputs that stand by heads of keys are: queries, keys, values, then steps, weights, and gates."""
    shared = mixer.heads // mixer.groups
    sizes = (mixer.key_dim, mixer.key_dim, shared * mixer.value_dim, shared * mixer.value_dim)
    first = torch.arange(mixer.groups * sum(sizes)).view(mixer.groups, -1)
    query, key, value, gate = (part.flatten() for part in first.split(sizes, 1))
    weight, step = (first.numel() + torch.arange(2 * mixer.heads)).view(mixer.groups, 2, shared).unbind(1)
    return torch.cat([query, key, value, step.flatten(), weight.flatten(), gate])
