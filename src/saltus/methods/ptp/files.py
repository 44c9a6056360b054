"""Load the drafters of `saltus train ptp`."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from saltus.kernels import native
from saltus.kernels.model_weights import uses_integers
from saltus.loading.huge_pages import place_in_huge_pages
from saltus.loading.packing import Place, pack_places
from saltus.methods.ptp.network import DrafterShape, DraftModel
from saltus.methods.shared.drafter_files import check_weight_sizes, embeddings_of, read_drafter_files, with_weights
from saltus.models.packed_decoder import check_layer_count


def load_drafter(folder: Path, target: Any, target_name: str, trainable: bool = False) -> DraftModel:
    """A drafter for this target (a Hugging Face model), in its dtype.

    `trainable` makes its layers modules of Transformers; they are so, too, where there are no compiled kernels.
    Errors: ValueError of one line.
    """
    trainable = trainable or native.kernel("linear", target.dtype, target.device) is None
    settings, weights = read_drafter_files("drafter", folder, target, target_name)
    shape = DrafterShape(**{**settings, "hidden_state_layers": tuple(settings["hidden_state_layers"])})
    check_layer_count(shape.layers, weights)
    make = partial(DraftModel, shape, weights.pop("tokens").long(), *embeddings_of(target))
    check_weight_sizes(lambda: make(False), weights, folder)
    model = with_weights("drafter", make(trainable), weights, folder, target)
    model.auxiliary.float()  # faster on processors without bfloat16, and small
    if not trainable and uses_integers(target):  # no token of a text depends on how its drafts round
        pack_places(map(Place, model.products), "q8_0", "int8")
    place_in_huge_pages(model)
    return model
