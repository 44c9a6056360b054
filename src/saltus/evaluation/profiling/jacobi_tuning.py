"""Find settings of Jacobi decoding that are fast on this machine: one option after the other, plain decoding beside."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from saltus.engine.engine import Engine
from saltus.engine.settings import PromptLike

PLAIN = "plain"
VALUES: Mapping[str, Sequence[int | float]] = {  # that are tried, in this order of options
    "block_size": (4, 8, 16, 32, 64),
    "candidates": (0, 1, 2, 4, 8),
    "ngram_size": (2, 3, 4, 6, 8),  # tokens of a recycled n-gram, its key included
    "max_blocks": (1, 2, 3, 4),
    "spawn_ratio": (0.5, 0.85, 1.0),
}

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

    The options of VALUES are tried one after the other, those before at their fastest value.
    """

    engine: Engine
    prompts: Sequence[PromptLike]
    max_draft_tokens: int  # of a call
    generate_settings: Mapping[str, Any]  # settings of the texts: temperature, max_new_tokens, …
    rounds: int = 2
    fixed_options: Setting = field(default_factory=dict)  # options that are not searched, such as model
    clock: Callable[[], float] = time.perf_counter
    best: dict[str, Any] = field(default_factory=dict)  # of the options that were tried; others have their defaults
    speedup: float = 1.0  # of the best over plain decoding, when they were last measured
    rows: list[dict[str, Any]] = field(default_factory=list)  # of settings that were measured, with their rates

    @property
    def values(self) -> dict[str, list[int | float]]:
        """What is tried: blocks that fit into `max_draft_tokens`, of which an adapter needs two rows a guess."""
        rows = self.max_draft_tokens // 2 if "model" in self.fixed_options else self.max_draft_tokens
        return {
            option: [value for value in tried if option != "block_size" or value <= max(rows + 1, tried[0])]
            for option, tried in VALUES.items()
        }

    @property
    def num_texts(self) -> int:
        """How many texts are decoded in all, at most."""
        return self.rounds * len(self.prompts) * sum(1 + len(tried) for tried in self.values.values())

    def run(self) -> Iterator[None]:
        """Measure; yields after each text."""
        for option, tried in self.values.items():
            unused = {"ngram_size": self.best.get("candidates") == 0, "spawn_ratio": self.best.get("max_blocks") == 1}
            if unused.get(option):
                continue
            rows: list[dict[str, Any]] = [{PLAIN: True}, *({**self.best, option: value} for value in tried)]
            yield from self._measure(rows)
            self.rows += rows
            self.best[option] = max(rows[1:], key=lambda row: row["tokens_per_second"])[option]
            self.speedup = max(row["speedup"] for row in rows[1:])

    def _measure(self, rows: Sequence[dict[str, Any]]) -> Iterator[None]:
        """Each round decodes every text with all settings, in alternating order; the first text is a warm-up."""
        engines = [self._engine(row) for row in rows]
        seconds: list[list[list[float]]] = [[[] for _ in self.prompts] for _ in rows]
        counts = [[(0, 0)] * len(self.prompts) for _ in rows]
        for place in range(len(rows)):
            self._generate(engines[place], rows[place], 0)
        for number in range(self.rounds):
            for text in range(len(self.prompts)):
                places = range(len(rows))
                for place in places if (number + text) % 2 == 0 else reversed(places):
                    began = self.clock()
                    counts[place][text] = self._generate(engines[place], rows[place], text)
                    seconds[place][text].append(self.clock() - began)
                    yield
        for row, spent, counted in zip(rows, seconds, counts, strict=True):
            tokens, calls = map(sum, zip(*counted, strict=True))
            row["tokens_per_second"] = tokens / sum(map(statistics.median, spent))  # prefill included
            row["speedup"] = row["tokens_per_second"] / rows[0]["tokens_per_second"]
            row["tokens_per_call"] = tokens / calls

    def _engine(self, row: Setting) -> Engine:
        options = {} if PLAIN in row else row
        return self.engine.copy_with(
            options={"jacobi": {**self.fixed_options, **options}}, max_draft_tokens=self.max_draft_tokens
        )

    def _generate(self, engine: Engine, row: Setting, text: int) -> tuple[int, int]:
        """Tokens and calls of a text."""
        method = PLAIN if PLAIN in row else "jacobi"
        counted = engine.generate(self.prompts[text], method=method, **self.generate_settings).statistics
        return counted.tokens, counted.calls
