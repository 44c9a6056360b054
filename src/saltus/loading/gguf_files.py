"""Read a GGUF file: write the configuration and tokenizer that Transformers wants, and find the weights in it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType

from saltus.core.value_types import short_repr
from saltus.kernels.packed_blocks import PACKED_FORMATS
from saltus.loading.fetching import SourceError, first_line
from saltus.loading.gguf_header import (
    BIG_ENDIAN,
    VERSIONS,
    GgufHeader,
    TensorInfo,
    UnknownFormatError,
    UnknownVersionError,
    read_gguf_header,
)
from saltus.loading.gguf_index import GgufTensor, write_index
from saltus.loading.gguf_tokenizers import end_tokens, make_tokenizer
from saltus.loading.model_folders import refuse_lfs_pointer
from saltus.loading.split_gguf import parts_of
from saltus.models.architectures import gguf_architectures
from saltus.models.gguf_architecture import (
    LONG_FACTORS,
    SHORT_FACTORS,
    GgufArchitecture,
    GgufModel,
    TensorPart,
    is_norm,
)
from saltus.models.packed_decoder import read_decoder_config

Q = GGMLQuantizationType
PLAIN_FORMATS = (Q.F32, Q.BF16)
READ_FORMATS = (*PACKED_FORMATS, Q.NVFP4, *PLAIN_FORMATS)
MAX_NUMBERS = 4096  # of a tensor that becomes a part of the configuration
TENSOR_NAME = re.compile(r"(?:blk\.(\d+)\.)?((?:nextn\.|shortconv\.|indexer\.)?\w+)(?:\.(weight|bias|scale))?")
ROPE_FACTORS = "rope_freqs.weight"  # divide the rotary frequencies (Llama 3.1)


def write_gguf_folder(file: Path, folder: Path, stored_as: str) -> None:
    """Write configuration, tokenizer, chat template and the index of the weights; `stored_as` is the file's path in it.

    Of a file that is split it is the first part. Errors: SourceError for a file that is damaged or of a kind that is
    not supported.
    """
    parts = parts_of(file)
    headers = [_read_header(part) for part in parts]
    header = headers[0]
    if (count := header.metadata.get("split.count", 1)) not in (0, len(parts)):
        raise SourceError(
            f"{file.name} is a part of {count}, but is not called so; give all of them names such as"
            " model-00001-of-00002.gguf"
        )
    metadata = header.metadata
    name = metadata.get("general.architecture")
    known = gguf_architectures()
    if name is None:
        kind = metadata.get("general.type")
        named = f" ({short_repr(kind)} is its type)" if kind is not None else ""
        raise SourceError(f"{file.name} is no model, since it names no architecture{named}; take the file of a model")
    if not isinstance(name, str) or name not in known:
        raise SourceError(
            f"{file.name} holds a model of the architecture {name}; supported are {', '.join(sorted(known))}"
        )
    tokenizer = make_tokenizer(metadata, file.name)
    try:
        config = _config(known[name], headers, parts)
        read_decoder_config(config)
    except SourceError:
        raise
    except (ValueError, TypeError, LookupError, ArithmeticError) as error:  # of numbers that no decoder has
        raise SourceError(f"{file.name}: {first_line(error)}") from None
    _write_json(folder / "config.json", config)
    special = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    _write_json(folder / "generation_config.json", special)
    write_weights_index(headers, config, parts, folder, [str(Path(stored_as).with_name(part.name)) for part in parts])
    (folder / "tokenizer.json").write_text(tokenizer.to_str(pretty=True), encoding="utf-8")  # errors as of other files
    _write_tokenizer_config(metadata, folder)


def _read_header(file: Path) -> GgufHeader:
    refuse_lfs_pointer(file)
    try:
        return read_gguf_header(file)
    except UnknownFormatError as error:
        raise SourceError(f"{file}: {error}; take a file in Q4_K_M, Q4_0 or Q8_0") from error
    except UnknownVersionError as error:
        known = " and ".join(map(str, VERSIONS))
        raise SourceError(
            f"{file} has version {error} of GGUF, but versions {known} are read here; take a newer file, or fetch it"
            " again if it is damaged"
        ) from error
    except ValueError as error:
        if str(error) == BIG_ENDIAN:
            raise SourceError(f"{file} is a big-endian GGUF file; take a little-endian one") from error
        raise SourceError(f"{file} is not a whole GGUF file ({first_line(error)}); fetch it again") from error


def write_weights_index(
    headers: Sequence[GgufHeader],
    config: dict[str, Any],
    files: Sequence[Path],
    folder: Path,
    stored_as: Sequence[str],
) -> None:
    """Write where the weights lie in the parts of a GGUF file to `folder`; `stored_as` are the parts' paths in it."""
    metadata = headers[0].metadata
    architecture = gguf_architectures()[metadata["general.architecture"]]
    last = config["num_hidden_layers"]
    later = range(last, last + metadata.get(f"{architecture.name}.nextn_predict_layers", 0))
    weights: dict[str, dict[int, GgufTensor]] = {}
    heads: dict[str, dict[int, GgufTensor]] = {}
    places = _tensor_places(headers, files)
    scaled = {name: _scaled_weight(name, architecture, places) for name in places}
    try:
        scales = {
            weight: _read_numbers(name, places) for name, weight in scaled.items() if weight and name.endswith(".scale")
        }
    except ValueError as error:
        raise SourceError(f"{files[0].name}: {error}") from None
    for part, (header, file) in enumerate(zip(headers, files, strict=True)):
        for tensor in header.tensors:
            if scaled[tensor.name]:
                continue
            is_of_head = (parts := TENSOR_NAME.fullmatch(tensor.name)) and parts[1] and int(parts[1]) in later
            if is_of_head and tensor.format not in READ_FORMATS:
                continue  # the model runs without it
            if architecture.repeats(tensor.name, places):
                continue
            found_in = heads if is_of_head else weights
            own_scales = tuple(scales.get(tensor.name, ()))
            for target, found in _tensors(tensor, architecture, config, bool(is_of_head), file, part, own_scales):
                if found_in.setdefault(target.name, {}).setdefault(target.number, found) is not found:
                    raise SourceError(f"{file.name} has {tensor.name} more than once; fetch it again")
    for name, number in _numbers_of_layers(headers[0], architecture, last, files[0]).items():
        weights[name] = {0: number}
    write_index(folder, stored_as, *map(_in_turn, (weights, heads)))


