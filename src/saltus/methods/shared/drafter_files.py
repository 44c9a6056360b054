"""Save and read the files of drafters and heads, refuse those of another target, and find the ones in the package."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from saltus.loading.fetching import first_line
from saltus.loading.metadata import (
    METADATA_FILE,
    TRAIN_COMMANDS,
    DrafterMetadata,
    Kind,
    TargetMatch,
    check_target,
    match_target,
    read_metadata,
    write_metadata,
)
from saltus.loading.model_identity import embedding_signs, model_fingerprint
from saltus.methods.shared.published_files import check_drafted_tokens, place_like
from saltus.shipped import SHIPPED

WEIGHTS_FILES = {"drafter": "drafter.safetensors", "heads": "heads.safetensors"}
SHIPPED_FOLDERS = {"drafter": SHIPPED / "drafters", "heads": SHIPPED / "heads"}
TARGET_WEIGHTS = (".lm_head.weight", ".embed_tokens.weight")  # ends of names: from the target, or never used


def save_drafter(
    kind: Kind, model: Any, folder: Path, target_name: str, target: Any, model_card: Mapping[str, Any]
) -> None:
    """Save a module's `saved_weights` as bfloat16, its `tokens`, and the metadata with its `shape`.

    The embeddings of `target`, a Hugging Face model, are not saved.
    """
    folder.mkdir(parents=True, exist_ok=True)
    kept = {
        name: tensor.detach().to(torch.bfloat16).contiguous()
        for name, tensor in model.saved_weights().items()
        if not name.endswith(TARGET_WEIGHTS)
    }
    save_file(kept | {"tokens": model.tokens.to(torch.int32)}, folder / WEIGHTS_FILES[kind])
    identity = model_fingerprint(target), embedding_signs(target)
    metadata = DrafterMetadata(kind, target_name, *identity, asdict(model.shape), model_card)
    write_metadata(folder, metadata)


def find_shipped(kind: str, target: Any) -> Path | None:
    """The folder of the drafter or heads that come with this package for a target, None if there are none."""
    shipped = [(read_metadata(file.parent), file.parent) for file in SHIPPED_FOLDERS[kind].glob(f"*/{METADATA_FILE}")]
    ranked = sorted((match_target(metadata, target), folder) for metadata, folder in shipped)
    return ranked[0][1] if ranked and ranked[0][0] != TargetMatch.OTHER else None


def read_drafter_files(
    kind: Kind, folder: Path, target: Any, target_name: str
) -> tuple[Mapping[str, Any], dict[str, Tensor]]:
    """The shape and the weights of a folder for this target, on its device. Errors: ValueError of one line."""
    metadata, command = read_metadata(folder, kind), TRAIN_COMMANDS[kind]
    try:
        weights = load_file(folder / WEIGHTS_FILES[kind])
    except FileNotFoundError:
        raise ValueError(f"{folder} holds no {kind} ({WEIGHTS_FILES[kind]} is missing); train with {command}") from None
    except SafetensorError as error:
        raise ValueError(f"{folder} is damaged ({first_line(error)}); fetch or train the {kind} again") from None
    check_target(metadata, folder, target, target_name)
    embeddings, unembedding = embeddings_of(target)
    device = embeddings.device
    if (hidden := metadata.settings.get("hidden")) != unembedding.shape[1]:
        raise ValueError(f"{folder} has states of {hidden!r} numbers, and {target_name} has {unembedding.shape[1]}")
    tokens = weights.get("tokens")
    if tokens is None or tokens.dim() != 1 or not len(tokens):
        raise ValueError(f"{folder} has no list of tokens; fetch or train the {kind} again")
    check_drafted_tokens(folder, tokens, len(unembedding))
    return metadata.settings, {name: weight.to(device) for name, weight in weights.items()}


def embeddings_of(target: Any) -> tuple[Tensor, Tensor]:
    """The weights of a Hugging Face model's embeddings and of its output layer."""
    return target.get_input_embeddings().weight.detach(), target.get_output_embeddings().weight.detach()


def check_weight_sizes(make: Callable[[], Any], weights: Mapping[str, Tensor], folder: Path) -> None:
    """Raise ValueError for weights of other sizes than the settings say, before memory is taken for those."""
    with torch.device("meta"):
        expected = make().state_dict()
    for name, weight in weights.items():
        if name in expected and weight.shape != expected[name].shape:
            sizes = tuple(weight.shape), tuple(expected[name].shape)
            raise ValueError(f"{folder}: {name} is {sizes[0]}, but must be {sizes[1]} by its {METADATA_FILE}")


def with_weights(kind: Kind, model: Any, weights: dict[str, Tensor], folder: Path, target: Any) -> Any:
    """The module with these weights, in its target's dtype and on its device. Errors: ValueError for a missing one."""
    missing = {name for name in set(model.state_dict()) - set(weights) if not name.endswith(TARGET_WEIGHTS)}
    if missing:
        raise ValueError(f"{folder} lacks {min(missing)}; fetch or train the {kind} again")
    model.load_state_dict(weights, strict=False, assign=True)
    return place_like(model, target).eval()
