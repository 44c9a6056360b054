"""Capture calls as CUDA graphs, whose memory they share."""

from __future__ import annotations

import contextlib
import gc
import logging
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from saltus.core.out_of_memory import out_of_memory_behind
from saltus.models.cuda.kernel_support import has_kernels

Outputs = TypeVar("Outputs")
log = logging.getLogger("saltus")
_one_at_a_time = threading.Lock()  # each capture begins by a wait for the whole device, which would end another one


@dataclass
class GraphCapture:
    """The stream and the memory of all graphs that are replayed one at a time."""

    device: torch.device
    memory_pool: Any = field(init=False, default=None)
    stream: Any = field(init=False, default=None)  # one for all, since matrix libraries keep a workspace for each
    graphs: weakref.WeakSet[Any] = field(init=False, default_factory=weakref.WeakSet)  # that share the memory

    def capture(self, run: Callable[[], Outputs]) -> tuple[Any, Outputs]:
        """A graph of `run` and its outputs, after idle runs: one compiles kernels, two load them and allocate memory.

        Unless a graph is left that shares its memory, it gets new memory: torch takes none that all graphs have left.
        Errors: RuntimeError for what cannot be captured.
        """
        if has_kernels(self.device):
            from saltus.models.cuda.launching import compile_together

            compile_together(run)
        self.stream = self.stream or torch.cuda.Stream(self.device)
        if not self.graphs:
            self.memory_pool = torch.cuda.graph_pool_handle()
        current = torch.cuda.current_stream(self.device)
        self.stream.wait_stream(current)
        with torch.cuda.stream(self.stream):
            for _ in range(2):
                run()
        current.wait_stream(self.stream)
        graph = torch.cuda.CUDAGraph()
        with (
            _one_at_a_time,
            torch.cuda.stream(current),  # torch.cuda.graph leaves its own one to the thread if the capture fails
            _no_garbage_collection(),
            torch.cuda.graph(graph, self.memory_pool, self.stream, capture_error_mode="thread_local"),
        ):
            outputs = run()
        self.graphs.add(graph)
        return graph, outputs

    def capture_or_warn(self, run: Callable[[], Outputs], graphs: dict[Any, Any]) -> tuple[Any, Outputs] | None:
        """The same; None, after a warning, for what cannot be captured.

        Where memory is short, the other `graphs` are dropped, whose memory it may have, and captured anew when they are
        needed. Errors: out of memory.
        """
        try:
            return self.capture(run)
        except RuntimeError as error:
            no_memory = out_of_memory_behind(error)  # the end of its capture fails, too
            if no_memory is None:
                before = error.__context__  # what made the end of the capture fail
                reason = str(before if isinstance(before, RuntimeError) else error).splitlines()[0]
                log.warning("calls cannot be captured as CUDA graphs and run without them: %s", reason)
                return None
            if not graphs:
                raise no_memory from None
        del no_memory  # whose frames hold tensors
        graphs.clear()
        return self.capture_or_warn(run, graphs)


@contextlib.contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Graphs that nobody holds any more would end a capture if they were destroyed during it."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
