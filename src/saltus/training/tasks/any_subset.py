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

from saltus.networks.models.any_subset import ANY_SUBSET
from saltus.training.data.packed_forward import packed_logits, prepare_model
from saltus.training.data.seeded_generator import seeded_generator
from saltus.training.data.window_packing import PackedBatch

HoleOrder = Literal["lattice", "any"]
"""Holes are decided from left to right (Eq. 4), or in any permutation, which the paper's ablation compares."""

HOLE_FRACTION_RANGES = {"few": (0.05, 0.6), "narrow": (0.9, 0.99), "wide": (0.05, 0.99)}
"""Shares of a text that are holes, at the end of the warm-up."""

INITIAL_HOLE_FRACTION = 0.15  # share of a text that is holes, at first
MAX_EXTRA_BLANKS = 24  # blanks behind what fills a hole, at most, and as many more as its tokens
LENGTH_JITTER = 24  # tokens by which lengths are blurred before texts of like length are taken together


@dataclass(frozen=True)
class HoleSettings:
    """Which tokens of a text are holes: how many, whether they stand together, and whether they are all needed."""

    fraction_range: Literal["few", "narrow", "wide"] = "wide"
    warm_up_fraction: float = 0.2  # share of the steps in which holes grow from 15 % of a text
    span_probability: float = (
        0.5  # share of the texts whose holes are a few spans, as users' are; else they stand anywhere
    )
    order: HoleOrder = "lattice"
    # share of the texts with spans whose holes end in blanks, as they do that are too long: at first, and from half on
    blank_probability: tuple[float, float] = (0.4, 0.9)
    blank_token: int | None = None
    newline_token: int | None = None  # a token; spans are then whole lines, as in code

    def hole_fractions(self, count: int, progress: float, generator: np.random.Generator) -> Float[np.ndarray, "texts"]:
        """Of so many texts: evenly spread over the range, in random order, so that no batch misses a part of it."""
        low, high = HOLE_FRACTION_RANGES[self.fraction_range]
        grown = min(progress / self.warm_up_fraction, 1.0) if self.warm_up_fraction else 1.0
        low, high = (INITIAL_HOLE_FRACTION + (end - INITIAL_HOLE_FRACTION) * grown for end in (low, high))
        places = (generator.random() + np.arange(count)) / count % 1
        return generator.permutation(low + (high - low) * places)

    def place_holes(
        self,
        text: Int[np.ndarray, "length"],
        fraction: float,
        generator: np.random.Generator,
        blank_probability: float = 0.0,
    ) -> tuple[Int[np.ndarray, "laid"], Bool[np.ndarray, "laid"]]:
        """A text and which of its tokens are holes; if these are spans, `open_` is the chance that they end in blanks.

        The first and the last token are never holes: they begin and end texts.
        """
        holes = np.zeros(len(text), dtype=bool)
        if generator.random() >= self.span_probability:
            holes[1:-1] = random_holes(len(text) - 2, fraction, generator)
            return text, holes
        inner = text[1:-1]
        if self.newline_token is None or not (inner == self.newline_token).any():
            holes[1:-1] = span_holes(len(inner), fraction, generator)
        else:
            ends = inner == self.newline_token
            lines = np.cumsum(ends) - ends  # the number of each token's line
            chosen = np.append(span_holes(int(lines[-1]) + 1, fraction, generator), False)
            holes[1:-1] = chosen[lines] & ~(ends & ~chosen[lines + 1])  # the end of the last one is given
            holes = holes if holes.any() else np.arange(len(text)) == 1
        if not blank_probability or self.blank_token is None or generator.random() >= blank_probability:
            return text, holes
        starts = np.flatnonzero(holes[1:] & ~holes[:-1]) + 1
        stops = np.flatnonzero(holes[:-1] & ~holes[1:]) + 1
        blanks = generator.integers(0, MAX_EXTRA_BLANKS + 1 + (stops - starts))
        places = np.repeat(stops, blanks)
        return np.insert(text, places, self.blank_token), np.insert(holes, places, True)

    def decoding_ranks(
        self, holes: Bool[np.ndarray, "length"], generator: np.random.Generator
    ) -> Int[np.ndarray, "length"]:
        """When each token is decided: 0 for those given, then from 1 on."""
        places = np.flatnonzero(holes)
        order = places if self.order == "lattice" else generator.permutation(places)
        ranks = np.zeros(len(holes), dtype=np.int64)
        ranks[order] = 1 + np.arange(len(order))
        return ranks


