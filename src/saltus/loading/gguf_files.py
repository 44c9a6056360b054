"""Read a GGUF file: write the configuration and tokenizer that Transformers wants, and find the weights in it."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gguf import GGMLQuantizationType

from saltus.kernels.packed_weight import PACKED_FORMATS
from saltus.loading.fetching import SourceError, first_line
from saltus.loading.gguf_header import BIG_ENDIAN, GgufHeader, TensorInfo, read_gguf_header
from saltus.loading.gguf_tokenizers import make_tokenizer
from saltus.loading.model_folders import INDEX_FILE, is_lfs_pointer
from saltus.loading.split_gguf import parts_of
from saltus.models.packed_decoder import check_decoder_sizes, make_decoder_config
from saltus.storage.cache_folder import cache_folder

Q = GGMLQuantizationType
PLAIN_FORMATS = (Q.F32, Q.BF16)
LLAMA, MISTRAL, QWEN2, QWEN3 = "LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"
ARCHITECTURES = {"llama": LLAMA, "qwen2": QWEN2, "qwen3": QWEN3}
TENSOR_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_norm": "input_layernorm",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_norm": "post_attention_layernorm",
}
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
    if not isinstance(name, str) or name not in ARCHITECTURES:
        raise SourceError(
            f"{file.name} holds a model of the architecture {name}; supported are {', '.join(ARCHITECTURES)}"
        )
    tokenizer = make_tokenizer(metadata, file.name)
    try:
        config = _config(header, name, file.name, {tensor.name for each in headers for tensor in each.tensors})
        make_decoder_config(config)
    except SourceError:
        raise
    except (ValueError, TypeError) as error:  # of numbers that no decoder has
        raise SourceError(f"{file.name}: {error}") from None
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
    named = [
        _tensor(tensor, config, file, part)
        for part, (header, file) in enumerate(zip(headers, files, strict=True))
        for tensor in header.tensors
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
        numbers += [number for tensor in tensors.values() for number in (tensor.interleaved_heads, tensor.part)]
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


def _config(header: GgufHeader, name: str, file: str, tensors: Collection[str]) -> dict[str, Any]:
    metadata = header.metadata

    # Written by hand, not by Transformers: the same file with each of its versions, hence the same fingerprint.
    def of(key: str, default: Any = None) -> Any:
        return metadata.get(f"{name}.{key}", default)

    if of("expert_count", 0):
        raise SourceError(f"{file} holds a mixture of experts, which is not supported; choose a dense model")
    heads, hidden = of("attention.head_count"), of("embedding_length")
    check_decoder_sizes(heads, 1, hidden_size=hidden)
    head_dim = of("attention.key_length") or of("rope.dimension_count") or hidden // heads
    window = of("attention.sliding_window", 0)
    architecture = MISTRAL if name == "llama" and window else ARCHITECTURES[name]
    token_count = len(metadata["tokenizer.ggml.tokens"])
    biased = "blk.0.attn_q.bias" in tensors
    return {
        "architectures": [architecture],
        "attention_bias": biased,
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "dtype": "bfloat16",
        "eos_token_id": _end_tokens(metadata),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": of("feed_forward_length"),
        "max_position_embeddings": of("context_length"),
        "mlp_bias": False,
        "model_type": architecture.removesuffix("ForCausalLM").lower(),
        "num_attention_heads": heads,
        "num_hidden_layers": of("block_count"),
        "num_key_value_heads": of("attention.head_count_kv", heads),
        "pad_token_id": metadata.get("tokenizer.ggml.padding_token_id"),
        "rms_norm_eps": float(f"{of('attention.layer_norm_rms_epsilon'):.6g}"),  # stored as a float32
        "rope_parameters": _rope(of, file),
        "tie_word_embeddings": "output.weight" not in tensors,
        "vocab_size": token_count,
        **({"sliding_window": window} if architecture == MISTRAL else {}),
    }


def _end_tokens(metadata: dict[str, Any]) -> int | list[int] | None:
    """The tokens that end a text, and a turn of a conversation if the file names another one for that."""
    named = (metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot"))
    ends = list(dict.fromkeys(token for token in named if token is not None))
    return ends if len(ends) > 1 else next(iter(ends), None)


def _rope(of: Any, file: str) -> dict[str, Any]:
    """How positions are scaled; what a file does not say has llama.cpp's defaults."""
    rope = {"rope_theta": of("rope.freq_base", 10000.0), "rope_type": "default"}
    factor = of("rope.scaling.factor") or of("rope.scale_linear") or 1.0
    kind = of("rope.scaling.type", "linear" if of("rope.scale_linear") else "none")
    if kind not in ("none", "linear", "yarn"):
        raise SourceError(f"{file} scales positions by {kind!r}; supported are none, linear and yarn")
    if kind == "none" or factor == 1:
        return rope
    rope |= {"rope_type": kind, "factor": factor}
    if kind == "yarn":
        rope["original_max_position_embeddings"] = of("rope.scaling.original_context_length") or of("context_length")
    return rope


def _tensor(tensor: TensorInfo, config: dict[str, Any], file: Path, number: int) -> tuple[str, GgufTensor]:
    """The name of a tensor in Transformers, and where it lies in a part of the file."""
    if tensor.format not in (*PACKED_FORMATS, *PLAIN_FORMATS):
        names = ", ".join(known.name for known in (*PACKED_FORMATS, *PLAIN_FORMATS))
        raise SourceError(f"{file.name} stores {tensor.name} as {tensor.format.name}; supported are {names}")
    place = int(tensor.format), tensor.shape, tensor.offset, tensor.size
    if tensor.name == ROPE_FACTORS:
        return ROPE_FACTORS, GgufTensor(*place, part=number)
    parts = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)", tensor.name)
    if parts is None or parts[2] not in TENSOR_NAMES:
        raise SourceError(f"{file.name} has a tensor {tensor.name}, which no supported architecture has")
    block, kind, part = parts.groups()
    interleaved = 0
    if config["model_type"] in ("llama", "mistral") and kind in ("attn_q", "attn_k"):
        interleaved = config["num_attention_heads" if kind == "attn_q" else "num_key_value_heads"]
    where = f"model.layers.{block}." if block else ""
    return f"{where}{TENSOR_NAMES[kind]}.{part}", GgufTensor(*place, interleaved, number)


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
