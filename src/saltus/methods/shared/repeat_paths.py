"""Find the repeats of a text and the likeliest paths after them by a kernel; methods/lookup.py defines them."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence

import numpy as np

from saltus.core.tree import DraftNodes
from saltus.kernels import native
from saltus.kernels.native import structs
from saltus.methods.shared.ngram_model import ORDER, NgramModel


class Repeats(ctypes.Structure):
    """The struct `Repeats` of draft_trees.c, field for field."""

    _fields_ = [
        ("text", structs.POINTER),
        ("chains", structs.POINTER * 2),
        ("latest", structs.INTEGER * 2),
        *((name, structs.POINTER) for name in ("places", "sizes")),
        *((name, structs.INTEGER) for name in ("length", "repeats", "room", "max_matches", "max_size")),
        *((name, structs.INTEGER) for name in ("sure_repeat", "max_sure_matches", "most", "max_depth")),
        ("least", ctypes.c_double),
        *((name, structs.POINTER) for name in ("tokens", "parents", "chances")),
        ("ngrams", structs.POINTER),
        *((name, structs.INTEGER) for name in ("slots", "order")),
    ]


def repeat_paths(
    text: array,
    repeats: Sequence[tuple[int, int]],
    chains: Sequence[tuple[array, int]],
    max_matches: int,
    max_size: int,
    num_draft_tokens: int,
    max_depth: int,
    limits: tuple[int, int, float],
    source: str,
    ngrams: NgramModel | None = None,
) -> Sequence[DraftNodes] | None:
    """The nodes after given repeats, and after those of chains with the place where each begins; None without a kernel.

    Texts and chains are arrays "q". `limits`: tokens of a sure repeat, how many of these count, and the least
    probability of a path. An n-gram model adds what it predicts.
    """
    kernels = native.load_kernels()
    if kernels is None:
        return None
    room = len(repeats) + len(chains) * max_matches
    if not room or not len(text):
        return ()
    numbers = np.empty(2 * room, dtype=np.int64)
    nodes, chances = np.empty((2, num_draft_tokens), dtype=np.int64), np.empty(num_draft_tokens)
    for index, (place, size) in enumerate(repeats):
        numbers[index], numbers[room + index] = place, size
    places, made = native.address(numbers), native.address(nodes)
    sure_repeat, max_sure_matches, least = limits
    struct = Repeats(
        text.buffer_info()[0], places=places, sizes=places + room * numbers.itemsize, length=len(text),
        repeats=len(repeats), room=room, max_matches=max_matches, max_size=max_size, sure_repeat=sure_repeat,
        max_sure_matches=max_sure_matches, most=num_draft_tokens, max_depth=max_depth, least=least, tokens=made,
        parents=made + num_draft_tokens * nodes.itemsize, chances=native.address(chances),
    )  # fmt: skip
    if ngrams is not None:
        struct.ngrams, struct.slots, struct.order = ngrams.address, len(ngrams.slots), ORDER
    for index, (before, latest) in enumerate(chains):
        struct.chains[index], struct.latest[index] = before.buffer_info()[0], latest
    count = kernels.saltus_repeat_paths(ctypes.byref(struct))
    if count < 0:
        return None
    return (DraftNodes(nodes[0, :count], nodes[1, :count], chances[:count], source),) if count else ()
