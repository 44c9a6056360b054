"""Pack many windows of a text into one forward: the context once, and each window's queries see what they would alone.

A window begins at a split: its query d predicts the token at split + d and stands at that position, in the place of
the token it predicts. It sees the context before the split, and the queries of its own window up to itself.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from saltus.core.forward import NO_TOKEN

UniformConditioning = Literal["one-hot", "categorical", "independent"]


@dataclass(frozen=True, eq=False)
class PackedBatch:
    """One forward. Rows: the context, then the queries, depth by depth and in a depth window by window.

    So the first rows never see the later ones, and a prefix of the rows can be read first and kept in a memory.
    """

    tokens: Int[Tensor, "batch length"]
    uniforms: Float[Tensor, "batch length"]  # NaN: none is given
    positions: Int[Tensor, "batch length"]
    mask: Bool[Tensor, "batch length columns"]  # may the row see the column?
    context_length: int
    num_windows: int
    window_size: int

    def row_slice(self, start: int, stop: int) -> PackedBatch:
        """Some of the rows, and of the columns those that they may see."""
        part = slice(start, stop)
        tokens, uniforms, positions = (rows[:, part] for rows in (self.tokens, self.uniforms, self.positions))
        return replace(self, tokens=tokens, uniforms=uniforms, positions=positions, mask=self.mask[:, part, :stop])

    def to(self, device: torch.device) -> PackedBatch:
        moved = {name: part.to(device) for name, part in vars(self).items() if isinstance(part, Tensor)}
        return replace(self, **moved)

    def queries_by_window(self, rows: Tensor) -> Tensor:
        """[batch, length, …] to [batch, windows, window, …]: the queries alone."""
        queries = rows[:, self.context_length :].unflatten(1, (self.window_size, self.num_windows))
        return queries.transpose(1, 2)


def pack_windows(
    context_tokens: Int[Tensor, "batch context"],
    window_starts: Int[Tensor, "batch windows"],
    uniforms: Float[Tensor, "batch windows window"],
) -> PackedBatch:
    """Each window sees the first `split` tokens of the context. NaN among the uniforms: that query is given none."""
    batch, windows, window = uniforms.shape
    if int(window_starts.max()) > context_tokens.shape[1] or int(window_starts.min()) < 1:
        raise ValueError(
            f"a window begins at {window_starts.max()}, but the context has {context_tokens.shape[1]} tokens (and ≥ 1)"
        )
    context_tokens = context_tokens[:, : int(window_starts.max())]
    length, device = context_tokens.shape[1], context_tokens.device
    depths = torch.arange(window, device=device).repeat_interleave(windows)
    numbers = torch.arange(windows, device=device).repeat(window)
    queries = len(depths)
    mask = torch.zeros(batch, length + queries, length + queries, dtype=torch.bool, device=device)
    mask[:, :length, :length] = torch.ones(length, length, dtype=torch.bool, device=device).tril()
    before = torch.arange(length, device=device) < window_starts[:, numbers, None]
    mask[:, length:, :length] = before
    mask[:, length:, length:] = (numbers[:, None] == numbers) & (depths[:, None] >= depths)
    inputs = uniforms.transpose(1, 2).flatten(1)
    return PackedBatch(
        tokens=torch.cat([context_tokens, torch.full((batch, queries), NO_TOKEN, device=device)], 1),
        uniforms=torch.cat([torch.full((batch, length), torch.nan, dtype=inputs.dtype, device=device), inputs], 1),
        positions=torch.cat(
            [torch.arange(length, device=device).expand(batch, -1), window_starts[:, numbers] + depths], 1
        ),
        mask=mask,
        context_length=length,
        num_windows=windows,
        window_size=window,
    )


def sample_window_starts(
    batch_size: int, length: int, num_windows: int, window_size: int, generator: np.random.Generator, first: int = 1
) -> Int[Tensor, "batch windows"]:
    """Where windows begin: at random, whole windows only, spread over the text (one in each of equal parts).

    Errors: a text shorter than `first` + window tokens.
    """
    room = length - window_size - first + 1
    if room < 1:
        raise ValueError(
            f"a text of {length} tokens has no room for a window of {window_size} after {first}; take longer texts"
        )
    places = (np.arange(num_windows) + generator.random((batch_size, num_windows))) / num_windows
    return torch.from_numpy(first + (places * room).astype(np.int64))


def gather_windows(rows: Tensor, window_starts: Int[Tensor, "batch windows"], window_size: int) -> Tensor:
    """What stands at the windows' positions: [batch, length, …] to [batch, windows, window, …]."""
    places = window_starts[:, :, None] + torch.arange(window_size, device=window_starts.device)
    return rows[torch.arange(len(rows), device=rows.device)[:, None, None], places]


def query_uniforms(
    uniforms: Float[Tensor, "*shape window"], conditioning: UniformConditioning
) -> Float[Tensor, "*shape window"]:
    """The uniforms that each query of a window is given.

    one-hot: its own token's (O-PTP, Eq. 5). categorical: that of the token before it, the first none (C-PTP, Eq. 7).
    independent: none.
    """
    if conditioning == "one-hot":
        return uniforms
    none = torch.full_like(uniforms, torch.nan)
    return none if conditioning == "independent" else torch.cat([none[..., :1], uniforms[..., :-1]], -1)


def valid_prefix(valid: Bool[Tensor, "*shape window"]) -> Bool[Tensor, "*shape window"]:
    """Which tokens of a window count: those up to the first whose uniform does not say it, which misleads the later."""
    return valid.to(torch.uint8).cummin(-1).values.bool()
