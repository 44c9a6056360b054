"""Decode the requests of a server in one batch: they join and leave between calls, whatever their settings.

The model belongs to one thread. Other threads submit requests and get chunks by a callback; nothing else is shared.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from itertools import count

from saltus.core.distributions import DecodeGenerator
from saltus.core.protocols import Network
from saltus.core.scheduler import SequenceState, run_batch
from saltus.engine.decoder import DecodingSetup, counting_generator
from saltus.engine.engine import Engine
from saltus.models.memory_use import kv_bytes_per_token
from saltus.server.batch_controller import BatchController
from saltus.server.constraint_time import LimitedConstraint
from saltus.server.errors import ApiError, as_api_error, is_out_of_memory, place_of
from saltus.server.jobs import Delta, Job, Limits, RequestCallbacks, next_delta
from saltus.server.prompt_reading import PromptReader
from saltus.server.turns import Shares, giving_way, memory_limit, next_in_turn

log = logging.getLogger("saltus.server")

IDLE_AFTER = 0.05  # seconds without a job


class EngineThread:
    """The engine's thread: admits jobs by turns of clients and requests, reads prompts piece by piece, and decodes.

    A text does not depend on what runs beside it: rows of a call do not depend on each other, and a method and its
    budget cannot change a text. So a text may also pause, with its keys and values, while another one has its place.
    """

    def __init__(self, engine: Engine, limits: Limits) -> None:
        self.engine, self.limits = engine, limits
        self.incoming: queue.SimpleQueue[Job | None] = queue.SimpleQueue()  # None wakes the thread
        self.waiting: list[Job] = []
        self.running: list[Job] = []
        self.paused: list[Job] = []  # texts that have begun, and whose places others have
        self.num_open = 0  # jobs submitted and not ended
        self.lock = threading.Lock()  # of num_open and closed
        self.closed = False
        self.request_numbers = count(1)
        self.networks: dict[str, Network] = {}
        self.replacements: queue.SimpleQueue[tuple[str, Network]] = queue.SimpleQueue()
        self.callbacks: RequestCallbacks | None = None
        self.prompts = PromptReader(engine, limits.max_cached_bytes // 4)
        self.on_failure: Callable[[], None] = lambda: None  # called by the thread if it ends by a fault, at last
        self.thread = threading.Thread(target=self._run, name="saltus-engine", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self.thread.start()

    def close(self, timeout: float | None = None) -> None:
        """Drop what still runs and end the thread."""
        with self.lock:
            self.closed = True
        self.incoming.put(None)
        if self.thread.ident is None:  # never started: there is no one else to answer
            self._run()
        else:
            self.thread.join(timeout)

    def submit(self, *jobs: Job) -> None:
        """Queue the texts of a request. Errors: ApiError 429 if the queue is full, 503 if the server is closing."""
        for job in jobs:
            self._check_fits(job)
        with self.lock:  # until they are queued, so that a server that closes answers them
            if self.closed or not (self.thread.ident is None or self.thread.is_alive()):
                raise ApiError(503, "the server is shutting down; try another one")
            if self.num_open + len(jobs) > self.limits.max_batch + self.limits.max_queue:
                raise ApiError(429, "the queue is full; try again later", headers={"Retry-After": "1"})
            self.num_open += len(jobs)
            number = next(self.request_numbers)
            for job in jobs:
                job.request_number = number
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
        return sum(map(self.num_bytes, self._admitted)) / self.limits.max_cached_bytes

    @property
    def _admitted(self) -> list[Job]:
        return [*self.running, *self.paused]

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
        """Decode until the server closes. Whatever happens, every job gets an answer."""
        failure, answer = None, ApiError(503, "the server is shutting down")
        try:
            while not self.closed:
                self._take_turn()
        except BaseException as error:
            failure, answer = error, ApiError(503, "the server has failed and stops; try another one")
            log.critical("the engine's thread has failed, and the server stops: %s", place_of(error))
        with self.lock:
            self.closed = True
        self._take_incoming()
        for job in [*self._admitted, *self.waiting]:
            self._end(job, answer)
        if failure is not None:
            self.on_failure()

    def _take_turn(self) -> None:
        """What happens between two calls, and a call."""
        if not (self.running or self.paused or self.waiting):
            self._wait_for_job()
        self._take_incoming()
        for job in [job for job in (*self.waiting, *self._admitted) if job.cancelled]:
            self._end(job)
        self._take_replacements()
        self._admit()
        self._read_prompts()
        if decoding := [job for job in self.running if not job.unread]:
            started = time.perf_counter()
            try:
                self._call(decoding)
            except Exception as error:
                log.exception("a call failed")
                self._recover(error, decoding)
            self._deliver(time.perf_counter() - started)

    def _call(self, jobs: Sequence[Job]) -> None:
        """One round of calls of these texts."""
        next(run_batch([job.sequence for job in jobs if job.sequence is not None], self.networks), None)

    def _recover(self, error: Exception, decoding: Sequence[Job]) -> None:
        """After a call that failed: without memory the newest text ends, else those that fail alone, too."""
        if is_out_of_memory(error):
            if self.prompts.tree is not None and self.prompts.tree.num_bytes:
                self.prompts.tree.clear()
                return
            decoding = decoding[-1:]
        if len(decoding) == 1:
            self._end(decoding[0], as_api_error(error, "a call failed: "))
            return
        for job in decoding:
            try:
                self._call([job])
            except Exception as own_error:
                self._end(job, as_api_error(own_error, "a call failed: "))

    def _wait_for_job(self) -> None:
        """Wait for a job or to be woken."""
        try:
            job = self.incoming.get(timeout=IDLE_AFTER)
        except queue.Empty:
            self._notify(lambda callbacks: callbacks.idle())
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

    def _admit(self) -> None:
        """Give places to texts in turn, while there is memory for the longest that they can get.

        In a full batch a text gives its place to one of a client, or of a request, that has fewer.
        """
        candidates = [*self.paused, *self.waiting]
        while (job := next_in_turn(candidates, self.running)) is not None:
            full = len(self.running) >= self.limits.max_batch
            pausing = giving_way(self.running, job) if full else None
            if full and pausing is None:
                return
            if job.sequence is None:
                try:
                    setup = self.engine.decoder.setup(job.method)  # loads its draft models at their first use
                    self._check_fits(job)
                    if not self._has_memory_for(job):
                        candidates = list(self.paused)  # have theirs, and free it when they end
                        continue
                    self._begin(job, setup)
                except Exception as error:
                    candidates.remove(job)
                    self._end(job, as_api_error(error))
                    continue
            if pausing is not None:
                self.running.remove(pausing)
                self.paused.append(pausing)
            candidates.remove(job)
            (self.paused if job in self.paused else self.waiting).remove(job)
            self.running.append(job)

    def _has_memory_for(self, job: Job) -> bool:
        used = sum(map(self.num_bytes, [job, *self._admitted]))
        return used <= memory_limit(job, self._admitted, self.limits.max_cached_bytes)

    def _begin(self, job: Job, setup: DecodingSetup) -> None:
        for name, network in setup.networks.items():
            self.networks.setdefault(name, network)
        controller = BatchController(
            setup, lambda: len(self.running), job.budget, keeps_states=self.callbacks is not None
        )
        request = job.request.request
        if request.constraint is not None:
            request.constraint = LimitedConstraint(request.constraint, request)
        job.sequence = SequenceState(_isolated(counting_generator(setup, request, controller), job))
        job.unread = len(request.prompt)
        self._notify(lambda callbacks: callbacks.begins(job))

    def _read_prompts(self) -> None:
        """Read a piece of one prompt, and let one text join whose first call reads what is left of its prompt.

        Those of clients and requests of which fewest texts are decoded come first, then the oldest.
        """
        shares = Shares.among([job for job in self.running if not job.unread])
        unread = sorted((job for job in self.running if job.unread), key=shares.of)
        for needs_call in (False, True):
            job = next((job for job in unread if self.prompts.needs_call(job) is needs_call), None)
            if job is None:
                continue
            try:
                self.prompts.read_piece(job)
            except Exception as error:
                log.exception("a prompt could not be read")
                self._end(job, as_api_error(error, "a call failed: "))

    def _deliver(self, seconds: float) -> None:
        """Hand out what the running texts have got by a call."""
        for job in [job for job in self.running if not job.unread]:
            job.request.request.seconds += seconds
            try:
                self._deliver_delta(job)
            except Exception as error:
                log.exception("what a call decided could not be handed out")
                self._end(job, as_api_error(error))
        if self.running:
            self._notify(lambda callbacks: callbacks.called(seconds))

    def _deliver_delta(self, job: Job) -> None:
        if job.failure is not None or job.sequence is None:
            self._end(job, job.failure)
            return
        finished, first = job.sequence.pending is None, not job.num_delivered
        if not finished and len(job.request.request.calls) == job.num_delivered:  # a draft model was called
            return
        delta = next_delta(job)
        if finished:
            self._end(job)
        elif first:  # the prompt has just been read
            self.prompts.keep(job)
        self._hand_out(job, delta)

    def _hand_out(self, job: Job, delta: Delta | ApiError) -> None:
        """Give a client what it waits for; a text that nobody can take is dropped."""
        try:
            job.deliver(delta)
        except Exception as error:
            log.warning("a text has no client any more: %s", error)
            job.cancelled = True

    def _end(self, job: Job, error: ApiError | None = None) -> None:
        """Take a text out, and answer it if it has failed; else keep what it has read and written."""
        for jobs in (self.waiting, self.running, self.paused):
            if job in jobs:
                jobs.remove(job)
        with self.lock:
            self.num_open -= 1
        if error is not None:
            self._hand_out(job, error)
        elif job.sequence is not None:
            self.prompts.keep(job)
            self._remember(job)
            self._notify(lambda callbacks: callbacks.ends(job))
        job.sequence = None

    def _remember(self, job: Job) -> None:
        request = job.request.request
        if request.memory is None or not request.calls:
            return
        try:
            request.memory.add(request.prompt, request.tokens)
        except Exception:
            log.exception("a text could not be kept for later drafts")

    def _notify(self, event: Callable[[RequestCallbacks], None]) -> None:
        """Make a callback; texts go on without callbacks that fail."""
        if (callbacks := self.callbacks) is None:
            return
        try:
            event(callbacks)
        except Exception:
            log.exception("a callback of the texts has failed; the server goes on without it")
            self.callbacks = None


def _isolated(generator: DecodeGenerator, job: Job) -> DecodeGenerator:
    """The generator; an error in it ends its own text only."""
    try:
        yield from generator
    except Exception as error:
        log.warning("a text could not be decoded: %s", error)
        job.failure = as_api_error(error)
