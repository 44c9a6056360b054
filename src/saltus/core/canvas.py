"""Hold a text with holes: continuing a prompt is filling the holes that stand at its end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

HOLE = -1


@dataclass(frozen=True)
class Canvas:
    """A text with holes, and the order in which they are decided."""

    tokens: np.ndarray  # [length] token ids, HOLE where undecided
    order: np.ndarray  # [holes] positions, in deciding order
    num_decided: int = 0  # how many of them are decided

    @property
    def open_positions(self) -> np.ndarray:
        """Positions still undecided, in deciding order."""
        return self.order[self.num_decided :]

    @property
    def decided_prefix(self) -> np.ndarray:
        """The tokens before the next hole to decide: what a causal network reads. For left-to-right orders."""
        return self.tokens[: self.order[self.num_decided]] if self.num_decided < len(self.order) else self.tokens

    @cached_property
    def given_positions(self) -> np.ndarray:
        """Positions that were decided from the start, ascending."""
        given = np.ones(len(self.tokens), dtype=bool)
        given[self.order] = False
        return np.flatnonzero(given)

    @cached_property
    def known_positions(self) -> np.ndarray:
        """Positions of all decided tokens in deciding order, those given first: what an any-subset network reads."""
        return np.concatenate([self.given_positions, self.order[: self.num_decided]])

    @property
    def new_tokens(self) -> np.ndarray:
        """The tokens that fill the decided holes, in deciding order."""
        return self.tokens[self.order[: self.num_decided]]

    def without(self, dropped: range) -> Canvas:
        """The same without these given tokens; what stands behind them moves to their place."""
        assert dropped.stop <= self.order[0], "only given tokens can be left out, and those before all holes"
        tokens = np.concatenate([self.tokens[: dropped.start], self.tokens[dropped.stop :]])
        return Canvas(tokens, self.order - len(dropped), self.num_decided)

    def fill(self, new: np.ndarray) -> Canvas:
        """Decide the next holes: `new` are their token ids."""
        tokens = self.tokens.copy()
        tokens[self.open_positions[: len(new)]] = new
        filled = Canvas(tokens, self.order, self.num_decided + len(new))
        if "given_positions" in vars(self):
            vars(filled)["given_positions"] = self.given_positions
        return filled


def infilling(tokens: Sequence[int] | np.ndarray) -> Canvas:
    """A text with holes (HOLE), to be filled from left to right (ASSD, Eq. 4)."""
    tokens = np.asarray(tokens, dtype=np.int64)
    return Canvas(tokens, np.flatnonzero(tokens == HOLE))


def continuation(prompt: Sequence[int] | np.ndarray, length: int) -> Canvas:
    """A prompt followed by `length` holes."""
    prompt = np.asarray(prompt, dtype=np.int64)
    tokens = np.concatenate([prompt, np.full(length, HOLE, dtype=np.int64)])
    return Canvas(tokens, np.arange(len(prompt), len(tokens)))
