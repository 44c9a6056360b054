"""The weights of layers as our kernels for GPUs take them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from saltus.models.cpu.decoder_weights import Resolver
from saltus.models.cuda.packed_weight import GPUPackedWeight, joined_packed
from saltus.models.mixer_description import Norm, Weight


class LinearLayer(NamedTuple):
    """What our kernels read of a linear layer: weight [outputs, inputs], bias [outputs]."""

    weight: Tensor
    bias: Tensor | None


def is_transposed(layer: Any) -> bool:
    """True for a linear layer of [inputs, outputs], as GPT-2's are."""
    return type(layer).__name__ == "Conv1D"


def linear_layer(layer: Any) -> Any:
    """A linear layer of [outputs, inputs]; the weight of one that is transposed becomes a view of that."""
    if not is_transposed(layer):
        return layer
    weight = layer.weight.detach().T.contiguous()
    layer.weight.data = weight.T
    return LinearLayer(weight, layer.bias)


def whole_layers(weights: Sequence[Weight], base: Any) -> list[Any] | None:
    """The linear layers whose outputs these are, all of them and in this order; None if they are not."""
    layers, at = [base.get_submodule(weights[0].path)], 0
    for weight in weights:
        layer: Any = base.get_submodule(weight.path)
        if layer is not layers[-1]:
            if at not in (0, _outputs(layers[-1])):
                return None
            layers.append(layer)
            at = 0
        if weight.start != at:
            return None
        at = _outputs(layer) if weight.stop is None else weight.stop
    return layers if at == _outputs(layers[-1]) else None


def _outputs(layer: Any) -> int:
    return layer.weight.shape[1 if is_transposed(layer) else 0]


def layers_of(weights: Sequence[Weight], base: Any) -> list[Any]:
    """The linear layers whose outputs these are, in order."""
    layers = whole_layers(weights, base)
    assert layers is not None, "of a known description"
    return [linear_layer(each) for each in layers]


def parts_of(layers: Sequence[Any], count: int) -> list[Tensor]:
    """The weights of linear layers in `count` parts of one size, views of a layer's where it has several.

    Packed ones stay whole.
    """
    weights = [layer.weight.detach() for layer in layers]
    if len(weights) == count or isinstance(weights[0], GPUPackedWeight):
        return weights
    (weight,) = weights
    return list(weight.chunk(count))


def norm_of(norm: Norm | None, weights: Resolver, all_heads: bool = False, size: int = 0) -> Any:
    """A norm as the kernels read it; of queries and keys perhaps one of all heads together.

    Without weights they are 1, `size` of them, or as many as the base's hidden states have.
    """
    from saltus.models.cuda.row_kernels import KernelNorm

    if norm is None:
        return None
    if norm.path is None:
        like = next(weights.base.parameters())
        ones = torch.ones(size or weights.base.config.hidden_size, dtype=torch.float32, device=like.device)
        return KernelNorm(weights.keep(ones), norm.epsilon, True, all_heads, centred=norm.kind == "layer")
    values = weights.module(norm.path).weight.detach()
    if norm.kind == "rms":
        return KernelNorm(values, norm.epsilon, all_heads=all_heads)
    values = weights.keep(values.float() + norm.offset)
    bias = getattr(weights.module(norm.path), "bias", None)
    bias = None if bias is None else weights.keep(bias.detach().float())
    return KernelNorm(values, norm.epsilon, True, all_heads, centred=norm.kind == "layer", bias=bias)


def bias_of(layers: Sequence[Any]) -> Tensor | None:
    """The biases of linear layers beside each other; None if none has one."""
    known = next((layer.bias.detach() for layer in layers if layer.bias is not None), None)
    if known is None:
        return None
    return torch.cat(
        [known.new_zeros(len(each.weight)) if each.bias is None else each.bias.detach() for each in layers]
    )


def one_weight(layer: Any, parts: bool = True) -> tuple[Sequence[Tensor], Any]:
    """That of a linear layer, and how to cut its product; see `blocks_of`."""
    from saltus.models.cuda.linear_kernels import blocks_of

    weight = layer.weight.detach()
    return [weight], blocks_of(weight, parts=parts)


def merged(projections: Sequence[Any]) -> tuple[Sequence[Tensor], Any, Tensor | None]:
    """The weights of linear layers beside each other, how to cut their product, and the bias if there is one.

    The model's own that are merged become views of the merged ones.
    """
    from saltus.models.cuda.linear_kernels import blocks_of

    weights = joined_packed([each.weight for each in projections])
    if len(projections) > 1 and not any(isinstance(weight, GPUPackedWeight) for weight in weights):
        weights = [torch.cat([each.weight.detach() for each in projections])]
        parts = weights[0].split([len(each.weight) for each in projections])
        for each, part in zip(projections, parts, strict=True):
            each.weight.data = part
    weights = [weight.detach() for weight in weights]
    return weights, blocks_of(*weights), bias_of(projections)
