"""Cut windows from texts: at random places to learn from, and always the same ones of held-out texts to examine."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from saltus.core.noise import Noise
from saltus.training.data.seeded_generator import seeded_generator
from saltus.training.data.uniform_intervals import UniformIntervals, sample_uniforms
from saltus.training.data.window_packing import gather_windows, valid_prefix


@dataclass(frozen=True)
class WindowSettings:
    """What a drafter is taught."""

    texts: int = 6  # of a batch
    windows: int = 60  # of a text
    discount: float = 0.85  # weight of a query relative to the one before it: it counts only if that is right
    placement: float = 1.0  # b of Beta(b, b): where u lies between its edges (PTP, App. D)
    laws: float = 0.5  # weight of the target's own laws in what drafters and heads learn; adapters have a loss for that
    greedy: float = 0.7  # share of windows at temperature 0, of texts that were written so
    slots: int = 384  # of a text at most
    held_out: float = 0.04  # share of the texts
    seed: int = 0


@runtime_checkable
class Corpus(Protocol):
    """Texts end to end, and the edges of their tokens, as in `States`."""

    @property
    def tokens(self) -> Int[Tensor, "tokens"]: ...
    @property
    def uniform_intervals(self) -> Float[Tensor, "temperatures tokens 2"]: ...
    @property
    def text_table(self) -> np.ndarray:
        """[texts, 4]: start, prompt length, length, temperature × 1,000."""
        ...

    @property
    def temperatures(self) -> tuple[float, ...]: ...


@dataclass(frozen=True, eq=False)
class Batch:
    """Windows of some texts, which begin at `splits`: what their queries should say, and what that depends on."""

    corpus_rows: Int[Tensor, "batch slots"]  # places of the texts' tokens in the corpus
    tokens: Int[Tensor, "batch slots"]
    window_starts: Int[Tensor, "batch windows"]  # slots before each window
    targets: Int[Tensor, "batch windows window"]
    uniforms: Float[Tensor, "batch windows window"]  # that pick the targets; NaN at temperature 0
    temperatures: Float[Tensor, "batch windows"]  # 0 is greedy
    loss_mask: Bool[Tensor, "batch windows window"]  # do they count? Not behind a text's end, or a u that misleads

    def to(self, device: torch.device) -> Batch:
        return Batch(*(part.to(device) for part in vars(self).values()))


def select_validation(prompts: Sequence[bytes], fraction: float, seed: int) -> np.ndarray:
    """Which texts are held out, by their prompts: a share of them, with all answers to a prompt. Errors: ValueError."""
    first: dict[bytes, int] = {}
    ranks = Noise(seed).uniforms(
        "held out", np.array([first.setdefault(one, number) for number, one in enumerate(prompts)])
    )
    chosen = ranks <= np.sort(ranks)[max(1, math.ceil(fraction * len(prompts))) - 1]
    if chosen.all():
        raise ValueError("all texts answer the same prompt, and none can be held out; collect answers to others")
    return chosen


@dataclass(eq=False)
class WindowDataset:
    """The windows of every step: functions of the seed and of its number.

    `whole`: contexts begin where texts do, and what is behind the slots is left out. Otherwise the ends of texts are
    kept, behind one token at least: for drafters, whose first slot has a state of what came before.
    `faithful`: windows have the temperature of their text alone, for students who learn laws. A text is a sample of
    the laws at that temperature only; told their uniforms, its tokens are right at any.
    """

    corpus: Corpus
    settings: WindowSettings
    window: int
    from_text_start: bool = False
    own_temperature_only: bool = False
    validation_table: np.ndarray = field(init=False)
    training_table: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        texts = self.corpus.text_table.copy()
        if self.from_text_start:
            texts[:, 2] = np.minimum(texts[:, 2], self.settings.slots)
        texts = texts[texts[:, 2] > texts[:, 1] + 1]
        if len(texts) < 2:
            raise ValueError(
                "there are fewer than two texts to learn from and to hold out; collect more, or longer ones"
            )
        prompts = [self.corpus.tokens[begin : begin + length].numpy().tobytes() for begin, length, *_ in texts]
        chosen = select_validation(prompts, self.settings.held_out, self.settings.seed)
        self.validation_table, own = texts[chosen], texts[~chosen]
        self.training_table = own[np.argsort(own[:, 2], kind="stable")]  # a batch holds texts of like length
        if self.own_temperature_only:
            self._temperature_indices(texts[texts[:, 3] > 0, 3])

    def training_batch(self, step: int) -> Batch:
        """The windows of a training step."""
        generator = seeded_generator(self.settings.seed, "batch", step)
        count = min(self.settings.texts, len(self.training_table))
        first = int(generator.integers(len(self.training_table) - count + 1))
        return self.make_batch(
            self.training_table[first : first + count], generator, self.settings.windows, self.settings.greedy
        )

    def validation_batches(self, greedy: bool, num_windows: int = 8, num_texts: int = 8) -> Iterator[Batch]:
        """Windows of held-out texts, those written greedily, or those that were sampled; always the same."""
        chosen = self.validation_table[(self.validation_table[:, 3] == 0) == greedy]
        for number in range(0, len(chosen), num_texts):
            yield self.make_batch(
                chosen[number : number + num_texts], seeded_generator(1, "exam", number), num_windows, float(greedy)
            )

    def make_batch(
        self, text_table: np.ndarray, generator: np.random.Generator, num_windows: int, greedy_fraction: float
    ) -> Batch:
        """Windows at random places of texts' completions, `greedy` of them at temperature 0 if they were written so."""
        begins, prompts, lengths, written = text_table.T
        firsts = np.maximum(0 if self.from_text_start else 1, lengths - self.settings.slots)
        low = np.maximum(prompts, firsts + 1)
        splits = low[:, None] + (generator.random((len(text_table), num_windows)) * (lengths - low)[:, None]).astype(
            np.int64
        )
        here = np.minimum(firsts[:, None] + np.arange(int((lengths - firsts).max())), lengths[:, None] - 1)
        rows = torch.from_numpy(begins[:, None] + here)
        own = torch.from_numpy(splits - firsts[:, None])
        padded = torch.cat([rows, rows[:, -1:].expand(-1, self.window)], 1)
        inputs = gather_windows(padded, own, self.window)
        known = own[..., None] + torch.arange(self.window) < torch.from_numpy(lengths - firsts)[:, None, None]
        which = torch.from_numpy(generator.integers(len(self.corpus.temperatures), size=splits.shape))
        if self.own_temperature_only:
            which = torch.from_numpy(self._temperature_indices(written))[:, None].expand_as(which)
            greedy_fraction = 1.0
        found = self.corpus.uniform_intervals[which[..., None], inputs]
        uniforms, holds = sample_uniforms(
            UniformIntervals(found[..., 0], found[..., 1]), generator, self.settings.placement
        )
        cold = torch.from_numpy((generator.random(splits.shape) < greedy_fraction) & (written == 0)[:, None])
        temperatures = torch.tensor(self.corpus.temperatures, dtype=torch.float64)[which]
        return Batch(
            corpus_rows=rows,
            tokens=self.corpus.tokens[rows],
            window_starts=own,
            targets=self.corpus.tokens[inputs],
            uniforms=torch.where(cold[..., None], torch.nan, uniforms),
            temperatures=torch.where(cold, 0.0, temperatures),
            loss_mask=valid_prefix(known & (holds | cold[..., None])),
        )

    def _temperature_indices(self, text_temperatures: np.ndarray) -> np.ndarray:
        """Which of the edges' temperatures texts were written at; any for greedy ones."""
        known = np.round(1000 * np.array(self.corpus.temperatures)).astype(np.int64)
        missing = np.setdiff1d(text_temperatures[text_temperatures > 0], known)
        if len(missing):
            raise ValueError(
                f"a student of laws learns at the temperature that a text was written at, but there are no edges at"
                f" {missing[0] / 1000:g}; collect them at that temperature too"
            )
        return (text_temperatures[:, None] == known).argmax(1)
