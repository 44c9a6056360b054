"""Read the folders in which others publish drafters: config.json and weights, without running code of the folder."""

from __future__ import annotations

import json
import logging
import pickle
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from saltus.kernels.packed_weight import select_rows
from saltus.loading.fetching import first_line
from saltus.loading.model_folders import weight_files
from saltus.loading.model_names import surely_differ
from saltus.loading.quantised_weights import find_quantised

log = logging.getLogger("saltus")

CONFIG_FILE = "config.json"
LAYER_KINDS = ("full_attention", "sliding_attention")
QWEN3_DEFAULTS = {  # of Transformers' Qwen3Config: the formats of speculators leave them out
    "hidden_size": 4096, "intermediate_size": 22016, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 32, "head_dim": 128, "rms_norm_eps": 1e-6, "hidden_act": "silu",
}  # fmt: skip
UNUSED_WEIGHTS = ("t2d", "verifier_norm.weight", "verifier_lm_head.weight")  # for training, or implied by others


def read_config(folder: Path) -> dict[str, Any]:
    """The settings in config.json; none where there is no such file, or a damaged one."""
    try:
        config = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return config if isinstance(config, dict) else {}


def is_named(config: Mapping[str, Any], kind: str, architectures: Collection[str]) -> bool:
    """True for a config.json of this kind in the format of speculators, or else of one of these architectures."""
    if given := config.get("speculators_model_type"):
        return given == kind
    return not set(architectures).isdisjoint(config.get("architectures") or ())


def warn_of_another_target(folder: Path, target_name: str) -> None:
    """Log a line where a folder names a target that is surely another model than the one of this name."""
    config = read_config(folder)
    table = config.get("speculators_config")
    verifier = (table if isinstance(table, dict) else config).get("verifier")
    named = verifier.get("name_or_path") if isinstance(verifier, dict) else verifier
    named = named or config.get("target_model_name_or_path")
    if isinstance(named, str) and surely_differ(named, target_name):
        log.warning(
            "the drafter in %s was trained for %s, not for %s: the text is exact, but few drafts may be accepted",
            folder, named, target_name,
        )  # fmt: skip


def read_weights(folder: Path) -> dict[str, Tensor]:
    """All weights of a folder by name, quantised ones expanded. Errors: ValueError if they are missing or damaged."""
    if (quantised := find_quantised(folder)) is not None:
        return {name: weight[...] for name, weight in quantised.weights(None).items()}
    files = weight_files(folder)
    if not files:
        raise ValueError(f"{folder} has a config.json but no weights (*.safetensors); fetch the drafter again")
    weights: dict[str, Tensor] = {}
    try:
        for file in files:
            pickled = file.suffix == ".bin"
            weights |= torch.load(file, map_location="cpu", weights_only=True) if pickled else load_file(file)
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError, SafetensorError) as error:
        raise ValueError(f"{folder} is damaged ({first_line(error)}); fetch the drafter again") from None
    return weights


def refuse(folder: Path, kind: str, found: Mapping[str, Any]) -> None:
    """Raise ValueError for the first of these things that a drafter of this kind has, and that is not computed."""
    for what, is_there in found.items():
        if is_there:
            raise ValueError(f"{folder} is {kind} with {what}, which Saltus does not support; take another one")


def layer_spans(layers: Mapping[str, Any], count: int, folder: Path) -> tuple[int | None, ...]:
    """The sliding window of each layer; None: it sees the whole text.

    Errors: ValueError for other kinds of layers, another number of them, and a window that is no length.
    """
    kinds, window = layers.get("layer_types") or ["full_attention"] * count, layers.get("sliding_window")
    refuse(folder, "a drafter", {f"layers of {each}": each not in LAYER_KINDS for each in kinds})
    is_length = type(window) is int and window > 0
    if len(kinds) != count or ("sliding_attention" in kinds and not is_length):
        raise ValueError(
            f"{folder / CONFIG_FILE}: {len(kinds)} layer_types for {count} layers, with a sliding window of {window!r};"
            " fetch the drafter again"
        )
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def take_own_matrices(
    folder: Path, weights: dict[str, Tensor], hidden: int, num_drafted: int, target: Any
) -> tuple[Tensor, Tensor | None]:
    """Take embeddings and output layer, where a folder has its own, out of its weights, and those that nothing needs.

    The embeddings are the target's unless the folder has others. Errors: ValueError for other sizes.
    """
    for name in UNUSED_WEIGHTS:
        weights.pop(name, None)
    of_target = target.get_input_embeddings().weight.detach()
    rows = {"embed_tokens.weight": len(of_target), "lm_head.weight": num_drafted}
    matrices = {name: weights.pop(name, None) for name in rows}
    for name, weight in matrices.items():
        if weight is not None and weight.shape != (rows[name], hidden):
            sizes = tuple(weight.shape), (rows[name], hidden)
            raise ValueError(f"{folder}: {name} is {sizes[0]}, but must be {sizes[1]} for this model; take another one")
    own, own_head = matrices.values()
    if own is None or is_same(own, of_target):
        return of_target, own_head
    return own.to(target.device, target.dtype), own_head


