"""Move models to a GPU, whose weights may be packed, or are 8-bit floats that are arranged for it already."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from saltus.kernels.packed_weight import PackedWeight
from saltus.models.cuda.gpu_decoder_support import can_decode
from saltus.models.cuda.gpu_experts import are_gpu_experts, gpu_experts_implementation
from saltus.models.cuda.kernel_support import has_kernels
from saltus.models.cuda.packed_weight import GPUPackedWeight, can_pack
from saltus.models.packed_decoder import PackedDecoder, transformers_model
from saltus.models.packed_experts import has_transposed_stacks


def move_to_gpu(model: Any, device: str | torch.device) -> Any:
    """The model on a GPU. Packed matrices of linear layers and experts stay so where kernels multiply by them.

    Other packed weights are expanded to bfloat16: embeddings, of which few rows are read, and what `can_pack` excludes.
    A PackedDecoder that our kernels do not decode becomes the model of Transformers.
    """
    whole: Any = (
        transformers_model(model) if isinstance(model, PackedDecoder) and not can_decode(model, device) else model
    )
    places = [
        (module, name, weight, _is_multiplied(module, weight))
        for module in whole.modules()
        for name, weight in module._parameters.items()
        if isinstance(weight, PackedWeight | GPUPackedWeight)
    ]
    for module, name, *_ in places:
        module._parameters[name] = nn.Parameter(torch.empty(0), requires_grad=False)
    whole.to(device)
    moved: dict[tuple[int, bool], Any] = {}  # output layers may be tied to embeddings
    for module, name, weight, multiplied in places:
        matrices = weight  # [.., out, in]
        if isinstance(weight, PackedWeight) and weight.is_transposed:
            matrices = weight.flipped()
        packed = has_kernels(device) and multiplied and can_pack(matrices)
        if (key := (id(weight), packed)) not in moved:
            expanded = None if packed else nn.Parameter(weight.dequantize().to(device), requires_grad=False)
            moved[key] = GPUPackedWeight.from_packed(matrices, device) if expanded is None else expanded
        module._parameters[name] = moved[key]
    if any(weight.ndim == 3 for *_, weight, _ in places) and (experts := gpu_experts_implementation(whole)):
        whole.set_experts_implementation(experts)
    return whole


def _is_multiplied(module: Any, weight: PackedWeight | GPUPackedWeight) -> bool:
    """True for what our kernels can multiply by: of linear layers and experts, but for 8-bit floats [.., in, out]."""
    if isinstance(module, nn.Linear):
        return True
    return are_gpu_experts(module) and not (isinstance(weight, GPUPackedWeight) and has_transposed_stacks(module))
