"""Load the model of a GGUF file, with weights that stay as the file has them."""

from __future__ import annotations

import json
import mmap
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.nn import Parameter

from saltus.kernels import native
from saltus.kernels.packed_blocks import Arithmetic
from saltus.kernels.packed_weight import PackedWeight
from saltus.loading.fetching import SourceError, first_line
from saltus.loading.gguf_files import ROPE_FACTORS
from saltus.loading.gguf_index import GgufTensor, read_gguf_index
from saltus.loading.gguf_parts import check_end, check_part, check_parts, map_file, part_bytes, read_weight
from saltus.loading.huge_pages import HugePages
from saltus.loading.model_folders import list_causal_class, unknown_type
from saltus.models.packed_decoder import (
    LLAMA_TYPES,
    ROPE_TYPES,
    DecoderConfig,
    PackedDecoder,
    check_layer_count,
    make_decoder_config,
    read_decoder_config,
)
from saltus.models.packed_experts import experts_implementation, has_transposed_stacks

SELECTION_BIAS = "gate.e_score_correction_bias"  # a buffer of zeros where a file has none in any layer


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
    index = read_gguf_index(folder)
    files, tensors = index.files, index.weights
    contents = [map_file(file, folder) for file in files]
    packed = packed and dtype == torch.bfloat16 and native.load_kernels() is not None
    factors = tensors.pop(ROPE_FACTORS, None)
    if factors is not None:
        check_part(ROPE_FACTORS, factors[0], files[factors[0].part])
    config = _read_config(folder, tensors)
    if (
        packed
        and own_classes
        and config.model_type in LLAMA_TYPES
        and config.rope_parameters["rope_type"] in ROPE_TYPES
    ):
        model: Any = PackedDecoder(config, lambda: _transformers_model(folder, dtype, files[0]))
    else:
        model = _transformers_model(folder, dtype, files[0])
    _check_complete(model, tensors, files, [len(content) for content in contents])
    exact = getattr(model, "_keep_in_fp32_modules_strict", None) or ()
    model.huge_pages = HugePages()

    def read(name: str) -> tuple[Any, str, Tensor]:
        path, _, attribute = name.rpartition(".")
        module = model.get_submodule(path)
        shape, is_transposed = tuple(getattr(module, attribute).shape), has_transposed_stacks(module)
        flips = _is_flipped(module, shape)
        weight = read_weight(
            name,
            tensors[name],
            contents,
            shape[::-1] if flips else shape,
            is_transposed,
            packed,
            arithmetic,
            model.huge_pages.zeros,
        )
        if not isinstance(weight, PackedWeight):
            keeps = name != "lm_head.weight" and any(each in name for each in exact)  # see `round_output_layer`
            weight = weight if keeps else weight.to(torch.bfloat16).to(dtype)
        if flips:
            weight = weight.flipped() if isinstance(weight, PackedWeight) else weight.mT.contiguous()
        return module, attribute, weight

    with ThreadPoolExecutor(native.allowed_processors()) as threads:  # most of it is done by compiled code
        for module, attribute, weight in threads.map(read, tensors):
            is_plain = isinstance(weight, PackedWeight) or attribute in module._buffers
            setattr(module, attribute, weight if is_plain else Parameter(weight, requires_grad=False))
    if not isinstance(model, PackedDecoder):
        model.set_experts_implementation(experts_implementation(model))
    if config.tie_word_embeddings:
        model.get_output_embeddings().weight = model.get_input_embeddings().weight
    if factors is not None:
        divisors = part_bytes(contents[factors[0].part], factors[0]).view(np.float32).copy()
        _divide_frequencies(model, divisors, files[0])
    if hasattr(mmap, "MADV_DONTNEED"):  # of what was copied no second copy stays in memory; the rest is read again
        for content in contents:
            cast("mmap.mmap", content.base).madvise(mmap.MADV_DONTNEED)
    return model.eval()


