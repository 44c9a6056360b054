"""Decode the requests of a server in one batch: they join and leave between calls, whatever their settings.

The model belongs to one thread. Other threads submit requests and get chunks by a callback; nothing else is shared.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from saltus.core.canvas import continuation
from saltus.core.control.controller import Controller
from saltus.core.distributions import DecodeGenerator, Step
from saltus.core.forward import TARGET, ForwardInputs
from saltus.core.protocols import Network
from saltus.core.scheduler import SequenceState, run_batch
from saltus.core.tree import Tree
from saltus.engine.decoder import DecodingSetup, counting_generator
from saltus.engine.engine import AnyRequest, Engine
from saltus.engine.prefix_cache import supports_prefix_cache
from saltus.engine.prefix_tree import PrefixTree
from saltus.engine.request import CallRecord
from saltus.serving.errors import ApiError

log = logging.getLogger("saltus.serving")

PREFILL_ROWS = 256  # tokens of a prompt that are read between two calls of the running texts


@dataclass(frozen=True)
class Limits:
    """What a server accepts."""

    max_batch: int = 16  # texts decoded at once
    max_queue: int = 256  # texts that wait
    max_cached_bytes: int = 4 * 2**30  # of the running texts' keys and values; a quarter more is for texts to come


@dataclass(frozen=True)
class Part:
    """What a call added to a text; the last part has a finish reason."""

    text: str
    calls: tuple[CallRecord, ...]
    logprobs: tuple[float, ...] = ()
    top_logprobs: tuple[list[tuple[int, float]], ...] = ()
    finish_reason: str | None = None

    @property
    def tokens(self) -> list[int]:
        """The tokens that were decided; of some the text is still held back."""
        return [token for call in self.calls for token in call.tokens]


@dataclass(eq=False)
class Job:
    """One text for the engine's thread. `deliver` gets Parts, and at last one with a finish reason, or an error."""

    request: AnyRequest
    method: str
    deliver: Callable[[Part | ApiError], None]
    budget: int | None = None  # draft tokens of a call, at most; None: the server's
    cancelled: bool = False  # set by any thread: the text is dropped between two calls
    cached_tokens: int = 0  # of the prompt, found in the tree of prefixes
    sequence: SequenceState | None = None
    unread: int = 0  # tokens of the prompt to be read before the text is decoded
    num_delivered: int = 0  # of the request's calls
    failure: Exception | None = None  # what ended its decoding, and no other text's

    @property
    def num_tokens(self) -> int:
        """The longest that the text can get."""
        return len(self.request.request.prompt) + self.request.request.max_new_tokens


