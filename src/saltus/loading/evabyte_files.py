"""Load an EvaByte model from its published folder (config.json, safetensors), without running code from it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch.nn import Parameter

from saltus.loading.fetching import SourceError, first_line
from saltus.loading.model_folders import read_json_object, weight_files
from saltus.models.evabyte_decoder import EvaByteDecoder
from saltus.models.packed_decoder import ROPE_TYPES, DecoderConfig, make_decoder_config

EVABYTE = "evabyte"  # model_type in config.json
REQUIRED_SETTINGS = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "window_size",
    "chunk_size",
)  # fmt: skip
DEFAULT_SETTINGS = {
    "num_pred_heads": 1, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "norm_add_unit_offset": False,
    "hidden_act": "silu", "max_position_embeddings": 2048, "eos_token_id": 2,
}  # fmt: skip


def is_evabyte(folder: Path) -> bool:
    """True if the folder's configuration names an EvaByte model; a damaged one names none."""
    try:
        return _read_json(folder / "config.json").get("model_type") == EVABYTE
    except SourceError:
        return False


def load_evabyte(folder: Path, dtype: Any = "auto") -> EvaByteDecoder:
    """The model of a folder, in the dtype of its files unless one is given. Errors: SourceError of one line."""
    model = EvaByteDecoder(_read_config(folder))
    missing = {name for name, _ in model.named_parameters() if name != "lm_head.weight"}
    for file in weight_files(folder):
        if file.suffix != ".safetensors":
            raise SourceError(f"{file} is not a safetensors file; fetch EvaByte's weights as safetensors")
        try:
            _read_weights(file, model, missing, dtype)
        except SafetensorError as error:
            raise SourceError(f"{file} is damaged ({first_line(error)}); fetch it again") from None
    if missing:
        raise SourceError(f"{folder} lacks {len(missing)} of EvaByte's weights, such as {min(missing)}; fetch it again")
    if len({weight.dtype for name, weight in model.named_parameters() if name != "lm_head.weight"}) > 1:
        raise SourceError(f"the weights of {folder} have several dtypes; name one, such as bfloat16")
    model.finish()
    return model.eval()


def _read_weights(file: Path, model: EvaByteDecoder, missing: set[str], dtype: Any) -> None:
    """Set the weights of a file that are missing, and take them off that set."""
    with safe_open(file, "pt") as tensors:
        for name in tensors.keys():  # noqa: SIM118 (it is no mapping)
            module_name = "prediction_heads.weight" if name == "lm_head.weight" else name
            if module_name in missing:
                _set_weight(model, module_name, tensors.get_tensor(name), dtype, file)
                missing.remove(module_name)


def _set_weight(model: EvaByteDecoder, name: str, weight: torch.Tensor, dtype: Any, file: Path) -> None:
    path, _, attribute = name.rpartition(".")
    module = model.get_submodule(path)
    expected = tuple(getattr(module, attribute).shape)
    if tuple(weight.shape) != expected:
        raise SourceError(
            f"{file} has {name} of shape {list(weight.shape)}, but config.json says {list(expected)}; fetch it again"
        )
    weight = weight if dtype == "auto" else weight.to(dtype)
    setattr(module, attribute, Parameter(weight.contiguous(), requires_grad=False))


def _read_config(folder: Path) -> DecoderConfig:
    config = DEFAULT_SETTINGS | _read_json(folder / "config.json")
    if absent := [name for name in REQUIRED_SETTINGS if not isinstance(config.get(name), int)]:
        raise SourceError(f"{folder / 'config.json'} has no whole number {absent[0]}; fetch the model again")
    heads, scaling = config["num_attention_heads"], config.get("rope_scaling") or {"type": "default"}
    wrong = {
        f"hidden_size {config['hidden_size']} is no multiple of {heads} heads": config["hidden_size"] % heads,
        f"window_size {config['window_size']} is no multiple of chunk_size {config['chunk_size']}": (
            config["chunk_size"] < 1 or config["window_size"] % config["chunk_size"]
        ),
        f"hidden_act {config['hidden_act']!r} is not silu": config["hidden_act"] != "silu",
        f"rope_scaling is of type {scaling.get('type')!r}": scaling.get("type") not in ROPE_TYPES,
    }
    if problem := next((text for text, failed in wrong.items() if failed), None):
        raise SourceError(f"{folder} holds an EvaByte model that Saltus does not support: {problem}")
    config |= {
        "head_dim": config["hidden_size"] // heads, "num_key_value_heads": heads, "attention_bias": False,
        "tie_word_embeddings": False,
        "rope_parameters": {**scaling, "rope_type": scaling["type"], "rope_theta": config["rope_theta"]},
        "num_pred_heads": max(config["num_pred_heads"] or 1, 1),
    }  # fmt: skip
    ends = _read_json(folder / "generation_config.json").get("eos_token_id")
    try:
        return make_decoder_config(config | ({} if ends is None else {"eos_token_id": ends}))
    except (ValueError, TypeError) as error:
        raise SourceError(f"{folder / 'config.json'} is damaged: {first_line(error)}") from None


def _read_json(file: Path) -> dict[str, Any]:
    """The object of a JSON file; empty if there is no such file. Errors: SourceError."""
    return read_json_object(file) if file.is_file() else {}
