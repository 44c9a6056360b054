"""Move models to a GPU, whose weights may be packed."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from saltus.kernels.packed_weight import PackedWeight
from saltus.models.cuda.gpu_decoder import can_decode, has_kernels
from saltus.models.cuda.packed_weight import GPUPackedWeight, can_pack
from saltus.models.packed_decoder import PackedDecoder, transformers_model


def move_to_gpu(model: Any, device: str | torch.device) -> Any:
    """The model on a GPU. Packed matrices of linear layers stay packed, where there are kernels to multiply by them.

    Other packed weights are expanded to bfloat16: embeddings, of which few rows are read, and stacks of experts. A
    PackedDecoder that our kernels do not decode becomes the model of Transformers.
    """
    if isinstance(model, PackedDecoder) and not can_decode(model):
        model = transformers_model(model)
    places = [
        (module, name, weight)
        for module in model.modules()
        for name, weight in module._parameters.items()
        if isinstance(weight, PackedWeight)
    ]
    for module, name, _ in places:
        module._parameters[name] = nn.Parameter(torch.empty(0), requires_grad=False)
    model.to(device)
    moved: dict[tuple[int, bool], Any] = {}  # output layers may be tied to embeddings
    for module, name, weight in places:
        packed = has_kernels() and isinstance(module, nn.Linear) and can_pack(weight)
        if (key := (id(weight), packed)) not in moved:
            expanded = None if packed else nn.Parameter(weight.dequantize().to(device), requires_grad=False)
            moved[key] = GPUPackedWeight.from_packed(weight, device) if expanded is None else expanded
        module._parameters[name] = moved[key]
    return model
