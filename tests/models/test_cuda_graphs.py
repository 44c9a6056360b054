"""Graphs of one stream share memory as long as one of them is left."""

import contextlib
import itertools
import threading
from types import SimpleNamespace

import pytest
import torch

from saltus.models.cuda import cuda_graphs
from saltus.models.cuda.cuda_graphs import GraphCapture

EVENTS: list[object] = []


CURRENT: list[object] = []  # the stream of the thread


class Graph:
    """A graph that is never replayed."""


@contextlib.contextmanager
def chosen(stream):
    """torch.cuda.stream"""
    before = CURRENT[0]
    CURRENT[0] = stream
    try:
        yield
    finally:
        CURRENT[0] = before


@contextlib.contextmanager
def capturing(graph, pool, stream, **_):
    EVENTS.append(pool)
    yield


@pytest.fixture(autouse=True)
def device(monkeypatch):
    EVENTS.clear()
    pools, streams = itertools.count(), [SimpleNamespace(wait_stream=lambda other: None) for _ in range(2)]
    CURRENT[:] = streams[:1]
    replaced = {"Stream": lambda _: streams[1], "current_stream": lambda _: CURRENT[0], "CUDAGraph": Graph,
                "graph": capturing, "stream": chosen, "graph_pool_handle": lambda: next(pools)}  # fmt: skip
    for name, value in replaced.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(cuda_graphs, "has_kernels", lambda _: False)


def test_memory_is_shared_until_all_graphs_are_gone():
    capture = GraphCapture(torch.device("cuda", 0))
    graphs = [capture.capture(int)[0], capture.capture(int)[0]]
    assert EVENTS == [0, 0]
    del graphs[0]
    graphs.append(capture.capture(int)[0])
    graphs.clear()
    capture.capture(int)
    assert EVENTS == [0, 0, 0, 1], "torch refuses memory that no graph holds"


def test_graphs_of_another_capture_do_not_keep_memory():
    """A target and its assistant keep their graphs in one dictionary, and drop them together."""
    target, assistant = (GraphCapture(torch.device("cuda", 0)) for _ in range(2))
    kept = {"target": target.capture(int), "assistant": assistant.capture(int)}
    kept.clear()
    kept = {"assistant": assistant.capture(int), "target": target.capture(int)}
    assert EVENTS == [0, 1, 2, 3]


def test_kernels_compile_before_they_run(monkeypatch):
    launching = pytest.importorskip("saltus.models.cuda.launching")
    monkeypatch.setattr(cuda_graphs, "has_kernels", lambda _: True)
    monkeypatch.setattr(launching, "compile_together", lambda run: EVENTS.append("compiled"))
    GraphCapture(torch.device("cuda", 0)).capture(lambda: EVENTS.append("run"))
    assert EVENTS == ["compiled", "run", "run", 0, "run"]


def test_a_capture_that_fails_leaves_the_threads_stream_and_its_own_reason(monkeypatch, caplog):
    @contextlib.contextmanager
    def failing(graph, pool, stream, **_):
        """As that of torch, which comes back to the stream only after a capture that ends well."""
        CURRENT[0] = stream
        try:
            yield
        finally:
            raise RuntimeError("operation failed due to a previous error during capture")

    def run():
        if CURRENT[0] is not before and next(runs) == 2:
            raise RuntimeError("operation not permitted when stream is capturing: item()\nmore")

    before, runs = CURRENT[0], itertools.count()
    monkeypatch.setattr(torch.cuda, "graph", failing)
    assert GraphCapture(torch.device("cuda", 0)).capture_or_warn(run, {}) is None
    assert CURRENT[0] is before
    assert caplog.messages[-1].endswith("operation not permitted when stream is capturing: item()")


def test_where_memory_is_short_other_graphs_are_dropped_before_a_call_fails(caplog):
    def run():
        if graphs:
            raise torch.OutOfMemoryError("CUDA out of memory.")

    capture, graphs = GraphCapture(torch.device("cuda", 0)), {"another": "graph"}
    assert capture.capture_or_warn(run, graphs) is not None
    assert graphs == {}
    assert not caplog.messages


def test_threads_capture_in_turn(monkeypatch):
    """A capture begins by a wait for the device, which is not permitted while another stream is captured."""

    @contextlib.contextmanager
    def waiting(*_, **__):
        inside.append(threading.current_thread())
        found.append(len(inside))
        other.wait(0.2)
        yield
        inside.pop()

    def second():
        GraphCapture(torch.device("cuda", 0)).capture(int)
        other.set()

    inside, found, other = list[object](), list[int](), threading.Event()
    monkeypatch.setattr(torch.cuda, "graph", waiting)
    thread = threading.Thread(target=second)
    thread.start()
    GraphCapture(torch.device("cuda", 0)).capture(int)
    thread.join()
    assert found == [1, 1]
