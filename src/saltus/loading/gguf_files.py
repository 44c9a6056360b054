"""Read a GGUF file: write the configuration and tokenizer that Transformers wants, and find the weights in it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType

from saltus.kernels.packed_weight import PACKED_FORMATS
from saltus.loading.fetching import SourceError, first_line
from saltus.loading.gguf_header import BIG_ENDIAN, GgufHeader, TensorInfo, read_gguf_header
from saltus.loading.gguf_tokenizers import end_tokens, make_tokenizer
from saltus.loading.model_folders import INDEX_FILE, is_lfs_pointer
from saltus.loading.split_gguf import parts_of
from saltus.models.architectures import gguf_architectures
from saltus.models.gguf_architecture import LONG_FACTORS, SHORT_FACTORS, GgufArchitecture, GgufModel, is_norm
from saltus.models.packed_decoder import read_decoder_config
from saltus.storage.cache_folder import cache_folder

Q = GGMLQuantizationType
PLAIN_FORMATS = (Q.F32, Q.BF16)
MAX_NUMBERS = 4096  # of a tensor that becomes a part of the configuration
ROPE_FACTORS = "rope_freqs.weight"  # divide the rotary frequencies (Llama 3.1)


@dataclass(frozen=True)
class GgufTensor:
    """Where a weight lies in a GGUF file."""

    format: int  # GGUF's number of its format
    shape: tuple[int, ...]  # as in Transformers: [out, in] or [size]
    offset: int  # bytes from the file's start
    size: int  # bytes
    interleaved_heads: int = 0  # if rows of heads are interleaved: of queries and keys of the architecture llama
    part: int = 0  # of a file that is split, in which it lies
    added: int = 0  # to each number when it was stored


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
    write_index(headers, config, parts, folder, [str(Path(stored_as).with_name(part.name)) for part in parts])
    (folder / "tokenizer.json").write_text(tokenizer.to_str(pretty=True), encoding="utf-8")  # errors as of other files
    _write_tokenizer_config(metadata, folder)


def _read_header(file: Path) -> GgufHeader:
    if is_lfs_pointer(file):
        raise SourceError(f"{file} is a pointer of git-lfs, not the file itself; run git lfs pull in its folder")
    try:
        return read_gguf_header(file)
    except ValueError as error:
        if str(error) == BIG_ENDIAN:
            raise SourceError(f"{file} is a big-endian GGUF file; take a little-endian one") from error
        raise SourceError(f"{file} is not a whole GGUF file ({first_line(error)}); fetch it again") from error


def write_index(
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
    named = [
        found
        for part, (header, file) in enumerate(zip(headers, files, strict=True))
        for tensor in header.tensors
        if (found := _tensor(tensor, architecture, config, later, file, part)) is not None
    ]
    tensors = {name: asdict(tensor) for name, tensor in named}
    if len(tensors) < len(named):
        raise SourceError(f"two parts of {files[0].name} have a tensor of one name; fetch them again")
    _write_json(folder / INDEX_FILE, {"file": stored_as[0], "more_files": list(stored_as[1:]), "tensors": tensors})


def read_gguf_index(folder: Path) -> tuple[list[Path], dict[str, GgufTensor]]:
    """The parts of a folder's GGUF file, and where its weights lie, by their names in Transformers.

    Errors: SourceError. Only an index in the cache of this machine may name a file in another folder.
    """
    try:
        content = json.loads((folder / INDEX_FILE).read_bytes())
        names = [str(name) for name in (content["file"], *content.get("more_files", ()))]
        tensors = {
            key: GgufTensor(**{**fields, "shape": tuple(fields["shape"])}) for key, fields in content["tensors"].items()
        }
        numbers = [x for tensor in tensors.values() for x in (tensor.format, *tensor.shape, tensor.offset, tensor.size)]
        numbers += [
            number for tensor in tensors.values() for number in (tensor.interleaved_heads, tensor.part, tensor.added)
        ]
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise SourceError(f"{folder / INDEX_FILE} is damaged ({error}); fetch the model again") from None
    if not tensors or any(type(number) is not int for number in numbers):
        raise SourceError(f"{folder / INDEX_FILE} is damaged (no whole numbers of weights); fetch the model again")
    if any(not 0 <= tensor.part < len(names) for tensor in tensors.values()):
        raise SourceError(f"{folder / INDEX_FILE} is damaged (a part that it does not name); fetch the model again")
    is_own = folder.resolve().parent == (cache_folder() / "gguf").resolve()
    outside = [name for name in names if Path(name).name != name or name == ".."]
    if not is_own and outside:
        raise SourceError(
            f"{folder / INDEX_FILE} names {outside[0]!r}, which is not a file of its folder; fetch the model again"
        )
    return [folder / name for name in names], tensors


def _config(architecture: GgufArchitecture, headers: Sequence[GgufHeader], files: Sequence[Path]) -> dict[str, Any]:
    """Transformers' configuration. Errors: SourceError, or what a wrong number leads to."""
    # Written by us, not by Transformers: the same file with each of its versions.
    metadata = headers[0].metadata
    places = {
        tensor.name: (tensor, file) for header, file in zip(headers, files, strict=True) for tensor in header.tensors
    }

    def read_numbers(name: str) -> list[float]:
        if name not in places:
            raise ValueError(f"it lacks {name}; fetch it again")
        tensor, file = places[name]
        if tensor.format != Q.F32 or len(tensor.shape) != 1 or tensor.shape[0] > MAX_NUMBERS:
            raise ValueError(
                f"its {name} is {tensor.format.name} {list(tensor.shape)}, but must be F32 [{MAX_NUMBERS}] at most"
            )
        return np.fromfile(file, "<f4", tensor.shape[0], offset=tensor.offset).tolist()

    shapes = {name: tensor.shape for name, (tensor, _) in places.items()}
    model = GgufModel(architecture.name, metadata, shapes, read_numbers)
    if architecture.name == "llama" and model.get("expert_count", 0):
        raise SourceError(f"{files[0].name} holds a mixture of experts, which is not supported; choose a dense model")
    return architecture.config(model) | {
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "dtype": "bfloat16",
        "eos_token_id": end_tokens(metadata),
        "pad_token_id": metadata.get("tokenizer.ggml.padding_token_id"),
        "tie_word_embeddings": "output.weight" not in shapes,
        "vocab_size": len(metadata["tokenizer.ggml.tokens"]),
    }