def _numbers_of_layers(
    header: GgufHeader, architecture: GgufArchitecture, layers: int, file: Path
) -> dict[str, GgufTensor]:
    """Weights of one number, which settings have for all layers. Errors: SourceError."""
    found = {}
    for key, name in architecture.numbers.items():
        if key not in header.floats or len(header.metadata[key]) < layers:
            raise SourceError(f"{file.name} lacks {key}, a number for each layer in float32; fetch it again")
        for layer in range(layers):
            place = header.floats[key] + 4 * layer
            number = GgufTensor(int(Q.F32), (1,), place, 4, is_reshaped=True)
            found[f"{architecture.layers}.{layer}.{name}"] = number
    return found


def _tensor_places(headers: Sequence[GgufHeader], files: Sequence[Path]) -> dict[str, tuple[TensorInfo, Path]]:
    """The tensors of all parts by name, each with its file."""
    parts = zip(headers, files, strict=True)
    return {tensor.name: (tensor, file) for header, file in parts for tensor in header.tensors}


def _scaled_weight(
    name: str, architecture: GgufArchitecture, places: Mapping[str, tuple[TensorInfo, Path]]
) -> str | None:
    """The weight in NVFP4 that a tensor ("blk.0.attn_q.scale") scales, or whose inputs; None of other tensors."""
    path, _, part = name.rpartition(".")
    weight, own = f"{path}.weight", f"{path.rpartition('.')[2]}.{part}"
    is_scale = part in ("scale", "input_scale") and own not in architecture.tensors
    return weight if is_scale and weight in places and places[weight][0].format == Q.NVFP4 else None


def _read_numbers(name: str, places: Mapping[str, tuple[TensorInfo, Path]]) -> list[float]:
    """Of a tensor in float32. Errors: ValueError."""
    if name not in places:
        raise ValueError(f"it lacks {name}; fetch it again")
    tensor, file = places[name]
    if tensor.format != Q.F32 or len(tensor.shape) != 1 or tensor.shape[0] > MAX_NUMBERS:
        raise ValueError(
            f"its {name} is {tensor.format.name} {list(tensor.shape)}, but must be F32 [{MAX_NUMBERS}] at most"
        )
    return np.fromfile(file, "<f4", tensor.shape[0], offset=tensor.offset).tolist()


def _in_turn(tensors: Mapping[str, Mapping[int, GgufTensor]]) -> dict[str, list[GgufTensor]]:
    return {name: [parts[number] for number in sorted(parts)] for name, parts in tensors.items()}


