"""Load the heads of `saltus train mtpc`."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from saltus.loading.huge_pages import place_in_huge_pages
from saltus.methods.mtpc.heads import HeadModel, HeadShape, upper_layers
from saltus.methods.mtpc.published_circuits import is_published_circuit, load_published_circuit
from saltus.methods.shared.drafter_files import check_weight_sizes, embeddings_of, read_drafter_files, with_weights


def load_heads(folder: Path, target: Any, target_name: str) -> HeadModel:
    """Heads for this target (a Hugging Face model), in its dtype; also those that MtPC's authors published.

    Errors: ValueError of one line.
    """
    if is_published_circuit(folder):
        return load_published_circuit(folder, target, target_name)
    settings, weights = read_drafter_files("heads", folder, target, target_name)
    shape = HeadShape(**{**settings, "hidden_state_layers": tuple(settings.get("hidden_state_layers", ()))})
    make = partial(HeadModel, shape, weights.pop("tokens").long(), *embeddings_of(target))
    check_weight_sizes(make, weights, folder)
    model = with_weights("heads", make(upper_layers(shape, target)), weights, folder, target)
    place_in_huge_pages(model)
    return model
