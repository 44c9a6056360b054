"""Teach a decoder to fill holes anywhere: the law of any holes given the rest, in one packed call (ASSD, Eq. 7)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from saltus.networks.any_subset import ANY_SUBSET
from saltus.training.draws import draws
from saltus.training.packed_model import prepared, said
from saltus.training.windows import Packed

Order = Literal["lattice", "any"]
"""Holes are decided from left to right (Eq. 4), or in any permutation, which the paper's ablation compares."""

SPREADS = {"few": (0.05, 0.6), "narrow": (0.9, 0.99), "wide": (0.05, 0.99)}
"""Shares of a text that are holes, at the end of the warm-up."""

FIRST = 0.15  # share of a text that is holes, at first
MOST = 24  # blanks behind what fills a hole, at most, and as many more as its tokens
ALIKE = 24  # tokens by which lengths are blurred before texts of like length are taken together


@dataclass(frozen=True)
class Holes:
    """Which tokens of a text are holes: how many, whether they stand together, and whether they are all needed."""

    spread: Literal["few", "narrow", "wide"] = "wide"
    warm_up: float = 0.2  # share of the steps in which holes grow from 15 % of a text
    spans: float = 0.5  # share of the texts whose holes are a few spans, as users' are; else they stand anywhere
    order: Order = "lattice"
    # share of the texts with spans whose holes end in blanks, as they do that are too long: at first, and from half on
    open: tuple[float, float] = (0.4, 0.9)
    blank: int | None = None
    newline: int | None = None  # a token; spans are then whole lines, as in code

    def shares(self, count: int, progress: float, generator: np.random.Generator) -> Float[np.ndarray, "texts"]:
        """Of so many texts: evenly spread over the range, in random order, so that no batch misses a part of it."""
        low, high = SPREADS[self.spread]
        grown = min(progress / self.warm_up, 1.0) if self.warm_up else 1.0
        low, high = (FIRST + (end - FIRST) * grown for end in (low, high))
        places = (generator.random() + np.arange(count)) / count % 1
        return generator.permutation(low + (high - low) * places)

    def lay(
        self, text: Int[np.ndarray, "length"], share: float, generator: np.random.Generator, open_: float = 0.0
    ) -> tuple[Int[np.ndarray, "laid"], Bool[np.ndarray, "laid"]]:
        """A text and which of its tokens are holes; if these are spans, `open_` is the chance that they end in blanks.

        The first and the last token are never holes: they begin and end texts.
        """
        holes = np.zeros(len(text), dtype=bool)
        if generator.random() >= self.spans:
            holes[1:-1] = anywhere(len(text) - 2, share, generator)
            return text, holes
        inner = text[1:-1]
        if self.newline is None or not (inner == self.newline).any():
            holes[1:-1] = together(len(inner), share, generator)
        else:
            ends = inner == self.newline
            lines = np.cumsum(ends) - ends  # the number of each token's line
            chosen = np.append(together(int(lines[-1]) + 1, share, generator), False)
            holes[1:-1] = chosen[lines] & ~(ends & ~chosen[lines + 1])  # the end of the last one is given
            holes = holes if holes.any() else np.arange(len(text)) == 1
        if not open_ or self.blank is None or generator.random() >= open_:
            return text, holes
        starts = np.flatnonzero(holes[1:] & ~holes[:-1]) + 1
        stops = np.flatnonzero(holes[:-1] & ~holes[1:]) + 1
        blanks = generator.integers(0, MOST + 1 + (stops - starts))
        places = np.repeat(stops, blanks)
        return np.insert(text, places, self.blank), np.insert(holes, places, True)

    def ranks(self, holes: Bool[np.ndarray, "length"], generator: np.random.Generator) -> Int[np.ndarray, "length"]:
        """When each token is decided: 0 for those given, then from 1 on."""
        places = np.flatnonzero(holes)
        order = places if self.order == "lattice" else generator.permutation(places)
        ranks = np.zeros(len(holes), dtype=np.int64)
        ranks[order] = 1 + np.arange(len(order))
        return ranks


def anywhere(length: int, share: float, generator: np.random.Generator) -> Bool[np.ndarray, "length"]:
    """So large a share of the places, each alone; one at least."""
    holes = np.zeros(length, dtype=bool)
    holes[generator.permutation(length)[: _count(length, share)]] = True
    return holes


