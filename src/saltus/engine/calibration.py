"""Measure how long a call takes by the number of its rows: the controller weighs draft tokens by it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from hashlib import blake2b
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

from saltus.core.canvas import continuation
from saltus.core.control.call_cost import never_falling
from saltus.core.forward import ForwardInputs
from saltus.core.protocols import Network
from saltus.engine.tuned_settings import machine_name
from saltus.kernels import native
from saltus.kernels.model_weights import describe_weights
from saltus.storage.cache_files import DamagedFile, read_json, report_damage, write_json
from saltus.storage.cache_folder import cache_folder

CALIBRATION_ROWS = (1, 2, 4, 8, 16, 32)  # row counts that are timed
MIN_CACHED_BYTES = 50_000_000  # of weights; the calls of smaller models are timed in no time
REPEATED_ROWS = (1, 2, 4, 8)  # row counts that are timed in every run
QUICK_SECONDS = 0.05  # other row counts are timed again, too, where one turn of them takes less
SMALL_MODEL_SECONDS = 0.05  # for which calls of models without a cache are timed, in some turns
MAX_TURNS = 10
MAX_TIMES_TWICE = 2.5  # that a call of twice the rows takes; more was disturbed
MAX_RISE = 1.05  # of a time, from one run to the next
NEAR = 1.1  # of the time that is known: what took no longer is not timed once more
CONTEXT_TOKENS = 16  # of the text before the rows of a timed call
GOLDEN_RATIO = 0.6180339887  # of the vocabulary, from one token of a timed call to the next: they lie far apart


def call_seconds(network: Any) -> dict[int, float]:
    """`measure_call_seconds`, kept in the cache for models of the same shapes and formats on this machine.

    Small calls are timed again in every run, large ones where that is quick or their times look disturbed. Times fall
    at once and rise slowly: other work on the machine may have disturbed a measurement, and it slows small calls more
    than large ones.
    """
    file = _cache_file(network)
    if file is None:
        return measure_call_seconds(network, min_seconds=SMALL_MODEL_SECONDS)
    known = _read_cache(file)
    if known:
        measured = measure_call_seconds(network, REPEATED_ROWS, turns=1)
        if any(seconds > NEAR * known[rows] for rows, seconds in measured.items()):
            again = measure_call_seconds(network, REPEATED_ROWS, turns=1)
            measured = {rows: min(seconds, again[rows]) for rows, seconds in measured.items()}
        others = [rows for rows in CALIBRATION_ROWS if rows not in REPEATED_ROWS]
        if sum(known[rows] for rows in others) < QUICK_SECONDS or _is_disturbed(known | measured):
            measured |= measure_call_seconds(network, others, turns=1)
        measured = {rows: min(MAX_RISE * seconds, measured.get(rows, seconds)) for rows, seconds in known.items()}
        measured = never_falling(measured)
    else:
        measured = measure_call_seconds(network)
    if measured != known:
        with suppress(OSError):  # a full or read-only disk: it is measured again
            write_json(file, {"seconds": list(measured.items())})
    return measured


def _is_disturbed(seconds: Mapping[int, float]) -> bool:
    """True if twice the rows seem to take much more than twice the time."""
    return any(seconds[more] > MAX_TIMES_TWICE * seconds[rows] for rows, more in pairwise(sorted(seconds)))


def _read_cache(file: Path) -> dict[int, float]:
    """The times that were measured before; none if there are none, or if the file is damaged."""
    try:
        known = dict(read_json(file)["seconds"])
    except OSError:
        return {}
    except DamagedFile:
        report_damage(file, "calls are timed again")
        return {}
    return known if set(known) == set(CALIBRATION_ROWS) else {}


def _cache_file(network: Any) -> Path | None:
    """Where the times of such a network are kept; None if they are not."""
    kernels = native.load_kernels()
    if kernels is None or getattr(network, "native_decoder", None) is None:
        return None
    model = network.model
    if sum(weight.nbytes for weight in model.parameters()) < MIN_CACHED_BYTES:
        return None
    shapes = [(name, tuple(weight.shape)) for name, weight in model.named_parameters()]
    threads = min(torch.get_num_threads(), native.allowed_processors())
    key = shapes, describe_weights(model), machine_name(network.device), threads, kernels._name
    return cache_folder() / "call_costs" / f"{blake2b(repr(key).encode(), digest_size=12).hexdigest()}.json"


def measure_call_seconds(
    network: Network, row_counts: Sequence[int] = CALIBRATION_ROWS, turns: int = 3, min_seconds: float = 0.0
) -> dict[int, float]:
    """Seconds of a call by its number of rows, after a short text: the least of `turns`, since noise only adds.

    There are up to MAX_TURNS turns while all of them took less than `min_seconds`.
    The rows are tokens from all over the vocabulary, as many different ones as it has: a mixture of experts reads the
    weights of those experts that the rows of a call go to.
    """
    kv_cache = network.new_kv_cache()
    vocab = network.forward([ForwardInputs(continuation([0], 1))], [kv_cache])[0].logits.shape[-1]
    step = next(step for step in itertools.count(round(GOLDEN_RATIO * vocab)) if math.gcd(step, vocab) == 1)
    canvas = continuation(np.arange(CONTEXT_TOKENS) * step % vocab, 2)

    def seconds(rows: int) -> float:
        nodes = np.arange(CONTEXT_TOKENS, CONTEXT_TOKENS + rows - 1) * step % vocab
        inputs = ForwardInputs(canvas, tuple(nodes.tolist()), (-1,) * len(nodes))
        return network.forward([inputs], [kv_cache])[0].seconds

    seconds(max(row_counts))
    timed = [[seconds(rows) for rows in row_counts] for _ in range(turns)]
    while len(timed) < MAX_TURNS and sum(map(sum, timed)) < min_seconds:
        timed.append([seconds(rows) for rows in row_counts])
    return never_falling(dict(zip(row_counts, map(min, zip(*timed, strict=True)), strict=True)))
