"""Graphs of one stream share memory as long as one of them is left."""

import contextlib
import itertools
from types import SimpleNamespace

import pytest
import torch

from saltus.models.cuda import cuda_graphs
from saltus.models.cuda.cuda_graphs import GraphCapture

EVENTS: list[object] = []


class Graph:
    """A graph that is never replayed."""


@contextlib.contextmanager
def capturing(graph, pool, stream, **_):
    EVENTS.append(pool)
    yield


@pytest.fixture(autouse=True)
def device(monkeypatch):
    EVENTS.clear()
    pools, stream = itertools.count(), SimpleNamespace(wait_stream=lambda other: None)
    replaced = {"Stream": lambda _: stream, "current_stream": lambda _: stream, "CUDAGraph": Graph, "graph": capturing,
                "stream": lambda _: contextlib.nullcontext(), "graph_pool_handle": lambda: next(pools)}  # fmt: skip
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
