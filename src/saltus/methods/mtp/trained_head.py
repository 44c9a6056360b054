"""Write and read the folder of a head that was trained for a target whose checkpoint has none."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int
from safetensors.torch import save_file
from torch import Tensor

from saltus.loading.metadata import DrafterMetadata, check_target, read_metadata, write_metadata
from saltus.loading.model_identity import embedding_signs, model_fingerprint
from saltus.loading.stored_tensors import StoredTensor
from saltus.methods.mtp.families.qwen import FAMILY
from saltus.methods.shared.published_files import check_drafted_tokens

KIND = "mtp-head"
WEIGHTS_FILE = "mtp.safetensors"
TOKENS = "tokens"  # the name of their ids there


def save_head(
    weights: Mapping[str, Tensor],
    tokens: Int[Tensor, "draft"],
    folder: Path,
    target: Any,
    target_name: str,
    card: Mapping[str, Any],
) -> None:
    """Save weights by the names of `MtpModule.needed_weights`, in bfloat16, under Qwen's names; with metadata.

    `tokens` are the ids of those that it drafts.
    """
    folder.mkdir(parents=True, exist_ok=True)
    beginnings = FAMILY.parts(0, 0)
    saved = {}
    for name, weight in weights.items():
        part, _, rest = name.partition(".")
        saved[beginnings[part] + rest] = weight.detach().to("cpu", torch.bfloat16).contiguous()
    save_file(saved | {TOKENS: tokens.to("cpu", torch.int32)}, folder / WEIGHTS_FILE)
    identity = model_fingerprint(target), embedding_signs(target)
    write_metadata(folder, DrafterMetadata(KIND, target_name, *identity, training=card))


def drafted_tokens(folder: Path, others: Mapping[str, StoredTensor], target: Any) -> Int[Tensor, "draft"]:
    """The ids among the tensors of a folder. Errors: ValueError where they are missing, or not the target's."""
    stored = others.get(TOKENS)
    if stored is None or stored.shape is None or len(stored.shape) != 1 or not stored.shape[0]:
        raise ValueError(f"{folder} has no list of {TOKENS}; train it again with saltus train mtp")
    tokens = stored.read().long()
    check_drafted_tokens(folder, tokens, len(target.get_output_embeddings().weight))
    return tokens


def check_head(folder: Path, target: Any, target_name: str) -> None:
    """Errors: ValueError of one line unless the folder holds a head for this target, a Hugging Face model."""
    metadata = read_metadata(folder, KIND)
    if not (folder / WEIGHTS_FILE).is_file():
        raise ValueError(f"{folder} holds no head ({WEIGHTS_FILE} is missing); train it again with saltus train mtp")
    check_target(metadata, folder, target, target_name)
