"""Read the circuits that the authors of MtPC published (config.yaml, model@STEP.pt) as heads for a target.

Their heads read the target's last hidden state without layers of their own: a matrix for each position and component
gives the tokens' logits, and one for each sum the logits of its weights. Sums are stored from the leaves to the root, a
tensor [folds, outputs, inputs, hidden] for each depth (april-tools/mtpc, `mtp/models`).
"""

from __future__ import annotations

import pickle
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from saltus.methods.mtpc.circuits import Circuit
from saltus.methods.mtpc.heads import HeadModel, HeadShape
from saltus.methods.shared.drafter_files import embeddings_of

CHECKPOINT_FILE = re.compile(r"model@(\d+)\.pt")
HEADS = "mt_head."
TOKEN_MATRICES = "mt_head._categorical_log_probs_heads.0.head.proj"  # [folds, rank, vocab, hidden]
SUM_MATRICES = re.compile(r"mt_head\._sum_weights_heads\.(\d+)\.head\.proj")
FOLD_POSITIONS = "._scope_idx"  # end of the name of a tensor: the window's position of each fold of TOKEN_MATRICES


def is_published_circuit(folder: Path) -> bool:
    """True for a folder with a checkpoint of the authors' code."""
    return bool(_checkpoints(folder))


def load_published_circuit(folder: Path, target: Any, target_name: str) -> HeadModel:
    """The last checkpoint of a folder as heads for this target, in its dtype. Errors: ValueError of one line.

    The folder does not identify its target; heads for another one of these sizes draft badly and change no text.
    """
    weights = _read_checkpoint(_checkpoints(folder)[-1])
    _check_supported(folder, weights)
    matrices = weights[TOKEN_MATRICES]
    window, rank, vocab, hidden = matrices.shape
    embeddings, unembedding = embeddings_of(target)
    rows, size = unembedding.shape  # EvaByte's has the rows of several tokens
    if hidden != size or rows % vocab:
        raise ValueError(
            f"{folder} has heads for {vocab} tokens and states of {hidden} numbers, but {target_name}'s output layer is"
            f" {rows} × {size}; take the model that they were trained for"
        )
    sums_by_depth = {
        int(match[1]): weight for name, weight in weights.items() if (match := SUM_MATRICES.fullmatch(name))
    }
    sums = [sums_by_depth[number] for number in sorted(sums_by_depth)]
    kind = _kind(folder, window, rank, sums)
    shape = HeadShape(hidden, kind, window, rank, untied_unembedding=True, embeds_last_token=False, features="state")
    model = HeadModel(shape, torch.arange(vocab, device=embeddings.device), embeddings, unembedding)
    positions = _fold_positions(weights, kind, window)
    model.untied_unembedding = nn.Parameter(matrices[positions.argsort()], requires_grad=False)
    rows = [sums[-1].flatten(0, 2), *_transition_rows(shape.circuit_structure, kind, sums)] if sums else []
    model.sums.weight = nn.Parameter(
        torch.cat(rows) if rows else matrices.new_zeros(model.sums.weight.shape), requires_grad=False
    )
    nn.init.zeros_(model.sums.bias)
    return model.to(target.device, target.dtype).eval()


def _checkpoints(folder: Path) -> list[Path]:
    """The checkpoints of a folder, by step."""
    checkpoints = [
        (match, file) for file in folder.glob("model@*.pt") if (match := CHECKPOINT_FILE.fullmatch(file.name))
    ]
    return [file for _, file in sorted(checkpoints, key=lambda pair: int(pair[0][1]))]


def _read_checkpoint(file: Path) -> dict[str, Tensor]:
    """The weights that a checkpoint holds; those of the target are None in it. No code of the file is run."""
    try:
        state = torch.load(file, map_location="cpu", weights_only=True, mmap=True)["model_state_dict"]
        return {name: weight for name, weight in state.items() if weight is not None}
    except (RuntimeError, pickle.UnpicklingError, EOFError, LookupError, AttributeError, TypeError) as error:
        raise ValueError(f"{file} is no checkpoint of MtPC's code, or damaged ({type(error).__name__})") from None


def _check_supported(folder: Path, weights: Mapping[str, Tensor]) -> None:
    config = folder / "config.yaml"
    if any(".lora_" in name for name in weights):
        raise ValueError(f"{folder} adapts layers of its target (LoRA), which cannot be imported; take one without")
    if config.is_file() and "random-btree" in config.read_text(encoding="utf-8"):
        raise ValueError(f"{folder} is a tree over shuffled tokens (random-btree), which Saltus does not support")
    head_weights = {name for name in weights if name.startswith(HEADS)}
    odd = sorted(name for name in head_weights if name != TOKEN_MATRICES and not SUM_MATRICES.fullmatch(name))
    if odd or TOKEN_MATRICES not in head_weights:
        what = odd[0] if odd else f"no {TOKEN_MATRICES}"
        raise ValueError(f"{folder} has other heads than linear ones ({what}); only linear ones can be imported")


def _kind(folder: Path, window: int, rank: int, sums: Sequence[Tensor]) -> str:
    """Which circuit has sums of these shapes."""
    sum_shapes = [tuple(weight.shape[:3]) for weight in sums]
    root = (1, 1, rank)
    halves = [window >> depth for depth in range(1, window.bit_length())]  # of a window of 8: 4, 2, 1
    kinds: dict[str, list[tuple[int, ...]]] = {"ff": [], "cp": [root], "hmm": [(1, rank, rank)] * (window - 1) + [root]}
    if window.bit_count() == 1:
        kinds["btree"] = [*((folds, rank, rank) for folds in halves[:-1]), root]
    for kind, shapes in kinds.items():
        if sum_shapes == shapes and (kind == "ff") == (rank == 1):
            return kind
    raise ValueError(
        f"{folder} has sums of shapes {sum_shapes}, which no circuit of {window} tokens and rank {rank} has;"
        " ff, cp, hmm and btree can be imported"
    )


def _transition_rows(circuit: Circuit, kind: str, sums: Sequence[Tensor]) -> list[Tensor]:
    """For each latent but the first the matrix of its table [parent's states × own states, hidden]."""
    if kind == "hmm":  # a latent for each position; the last one's sum is stored first
        return [weight[0].flatten(0, 1) for weight in reversed(sums[:-1])]
    depths, places, rows = [0], [0], []  # of latents: places count from the left
    for latent, parent in enumerate(circuit.parents[1:], start=1):
        depths.append(depths[parent] + 1)
        places.append(2 * places[parent] + circuit.children[parent].index(latent))
        rows.append(sums[len(sums) - 1 - depths[latent]][places[latent]].flatten(0, 1))
    return rows


def _fold_positions(weights: Mapping[str, Tensor], kind: str, window: int) -> Tensor:
    """The position of each fold of the token matrices; where the file has none, a chain's folds go backwards."""
    scopes = [
        weight.flatten() for name, weight in weights.items() if name.endswith(FOLD_POSITIONS) and len(weight) == window
    ]
    if scopes:
        return scopes[0].long()
    return torch.arange(window).flip(0) if kind == "hmm" else torch.arange(window)
