"""Apply weights so that a row rounds alike in every call, by taking over what models ask of torch's matrix products."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from saltus.networks import native

TILE = 8  # rows of every product where there is no compiled kernel


def linear(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> list[Tensor]:
    """x Wᵀ + b for several weights [out, in] at once; x is [..., in]. No row depends on another, nor on their number."""
    kernel = native.kernel("linear", x.dtype, x.device)
    if kernel is None:
        return [_tiled(x, weight, bias) for weight, bias in zip(weights, biases, strict=True)]
    x = x.contiguous()
    outs = [x.new_empty(*x.shape[:-1], weight.shape[0]) for weight in weights]
    rows = x.numel() // x.shape[-1]
    struct = native.Linear(x=x.data_ptr(), rows=rows, inputs=x.shape[-1], count=len(weights))
    for i, (weight, bias, out) in enumerate(zip(weights, biases, outs, strict=True)):
        struct.weight[i], struct.out[i], struct.outs[i] = weight.data_ptr(), out.data_ptr(), weight.shape[0]
        struct.bias[i] = None if bias is None else bias.data_ptr()
    if kernel(ctypes.byref(struct)):
        raise MemoryError("a linear layer ran out of memory; ask for a shorter text")
    return outs


def _tiled(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The same by torch: products of exactly TILE rows, since what a row rounds to depends on their number."""
    rows = x.reshape(-1, x.shape[-1])
    padded = F.pad(rows, (0, 0, 0, -len(rows) % TILE))
    out = torch.cat([F.linear(tile, weight, bias) for tile in padded.split(TILE)])
    return out[: len(rows)].view(*x.shape[:-1], -1)


class Exact(TorchFunctionMode):
    """While active, torch's linear layers are ours. It sees every product of activations with weights."""

    turned: WeakKeyDictionary[Tensor, Tensor] = WeakKeyDictionary()  # weights stored [in, out], turned once

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is F.linear and _ours(*args[:2]):
            bias = args[2] if len(args) > 2 else kwargs.get("bias")
            return linear(args[0], [args[1]], [bias])[0]
        if func is torch.addmm and not kwargs and _ours(args[1], args[2]):  # Conv1D of GPT-2
            bias, x, weight = args
            if weight not in self.turned:
                self.turned[weight] = weight.detach().t().contiguous()
            return linear(x, [self.turned[weight]], [bias])[0]
        return func(*args, **kwargs)


def _ours(x: Tensor, weight: Tensor) -> bool:
    return x.device.type == "cpu" and weight.ndim == 2 and x.dtype == weight.dtype in native.SUFFIX and x.numel() > 0