def together(length: int, share: float, generator: np.random.Generator) -> Bool[np.ndarray, "length"]:
    """So large a share of the places, in one to four spans."""
    count = _count(length, share)
    holes = np.zeros(length, dtype=bool)
    pieces = int(generator.integers(1, min(4, count) + 1))
    sizes = np.diff([0, *np.sort(generator.permutation(count - 1)[: pieces - 1] + 1), count])
    gaps = np.diff([0, *np.sort(generator.integers(0, length - count + 1, size=pieces)), length - count])
    at = 0
    for size, gap in zip(sizes, gaps, strict=False):
        at += int(gap)
        holes[at : at + size] = True
        at += int(size)
    return holes


def _count(length: int, share: float) -> int:
    return min(max(round(share * length), 1), length)


def pack_holes(
    tokens: Int[Tensor, "batch length"], ranks: Int[Tensor, "batch length"], mask: int, lag: int = 0
) -> tuple[Packed, Int[Tensor, "asked"], Int[Tensor, "asked"]]:
    """Content rows, then a query row for each hole; the rows that are asked, through the batch, and their tokens.

    Content sees what was decided before it, and itself; what was given (rank 0) sees all that was. A query sees what
    was decided before its hole, but for the last `lag` holes, and itself. Tokens of rank −1 are no part of the text:
    nothing sees them, and they and queries to spare see themselves alone.
    """
    batch, length = tokens.shape
    holes = ranks > 0
    most = int(holes.sum(1).max())
    places = torch.argsort(holes.int(), dim=1, descending=True, stable=True)[:, :most]  # of the holes, then of others
    real = holes.gather(1, places)
    asked = ranks.gather(1, places)
    content = ranks[:, None, :] <= ranks[:, :, None]
    visible = torch.zeros(batch, length + most, length + most, dtype=torch.bool, device=tokens.device)
    visible[:, :length, :length] = content
    knew = (asked - lag).clamp_min(1)
    visible[:, length:, :length] = (ranks[:, None, :] < knew[:, :, None]) & real[:, :, None]
    visible[:, :, :length] &= (ranks >= 0)[:, None]
    visible |= torch.eye(length + most, dtype=torch.bool, device=tokens.device)
    rows = torch.cat([tokens, torch.full_like(places, mask)], 1)
    positions = torch.cat([torch.arange(length, device=tokens.device).expand(batch, -1), places], 1)
    none = torch.full(rows.shape, torch.nan, dtype=torch.float64, device=tokens.device)
    wanted = torch.zeros_like(rows, dtype=torch.bool)
    wanted[:, length:] = real
    keep = wanted.flatten().nonzero()[:, 0]
    return Packed(rows, none, positions, visible, length + most, 0, 0), keep, tokens.gather(1, places)[real]


