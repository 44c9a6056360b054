"""Find the weights of a described decoder in its model, as the kernels take them: their sizes are checked here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from saltus.kernels.native import structs
from saltus.kernels.packed_weight import PackedWeight, kernel_arguments, select_outputs
from saltus.models.mixer_description import Norm, Weight


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
    transposed: dict[str, Tensor] = field(default_factory=dict)  # by path

    def module(self, path: str) -> Any:
        return self.base.get_submodule(path)

    def tensor(self, path: str) -> Tensor:
        """A parameter or buffer by its own path."""
        parent, _, name = path.rpartition(".")
        return getattr(self.module(parent), name).detach()

    def matrix(self, weight: Weight) -> Matrix:
        """Errors: ValueError for one without numbers, which kernels would divide by."""
        module = self._layer(weight.path)
        whole = self._transposed(weight.path) if type(module).__name__ == "Conv1D" else module.weight
        if 0 in whole.shape:
            sides = " x ".join(map(str, whole.shape))
            raise ValueError(f"a decoder's {weight.path} has a weight of {sides} numbers; fetch it again")
        bias = getattr(module, "bias", None) if weight.has_bias else None
        if weight.stop is None:
            return Matrix(whole, bias)
        rows = slice(weight.start, weight.stop)
        assert weight.stop <= len(whole)
        return Matrix(select_outputs(whole, rows), None if bias is None else bias.detach()[rows])

    def _layer(self, path: str) -> Any:
        """A linear layer; a parameter is that of one without biases."""
        parent, _, name = path.rpartition(".")
        found = getattr(self.module(parent), name)
        return Matrix(found, None) if isinstance(found, Tensor) else found

    def _transposed(self, path: str) -> Tensor:
        """The matrix [outputs, inputs] of a layer that has it the other way around, as GPT-2's have."""
        if path not in self.transposed:
            weight = self.module(path).weight
            is_packed = isinstance(weight, PackedWeight)
            self.transposed[path] = weight.flipped() if is_packed else weight.detach().T.contiguous()
        return self.transposed[path]

    def output_layer(self, model: Any) -> Matrix:
        return Matrix(model.lm_head.weight, getattr(model.lm_head, "bias", None))

    def keep(self, made: Tensor) -> Tensor:
        """Keep a tensor that kernels read as long as the weights."""
        self.made.append(made)
        return made

    def floats(self, values: Tensor, size: int) -> Tensor:
        """A vector of this size in float32."""
        assert values.shape == (size,)
        return self.keep(values.detach().float().contiguous())

    def dense(self, weight: Tensor) -> Tensor:
        """A matrix without gaps, expanded if it is packed."""
        if isinstance(weight, PackedWeight):
            return self.keep(weight.dequantize())
        assert weight.is_contiguous()
        return weight.detach()

    def norm(self, norm: Norm, size: int) -> NormWeights:
        """Errors: AssertionError for a norm of another size."""
        if norm.path is None:
            values, kind = torch.ones(size, dtype=torch.float32), norm.kind
            if kind == "layer":
                values = torch.cat([values, torch.zeros_like(values)])
            kind = "rms-float32" if kind == "rms" else kind  # of weights in float32
            return NormWeights(self.keep(values), structs.NORM_KINDS[kind], norm.epsilon)
        module = self.module(norm.path)
        values = module.weight.detach()
        assert values.shape == (size,)
        if norm.kind != "rms":
            values = values.float() + norm.offset
            if norm.kind == "layer":
                bias = getattr(module, "bias", None)
                values = torch.cat([values, torch.zeros_like(values) if bias is None else bias.detach().float()])
            self.made.append(values)
        return NormWeights(values, structs.NORM_KINDS[norm.kind], norm.epsilon)


def linear_struct(
    x: Tensor,
    weights: Sequence[tuple[Any, Tensor | None]],
    norm: NormWeights | None = None,
    gate: Tensor | None = None,
    add: Tensor | None = None,
    activation: int = 0,
    limit: float = 0.0,
) -> structs.Linear:
    """The kernel's arguments of a product but its rows: of `x` with matrices (or linear layers), to their outputs."""
    inputs = weights[0][0].weight.shape[1]
    _check_widths(x, inputs, weights, norm, gate, add)
    struct = structs.Linear(x=x.data_ptr(), inputs=inputs, count=len(weights), activation=activation, limit=limit)
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
    assert norm is None or len(norm.values) == inputs * (1 + (norm.kind == structs.NORM_KINDS["layer"]))
    assert gate is None or gate[0].numel() == inputs
    for matrix, out in weights:
        outputs = len(matrix.weight)
        assert matrix.weight.shape == (outputs, inputs)
        assert matrix.bias is None or len(matrix.bias) == outputs
        assert all(each is None or each[0].numel() == outputs for each in (out, add))
