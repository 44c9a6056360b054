"""Share the steps of a training run among the processes that torchrun or `accelerate launch` started, or take one.

torch.distributed is used directly: a launcher only sets environment variables, and the loss of a step reaches the
trained weights by hooks, so that a trainer's wrapper around a model's forward would not see it.
"""

from __future__ import annotations

import os
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.rendezvous import rendezvous
from torch.nn.parallel import DistributedDataParallel

LONGEST_WAIT = timedelta(days=7)  # a launcher ends processes that wait for a lost one
SECONDS_BETWEEN_POLLS = 0.02
FAILED, INTERRUPTED = 1, 130  # exit codes of processes that print nothing
STDERR = 2
STOPPING = "stopping after this step, which is saved"


@dataclass(frozen=True)
class Processes:
    """This process among all of a run. Each has the weights and the optimizer's state, and a part of each batch."""

    rank: int = 0
    count: int = 1
    store: Any = field(default=None, repr=False)  # of torch.distributed, which all processes share

    @property
    def is_main(self) -> bool:
        """True for the process that writes files and prints."""
        return self.rank == 0

    def share(self, num_texts: int) -> slice:
        """This process's texts of a batch. Errors: ValueError if a process would have none."""
        if num_texts < self.count:
            raise ValueError(
                f"a step has {num_texts} texts, but {self.count} processes share it; start {num_texts} processes, or"
                f" give a step {self.count} texts or more (data.batch_size of a recipe)"
            )
        return slice(self.rank, None, self.count)

    def average(self, value: Tensor) -> Tensor:
        """The mean of a tensor over the processes, without gradient."""
        if self.count == 1:
            return value.detach()
        total = value.detach().clone()
        dist.all_reduce(total)
        return total / self.count

    def weighted_mean(self, values: Tensor, weights: Tensor, floor: float = 0.0) -> Tensor:
        """Σ v w / Σ w, where the sums are over all processes if this is averaged over them; Σ w is at least `floor`."""
        return (values * weights).sum() / self.average(weights.sum()).clamp_min(floor / self.count)

    def mean(self, values: Tensor) -> Tensor:
        """The same with equal weights; 0 where no process has values."""
        return self.weighted_mean(values, torch.ones_like(values), floor=1.0)

    def wait(self) -> None:
        """Return when all processes are here. Ctrl-C ends the waiting at once."""
        if self.count == 1:
            return
        arrival = dist.all_reduce(torch.zeros(1), async_op=True)
        assert arrival is not None
        while not arrival.is_completed():
            time.sleep(SECONDS_BETWEEN_POLLS)
        arrival.wait()

    def synchronized(self, module: nn.Module, loss: Callable[[int], Tensor]) -> Callable[[int], Tensor]:
        """The loss, such that its backward pass averages the gradients of the module over the processes."""
        if self.count == 1:
            return loss
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # newer releases of torch have another name for the latter
            # a step may leave weights out, such as those of uniforms where all texts are greedy
            part = _StepLoss(module, loss)
            return DistributedDataParallel(part, find_unused_parameters=True, broadcast_buffers=False)

    def shard(self, model: Any) -> None:
        """Distribute the weights of a frozen model's layers (FSDP2): all of a layer are on a device only in its calls.

        Embeddings, the last norm and the LM head stay whole, since they are also read outside of the model's calls.
        Every call must be made by all processes. Errors: ValueError for a model without layers of Transformers' kind.
        """
        from torch.distributed.fsdp import fully_shard
        from transformers.modeling_layers import GradientCheckpointingLayer

        layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
        if self.count == 1:
            return
        if not layers:
            raise ValueError(f"{type(model).__name__} has no layers that can be distributed; leave --fsdp out")
        kind = "cuda" if "nccl" in dist.get_backend_config() else "cpu"
        mesh = dist.init_device_mesh(kind, (self.count,))
        model.requires_grad_(False)
        for layer in layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh, ignored_params=set(model.parameters()))  # it orders the calls of the layers
        model.to(kind)  # what stays whole; the parts of layers are there

    @contextmanager
    def postponed_interrupt(self) -> Iterator[Callable[[], bool]]:
        """While open, Ctrl-C waits for the end of a step: entering gives a function that says whether it was pressed.

        All processes must call it together, and have the same answer. In one process alone SIGTERM does the same, and
        the second of either raises KeyboardInterrupt at once; launchers send several for one.
        """
        if threading.current_thread() is not threading.main_thread():
            yield lambda: False
            return
        received: list[int] = []

        def postpone(number: int, frame: object) -> None:
            if received and self.count == 1:
                raise KeyboardInterrupt
            if self.is_main and not received:
                again = "; Ctrl-C again stops at once" if self.count == 1 and number == signal.SIGINT else ""
                line = STOPPING + again
                os.write(STDERR, f"\n{line}\n".encode())  # it may be print() that is interrupted
            received.append(number)

        # with SIGTERM a launcher ends processes that wait for one that failed
        signals = (signal.SIGINT, signal.SIGTERM) if self.count == 1 else (signal.SIGINT,)
        former = [signal.signal(each, postpone) for each in signals]
        try:
            yield lambda: float(self.average(torch.tensor(float(bool(received))))) > 0
        finally:
            for each, handler in zip(signals, former, strict=True):
                signal.signal(each, signal.SIG_DFL if handler is None else handler)  # None: not one of Python's

    def is_first_to_fail(self) -> bool:
        """True in one process only, also if several fail: it prints the error."""
        if self.store is None:
            return True
        try:
            return self.store.add("failures", 1) == 1
        except RuntimeError:  # the store has ended with the process that failed first
            return False


