"""Many windows of a text in one forward: the context once, and for each window the queries that it would have alone.

The query at depth d of a window that starts at s predicts token s + d and stands at that token's position. It attends
to the context before s and to the queries of its own window up to itself. With the query start `last-token` it stands
one position earlier, and the first query has the token before the window.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from saltus.core.forward import NO_TOKEN, QueryStart
from saltus.methods.shared.query_chains import UniformConditioning


@dataclass(frozen=True, eq=False)
class PackedBatch:
    """One forward. Rows: the context, then the queries sorted by depth and, within a depth, by window.

    So early rows never attend to later ones, and a prefix of the rows can be computed first and cached.
    """

    tokens: Int[Tensor, "batch length"]
    uniforms: Float[Tensor, "batch length"]  # NaN: none
    positions: Int[Tensor, "batch length"]
    mask: Bool[Tensor, "batch length columns"]  # True where the row attends to the column
    context_length: int
    num_windows: int
    window_size: int

    def to(self, device: torch.device) -> PackedBatch:
        moved = {name: part.to(device) for name, part in vars(self).items() if isinstance(part, Tensor)}
        return replace(self, **moved)

    def queries_by_window(self, rows: Tensor) -> Tensor:
        """[batch, length, …] to [batch, windows, window, …]: the queries alone."""
        queries = rows[:, self.context_length :].unflatten(1, (self.window_size, self.num_windows))
        return queries.transpose(1, 2)


def pack_rows(
    context: Int[Tensor, "batch context"],
    mask: Bool[Tensor, "batch length columns"],
    queries: Int[Tensor, "batch queries"] | None = None,
    query_positions: Int[Tensor, "batch queries"] | None = None,
    uniforms: Float[Tensor, "batch queries"] | None = None,
    context_length: int | None = None,
    num_windows: int = 0,
    window_size: int = 0,
) -> PackedBatch:
    """Context rows at positions 0, 1, …, then query rows. Without uniforms all are NaN."""
    tokens, device = context, context.device
    positions = torch.arange(context.shape[1], device=device).expand(len(context), -1)
    if queries is not None and query_positions is not None:
        tokens, positions = torch.cat([context, queries], 1), torch.cat([positions, query_positions], 1)
    dtype = torch.float64 if uniforms is None else uniforms.dtype
    all_uniforms = torch.full(tokens.shape, torch.nan, dtype=dtype, device=device)
    if uniforms is not None:
        all_uniforms[:, context.shape[1] :] = uniforms
    length = context.shape[1] if context_length is None else context_length
    return PackedBatch(tokens, all_uniforms, positions, mask, length, num_windows, window_size)


def pack_windows(
    context_tokens: Int[Tensor, "batch context"],
    window_starts: Int[Tensor, "batch windows"],
    uniforms: Float[Tensor, "batch windows window"],
    context_length: int | None = None,
    query_start: QueryStart = "blank",
) -> PackedBatch:
    """Each window attends to the context before its start. A query whose uniform is NaN is conditioned on none.

    The context is cut before the last window, or at `context_length`.
    Errors: ValueError for a start of 0, or after the context.
    """
    batch, windows, window = uniforms.shape
    if int(window_starts.max()) > context_tokens.shape[1] or int(window_starts.min()) < 1:
        raise ValueError(
            f"a window begins at {window_starts.max()}, but the context has {context_tokens.shape[1]} tokens (and ≥ 1)"
        )
    context_tokens = context_tokens[:, : context_length or int(window_starts.max())]
    length, device = context_tokens.shape[1], context_tokens.device
    depths = torch.arange(window, device=device).repeat_interleave(windows)
    numbers = torch.arange(windows, device=device).repeat(window)
    queries = len(depths)
    mask = torch.zeros(batch, length + queries, length + queries, dtype=torch.bool, device=device)
    mask[:, :length, :length] = torch.ones(length, length, dtype=torch.bool, device=device).tril()
    mask[:, length:, :length] = torch.arange(length, device=device) < window_starts[:, numbers, None]
    mask[:, length:, length:] = (numbers[:, None] == numbers) & (depths[:, None] >= depths)
    tokens, positions = torch.full((batch, queries), NO_TOKEN, device=device), window_starts[:, numbers] + depths
    if query_start == "last-token":
        tokens[:, :windows] = context_tokens.gather(1, window_starts - 1)
        positions = positions - 1
    return pack_rows(
        context_tokens, mask, tokens, positions, uniforms.transpose(1, 2).flatten(1), num_windows=windows,
        window_size=window,
    )  # fmt: skip


def slice_rows(packed: PackedBatch, start: int, stop: int) -> PackedBatch:
    """Rows of the context alone, or whole depths of queries, and the columns up to the last of them."""
    assert stop <= packed.context_length or start >= packed.context_length
    part, context = slice(start, stop), stop <= packed.context_length
    return PackedBatch(
        packed.tokens[:, part], packed.uniforms[:, part], packed.positions[:, part], packed.mask[:, part, :stop],
        stop - start if context else 0, packed.num_windows, 0 if context else (stop - start) // packed.num_windows,
    )  # fmt: skip


def gather_windows(rows: Tensor, window_starts: Int[Tensor, "batch windows"], window_size: int) -> Tensor:
    """The rows at the windows' positions: [batch, length, …] to [batch, windows, window, …]."""
    places = window_starts[:, :, None] + torch.arange(window_size, device=window_starts.device)
    return rows[torch.arange(len(rows), device=rows.device)[:, None, None], places]


def query_uniforms(
    uniforms: Float[Tensor, "*shape window"], conditioning: UniformConditioning
) -> Float[Tensor, "*shape window"]:
    """The uniform that each query of a window is conditioned on.

    one-hot: that of its own token (O-PTP, Eq. 5). categorical: that of the token before it, none for the first
    (C-PTP, Eq. 7). independent: none.
    """
    if conditioning == "one-hot":
        return uniforms
    none = torch.full_like(uniforms, torch.nan)
    return none if conditioning == "independent" else torch.cat([none[..., :1], uniforms[..., :-1]], -1)


def valid_prefix(valid: Bool[Tensor, "*shape window"]) -> Bool[Tensor, "*shape window"]:
    """True up to the first invalid token of a window; later tokens are conditioned on a wrong uniform."""
    return valid.to(torch.uint8).cummin(-1).values.bool()
