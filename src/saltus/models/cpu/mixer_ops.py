"""Make the operations of layers that keep a state: short convolutions, the gated delta rule, Mamba, Mamba-2."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from saltus.kernels.native import structs
from saltus.models.cpu.operations import Operations
from saltus.models.mixer_description import DeltaNet, KimiDeltaNet, Mamba, Mamba2, Norm, ShortConvolution, Weight

ALIGNMENT = 64  # bytes, of a layer's states
KEY_UNIT = 4  # keys of a state are padded to multiples of it


@dataclass(frozen=True)
class MixerOps:
    """Adds mixers to the operations of a decoder, and their states to what a text keeps."""

    ops: Operations

    def add(self, mixer: ShortConvolution | DeltaNet | KimiDeltaNet | Mamba | Mamba2, norm: Norm | None) -> Tensor:
        """What the output layer of a mixer multiplies, [rows, size]."""
        if isinstance(mixer, ShortConvolution):
            return self._short_convolution(mixer, norm)
        if isinstance(mixer, KimiDeltaNet):
            return self._kimi_delta_net(mixer, norm)
        if isinstance(mixer, Mamba):
            return self._selective_scan(mixer, norm)
        return self._delta_net(mixer, norm) if isinstance(mixer, DeltaNet) else self._mamba(mixer, norm)

    def _short_convolution(self, mixer: ShortConvolution, norm: Norm | None) -> Tensor:
        size = self.ops.hidden.shape[1]
        (inputs,) = self._inputs((mixer.inputs,), (3 * size,), norm)
        before, after, x = inputs.split(size, 1)
        return self._convolve(mixer.kernel, x, silu=False, before=before, after=after)

    def _delta_net(self, mixer: DeltaNet, norm: Norm | None) -> Tensor:
        keys, values, heads = mixer.groups * mixer.key_dim, mixer.heads * mixer.value_dim, mixer.heads
        if len(mixer.inputs) == 2:
            mixed, steps = self._inputs(mixer.inputs, (2 * keys + 2 * values, 2 * heads), norm)
            in_group = values // mixer.groups
            mixed = self.ungrouped(mixed, mixer.groups, (mixer.key_dim, mixer.key_dim, in_group, in_group))
            mixed, gate = mixed.split((2 * keys + values, values), 1)
            in_group = heads // mixer.groups
            weight, step = self.ungrouped(steps, mixer.groups, (in_group, in_group)).split(heads, 1)
            parts = [mixed]
        elif len(mixer.inputs) == 4:
            *parts, gate, weight, step = self._inputs(mixer.inputs, (2 * keys + values, values, heads, heads), norm)
        else:
            *parts, gate = self._inputs(mixer.inputs[:4], (keys, keys, values, values), norm)
            weight, step = self._inputs(mixer.inputs[4:], (heads, heads), norm, "small input")
        convolved = self._convolve_parts(f"{mixer.path}.conv1d", parts)
        query, key, value = convolved[0].split((keys, keys, values), 1) if len(parts) == 1 else convolved
        out = self._recur(
            mixer.path, query, key, value, step, weight, heads=heads, groups=mixer.groups, key_dim=mixer.key_dim,
            value_dim=mixer.value_dim, scale=mixer.key_dim**-0.5, epsilon=1e-6, most=float("inf"),
            weight_scale=mixer.weight_scale,
        )  # fmt: skip
        self.gate(out, gate, mixer.value_dim, f"{mixer.path}.{mixer.norm}", epsilon=mixer.epsilon)
        return out

    def _kimi_delta_net(self, mixer: KimiDeltaNet, norm: Norm | None) -> Tensor:
        heads, dim, size = mixer.heads, mixer.dim, mixer.heads * mixer.dim
        projections = [mixer.query, mixer.key, mixer.value]
        given = self._inputs((*projections, mixer.weight), (size, size, size, heads), norm)
        if len(mixer.decay) == 1:
            decay, gate = self._inputs((*mixer.decay, *mixer.gate), (size, size), norm, "decay and gate")
        else:
            low = self._inputs((mixer.decay[0], mixer.gate[0]), (dim, dim), norm, "low")
            decay, gate = (
                self._inputs((weight,), (size,), None, name, x)[0]
                for name, weight, x in zip(("decay", "gate"), (mixer.decay[1], mixer.gate[1]), low, strict=True)
            )
        query, key, value = self._convolve_parts(mixer.kernel, given[:3])
        out = self._recur(
            mixer.decays, query, key, value, decay, given[3], heads=heads, groups=heads, key_dim=dim, value_dim=dim,
            scale=dim**-0.5, epsilon=1e-6, most=float("inf"), weight_scale=1.0, least_decay=mixer.least_decay,
            rounds_decay=mixer.rounds_decay,
        )  # fmt: skip
        sigmoid = structs.ACTIVATION_NUMBERS["sigmoid"]
        self.gate(out, gate, dim, mixer.norm, epsilon=mixer.epsilon, activation=sigmoid)
        return out

    def _selective_scan(self, mixer: Mamba, norm: Norm | None) -> Tensor:
        ops, size, state = self.ops, mixer.channels, mixer.state
        (inputs,) = self._inputs((mixer.inputs,), (2 * size,), norm)
        x, gate = inputs.split(size, 1)
        value = self._convolve(f"{mixer.path}.conv1d", x, silu=True)
        (selected,) = self._inputs((mixer.selection,), (mixer.rank + 2 * state,), None, "selected", value)
        parts, first = [], 0
        for number, width in enumerate((mixer.rank, state, state)):
            parts.append(ops.buffer(f"selected part {number}", width))
            ops.copy(selected, parts[number], first)
            first += width
            if mixer.norms is not None:
                ops.normalize(parts[number], mixer.norms[number], parts[number])
        (step,) = self._inputs((mixer.steps,), (size,), None, "step", parts[0])
        rates = -self._vector(f"{mixer.path}.A_log", size * state).view(size, state).exp()
        columns, keys = structs.STATE_COLUMNS, -(-state // KEY_UNIT) * KEY_UNIT
        padded = rates.new_zeros(-(-size // columns) * columns, keys)
        padded[:size, :state] = rates
        skip = rates.new_zeros(len(padded))
        skip[:size] = self._vector(f"{mixer.path}.D", size)
        of_rows = {"query": parts[2], "key": parts[1], "value": value, "step": step}
        out = ops.buffer("recurrent", size)
        struct = structs.Recurrence(
            **{name: each.data_ptr() for name, each in of_rows.items()},
            **{f"{name}_row": each.stride(0) for name, each in of_rows.items()},
            **self._places(4 * padded.numel(), (state + 2 * size) * value.element_size()),
            bias=self._kept(self._vector(mixer.step_bias, size)), skip=self._kept(skip), out=out.data_ptr(),
            rate=self._kept(padded.view(-1, columns, keys).transpose(1, 2).contiguous()), heads=1, groups=1,
            key_dim=state, value_dim=size, steps=size, scale=1.0, most=float("inf"),
        )  # fmt: skip
        ops.op(structs.RECUR, struct)
        self.gate(out, gate, size, None)
        return out

    def _mamba(self, mixer: Mamba2, norm: Norm | None) -> Tensor:
        size, keys = mixer.heads * mixer.head_dim, mixer.groups * mixer.state
        (inputs,) = self._inputs((mixer.inputs,), (2 * size + 2 * keys + mixer.heads,), norm)
        if mixer.scales:
            scale = torch.cat([torch.full((count,), value, dtype=torch.float32) for value, count in mixer.scales])
            assert scale.shape == inputs.shape[1:]
            struct = structs.ColumnScale(x=inputs.data_ptr(), scale=self._kept(scale), size=inputs.shape[1])
            self.ops.op(structs.SCALE_COLUMNS, struct)
        gate, mixed, step = inputs.split((size, size + 2 * keys, mixer.heads), 1)
        value, key, query = self._convolve(f"{mixer.path}.conv1d", mixed, silu=True).split((size, keys, keys), 1)
        out = self._recur(
            mixer.path, query, key, value, step, None, heads=mixer.heads, groups=mixer.groups, key_dim=mixer.state,
            value_dim=mixer.head_dim, scale=1.0, least=mixer.limits[0], most=mixer.limits[1],
        )  # fmt: skip
        path = f"{mixer.path}.norm" if mixer.has_norm else None
        settings: dict[str, Any] = {"epsilon": mixer.epsilon, "gate_first": mixer.has_norm and mixer.gate_first}
        self.gate(out, gate, size // mixer.norm_groups, path, **settings)
        return out

    def _inputs(
        self,
        weights: Sequence[Weight],
        widths: Sequence[int],
        norm: Norm | None,
        name: str = "input",
        x: Tensor | None = None,
    ) -> list[Tensor]:
        """The products of x, or the hidden states, with some weights.

        Errors: AssertionError for other widths than these.
        """
        found = [len(self.ops.weights.matrix(weight).weight) for weight in weights]
        assert found == list(widths), "layers of other sizes than their configuration's"
        out = [self.ops.buffer(f"{name} {number}", width) for number, width in enumerate(widths)]
        self.ops.product(self.ops.hidden if x is None else x, list(zip(weights, out, strict=True)), norm)
        return out

    def ungrouped(self, x: Tensor, groups: int, sizes: Sequence[int]) -> Tensor:
        """Columns that stand group by group, in parts of these sizes, in the order of the parts."""
        begins = [sum(sizes[:number]) for number in range(len(sizes))]
        runs = [
            (group * sum(sizes) + begin, size)
            for begin, size in zip(begins, sizes, strict=True)
            for group in range(groups)
        ]
        out = self.ops.buffer(f"ungrouped {x.shape[1]}", x.shape[1])
        assert sum(size for _, size in runs) == x.shape[1]
        pointers = {"x": x.data_ptr(), "out": out.data_ptr(), "runs": self._kept(torch.tensor(runs))}
        struct = structs.Rearrangement(**pointers, inputs=x.shape[1], size=x.shape[1], num_runs=len(runs))
        self.ops.op(structs.REARRANGE, struct)
        return out

    def _convolve_parts(self, path: str, parts: Sequence[Tensor]) -> list[Tensor]:
        """Each part by its channels of one kernel, through SiLU."""
        first, out = 0, []
        for part in parts:
            out.append(self._convolve(path, part, silu=True, first=first))
            first += part.shape[1]
        return out

    def _convolve(self, path: str, x: Tensor, silu: bool, first: int | None = None, **gates: Tensor) -> Tensor:
        """A convolution of each column over the tokens; with `first` by the kernel's channels from there on."""
        module, own = self.ops.weights.module(path), slice(None)
        channels, _, width = module.weight.shape
        if first is not None:
            own, channels = slice(first, first + x.shape[1]), x.shape[1]
        assert x.shape[1] == channels and 1 < width <= structs.MAX_CONVOLUTION_WIDTH
        assert all(each.shape == x.shape for each in gates.values())
        out = self.ops.buffer(f"convolved from {first}", channels)
        bytes_of_row = channels * x.element_size()
        inputs = {"x": x, **gates}
        pointers: dict[str, Any] = {name: each.data_ptr() for name, each in inputs.items()}
        pointers |= {f"{name}_row": each.stride(0) for name, each in inputs.items()}
        pointers["weight"] = self._kept(module.weight.detach()[own, 0].to(x.dtype).T.contiguous())
        pointers["bias"] = None if module.bias is None else module.bias[own].data_ptr()
        struct = structs.Convolution(
            **pointers, **self._places((width - 1) * bytes_of_row, bytes_of_row), out=out.data_ptr(),
            channels=channels, width=width, silu=silu,
        )  # fmt: skip
        self.ops.op(structs.CONVOLVE, struct)
        return out

    def _recur(
        self, path: str, query: Tensor, key: Tensor, value: Tensor, step: Tensor, weight: Tensor | None,
        **settings: Any,
    ) -> Tensor:  # fmt: skip
        """A recurrence over a state of each head, [key_dim, value_dim]; see mixers.inc."""
        heads, groups, key_dim, value_dim = (settings[name] for name in ("heads", "groups", "key_dim", "value_dim"))
        steps = step.shape[1]  # of each head, or of each number of its key
        assert heads % groups == 0 and steps in (heads, heads * key_dim)
        assert query.shape[1] == key.shape[1] == groups * key_dim and value.shape[1] == heads * value_dim
        inputs = {"query": query, "key": key, "value": value, "step": step}
        inputs |= {} if weight is None else {"weight": weight}
        tensor = {name: self._vector(f"{path}.{name}", size) for name, size in (("A_log", heads), ("dt_bias", steps))}
        pointers = {name: each.data_ptr() for name, each in inputs.items()}
        pointers |= {f"{name}_row": each.stride(0) for name, each in inputs.items()}
        pointers |= {"bias": self._kept(tensor["dt_bias"]), "rate": self._kept(-tensor["A_log"].exp())}
        if weight is None:
            pointers["skip"] = self._kept(self._vector(f"{path}.D", heads))
        out = self.ops.buffer("recurrent", heads * value_dim)
        columns = -(-value_dim // structs.STATE_COLUMNS) * structs.STATE_COLUMNS
        state = 4 * heads * (-(-key_dim // KEY_UNIT) * KEY_UNIT) * columns
        kept = [each for name, each in inputs.items() if name != "query"]
        node = sum(each.shape[1] for each in kept) * value.element_size()
        struct = structs.Recurrence(
            **pointers, **self._places(state, node), **settings, out=out.data_ptr(), steps=steps
        )  # fmt: skip
        self.ops.op(structs.RECUR, struct)
        return out

    def gate(self, x: Tensor, gate: Tensor, group: int, norm: str | None, **settings: Any) -> None:
        """Multiply x by its gate, after (or before) a norm of each group of columns.

        Gates [rows, columns] or [rows, groups, group] may stand apart; those [rows, groups, 1] are of a whole group.
        """
        assert x.shape[1] % group == 0
        weight = None if norm is None else self.ops.weights.module(norm).weight
        assert weight is None or x.shape[1] % len(weight) == 0 == len(weight) % group
        assert weight is None or weight.dtype == x.dtype
        gates = gate.view(len(gate), -1, group) if gate.dim() == 2 else gate
        assert gates.shape[:2] == (len(x), x.shape[1] // group) and gates.shape[2] in (1, group)
        struct = structs.GatedNorm(
            x=x.data_ptr(), gate=gates.data_ptr(), gate_row=gates.stride(0), gate_group=gates.stride(1),
            size=x.shape[1], group=group, weights=0 if weight is None else len(weight),
            weight=None if weight is None else weight.data_ptr(), one_gate=gates.shape[2] != group, **settings,
        )  # fmt: skip
        self.ops.op(structs.GATE_OUTPUTS, struct)

    def _vector(self, path: str, size: int) -> Tensor:
        return self.ops.weights.floats(self.ops.weights.tensor(path).flatten(), size)

    def _kept(self, x: Tensor) -> int:
        """Where a tensor's memory is, which the decoder keeps alive."""
        self.ops.weights.made.append(x)
        return x.data_ptr()

    def _places(self, state: int, node: int) -> dict[str, int]:
        """Where a layer has its own in the states of a text, and in the inputs of a node."""
        sizes = self.ops.states
        state, node = (-(-size // ALIGNMENT) * ALIGNMENT for size in (state, node))
        self.ops.states = replace(sizes, state=sizes.state + state, node=sizes.node + node)
        return {"state_place": sizes.state, "node_place": sizes.node}
