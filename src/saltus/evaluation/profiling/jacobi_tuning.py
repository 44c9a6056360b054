"""Search the settings with which Jacobi decoding is fastest on this machine (Jacobi Forcing, App. D and E)."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import numpy as np

from saltus.engine.engine import Engine
from saltus.engine.results import PromptLike

BLOCK_SIZES = (4, 8, 16, 32, 64, 128)
CANDIDATE_COUNTS = (0, 1, 2, 4, 8)
NGRAM_LENGTHS = (2, 3, 4, 6, 8)  # tokens of a recycled n-gram, its key included
LIVE_BLOCK_COUNTS = (1, 2, 3, 4)  # blocks
SPAWN_THRESHOLDS = (0.5, 0.85, 1.0)
PLAIN = "plain"
POLYNOMIAL_DEGREES = (1, 2, 3)  # of the surface

Setting = Mapping[str, Any]


def affordable_draft_tokens(nodes: Sequence[int], times: Sequence[float], max_cost_ratio: float) -> int:
    """The most draft tokens whose call costs at most `max_cost_ratio` times a call without drafts; at least 3.

    Node counts include the last decided token.
    """
    points = sorted(zip(nodes, times, strict=True))
    return max([4, *(n for n, seconds in points if seconds <= max_cost_ratio * points[0][1])]) - 1


@dataclass
class JacobiSearch:
    """Tokens per second of settings, on the same texts in turn; plain decoding is one of them.

    First block × candidates with two live blocks; then, with the best of these, the length of recycled n-grams if there
    are any; then live blocks × spawn with the best length. An interrupted search keeps its measurements.
    """

    engine: Engine
    prompts: Sequence[PromptLike]
    max_draft_tokens: int  # nodes of a call
    generate_settings: Mapping[str, Any]  # settings of the texts: temperature, max_new_tokens, …
    rounds: int = 2
    fixed_options: Setting = field(default_factory=dict)  # options that are not searched, such as model
    clock: Callable[[], float] = time.perf_counter
    seconds: dict[tuple[tuple[str, Any], ...], dict[int, list[float]]] = field(default_factory=dict)
    tokens: dict[tuple[tuple[str, Any], ...], dict[int, tuple[int, int]]] = field(default_factory=dict)
    engines: dict[tuple[tuple[str, Any], ...], Engine] = field(default_factory=dict)
    best_so_far: Setting = field(default_factory=dict)  # the best of the stages that are measured

    @property
    def grid(self) -> list[Setting]:
        """Block × candidates, those that fit into `max_draft_tokens`."""
        rows = (
            self.max_draft_tokens // 2 if "model" in self.fixed_options else self.max_draft_tokens
        )  # an adapter reads the guesses in extra rows
        blocks = [block for block in BLOCK_SIZES if block <= max(rows + 1, BLOCK_SIZES[0])]
        return [{"block_size": block, "candidates": count} for block, count in product(blocks, CANDIDATE_COUNTS)]

    @property
    def num_texts(self) -> int:
        """How many texts are decoded in all; before the grid is measured, at most."""
        stages = self.grid, self.ngram_stage, self.block_stage
        return self.rounds * len(self.prompts) * sum(1 + len(stage) for stage in stages if stage)

    def run(self) -> Iterator[None]:
        """Measure all settings; yields after each text."""
        yield from self._measure([{PLAIN: True}, *self.grid])
        self.best_so_far = self.best(self.grid)
        if self.ngram_stage:
            yield from self._measure([{PLAIN: True}, *self._with_best(self.ngram_stage)])
            self.best_so_far = self.best(self._with_best(self.ngram_stage))
        yield from self._measure([{PLAIN: True}, *self._with_best(self.block_stage)])

    def _with_best(self, stage: Sequence[Setting]) -> list[Setting]:
        return [{**self.best_so_far, **more} for more in stage]

    @property
    def ngram_stage(self) -> list[Setting]:
        """Lengths of recycled n-grams; none if the best setting offers none."""
        return [{"ngram_size": length} for length in NGRAM_LENGTHS if self.best_so_far.get("candidates") != 0]

    @property
    def block_stage(self) -> list[Setting]:
        """Live blocks × spawn; a single block does not spawn."""
        several = [
            {"max_blocks": live, "spawn_ratio": spawn}
            for live, spawn in product(LIVE_BLOCK_COUNTS, SPAWN_THRESHOLDS)
            if live > 1
        ]
        return [{"max_blocks": 1}, *several]

    def _measure(self, settings: Sequence[Setting]) -> Iterator[None]:
        """Each round decodes every text with all settings, in alternating order; the first text is a warm-up."""
        for setting in settings:
            self._generate(setting, 0, warm_up=True)
        for number in range(self.rounds):
            for text in range(len(self.prompts)):
                for setting in settings if (number + text) % 2 == 0 else settings[::-1]:
                    self._generate(setting, text)
                    yield

    def _generate(self, setting: Setting, text: int, warm_up: bool = False) -> None:
        key = tuple(setting.items())
        if key not in self.engines:
            searched = {name: value for name, value in setting.items() if name != PLAIN}
            options = {"jacobi": {**self.fixed_options, **searched}}
            self.engines[key] = self.engine.copy_with(options=options, max_draft_tokens=self.max_draft_tokens)
        method = PLAIN if PLAIN in setting else "jacobi"
        began = self.clock()
        generation = self.engines[key].generate(self.prompts[text], method=method, **self.generate_settings)
        if not warm_up:
            self.seconds.setdefault(key, {}).setdefault(text, []).append(self.clock() - began)
            self.tokens.setdefault(key, {})[text] = (generation.statistics.tokens, generation.statistics.calls)

    def tokens_per_second(self, setting: Setting) -> float:
        """Tokens per second over all texts, by the median time of each; prefill included."""
        key = tuple(setting.items())
        spent = sum(statistics.median(times) for times in self.seconds[key].values())
        return sum(tokens for tokens, _ in self.tokens[key].values()) / spent

    def tokens_per_call(self, setting: Setting) -> float:
        key = tuple(setting.items())
        tokens, calls = (sum(column) for column in zip(*self.tokens[key].values(), strict=True))
        return tokens / calls

    def best(self, settings: Sequence[Setting]) -> Setting:
        """The best of some settings: by the fitted surface for block × candidates, else as measured."""
        if settings == self.grid:
            heights = SpeedupSurface.fit(self.speedup_points())
            return max(
                settings,
                key=lambda setting: (
                    float(heights.evaluate(setting["block_size"], setting["candidates"])),
                    self.tokens_per_second(setting),
                ),
            )
        return max(settings, key=self.tokens_per_second)

    def speedup_points(self) -> list[tuple[int, int, float]]:
        """(block, candidates, speed-up over plain decoding) of the grid, as far as it is measured."""
        plain = self.tokens_per_second({PLAIN: True})
        known = [setting for setting in self.grid if tuple(setting.items()) in self.seconds]
        return [
            (setting["block_size"], setting["candidates"], self.tokens_per_second(setting) / plain) for setting in known
        ]

    def best_setting(self) -> Setting:
        """The best of all settings."""
        return self.best(self._with_best(self.block_stage))

    def table_rows(self) -> list[dict[str, Any]]:
        """A row for each setting that was measured."""
        plain = self.tokens_per_second({PLAIN: True})
        rows = []
        for key in self.seconds:
            setting = dict(key)
            rate = self.tokens_per_second(setting)
            rows.append({
                **setting, "tokens_per_second": rate, "speedup": rate / plain,
                "tokens_per_call": self.tokens_per_call(setting),
            })  # fmt: skip
        return rows


@dataclass(frozen=True)
class SpeedupSurface:
    """A polynomial in log₂ block and log₂ (1 + candidates), of the degree with the best leave-one-out prediction."""

    degree: int
    weights: np.ndarray

    @staticmethod
    def fit(points: Sequence[tuple[int, int, float]]) -> SpeedupSurface:
        """(block, candidates, value); least squares. With too few points it is the mean."""
        values = np.array([value for _, _, value in points])
        places = np.array([(block, candidates) for block, candidates, _ in points])
        fitted = {}
        for degree in (0, *POLYNOMIAL_DEGREES):
            terms = _polynomial_terms(places[:, 0], places[:, 1], degree)
            if degree and terms.shape[1] >= len(points):
                continue
            errors = []
            for left_out in range(len(points)):
                others = np.arange(len(points)) != left_out
                if others.any():
                    weights = np.linalg.lstsq(terms[others], values[others], rcond=None)[0]
                    errors.append(float(terms[left_out] @ weights - values[left_out]) ** 2)
            fitted[degree] = sum(errors), np.linalg.lstsq(terms, values, rcond=None)[0]
        degree = min(fitted, key=lambda candidate: fitted[candidate][0])
        return SpeedupSurface(degree, fitted[degree][1])

    def evaluate(self, block: Any, candidates: Any) -> Any:
        """The height, of numbers or of arrays."""
        return _polynomial_terms(np.asarray(block), np.asarray(candidates), self.degree) @ self.weights


def _polynomial_terms(block: np.ndarray, candidates: np.ndarray, degree: int) -> np.ndarray:
    x, y = np.log2(block), np.log2(1 + candidates)
    return np.stack([x**i * y**j for i in range(degree + 1) for j in range(degree + 1 - i)], -1)