def random_holes(length: int, fraction: float, generator: np.random.Generator) -> Bool[np.ndarray, "length"]:
    """So large a share of the places, each alone; one at least."""
    holes = np.zeros(length, dtype=bool)
    holes[generator.permutation(length)[: _num_holes(length, fraction)]] = True
    return holes


def span_holes(length: int, fraction: float, generator: np.random.Generator) -> Bool[np.ndarray, "length"]:
    """So large a share of the places, in one to four spans."""
    count = _num_holes(length, fraction)
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


def _num_holes(length: int, fraction: float) -> int:
    return min(max(round(fraction * length), 1), length)


def pack_holes(
    tokens: Int[Tensor, "batch length"], ranks: Int[Tensor, "batch length"], mask_token: int, num_unknown: int = 0
) -> tuple[PackedBatch, Int[Tensor, "asked"], Int[Tensor, "asked"]]:
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
    inputs = ranks.gather(1, places)
    content = ranks[:, None, :] <= ranks[:, :, None]
    visible = torch.zeros(batch, length + most, length + most, dtype=torch.bool, device=tokens.device)
    visible[:, :length, :length] = content
    knew = (inputs - num_unknown).clamp_min(1)
    visible[:, length:, :length] = (ranks[:, None, :] < knew[:, :, None]) & real[:, :, None]
    visible[:, :, :length] &= (ranks >= 0)[:, None]
    visible |= torch.eye(length + most, dtype=torch.bool, device=tokens.device)
    rows = torch.cat([tokens, torch.full_like(places, mask_token)], 1)
    positions = torch.cat([torch.arange(length, device=tokens.device).expand(batch, -1), places], 1)
    none = torch.full(rows.shape, torch.nan, dtype=torch.float64, device=tokens.device)
    wanted = torch.zeros_like(rows, dtype=torch.bool)
    wanted[:, length:] = real
    keep = wanted.flatten().nonzero()[:, 0]
    return PackedBatch(rows, none, positions, visible, length + most, 0, 0), keep, tokens.gather(1, places)[real]


