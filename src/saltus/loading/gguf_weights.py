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
    LLAMA_TYPES,
    ROPE_TYPES,
    DecoderConfig,
    PackedDecoder,
    check_layer_count,
    make_decoder_config,
    read_decoder_config,
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
    if (
        packed
        and own_classes
        and config.model_type in LLAMA_TYPES
        and config.rope_parameters["rope_type"] in ROPE_TYPES
    ):
        model: Any = PackedDecoder(config, lambda: _transformers_model(folder, dtype))
    else:
        model = _transformers_model(folder, dtype)
    _check_complete(model, tensors, files, [len(content) for content in contents])
    for name, tensor in tensors.items():
        path, _, attribute = name.rpartition(".")
        weight = _weight(contents[tensor.part], tensor, dtype, packed, arithmetic)
        module = model.get_submodule(path)
        is_plain = isinstance(weight, PackedWeight) or attribute in module._buffers
        setattr(module, attribute, weight if is_plain else Parameter(weight, requires_grad=False))
    if config.tie_word_embeddings:
        model.lm_head.weight = model.model.embed_tokens.weight
    if factors is not None:
        _divide_frequencies(model, _bytes(contents[factors.part], factors).view(np.float32).copy(), files[0])
    if hasattr(mmap, "MADV_DONTNEED"):  # of what was copied no second copy stays in memory; the rest is read again
        for content in contents:
            cast("mmap.mmap", content.base).madvise(mmap.MADV_DONTNEED)
    return model.eval()


def _divide_frequencies(model: Any, divisors: np.ndarray, file: Path) -> None:
    frequencies = getattr(model.model.rotary_emb, "inv_freq", None)
    if frequencies is None or frequencies.shape != divisors.shape:
        raise SourceError(f"{file} has {ROPE_FACTORS} that do not fit its architecture; fetch it again")
    frequencies /= torch.from_numpy(divisors)


def _mapped(file: Path, folder: Path) -> np.ndarray:
    try:
        return np.memmap(file, mode="c")  # private: nothing is ever written to the file
    except OSError as error:
        raise SourceError(f"the weights of {folder} are in {file}, which cannot be read ({error.strerror})") from error


def _read_config(folder: Path, tensors: Mapping[str, GgufTensor]) -> DecoderConfig:
    """The configuration of a folder with these weights. Errors: SourceError."""
    file = folder / "config.json"
    try:
        fields = json.loads(file.read_bytes())
        config = read_decoder_config(fields)
        if config.model_type in LLAMA_TYPES:
            config = make_decoder_config(fields)
        check_layer_count(config.num_hidden_layers, tensors)
    except (ValueError, TypeError) as error:
        raise SourceError(f"{file} is damaged: {first_line(error)}") from None
    return config


def _transformers_model(folder: Path, dtype: torch.dtype) -> Any:
    """The model of Transformers, with weights on "meta". Errors: SourceError for numbers that it does not take."""
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        with torch.device("meta"):
            model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)
        _compute_buffers(model)
        model.generation_config = GenerationConfig.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # the classes check their numbers in many ways
        raise SourceError(f"{folder / 'config.json'} describes no model that loads ({first_line(error)})") from error
    return model


@torch.no_grad()
def _compute_buffers(model: Any) -> None:
    """Give a model on "meta" what is computed, not loaded, such as rotary frequencies and scales of embeddings."""
    for module in model.modules():
        computed = {name: buffer for name, buffer in module.named_buffers(recurse=False) if buffer.is_meta}
        for name, buffer in computed.items():
            setattr(module, name, torch.empty_like(buffer, device="cpu"))
        if computed:
            model._init_weights(module)


def _check_complete(model: Any, tensors: dict[str, GgufTensor], files: Sequence[Path], sizes: Sequence[int]) -> None:
    stored = model.state_dict().keys()  # of buffers, those that are not computed
    weights = [*model.named_parameters(), *((name, buffer) for name, buffer in model.named_buffers() if name in stored)]
    expected = {name: tuple(weight.shape) for name, weight in weights}
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
    if packed and len(tensor.shape) in (2, 3) and not tensor.added and format in PACKED_FORMATS:
        return PackedWeight.from_blocks(blocks, format, arithmetic)
    if format in PACKED_FORMATS:
        numbers = dequantize_blocks(blocks, format)
    else:
        numbers = blocks.view(torch.float32 if format == GGMLQuantizationType.F32 else torch.bfloat16)
    if tensor.added:
        numbers = numbers.float() - tensor.added
    return numbers.to(torch.bfloat16).to(dtype).view(tensor.shape)