class Batcher:
    """The engine's thread: admits jobs first come, first served, reads prompts piece by piece, and decodes.

    A text does not depend on what runs beside it: rows of a call do not depend on each other, and a method and its
    budget cannot change a text.
    """

    def __init__(self, engine: Engine, limits: Limits) -> None:
        self.engine, self.limits = engine, limits
        self.incoming: queue.SimpleQueue[Job | None] = queue.SimpleQueue()  # None wakes the thread
        self.waiting: deque[Job] = deque()
        self.running: list[Job] = []
        self.num_open = 0  # jobs submitted and not ended
        self.lock = threading.Lock()  # of num_open
        self.closed = False
        self.networks: dict[str, Network] = {}
        self.bytes_per_token = _bytes_per_token(engine)
        self.prefix_tree = PrefixTree(limits.max_cached_bytes // 4) if supports_prefix_cache(engine.network) else None
        self.thread = threading.Thread(target=self._run, name="saltus-engine", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self.thread.start()

    def close(self, timeout: float | None = None) -> None:
        """Drop what still runs and end the thread."""
        self.closed = True
        self.incoming.put(None)
        self.thread.join(timeout)

    def submit(self, *jobs: Job) -> None:
        """Queue jobs together. Errors: ApiError 429 if the queue is full, 503 if the server is closing."""
        for job in jobs:
            if job.num_tokens * self.bytes_per_token > self.limits.max_cached_bytes:
                raise ApiError(
                    400, f"a text of {job.num_tokens:,} tokens does not fit into the server's memory; shorten it"
                )
        with self.lock:
            if self.closed:
                raise ApiError(503, "the server is shutting down; try another one")
            if self.num_open + len(jobs) > self.limits.max_batch + self.limits.max_queue:
                raise ApiError(429, "the queue is full; try again later", headers={"Retry-After": "1"})
            self.num_open += len(jobs)
        for job in jobs:
            self.incoming.put(job)

    def cancel(self, job: Job) -> None:
        """Drop a job; its memory is free after the call that runs now."""
        job.cancelled = True
        self.incoming.put(None)

    @property
    def longest_text(self) -> int:
        """Tokens of the longest text that fits into the memory."""
        return self.limits.max_cached_bytes // self.bytes_per_token

    @property
    def num_waiting(self) -> int:
        """Jobs that have not been admitted."""
        return max(self.num_open - len(self.running), 0)

    @property
    def cache_usage(self) -> float:
        """The share of the memory for keys and values that admitted texts may come to use."""
        return sum(job.num_tokens for job in self.running) * self.bytes_per_token / self.limits.max_cached_bytes

    def _run(self) -> None:
        rounds = None
        sequences: list[SequenceState] = []
        while not self.closed:
            self._take_incoming(block=not self.running and not self.waiting)
            self._admit()
            for job in [job for job in self.running if job.cancelled]:
                self._end(job, sequences)
            reading = next((job for job in self.running if job.unread), None)
            try:
                if reading is not None:
                    self._read_piece(reading)
                    if not reading.unread and reading.sequence is not None:
                        sequences.append(reading.sequence)
                if not sequences:
                    continue
                started = time.perf_counter()
                rounds = rounds or run_batch(sequences, self.networks)
                if next(rounds, StopIteration) is StopIteration:
                    rounds = None
                self._deliver(sequences, time.perf_counter() - started)
            except Exception as error:
                log.exception("a call failed")
                rounds = None
                for job in list(self.running):
                    self._end(job, sequences, ApiError(500, f"a call failed: {error}"))
        self._take_incoming(block=False)
        for job in [*self.running, *self.waiting]:
            self._end(job, sequences, ApiError(503, "the server is shutting down"))

    def _take_incoming(self, block: bool) -> None:
        try:
            while True:
                job = self.incoming.get(block=block)
                if job is not None:
                    self.waiting.append(job)
                block = False
        except queue.Empty:
            pass

    def _admit(self) -> None:
        """Admit waiting jobs in their order, while there is memory for the longest that they can get."""
        while self.waiting and len(self.running) < self.limits.max_batch:
            job = self.waiting[0]
            tokens = job.num_tokens + sum(each.num_tokens for each in self.running)
            if not job.cancelled and tokens * self.bytes_per_token > self.limits.max_cached_bytes and self.running:
                return
            self.waiting.popleft()
            self.running.append(job)
            if job.cancelled:
                continue
            try:
                self._start(job)
            except Exception as error:
                self._end(job, [], _as_api_error(error))

    def _start(self, job: Job) -> None:
        setup = self.engine.decoder.setup(job.method)
        for name, network in setup.networks.items():
            self.networks.setdefault(name, network)
        job.sequence = SequenceState(
            _isolated(counting_generator(setup, job.request.request, _BatchController(setup, self, job.budget)), job)
        )
        job.unread = len(job.request.request.prompt)

    def _read_piece(self, job: Job) -> None:
        """Read the next tokens of a prompt into the job's cache; the last of them are left to its first call."""
        assert job.sequence is not None
        if self.prefix_tree is None:  # then pieces of a prompt may round otherwise than the whole: one call reads it
            job.unread = 0
            return
        prompt, kv_caches = job.request.request.prompt, job.sequence.kv_caches
        if TARGET not in kv_caches:  # only now: what runs beside it may have read a part
            setup = self.engine.decoder.setup(job.method)
            kv_caches |= self.prefix_tree.take(prompt[: -1 - setup.num_unread_states(job.request.request)])
            kv_caches.setdefault(TARGET, self.engine.network.new_kv_cache())
            job.cached_tokens = len(kv_caches[TARGET].tokens)
            job.unread -= job.cached_tokens
        if job.unread <= PREFILL_ROWS:
            job.unread = 0
            return
        end = len(prompt) - job.unread + PREFILL_ROWS
        self.engine.network.forward([ForwardInputs(continuation(prompt[:end], 1))], [kv_caches[TARGET]])
        job.unread = len(prompt) - end

    def _deliver(self, sequences: list[SequenceState], seconds: float) -> None:
        for job in list(self.running):
            if job.unread or job.sequence is None:
                continue
            request, output = job.request.request, job.request.output
            request.seconds += seconds
            calls = request.calls[job.num_delivered :]
            if job.failure is not None:
                self._end(job, sequences, _as_api_error(job.failure))
                continue
            if self.prefix_tree is not None and calls and not job.num_delivered:  # the prompt has just been read
                self.prefix_tree.put(request.prompt, job.sequence.kv_caches)
            if job.sequence.pending is None:
                self._end(job, sequences)
            elif not calls:
                continue
            before = sum(len(call.tokens) for call in request.calls[: job.num_delivered])
            job.num_delivered += len(calls)
            logprobs, top = tuple(request.log_probabilities[before:]), tuple(request.top_log_probabilities[before:])
            job.deliver(Part(output.release(request.finished), tuple(calls), logprobs, top, request.finish_reason))

    def _end(self, job: Job, sequences: list[SequenceState], error: ApiError | None = None) -> None:
        if error is not None:
            job.deliver(error)
        if job in self.running:
            self.running.remove(job)
        request = job.request.request
        if request.memory is not None and request.calls and error is None:
            request.memory.add(request.prompt, request.tokens)
        with self.lock:
            self.num_open -= 1
        if job.sequence is not None:
            sequences[:] = [one for one in sequences if one is not job.sequence]
            if self.prefix_tree is not None and error is None:
                self.prefix_tree.put(request.prompt, job.sequence.kv_caches)
            job.sequence = None


def _isolated(generator: DecodeGenerator, job: Job) -> DecodeGenerator:
    """The generator; an error in it ends its own text only."""
    try:
        yield from generator
    except Exception as error:
        log.warning("a text could not be decoded: %s", error)
        job.failure = error


def _as_api_error(error: Exception) -> ApiError:
    return ApiError(400 if isinstance(error, ValueError) else 500, str(error))


class _BatchController(Controller):
    """The controller for as many texts as run at the moment, so that drafts give way as a batch fills."""

    def __init__(self, setup: DecodingSetup, batcher: Batcher, budget: int | None) -> None:
        self._setup, self._batcher = setup, batcher
        budget = setup.budget if budget is None else min(setup.budget, budget)
        super().__init__(budget, setup.controller(1).adaptive, setup.acceptance, setup.call_cost)

    def _current(self) -> Controller:
        together = 1 << (max(len(self._batcher.running), 1) - 1).bit_length()
        found = self._setup.controller(together)
        self.call_cost, self.drafting_switch = found.call_cost, found.drafting_switch
        return found

    def should_draft(self) -> bool:
        return self._current().should_draft()

    def num_nodes(self, tree: Tree) -> int:
        return min(self._current().num_nodes(tree), self.budget)

    def record(self, tree: Tree, step: Step, draft_seconds: float = 0.0, other_seconds: float = 0.0) -> None:
        self._current().record(tree, step, draft_seconds, other_seconds)


def _bytes_per_token(engine: Engine) -> int:
    """Of the keys and values of all layers of the target."""
    config = engine.network.model.config
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return 2 * config.num_hidden_layers * heads * head_dim * engine.network.model.dtype.itemsize