def _config(architecture: GgufArchitecture, headers: Sequence[GgufHeader], files: Sequence[Path]) -> dict[str, Any]:
    """Transformers' configuration. Errors: SourceError, or what a wrong number leads to."""
    # Written by us, not by Transformers: the same file with each of its versions.
    metadata, places = headers[0].metadata, _tensor_places(headers, files)
    shapes = {name: tensor.shape for name, (tensor, _) in places.items()}
    model = GgufModel(architecture.name, metadata, shapes, partial(_read_numbers, places=places))
    config = architecture.config(model)
    return config | {
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "dtype": "bfloat16",
        "eos_token_id": end_tokens(metadata),
        "pad_token_id": metadata.get("tokenizer.ggml.padding_token_id", config.get("pad_token_id")),
        "tie_word_embeddings": "output.weight" not in shapes,
        "vocab_size": len(metadata["tokenizer.ggml.tokens"]),
    }


def _tensors(
    tensor: TensorInfo,
    architecture: GgufArchitecture,
    config: Mapping[str, Any],
    is_of_head: bool,
    file: Path,
    number: int,
    scales: tuple[float, ...],
) -> list[tuple[TensorPart, GgufTensor]]:
    """What a tensor is in Transformers, and where it lies in a part of the file; nothing if it is not needed.

    What is not known of a head has a name that no model has, so that the head is refused, not the model.
    """
    parts = TENSOR_NAME.fullmatch(tensor.name)
    if tensor.name in (LONG_FACTORS, SHORT_FACTORS) or architecture.ignored(config, tensor.name):
        return []
    if tensor.format not in READ_FORMATS:
        names = ", ".join(known.name for known in READ_FORMATS)
        raise SourceError(f"{file.name} stores {tensor.name} as {tensor.format.name}; supported are {names}")
    place = _place(tensor)
    if tensor.name == ROPE_FACTORS:
        return [(TensorPart(ROPE_FACTORS), GgufTensor(*place, part=number))]
    targets = [] if parts is None else architecture.targets(*parts.groups())
    if not targets and is_of_head:
        return [(TensorPart(tensor.name.replace("blk", architecture.layers, 1)), GgufTensor(*place, part=number))]
    if not targets:
        raise SourceError(f"{file.name} has a tensor {tensor.name}, which models of {architecture.name} do not have")
    assert parts is not None
    stacked = sum(target.matrix is not None for target in targets)
    if stacked and (len(tensor.shape) != 3 or tensor.shape[0] != stacked):
        shape = " x ".join(map(str, tensor.shape))
        raise SourceError(
            f"{file.name} has {tensor.name} of {shape} numbers, but must have {stacked} matrices; fetch it again"
        )
    heads = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}.get(parts[2])
    interleaved = config[heads] if architecture.interleaves_heads and heads else 0
    added = architecture.added_to_norms if is_norm(parts[2]) and parts[3] == "weight" else 0
    return [
        (
            target,
            GgufTensor(
                *_place(tensor, target.matrix), interleaved, number, added,
                rows=target.rows(config, tensor.shape[0]) if target.rows else (), alternating=target.alternating,
                is_transposed=target.is_transposed, is_negative_exponential=target.is_negative_exponential,
                is_exponential=target.is_exponential,
                is_reshaped=target.is_reshaped, scales=scales if target.matrix is None else scales[target.matrix :][:1],
            ),
        )
        for target in targets
    ]  # fmt: skip


def _place(tensor: TensorInfo, matrix: int | None = None) -> tuple[int, tuple[int, ...], int, int]:
    """Format, shape, offset and size of a tensor, or of a matrix of a stack."""
    if matrix is None:
        return int(tensor.format), tensor.shape, tensor.offset, tensor.size
    size = tensor.size // tensor.shape[0]
    return int(tensor.format), tensor.shape[1:], tensor.offset + matrix * size, size


def _write_tokenizer_config(metadata: dict[str, Any], folder: Path) -> None:
    tokens = metadata["tokenizer.ggml.tokens"]
    names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    special = {name: metadata.get(f"tokenizer.ggml.{key}_token_id") for name, key in names.items()}
    content = {name: tokens[number] for name, number in special.items() if number is not None}
    content |= {"clean_up_tokenization_spaces": False, "tokenizer_class": "PreTrainedTokenizerFast"}
    length = metadata.get(f"{metadata['general.architecture']}.context_length")
    _write_json(folder / "tokenizer_config.json", {**content, "model_max_length": length})
    if isinstance(template := metadata.get("tokenizer.chat_template"), str) and template:
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")


def _write_json(file: Path, content: dict[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
