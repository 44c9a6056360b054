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

from saltus.networks.drafter import DraftModel, Shape
from saltus.networks.heads import HeadModel, HeadShape, upper_layers

PAPERS = "saltus.json"
WEIGHTS = {"drafter": "drafter.safetensors", "heads": "heads.safetensors"}
SHIPPED = {"drafter": Path(__file__).parent / "drafters", "heads": Path(__file__).parent / "shipped_heads"}
TRAINED_BY = {"drafter": "saltus train ptp", "heads": "saltus train mtpc"}
BORROWED = ("llama.lm_head.weight", "llama.model.embed_tokens.weight")  # from the target, or never used


def fingerprint(model: Any) -> str:
    """What tells a target from others, in whatever dtype: its shapes, and the signs of a sample of its embeddings."""
    weight = model.get_input_embeddings().weight
    signs = np.packbits((weight[:: max(len(weight) // 64, 1)].detach() > 0).cpu().numpy())
    shapes = [(name, tuple(parameter.shape)) for name, parameter in model.named_parameters()]
    return blake2b(signs.tobytes() + repr(shapes).encode(), digest_size=16).hexdigest()


def save(
    kind: str,
    model: DraftModel | HeadModel,
    folder: Path,
    target: str,
    target_fingerprint: str,
    card: Mapping[str, Any],
) -> None:
    """Weights as bfloat16, and what they are for. The target's own embeddings are not saved."""
    folder.mkdir(parents=True, exist_ok=True)
    kept = {
        name: tensor.detach().to(torch.bfloat16).contiguous()
        for name, tensor in model.state_dict().items()
        if name not in BORROWED
    }
    save_file(kept | {"tokens": model.tokens.to(torch.int32)}, folder / WEIGHTS[kind])
    told = {"kind": kind, "target": target, "fingerprint": target_fingerprint, "shape": asdict(model.shape)}
    (folder / PAPERS).write_text(json.dumps(told | {"card": dict(card)}, indent=1) + "\n", encoding="utf-8")


def load_drafter(folder: Path, target: Any, name: str) -> DraftModel:
    """A drafter for this target (a Hugging Face model called `name`), in its dtype. Errors: ValueError of one line."""
    told, weights = _read("drafter", folder, target, name)
    told["taps"] = tuple(told["taps"])
    model = DraftModel(Shape(**told), weights.pop("tokens").long(), *_embeddings(target))
    model = _filled("drafter", model, weights, folder, target)
    model.auxiliary.float()  # so small that processors without bfloat16 are quicker so
    return model


def load_heads(folder: Path, target: Any, name: str) -> HeadModel:
    """Heads for this target (a Hugging Face model called `name`), in its dtype. Errors: ValueError of one line."""
    told, weights = _read("heads", folder, target, name)
    told["taps"] = tuple(told.get("taps", ()))
    shape = HeadShape(**told)
    model = HeadModel(shape, weights.pop("tokens").long(), *_embeddings(target), upper_layers(shape, target))
    return _filled("heads", model, weights, folder, target)


def shipped(kind: str, target: Any) -> Path | None:
    """What comes with this package for a target, if there is something of that kind."""
    own = fingerprint(target)
    for papers in sorted(SHIPPED[kind].glob(f"*/{PAPERS}")):
        if json.loads(papers.read_text(encoding="utf-8"))["fingerprint"] == own:
            return papers.parent
    return None


def _read(kind: str, folder: Path, target: Any, name: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The shape and the weights of a folder for this target."""
    command = TRAINED_BY[kind]
    try:
        told = json.loads((folder / PAPERS).read_text(encoding="utf-8"))
        if told.get("kind") != kind:
            raise ValueError(f"{folder} holds no {kind}, but something else; give a folder that {command} wrote")
        weights = load_file(folder / WEIGHTS[kind])
    except FileNotFoundError as error:
        missing = Path(error.filename).name
        raise ValueError(f"{folder} holds no {kind} ({missing} is missing); train with {command}") from None
    except (SafetensorError, json.JSONDecodeError) as error:
        raise ValueError(f"what is in {folder} is damaged ({error}); fetch or train the {kind} again") from None
    if told["fingerprint"] != fingerprint(target):
        raise ValueError(
            f"{folder} holds the {kind} of {told['target']}, not of {name}; train {name}'s own with {command}"
        )
    return told["shape"], weights


def _embeddings(target: Any) -> tuple[Tensor, Tensor]:
    return target.get_input_embeddings().weight.detach(), target.get_output_embeddings().weight.detach()


def _filled(kind: str, model: Any, weights: dict[str, Tensor], folder: Path, target: Any) -> Any:
    missing = set(model.state_dict()) - set(weights) - set(BORROWED)
    if missing:
        raise ValueError(f"{folder} lacks {min(missing)}; fetch or train the {kind} again")
    model.load_state_dict(weights, strict=False)
    return model.to(target.dtype).eval()
