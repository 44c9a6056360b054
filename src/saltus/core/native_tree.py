"""Grow the draft tree of a call, and choose its size, by compiled kernels, where all drafts are given in arrays."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence

import numpy as np

from saltus.core.tree import DraftNodes, Drafts, Tree
from saltus.kernels import native
from saltus.kernels.native import structs

THIRDS = range(3)  # of the scale of probabilities, by which acceptance is recorded
NOTHING_RECORDED = 0.0, 0.0


class DraftedNodes(ctypes.Structure):
    """The struct `DraftedNodes` of draft_trees.c, field for field."""

    _fields_ = [
        *((name, structs.POINTER) for name in ("tokens", "parents", "chances")),
        *((name, structs.INTEGER) for name in ("count", "source")),
    ]


class TreeGrowth(ctypes.Structure):
    """The struct `TreeGrowth` of draft_trees.c, field for field."""

    _fields_ = [
        *((name, structs.POINTER) for name in ("drafted", "records")),
        *((name, ctypes.c_double) for name in ("prior", "least")),
        *((name, structs.INTEGER) for name in ("num_drafted", "most", "max_depth")),
        *((name, structs.POINTER) for name in ("tokens", "parents", "sources", "chances", "expected")),
    ]


def grow_natively(
    drafts: Sequence[Drafts],
    max_draft_tokens: int,
    max_depth: int,
    records: Mapping[tuple[str, int], tuple[float, float]] | None,
    prior: float,
    min_expected_tokens: float,
) -> Tree | None:
    """`grow_tree` with the records of an `Acceptance`, None: probabilities are as stated.

    Returns None where there is no kernel, or a draft is a `Branch`.
    """
    kernels = native.load_kernels()
    if kernels is None or not all(type(each) is DraftNodes for each in drafts):
        return None
    names: dict[str, int] = {}
    drafted = (DraftedNodes * len(drafts))(
        *(
            (
                native.address(each.tokens), native.address(each.parents),
                native.address(each.acceptance_probabilities), len(each.tokens),
                names.setdefault(each.source, len(names)),
            )
            for each in drafts
            if isinstance(each, DraftNodes)
        )
    )  # fmt: skip
    growth = TreeGrowth(
        ctypes.addressof(drafted), None, prior, min_expected_tokens, len(drafts), max_draft_tokens, max_depth
    )
    if records is not None:
        known = [
            number for name in names for third in THIRDS for number in records.get((name, third), NOTHING_RECORDED)
        ]
        table = (ctypes.c_double * len(known))(*known)
        growth.records = ctypes.addressof(table)
    tokens, parents, sources = (made := (structs.INTEGER * max_draft_tokens * 3)())
    chances, expected = (values := (ctypes.c_double * max_draft_tokens * 2)())
    growth.tokens, growth.chances = ctypes.addressof(made), ctypes.addressof(values)
    growth.parents, growth.sources = ctypes.addressof(parents), ctypes.addressof(sources)
    growth.expected = ctypes.addressof(expected)
    size = kernels.saltus_grow_tree(ctypes.byref(growth))
    if size < 0:
        return None
    by_number = list(names)
    return Tree(
        tuple(tokens[:size]), tuple(parents[:size]), tuple(chances[:size]),
        tuple([by_number[number] for number in sources[:size]]), tuple(expected[:size]),
        (None,) * size, (0.0,) * size, ("",) * size,
    )  # fmt: skip


def best_size(seconds: Mapping[int, float], expected_tokens: Sequence[float]) -> int | None:
    """`Controller.num_nodes` by the seconds of a `CallCost`; None where there is no kernel."""
    kernels = native.load_kernels()
    if kernels is None:
        return None
    sizes = sorted(seconds)
    count, nodes = len(sizes), len(expected_tokens)
    return kernels.saltus_num_nodes(
        (structs.INTEGER * count)(*sizes), (ctypes.c_double * count)(*[seconds[size] for size in sizes]),
        structs.INTEGER(count), (ctypes.c_double * nodes)(*expected_tokens), structs.INTEGER(nodes),
    )  # fmt: skip


def tree_rows(parents: Sequence[int], num_decided: int, past_length: int) -> tuple[np.ndarray, np.ndarray] | None:
    """Of decided tokens and a tree's nodes after them: positions [rows], and which rows each sees [rows, rows], uint8.

    None where there is no kernel.
    """
    kernels = native.load_kernels()
    if kernels is None:
        return None
    nodes = len(parents)
    rows = num_decided + nodes
    positions, visible = np.empty(rows, dtype=np.int64), np.empty((rows, rows), dtype=np.uint8)
    kernels.saltus_tree_rows(
        (structs.INTEGER * nodes)(*parents), structs.INTEGER(nodes), structs.INTEGER(num_decided),
        structs.INTEGER(past_length), structs.POINTER(native.address(positions)),
        structs.POINTER(native.address(visible)),
    )  # fmt: skip
    return positions, visible
