"""Linear layers and elementwise functions that round a row alike in every call, by intercepting torch functions."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Parameter
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from saltus.kernels import native
from saltus.kernels.native import structs
from saltus.kernels.packed_weight import is_kernel_weight, kernel_arguments

TILE_ROWS = 8  # rows of a product where there is no compiled kernel
TILED_SIZE_MULTIPLE = 16  # with sizes that are multiples of it, torch rounds all rows of a tile alike
VECTOR_MULTIPLE = 128  # elements, a multiple of torch's vector width; scalar code rounds otherwise
MAX_ELEMENTS_PER_CALL = 16384  # elements that torch gives to one thread, so that no thread has a scalar rest


def _torch_functions(*names: str) -> frozenset[Callable[..., Any]]:
    """The functions of these names in torch, in torch.nn.functional and as methods."""
    return frozenset(f for name in names for place in (torch, Tensor, F) if (f := getattr(place, name, None)))


ELEMENTWISE_FUNCTIONS = _torch_functions(
    "celu", "cos", "elu", "erf", "exp", "expm1", "gelu", "log", "log1p", "logsigmoid", "mish", "pow", "rsqrt", "selu",
    "sigmoid", "silu", "sin", "softplus", "tanh",
)  # fmt: skip
MATMUL_FUNCTIONS = _torch_functions("matmul", "__matmul__", "mm")
BATCHED_MATMUL_FUNCTIONS = _torch_functions("matmul", "__matmul__", "bmm")
MULTIPLY_FUNCTIONS = _torch_functions("mul", "multiply", "__mul__")


def linear(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> list[Tensor]:
    """x Wᵀ + b for several weights [out, in] at once; x is [..., in]. No row depends on the others."""
    kernel = native.kernel("linear", x.dtype, x.device)
    if kernel is None:
        return [_linear_in_tiles(x, weight, bias) for weight, bias in zip(weights, biases, strict=True)]
    x = x.contiguous()
    outs = [x.new_empty(*x.shape[:-1], weight.shape[0]) for weight in weights]
    rows = x.numel() // x.shape[-1]
    struct = structs.Linear(x=x.data_ptr(), rows=rows, inputs=x.shape[-1], count=len(weights))
    for i, (weight, bias, out) in enumerate(zip(weights, biases, outs, strict=True)):
        struct.weight[i], struct.format[i] = kernel_arguments(weight)
        struct.out[i], struct.outs[i] = out.data_ptr(), weight.shape[0]
        struct.bias[i] = None if bias is None else bias.data_ptr()
    if kernel(ctypes.byref(struct)):
        raise MemoryError("a linear layer ran out of memory; ask for a shorter text")
    return outs


def _linear_in_tiles(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The same by torch, whose rounding depends on the number, place and address of rows: each tile is copied."""
    rows, size = x.reshape(-1, x.shape[-1]), 1 if any(n % TILED_SIZE_MULTIPLE for n in weight.shape) else TILE_ROWS
    padded = F.pad(rows, (0, 0, 0, -len(rows) % size))
    out = torch.cat([F.linear(tile.clone(), weight, bias) for tile in padded.split(size)])
    return out[: len(rows)].view(*x.shape[:-1], -1)


