"""Turn the default model's GGUF file into the folder that Transformers loads in a second."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFReader, ReaderTensor
from gguf.quants import dequantize
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence
from torch import Tensor

CONTROL_TOKEN_TYPE = 3  # the type that GGUF gives to special tokens
TENSOR_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_norm": "input_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_norm": "post_attention_layernorm",
}


def convert_gguf(gguf: Path, folder: Path) -> None:
    """Write weights (dequantised, bfloat16), configuration, tokenizer and chat template of a Llama-type GGUF file."""
    reader = GGUFReader(gguf)
    metadata = {key: field.contents() for key, field in reader.fields.items()}
    assert metadata["general.architecture"] == "llama", metadata["general.architecture"]
    config = _config(metadata, tied=not any(tensor.name == "output.weight" for tensor in reader.tensors))
    weights = dict(_weight(tensor, config) for tensor in reader.tensors)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    special = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", special)
    shutil.copymode(folder / "config.json", folder / "model.safetensors")  # which only its owner can read
    _write_tokenizer(metadata, folder)


def _config(metadata: dict[str, Any], *, tied: bool) -> dict[str, Any]:
    # Written by hand, not by Transformers: the same file with each of its versions, hence the same fingerprint.
    heads = metadata["llama.attention.head_count"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "bos_token_id": metadata["tokenizer.ggml.bos_token_id"],
        "dtype": "bfloat16",
        "eos_token_id": metadata["tokenizer.ggml.eos_token_id"],
        "head_dim": metadata["llama.rope.dimension_count"],
        "hidden_act": "silu",
        "hidden_size": metadata["llama.embedding_length"],
        "intermediate_size": metadata["llama.feed_forward_length"],
        "max_position_embeddings": metadata["llama.context_length"],
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": heads,
        "num_hidden_layers": metadata["llama.block_count"],
        "num_key_value_heads": metadata.get("llama.attention.head_count_kv", heads),
        "pad_token_id": metadata["tokenizer.ggml.padding_token_id"],
        "rms_norm_eps": float(f"{metadata['llama.attention.layer_norm_rms_epsilon']:.6g}"),  # stored as a float32
        "rope_parameters": {"rope_theta": metadata["llama.rope.freq_base"], "rope_type": "default"},
        "tie_word_embeddings": tied,
        "vocab_size": len(metadata["tokenizer.ggml.tokens"]),
    }


def _weight(tensor: ReaderTensor, config: dict[str, Any]) -> tuple[str, Tensor]:
    """The tensor under its name in Transformers, dequantised and rounded to bfloat16."""
    block, kind = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.weight", tensor.name).groups()  # pyright: ignore[reportOptionalMemberAccess]
    values = dequantize(tensor.data, tensor.tensor_type)
    if kind in ("attn_q", "attn_k"):  # GGUF interleaves the halves that Transformers' rotation keeps apart
        heads = config["num_attention_heads" if kind == "attn_q" else "num_key_value_heads"]
        pairs = values.reshape(heads, values.shape[0] // heads // 2, 2, values.shape[1])
        values = pairs.swapaxes(1, 2).reshape(values.shape)
    where = f"model.layers.{block}." if block else ""
    return f"{where}{TENSOR_NAMES[kind]}.weight", torch.from_numpy(np.array(values)).to(torch.bfloat16)


def _write_tokenizer(metadata: dict[str, Any], folder: Path) -> None:
    # "smollm" cuts digits off one by one before the byte-level rule; Transformers' own GGUF reader forgets that, and
    # reads "\n\n1" and "=  12" otherwise than the model was trained to.
    assert (metadata["tokenizer.ggml.model"], metadata["tokenizer.ggml.pre"]) == ("gpt2", "smollm")
    tokens = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(BPE({token: number for number, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = Sequence([Digits(individual_digits=True), ByteLevel(add_prefix_space=False)])  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.decoder = ByteLevelDecoder()  # pyright: ignore[reportAttributeAccessIssue]
    kinds = zip(tokens, metadata["tokenizer.ggml.token_type"], strict=True)
    tokenizer.add_special_tokens(
        [AddedToken(token, normalized=False) for token, kind in kinds if kind == CONTROL_TOKEN_TYPE]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    _write_json(
        folder / "tokenizer_config.json",
        {
            **{name: tokens[metadata[f"tokenizer.ggml.{key}_token_id"]] for name, key in names.items()},
            "clean_up_tokenization_spaces": False,
            "model_max_length": metadata["llama.context_length"],
            "tokenizer_class": "PreTrainedTokenizerFast",
        },
    )
    (folder / "chat_template.jinja").write_text(metadata["tokenizer.chat_template"])


def _write_json(file: Path, content: dict[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n")
