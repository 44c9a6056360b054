"""Save and load gated adapters in folders that PEFT reads too; refuse those that were trained for another model."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from saltus.loading.fetching import first_line
from saltus.loading.metadata import (
    ADAPTER_CONFIG_FILE,
    METADATA_FILE,
    DrafterMetadata,
    check_target,
    read_metadata,
    write_metadata,
)
from saltus.loading.model_identity import embedding_signs, model_fingerprint
from saltus.models.gated_lora import Adapter, GatedLoraSettings
from saltus.storage.cache_files import sha256_of_file

WEIGHTS_FILE, EMBEDDING_FILE = "adapter_model.safetensors", "auxiliary.safetensors"
RETRY_HINT = "copy it again, or train it again"


def save_adapter(
    adapter: Adapter, folder: Path, target: Any, target_name: str, training: Mapping[str, Any] | None = None
) -> None:
    """Write an adapter for this model (a Hugging Face model) of this name; files of an earlier one are replaced.

    `training` records how it was trained. The layout is PEFT's, which reads the low-rank parts, but has no gate: it
    would add them to every row.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".new-") as temporary:
        _write(adapter, Path(temporary), target, target_name, training or {})
        for file in sorted(Path(temporary).iterdir(), key=lambda file: file.name == METADATA_FILE):
            os.replace(file, folder / file.name)  # the metadata last: they have the digests of the others


def _write(adapter: Adapter, folder: Path, target: Any, target_name: str, training: Mapping[str, Any]) -> None:
    settings = adapter.settings
    config = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": target_name, "r": settings.rank,
        "lora_alpha": settings.alpha, "lora_dropout": settings.dropout, "target_modules": list(adapter.sizes),
        "bias": "none", "fan_in_fan_out": False, "use_rslora": False, "inference_mode": True,
    }  # fmt: skip
    (folder / ADAPTER_CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n")
    save_file(lora_tensors(adapter), folder / WEIGHTS_FILE, {"format": "pt"})
    embedding = {key: value.detach().cpu().contiguous() for key, value in adapter.auxiliary.state_dict().items()}
    save_file(embedding, folder / EMBEDDING_FILE, {"format": "pt"})
    files = {file: sha256_of_file(folder / file) for file in (ADAPTER_CONFIG_FILE, WEIGHTS_FILE, EMBEDDING_FILE)}
    stored = asdict(settings)
    if settings.query_start == "blank":  # what it is in files without it, which older versions read too
        del stored["query_start"]
    metadata = DrafterMetadata(
        "adapter", target_name, model_fingerprint(target), embedding_signs(target), stored, training, files
    )
    write_metadata(folder, metadata)


def load_adapter(folder: Path, model: Any, target_name: str) -> Adapter:
    """The adapter of a folder for this model (a Hugging Face model) of this name, ready to be attached.

    Errors: ValueError for a folder without one, for one that was cut short or changed, and for another target.
    """
    metadata = read_metadata(folder, "adapter")
    known = {each.name for each in fields(GatedLoraSettings)}
    if unknown := sorted(set(metadata.settings) - known):
        raise ValueError(f"{folder} has a setting {unknown[0]!r} that this version does not know; update Saltus")
    check_target(metadata, folder, model, target_name)
    for file, digest in metadata.files.items():
        if not (folder / file).is_file():
            raise ValueError(f"{folder} lacks {file}; {RETRY_HINT}")
        if sha256_of_file(folder / file) != digest:
            raise ValueError(f"{folder / file} was changed or cut short after it was saved; {RETRY_HINT}")
    try:
        settings = GatedLoraSettings(**{**metadata.settings, "targets": tuple(metadata.settings["targets"])})
        weights, embedding = load_file(folder / WEIGHTS_FILE), load_file(folder / EMBEDDING_FILE)
        if any(weight.shape[0] != settings.rank for name, weight in weights.items() if ".lora_A." in name):
            raise ValueError(f"its weights are not those of rank {settings.rank}")
        adapter = Adapter(layer_sizes(weights), next(reversed(embedding.values())).shape[0], settings)
        adapter.auxiliary.load_state_dict(embedding)
        expected = lora_tensors(adapter)
        shapes = [{key: value.shape for key, value in tensors.items()} for tensors in (expected, weights)]
        if shapes[0] != shapes[1]:
            raise ValueError(f"its weights are not those of rank {settings.rank}")
    except (ValueError, TypeError, LookupError, StopIteration, RuntimeError, SafetensorError) as error:
        raise ValueError(f"{folder} holds no adapter that fits together ({first_line(error)}); {RETRY_HINT}") from error
    with torch.no_grad():
        for key, value in lora_tensors(adapter, copy=False).items():
            value.copy_(weights[key])
    adapter.check_fits(model)
    return adapter.to(model.device).eval()


def lora_tensors(adapter: Adapter, copy: bool = True) -> dict[str, Tensor]:
    """The low-rank parts by PEFT's names."""
    tensors = {}
    for path in adapter.sizes:
        part = adapter.lora_layer(path)
        assert part is not None
        for letter, weight in (("A", part.down), ("B", part.up)):
            key = f"base_model.model.{path}.lora_{letter}.weight"
            tensors[key] = weight.detach().cpu().contiguous() if copy else weight
    return tensors


def layer_sizes(weights: Mapping[str, Tensor]) -> dict[str, tuple[int, int]]:
    """(inputs, outputs) of the layers that the weights belong to, in the model's order."""
    sizes = {}
    for key in weights:
        path, _, rest = key.removeprefix("base_model.model.").rpartition(".lora_")
        if rest == "A.weight":
            sizes[path] = (weights[key].shape[1], weights[key.replace(".lora_A.", ".lora_B.")].shape[0])
    return sizes


def load_initial_adapter(folder: Path, model: Any, model_name: str, settings: GatedLoraSettings) -> Adapter:
    """A saved adapter of this model. Errors: ValueError if its settings are others; windows may differ."""
    adapter = load_adapter(folder, model, model_name)
    saved, wanted = (asdict(replace(each, window=1)) for each in (adapter.settings, settings))
    if differing := [name for name in saved if saved[name] != wanted[name]]:
        name = differing[0]
        raise ValueError(
            f"the adapter in {folder} has {name} {saved[name]!r}, but the recipe {wanted[name]!r}; set {name} to that"
        )
    return adapter
