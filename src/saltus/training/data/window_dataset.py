"""Batches of windows: random ones of training texts, and always the same ones of held-out texts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from numpy.typing import ArrayLike
from torch import Tensor

from saltus.core.noise import Noise
from saltus.core.picking import Coupling
from saltus.core.value_types import require_at_least
from saltus.training.data.seeded_generator import seeded_generator
from saltus.training.data.similar_lengths import sample_similar_lengths
from saltus.training.data.uniform_intervals import UniformIntervals, sample_uniforms
from saltus.training.data.window_packing import gather_windows, valid_prefix

VALIDATION_TEXTS = 8  # of a batch
SAME_PROMPT = "all texts answer the same prompt, and none can be held out; collect answers to others"


@dataclass(frozen=True)
class WindowSettings:
    """The training windows. The fields are the keys of a recipe's table [data]."""

    batch_size: int = 6  # texts of a step
    windows_per_text: int = 60
    discount: float = 0.85  # weight of a query relative to the one before it: a draft is useless after a wrong one
    uniform_beta: float = 1.0  # b of Beta(b, b): the position of u inside its interval (PTP, App. D)
    distillation_weight: float = 0.5  # weight of the target's own distributions in the loss of drafters and heads
    greedy_fraction: float = 0.7  # fraction of windows at temperature 0, in texts that were written greedily
    max_length: int = 384  # the longest text, in tokens
    validation_fraction: float = 0.04  # fraction of the prompts, or of texts without one
    seed: int = 0

    def __post_init__(self) -> None:
        require_at_least(self, batch_size=1, windows_per_text=1)
        if self.max_length < 2:
            raise ValueError(f"max_length is {self.max_length}, but a text has 2 tokens or more; take more")
        for name in ("discount", "uniform_beta"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name)}, but must be above 0")
        if not self.distillation_weight >= 0:
            raise ValueError(f"distillation_weight is {self.distillation_weight}, but must be 0 or more")
        if not 0 <= self.greedy_fraction <= 1:
            raise ValueError(f"greedy_fraction is {self.greedy_fraction}, but is a fraction, in [0, 1]")
        if not 0 <= self.validation_fraction < 1:
            raise ValueError(f"validation_fraction is {self.validation_fraction}, but is a fraction, in [0, 1)")
        Noise(self.seed)  # it refuses a negative one


@runtime_checkable
class Corpus(Protocol):
    """Concatenated texts, and the uniform intervals of their tokens."""

    @property
    def tokens(self) -> Int[Tensor, "tokens"]:
        """The ids of all texts, each with its prompt, one after the other."""
        ...

    @property
    def uniform_intervals(self) -> Float[Tensor, "temperatures tokens 2"]:
        """Where a uniform must lie to pick the token; NaN without uniforms, (0, 0) for the tokens of prompts."""
        ...

    @property
    def text_table(self) -> np.ndarray:
        """[texts, 4]: start, prompt length, length, temperature × 1,000."""
        ...

    @property
    def temperatures(self) -> tuple[float, ...]:
        """Those of the intervals, in their order."""
        ...

    @property
    def coupling(self) -> Coupling:
        """Whose uniforms the intervals are for."""
        ...


@dataclass(frozen=True, eq=False)
class Batch:
    """Windows of some texts: the targets of their queries, and what the queries are conditioned on."""

    corpus_rows: Int[Tensor, "batch slots"]  # of the texts' tokens
    tokens: Int[Tensor, "batch slots"]
    window_starts: Int[Tensor, "batch windows"]  # number of context tokens before each window
    targets: Int[Tensor, "batch windows window"]
    target_rows: Int[Tensor, "batch windows window"]  # the targets' rows in the corpus
    uniforms: Float[Tensor, "batch windows window"]  # they pick the targets; NaN: none, as when greedy
    temperatures: Float[Tensor, "batch windows"]  # 0 is greedy
    loss_mask: Bool[Tensor, "batch windows window"]  # False after a text's end, or after an invalid u
    inside: Bool[Tensor, "batch windows window"]  # False after a text's end

    def to(self, device: torch.device) -> Batch:
        """The same on a device."""
        return Batch(*(part.to(device) for part in vars(self).values()))

    def leading(self, window: int) -> Batch:
        """The first tokens of each window, `window` of them."""
        names = ("targets", "target_rows", "uniforms", "loss_mask", "inside")
        return replace(self, **{name: getattr(self, name)[..., :window] for name in names})

    def select(self, texts: slice) -> Batch:
        """The windows of some of the texts."""
        return Batch(*(part[texts] for part in vars(self).values()))


def select_validation(prompts: Sequence[ArrayLike], fraction: float, seed: int) -> np.ndarray:
    """True for held-out texts: those with this fraction of all possible prompts, whatever other texts there are.

    But one prompt at least is held out, and one is not. Errors: ValueError for texts of a single prompt.
    """
    ranks = np.array([_prompt_rank(prompt, seed) for prompt in prompts])
    held_out = (ranks <= max(fraction, ranks.min())) & (ranks < ranks.max())
    if not held_out.any():
        raise ValueError(SAME_PROMPT)
    return held_out


def _prompt_rank(prompt: ArrayLike, seed: int) -> float:
    """A uniform number, a function of the prompt's tokens and the seed."""
    digest = blake2b(np.asarray(prompt, dtype="<i8").tobytes(), digest_size=8).digest()
    return seeded_generator(seed, "held out", int.from_bytes(digest)).random()


