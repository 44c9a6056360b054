"""Store the weights of a trained model in a GGUF file, packed by GGUF's quantisers, in place of its safetensors."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gguf import GGMLQuantizationType, GGUFWriter
from safetensors.torch import load_file
from torch import Tensor

from saltus.loading.gguf_files import write_weights_index
from saltus.loading.gguf_header import read_gguf_header
from saltus.loading.gguf_index import read_gguf_index
from saltus.loading.model_folders import INDEX_FILE
from saltus.loading.packing import PACKINGS, quantized_blocks
from saltus.models.gguf_architecture import LLAMA_TENSORS

WEIGHTS_FILE, PACKED_FILE = "model.safetensors", "model.gguf"


def require_packable(config: Mapping[str, Any]) -> None:
    """Raise ValueError unless `store_as_gguf` can store the weights of a model with this configuration."""
    if config["model_type"] != "llama":
        raise ValueError(f"weights of {config['model_type']} models stay as they are; store them as bf16")
    if narrow := [name for name in ("hidden_size", "intermediate_size") if config[name] % 32]:
        raise ValueError(
            f"{narrow[0]} is {config[narrow[0]]}, but packed weights need multiples of 32; store them as bf16"
        )


def store_as_gguf(folder: Path, packing: str) -> None:
    """Replace the weights of a Llama that `save_pretrained` wrote by a GGUF file: packed matrices, norms in float32.

    The configuration and the tokenizer stay beside the file, which has no tokenizer: other programs cannot run it.
    Errors: ValueError, see `require_packable`.
    """
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    require_packable(config)
    _write_gguf(folder / PACKED_FILE, config, load_file(folder / WEIGHTS_FILE), PACKINGS[packing])
    file = folder / PACKED_FILE
    write_weights_index([read_gguf_header(file)], config, [file], folder, [PACKED_FILE])
    (folder / WEIGHTS_FILE).unlink()


def remove_gguf(folder: Path) -> None:
    """Delete what `store_as_gguf` wrote to a folder, so that the weights that `save_pretrained` wrote there count."""
    if (folder / INDEX_FILE).is_file():
        for file in read_gguf_index(folder).files:
            file.unlink(missing_ok=True)
        (folder / INDEX_FILE).unlink()


def _write_gguf(
    file: Path, config: Mapping[str, Any], weights: Mapping[str, Tensor], format: GGMLQuantizationType
) -> None:
    writer = GGUFWriter(file, "llama")
    writer.add_vocab_size(config["vocab_size"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    short = {name: key for key, name in LLAMA_TENSORS.items()}
    for name, weight in sorted(weights.items()):
        module, _, part = name.rpartition(".")
        layer, inner = "", module
        if module.startswith("model.layers."):
            number, _, inner = module.removeprefix("model.layers.").partition(".")
            layer = f"blk.{number}."
        if (key := short[inner]) in ("attn_q", "attn_k"):
            weight = _interleaved(weight, weight.shape[0] // config["head_dim"])
        if weight.dim() == 1:
            writer.add_tensor(f"{layer}{key}.{part}", weight.float().numpy())
        else:
            writer.add_tensor(f"{layer}{key}.{part}", quantized_blocks(weight, format).numpy(), raw_dtype=format)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _interleaved(weight: Tensor, heads: int) -> Tensor:
    """Rows of queries or keys in the order of the architecture llama: those of a head's two halves alternate."""
    return weight.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2).contiguous()
