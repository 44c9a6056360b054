"""Pack the weights of a loaded model by GGUF's quantisers; the blocks are kept in the cache."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import quantize
from safetensors.torch import load_file, save_file
from torch import nn

from saltus.kernels import native
from saltus.kernels.packed_weight import GROUP_OUTPUTS, Arithmetic, PackedWeight, dequantize_blocks
from saltus.loading.model_folders import weight_files
from saltus.models.packed_decoder import UninitializedLinear
from saltus.storage.cache_files import disk_errors, has_digest, new_file_with_digest
from saltus.storage.cache_folder import cache_folder

PACKINGS = {name: GGMLQuantizationType[name.upper()] for name in ("q8_0", "q5_1", "q5_0", "q4_1", "q4_0")}


def pack_model(model: Any, packing: str, folder: Path, arithmetic: Arithmetic = "bf16") -> None:
    """Pack the matrices of linear layers, embeddings and experts, [out, in] with `in` a multiple of 32.

    `folder` is where the model was loaded from. Errors: ValueError for a model without such matrices,
    or if the blocks cannot be kept.
    """
    format = PACKINGS[packing]
    size = GGML_QUANT_SIZES[format][0]
    layers = {name: (layer, "weight") for name, layer in packable_layers(model, size)}
    if not layers:
        raise ValueError(f"no weights of {folder} can be packed as {packing}; load it with the weights of its file")
    stacks = _packable_stacks(model, size)
    layers |= stacks
    kept = _cached_blocks(folder, packing, stacks)
    if has_digest(kept):
        blocks = load_file(kept)
    else:
        blocks = {name: quantized_blocks(getattr(*place), format) for name, place in layers.items()}
        with disk_errors(cache_folder(), f"the {packing} weights of {folder}"), new_file_with_digest(kept) as made:
            save_file(blocks, made)
    for name, (layer, attribute) in layers.items():
        if native.load_kernels() is None:  # the numbers are the same, expanded
            weight = dequantize_blocks(blocks[name], format)
        else:
            weight = PackedWeight.from_blocks(blocks[name], format, arithmetic)
        setattr(layer, attribute, nn.Parameter(weight, requires_grad=False))
    model.tie_weights()


def pack_layers(layers: Iterable[Any], packing: str, arithmetic: Arithmetic) -> None:
    """Replace the matrices of some linear layers by packed ones, where their rows are whole blocks."""
    format = PACKINGS[packing]
    for layer in layers:
        if layer.weight.shape[1] % GGML_QUANT_SIZES[format][0] == 0:
            weight = PackedWeight.from_blocks(quantized_blocks(layer.weight, format), format, arithmetic)
            layer.weight = nn.Parameter(weight, requires_grad=False)


def pack_like(module: Any, model: Any) -> None:
    """Pack the matrices of a module that came with a model as `pack_model` has packed those of the model, if it has."""
    packed = [weight for weight in model.parameters() if isinstance(weight, PackedWeight)]
    if not packed or (format := packed[0].format) not in PACKINGS.values():
        return
    size = GGML_QUANT_SIZES[format][0]
    places = [(layer, "weight") for _, layer in packable_layers(module, size)]
    for layer, attribute in (*places, *_packable_stacks(module, size).values()):
        weight = getattr(layer, attribute)
        if not isinstance(weight, PackedWeight):
            blocks = quantized_blocks(weight, format)
            weight = PackedWeight.from_blocks(blocks, format, packed[0].arithmetic)
            setattr(layer, attribute, nn.Parameter(weight, requires_grad=False))


def packable_layers(model: Any, block: int) -> Iterator[tuple[str, Any]]:
    """Linear layers and embeddings by name, each matrix once."""
    seen = set()
    for name, layer in model.named_modules():
        # of embeddings also classes that multiply rows, such as Gemma's; output layers may be tied to them
        known = type(layer) in (nn.Linear, UninitializedLinear) or isinstance(layer, nn.Embedding)
        if known and layer.weight.shape[1] % block == 0 and layer.weight not in seen:
            seen.add(layer.weight)
            yield name, layer


def _packable_stacks(model: Any, block: int) -> dict[str, tuple[Any, str]]:
    """Matrices of experts [experts, out, in] by name, and where they are; halves of outputs begin with groups of 16."""
    return {
        f"{name}.{attribute}": (module, attribute)
        for name, module in model.named_modules()
        if getattr(module, "is_transposed", None) is False  # Transformers' experts have it
        for attribute, stack in module.named_parameters(recurse=False)
        if stack.ndim == 3 and stack.shape[2] % block == 0 and stack.shape[1] % (2 * GROUP_OUTPUTS) == 0
    }


def quantized_blocks(weight: torch.Tensor, format: GGMLQuantizationType) -> torch.Tensor:
    """The blocks of a matrix [out, in] in a GGUF file, uint8 [out, bytes of a row], or of a stack of matrices."""
    if weight.ndim == 3:
        return torch.stack([quantized_blocks(matrix, format) for matrix in weight])
    values = weight.detach().float().numpy()
    return torch.from_numpy(np.array(quantize(values, format)).view(np.uint8).reshape(len(values), -1))


def _cached_blocks(folder: Path, packing: str, stacks: Iterable[str]) -> Path:
    """The file for packed weights of a model folder, named by its weight files, their sizes and times, and stacks."""
    files = [(str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns) for file in weight_files(folder)]
    return (
        cache_folder()
        / "packed"
        / f"{blake2b(repr((files, packing, *stacks)).encode(), digest_size=12).hexdigest()}.safetensors"
    )