@dataclass(eq=False)
class AnySubsetCourse:
    """Fill the holes of texts, each given the text and the holes before it.

    Texts have three tokens or more; `held_out` ones are examined. Of the `steps` the holes' warm-up is a share.
    """

    model: Any  # a Llama of Hugging Face, whose configuration names its mask
    texts: Sequence[Int[np.ndarray, "_"]]
    held_out: Sequence[Int[np.ndarray, "_"]]
    steps: int
    batch: int = 12
    holes: Holes = field(default_factory=Holes)
    autocast: bool = False
    seed: int = 0
    module: nn.Module = field(init=False)

    def __post_init__(self) -> None:
        self.sizes = np.array([len(text) for text in self.texts])
        self.module = prepared(self.model).requires_grad_(True)
        setattr(self.module, "matrices", [one for one in self.model.model.layers.parameters() if one.ndim == 2])  # noqa: B010

    def loss(self, step: int) -> Float[Tensor, ""]:
        """Nats of a hole, on average."""
        generator = draws(self.seed, "holes", step)
        texts = [self.texts[place] for place in alike(self.sizes, self.batch, generator)]
        shares = self.holes.shares(self.batch, step / self.steps, generator)
        logits, wanted = self.say(*self.lay(texts, shares, generator, self.holes.open[2 * step >= self.steps]))
        return F.cross_entropy(logits, wanted)

    @torch.no_grad()
    def report(self) -> dict[str, float]:
        """Bits of a hole, of held-out texts, where so large a part is holes, without blanks, decided as at use."""
        self.module.eval()
        found = {}
        for share in (0.2, 0.95):
            generator = draws(1, "exam")
            parts = [self.held_out[i : i + self.batch] for i in range(0, 4 * self.batch, self.batch)]
            nats = []
            for part in filter(None, parts):
                tokens, ranks = self.lay(part, [share] * len(part), generator)
                logits, wanted = self.say(tokens, from_left_to_right(ranks))
                nats.append(float(F.cross_entropy(logits, wanted)))
            found[f"bits at {share:.0%}"] = float(np.mean(nats)) / math.log(2)
        self.module.train()
        return found

    def lay(
        self,
        texts: Sequence[Int[np.ndarray, "_"]],
        shares: Sequence[float] | np.ndarray,
        generator: np.random.Generator,
        open_: float = 0.0,
    ) -> tuple[Int[Tensor, "batch laid"], Int[Tensor, "batch laid"]]:
        """Tokens, padded behind their ends, and ranks (see `pack_holes`)."""
        laid = [self.holes.lay(text, float(share), generator, open_) for text, share in zip(texts, shares, strict=True)]
        tokens = torch.zeros(len(laid), max(len(text) for text, _ in laid), dtype=torch.long)
        ranks = torch.full_like(tokens, -1)
        for row, (text, holes) in enumerate(laid):
            tokens[row, : len(text)] = torch.from_numpy(text)
            ranks[row, : len(text)] = torch.from_numpy(self.holes.ranks(holes, generator))
        return tokens.to(self.model.device), ranks.to(self.model.device)

    def say(
        self, tokens: Int[Tensor, "batch laid"], ranks: Int[Tensor, "batch laid"], lag: int = 0
    ) -> tuple[Float[Tensor, "asked vocab"], Int[Tensor, "asked"]]:
        """Logits of the holes, text by text in deciding order's places, and their tokens."""
        mask = int(getattr(self.model.config, ANY_SUBSET)["mask"])
        packed, keep, wanted = pack_holes(tokens, ranks, mask, lag)
        with torch.autocast(tokens.device.type, torch.bfloat16, enabled=self.autocast):
            logits = said(self.model, packed, keep)
        return logits.float(), wanted


@dataclass(eq=False)
class XlnetCourse(AnySubsetCourse):
    """The same, for an XLNet of Hugging Face: its two streams are told who sees whom (Yang et al. 2019)."""

    def __post_init__(self) -> None:
        self.sizes = np.array([len(text) for text in self.texts])
        self.module = self.model.requires_grad_(True)

    def say(
        self, tokens: Int[Tensor, "batch laid"], ranks: Int[Tensor, "batch laid"], lag: int = 0
    ) -> tuple[Float[Tensor, "asked vocab"], Int[Tensor, "asked"]]:
        """Logits of the holes and their tokens; content lags as queries do, since the streams share their mask."""
        holes = ranks > 0
        knew = (ranks - lag).clamp_min(1)
        hidden = (ranks[:, None, :] >= knew[:, :, None]) | (ranks < 0)[:, None, :]
        places = torch.argsort(holes.int(), dim=1, descending=True, stable=True)[:, : int(holes.sum(1).max())]
        mapping = F.one_hot(places, tokens.shape[1])
        with torch.autocast(tokens.device.type, torch.bfloat16, enabled=self.autocast):
            logits = self.model(
                input_ids=tokens, perm_mask=hidden.float(), target_mapping=mapping.float(), use_mems=False
            ).logits
        real = holes.gather(1, places)
        return logits[real].float(), tokens.gather(1, places)[real]


def from_left_to_right(ranks: Int[Tensor, "batch laid"]) -> Int[Tensor, "batch laid"]:
    """The same holes, decided in lattice order."""
    holes = ranks > 0
    return torch.where(holes, holes.cumsum(1), ranks)


def alike(sizes: Int[np.ndarray, "texts"], count: int, generator: np.random.Generator) -> Int[np.ndarray, "count"]:
    """Texts of about one length, so that little of a batch is padding; each text is as likely as any other.

    For that the longest and the shortest are neighbours, too, now and then.
    """
    order = np.argsort(sizes + generator.uniform(0, ALIKE, len(sizes)))
    first = int(generator.integers(len(sizes)))
    return order[(first + np.arange(count)) % len(sizes)]
