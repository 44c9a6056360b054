"""Save and load drafters and heads, refuse those of another target, and find the ones that come with the package."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from saltus import native
from saltus.networks.draft_models.dflash import DFLASH, DFlashModel, DFlashShape
from saltus.networks.draft_models.drafter import DrafterShape, DraftModel
from saltus.networks.draft_models.heads import HeadModel, HeadShape, upper_layers
from saltus.networks.loading.dflash_files import is_dflash_folder, load_dflash
from saltus.networks.loading.fetching import first_line
from saltus.networks.loading.huge_pages import place_in_huge_pages
from saltus.networks.loading.metadata import (
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
from saltus.networks.loading.model_identity import embedding_signs, model_fingerprint
from saltus.networks.loading.packing import pack_layers
from saltus.networks.loading.published_circuits import is_published_circuit, load_published_circuit
from saltus.networks.loading.published_drafters import check_drafted_tokens, place_like
from saltus.networks.models.exact.packed_weight import uses_integers
from saltus.networks.models.packed_decoder import check_layer_count
from saltus.networks.shipped import SHIPPED

WEIGHTS_FILES = {"drafter": "drafter.safetensors", "heads": "heads.safetensors"}
SHIPPED_FOLDERS = {"drafter": SHIPPED / "drafters", "heads": SHIPPED / "heads"}
TARGET_TENSORS = (  # from the target, or never used
    "llama.lm_head.weight", "llama.model.embed_tokens.weight",
    "decoder.lm_head.weight", "decoder.model.embed_tokens.weight",
)  # fmt: skip


def save_drafter(
    kind: Kind,
    model: DraftModel | DFlashModel | HeadModel,
    folder: Path,
    target_name: str,
    target: Any,
    model_card: Mapping[str, Any],
) -> None:
    """Save the weights as bfloat16, and the metadata; the embeddings of `target`, a Transformers model, are not."""
    folder.mkdir(parents=True, exist_ok=True)
    kept = {
        name: tensor.detach().to(torch.bfloat16).contiguous()
        for name, tensor in (model.saved_weights() if isinstance(model, DFlashModel) else model.state_dict()).items()
        if name not in TARGET_TENSORS
    }
    save_file(kept | {"tokens": model.tokens.to(torch.int32)}, folder / WEIGHTS_FILES[kind])
    identity = model_fingerprint(target), embedding_signs(target)
    metadata = DrafterMetadata(kind, target_name, *identity, asdict(model.shape), model_card)
    write_metadata(folder, metadata)


def load_drafter(folder: Path, target: Any, target_name: str, trainable: bool = False) -> DraftModel | DFlashModel:
    """A drafter for this target (a Hugging Face model), in its dtype; also a published DFlash drafter.

    `trainable` makes its layers modules of Transformers; they are so, too, where there are no compiled kernels.
    Errors: ValueError of one line.
    """
    trainable = trainable or native.kernel("linear", target.dtype, target.device) is None
    if not (folder / METADATA_FILE).exists() and is_dflash_folder(folder):
        model = load_dflash(folder, target, target_name, trainable)
        place_in_huge_pages(model.own_modules())
        return model
    settings, weights = _read_files("drafter", folder, target, target_name)
    settings, tokens = (
        {**settings, "hidden_state_layers": tuple(settings["hidden_state_layers"])},
        weights.pop("tokens"),
    )
    is_dflash = settings.get("network") == DFLASH
    shape = DFlashShape(**settings) if is_dflash else DrafterShape(**settings)
    check_layer_count(shape.layers, weights)
    kind: Any = DFlashModel if is_dflash else DraftModel
    make = partial(kind, shape, tokens.long(), *_embeddings(target))
    _check_weights(lambda: make(False), weights, folder)
    model = _with_weights("drafter", make(trainable), weights, folder, target)
    if is_dflash:
        place_in_huge_pages(model.own_modules())
        return model
    model.auxiliary.float()  # faster on processors without bfloat16, and small
    if not trainable and uses_integers(target):  # no token of a text depends on how its drafts round
        pack_layers(model.products, "q8_0", "int8")
    place_in_huge_pages(model)
    return model


def load_heads(folder: Path, target: Any, target_name: str) -> HeadModel:
    """Heads for this target (a Hugging Face model), in its dtype; also those that MtPC's authors published.

    Errors: ValueError of one line.
    """
    if is_published_circuit(folder):
        return load_published_circuit(folder, target, target_name)
    settings, weights = _read_files("heads", folder, target, target_name)
    shape = HeadShape(**{**settings, "hidden_state_layers": tuple(settings.get("hidden_state_layers", ()))})
    make = partial(HeadModel, shape, weights.pop("tokens").long(), *_embeddings(target))
    _check_weights(make, weights, folder)
    model = _with_weights("heads", make(upper_layers(shape, target)), weights, folder, target)
    place_in_huge_pages(model)
    return model


def find_shipped(kind: str, target: Any) -> Path | None:
    """The folder of the drafter or heads that come with this package for a target, None if there are none."""
    found = [(read_metadata(file.parent), file.parent) for file in SHIPPED_FOLDERS[kind].glob(f"*/{METADATA_FILE}")]
    ranked = sorted((match_target(metadata, target), folder) for metadata, folder in found)
    return ranked[0][1] if ranked and ranked[0][0] != TargetMatch.OTHER else None


def _read_files(kind: Kind, folder: Path, target: Any, target_name: str) -> tuple[Mapping[str, Any], dict[str, Tensor]]:
    """The shape and the weights of a folder for this target, on its device."""
    metadata, command = read_metadata(folder, kind), TRAIN_COMMANDS[kind]
    try:
        weights = load_file(folder / WEIGHTS_FILES[kind])
    except FileNotFoundError:
        raise ValueError(f"{folder} holds no {kind} ({WEIGHTS_FILES[kind]} is missing); train with {command}") from None
    except SafetensorError as error:
        raise ValueError(f"{folder} is damaged ({first_line(error)}); fetch or train the {kind} again") from None
    check_target(metadata, folder, target, target_name)
    embeddings, unembedding = _embeddings(target)
    device = embeddings.device
    if (hidden := metadata.settings.get("hidden")) != unembedding.shape[1]:
        raise ValueError(f"{folder} has states of {hidden!r} numbers, and {target_name} has {unembedding.shape[1]}")
    tokens = weights.get("tokens")
    if tokens is None or tokens.dim() != 1 or not len(tokens):
        raise ValueError(f"{folder} has no list of tokens; fetch or train the {kind} again")
    check_drafted_tokens(folder, tokens, len(unembedding))
    return metadata.settings, {name: weight.to(device) for name, weight in weights.items()}


def _embeddings(target: Any) -> tuple[Tensor, Tensor]:
    return target.get_input_embeddings().weight.detach(), target.get_output_embeddings().weight.detach()


def _check_weights(make: Callable[[], Any], weights: Mapping[str, Tensor], folder: Path) -> None:
    """Raise ValueError for weights of other sizes than the settings say, before memory is taken for those."""
    with torch.device("meta"):
        expected = make().state_dict()
    for name, weight in weights.items():
        if name in expected and weight.shape != expected[name].shape:
            sizes = tuple(weight.shape), tuple(expected[name].shape)
            raise ValueError(f"{folder}: {name} is {sizes[0]}, but must be {sizes[1]} by its {METADATA_FILE}")


def _with_weights(kind: str, model: Any, weights: dict[str, Tensor], folder: Path, target: Any) -> Any:
    missing = set(model.state_dict()) - set(weights) - set(TARGET_TENSORS)
    if missing:
        raise ValueError(f"{folder} lacks {min(missing)}; fetch or train the {kind} again")
    model.load_state_dict(weights, strict=False, assign=True)
    model = place_like(model, target).eval()
    return model
