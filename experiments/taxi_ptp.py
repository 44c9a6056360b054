"""Train and measure PTP on taxi rides: the tables of its paper's ablations, one command each.

    python experiments/taxi_data.py --rides uber-raw-data-apr14.csv.zip --centres yellow_sample.csv.gz --out taxi.npz
    python experiments/taxi_ptp.py methods --tokens taxi.npz --work runs/taxi --out methods.json

Tables: teacher (the autoregressive model), methods (O-PTP, C-PTP and independent prediction at --window tokens),
losses (Table 4), embeddings (Table 5), places (Table 6), drafts (Table 7), windows (Table 8), inverse (Table 1), all.
Every run has a checkpoint in --work: the same command continues an interrupted run, and tables share the runs that they
have in common. Without --tokens the stream is synthetic.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import taxi_data
from ptp_lab import Student, draft_window, num_correct
from saltus.models.uniform_embedding import KINDS
from saltus.training.data.seeded_generator import seeded_generator
from saltus.training.data.uniform_intervals import pick_tokens, uniform_intervals
from taxi_training import Laboratory, Run, Scale, rounded

ONE_HOT, CATEGORICAL, INDEPENDENT = Run("one-hot", "ce"), Run("categorical", "kl"), Run("independent", "kl")
METHODS = (ONE_HOT, CATEGORICAL, INDEPENDENT)
PLACES = (2.0, 1.0, 0.5)
DRAFTS = (1, 4, 16, 64, 256, 1024, 1_000_000)  # the last one takes a quarter of an hour for N = 16
DRAWN = 2**16  # sets of positions drawn at once
PREFIXES = (1, 2, 4, 8, 16, 64, 100)


@dataclass(frozen=True)
class Row:
    """One line of a table."""

    table: str
    run: dict[str, Any]
    measured: dict[str, Any]


def measure(laboratory: Laboratory, run: Run, student: Student) -> dict[str, Any]:
    """The leading tokens that equal the teacher's under the same uniforms (PTP, Eq. 16): mean and standard error."""
    texts, _, uniforms = laboratory.held_out(run)
    counts = num_correct(drafts_of(student, run, uniforms), texts).double()
    return summary(counts)


def drafts_of(student: Student, run: Run, uniforms: Tensor) -> Tensor:
    """A student's drafts of whole texts, from uniforms alone."""
    parts = []
    for part in uniforms.split(500):
        start = torch.full((len(part), 1), student.start_token)
        parts.append(draft_window(student, start, part, run.form, run.order))
    return torch.cat(parts)


def summary(counts: Tensor) -> dict[str, Any]:
    return {
        "correct": rounded(counts.mean()),
        "error": rounded(counts.std() / math.sqrt(len(counts))),
        "of": len(counts),
    }


def methods(laboratory: Laboratory, runs: tuple[Run, ...], table: str) -> Iterator[Row]:
    """Train and measure each run; also the optimum of independent prediction, with the exact marginals."""
    texts, _, uniforms = laboratory.held_out(runs[0])
    best = pick_tokens(uniforms, laboratory.marginals(runs[0]).expand(len(texts), -1, -1), coupling=runs[0].order)
    shared = {name: asdict(runs[0])[name] for name in ("window", "seed", "order")}
    yield Row(table, {"form": "exact marginals"} | shared, summary(num_correct(best, texts).double()))
    for run in runs:
        student, training = laboratory.trained(run)
        yield Row(table, asdict(run), measure(laboratory, run, student) | training)


def losses(base: Run) -> tuple[Run, ...]:
    """Table 4: losses and proposals."""
    pairs = [(CATEGORICAL, loss) for loss in ("kl", "reverse-kl", "bce", "ce")]
    pairs += [(ONE_HOT, loss) for loss in ("bce", "ce")]
    return tuple(
        replace(with_base(form, base), loss=loss, proposal=proposal)
        for proposal in ("teacher", "student", "dataset")
        for form, loss in [*pairs, (INDEPENDENT, "kl")]
    )


def with_base(run: Run, base: Run) -> Run:
    """A method with the base run's window, embedding, seed and order."""
    return replace(run, window=base.window, kind=base.kind, seed=base.seed, order=base.order, grow=base.grow)


def several_drafts(laboratory: Laboratory, run: Run) -> Iterator[Row]:
    """Table 7: of M sets of uniforms the one that is nearest to the middle of the intervals (PTP, Eq. 18).

    The position of a uniform in its interval is independent of the token, so M texts are not needed: M sets of
    positions are drawn for one text of the teacher, which has the same distribution. (Eq. 18's argmax is an argmin.)
    """
    student, _ = laboratory.trained(run)
    texts, distributions, _ = laboratory.held_out(run)
    intervals = uniform_intervals(distributions, texts, coupling=run.order)
    for count in (*DRAFTS, math.inf):
        places = torch.full(texts.shape, 0.5, dtype=torch.float64)
        if count < math.inf:
            places = torch.stack([_central(int(count), run, row) for row in range(len(texts))])
        uniforms = (intervals.low + places * (intervals.high - intervals.low)).clamp(0, 1 - 2.0**-53)
        counts = num_correct(drafts_of(student, run, uniforms), texts).double()
        yield Row("drafts", asdict(run) | {"drafts": count if count < math.inf else "infinite"}, summary(counts))


