"""Let a process that trains use the cores for short slices of time, between which another process has them."""

from __future__ import annotations

from multiprocessing import parent_process
from multiprocessing.context import BaseContext

from torch import Tensor, nn

CHECK_SECONDS = 1.0  # between looks whether the parent has ended


class TimeSlices:
    """Shared by a process that works and its parent. At first the worker may run.

    The worker looks at every pause point whether it may go on, so that it stops within milliseconds.
    """

    def __init__(self, context: BaseContext) -> None:
        self._may_run, self._pauses = context.Event(), context.Event()
        self._may_run.set()

    def resume(self) -> None:
        """In the parent: let the worker run."""
        self._may_run.set()

    def pause(self, timeout: float) -> None:
        """In the parent: stop the worker at its next pause point, and wait until it has, or for `timeout` seconds."""
        self._may_run.clear()
        self._pauses.wait(timeout)

    def pause_point(self) -> None:
        """In the worker: wait until it may run. Errors: EOFError if the parent has ended."""
        if self._may_run.is_set():
            return
        self._pauses.set()
        parent = parent_process()
        while not self._may_run.wait(CHECK_SECONDS):
            if parent is not None and not parent.is_alive():
                raise EOFError
        self._pauses.clear()

    def begin_waiting(self) -> None:
        """In the worker: nothing runs until `end_waiting`."""
        self._pauses.set()

    def end_waiting(self) -> None:
        """In the worker: it has something to do, as soon as it may."""
        self._pauses.clear()
        self.pause_point()

    def add_pause_points(self, model: nn.Module) -> None:
        """In the worker: after every product of a model's forward and backward pass, and of its copies."""
        pause_point = self.pause_point

        def pause(module: nn.Module, inputs: object, output: Tensor) -> None:
            pause_point()
            if output.requires_grad:
                output.register_hook(lambda gradient: pause_point())

        for module in model.modules():
            if isinstance(module, nn.Linear):
                module.register_forward_hook(pause)