def place_like(model: Any, target: Any) -> Any:
    """A drafter's module in its target's dtype and on its device; rotary frequencies stay in float32."""
    rotary = [(module, module.inv_freq) for module in model.modules() if hasattr(module, "inv_freq")]
    model = model.to(target.device, target.dtype)
    for module, frequencies in rotary:
        module.inv_freq = frequencies.to(target.device)
    return model


def is_same(weight: Tensor, of_target: Tensor) -> bool:
    """True if a weight of the folder is the target's, so that it can be shared."""
    if weight.shape != of_target.shape:
        return False
    rows = torch.arange(len(weight), device=of_target.device)
    return torch.equal(weight.to(of_target.device, of_target.dtype), select_rows(of_target, rows))


def check_sizes(
    folder: Path,
    hidden: int,
    target_hidden: int | None,
    hidden_state_layers: Sequence[int],
    target: Any,
    target_name: str,
) -> None:
    """Raise ValueError for a drafter of other sizes than the target's, or that reads layers which it does not have."""
    config = target.config.get_text_config()
    wrong = ""
    if {hidden, target_hidden or hidden} != {config.hidden_size}:
        wrong = f"states of {target_hidden or hidden} numbers, and {target_name} has {config.hidden_size}"
    elif not hidden_state_layers:
        wrong = "no layers of its target to read"
    elif not 0 <= min(hidden_state_layers) <= max(hidden_state_layers) <= config.num_hidden_layers:
        wrong = f"states of layer {max(hidden_state_layers)}, and {target_name} has {config.num_hidden_layers}"
    if wrong:
        raise ValueError(f"the drafter in {folder} has {wrong}; take the model that it was trained for")


def check_weights(folder: Path, weights: Mapping[str, Tensor], needed: Mapping[str, Tensor], kind: str) -> None:
    """Raise ValueError unless a folder has just the weights that are needed for this kind, in their sizes."""
    if odd := sorted(set(needed) ^ set(weights)):
        what = "lacks" if odd[0] in needed else "has an unknown weight"
        raise ValueError(f"{folder} {what} {odd[0]}; take {kind}")
    for name, weight in sorted(needed.items()):
        if weights[name].shape != weight.shape:
            sizes = tuple(weights[name].shape), tuple(weight.shape)
            raise ValueError(
                f"{folder}: {name} is {sizes[0]}, but must be {sizes[1]} by its {CONFIG_FILE}; fetch it again"
            )


def drafted_tokens(folder: Path, weights: dict[str, Tensor], vocabulary: int) -> tuple[Tensor, Tensor]:
    """Takes `d2t` out of the weights: the ids of the drafted tokens, ascending, and the rows of their logits.

    Errors: ValueError for a token beyond the vocabulary.
    """
    offsets = weights.pop("d2t", None)
    tokens = torch.arange(vocabulary) if offsets is None else torch.arange(len(offsets)) + offsets.long()
    check_drafted_tokens(folder, tokens, vocabulary)
    order = tokens.argsort()
    return tokens[order], order


def check_drafted_tokens(folder: Path, tokens: Tensor, vocabulary: int) -> None:
    """Raise ValueError unless the target has all tokens that a drafter drafts."""
    if len(wrong := tokens[(tokens < 0) | (tokens >= vocabulary)]):
        raise ValueError(
            f"{folder} drafts token {int(wrong[0])}, and the target has {vocabulary:,}; take the model that it was"
            " trained for"
        )