@dataclass(eq=False)
class AnySubsetTrainingTask:
    """Fill the holes of texts, each given the text and the holes before it.

    Texts have three tokens or more; `held_out` ones are examined. Of the `steps` the holes' warm-up is a share.
    """

    model: Any  # a Llama of Hugging Face, whose configuration names its mask
    texts: Sequence[Int[np.ndarray, "_"]]
    validation_texts: Sequence[Int[np.ndarray, "_"]]
    num_steps: int
    batch_size: int = 12
    hole_settings: HoleSettings = field(default_factory=HoleSettings)
    autocast: bool = False
    seed: int = 0
    module: nn.Module = field(init=False)

    def __post_init__(self) -> None:
        self.lengths = np.array([len(text) for text in self.texts])
        self.module = prepare_model(self.model).requires_grad_(True)
        setattr(self.module, "matrices", [one for one in self.model.model.layers.parameters() if one.ndim == 2])  # noqa: B010

    def loss(self, step: int) -> Float[Tensor, ""]:
        """Nats of a hole, on average."""
        generator = seeded_generator(self.seed, "holes", step)
        texts = [self.texts[place] for place in sample_similar_lengths(self.lengths, self.batch_size, generator)]
        shares = self.hole_settings.hole_fractions(self.batch_size, step / self.num_steps, generator)
        logits, wanted = self.hole_logits(
            *self.make_batch(texts, shares, generator, self.hole_settings.blank_probability[2 * step >= self.num_steps])
        )
        return F.cross_entropy(logits, wanted)

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        """Bits of a hole, of held-out texts, where so large a part is holes, without blanks, decided as at use."""
        self.module.eval()
        found = {}
        for share in (0.2, 0.95):
            generator = seeded_generator(1, "exam")
            parts = [
                self.validation_texts[i : i + self.batch_size] for i in range(0, 4 * self.batch_size, self.batch_size)
            ]
            nats = []
            for part in filter(None, parts):
                tokens, ranks = self.make_batch(part, [share] * len(part), generator)
                logits, wanted = self.hole_logits(tokens, lattice_ranks(ranks))
                nats.append(float(F.cross_entropy(logits, wanted)))
            found[f"bits at {share:.0%}"] = float(np.mean(nats)) / math.log(2)
        self.module.train()
        return found

    def make_batch(
        self,
        texts: Sequence[Int[np.ndarray, "_"]],
        fractions: Sequence[float] | np.ndarray,
        generator: np.random.Generator,
        blank_probability: float = 0.0,
    ) -> tuple[Int[Tensor, "batch laid"], Int[Tensor, "batch laid"]]:
        """Tokens, padded behind their ends, and ranks (see `pack_holes`)."""
        laid = [
            self.hole_settings.place_holes(text, float(share), generator, blank_probability)
            for text, share in zip(texts, fractions, strict=True)
        ]
        tokens = torch.zeros(len(laid), max(len(text) for text, _ in laid), dtype=torch.long)
        ranks = torch.full_like(tokens, -1)
        for row, (text, holes) in enumerate(laid):
            tokens[row, : len(text)] = torch.from_numpy(text)
            ranks[row, : len(text)] = torch.from_numpy(self.hole_settings.decoding_ranks(holes, generator))
        return tokens.to(self.model.device), ranks.to(self.model.device)

    def hole_logits(
        self, tokens: Int[Tensor, "batch laid"], ranks: Int[Tensor, "batch laid"], num_unknown: int = 0
    ) -> tuple[Float[Tensor, "asked vocab"], Int[Tensor, "asked"]]:
        """Logits of the holes, text by text in deciding order's places, and their tokens."""
        mask = int(getattr(self.model.config, ANY_SUBSET)["mask"])
        packed, keep, wanted = pack_holes(tokens, ranks, mask, num_unknown)
        with torch.autocast(tokens.device.type, torch.bfloat16, enabled=self.autocast):
            logits = packed_logits(self.model, packed, keep)
        return logits.float(), wanted


@dataclass(eq=False)
class XlnetTrainingTask(AnySubsetTrainingTask):
    """The same, for an XLNet of Hugging Face: its two streams are told who sees whom (Yang et al. 2019)."""

    def __post_init__(self) -> None:
        self.lengths = np.array([len(text) for text in self.texts])
        self.module = self.model.requires_grad_(True)

    def hole_logits(
        self, tokens: Int[Tensor, "batch laid"], ranks: Int[Tensor, "batch laid"], num_unknown: int = 0
    ) -> tuple[Float[Tensor, "asked vocab"], Int[Tensor, "asked"]]:
        """Logits of the holes and their tokens; content lags as queries do, since the streams share their mask."""
        holes = ranks > 0
        knew = (ranks - num_unknown).clamp_min(1)
        hidden = (ranks[:, None, :] >= knew[:, :, None]) | (ranks < 0)[:, None, :]
        places = torch.argsort(holes.int(), dim=1, descending=True, stable=True)[:, : int(holes.sum(1).max())]
        mapping = F.one_hot(places, tokens.shape[1])
        with torch.autocast(tokens.device.type, torch.bfloat16, enabled=self.autocast):
            logits = self.model(
                input_ids=tokens, perm_mask=hidden.float(), target_mapping=mapping.float(), use_mems=False
            ).logits
        real = holes.gather(1, places)
        return logits[real].float(), tokens.gather(1, places)[real]


def lattice_ranks(ranks: Int[Tensor, "batch laid"]) -> Int[Tensor, "batch laid"]:
    """The same holes, decided in lattice order."""
    holes = ranks > 0
    return torch.where(holes, holes.cumsum(1), ranks)


def sample_similar_lengths(
    lengths: Int[np.ndarray, "texts"], count: int, generator: np.random.Generator
) -> Int[np.ndarray, "count"]:
    """Texts of about one length, so that little of a batch is padding; each text is as likely as any other.

    For that the longest and the shortest are neighbours, too, now and then.
    """
    order = np.argsort(lengths + generator.uniform(0, LENGTH_JITTER, len(lengths)))
    first = int(generator.integers(len(lengths)))
    return order[(first + np.arange(count)) % len(lengths)]
