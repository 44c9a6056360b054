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

import numpy as np

from saltus.core.canvas import continuation
from saltus.core.distributions import DecodeGenerator
from saltus.core.forward import TARGET, ForwardInputs
from saltus.core.protocols import Network
from saltus.core.scheduler import SequenceState, run_batch
from saltus.engine.decoder import DecodingSetup, counting_generator
from saltus.engine.engine import Engine
from saltus.engine.prefix_cache import supports_prefix_cache
from saltus.engine.prefix_tree import PrefixTree
from saltus.engine.prompt_scores import PromptScores
from saltus.networks.kv_cache.memory_use import kv_bytes_per_token
from saltus.serving.batch_controller import BatchController
from saltus.serving.errors import ApiError, as_api_error, is_out_of_memory
from saltus.serving.jobs import Job, Limits, Part, TextObserver

log = logging.getLogger("saltus.serving")

IDLE_AFTER = 0.05  # seconds without a job
PREFILL_ROWS = 256  # tokens of a prompt that are read between two calls of the running texts


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
        self.replacements: queue.SimpleQueue[tuple[str, Network]] = queue.SimpleQueue()
        self.observer: TextObserver | None = None
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
            self._check_fits(job)
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

    def replace_draft_network(self, name: str, network: Network) -> None:
        """Draft with another network from the next call on. It must read what the one before it has read."""
        self.replacements.put((name, network))
        self.incoming.put(None)

    @property
    def longest_text(self) -> int:
        """Tokens of the longest text that fits into the memory, drafted by the server's method."""
        return self.limits.max_cached_bytes // self._bytes_per_token(self.engine.method)

    @property
    def num_waiting(self) -> int:
        """Jobs that have not been admitted."""
        return max(self.num_open - len(self.running), 0)

    @property
    def cache_usage(self) -> float:
        """The share of the memory for keys and values that admitted texts may come to use."""
        return sum(map(self.num_bytes, self.running)) / self.limits.max_cached_bytes

    def num_bytes(self, job: Job) -> int:
        """The most memory that the keys and values of a text can take, those of its draft models included."""
        return job.num_tokens * self._bytes_per_token(job.method)

    def _bytes_per_token(self, method: str) -> int:
        setup = self.engine.decoder.setups.get(method)  # without one, draft models are counted when they are loaded
        return sum(map(kv_bytes_per_token, [self.engine.network] if setup is None else setup.networks.values()))

    def _check_fits(self, job: Job) -> None:
        if self.num_bytes(job) > self.limits.max_cached_bytes:
            message = f"a text of {job.num_tokens:,} tokens does not fit into the server's memory; shorten it"
            raise ApiError(400, message)

    def _run(self) -> None:
        rounds = None
        sequences: list[SequenceState] = []
        while not self.closed:
            if not self.running and not self.waiting:
                self._wait_for_job()
            self._take_incoming()
            self._drop_cancelled(sequences)
            self._take_replacements()
            self._admit()
            self._read_next_piece(sequences)
            if all(job.unread for job in self.running):
                continue
            started = time.perf_counter()
            try:
                rounds = rounds or run_batch(sequences, self.networks)
                if next(rounds, StopIteration) is StopIteration:
                    rounds = None
                self._deliver(sequences, time.perf_counter() - started)
            except Exception as error:
                log.exception("a call failed")
                rounds = None
                self._recover(error, sequences)
        self._take_incoming()
        for job in [*self.running, *self.waiting]:
            self._end(job, sequences, ApiError(503, "the server is shutting down"))

    def _recover(self, error: Exception, sequences: list[SequenceState]) -> None:
        """After a call that failed: without memory the others go on if the newest text ends; else all of them end."""
        decoding = [job for job in self.running if not job.unread]
        if is_out_of_memory(error):
            if self.prefix_tree is not None and self.prefix_tree.num_bytes:
                self.prefix_tree.clear()
                return
            decoding = decoding[-1:]
        for job in decoding:
            self._end(job, sequences, as_api_error(error, "a call failed: "))

    def _wait_for_job(self) -> None:
        """Wait for a job or to be woken."""
        try:
            job = self.incoming.get(timeout=IDLE_AFTER)
        except queue.Empty:
            self._notify(lambda observer: observer.idle())
            job = self.incoming.get()
        if job is not None:
            self.waiting.append(job)

    def _take_incoming(self) -> None:
        while not self.incoming.empty():
            if (job := self.incoming.get()) is not None:
                self.waiting.append(job)

    def _take_replacements(self) -> None:
        """Put new draft networks in place, between two calls. Texts that run keep what the old ones have read."""
        while not self.replacements.empty():
            name, network = self.replacements.get()
            self.engine.decoder.replace_network(name, network)
            self.networks[name] = network

    def _drop_cancelled(self, sequences: list[SequenceState]) -> None:
        for job in [job for job in (*self.waiting, *self.running) if job.cancelled]:
            if job in self.waiting:
                self.waiting.remove(job)
            self._end(job, sequences)

    def _admit(self) -> None:
        """Admit waiting jobs in their order, while there is memory for the longest that they can get."""
        while self.waiting and len(self.running) < self.limits.max_batch:
            job = self.waiting[0]
            try:
                setup = self.engine.decoder.setup(job.method)  # loads its draft models at their first use
                self._check_fits(job)
                if sum(map(self.num_bytes, [job, *self.running])) > self.limits.max_cached_bytes:
                    return
                self._start(job, setup)
                self.running.append(self.waiting.popleft())
            except Exception as error:
                self.waiting.popleft()
                self._end(job, [], as_api_error(error))

    def _start(self, job: Job, setup: DecodingSetup) -> None:
        for name, network in setup.networks.items():
            self.networks.setdefault(name, network)
        controller = BatchController(
            setup, lambda: len(self.running), job.budget, keeps_states=self.observer is not None
        )
        generator = counting_generator(setup, job.request.request, controller)
        job.sequence = SequenceState(_isolated(generator, job))
        job.unread = len(job.request.request.prompt)
        self._notify(lambda observer: observer.begins(job))

    def _read_next_piece(self, sequences: list[SequenceState]) -> None:
        """Read a piece of the oldest prompt that is not read yet; a text whose prompt is read joins the others."""
        job = next((job for job in self.running if job.unread), None)
        if job is None:
            return
        try:
            self._read_piece(job)
        except Exception as error:
            log.exception("a prompt could not be read")
            self._end(job, sequences, as_api_error(error, "a call failed: "))
            return
        if not job.unread and job.sequence is not None:
            sequences.append(job.sequence)

    def _read_piece(self, job: Job) -> None:
        """Read the next tokens of a prompt into the job's cache; the last of them are left to its first call."""
        assert job.sequence is not None
        if job.prompt_scores is not None and job.prompt_scores.num_unscored:
            self._score_piece(job, job.prompt_scores)
            return
        if self.prefix_tree is None:  # then pieces of a prompt may round otherwise than the whole: one call reads it
            job.unread = 0
            return
        prompt, kv_caches = job.request.request.prompt, job.sequence.kv_caches
        if TARGET not in kv_caches:  # only now: what runs beside it may have read a part
            setup = self.engine.decoder.setup(job.method)
            known = prompt[: -1 - setup.num_unread_states(job.request.request)]
            kv_caches |= self.prefix_tree.take(known, setup.networks)
            kv_caches.setdefault(TARGET, self.engine.network.new_kv_cache())
            job.cached_tokens = len(kv_caches[TARGET].tokens)
            job.unread -= job.cached_tokens
        if job.unread <= PREFILL_ROWS:
            job.unread = 0
            return
        end = len(prompt) - job.unread + PREFILL_ROWS
        self.engine.network.forward([ForwardInputs(continuation(prompt[:end], 1))], [kv_caches[TARGET]])
        job.unread = len(prompt) - end

    def _score_piece(self, job: Job, scores: PromptScores) -> None:
        """Read and score the next tokens of a prompt; what the tree of prefixes has of it is of no use."""
        assert job.sequence is not None
        kv_caches, prompt = job.sequence.kv_caches, job.request.request.prompt
        kv_cache = kv_caches.setdefault(TARGET, self.engine.network.new_kv_cache())
        scores.score_piece(self.engine.network, kv_cache)
        if scores.num_unscored:
            return
        job.unread = 0
        if self.prefix_tree is None:
            del kv_caches[TARGET]  # the text is that of a prompt that one call reads
        else:  # the last tokens are left to the first call, as ever
            unread = self.engine.decoder.setup(job.method).num_unread_states(job.request.request)
            kv_cache.reuse_prefix(np.asarray(prompt[: max(len(prompt) - unread, 1)], dtype=np.int64))

    def _deliver(self, sequences: list[SequenceState], seconds: float) -> None:
        for job in list(self.running):
            if job.unread or job.sequence is None:
                continue
            request, output = job.request.request, job.request.output
            request.seconds += seconds
            calls = request.calls[job.num_delivered :]
            if job.failure is not None:
                self._end(job, sequences, job.failure)
                continue
            if calls and not job.num_delivered:  # the prompt has just been read
                self._keep_prefix(job)
            if job.sequence.pending is None:
                self._end(job, sequences)
            elif not calls:
                continue
            scores = job.prompt_scores if not job.num_delivered else None
            before = sum(len(call.tokens) for call in request.calls[: job.num_delivered])
            job.num_delivered += len(calls)
            logprobs, top = tuple(request.log_probabilities[before:]), tuple(request.top_log_probabilities[before:])
            text = output.release(request.finished)
            job.deliver(Part(text, tuple(calls), logprobs, top, request.finish_reason, scores))
        if self.running:
            self._notify(lambda observer: observer.called(seconds))

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
            if error is None:
                self._keep_prefix(job)
                self._notify(lambda observer: observer.ends(job))
            job.sequence = None

    def _notify(self, event: Callable[[TextObserver], None]) -> None:
        """Call the observer; texts go on without one that fails."""
        if (observer := self.observer) is None:
            return
        try:
            event(observer)
        except Exception:
            log.exception("the observer of the texts has failed; the server goes on without it")
            self.observer = None

    def _keep_prefix(self, job: Job) -> None:
        """Copy what a text has read into the tree of prefixes, if there is memory for it."""
        if self.prefix_tree is None or job.sequence is None:
            return
        try:
            self.prefix_tree.put(job.request.request.prompt, job.sequence.kv_caches)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            self.prefix_tree.clear()


def _isolated(generator: DecodeGenerator, job: Job) -> DecodeGenerator:
    """The generator; an error in it ends its own text only."""
    try:
        yield from generator
    except Exception as error:
        log.warning("a text could not be decoded: %s", error)
        job.failure = as_api_error(error)
