"""Load the model of a GGUF file, with weights that stay as the file has them."""

from __future__ import annotations

import json
import math
import mmap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from torch import Tensor
from torch.nn import Parameter

from saltus.kernels import native
from saltus.kernels.packed_weight import PACKED_FORMATS, Arithmetic, PackedWeight, dequantize_blocks
from saltus.loading.fetching import SourceError, first_line
from saltus.loading.gguf_files import PLAIN_FORMATS, ROPE_FACTORS, GgufTensor, read_gguf_index
from saltus.models.packed_decoder import (
    ROPE_TYPES,
    DecoderConfig,
    PackedDecoder,
    check_layer_count,
    make_decoder_config,
)


def load_gguf_model(
    folder: Path,
    dtype: torch.dtype = torch.bfloat16,
    packed: bool = True,
    own_classes: bool = False,
    arithmetic: Arithmetic = "bf16",
) -> Any:
    """The model of a folder whose weights are in a GGUF file (`write_gguf_folder`, `store_as_gguf`), on the CPU.

    With `packed`, matrices stay packed if there are compiled kernels to read them and `dtype` is bfloat16: blocks of
    256 are mapped into memory, those of 32 rearranged; for the `arithmetic` "int8" all are interleaved. Else they are
    expanded to bfloat16 numbers, in `dtype`. With `own_classes` a packed model is a PackedDecoder, if that supports it,
    else a model of Transformers. Errors: SourceError if the file is missing, or weights in it.
    """
    files, tensors = read_gguf_index(folder)
    contents = [_mapped(file, folder) for file in files]
    packed = packed and dtype == torch.bfloat16 and native.load_kernels() is not None
    factors = tensors.pop(ROPE_FACTORS, None)
    if factors is not None:
        _check_size(ROPE_FACTORS, factors, files[factors.part])
    config = _read_config(folder, tensors)
    if packed and own_classes and config.rope_parameters["rope_type"] in ROPE_TYPES:
        model: Any = PackedDecoder(config, lambda: _transformers_model(folder, dtype))
    else:
        model = _transformers_model(folder, dtype)
    _check_complete(model, tensors, files, [len(content) for content in contents])
    for name, tensor in tensors.items():
        path, _, attribute = name.rpartition(".")
        weight = _weight(contents[tensor.part], tensor, dtype, packed, arithmetic)
        parameter = weight if isinstance(weight, PackedWeight) else Parameter(weight, requires_grad=False)
        setattr(model.get_submodule(path), attribute, parameter)
    if config.tie_word_embeddings:
        model.lm_head.weight = model.model.embed_tokens.weight
    if factors is not None:
        divisors = _bytes(contents[factors.part], factors).view(np.float32).copy()
        model.model.rotary_emb.inv_freq /= torch.from_numpy(divisors)
    if hasattr(mmap, "MADV_DONTNEED"):  # of what was copied no second copy stays in memory; the rest is read again
        for content in contents:
            cast("mmap.mmap", content.base).madvise(mmap.MADV_DONTNEED)
    return model.eval()


def _mapped(file: Path, folder: Path) -> np.ndarray:
    try:
        return np.memmap(file, mode="c")  # private: nothing is ever written to the file
    except OSError as error:
        raise SourceError(f"the weights of {folder} are in {file}, which cannot be read ({error.strerror})") from error


def _read_config(folder: Path, tensors: Mapping[str, GgufTensor]) -> DecoderConfig:
    """The configuration of a folder with these weights. Errors: SourceError."""
    file = folder / "config.json"
    try:
        config = make_decoder_config(json.loads(file.read_bytes()))
        check_layer_count(config.num_hidden_layers, tensors)
    except (ValueError, TypeError) as error:
        raise SourceError(f"{file} is damaged: {first_line(error)}") from None
    return config


def _transformers_model(folder: Path, dtype: torch.dtype) -> Any:
    """The model of Transformers, with weights on "meta"."""
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)
    model.model.rotary_emb = type(model.model.rotary_emb)(config=config)  # its frequencies are computed, not loaded
    model.generation_config = GenerationConfig.from_pretrained(folder, trust_remote_code=False)
    return model


def _check_complete(model: Any, tensors: dict[str, GgufTensor], files: Sequence[Path], sizes: Sequence[int]) -> None:
    expected = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    if wrong := sorted(name for name in {*expected, *shapes} if expected.get(name) != shapes.get(name)):
        raise SourceError(
            f"{files[0]} lacks {wrong[0]}, or has it in another shape than its architecture; fetch it again"
        )
    for name, tensor in tensors.items():
        file, size = files[tensor.part], sizes[tensor.part]
        _check_size(name, tensor, file)
        if size < (end := tensor.offset + tensor.size):
            raise SourceError(f"{file} is cut short ({size:,} of {end:,} bytes or more); copy or fetch it again")


def _check_size(name: str, tensor: GgufTensor, file: Path) -> None:
    """Raise SourceError unless a weight has as many bytes as its shape takes in its format."""
    known = tensor.format in (*PLAIN_FORMATS, *PACKED_FORMATS) and tensor.shape and min(tensor.shape) > 0
    weights, size = GGML_QUANT_SIZES[GGMLQuantizationType(tensor.format)] if known else (1, 0)
    if not known or tensor.shape[-1] % weights or tensor.size != math.prod(tensor.shape) // weights * size:
        raise SourceError(f"{file}: {name} has another size than {tensor.shape} takes in its format; fetch it again")
    heads = tensor.interleaved_heads
    is_row_of_blocks = weights > 1 and math.prod(tensor.shape[:-1]) == 1  # which cannot be cut into heads
    if tensor.offset < 0 or heads < 0 or (heads and (tensor.shape[0] % (2 * heads) or is_row_of_blocks)):
        raise SourceError(f"{file}: the place or heads of {name} are not possible; fetch it again")


def _bytes(content: np.ndarray, tensor: GgufTensor) -> np.ndarray:
    return content[tensor.offset : tensor.offset + tensor.size]


def _weight(
    content: np.ndarray, tensor: GgufTensor, dtype: torch.dtype, packed: bool, arithmetic: Arithmetic
) -> Tensor:
    """A weight as bfloat16 numbers, or as the file's blocks; rows are in Transformers' order.

    Matrices of experts are stacks of three dimensions.
    """
    rows = _bytes(content, tensor).reshape(*(tensor.shape[:-1] or (1,)), -1)
    if heads := tensor.interleaved_heads:
        pairs = rows.reshape(heads, tensor.shape[0] // heads // 2, 2, -1)
        rows = np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(rows.shape)
    blocks, format = torch.from_numpy(np.asarray(rows)), GGMLQuantizationType(tensor.format)
    if format == GGMLQuantizationType.F32:
        return blocks.view(torch.float32).to(torch.bfloat16).to(dtype).view(tensor.shape)
    if format == GGMLQuantizationType.BF16:
        return blocks.view(torch.bfloat16).to(dtype).view(tensor.shape)
    assert format in PACKED_FORMATS
    if packed and len(tensor.shape) in (2, 3):
        return PackedWeight.from_blocks(blocks, format, arithmetic)
    return dequantize_blocks(blocks, format).to(dtype).view(tensor.shape)
