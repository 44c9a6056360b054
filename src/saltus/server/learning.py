"""Train the server's drafter on the texts that it writes, in a process of its own, and replace it when it is better.

Drafts are verified, so a replacement cannot change a text. Verified texts and the target's hidden states behind them
are what a drafter is trained on, and the calls of the texts have computed both.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any
from weakref import WeakKeyDictionary

import torch
from prometheus_client import Counter, Gauge

from saltus.core.protocols import Network
from saltus.engine.engine import Engine
from saltus.engine.target_drafters import load_drafter_for_target
from saltus.kernels.packed_weight import select_rows
from saltus.loading.metadata import read_metadata
from saltus.methods.ptp.network import DraftModel, DraftNetwork
from saltus.methods.ptp.training.online import (
    DrafterWeights,
    LearningProgress,
    LearningSettings,
    drafter_weights,
    serve_training,
)
from saltus.models.output_layer import logit_scaling
from saltus.server.allocator import MEGABYTE, return_freed_buffers
from saltus.server.engine_thread import EngineThread
from saltus.server.learned_drafters import LearnedDrafters
from saltus.server.learning_log import LOG_SECONDS, LearningLog, tokens_per_call
from saltus.server.metrics import ServerMetrics
from saltus.server.served_request import ServedRequest
from saltus.server.text_states import TextStates
from saltus.training.data.recent_texts import RecentText
from saltus.training.loop.checkpoint import lock_folder
from saltus.training.time_slices import TimeSlices

log = logging.getLogger("saltus.server")

DRAFTER = "ptp"  # the name of the network that is trained
MAX_SHARE = 0.9
MAX_WAITING = 64  # texts that wait for the process; older ones are dropped
LEAST_SHARE = 1 / 8  # of the share, where training does not help
NICENESS = 15  # of the process, whose start is not in slices
SHORTEST_SLICE, LONGEST_SLICE = 0.025, 0.1  # seconds of training between two calls
LONGEST_WAIT = 0.05  # seconds until training has stopped
FEW_KERNELS = "ONEDNN_PRIMITIVE_CACHE_CAPACITY", "128"  # oneDNN compiles some for every length, and keeps 1,024


@dataclass(frozen=True)
class LearningPlan:
    """How a server learns, and from whose texts."""

    share: float  # of the time, while texts are decoded
    group: str = ""  # see LearnedDrafters
    reset: bool = False  # forget what was learned before
    settings: LearningSettings = field(default_factory=LearningSettings)

    def __post_init__(self) -> None:
        if not 0 <= self.share <= MAX_SHARE:
            raise ValueError(f"--learn-share is {self.share:g}, but must be a share of the time, from 0 to {MAX_SHARE}")


def group_of(api_keys: Sequence[str], across_keys: bool) -> str:
    """Whose texts a server learns from. Errors: ValueError for several keys, unless their texts may be mixed."""
    keys = sorted(set(api_keys))
    if across_keys:
        return "all keys"
    if len(keys) > 1:
        raise ValueError(
            "--learn would train one drafter on the texts of several API keys; allow it by --learn-across-keys, or"
            " start a server for each key"
        )
    return f"key {keys[0]}" if keys else ""


class Learner:
    """Trains the drafter of an engine while a server decodes with it.

    What was learned earlier is put in place at once. Errors: ValueError if the engine has no drafter that can be
    trained, or if another server learns the same.
    """

    def __init__(self, engine: Engine, plan: LearningPlan) -> None:
        self.engine, self.plan = engine, plan
        self.network = _trainable_drafter(engine)
        model = engine.network.model
        first = _weights_digest(self.network.model)
        self.drafters = LearnedDrafters(model, engine.target.name, first, self.plan.group)
        self.lock = lock_folder(self.drafters.folder)
        try:
            self.lock.__enter__()
        except ValueError:
            raise ValueError(
                "another server learns from the same clients' texts; stop it, or leave out --learn"
            ) from None
        if self.plan.reset:
            self.drafters.reset()
        self._load_latest()
        self.waiting: deque[RecentText] = deque(maxlen=MAX_WAITING)
        self.states: WeakKeyDictionary[ServedRequest, TextStates] = WeakKeyDictionary()  # of running texts
        self.progress_log = LearningLog(plan.settings.evaluation_texts)
        self.on_progress: Callable[[LearningProgress], None] = lambda progress: None
        self.closed, self.wake = False, threading.Event()
        self.between_pieces = threading.Event()  # the process has nothing to do
        self.between_pieces.set()
        self.share = plan.share
        self.owed = 0.0  # seconds of training for the time that was spent on calls
        self.on_cpu = engine.network.model.device.type == "cpu"
        self.thread: threading.Thread | None = None

    def start(self, engine_thread: EngineThread, metrics: ServerMetrics) -> None:
        """Start the process, and the thread that speaks with it."""
        self.on_progress = progress_counter(metrics)
        spawn = get_context("spawn")
        self.connection, child = spawn.Pipe()
        self.slices = TimeSlices(spawn)
        self.engine_thread, engine_thread.callbacks = engine_thread, self
        self.process = spawn.Process(target=_train, args=(child, self._first_message(), self.slices), daemon=True)
        self.process.start()
        if hasattr(os, "setpriority") and self.process.pid is not None:
            with contextlib.suppress(OSError):  # it has ended
                os.setpriority(os.PRIO_PROCESS, self.process.pid, NICENESS)
        child.close()
        self.thread = threading.Thread(target=self._run, name="saltus-learner", daemon=True)
        self.thread.start()

    def close(self) -> None:
        """End the process."""
        self.closed = True
        self.wake.set()
        if self.thread is not None:
            self.process.kill()
            self.thread.join(10)
        self.lock.__exit__(None, None, None)

    def begins(self, served: ServedRequest) -> None:
        """Keep the states of a text from now on, where its method has the target return them."""
        self._pause_training()
        request = served.request
        if request.constraint is None and request.canvas is None and request.on_step is None:
            self.states[served] = TextStates(self.network.target, (*self.network.model.shape.hidden_state_layers, None))
            request.on_step = self.states[served].record

    def ends(self, served: ServedRequest) -> None:
        """Learn from a text that has ended by itself; what was kept of others is dropped."""
        states, request = self.states.pop(served, None), served.request
        if states is None or not request.finished or (text := states.text(request)) is None:
            return
        self.waiting.append(text)
        self.wake.set()

    def called(self, seconds: float) -> None:
        """Let the process train for its share of the time; the next call waits.

        It has all cores for this time: beside calls, both would be slower by more than that.
        """
        if not self._may_train():
            self._pause_training()
            return
        if not self.on_cpu:
            self.slices.resume()
            return
        works = not self.between_pieces.is_set()
        owed = self.owed + seconds * self.share / (1 - self.share)
        self.owed = min(owed, LONGEST_SLICE if works else SHORTEST_SLICE)
        if not works or self.owed < SHORTEST_SLICE:
            return
        started = time.perf_counter()
        self.slices.resume()
        self.between_pieces.wait(self.owed)
        self.slices.pause(LONGEST_WAIT)
        self.owed -= time.perf_counter() - started

    def idle(self) -> None:
        """Let the process train as long as there is no text."""
        self.slices.resume()

    def _may_train(self) -> bool:
        """Beside texts; not while texts wait or half of the batch is taken."""
        few = 2 * self.engine_thread.num_running <= self.engine_thread.limits.max_batch
        return few and not self.engine_thread.num_waiting and self.share > 0

    def _pause_training(self) -> None:
        if self.on_cpu or not self._may_train():
            self.slices.pause(0.0 if self.between_pieces.is_set() else LONGEST_WAIT)

    def _first_message(self) -> dict[str, Any]:
        model = self.engine.network.model
        return {
            "initial": drafter_weights(self.network.model),
            "embeddings": _numbers(model.get_input_embeddings().weight),
            "unembedding": _numbers(model.get_output_embeddings().weight),
            "settings": self.plan.settings,
            "logit_scaling": logit_scaling(model),
            "threads": torch.get_num_threads() if self.on_cpu else 1,
        }

    def _run(self) -> None:
        idle = False
        try:
            self._receive()  # "ready"
            while not self.closed:
                while self.waiting:
                    self.connection.send(self.waiting.popleft())
                    idle = False
                if idle:
                    self.wake.wait()
                    self.wake.clear()
                    idle = False
                    continue
                self.between_pieces.clear()
                self.connection.send("advance")
                progress: LearningProgress = self._receive()
                self.between_pieces.set()
                idle = progress.idle
                self._take(progress)
        except (EOFError, OSError):
            if not self.closed:
                log.warning("the process that trains the drafter has ended; the server goes on without learning")
        except ValueError as error:  # a full disk
            log.warning("learning has ended; the server goes on without it: %s", error)
        except Exception:
            log.exception("learning has ended; the server goes on without it")
        finally:
            self.engine_thread.callbacks = None
            self.between_pieces.set()
            self.waiting.clear()
            self.process.kill()

    def _receive(self) -> Any:
        """What the process sends, which may take minutes beside busy texts."""
        while not self.connection.poll(LOG_SECONDS):
            self.progress_log.write()
        return self.connection.recv()

    def _take(self, progress: LearningProgress) -> None:
        """Put a drafter in place that has passed its evaluation, and count what was done.

        After each evaluation without a gain the process has half of the time, until one passes.
        """
        if progress.evaluation is not None:
            least = LEAST_SHARE * self.plan.share
            self.share = self.plan.share if progress.evaluation.passed else max(self.share / 2, least)
        if progress.drafter is not None and progress.evaluation is not None:
            evaluation = tokens_per_call(progress.evaluation)
            started = time.monotonic()
            network = self._save(progress.drafter, {"tokens_per_call": evaluation, "texts": progress.texts})
            self.engine_thread.replace_draft_network(DRAFTER, network)
            seconds = round(time.monotonic() - started, 2)
            line = {
                "event": "drafter_replaced",
                "texts": progress.texts,
                "tokens_per_call": evaluation,
                "seconds": seconds,
            }
            log.info(json.dumps(line))
        self.progress_log.record(progress)
        self.on_progress(progress)

    def _save(self, weights: DrafterWeights, learned: dict[str, Any]) -> Network:
        """Save a drafter, and load it as every drafter is loaded."""
        target = self.engine.network.model
        unembedding = target.get_output_embeddings().weight.detach()
        embeddings = self.network.model.embeddings[0]
        model = DraftModel(weights.shape, torch.from_numpy(weights.tokens), embeddings, unembedding, trainable=False)
        numbers = {name: torch.from_numpy(array).view(torch.bfloat16) for name, array in weights.weights.items()}
        model.load_state_dict(numbers, strict=False, assign=True)
        before = self.drafters.latest()
        card = {} if before is None else dict(read_metadata(before, "drafter").training)
        earlier = card.get("learned", {}).get("replacements", 0)
        folder = self.drafters.save(model, {"learned": {**learned, "replacements": earlier + 1}})
        return _load(self.engine, str(folder))

    def _load_latest(self) -> None:
        if (folder := self.drafters.latest()) is None:
            return
        try:
            self.network = _load(self.engine, str(folder))
        except ValueError as error:
            log.warning("what was learned earlier is not used: %s", error)
            return
        self.engine.decoder.replace_network(DRAFTER, self.network)


def _trainable_drafter(engine: Engine) -> DraftNetwork:
    """The drafter of the engine's method. Errors: ValueError if there is none that can be trained."""
    drafter = engine.decoder.setup(engine.method).networks.get(DRAFTER)
    if isinstance(drafter, DraftNetwork):
        return drafter
    chosen = engine.decoder.chosen_method(engine.method)
    if "ptp" in chosen.split("+"):
        raise ValueError(
            "--learn trains drafters that saltus train ptp wrote, but that of this server is of another kind; leave out"
            " --learn"
        )
    raise ValueError(
        f"--learn trains the drafter of ptp, but the method is {chosen}; serve with --method ptp+lookup, or leave out"
        " --learn"
    )