def batch_invariant_elementwise(function: Callable[..., Tensor], x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Apply an elementwise function so that an element rounds alike at every place."""
    count = x.numel()
    if count % VECTOR_MULTIPLE == 0 and count <= MAX_ELEMENTS_PER_CALL and x.is_contiguous():
        return function(x, *args, **kwargs)
    padded = F.pad(x.reshape(-1), (0, -count % VECTOR_MULTIPLE))
    return torch.cat([function(piece, *args, **kwargs) for piece in padded.split(MAX_ELEMENTS_PER_CALL)])[:count].view(
        x.shape
    )


def complex_product(x: Tensor, y: Tensor) -> Tensor:
    """x · y of complex numbers, each of whose four products is rounded; torch fuses some of them, by their places."""
    return torch.complex(x.real * y.real - x.imag * y.imag, x.real * y.imag + x.imag * y.real)


class BatchInvariantMode(TorchFunctionMode):
    """While active, replaces torch's linear layers, products with weights and elementwise functions."""

    # of weights stored [in, out]: (version key, transposed copy)
    transposed_weights: WeakTensorKeyDictionary = WeakTensorKeyDictionary()

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is F.linear:
            if (out := linear_by_kernel(*args, **kwargs)) is not None:
                return out
        elif func in ELEMENTWISE_FUNCTIONS:
            if _is_elementwise(args, kwargs):
                return batch_invariant_elementwise(func, *args, **kwargs)
        elif kwargs:  # of a call that no model has; the others by position
            pass
        elif func in MATMUL_FUNCTIONS and args[1].ndim == 2:  # by weights that stand as columns
            if _can_use_kernel(args[0], args[1].t()):
                return _linear(args[0], self._transposed(args[1]), None)
        elif func in BATCHED_MATMUL_FUNCTIONS:  # by those of several experts
            if _is_expert_product(*args):
                return torch.stack([_linear(x, weight.t(), None) for x, weight in zip(*args, strict=True)])
        elif func in MULTIPLY_FUNCTIONS:  # rotary embeddings as complex numbers
            if all(isinstance(each, Tensor) and each.is_complex() for each in args):
                return complex_product(*args)
        elif func is torch.addmm and _can_use_kernel(args[1], args[2].t(), args[0]):  # Conv1D of GPT-2
            return _linear(args[1], self._transposed(args[2]), args[0])
        return func(*args, **kwargs)

    def _transposed(self, weight: Tensor) -> Tensor:
        """[in, out] → [out, in], done once for a parameter as long as it stays the same."""
        if weight.t().is_contiguous() or not isinstance(weight, Parameter):
            return weight.t()
        now = weight.data_ptr(), weight.dtype, 0 if weight.is_inference() else weight._version
        if weight not in self.transposed_weights or self.transposed_weights[weight][0] != now:
            self.transposed_weights[weight] = now, weight.detach().t().contiguous()
        return self.transposed_weights[weight][1]


def linear_by_kernel(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor | None:
    """What F.linear gives, with its names of arguments, by the kernels; None if they cannot compute it."""
    if (torch.is_grad_enabled() and input.requires_grad) or not _can_use_kernel(input, weight, bias):
        return None
    return _linear(input, weight, bias)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return linear(x, [weight.contiguous()], [None if bias is None else bias.contiguous()])[0]


def _can_use_kernel(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> bool:
    """Can a kernel read them where they lie? Other libraries' quantized weights are tensors of their own kinds."""
    return (
        x.device.type == "cpu"
        and x.dtype == weight.dtype in native.KERNEL_SUFFIXES
        and is_kernel_weight(weight)
        and weight.ndim == 2
        and x.numel() > 0
        and weight.numel() > 0
        and x.shape[-1] == weight.shape[1]
        and (bias is None or (bias.dtype == x.dtype and bias.shape == weight.shape[:1]))
    )


def _is_expert_product(x: Tensor, weights: Tensor) -> bool:
    """True for a product [experts, rows, in] by weights [experts, in, out] that kernels can compute."""
    return (
        isinstance(weights, Parameter)
        and x.ndim == weights.ndim == 3
        and len(x) == len(weights)
        and _can_use_kernel(x[0], weights[0].t())
    )


def _is_elementwise(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """True for a function of one tensor, given by position, into a new one."""
    x, *others = args or (None,)
    others += kwargs.values()
    return (
        type(x) is Tensor
        and x.device.type == "cpu"
        and x.is_floating_point()
        and x.numel() > 0
        and not any(other is True or isinstance(other, Tensor) for other in others)  # in place
    )
