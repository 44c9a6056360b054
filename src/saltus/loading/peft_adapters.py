"""Load a LoRA adapter of PEFT with its base model: its low-rank products are added to the weights."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from saltus.loading.fetching import SourceError, first_line
from saltus.loading.metadata import ADAPTER_CONFIG_FILE, METADATA_FILE, read_metadata
from saltus.loading.model_folders import text_name

WEIGHTS_FILES = ("adapter_model.safetensors", "adapter_model.bin")
# initialisations that take a part off the base's weights
CHANGED_BASES = ("pissa", "olora", "corda", "lora_ga", "loftq")
TENSOR = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<part>[AB])(\.default)?\.weight")


def adapted_model(folder: Path) -> str | None:
    """The model that the adapter in a folder is for, which `saltus train` or PEFT wrote; None for another folder.

    Errors: ValueError of one line.
    """
    if not (folder / ADAPTER_CONFIG_FILE).is_file() or (folder / "config.json").is_file():
        return None
    if (folder / METADATA_FILE).is_file():
        return read_metadata(folder, "adapter").target_name
    return str(read_peft_config(folder)["base_model_name_or_path"])


def is_peft_adapter(folder: Path) -> bool:
    """True for the folder of an adapter that `saltus train` did not write."""
    return not (folder / METADATA_FILE).is_file() and adapted_model(folder) is not None


def read_peft_config(folder: Path) -> dict[str, Any]:
    """The settings of an adapter's folder. Errors: SourceError for an adapter of another kind."""
    file = folder / ADAPTER_CONFIG_FILE
    try:
        config = json.loads(file.read_bytes())
        base = config.get("base_model_name_or_path")
    except (ValueError, AttributeError) as error:
        raise SourceError(f"{file} is damaged ({first_line(error)}); copy it again") from None
    if not isinstance(base, str) or not base:
        raise SourceError(f"{file} names no base model (base_model_name_or_path); write it there")
    others = {
        f"of the kind {config.get('peft_type')}": config.get("peft_type") != "LORA",
        "with DoRA": config.get("use_dora"),
        "with trained biases": config.get("bias", "none") != "none" or config.get("lora_bias"),
        "with whole layers of its own (modules_to_save)": config.get("modules_to_save"),
        "with tokens of its own (trainable_token_indices)": config.get("trainable_token_indices"),
        "that repeats layers (layer_replication)": config.get("layer_replication"),
    }
    if what := next((name for name, given in others.items() if given), None):
        raise SourceError(f"{folder} holds an adapter {what}, which is not supported; merge it into its model by PEFT")
    if config.get("alora_invocation_tokens"):
        raise SourceError(
            f"{folder} holds an adapter of some tokens alone (aLoRA), which is not supported; load {base}"
        )
    kind = str(config.get("init_lora_weights")).lower()
    if kind.startswith(CHANGED_BASES):
        cure = "merge it into its model by PEFT where it is trained"
        if kind != "loftq":
            cure = f"save it with save_pretrained(…, path_initial_model_for_weight_conversion=…), or {cure}"
        raise SourceError(f"{folder} holds an adapter that changed its base model first ({kind}); {cure}")
    return config


def merge_adapter(model: Any, folder: Path, name: str) -> None:
    """Add an adapter to the weights of its base model: W + scale · B A (Hu et al. 2021). Errors: SourceError."""
    config = read_peft_config(folder)
    tensors = _read_tensors(folder)
    modules = dict(model.named_modules())
    names = [match["module"] for key in tensors if (match := TENSOR.fullmatch(key))]
    is_text_part = any(name not in modules and _in_text_part(name) in modules for name in names)
    pairs: dict[str, dict[str, torch.Tensor]] = {}
    for key, tensor in tensors.items():
        if key.endswith(".base_layer.weight"):  # PEFT's copy of an adapted output layer, as the base model has it
            continue
        if "lora_embedding_" in key:
            raise SourceError(f"{folder} adapts embeddings, which is not supported; merge it into its model by PEFT")
        match = TENSOR.fullmatch(key)
        own = "" if match is None else match["module"]
        module = own if own in modules or not is_text_part else _in_text_part(own)
        weight = getattr(modules.get(module), "weight", None)
        if is_text_part and match is not None and weight is None and module == own:
            continue  # of what reads images, which is not loaded
        if match is None or weight is None:
            raise SourceError(f"{folder} has a weight {key}, which is not for {name}; give the adapter's own model")
        if sum(getattr(other, "weight", None) is weight for other in modules.values()) > 1:
            raise SourceError(
                f"{folder} adapts an output layer that shares its weights with the embeddings, which is not"
                " supported; give the base model an output layer of its own"
            )
        if not isinstance(weight, torch.Tensor) or not weight.is_floating_point():
            raise SourceError(f"the weights of {name} are packed, and an adapter cannot be added; load it as bf16")
        pairs.setdefault(own, {})[match["part"]] = tensor
    for own, pair in pairs.items():
        module = own if own in modules else _in_text_part(own)
        weight, transposed = modules[module].weight, type(modules[module]).__name__ == "Conv1D"  # GPT-2's [in, out]
        shape = weight.shape[::-1] if transposed else weight.shape
        if pair.keys() != {"A", "B"} or (pair["B"].shape[0], pair["A"].shape[1]) != shape:
            raise SourceError(f"{folder} has weights of {module} in other shapes than {name}; give its own model")
        product = pair["B"].float() @ pair["A"].float()
        product = product.T if transposed else product
        with torch.no_grad():
            weight.copy_(weight.float() + _scale(config, own, len(pair["A"])) * product.to(weight.device))


def _in_text_part(name: str) -> str:
    """What a layer of a model that reads images, too, is called where its text part alone is loaded."""
    return text_name(f"{name}.weight").removesuffix(".weight")


def _scale(config: Mapping[str, Any], module: str, rank: int) -> float:
    """alpha / rank, or alpha / √rank (rsLoRA, Kalajdzievski 2023); alpha may be another one for some modules."""
    patterns: Mapping[str, float] = config.get("alpha_pattern") or {}
    own = (value for pattern, value in patterns.items() if re.search(rf"(^|\.){pattern}$", module))
    alpha = next(own, config.get("lora_alpha", rank))
    return alpha / math.sqrt(rank) if config.get("use_rslora") else alpha / rank


def _read_tensors(folder: Path) -> dict[str, torch.Tensor]:
    file = next((folder / name for name in WEIGHTS_FILES if (folder / name).is_file()), None)
    if file is None:
        raise SourceError(f"{folder} has no {WEIGHTS_FILES[0]}; copy it there")
    try:
        return load_file(file) if file.suffix == ".safetensors" else torch.load(file, weights_only=True)
    except Exception as error:  # of each library's own kind
        raise SourceError(f"{file} is damaged ({first_line(error)}); copy it again") from None
