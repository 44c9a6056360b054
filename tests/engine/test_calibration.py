"""The cost of calls by their rows, as the controller measures it."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from saltus.engine import calibration
from saltus.engine.calibration import CALIBRATION_ROWS, MAX_TURNS, measure_call_seconds
from saltus.kernels import native


@pytest.mark.parametrize("vocab", [96, 7919, 2 * 7919, 49152])
def test_rows_of_a_timed_call_are_unlike_tokens_from_all_over_the_vocabulary(vocab):
    """A mixture of experts reads more weights for them; equal rows would go to the same experts."""
    calls = []

    def forward(batch, kv_caches):
        calls.extend(batch)
        return [SimpleNamespace(logits=torch.zeros(1, vocab), seconds=1.0)]

    network: Any = SimpleNamespace(new_kv_cache=dict, forward=forward)
    assert measure_call_seconds(network) == dict.fromkeys(CALIBRATION_ROWS, 1.0)
    assert {1 + len(inputs.tokens) for inputs in calls} >= set(CALIBRATION_ROWS)
    for inputs in calls[1:]:
        tokens = [*inputs.canvas.decided_prefix[-1:].tolist(), *inputs.tokens]
        assert len(set(tokens)) == len(tokens)
        assert all(0 <= token < vocab for token in tokens)
        if len(tokens) == max(CALIBRATION_ROWS):
            quarters = {4 * token // vocab for token in tokens}
            assert quarters == {0, 1, 2, 3}


def test_calls_of_a_small_model_are_timed_more_often():
    taken = []

    def forward(batch, kv_caches):
        taken.append(0.004 if len(taken) > 20 else 0.02)  # the machine was busy at first
        return [SimpleNamespace(logits=torch.zeros(1, 96), seconds=taken[-1])]

    network: Any = SimpleNamespace(new_kv_cache=dict, forward=forward)
    assert measure_call_seconds(network, (1, 2), turns=3) == {1: 0.02, 2: 0.02}
    taken.clear()
    assert measure_call_seconds(network, (1, 2, 4), turns=3, min_seconds=1.0) == {1: 0.004, 2: 0.004, 4: 0.004}
    assert len(taken) == 2 + 3 * MAX_TURNS, "and no more than that"


@pytest.mark.skipif(native.load_kernels() is None, reason="no compiled kernels")
def test_times_are_kept_for_a_number_of_threads(monkeypatch):
    monkeypatch.setattr(calibration, "MIN_CACHED_BYTES", 0)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    network = SimpleNamespace(native_decoder=1, model=torch.nn.Linear(2, 2), device=torch.device("cpu"))
    files = set()
    for allowed in (2, 3, 8, 9):
        monkeypatch.setattr(native, "allowed_processors", lambda allowed=allowed: allowed)
        files.add(calibration._cache_file(network))
    assert len(files) == 3, "what a container grants limits the threads"


def test_times_of_large_calls_that_other_work_disturbed_are_measured_again(monkeypatch, tmp_path):
    monkeypatch.setattr(calibration, "_cache_file", lambda network: tmp_path / "seconds.json")
    busy = {16: 20.0, 32: 20.0}

    def forward(batch, kv_caches):
        rows = 1 + len(batch[0].tokens)
        return [SimpleNamespace(logits=torch.zeros(1, 96), seconds=rows * busy.get(rows, 1.0))]

    network: Any = SimpleNamespace(new_kv_cache=dict, forward=forward)
    assert calibration.call_seconds(network)[16] == 320.0
    busy.clear()
    quiet = {rows: float(rows) for rows in CALIBRATION_ROWS}
    assert calibration.call_seconds(network) == quiet
    timed = []
    monkeypatch.setattr(network, "forward", lambda *given: (timed.append(len(given[0][0].tokens)), forward(*given))[1])
    assert calibration.call_seconds(network) == quiet
    assert max(timed) == 7, "a large call takes long, so it is not timed without need"
