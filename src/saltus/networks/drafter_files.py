"""Keep drafters in folders, refuse those that were made for another model, and find the one that is shipped."""

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

from saltus.networks.drafter import DraftModel, Shape

WEIGHTS, PAPERS = "drafter.safetensors", "saltus.json"
BORROWED = ("llama.lm_head.weight", "llama.model.embed_tokens.weight")  # from the target, or never used
SHIPPED = Path(__file__).parent / "drafters"  # a folder for each


def fingerprint(model: Any) -> str:
    """What tells a target from others, in whatever dtype: its shapes, and the signs of a sample of its embeddings."""
    weight = model.get_input_embeddings().weight
    signs = np.packbits((weight[:: max(len(weight) // 64, 1)].detach() > 0).cpu().numpy())
    shapes = [(name, tuple(parameter.shape)) for name, parameter in model.named_parameters()]
    return blake2b(signs.tobytes() + repr(shapes).encode(), digest_size=16).hexdigest()


def save_drafter(
    model: DraftModel, folder: Path, target: str, target_fingerprint: str, card: Mapping[str, Any]
) -> None:
    """Weights as bfloat16, and what they are for. The target's own embeddings are not saved."""
    folder.mkdir(parents=True, exist_ok=True)
    kept = {
        name: tensor.detach().to(torch.bfloat16).contiguous()
        for name, tensor in model.state_dict().items()
        if name not in BORROWED
    }
    save_file(kept | {"tokens": model.tokens.to(torch.int32)}, folder / WEIGHTS)
    told = {"kind": "drafter", "target": target, "fingerprint": target_fingerprint, "shape": asdict(model.shape)}
    (folder / PAPERS).write_text(json.dumps(told | {"card": dict(card)}, indent=1) + "\n", encoding="utf-8")


def load_drafter(folder: Path, target: Any, name: str) -> DraftModel:
    """A drafter for this target (a Hugging Face model called `name`), in its dtype. Errors: ValueError of one line."""
    try:
        told = json.loads((folder / PAPERS).read_text(encoding="utf-8"))
        weights = load_file(folder / WEIGHTS)
    except FileNotFoundError as error:
        raise ValueError(
            f"{folder} holds no drafter ({Path(error.filename).name} is missing); train one with saltus train ptp"
        ) from None
    except (SafetensorError, json.JSONDecodeError) as error:
        raise ValueError(f"the drafter in {folder} is damaged ({error}); fetch or train it again") from None
    if told.get("kind") != "drafter":
        raise ValueError(f"{folder} holds no drafter, but something else; give a folder that saltus train ptp wrote")
    if told["fingerprint"] != fingerprint(target):
        raise ValueError(f"the drafter in {folder} was trained for {told['target']}, not {name}; train one for {name}")
    unembedding = target.get_output_embeddings().weight.detach()
    embeddings = target.get_input_embeddings().weight.detach()
    tokens = weights.pop("tokens").long()
    shape = Shape(**told["shape"] | {"taps": tuple(told["shape"]["taps"])})
    model = DraftModel(shape, tokens, embeddings, unembedding)
    missing = set(model.state_dict()) - set(weights) - set(BORROWED)
    if missing:
        raise ValueError(f"the drafter in {folder} lacks {min(missing)}; fetch or train it again")
    model.load_state_dict(weights, strict=False)
    model = model.to(target.dtype).eval()
    model.auxiliary.float()  # so small that processors without bfloat16 are quicker so
    return model


def shipped(target: Any) -> Path | None:
    """The drafter that comes with this package for a target, if there is one."""
    own = fingerprint(target)
    for papers in sorted(SHIPPED.glob(f"*/{PAPERS}")):
        if json.loads(papers.read_text(encoding="utf-8"))["fingerprint"] == own:
            return papers.parent
    return None
