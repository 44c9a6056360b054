"""Keep drafters and heads in folders, refuse those made for another model, and find the ones that are shipped."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from saltus.networks.draft_models.drafter import DrafterShape, DraftModel
from saltus.networks.draft_models.heads import HeadModel, HeadShape, upper_layers
from saltus.networks.shipped import SHIPPED

METADATA_FILE = "saltus.json"
WEIGHTS_FILES = {"drafter": "drafter.safetensors", "heads": "heads.safetensors"}
SHIPPED_FOLDERS = {"drafter": SHIPPED / "drafters", "heads": SHIPPED / "heads"}
TRAIN_COMMANDS = {"drafter": "saltus train ptp", "heads": "saltus train mtpc"}
TARGET_TENSORS = ("llama.lm_head.weight", "llama.model.embed_tokens.weight")  # from the target, or never used


def model_fingerprint(model: Any) -> str:
    """What tells a target from others, in whatever dtype: its shapes, and the signs of a sample of its embeddings."""
    weight = model.get_input_embeddings().weight
    signs = np.packbits((weight[:: max(len(weight) // 64, 1)].detach() > 0).cpu().numpy())
    shapes = [(name, tuple(parameter.shape)) for name, parameter in model.named_parameters()]
    return blake2b(signs.tobytes() + repr(shapes).encode(), digest_size=16).hexdigest()


def save_drafter(
    kind: str,
    model: DraftModel | HeadModel,
    folder: Path,
    target_name: str,
    target_fingerprint: str,
    model_card: Mapping[str, Any],
) -> None:
    """Weights as bfloat16, and what they are for. The target's own embeddings are not saved."""
    folder.mkdir(parents=True, exist_ok=True)
    kept = {
        name: tensor.detach().to(torch.bfloat16).contiguous()
        for name, tensor in model.state_dict().items()
        if name not in TARGET_TENSORS
    }
    save_file(kept | {"tokens": model.tokens.to(torch.int32)}, folder / WEIGHTS_FILES[kind])
    conditioning = {
        "kind": kind,
        "target": target_name,
        "fingerprint": target_fingerprint,
        "shape": asdict(model.shape),
    }
    (folder / METADATA_FILE).write_text(
        json.dumps(conditioning | {"card": dict(model_card)}, indent=1) + "\n", encoding="utf-8"
    )


def load_drafter(folder: Path, target: Any, target_name: str) -> DraftModel:
    """A drafter for this target (a Hugging Face model called `name`), in its dtype. Errors: ValueError of one line."""
    conditioning, weights = _read_files("drafter", folder, target, target_name)
    conditioning["taps"] = tuple(conditioning["taps"])
    model = DraftModel(DrafterShape(**conditioning), weights.pop("tokens").long(), *_embeddings(target))
    model = _with_weights("drafter", model, weights, folder, target)
    model.auxiliary.float()  # so small that processors without bfloat16 are quicker so
    return model


def load_heads(folder: Path, target: Any, target_name: str) -> HeadModel:
    """Heads for this target (a Hugging Face model called `name`), in its dtype. Errors: ValueError of one line."""
    conditioning, weights = _read_files("heads", folder, target, target_name)
    conditioning["taps"] = tuple(conditioning.get("taps", ()))
    shape = HeadShape(**conditioning)
    model = HeadModel(shape, weights.pop("tokens").long(), *_embeddings(target), upper_layers(shape, target))
    return _with_weights("heads", model, weights, folder, target)


def find_shipped(kind: str, target: Any) -> Path | None:
    """What comes with this package for a target, if there is something of that kind."""
    own = model_fingerprint(target)
    for papers in sorted(SHIPPED_FOLDERS[kind].glob(f"*/{METADATA_FILE}")):
        if json.loads(papers.read_text(encoding="utf-8"))["fingerprint"] == own:
            return papers.parent
    return None


def _read_files(kind: str, folder: Path, target: Any, target_name: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The shape and the weights of a folder for this target."""
    command = TRAIN_COMMANDS[kind]
    try:
        conditioning = json.loads((folder / METADATA_FILE).read_text(encoding="utf-8"))
        if conditioning.get("kind") != kind:
            raise ValueError(f"{folder} holds no {kind}, but something else; give a folder that {command} wrote")
        weights = load_file(folder / WEIGHTS_FILES[kind])
    except FileNotFoundError as error:
        missing = Path(error.filename).name
        raise ValueError(f"{folder} holds no {kind} ({missing} is missing); train with {command}") from None
    except (SafetensorError, json.JSONDecodeError) as error:
        raise ValueError(f"what is in {folder} is damaged ({error}); fetch or train the {kind} again") from None
    if conditioning["fingerprint"] != model_fingerprint(target):
        raise ValueError(
            f"{folder} holds the {kind} of {conditioning['target']}, not of {target_name}; train"
            f" {target_name}'s own with {command}"
        )
    return conditioning["shape"], weights


def _embeddings(target: Any) -> tuple[Tensor, Tensor]:
    return target.get_input_embeddings().weight.detach(), target.get_output_embeddings().weight.detach()


def _with_weights(kind: str, model: Any, weights: dict[str, Tensor], folder: Path, target: Any) -> Any:
    missing = set(model.state_dict()) - set(weights) - set(TARGET_TENSORS)
    if missing:
        raise ValueError(f"{folder} lacks {min(missing)}; fetch or train the {kind} again")
    model.load_state_dict(weights, strict=False)
    return model.to(target.dtype).eval()
