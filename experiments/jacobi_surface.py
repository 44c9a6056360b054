"""How fast is Jacobi decoding by block and recycled n-grams on this machine? The whole grid, with a fitted surface.

    python experiments/jacobi_surface.py --out surface [--model MODEL] [--adapter DIR] [--prompts FILE --texts 8]

Jacobi Forcing, App. D and E: block × candidates within the nodes that a call can afford, then the length of n-grams,
then live blocks × spawn. Every text is decoded with all settings in turns, plain decoding among them. `saltus tune`
finds settings in a third of the time, and saves them. DIR gets surface.json and figures; Ctrl-C keeps what is measured.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

import saltus
from saltus.cli.bench_step import synchronizer
from saltus.cli.report import write_result
from saltus.cli.tune import MAX_DEPTH, NODE_COUNTS, select_prompts
from saltus.engine.engine import Engine
from saltus.engine.settings import PromptLike
from saltus.evaluation.profiling import call_timing as steps
from saltus.evaluation.profiling.jacobi_tuning import PLAIN, Setting, affordable_draft_tokens
from saltus.evaluation.profiling.roofline import measured_knee
from saltus.evaluation.reports.benchmark_plots import STYLE, save_figures
from saltus.evaluation.reports.environment import run_info
from saltus.evaluation.reports.palette import ALARM, INK, LINE, MUTED

BLOCK_SIZES = (4, 8, 16, 32, 64, 128)
CANDIDATE_COUNTS = (0, 1, 2, 4, 8)
NGRAM_LENGTHS = (2, 3, 4, 6, 8)  # tokens of a recycled n-gram, its key included
LIVE_BLOCK_COUNTS = (1, 2, 3, 4)  # blocks
SPAWN_THRESHOLDS = (0.5, 0.85, 1.0)
POLYNOMIAL_DEGREES = (1, 2, 3)  # of the surface
WIDTH, HEIGHT = 600, 400  # pixels, where an inch is 100
LEFT_MARGIN, BOTTOM_MARGIN, TOP_MARGIN = 58, 50, 80


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
            own = {name: value for name, value in setting.items() if name != PLAIN}
            options = {"jacobi": {**self.fixed_options, **own}}
            self.engines[key] = self.engine.copy_with(options=options, max_draft_tokens=self.max_draft_tokens)
        method = PLAIN if PLAIN in setting else "jacobi"
        began = self.clock()
        found = self.engines[key].generate(self.prompts[text], method=method, **self.generate_settings)
        if not warm_up:
            self.seconds.setdefault(key, {}).setdefault(text, []).append(self.clock() - began)
            self.tokens.setdefault(key, {})[text] = (found.statistics.tokens, found.statistics.calls)

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
                key=lambda one: (
                    float(heights.evaluate(one["block_size"], one["candidates"])),
                    self.tokens_per_second(one),
                ),
            )
        return max(settings, key=self.tokens_per_second)

    def speedup_points(self) -> list[tuple[int, int, float]]:
        """(block, candidates, speed-up over plain decoding) of the grid, as far as it is measured."""
        plain = self.tokens_per_second({PLAIN: True})
        known = [one for one in self.grid if tuple(one.items()) in self.seconds]
        return [(one["block_size"], one["candidates"], self.tokens_per_second(one) / plain) for one in known]

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
        degree = min(fitted, key=lambda one: fitted[one][0])
        return SpeedupSurface(degree, fitted[degree][1])

    def evaluate(self, block: Any, candidates: Any) -> Any:
        """The height, of numbers or of arrays."""
        return _polynomial_terms(np.asarray(block), np.asarray(candidates), self.degree) @ self.weights


def _polynomial_terms(block: np.ndarray, candidates: np.ndarray, degree: int) -> np.ndarray:
    x, y = np.log2(block), np.log2(1 + candidates)
    return np.stack([x**i * y**j for i in range(degree + 1) for j in range(degree + 1 - i)], -1)


def write_figures(result: Mapping[str, Any], folder: Path) -> list[Path]:
    """jacobi_calls and jacobi_surface, as SVG and as PNG; none of a search that measured no settings."""
    if not result["surface"]["points"]:
        return []
    import matplotlib

    with matplotlib.rc_context(STYLE):
        drawn = {"jacobi_calls": _plot_calls(result), "jacobi_surface": _plot_surface(result)}
    return save_figures(drawn, folder)


def _new_figure(title: str, subtitle: str, right_margin: int) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH / 100, HEIGHT / 100))
    figure.text(14 / WIDTH, 1 - 12 / HEIGHT, title, size=12.5, weight="bold", va="top")
    figure.text(14 / WIDTH, 1 - 35 / HEIGHT, subtitle, size=9, color=MUTED, va="top")
    place = (
        LEFT_MARGIN / WIDTH,
        BOTTOM_MARGIN / HEIGHT,
        (WIDTH - LEFT_MARGIN - right_margin) / WIDTH,
        (HEIGHT - BOTTOM_MARGIN - TOP_MARGIN) / HEIGHT,
    )
    return figure, figure.add_axes(place)


def _plot_calls(result: Mapping[str, Any]) -> Any:
    nodes, times = zip(*((row["nodes"], row["ms"]) for row in result["calls"]), strict=True)
    figure, axes = _new_figure(
        "Milliseconds of a call", f"{result['model']['name']}; dashed: the nodes that the search may use", 24
    )
    axes.set_xscale("log", base=2)
    axes.set_xticks(nodes, list(map(str, nodes)))
    axes.minorticks_off()
    axes.plot(nodes, times, "o-", color=INK, lw=1.8, ms=4.5)
    axes.axvline(result["max_draft_tokens"], color=ALARM, ls="--", lw=1.4)
    if result["knee"]:
        axes.axvline(result["knee"], color=MUTED, ls=":", lw=1.4)
        axes.annotate("knee", (result["knee"], 0.96), xycoords=("data", "axes fraction"), xytext=(4, 0),
                      textcoords="offset points", size=8.5, color=MUTED)  # fmt: skip
    axes.set_ylim(0, 1.06 * max(times))
    axes.set_xlabel("nodes of a call, the last decided token included")
    axes.set_ylabel("ms")
    axes.grid(axis="y", color=LINE, lw=0.6)
    return figure


def _plot_surface(result: Mapping[str, Any]) -> Any:
    points = [(row["block_size"], row["candidates"], row["speedup"]) for row in result["surface"]["points"]]
    surface = SpeedupSurface.fit(points)
    blocks, counts = sorted({point[0] for point in points}), sorted({point[1] for point in points})
    figure, axes = _new_figure(
        "Speed-up over plain decoding", f"{result['model']['name']}; dots: measured, the ring: chosen", 90
    )
    x = np.linspace(np.log2(blocks[0]), np.log2(blocks[-1]), 60)
    y = np.linspace(0, np.log2(1 + counts[-1]), 60)
    heights = surface.evaluate(2 ** x[None, :], 2 ** y[:, None] - 1) if len(blocks) > 1 else None
    if heights is not None:
        heights = np.broadcast_to(heights, (60, 60))
        filled = axes.contourf(x, y, heights, levels=10, cmap="Blues", alpha=0.8)
        bar = figure.colorbar(
            filled, cax=figure.add_axes((1 - 74 / WIDTH, BOTTOM_MARGIN / HEIGHT, 14 / WIDTH, 270 / HEIGHT))
        )
        bar.outline.set_visible(False)
    for block, count, value in points:
        at = np.log2(block), np.log2(1 + count)
        axes.plot(*at, "o", color=INK, ms=3)
        axes.annotate(f"{value:.2f}", at, xytext=(0, 9), textcoords="offset points", ha="center", size=8, color=INK)
    best = result["chosen"]
    if "block_size" in best:
        axes.plot(
            np.log2(best["block_size"]), np.log2(1 + best["candidates"]), "o", mfc="none", mec=ALARM, ms=13, mew=1.8
        )
    axes.set_xticks(np.log2(blocks), list(map(str, blocks)))
    axes.set_yticks(np.log2(1 + np.array(counts)), list(map(str, counts)))
    axes.set_xlim(x[0] - 0.2, x[-1] + 0.2)
    axes.set_ylim(-0.15, y[-1] + 0.35)
    axes.set_xlabel("tokens of a block")
    axes.set_ylabel("recycled n-grams offered")
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--adapter", help="a folder of saltus train jacobi")
    parser.add_argument("--prompts", type=Path, help="JSON lines; the quick suite if none are given")
    parser.add_argument("--texts", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--max-cost-ratio", type=float, default=2.0, help="of a call, to one of one token")
    parser.add_argument("--max-new-tokens", type=int, default=48)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    fixed = {"model": given.adapter} if given.adapter else {}
    engine = saltus.load(
        given.model, "jacobi", options={"jacobi": fixed}, max_draft_tokens=MAX_DEPTH, tuned_settings=False
    )
    prompts = select_prompts(given.prompts, given.texts)
    settings = {"max_new_tokens": given.max_new_tokens, "temperature": given.temperature, "seed": given.seed}
    result = measure(engine, prompts, settings, given.rounds, given.max_cost_ratio, fixed)
    write_result(given.out / "surface.json", result, write_figures)
    for row in sorted(result["settings"], key=lambda row: -row["tokens_per_second"]):
        rates = (
            f"{row['tokens_per_second']:7.1f} tokens/s  {row['speedup']:.2f} ×  {row['tokens_per_call']:.2f} a call "
        )
        print(rates, *(f"{name}={row[name]}" for name in row if not name.startswith(("tokens", "speedup"))))
    print("fastest:", result["chosen"])


def measure(
    engine: Engine,
    prompts: Sequence[PromptLike],
    settings: Mapping[str, Any],
    rounds: int,
    max_cost_ratio: float,
    fixed_options: Mapping[str, Any],
) -> dict[str, Any]:
    """The content of surface.json; after Ctrl-C `complete` is false."""
    model, limit = engine.network.model, engine.network.max_draft_tokens
    nodes = NODE_COUNTS if limit is None else tuple(n for n in NODE_COUNTS if n <= MAX_DEPTH + 1)
    length = min(256, (engine.target.context_length or 1024) // 2)
    grid, timings = steps.CallGrid(nodes, (length,), (1,), rounds=5), steps.CallTimings()
    vocabulary = model.get_output_embeddings().weight.shape[0]
    for _ in steps.measure_calls(engine.network, grid, vocabulary, timings, synchronize=synchronizer(model.device)):
        pass
    calls = [{"nodes": cell.nodes, **steps.time_statistics(timings.call_seconds[cell])} for cell in grid.call_shapes]
    times = [row["ms"] for row in calls]
    max_draft_tokens = affordable_draft_tokens(nodes, times, max_cost_ratio)
    search, complete = JacobiSearch(engine, prompts, max_draft_tokens, settings, rounds, fixed_options), False
    try:
        for _ in search.run():
            pass
        complete = True
    except KeyboardInterrupt:
        if not search.seconds:
            raise
    named = ("block_size", "candidates", "speedup")
    return {
        **run_info(
            engine,
            {**settings, "texts": len(prompts), "rounds": rounds, "max_cost_ratio": max_cost_ratio, **fixed_options},
        ),
        "complete": complete,
        "calls": calls,
        "knee": measured_knee(nodes, times),
        "max_draft_tokens": max_draft_tokens,
        "settings": search.table_rows(),
        "surface": {"points": [dict(zip(named, point, strict=True)) for point in search.speedup_points()]},
        "chosen": search.best_setting() if complete else {},
    }


if __name__ == "__main__":
    main()