def _central(count: int, run: Run, row: int) -> Tensor:
    """Of `count` random sets of positions the one that is nearest to the middle."""
    generator = seeded_generator(run.seed, f"places/{count}", row)
    nearest, distance = np.empty(0), math.inf
    for start in range(0, count, DRAWN):
        places = generator.random((min(DRAWN, count - start), run.window))
        distances = abs(places - 0.5).sum(-1)
        if (least := distances[chosen := distances.argmin()]) < distance:
            nearest, distance = places[chosen].copy(), least  # a view would keep all places
    return torch.from_numpy(nearest)


def prefixes(laboratory: Laboratory, base: Run) -> Iterator[Row]:
    """Table 8: fewer queries in a call. Queries do not attend to later ones, so one model serves all smaller N."""
    for method in METHODS:
        run = with_base(method, base)
        student, training = laboratory.trained(run)
        texts, _, uniforms = laboratory.held_out(run)
        counts = num_correct(drafts_of(student, run, uniforms), texts)
        for length in sorted({*(n for n in PREFIXES if n < run.window), run.window}):
            row = summary(counts.clamp_max(length).double())
            yield Row("windows", asdict(run) | {"limit": length}, row | training)


def inverse(laboratory: Laboratory, base: Run) -> Iterator[Row]:
    """Table 1: perplexity of C-PTP trained on data alone, of the autoregressive model, and of counts."""
    for name, value in taxi_data.baselines(laboratory.stream, laboratory.scale.chunk).items():
        yield Row("inverse", {"model": name}, {"perplexity": rounded(value)})
    teacher, training = laboratory.teacher(base.seed)
    yield Row("inverse", {"model": "autoregressive", "seed": base.seed}, laboratory.perplexity(teacher) | training)
    student, training = laboratory.inverse(base)
    measured = laboratory.own_perplexity(student, base)
    yield Row("inverse", {"model": "C-PTP, inverse training", "seed": base.seed}, measured | training)


def table(name: str, laboratory: Laboratory, base: Run) -> Iterator[Row]:
    """The rows of a table for one seed."""
    if name == "teacher":
        teacher, training = laboratory.teacher(base.seed)
        yield Row(name, {"model": "autoregressive", "seed": base.seed}, laboratory.perplexity(teacher) | training)
    elif name == "methods":
        yield from methods(laboratory, tuple(with_base(run, base) for run in METHODS), name)
    elif name == "losses":
        yield from methods(laboratory, losses(base), name)
    elif name == "embeddings":
        runs = [replace(with_base(run, base), kind=kind) for kind in KINDS for run in (ONE_HOT, CATEGORICAL)]
        yield from methods(laboratory, (*runs, with_base(INDEPENDENT, base)), name)
    elif name == "places":
        runs = [replace(with_base(run, base), b=b) for b in PLACES for run in (ONE_HOT, CATEGORICAL)]
        yield from methods(laboratory, (*runs, with_base(INDEPENDENT, base)), name)
    elif name == "drafts":
        yield from several_drafts(laboratory, with_base(ONE_HOT, base))
    elif name == "windows":
        yield from prefixes(laboratory, base)
    else:
        yield from inverse(laboratory, base)


TABLES = ("teacher", "methods", "losses", "embeddings", "places", "drafts", "windows", "inverse")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", choices=(*TABLES, "all"))
    parser.add_argument("--tokens", type=Path, help="the output of taxi_data.py")
    parser.add_argument("--work", type=Path, default=Path("runs/taxi"), help="folder of checkpoints")
    parser.add_argument("--out", type=Path, help="results as JSON")
    parser.add_argument("--window", type=int, default=16, help="N, the tokens of a call")
    parser.add_argument(
        "--order",
        "--coupling",
        choices=("probability", "token-order"),
        default="token-order",
        help="of the tokens in Pick: by falling probability, or by id as in Eq. 2",
    )
    parser.add_argument(
        "--kind", choices=KINDS, default="bits", help="embedding of uniforms, unless the table varies it"
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument(
        "--grow", type=float, default=0.0, help="fraction of the steps in which windows grow to N; for N of a hundred"
    )
    parser.add_argument("--threads", type=int, default=1)
    for name, value in asdict(Scale()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    stream = taxi_data.load(options.tokens) if options.tokens else taxi_data.synthetic(200_000)
    scale = Scale(**{name: getattr(options, name) for name in asdict(Scale())})
    laboratory = Laboratory(stream, scale, options.work)
    rows = []
    for name in TABLES if options.table == "all" else (options.table,):
        for seed in options.seeds:
            chosen = {name: getattr(options, name) for name in ("window", "kind", "order", "grow")}
            base = Run("one-hot", "ce", seed=seed, **chosen)
            for row in table(name, laboratory, base):
                rows.append(asdict(row))
                print(json.dumps(rows[-1]), flush=True)
                if options.out:
                    write(options.out, rows, scale, options.threads)
    print(laboratory.skipped)


def write(path: Path, rows: list[dict[str, Any]], scale: Scale, threads: int) -> None:
    """Write all rows so far, atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(path.name + ".new")
    new.write_text(json.dumps({"scale": asdict(scale), "threads": threads, "rows": rows}, indent=1) + "\n")
    new.replace(path)


if __name__ == "__main__":
    main()
