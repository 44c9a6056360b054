"""Keep gated adapters in folders that PEFT reads too, and refuse those that were made for another model."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from saltus.networks.gated import Adapter, Gating

CONFIG, WEIGHTS, EMBEDDING, PAPERS = (
    "adapter_config.json", "adapter_model.safetensors", "auxiliary.safetensors", "saltus.json",
)  # fmt: skip
AGAIN = "copy it again, or train it again"


def save_adapter(
    adapter: Adapter, folder: Path, target: str, name: str, training: Mapping[str, Any] | None = None
) -> None:
    """Write an adapter for the model of this fingerprint and name; a folder is replaced as a whole.

    `training` is kept beside it: how it was made. The layout is PEFT's, which reads the low-rank parts (but knows
    no gate: it would add them to every row).
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as room:
        new = Path(room, "new")
        new.mkdir()
        _write(adapter, new, target, name, training or {})
        if folder.exists():
            os.rename(folder, Path(room, "old"))
        os.rename(new, folder)


def _write(adapter: Adapter, folder: Path, target: str, name: str, training: Mapping[str, Any]) -> None:
    settings = adapter.settings
    config = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": name, "r": settings.rank,
        "lora_alpha": settings.alpha, "lora_dropout": settings.dropout, "target_modules": list(adapter.sizes),
        "bias": "none", "fan_in_fan_out": False, "use_rslora": False, "inference_mode": True,
    }  # fmt: skip
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
    save_file(_low_rank(adapter), folder / WEIGHTS, {"format": "pt"})
    embedding = {key: value.detach().cpu().contiguous() for key, value in adapter.auxiliary.state_dict().items()}
    save_file(embedding, folder / EMBEDDING, {"format": "pt"})
    papers = {
        "target": target, "target_name": name, "settings": asdict(settings), "training": dict(training),
        "files": {file: _digest(folder / file) for file in (CONFIG, WEIGHTS, EMBEDDING)},
    }  # fmt: skip
    (folder / PAPERS).write_text(json.dumps(papers | {"seal": _seal(papers)}, indent=2) + "\n")


def load_adapter(folder: Path, model: Any, target: str, name: str) -> Adapter:
    """The adapter of a folder for this model, whose fingerprint and name are given; ready to be attached.

    Errors: ValueError for a folder without one, for one that was cut short or changed, and for another target.
    """
    papers = read_papers(folder)
    if papers["target"] != target:
        raise ValueError(
            f"{folder} was trained for {papers['target_name']} ({papers['target']}), not {name} ({target});"
            " train it again, or load that model"
        )
    for file, digest in papers["files"].items():
        if not (folder / file).is_file():
            raise ValueError(f"{folder} lacks {file}; {AGAIN}")
        if _digest(folder / file) != digest:
            raise ValueError(f"{folder / file} was changed or cut short after it was saved; {AGAIN}")
    try:
        settings = Gating(**papers["settings"] | {"targets": tuple(papers["settings"]["targets"])})
        weights, embedding = load_file(folder / WEIGHTS), load_file(folder / EMBEDDING)
        adapter = Adapter(_sizes(weights), next(reversed(embedding.values())).shape[0], settings)
        adapter.auxiliary.load_state_dict(embedding)
        expected = _low_rank(adapter)
        if {key: value.shape for key, value in expected.items()} != {
            key: value.shape for key, value in weights.items()
        }:
            raise ValueError(f"its weights are not those of rank {settings.rank}")
    except (ValueError, TypeError, KeyError, RuntimeError, SafetensorError) as error:
        raise ValueError(f"{folder} holds no adapter that fits together ({_line(error)}); {AGAIN}") from error
    with torch.no_grad():
        for key, value in _low_rank(adapter, copy=False).items():
            value.copy_(weights[key])
    adapter.check(model)
    return adapter.to(model.device).eval()


def read_papers(folder: Path) -> dict[str, Any]:
    """What saltus.json says of an adapter: target, settings, training, digests of its files. Errors: ValueError."""
    for file in (CONFIG, PAPERS):
        if not (folder / file).is_file():
            kind = "an adapter without auxiliary embedding" if file == PAPERS else "no adapter"
            raise ValueError(f"{folder} holds {kind} ({file} is missing); give a folder that `saltus train` wrote")
    try:
        papers = json.loads((folder / PAPERS).read_text())
        seal = papers.pop("seal")
        whole = seal == _seal(papers)
    except (ValueError, KeyError, AttributeError, TypeError):
        whole, papers = False, {}
    if not whole:
        raise ValueError(f"{folder / PAPERS} was changed or cut short after it was saved; {AGAIN}")
    known = {one.name for one in fields(Gating)}
    if unknown := sorted(set(papers["settings"]) - known):
        raise ValueError(f"{folder} has a setting {unknown[0]!r} that this version does not know; update Saltus")
    return papers


def _low_rank(adapter: Adapter, copy: bool = True) -> dict[str, Tensor]:
    """The low-rank parts by PEFT's names."""
    found = {}
    for path in adapter.sizes:
        part = adapter.part(path)
        assert part is not None
        for letter, weight in (("A", part.down), ("B", part.up)):
            key = f"base_model.model.{path}.lora_{letter}.weight"
            found[key] = weight.detach().cpu().contiguous() if copy else weight
    return found


def _sizes(weights: Mapping[str, Tensor]) -> dict[str, tuple[int, int]]:
    """(inputs, outputs) of the layers that the weights belong to, in the model's order."""
    sizes = {}
    for key in weights:
        path, _, rest = key.removeprefix("base_model.model.").rpartition(".lora_")
        if rest == "A.weight":
            sizes[path] = (weights[key].shape[1], weights[key.replace(".lora_A.", ".lora_B.")].shape[0])
    return sizes


def _digest(file: Path) -> str:
    with file.open("rb") as bytes_in:
        return hashlib.file_digest(bytes_in, "sha256").hexdigest()


def _seal(papers: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(papers, sort_keys=True).encode()).hexdigest()


def _line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0].rstrip(".") if str(error).strip() else type(error).__name__
