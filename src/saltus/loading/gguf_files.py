"""Read a GGUF file: write the configuration and tokenizer that Transformers wants, and find the weights in it."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gguf import GGMLQuantizationType

from saltus.kernels.packed_weight import PACKED_FORMATS
from saltus.loading.fetching import SourceError, first_line
from saltus.loading.gguf_header import GgufHeader, TensorInfo, read_gguf_header
from saltus.loading.gguf_tokenizers import make_tokenizer
from saltus.loading.model_folders import INDEX_FILE
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


def write_gguf_folder(file: Path, folder: Path, stored_as: str) -> None:
    """Write configuration, tokenizer, chat template and the index of the weights; `stored_as` is the file's path in it.

    Errors: SourceError for a file that is damaged or of a kind that is not supported.
    """
    try:
        header = read_gguf_header(file)
    except ValueError as error:
        raise SourceError(f"{file} is not a whole GGUF file ({first_line(error)}); fetch it again") from error
    metadata = header.metadata
    name = metadata.get("general.architecture")
    if not isinstance(name, str) or name not in ARCHITECTURES:
        raise SourceError(
            f"{file.name} holds a model of the architecture {name}; supported are {', '.join(ARCHITECTURES)}"
        )
    tokenizer = make_tokenizer(metadata, file.name)
    try:
        config = _config(header, name)
        make_decoder_config(config)
    except SourceError:
        raise
    except (ValueError, TypeError) as error:  # of numbers that no decoder has
        raise SourceError(f"{file.name}: {error}") from None
    _write_json(folder / "config.json", config)
    special = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    _write_json(folder / "generation_config.json", special)
    write_index(header, config, file, folder, stored_as)
    (folder / "tokenizer.json").write_text(tokenizer.to_str(pretty=True), encoding="utf-8")  # errors as of other files
    _write_tokenizer_config(metadata, folder)


def write_index(header: GgufHeader, config: dict[str, Any], file: Path, folder: Path, stored_as: str) -> None:
    """Write where the weights lie in a GGUF file to `folder`; `stored_as` is the file's path in it."""
    named = (_tensor(tensor, config, file) for tensor in header.tensors)
    tensors = {name: asdict(tensor) for name, tensor in named}
    _write_json(folder / INDEX_FILE, {"file": stored_as, "tensors": tensors})


def read_gguf_index(folder: Path) -> tuple[Path, dict[str, GgufTensor]]:
    """The GGUF file of a folder, and where its weights lie, by their names in Transformers. Errors: SourceError.

    Only an index in the cache of this machine may name a file in another folder.
    """
    try:
        content = json.loads((folder / INDEX_FILE).read_bytes())
        name = str(content["file"])
        tensors = {
            key: GgufTensor(**{**fields, "shape": tuple(fields["shape"])}) for key, fields in content["tensors"].items()
        }
        numbers = [x for tensor in tensors.values() for x in (tensor.format, *tensor.shape, tensor.offset, tensor.size)]
        numbers += [tensor.interleaved_heads for tensor in tensors.values()]
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise SourceError(f"{folder / INDEX_FILE} is damaged ({error}); fetch the model again") from None
    if not tensors or any(type(number) is not int for number in numbers):
        raise SourceError(f"{folder / INDEX_FILE} is damaged (no whole numbers of weights); fetch the model again")
    is_own = folder.resolve().parent == (cache_folder() / "gguf").resolve()
    if not is_own and (Path(name).name != name or name == ".."):
        raise SourceError(
            f"{folder / INDEX_FILE} names {name!r}, which is not a file of its folder; fetch the model again"
        )
    return folder / name, tensors


def _config(header: GgufHeader, name: str) -> dict[str, Any]:
    metadata = header.metadata

    # Written by hand, not by Transformers: the same file with each of its versions, hence the same fingerprint.
    def of(key: str, default: Any = None) -> Any:
        return metadata.get(f"{name}.{key}", default)

    if of("expert_count", 0):
        raise SourceError("this GGUF file holds a mixture of experts, which is not supported; choose a dense model")
    heads, hidden = of("attention.head_count"), of("embedding_length")
    check_decoder_sizes(heads, 1, hidden_size=hidden)
    head_dim = of("attention.key_length") or of("rope.dimension_count") or hidden // heads
    window = of("attention.sliding_window", 0)
    architecture = MISTRAL if name == "llama" and window else ARCHITECTURES[name]
    token_count = len(metadata["tokenizer.ggml.tokens"])
    names = {tensor.name for tensor in header.tensors}
    biased = "blk.0.attn_q.bias" in names
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
        "rope_parameters": _rope(of),
        "tie_word_embeddings": "output.weight" not in names,
        "vocab_size": token_count,
        **({"sliding_window": window} if architecture == MISTRAL else {}),
    }


def _end_tokens(metadata: dict[str, Any]) -> int | list[int] | None:
    """The tokens that end a text, and a turn of a conversation if the file names another one for that."""
    named = (metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot"))
    ends = list(dict.fromkeys(token for token in named if token is not None))
    return ends if len(ends) > 1 else next(iter(ends), None)


def _rope(of: Any) -> dict[str, Any]:
    rope = {"rope_theta": of("rope.freq_base", 10000.0), "rope_type": "default"}
    kind = of("rope.scaling.type", "none")
    if kind == "none":
        return rope
    if kind not in ("linear", "yarn"):
        raise SourceError(f"this GGUF file scales positions by {kind!r}; supported are none, linear and yarn")
    rope |= {"rope_type": kind, "factor": of("rope.scaling.factor")}
    if kind == "yarn":
        rope["original_max_position_embeddings"] = of("rope.scaling.original_context_length")
    return rope


def _tensor(tensor: TensorInfo, config: dict[str, Any], file: Path) -> tuple[str, GgufTensor]:
    """The name of a tensor in Transformers, and where it lies."""
    if tensor.format not in (*PACKED_FORMATS, *PLAIN_FORMATS):
        names = ", ".join(known.name for known in (*PACKED_FORMATS, *PLAIN_FORMATS))
        raise SourceError(f"{file.name} stores {tensor.name} as {tensor.format.name}; supported are {names}")
    place = int(tensor.format), tensor.shape, tensor.offset, tensor.size
    if tensor.name == ROPE_FACTORS:
        return ROPE_FACTORS, GgufTensor(*place)
    parts = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)", tensor.name)
    if parts is None or parts[2] not in TENSOR_NAMES:
        raise SourceError(f"{file.name} has a tensor {tensor.name}, which no supported architecture has")
    block, kind, part = parts.groups()
    interleaved = 0
    if config["model_type"] in ("llama", "mistral") and kind in ("attn_q", "attn_k"):
        interleaved = config["num_attention_heads" if kind == "attn_q" else "num_key_value_heads"]
    where = f"model.layers.{block}." if block else ""
    return f"{where}{TENSOR_NAMES[kind]}.{part}", GgufTensor(*place, interleaved)


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
    file.write_text(json.dumps(content, indent=2) + "\n")
