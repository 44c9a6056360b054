"""Processes, and machines of a Ray cluster, that write shards of teacher texts."""

from __future__ import annotations

import logging
import signal
from collections import deque
from collections.abc import Generator, Mapping, Sequence
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch

from saltus.engine.engine import Engine
from saltus.engine.load import load
from saltus.loading.fetching import first_line
from saltus.training.data.teacher_texts import CollectionPlan, write_shard


def collect_in_process(
    engine: Engine, plan: CollectionPlan, shard_numbers: Sequence[int], folder: Path, batch_size: int
) -> Generator[tuple[int, int]]:
    """Write shards, one after the other; yields as `write_shard` does."""
    for number in shard_numbers:
        yield from write_shard(engine, plan, number, folder, batch_size)


def collect_in_processes(
    plan: CollectionPlan,
    shard_numbers: Sequence[int],
    folder: Path,
    load_options: Mapping[str, Any],
    batch_size: int,
    num_processes: int,
) -> Generator[tuple[int, int]]:
    """Write shards with processes that each load the model and share the threads.

    A process ends when its parent ends. Errors: ValueError if a process fails or is killed.
    """
    waiting, spawn, processes = deque(shard_numbers), get_context("spawn"), {}
    threads = max(1, torch.get_num_threads() // num_processes)
    try:
        for _ in range(min(num_processes, len(waiting))):
            connection, child_connection = spawn.Pipe()
            arguments = child_connection, plan, folder, dict(load_options), batch_size, threads
            process = spawn.Process(target=_worker, args=arguments, daemon=True)
            process.start()
            child_connection.close()
            processes[connection] = process
            connection.send(waiting.popleft())
        while processes:
            for connection in wait(list(processes)):
                assert isinstance(connection, Connection)
                message = connection.recv()
                if isinstance(message, str):
                    raise ValueError(message)
                if message is not None:
                    yield message
                elif waiting:
                    connection.send(waiting.popleft())
                else:
                    connection.send(None)
                    processes.pop(connection).join()
    except (EOFError, ConnectionError):  # the latter where something sent to the process was not read
        raise ValueError("a process that wrote texts was killed; take fewer --processes") from None
    finally:
        for process in processes.values():
            process.kill()


def collect_with_ray(
    plan: CollectionPlan,
    shard_numbers: Sequence[int],
    folder: Path,
    load_options: Mapping[str, Any],
    batch_size: int,
    num_processes: int,
    address: str,
) -> Generator[tuple[int, int]]:
    """Write shards with Ray Data: each process of a cluster loads the model once. All machines share the folder.

    Errors: ValueError where Ray is missing or cannot be reached, or if a process fails.
    """
    try:
        import ray
        import ray.data
        from ray.exceptions import RayError
    except ImportError:
        raise ValueError("Ray is missing; pip install '.[ray]' in the clone, or leave --ray out") from None
    for logger in ("ray", "ray.data"):
        logging.getLogger(logger).setLevel(logging.CRITICAL)
    started = not ray.is_initialized()
    if started:
        try:
            ray.init(address, log_to_driver=False, logging_level=logging.ERROR)
        except ConnectionError as error:
            raise ValueError(
                f"there is no Ray cluster at {address} ({first_line(error)}); start one with ray start --head"
            ) from None
    ray.data.DataContext.get_current().enable_progress_bars = False
    threads = max(1, torch.get_num_threads() // num_processes) if address == "local" else None
    arguments = plan, folder.resolve(), dict(load_options), batch_size, threads
    gpus = 1 if str(load_options["device"]).startswith("cuda") else None
    shards = ray.data.from_items(
        [{"shard": number} for number in shard_numbers], override_num_blocks=len(shard_numbers)
    )
    try:
        done = shards.map_batches(
            _ShardWriter, fn_constructor_args=arguments, batch_size=1,
            compute=ray.data.ActorPoolStrategy(size=min(num_processes, len(shard_numbers))), num_gpus=gpus,
        )  # fmt: skip
        for row in done.iter_rows():
            if row["error"]:
                raise ValueError(row["error"])
            yield row["texts"], row["tokens"]
    except RayError as error:
        raise ValueError(f"Ray: {first_line(error)}; take fewer --processes, or look at its dashboard") from None
    finally:
        if started:
            ray.shutdown()


class _ShardWriter:
    """A process of a cluster: it loads the model once, and writes the shards whose numbers it receives."""

    def __init__(self, *arguments: Any) -> None:
        self.plan, self.folder, self.load_options, self.batch_size, self.num_threads = arguments
        self.engine: Engine | None = None

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, list[Any]]:
        """Errors are returned as text, since Ray does not keep their type."""
        texts = tokens = 0
        try:
            if self.engine is None:
                if self.num_threads is not None:
                    torch.set_num_threads(self.num_threads)
                self.engine = load(**self.load_options)
            for number in batch["shard"]:
                for ended, new in write_shard(self.engine, self.plan, int(number), self.folder, self.batch_size):
                    texts, tokens = texts + ended, tokens + new
        except Exception as error:
            return {"texts": [texts], "tokens": [tokens], "error": [_error_line(error)]}
        return {"texts": [texts], "tokens": [tokens], "error": [""]}


def _worker(
    parent: Connection,
    plan: CollectionPlan,
    folder: Path,
    load_options: Mapping[str, Any],
    batch_size: int,
    num_threads: int,
) -> None:
    """Write the shards whose numbers the parent sends; sends None after each."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent too, which kills this process
    try:
        torch.set_num_threads(num_threads)
        engine = load(**load_options)
        for number in iter(parent.recv, None):
            for done in write_shard(engine, plan, number, folder, batch_size):
                parent.send(done)
            parent.send(None)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return
    except Exception as error:
        parent.send(_error_line(error))


def _error_line(error: BaseException) -> str:
    """An error in one line."""
    return f"{error}" if isinstance(error, ValueError) else f"{type(error).__name__}: {first_line(error)}"
