"""Make the inputs of a drafter's layers from the target's hidden states, tokens and the vectors of queries."""

# Triton's own types differ between its releases, and say of `range` in a kernel that nothing comes back.
# pyright: reportGeneralTypeIssues=false, reportCallIssue=false, reportArgumentType=false

from __future__ import annotations

import triton.language as tl
from torch import Tensor

from saltus.models.cuda.launching import kernel, power_of_two


@kernel("epsilon")
def _normalize_features(
    states, state_rows, embeddings, tokens, out, epsilon,
    SIZE: tl.constexpr, PADDED: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """A part of a row: one of its hidden states or, last, its token's embedding, over its root mean square."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = tl.arange(0, PADDED)
    inside = at < SIZE
    if part < PARTS - 1:
        x = tl.load(states + (tl.load(state_rows + row) * (PARTS - 1) + part) * SIZE + at, mask=inside, other=0.0)
    else:
        x = tl.load(embeddings + tl.load(tokens + row) * SIZE + at, mask=inside, other=0.0)
    wide = x.to(tl.float32)
    normed = wide / tl.sqrt(tl.sum(wide * wide, 0) / SIZE + epsilon)
    tl.store(out + (row * PARTS + part) * SIZE + at, normed.to(out.dtype.element_ty), mask=inside)


@kernel("num_rows")
def _draft_inputs(
    parts, sources, queries, query_rows, out, num_rows,
    SIZE: tl.constexpr, PADDED: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """out[row] = Σ parts[source of the row] + its vector of queries, which is zero for a context position."""
    row, at = tl.program_id(0).to(tl.int64), tl.arange(0, PADDED)
    inside = at < SIZE
    source = tl.load(sources + row)
    total = tl.load(parts + source * SIZE + at, mask=inside, other=0.0)
    for part in tl.static_range(1, PARTS):
        total += tl.load(parts + (part * num_rows + source) * SIZE + at, mask=inside, other=0.0)
    vector = tl.load(queries + tl.load(query_rows + row) * SIZE + at, mask=inside, other=0.0).to(tl.float32)
    dtype = out.dtype.element_ty
    tl.store(out + row * SIZE + at, (total.to(dtype).to(tl.float32) + vector).to(dtype), mask=inside)


def normalize_features(
    states: Tensor, state_rows: Tensor, embeddings: Tensor, tokens: Tensor, out: Tensor, epsilon: float
) -> None:
    """out [rows, parts · size] of states [.., (parts − 1) · size], of which each row has one, and tokens [rows]."""
    rows, size = len(tokens), embeddings.shape[1]
    parts = out.shape[1] // size
    _normalize_features[(rows, parts)](
        states, state_rows, embeddings, tokens, out, epsilon,
        SIZE=size, PADDED=power_of_two(size), PARTS=parts, num_warps=4,
    )  # fmt: skip


def draft_inputs(parts: Tensor, sources: Tensor, queries: Tensor, query_rows: Tensor, out: Tensor) -> None:
    """out [rows, size] of the parts [parts, rows, size] of the context inputs, and of queries [.., size].

    `sources` and `query_rows` [rows] say which rows of these.
    """
    count, rows, size = parts.shape
    _draft_inputs[(rows,)](
        parts, sources, queries, query_rows, out, rows,
        SIZE=size, PADDED=power_of_two(size), PARTS=count, num_warps=4,
    )  # fmt: skip
