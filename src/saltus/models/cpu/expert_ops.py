"""Make the kernel's arguments of a mixture of experts from the modules of its router and its experts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from saltus.kernels.native import structs
from saltus.kernels.packed_weight import PackedWeight, kernel_arguments, select_outputs
from saltus.models.decoder_description import Experts
from saltus.models.packed_decoder import check_sizes

if TYPE_CHECKING:
    from saltus.models.cpu.decoder_weights import Resolver

GATE, UP, DOWN = range(3)  # of weights, in the struct


def experts_struct(
    layer: Experts, weights: Resolver, hidden: int, norm: dict[str, Any], routed: int | None = None
) -> structs.Experts:
    """All but its rows, what it reads and what it writes. `norm` has the fields of the norm before it.

    Experts read and give `hidden` numbers, the router reads as many or `routed`. Errors: ValueError for numbers of
    experts that the kernel cannot choose by.
    """
    routed = routed or hidden
    router, module = weights.module(layer.router), weights.module(layer.experts)
    router_weight = weights.dense(router.weight)
    if layer.router_scale is not None:
        scale = weights.tensor(layer.router_scale).float() * layer.router_factor
        router_weight = weights.keep((router_weight.float() * scale).contiguous())
    experts, down = len(router_weight), _stack(module, "down_proj", layer.is_transposed)
    width = down.shape[2]
    _check(layer, experts, width)
    assert router_weight.shape == (experts, routed)
    assert down.shape == (experts - layer.zero_experts, hidden, width)
    assert not (layer.zero_experts and layer.scales_inputs)
    assert not layer.limit or layer.activation == "clamped_swiglu" or (layer.has_gate and not layer.gate_up_interleaved)
    struct = structs.Experts(
        router=router_weight.data_ptr(), router_is_float32=router_weight.dtype == torch.float32, hidden=hidden,
        width=width, routed_inputs=routed, experts=experts, top_k=layer.top_k, groups=layer.groups,
        top_groups=layer.top_groups, best_of_group=layer.best_of_group, scoring=structs.SCORINGS[layer.scoring],
        normalized=layer.is_normalized, least_sum=layer.least_sum, scale=layer.scale, scales_inputs=layer.scales_inputs,
        activation=structs.ACTIVATION_NUMBERS[layer.activation], interleaved=layer.gate_up_interleaved,
        limit=layer.limit, alpha=layer.alpha, biases_logits=layer.biases_logits, margin=layer.margin,
        zero_experts=layer.zero_experts, **norm,
    )  # fmt: skip
    if (bias := getattr(router, "bias", None)) is not None:
        struct.router_bias = weights.floats(bias, experts).data_ptr()
    if layer.selection_bias is not None:
        struct.selection_bias = weights.floats(weights.tensor(layer.selection_bias).flatten(), experts).data_ptr()
    if layer.expert_scale is not None:
        struct.expert_scale = weights.floats(weights.tensor(layer.expert_scale), experts).data_ptr()
    for number, name, start, stop in _matrices(layer, width, hidden):
        stack = _stack(module, name, layer.is_transposed)
        assert stack.shape[0] in (experts, len(down)) and (number == DOWN or stack.shape[2] == hidden)
        struct.weight[number], struct.format[number], struct.weight_step[number] = _arguments(stack, start, stop)
        if (biases := getattr(module, f"{name}_bias", None)) is not None:
            assert biases.shape == (experts, stack.shape[1]) and biases.is_contiguous()
            struct.bias[number] = biases.data_ptr() + start * biases.element_size()
            struct.bias_step[number] = biases.stride(0) * biases.element_size()
    arithmetics = {struct.format[number] >= structs.INTERLEAVED for number in (GATE, UP) if struct.weight[number]}
    assert len(arithmetics) == 1, "gate and up share their rows"
    return struct


def _check(layer: Experts, experts: int, width: int) -> None:
    """The kernel relies on it."""
    check_sizes(
        experts_per_token=layer.top_k, expert_groups=layer.groups, top_expert_groups=layer.top_groups,
        best_of_group=layer.best_of_group, experts=experts, expert_width=width,
    )  # fmt: skip
    assert layer.scoring != "sparse_mixer" or (layer.top_k == 2 and layer.groups == 1)
    members = experts // layer.groups
    if experts % layer.groups or layer.top_groups > layer.groups or layer.best_of_group > members:
        raise ValueError(
            f"a decoder chooses {layer.top_groups} of {layer.groups} groups by {layer.best_of_group} of their members,"
            f" but has {experts} experts; fetch it again"
        )
    if layer.top_k > members * layer.top_groups:
        raise ValueError(f"a decoder chooses {layer.top_k} of {members * layer.top_groups} experts; fetch it again")


def _matrices(layer: Experts, width: int, hidden: int) -> list[tuple[int, str, int, int]]:
    """The number of each weight in the struct, its name, and which outputs of an expert's matrix it is."""
    down = (DOWN, "down_proj", 0, hidden)
    if not layer.has_gate:
        return [(UP, "up_proj", 0, width), down]
    if layer.gate_up_interleaved:
        return [(GATE, "gate_up_proj", 0, 2 * width), down]
    return [(GATE, "gate_up_proj", 0, width), (UP, "gate_up_proj", width, 2 * width), down]


def _stack(module: Any, name: str, is_transposed: bool) -> Tensor:
    """Matrices [experts, out, in] without gaps; a parameter [experts, in, out] is moved to lie so."""
    parameter = getattr(module, name)
    if isinstance(parameter, PackedWeight):
        return parameter.flipped() if parameter.is_transposed else parameter  # GGUF's lie as the kernel reads them
    if not is_transposed:
        return parameter.detach()
    stack = parameter.detach().transpose(1, 2)
    if not stack.is_contiguous():
        stack = stack.contiguous()
        parameter.data = stack.transpose(1, 2)
    return stack


def _arguments(stack: Tensor, start: int, stop: int) -> tuple[int, int, int]:
    """The address and the format of some outputs of the first matrix, and the bytes from there to the next one's."""
    (address, format), *others = (
        kernel_arguments(select_outputs(_matrix(stack, number), slice(start, stop)))
        for number in range(min(2, len(stack)))
    )
    return address, format, others[0][0] - address if others else 0


def _matrix(stack: Tensor, number: int) -> Tensor:
    return stack.matrix(number) if isinstance(stack, PackedWeight) else stack[number]
