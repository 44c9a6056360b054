"""A worker runs only in the slices that it is given."""

import copy
import threading
import time
from multiprocessing import get_context
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from saltus.training import time_slices
from saltus.training.time_slices import TimeSlices


@pytest.fixture
def slices() -> TimeSlices:
    return TimeSlices(get_context("spawn"))


def test_a_worker_stops_at_its_next_pause_point_and_goes_on(slices):
    done, ended = [0], threading.Event()

    def work() -> None:
        while not ended.is_set():
            slices.pause_point()
            done[0] += 1
            time.sleep(0.001)

    worker = threading.Thread(target=work)
    worker.start()
    for _ in range(3):
        slices.pause(10.0)
        before = done[0]
        time.sleep(0.05)
        assert done[0] == before
        slices.resume()
        while done[0] == before:
            time.sleep(0.001)
    ended.set()
    worker.join()


def test_a_worker_without_work_is_not_waited_for(slices):
    slices.begin_waiting()
    started = time.monotonic()
    slices.pause(10.0)
    assert time.monotonic() - started < 5
    worker = threading.Thread(target=slices.end_waiting)
    worker.start()
    worker.join(0.1)
    assert worker.is_alive()
    slices.resume()
    worker.join(10)
    assert not worker.is_alive()


def test_a_model_has_pause_points_in_both_passes_and_so_have_its_copies(slices):
    passed = []
    slices.pause_point = lambda: passed.append(None)
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    slices.add_pause_points(model)
    for each in (model, copy.deepcopy(model)):
        passed.clear()
        output = each(torch.ones(1, 3))
        assert len(passed) == 2
        output.sum().backward()
        assert len(passed) == 4
        with torch.no_grad():
            each(torch.ones(1, 3))
        assert len(passed) == 6


def test_a_worker_ends_with_its_parent(slices, monkeypatch):
    monkeypatch.setattr(time_slices, "parent_process", lambda: SimpleNamespace(is_alive=lambda: False))
    monkeypatch.setattr(time_slices, "CHECK_SECONDS", 0.01)
    slices.pause(0.0)
    with pytest.raises(EOFError):
        slices.pause_point()


def _work(slices: TimeSlices) -> None:
    slices.begin_waiting()
    slices.end_waiting()


def test_a_worker_that_is_killed_does_not_block_its_parent(slices):
    slices.pause(0.0)
    worker = get_context("spawn").Process(target=_work, args=(slices,))
    worker.start()
    slices.pause(60.0)
    worker.kill()
    worker.join()
    started = time.monotonic()
    slices.resume()
    slices.pause(0.05)
    assert time.monotonic() - started < 5