@dataclass(eq=False)
class WindowDataset:
    """The batch of every step, as a function of the seed and the step number.

    `from_text_start`: a context begins where its text does, and texts are truncated to `max_length` tokens. Otherwise
    the last `max_length` tokens are kept, but never the first token: a drafter needs a state before each.
    `own_temperature_only`: windows have their text's temperature, for students that learn distributions. A text is a
    sample of the distributions at that temperature only; given their uniforms, its tokens are targets at any.
    """

    corpus: Corpus
    settings: WindowSettings
    window: int
    from_text_start: bool = False
    own_temperature_only: bool = False
    held_out: np.ndarray | None = None  # True for the corpus's texts that are held out; None: a fraction of them
    validation_table: np.ndarray = field(init=False)
    training_table: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        texts = self.corpus.text_table.copy()
        if self.from_text_start:
            texts[:, 2] = np.minimum(texts[:, 2], self.settings.max_length)
        long_enough = texts[:, 2] > texts[:, 1] + 1
        texts, whole_texts = texts[long_enough], self.corpus.text_table[long_enough]
        if self.held_out is None and len(texts) < 2:
            raise ValueError(
                "there are fewer than two texts to learn from and to hold out; collect more, or longer ones"
            )
        held_out = self._select_validation(whole_texts) if self.held_out is None else self.held_out[long_enough]
        self.validation_table, self.training_table = texts[held_out], texts[~held_out]
        if self.own_temperature_only:
            self._temperature_indices(texts[texts[:, 3] > 0, 3])

    @property
    def batch_size(self) -> int:
        """Texts of a training step."""
        return min(self.settings.batch_size, len(self.training_table))

    def _select_validation(self, texts: np.ndarray) -> np.ndarray:
        # a single token is no question: where texts have no prompt, their first token takes its place
        ends = np.where(texts[:, 1] > 1, texts[:, 1], texts[:, 2])
        parts = zip(texts[:, 0], ends, strict=True)
        prompts = [self.corpus.tokens[begin : begin + length].numpy() for begin, length in parts]
        return select_validation(prompts, self.settings.validation_fraction, self.settings.seed)

    def training_batch(self, step: int) -> Batch:
        """The batch of a training step."""
        generator = seeded_generator(self.settings.seed, "batch", step)
        chosen = sample_similar_lengths(self.training_table[:, 2], self.batch_size, generator)
        windows, greedy = self.settings.windows_per_text, self.settings.greedy_fraction
        return self.make_batch(self.training_table[chosen], generator, windows, greedy)

    def validation_batches(self, greedy: bool, num_windows: int = 8) -> Iterator[Batch]:
        """Windows of held-out texts, either those written greedily or those that were sampled."""
        chosen = self.validation_table[(self.validation_table[:, 3] == 0) == greedy]
        for number in range(0, len(chosen), VALIDATION_TEXTS):
            texts, generator = chosen[number : number + VALIDATION_TEXTS], seeded_generator(1, "exam", number)
            yield self.make_batch(texts, generator, num_windows, float(greedy))

    def make_batch(
        self, text_table: np.ndarray, generator: np.random.Generator, num_windows: int, greedy_fraction: float
    ) -> Batch:
        """Windows at random positions of completions; in texts written greedily this fraction is at temperature 0."""
        begins, prompts, lengths, text_temperatures = text_table.T
        firsts = np.maximum(0 if self.from_text_start else 1, lengths - self.settings.max_length)
        low = np.maximum(prompts, firsts + 1)
        shape = len(text_table), num_windows
        starts = low[:, None] + (generator.random(shape) * (lengths - low)[:, None]).astype(np.int64)
        positions = np.minimum(firsts[:, None] + np.arange(int((lengths - firsts).max())), lengths[:, None] - 1)
        rows = torch.from_numpy(begins[:, None] + positions)
        window_starts = torch.from_numpy(starts - firsts[:, None])
        padded = torch.cat([rows, rows[:, -1:].expand(-1, self.window)], 1)
        target_rows = gather_windows(padded, window_starts, self.window)
        inside = (
            window_starts[..., None] + torch.arange(self.window) < torch.from_numpy(lengths - firsts)[:, None, None]
        )
        indices = torch.from_numpy(generator.integers(len(self.corpus.temperatures), size=shape))
        if self.own_temperature_only:
            indices = torch.from_numpy(self._temperature_indices(text_temperatures))[:, None].expand_as(indices)
            greedy_fraction = 1.0
        intervals = self.corpus.uniform_intervals[indices[..., None], target_rows]
        uniforms, valid = sample_uniforms(
            UniformIntervals(intervals[..., 0], intervals[..., 1]), generator, self.settings.uniform_beta
        )
        greedy = torch.from_numpy((generator.random(shape) < greedy_fraction) & (text_temperatures == 0)[:, None])
        temperatures = torch.tensor(self.corpus.temperatures, dtype=torch.float64)[indices]
        return Batch(
            corpus_rows=rows,
            tokens=self.corpus.tokens[rows],
            window_starts=window_starts,
            targets=self.corpus.tokens[target_rows],
            target_rows=target_rows,
            uniforms=torch.where(greedy[..., None], torch.nan, uniforms),
            temperatures=torch.where(greedy, 0.0, temperatures),
            loss_mask=valid_prefix(inside & (valid | uniforms.isnan() | greedy[..., None])),
            inside=inside,
        )

    def _temperature_indices(self, text_temperatures: np.ndarray) -> np.ndarray:
        """The index of each text's temperature in the corpus; arbitrary for greedy texts."""
        known = np.round(1000 * np.array(self.corpus.temperatures)).astype(np.int64)
        missing = np.setdiff1d(text_temperatures[text_temperatures > 0], known)
        if len(missing):
            raise ValueError(
                f"a student of distributions learns at the temperature of each text, but there are no intervals at"
                f" {missing[0] / 1000:g}; collect them at that temperature too"
            )
        return (text_temperatures[:, None] == known).argmax(1)