def _load(engine: Engine, folder: str) -> DraftNetwork:
    network = load_drafter_for_target(f"drafter:{folder}", engine.network, engine.target.name, DRAFTER)
    assert isinstance(network, DraftNetwork)
    return network


def _weights_digest(model: DraftModel) -> bytes:
    weights = drafter_weights(model)
    digest = blake2b(weights.tokens.tobytes(), digest_size=16)
    for name in sorted(weights.weights):
        digest.update(weights.weights[name].tobytes())
    return digest.digest()


def _numbers(weight: torch.Tensor) -> Any:
    """A matrix as bfloat16 numbers, held as int16; a packed one is expanded."""
    rows = select_rows(weight.detach(), torch.arange(len(weight), device=weight.device))
    return rows.cpu().to(torch.bfloat16).view(torch.int16).numpy()


def _train(connection: Connection, training: dict[str, Any], time_slices: TimeSlices) -> None:
    """The process: it ends with its parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent too, which ends this process
    return_freed_buffers(32 * MEGABYTE)
    os.environ.setdefault(*FEW_KERNELS)
    try:
        serve_training(connection, training, time_slices)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return


def progress_counter(metrics: ServerMetrics) -> Callable[[LearningProgress], None]:
    """Adds the metrics of learning, which are ours, and returns what counts each piece of its work."""

    def made(kind: type, name: str, text: str, *more: str) -> Any:
        return kind(f"saltus:{name}", text, ["model_name", *more], registry=metrics.registry)

    steps = made(Counter, "learning_steps", "steps of training the drafter").labels(**metrics.labels)
    evaluations = made(Counter, "learning_evaluations", "comparisons with the served drafter").labels(**metrics.labels)
    replacements = made(Counter, "learning_replacements", "drafters that were replaced").labels(**metrics.labels)
    tokens = made(Gauge, "learning_tokens_per_call", "tokens a call in the last comparison", "drafter")

    def count(progress: LearningProgress) -> None:
        steps.inc(progress.steps)
        replacements.inc(progress.drafter is not None)
        if progress.evaluation is not None:
            evaluations.inc()
            tokens.labels(**metrics.labels, drafter="served").set(progress.evaluation.served)
            tokens.labels(**metrics.labels, drafter="trained").set(progress.evaluation.trained)

    return count
