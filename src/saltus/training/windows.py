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

from saltus.core.forward import AUXILIARY

Form = Literal["one-hot", "categorical", "independent"]


@dataclass(frozen=True, eq=False)
class Packed:
    """One forward. Rows: the context, then the queries, depth by depth and in a depth window by window.

    So the first rows never see the later ones, and a prefix of the rows can be read first and kept in a memory.
    """

    tokens: Int[Tensor, "batch length"]
    uniforms: Float[Tensor, "batch length"]  # NaN: none is given
    positions: Int[Tensor, "batch length"]
    mask: Bool[Tensor, "batch length columns"]  # may the row see the column?
    context: int
    windows: int
    window: int

    def rows(self, start: int, stop: int) -> Packed:
        """Some of the rows, and of the columns those that they may see."""
        part = slice(start, stop)
        tokens, uniforms, positions = (rows[:, part] for rows in (self.tokens, self.uniforms, self.positions))
        return replace(self, tokens=tokens, uniforms=uniforms, positions=positions, mask=self.mask[:, part, :stop])

    def to(self, device: torch.device) -> Packed:
        moved = {name: part.to(device) for name, part in vars(self).items() if isinstance(part, Tensor)}
        return replace(self, **moved)

    def by_window(self, rows: Tensor) -> Tensor:
        """[batch, length, …] to [batch, windows, window, …]: the queries alone."""
        queries = rows[:, self.context :].unflatten(1, (self.window, self.windows))
        return queries.transpose(1, 2)


def pack(
    context: Int[Tensor, "batch context"],
    splits: Int[Tensor, "batch windows"],
    uniforms: Float[Tensor, "batch windows window"],
) -> Packed:
    """Each window sees the first `split` tokens of the context. NaN among the uniforms: that query is given none."""
    batch, windows, window = uniforms.shape
    if int(splits.max()) > context.shape[1] or int(splits.min()) < 1:
        raise ValueError(f"a window begins at {splits.max()}, but the context has {context.shape[1]} tokens (and ≥ 1)")
    context = context[:, : int(splits.max())]
    length, device = context.shape[1], context.device
    depths = torch.arange(window, device=device).repeat_interleave(windows)
    numbers = torch.arange(windows, device=device).repeat(window)
    queries = len(depths)
    mask = torch.zeros(batch, length + queries, length + queries, dtype=torch.bool, device=device)
    mask[:, :length, :length] = torch.ones(length, length, dtype=torch.bool, device=device).tril()
    before = torch.arange(length, device=device) < splits[:, numbers, None]
    mask[:, length:, :length] = before
    mask[:, length:, length:] = (numbers[:, None] == numbers) & (depths[:, None] >= depths)
    asked = uniforms.transpose(1, 2).flatten(1)
    return Packed(
        tokens=torch.cat([context, torch.full((batch, queries), AUXILIARY, device=device)], 1),
        uniforms=torch.cat([torch.full((batch, length), torch.nan, dtype=asked.dtype, device=device), asked], 1),
        positions=torch.cat([torch.arange(length, device=device).expand(batch, -1), splits[:, numbers] + depths], 1),
        mask=mask,
        context=length,
        windows=windows,
        window=window,
    )


def split_points(
    batch: int, length: int, windows: int, window: int, generator: np.random.Generator, first: int = 1
) -> Int[Tensor, "batch windows"]:
    """Where windows begin: at random, whole windows only, spread over the text (one in each of equal parts).

    Errors: a text shorter than `first` + window tokens.
    """
    room = length - window - first + 1
    if room < 1:
        raise ValueError(
            f"a text of {length} tokens has no room for a window of {window} after {first}; take longer texts"
        )
    places = (np.arange(windows) + generator.random((batch, windows))) / windows
    return torch.from_numpy(first + (places * room).astype(np.int64))


def inside(rows: Tensor, splits: Int[Tensor, "batch windows"], window: int) -> Tensor:
    """What stands at the windows' positions: [batch, length, …] to [batch, windows, window, …]."""
    places = splits[:, :, None] + torch.arange(window, device=splits.device)
    return rows[torch.arange(len(rows), device=rows.device)[:, None, None], places]


def given(uniforms: Float[Tensor, "*shape window"], form: Form) -> Float[Tensor, "*shape window"]:
    """The uniforms that each query of a window is given.

    one-hot: its own token's (O-PTP, Eq. 5). categorical: that of the token before it, the first none (C-PTP, Eq. 7).
    independent: none.
    """
    if form == "one-hot":
        return uniforms
    none = torch.full_like(uniforms, torch.nan)
    return none if form == "independent" else torch.cat([none[..., :1], uniforms[..., :-1]], -1)


def followed(holds: Bool[Tensor, "*shape window"]) -> Bool[Tensor, "*shape window"]:
    """Which tokens of a window count: those up to the first whose uniform does not say it, which misleads the later."""
    return holds.to(torch.uint8).cummin(-1).values.bool()