ONE_PROCESS = Processes()


class _StepLoss(nn.Module):
    """A module whose forward pass is the loss of a step."""

    def __init__(self, module: nn.Module, loss: Callable[[int], Tensor]) -> None:
        super().__init__()
        self.module, self.loss = module, loss

    def forward(self, step: int) -> Tensor:
        return self.loss(step)


def launched_processes() -> int:
    """How many processes a launcher started with this one; 1 without a launcher."""
    return int(os.environ.get("WORLD_SIZE", "1")) if "RANK" in os.environ else 1


@contextmanager
def join_processes(device: str = "cpu") -> Iterator[Processes]:
    """While open, the processes of a launcher are connected: on CUDA each has the GPU of its local rank.

    If several fail, the first of them raises its error, and the main one at Ctrl-C; the others exit silently.
    Errors: ValueError where there are fewer GPUs than processes, or for a device such as cuda:1.
    """
    if launched_processes() == 1:
        yield ONE_PROCESS
        return
    # `accelerate launch --use_fsdp` lets Transformers load weights in the first process only
    os.environ.pop("FSDP_CPU_RAM_EFFICIENT_LOADING", None)
    backend = "gloo"
    if device.startswith("cuda"):
        local, gpus = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
        if ":" in device:
            raise ValueError(f"--device {device} names one GPU, but each process has its own; give --device cuda")
        if local >= gpus:
            raise ValueError(f"there are {gpus} GPUs for the processes; start {gpus} of them here, or use --device cpu")
        torch.cuda.set_device(local)
        backend = "cpu:gloo,cuda:nccl"
    store, rank, count = next(rendezvous("env://", timeout=LONGEST_WAIT))
    dist.init_process_group(backend, store=store, rank=rank, world_size=count, timeout=LONGEST_WAIT)
    processes = Processes(rank, count, store)
    try:
        yield processes
    except KeyboardInterrupt:
        processes.is_first_to_fail()  # so that others, which lose this one, print nothing
        if processes.is_main:
            raise
        raise SystemExit(INTERRUPTED) from None
    except Exception as error:
        if not processes.is_first_to_fail():
            raise SystemExit(FAILED) from None
        if isinstance(error, RuntimeError) and "by peer" in str(error):  # gloo: connection closed, or reset, by peer
            raise ValueError("another process was killed; the same command goes on from the last checkpoint") from None
        raise
    dist.destroy_process_group()


def shards_weights(fsdp: bool) -> bool:
    """True if several processes are to share weights: `fsdp`, or by `accelerate launch --use_fsdp --fsdp_version 2`.

    Errors: ValueError for the first version of FSDP.
    """
    if fsdp and launched_processes() == 1:
        raise ValueError("--fsdp distributes weights over processes; start it with torchrun --nproc-per-node N")
    by_launcher = os.environ.get("ACCELERATE_USE_FSDP", "").lower() in ("1", "true")
    if by_launcher and os.environ.get("FSDP_VERSION", "1") != "2":
        raise ValueError("accelerate is configured for FSDP 1; give it --fsdp_version 2")
    return (fsdp or by_launcher) and launched_processes() > 1
