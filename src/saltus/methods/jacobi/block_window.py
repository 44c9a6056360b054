"""Choose which open positions have Jacobi guesses: several live blocks, by two rules."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass
class BlockWindow:
    """Live blocks in order (Jacobi Forcing, §3.2): all of their guesses are corrected in each call."""

    size: int
    max_blocks: int
    spawn_threshold: int  # decided or settled tokens of the last block from which the next one starts
    sliding: bool
    start: int = 0  # where the first live block starts
    live: int = 1

    def end(self, done: int, settled: Sequence[bool]) -> int:
        """The index after the last live block; `settled[i]`: the guess of hole done + i no longer changes."""
        while self.start + self.size <= done:
            self.start += self.size
            self.live = max(self.live - 1, 1)
        if self.sliding:
            self.start = done
        while self.live < self.max_blocks:
            last = self.start + (self.live - 1) * self.size
            first_unsettled = max(done, last)
            while first_unsettled < done + len(settled) and settled[first_unsettled - done]:
                first_unsettled += 1
            if first_unsettled - last < self.spawn_threshold:
                break
            self.live += 1
        return self.start + self.live * self.size

    def keep_frozen(self, done: int, guesses: Sequence[int], answers: Sequence[int]) -> list[int]:
        """The next guesses for the holes from `done` on: the answers, since nothing is frozen."""
        return list(answers)

    def first_guess(self, hole: int, done: int, guesses: Sequence[int]) -> int | None:
        """The first guess for a hole of a new block; None: it is drawn."""
        return None


@dataclass
class FrozenBlocks:
    """Live blocks as in Jacobi Forcing's Algorithm 1: one real-active block, and pseudo-active ones after it.

    A pseudo-active block accepts, on trial, the guesses that agree with the model from its beginning on, and the
    model's token after them. They stay as they are until the block is the first one; then all are verified anew.
    """

    size: int
    max_blocks: int
    spawn_threshold: int  # accepted tokens of a block from which the next one starts
    start: int = 0  # where the real-active block starts
    accepted: list[int] = field(default_factory=list)  # on trial, by each pseudo-active block

    def end(self, done: int, settled: Sequence[bool]) -> int:
        """The index after the last live block; promotes and spawns blocks (lines 14 and 15)."""
        while self.start + self.size <= done:
            self.start += self.size
            del self.accepted[:1]
        ready = max(done - self.start, *self.accepted, 0) >= self.spawn_threshold
        if ready and len(self.accepted) + 1 < self.max_blocks:
            self.accepted.append(0)
        return self.start + (len(self.accepted) + 1) * self.size

    def keep_frozen(self, done: int, guesses: Sequence[int], answers: Sequence[int]) -> list[int]:
        """The next guesses: answers, but accepted ones of later blocks stay. More of them are accepted (line 7).

        `guesses` were evaluated, from hole `done` on, and `answers[i]` is the model's token for hole done + i.
        """
        kept = list(answers)
        for number, accepted in enumerate(self.accepted):
            first = self.start + (number + 1) * self.size - done
            if not 0 <= first <= len(guesses):
                continue
            end = min(self.size, len(guesses) - first)
            kept[first : first + min(accepted, end)] = guesses[first : first + min(accepted, end)]
            matched = accepted
            while matched < end and guesses[first + matched] == answers[first + matched]:
                matched += 1
            bonus = matched < self.size and first + matched < len(answers)  # the model's token after them
            self.accepted[number] = matched + bonus
        return kept

    def first_guess(self, hole: int, done: int, guesses: Sequence[int]) -> int | None:
        """The clone of the real-active block's draft, `guesses` from hole `done` on; None: it is drawn (line 14)."""
        clone = guesses[: max(self.start + self.size - done, 0)]
        offset = (hole - self.start) % self.size
        return clone[offset] if hole >= self.start + self.size and offset < len(clone) else None


def new_window(
    size: int, max_blocks: int, spawn_ratio: float, sliding: bool, frozen: bool
) -> BlockWindow | FrozenBlocks:
    """The window of a text; `spawn_ratio` is the share of a block from which the next one starts."""
    threshold = math.ceil(spawn_ratio * size)
    return FrozenBlocks(size, max_blocks, threshold) if frozen else BlockWindow(size, max_blocks, threshold, sliding)