def _is_flipped(module: Any, shape: Sequence[int]) -> bool:
    """True for a matrix [in, out], as GPT-2's layers have; files have [out, in]."""
    return type(module).__name__ == "Conv1D" and len(shape) == 2


def _divide_frequencies(model: Any, divisors: np.ndarray, file: Path) -> None:
    """Where layers with a window have angles of their own, those of the others, of their first dimensions."""
    angles = model.model.rotary_emb
    frequencies = getattr(angles, "inv_freq", None)
    if frequencies is None and (frequencies := getattr(angles, "full_attention_inv_freq", None)) is not None:
        divisors = divisors[: len(frequencies)]
    if frequencies is None or frequencies.shape != divisors.shape:
        raise SourceError(f"{file} has {ROPE_FACTORS} that do not fit its architecture; fetch it again")
    frequencies /= torch.from_numpy(divisors)


def _read_config(folder: Path, tensors: Mapping[str, Sequence[GgufTensor]]) -> DecoderConfig:
    """The configuration of a folder with these weights. Errors: SourceError."""
    file = folder / "config.json"
    try:
        fields = json.loads(file.read_bytes())
        config = read_decoder_config(fields)
        if config.model_type in LLAMA_TYPES:
            config = make_decoder_config(fields)
            config.attention_output_bias = "model.layers.0.self_attn.o_proj.bias" in tensors
        check_layer_count(config.num_hidden_layers, tensors)
    except (ValueError, TypeError) as error:
        raise SourceError(f"{file} is damaged: {first_line(error)}") from None
    return config


def _transformers_model(folder: Path, dtype: torch.dtype, file: Path) -> Any:
    """The model of Transformers, with weights on "meta". Errors: SourceError for what it does not take."""
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        list_causal_class(config)
        with torch.device("meta"):
            model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)
        _compute_buffers(model)
        model.generation_config = GenerationConfig.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # the classes check their numbers in many ways
        if (unknown := unknown_type(folder, error)) is not None:
            raise SourceError(f"{file} is {unknown}") from None
        raise SourceError(f"{folder / 'config.json'} describes no model that loads ({first_line(error)})") from error
    return model


@torch.no_grad()
def _compute_buffers(model: Any) -> None:
    """Give a model on "meta" what is computed, not loaded, such as rotary frequencies and scales of embeddings."""
    decoder = model.get_decoder()  # of Gemma 3n it knows the sizes that the model does not
    for module in model.modules():
        computed = {name: buffer for name, buffer in module.named_buffers(recurse=False) if buffer.is_meta}
        for name, buffer in computed.items():
            setattr(module, name, torch.zeros_like(buffer, device="cpu"))
        if computed:
            decoder._init_weights(module)
    decoder._init_weights(decoder)  # which computes some of its layers' buffers (Falcon-H1)


def _check_complete(
    model: Any, tensors: Mapping[str, Sequence[GgufTensor]], files: Sequence[Path], sizes: Sequence[int]
) -> None:
    stored = model.state_dict().keys()  # of buffers, those that are not computed
    if not any(name.endswith(SELECTION_BIAS) for name in tensors):
        stored = {name for name in stored if not name.endswith(SELECTION_BIAS)}
    weights = [*model.named_parameters(), *((name, buffer) for name, buffer in model.named_buffers() if name in stored)]
    expected = {name: tuple(weight.shape) for name, weight in weights}
    if wrong := sorted({*expected} ^ {*tensors}):
        raise SourceError(
            f"{files[0]} lacks {wrong[0]}, or has it in another shape than its architecture; fetch it again"
        )
    for name, parts in tensors.items():
        module, shape = model.get_submodule(name.rpartition(".")[0]), expected[name]
        is_transposed = has_transposed_stacks(module)
        for part in parts:
            check_part(name, part, files[part.part])
        check_parts(name, parts, shape[::-1] if _is_flipped(module, shape) else shape, is_transposed, files[0])
        for part in parts:
            check_end(part, sizes[part.part], files[part.part])
