"""The one thread that a server's model belongs to: a thin shell around the scheduler.

Other threads submit requests and get what is decoded by a callback; nothing else is shared.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from itertools import count

from saltus.core.protocols import Network
from saltus.engine.engine import Engine
from saltus.engine.prefix_tree import PrefixTree, supports_prefix_tree
from saltus.engine.scheduler import Scheduler
from saltus.server.constraint_time import LimitedConstraint
from saltus.server.errors import ApiError, as_api_error, place_of
from saltus.server.served_request import Delta, Limits, RequestCallbacks, ServedRequest, next_delta

log = logging.getLogger("saltus.server")

IDLE_AFTER = 0.05  # seconds without a request
PREFILL_CHUNK_TOKENS = 256  # of a prompt that are read between two calls of the running texts


class EngineThread:
    """Takes requests from other threads, lets the scheduler decode them, and hands out what each step decided."""

    def __init__(self, engine: Engine, limits: Limits) -> None:
        self.engine, self.limits = engine, limits
        tree = PrefixTree(limits.max_cached_bytes // 4) if supports_prefix_tree(engine.network) else None
        self.scheduler = Scheduler[ServedRequest](
            engine.decoder, limits.max_batch, limits.max_cached_bytes, tree, PREFILL_CHUNK_TOKENS,
            isolates_failures=True, on_begin=self._begins,
            on_end=lambda served: self._notify(lambda callbacks: callbacks.ends(served)),
        )  # fmt: skip
        self.incoming: queue.SimpleQueue[ServedRequest | None] = queue.SimpleQueue()  # None wakes the thread
        self.num_open = 0  # requests submitted and not ended
        self.lock = threading.Lock()  # of num_open and closed
        self.closed = False
        self.request_numbers = count(1)
        self.replacements: queue.SimpleQueue[tuple[str, Network]] = queue.SimpleQueue()
        self.callbacks: RequestCallbacks | None = None
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

    def submit(self, *requests: ServedRequest) -> None:
        """Queue the texts that one request asks for.

        Errors: ApiError 400 for a text that is too long, 429 if the queue is full, 503 if the server is closing.
        """
        for served in requests:
            try:
                self.scheduler.check_fits(served)
            except ValueError as error:
                raise as_api_error(error) from None
        with self.lock:  # until they are queued, so that a server that closes answers them
            if self.closed or not (self.thread.ident is None or self.thread.is_alive()):
                raise ApiError(503, "the server is shutting down; try another one")
            self.check_queue(len(requests))
            self.num_open += len(requests)
            number = next(self.request_numbers)
            for served in requests:
                served.request_number = number
                self.incoming.put(served)

    def check_queue(self, num_texts: int) -> None:
        """Refuse texts that find no place. Errors: ApiError 429."""
        if self.num_open + num_texts > self.limits.max_texts:
            raise ApiError(429, "the queue is full; try again later", headers={"Retry-After": "1"})

    def cancel(self, served: ServedRequest) -> None:
        """Drop a text; its memory is free after the call that runs now."""
        served.cancelled = True
        self.incoming.put(None)

    def replace_draft_network(self, name: str, network: Network) -> None:
        """Draft with another network from the next call on. It must read what the one before it has read."""
        self.replacements.put((name, network))
        self.incoming.put(None)

    @property
    def longest_text(self) -> int:
        """Tokens of the longest text that fits into the memory, drafted by the server's method."""
        return self.scheduler.longest_text(self.limits.max_cached_bytes, self.engine.method)

    @property
    def num_running(self) -> int:
        """Texts in the batch."""
        return len(self.scheduler.running)

    @property
    def num_waiting(self) -> int:
        """Texts that have not been admitted."""
        return max(self.num_open - self.num_running, 0)

    @property
    def cache_usage(self) -> float:
        """The share of the memory for keys and values that admitted texts may come to use."""
        return sum(map(self.scheduler.num_bytes, self.scheduler.admitted)) / self.limits.max_cached_bytes

    def _run(self) -> None:
        """Decode until the server closes. Whatever happens, every request gets an answer."""
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
        for served in self.scheduler.requests:
            served.failure = answer
            self.scheduler.abort(served)
            self._ended(served)
        if failure is not None:
            self.on_failure()

    def _take_turn(self) -> None:
        """What happens between two steps, and a step."""
        if not self.scheduler.requests:
            self._wait_for_request()
        self._take_incoming()
        for served in [served for served in self.scheduler.requests if served.cancelled]:
            self.scheduler.abort(served)
            self._ended(served)
        while not self.replacements.empty():
            self.scheduler.replace_network(*self.replacements.get())
        self.scheduler.keeps_states = self.callbacks is not None
        started = time.perf_counter()
        stepped = self.scheduler.step()
        seconds = time.perf_counter() - started
        for served in stepped:
            self._deliver(served)
        if self.scheduler.running and stepped:
            self._notify(lambda callbacks: callbacks.called(seconds))

    def _wait_for_request(self) -> None:
        """Wait for a request or to be woken."""
        try:
            served = self.incoming.get(timeout=IDLE_AFTER)
        except queue.Empty:
            self._notify(lambda callbacks: callbacks.idle())
            served = self.incoming.get()
        if served is not None:
            self.scheduler.add(served)

    def _take_incoming(self) -> None:
        while not self.incoming.empty():
            if (served := self.incoming.get()) is not None:
                self.scheduler.add(served)

    def _begins(self, served: ServedRequest) -> None:
        """Before a text's first call."""
        if served.request.constraint is not None:
            served.request.constraint = LimitedConstraint(served.request.constraint, served.request)
        self._notify(lambda callbacks: callbacks.begins(served))

    def _deliver(self, served: ServedRequest) -> None:
        """Hand out what a text has got by a step."""
        delta = None
        try:
            if served.failure is None and (served.ended or len(served.request.calls) > served.num_delivered):
                delta = next_delta(served)  # else a draft model was called
        except Exception as error:
            log.exception("what a call decided could not be handed out")
            served.failure = error
            if not served.ended:
                self.scheduler.abort(served)
        if served.ended:
            self._ended(served)
        if delta is not None and served.failure is None:
            self._hand_out(served, delta)

    def _ended(self, served: ServedRequest) -> None:
        """Count a text that has ended, and answer it if it has failed."""
        with self.lock:
            self.num_open -= 1
        if served.failure is not None:
            self._hand_out(served, as_api_error(served.failure, "a call failed: " if served.failed_in_call else ""))

    def _hand_out(self, served: ServedRequest, delta: Delta | ApiError) -> None:
        """Give a client what it waits for; a text that nobody can take is dropped."""
        try:
            served.deliver(delta)
        except Exception as error:
            log.warning("a text has no client any more: %s", error)
            served.cancelled = True

    def _notify(self, event: Callable[[RequestCallbacks], None]) -> None:
        """Make a callback; texts go on without callbacks that fail."""
        if (callbacks := self.callbacks) is None:
            return
        try:
            event(callbacks)
        except Exception:
            log.exception("a callback of the texts has failed; the server goes on without it")
            self.callbacks = None
