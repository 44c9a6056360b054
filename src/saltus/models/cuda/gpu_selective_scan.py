"""Mamba's layers of described decoders by our kernels for GPUs: a step of each channel, a decay of each number."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from saltus.models.cpu.decoder_weights import Resolver
from saltus.models.cuda.gpu_recurrent import StatesOfCall, convolution_of
from saltus.models.cuda.layer_weights import one_weight
from saltus.models.cuda.packed_weight import GPUPackedWeight
from saltus.models.cuda.state_pages import StateShape
from saltus.models.mixer_description import Mamba, Mixer

RANK_MULTIPLE = 64  # that products sum over
MAX_GATE_GROUP = 1024  # columns that a program multiplies by their gates


@dataclass(frozen=True)
class GPUSelectiveScan:
    """What `Mamba` describes; steps, B and C of a row lie beside each other."""

    inputs: tuple[Sequence[Tensor], Any]  # weights, and how to cut their product; so below
    kernel: Tensor  # [width, channels]
    kernel_bias: Tensor | None
    selection: tuple[Sequence[Tensor], Any]
    steps: tuple[Sequence[Tensor], Any]  # of a rank that zeros fill up
    constants: tuple[Tensor, Tensor, Tensor]  # the bias of steps, the rates of decay [state, channels], D
    norm: Tensor | None  # of rank, B and C, beside each other
    epsilon: float
    rank: int
    state: int
    output: tuple[Sequence[Tensor], Any]

    @classmethod
    def of(cls, mixer: Mamba, weights: Resolver) -> GPUSelectiveScan:
        """Of a description which `is_known_scan` knows."""
        inputs, selection, steps, output = (
            weights.module(each.path) for each in (mixer.inputs, mixer.selection, mixer.steps, mixer.output)
        )
        bias, rates, skip = (
            weights.tensor(path).float() for path in (mixer.step_bias, f"{mixer.path}.A_log", f"{mixer.path}.D")
        )
        norm, epsilon = None, 0.0
        if mixer.norms is not None:
            sizes, epsilon = (mixer.rank, mixer.state, mixer.state), mixer.norms[0].epsilon
            given = zip(mixer.norms, sizes, strict=True)
            norm = torch.cat(
                [skip.new_ones(size) if each.path is None else weights.module(each.path).weight.detach().float()
                 for each, size in given]
            )  # fmt: skip
        return cls(
            one_weight(inputs, parts=False), *convolution_of(weights, f"{mixer.path}.conv1d"), one_weight(selection),
            _of_whole_rank(steps.weight.detach()),
            (bias.contiguous(), -rates.exp().T.contiguous(), skip.contiguous()), norm, epsilon, mixer.rank, mixer.state,
            one_weight(output),
        )  # fmt: skip

    @property
    def shape(self) -> StateShape:
        width, channels = self.kernel.shape
        return StateShape(width - 1, channels, 2 * channels + 2 * self.state, (1, self.state, channels))

    def parts(self, x: Tensor, number: int, call: StatesOfCall) -> Tensor:
        """[parts, rows, hidden], float32, of x [padded rows, hidden]; `number` counts the recurrent layers."""
        from saltus.models.cuda import linear_kernels, recurrent_kernels, selection_kernels
        from saltus.models.cuda.launching import largest_power_of_two

        tables, pool, channels = call.inputs, call.pool, self.kernel.shape[1]
        rows = tables.shape.num_rows
        columns = x.new_empty(rows, 2 * channels)
        linear_kernels.linear(x, self.inputs[0], columns, self.inputs[1], rows)
        given, gate = columns.chunk(2, 1)
        windows, states = pool.windows[number], pool.states[number]
        kept, kept_x = pool.kept[number], pool.convolved[number]
        convolved = recurrent_kernels.convolve(
            given, windows, kept, tables.row_sources, self.kernel, self.kernel_bias, True, x.new_empty(len(x), channels)
        )
        recurrent_kernels.keep_window(given, windows, kept, tables.text_sources, tables.texts.slots)
        selected = x.new_empty(rows, channels + 2 * self.state)
        low = x.new_empty(len(x), self.steps[0][0].shape[1])
        parts = linear_kernels.linear_parts(convolved, *self.selection, rows)
        selection_kernels.select(parts, self.norm, self.epsilon, self.rank, low, selected)
        linear_kernels.linear(low, self.steps[0], selected, self.steps[1], rows)
        out = x.new_empty(len(x), channels)
        for jobs, writes in ((tables.texts, True), (tables.nodes, False)):
            recurrent_kernels.recur(
                selected, convolved, kept, kept_x, self.constants, states, jobs, out, (0, 0, 0), 1, delta=False,
                writes=writes,
            )  # fmt: skip
        for each, nodes in ((given, kept[:, :channels]), (selected, kept[:, channels:]), (convolved[:rows], kept_x)):
            recurrent_kernels.keep_nodes(each, nodes, tables.node_places)
        group = min(MAX_GATE_GROUP, largest_power_of_two(channels))
        recurrent_kernels.gate_outputs(out[:rows], gate, None, 0.0, group)
        return linear_kernels.linear_parts(out, *self.output, rows)


def is_known_scan(mixer: Mixer | None, base: Any) -> bool:
    """True for a layer of Mamba that our kernels compute. `base` is the model without its output layer."""
    if not isinstance(mixer, Mamba):
        return False
    norms = mixer.norms or ()
    whole = mixer.inputs, mixer.selection, mixer.output
    return (
        all(each.stop is None and base.get_submodule(each.path).bias is None for each in whole)
        and mixer.steps.stop is None
        and all(norm.kind == "rms" for norm in norms)
        and len({norm.epsilon for norm in norms}) <= 1
    )


def _of_whole_rank(weight: Tensor) -> tuple[Sequence[Tensor], Any]:
    from saltus.models.cuda.linear_kernels import blocks_of

    if missing := -weight.shape[1] % RANK_MULTIPLE:
        whole = weight.dequantize() if isinstance(weight, GPUPackedWeight) else weight
        weight = F.pad(whole, (0, missing))
    return [weight], blocks_of(weight, parts=False)
