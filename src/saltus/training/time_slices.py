"""Let a process that trains use the cores for short slices of time, between which another process has them."""

from __future__ import annotations

import time
from multiprocessing import parent_process
from multiprocessing.context import BaseContext

from torch import Tensor, nn

WORKER_POLL, PARENT_POLL = 0.002, 0.0005  # seconds between looks at a flag
CHECK_SECONDS = 1.0  # between looks whether the parent has ended


class TimeSlices:
    """Shared by a process that works and its parent. At first the worker may run.

    The worker looks at every pause point whether it may go on. The two share flags and no locks, so that neither can
    block the other, whenever it is killed.
    """

    def __init__(self, context: BaseContext) -> None:
        self._may_run, self._pauses = context.RawValue("b", 1), context.RawValue("b", 0)

    def resume(self) -> None:
        """In the parent: let the worker run."""
        self._may_run.value = 1

    def pause(self, timeout: float) -> None:
        """In the parent: stop the worker at its next pause point, and wait until it has, or for `timeout` seconds."""
        self._may_run.value = 0
        end = time.monotonic() + timeout
        while not self._pauses.value and time.monotonic() < end:
            time.sleep(PARENT_POLL)

    def pause_point(self) -> None:
        """In the worker: wait until it may run. Errors: EOFError if the parent has ended."""
        if self._may_run.value:
            return
        self._pauses.value = 1
        parent, checked = parent_process(), time.monotonic()
        while not self._may_run.value:
            time.sleep(WORKER_POLL)
            if time.monotonic() - checked > CHECK_SECONDS:
                checked = time.monotonic()
                if parent is not None and not parent.is_alive():
                    raise EOFError
        self._pauses.value = 0

    def begin_waiting(self) -> None:
        """In the worker: nothing runs until `end_waiting`."""
        self._pauses.value = 1

    def end_waiting(self) -> None:
        """In the worker: it has something to do, as soon as it may."""
        self._pauses.value = 0
        self.pause_point()

    def add_pause_points(self, model: nn.Module) -> None:
        """In the worker: around the linear layers of a model, in both passes; its copies have them too.

        Between two of them lie a few milliseconds, but also a whole optimizer step or the making of a batch.
        """
        pause_point = self.pause_point

        def pause(module: nn.Module, inputs: object, output: Tensor) -> None:
            pause_point()
            if output.requires_grad:
                output.register_hook(lambda gradient: pause_point())

        for module in model.modules():
            if isinstance(module, nn.Linear):
                module.register_forward_hook(pause)