def _tensor(
    tensor: TensorInfo,
    architecture: GgufArchitecture,
    config: Mapping[str, Any],
    later: range,
    file: Path,
    number: int,
) -> tuple[str, GgufTensor] | None:
    """The name of a tensor in Transformers, and where it lies in a part of the file; None if it is not needed.

    Blocks in `later` predict later tokens.
    """
    parts = re.fullmatch(r"(?:blk\.(\d+)\.)?((?:nextn\.)?\w+)\.(weight|bias)", tensor.name)
    if parts is not None and parts[1] and int(parts[1]) in later:
        return None
    if tensor.name in (LONG_FACTORS, SHORT_FACTORS) or architecture.ignored(config, tensor.name):
        return None
    if tensor.format not in (*PACKED_FORMATS, *PLAIN_FORMATS):
        names = ", ".join(known.name for known in (*PACKED_FORMATS, *PLAIN_FORMATS))
        raise SourceError(f"{file.name} stores {tensor.name} as {tensor.format.name}; supported are {names}")
    place = int(tensor.format), tensor.shape, tensor.offset, tensor.size
    if tensor.name == ROPE_FACTORS:
        return ROPE_FACTORS, GgufTensor(*place, part=number)
    name = None if parts is None else architecture.tensor_name(*parts.groups())
    if name is None:
        raise SourceError(f"{file.name} has a tensor {tensor.name}, which models of {architecture.name} do not have")
    assert parts is not None
    heads = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}.get(parts[2])
    interleaved = config[heads] if architecture.interleaves_heads and heads else 0
    added = architecture.added_to_norms if is_norm(parts[2]) else 0
    return name, GgufTensor(*place, interleaved, number, added)


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
