"""Decode many requests on one model: which of them run, whose prompt is read, and one batched call a network and step.

A text does not depend on what runs beside it: rows of a call do not depend on each other, and neither a method nor the
number of its drafts can change a text. So requests join and leave between calls, whatever their settings, and a text
may pause, with its keys and values, while another one has its place.
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Generic

from saltus.core.batch import SequenceState, run_batch
from saltus.core.control.controller import Controller
from saltus.core.distributions import DecodeGenerator
from saltus.core.forward import TARGET, ForwardOutputs
from saltus.core.noise import Noise
from saltus.core.out_of_memory import is_out_of_memory
from saltus.core.protocols import Network
from saltus.core.rules import RULES
from saltus.core.speculate import speculate
from saltus.engine.batch_controller import controller_in_batch
from saltus.engine.decoder import Decoder
from saltus.engine.decoding_setup import DecodingSetup
from saltus.engine.prefix_tree import PrefixTree, supports_prefix_tree
from saltus.engine.prompt_reading import PromptReader
from saltus.engine.request import Request
from saltus.engine.scheduled_request import AnyScheduled, ScheduledRequest
from saltus.engine.turns import Shares, giving_way, memory_limit, next_in_turn
from saltus.models.cuda.host_copies import answers
from saltus.models.memory_use import text_bytes
from saltus.models.resized_vocabulary import embedding_rows

log = logging.getLogger("saltus")

MOST_TOKENS = 2**31  # more than any text has


@dataclass(eq=False)
class Scheduler(Generic[AnyScheduled]):
    """The requests of one model. All entry points decode by its `step`; it belongs to one thread.

    With `prefill_chunk_tokens` prompts are read in chunks of so many tokens between the calls of running texts, and one
    text joins a step (on a GPU several with short prompts); without, all that have a place join at once, and their
    first call reads their prompts. With `isolates_failures` an error ends the text that it happened to, as its
    `failure`; without, and where the GPU answers no more, `step` raises it.
    """

    decoder: Decoder
    max_batch_size: int = 16
    max_cached_bytes: int | None = None  # of the admitted texts' keys and values
    prefix_tree: PrefixTree | None = None  # for networks for which `supports_prefix_tree` is true
    prefill_chunk_tokens: int | None = None
    isolates_failures: bool = False
    keeps_states: bool = False  # every call computes hidden states, whether a drafter reads them or not
    on_begin: Callable[[AnyScheduled], None] = lambda scheduled: None  # before its first call
    on_end: Callable[[AnyScheduled], None] = lambda scheduled: None  # after its last, unless it failed
    waiting: list[AnyScheduled] = field(default_factory=list, init=False)
    running: list[AnyScheduled] = field(default_factory=list, init=False)
    paused: list[AnyScheduled] = field(default_factory=list, init=False)  # that have begun; others have their places
    networks: dict[str, Network] = field(default_factory=dict, init=False)  # of all methods that run

    def __post_init__(self) -> None:
        self.prompts = PromptReader(self.decoder.target, self.prefix_tree, self.prefill_chunk_tokens)

    @property
    def requests(self) -> list[AnyScheduled]:
        """All that have not ended: running, paused, waiting."""
        return [*self.running, *self.paused, *self.waiting]

    def add(self, *requests: AnyScheduled) -> None:
        """Let requests wait for their turns."""
        self.waiting += requests

    def abort(self, scheduled: AnyScheduled) -> None:
        """End a request before its text is complete. What was read and written of it is kept for other texts."""
        self._end(scheduled)

    def step(self) -> list[AnyScheduled]:
        """Admit requests in turn, read a chunk of a prompt, and run one batched call a network.

        Returns the requests that decoded, and those that failed; of these `ended` says which were their last calls.
        """
        failed = [*self._admit(), *self._read_prompts()]
        decoding = [scheduled for scheduled in self.running if not scheduled.num_unread_tokens]
        if decoding:
            started = time.perf_counter()
            try:
                self._call(decoding)
            except Exception as error:
                if not self._has_freed_memory(error):
                    if not self.isolates_failures or self._has_lost_its_gpu():
                        raise
                    log.exception("a call failed")
                    self._recover(error, decoding)
            seconds = time.perf_counter() - started
            for scheduled in decoding:
                scheduled.request.seconds += seconds
                self._retire(scheduled)
        return [*failed, *decoding]

    def replace_network(self, name: str, network: Network) -> None:
        """Draft with another network from the next call on; what texts have read on the one before it stays valid.

        On a GPU that is in the pages of the one before, and a text's drafts begin without it.
        """
        self.decoder.replace_network(name, network)
        if name in self.networks:
            self.networks[name] = network

    @property
    def admitted(self) -> list[AnyScheduled]:
        """Those that have begun."""
        return [*self.running, *self.paused]

    def num_bytes(self, scheduled: AnyScheduled) -> int:
        """The most memory that the keys, values and states of a text can take, those of its draft models included."""
        return self.bytes_of_text(scheduled.num_tokens, scheduled.method)

    def bytes_of_text(self, num_tokens: int, method: str) -> int:
        """Of keys, values and states. Draft models are counted once they are loaded."""
        setup = self.decoder.setups.get(method)
        networks = [self.decoder.target] if setup is None else setup.networks.values()
        return sum(text_bytes(network, num_tokens) for network in networks)

    def longest_text(self, max_bytes: int, method: str) -> int:
        """Tokens of the longest text that fits into so much memory; 0 if none does."""
        fits = bisect_right(range(MOST_TOKENS), max_bytes, key=lambda tokens: self.bytes_of_text(tokens, method))
        return max(fits - 1, 0)

    def check_fits(self, scheduled: AnyScheduled) -> None:
        """Raise ValueError for a text that does not fit into the memory even alone."""
        if self.max_cached_bytes is not None and self.num_bytes(scheduled) > self.max_cached_bytes:
            tokens = scheduled.num_tokens
            raise ValueError(
                f"a text of {tokens:,} tokens does not fit into the memory for keys and values; shorten it"
            )

    def _admit(self) -> list[AnyScheduled]:
        """Give places to texts in turn, while there is memory for the longest that they can get; returns failed ones.

        In a full batch a text gives its place to one of a client, or of a request, that has fewer.
        """
        candidates, failed = [*self.paused, *self.waiting], []
        while (scheduled := next_in_turn(candidates, self.running)) is not None:
            full = len(self.running) >= self.max_batch_size
            pausing = giving_way(self.running, scheduled) if full else None
            if full and pausing is None:
                break
            if scheduled.sequence is None:
                try:
                    setup = self.decoder.setup(scheduled.method)  # loads its draft models at their first use
                    self.check_fits(scheduled)
                    if not self._has_memory_for(scheduled):
                        candidates = list(self.paused)  # have theirs, and free it when they end
                        continue
                    self._begin(scheduled, setup)
                except Exception as error:
                    if not self.isolates_failures:
                        raise
                    candidates.remove(scheduled)
                    self._fail(scheduled, error)
                    failed.append(scheduled)
                    continue
            if pausing is not None:
                self.running.remove(pausing)
                self.paused.append(pausing)
            candidates.remove(scheduled)
            (self.paused if scheduled in self.paused else self.waiting).remove(scheduled)
            self.running.append(scheduled)
        return failed

    def _has_memory_for(self, scheduled: AnyScheduled) -> bool:
        if self.max_cached_bytes is None:
            return True
        used = sum(map(self.num_bytes, [scheduled, *self.admitted]))
        return used <= memory_limit(scheduled, self.admitted, self.max_cached_bytes)

    def _begin(self, scheduled: AnyScheduled, setup: DecodingSetup) -> None:
        for name, network in setup.networks.items():
            self.networks.setdefault(name, network)
        most = scheduled.max_draft_tokens
        controller = controller_in_batch(setup, lambda: len(self.running), most, self.keeps_states)
        generator = counting_generator(setup, scheduled.request, controller)
        scheduled.sequence = SequenceState(_isolated(generator, scheduled) if self.isolates_failures else generator)
        scheduled.setup, scheduled.controller = setup, controller
        scheduled.num_unread_tokens = len(scheduled.request.prompt)
        self.on_begin(scheduled)

    def _read_prompts(self) -> list[AnyScheduled]:
        """Read the next part of prompts; returns the texts that failed."""
        failed = []
        for scheduled in self._next_to_read():
            try:
                self.prompts.read_chunk(scheduled)
            except Exception as error:
                if self._has_freed_memory(error):
                    continue
                if not self.isolates_failures or self._has_lost_its_gpu():
                    raise
                log.exception("a prompt could not be read")
                self._fail(scheduled, error, in_call=True)
                failed.append(scheduled)
        return failed

    def _next_to_read(self) -> list[AnyScheduled]:
        """One text whose first call can read what is left of its prompt, and one of whose prompt a chunk is read.

        On a GPU, where a call takes about as long for several short prompts as for one, texts join whose prompts are a
        chunk together; a CPU would take as long as for one after another, and all would wait for the last. Those of
        clients and requests of which fewest texts are decoded come first, then the oldest. Without chunks all read.
        """
        unread = [scheduled for scheduled in self.running if scheduled.num_unread_tokens]
        if self.prefill_chunk_tokens is None or len(unread) < 2:
            return unread
        unread.sort(key=Shares.among([scheduled for scheduled in self.running if not scheduled.num_unread_tokens]).of)
        joining = [scheduled for scheduled in unread if not self.prompts.needs_call(scheduled)]
        reading = [scheduled for scheduled in unread if scheduled not in joining]
        together = 1
        if self.decoder.target.model.device.type != "cpu":
            ends = list(accumulate(scheduled.num_unread_tokens for scheduled in joining))
            together = max(1, bisect_right(ends, self.prefill_chunk_tokens))
        return [*joining[:together], *reading[:1]]

    def _call(self, scheduled: Sequence[AnyScheduled]) -> None:
        """One round of calls of these texts."""
        next(run_batch([each.sequence for each in scheduled if each.sequence is not None], self.networks), None)

    def _has_freed_memory(self, error: Exception) -> bool:
        """True if memory ran out while the prefix tree had some, which is free now: the next step calls again."""
        if not is_out_of_memory(error) or self.prefix_tree is None or not self.prefix_tree.num_bytes:
            return False
        log.warning("memory is short: what was kept of earlier texts is dropped")
        self.prefix_tree.clear()
        return True

    def _has_lost_its_gpu(self) -> bool:
        device = getattr(self.decoder.target, "device", None)
        return device is not None and not answers(device)

    def _recover(self, error: Exception, decoding: Sequence[AnyScheduled]) -> None:
        """After a call that failed: without memory the newest text ends, else those that fail alone, too."""
        if is_out_of_memory(error):
            decoding = decoding[-1:]
        if len(decoding) == 1:
            self._fail(decoding[0], error, in_call=True)
            return
        for scheduled in decoding:
            try:
                self._call([scheduled])
            except Exception as own_error:
                self._fail(scheduled, own_error, in_call=True)

    def _retire(self, scheduled: AnyScheduled) -> None:
        """After a call of a text: end it if it is complete, and keep its prompt once it is read."""
        if scheduled.ended:  # it has failed
            return
        if scheduled.failure is not None:
            self._fail(scheduled, scheduled.failure)
        elif scheduled.sequence is None or scheduled.sequence.pending is None:
            self._end(scheduled)
        elif scheduled.request.calls and not scheduled.prompt_is_cached:
            scheduled.prompt_is_cached = True
            self.prompts.keep(scheduled)

    def _fail(self, scheduled: AnyScheduled, error: Exception, in_call: bool = False) -> None:
        scheduled.failure, scheduled.failed_in_call = error, in_call
        self._end(scheduled)

    def _end(self, scheduled: AnyScheduled) -> None:
        """Take a text out; unless it failed, keep what it has read and written."""
        for requests in (self.waiting, self.running, self.paused):
            if scheduled in requests:
                requests.remove(scheduled)
        if scheduled.failure is None and scheduled.sequence is not None:
            self.prompts.keep(scheduled, ended=True)
            _remember(scheduled)
            self.on_end(scheduled)
        scheduled.sequence, scheduled.ended = None, True


def run_requests(
    decoder: Decoder,
    requests: Sequence[Request],
    method: str,
    *,
    batch_size: int | None = None,
    prefix_tree: PrefixTree | bool = True,
) -> Generator[list[Request]]:
    """Decode requests, `batch_size` at once; yields after each step those that it finished.

    Requests that have nothing to decode come first. `prefix_tree` is True for the decoder's own, False for none, or
    another one; it is used only where it cannot change a text. The generator may be closed between steps. Several
    threads may run texts at once: a step of one waits for that of another.
    Errors: ValueError at once for a method that cannot be used, and at any step once the decoder is closed.
    """
    with decoder.lock:
        decoder.setup(method)
    tree = decoder.prefix_tree if prefix_tree is True else prefix_tree
    shared = tree if isinstance(tree, PrefixTree) and supports_prefix_tree(decoder.target) else None
    return _run(Scheduler(decoder, batch_size or decoder.batch_size, prefix_tree=shared), requests, method)


def _run(scheduler: Scheduler[ScheduledRequest], requests: Sequence[Request], method: str) -> Generator[list[Request]]:
    waiting = deque(request for request in requests if request.max_new_tokens > 0)
    if len(waiting) < len(requests):
        yield [request for request in requests if request.max_new_tokens <= 0]
    try:
        while waiting or scheduler.requests:
            with scheduler.decoder.lock:
                scheduler.decoder.require_open()
                while waiting and len(scheduler.requests) < scheduler.max_batch_size:
                    scheduler.add(ScheduledRequest(waiting.popleft(), method))
                ended = [scheduled.request for scheduled in scheduler.step() if scheduled.ended]
            yield ended
    except GeneratorExit:  # between calls every KV cache is consistent
        with scheduler.decoder.lock:
            for scheduled in scheduler.requests:
                scheduler.abort(scheduled)
        raise


def counting_generator(setup: DecodingSetup, request: Request, controller: Controller) -> DecodeGenerator:
    """`speculate` for one request; counts the forward passes on each network."""
    drafters, noise = setup.new_drafters(request), Noise(request.seed)
    if not drafters:  # nothing to choose, so that no costs need be measured
        controller = Controller(adaptive=False)
    generator = speculate(
        request.new_canvas(), noise, request.sampling, drafters, request.record, RULES[setup.rule], controller,
        stop=request.stop, constraint=request.constraint, reads_logits=request.logprobs,
        vocab=embedding_rows(getattr(setup.networks[TARGET], "model", None)),
    )  # fmt: skip
    outputs: ForwardOutputs | None = None
    while True:
        try:
            inputs = next(generator) if outputs is None else generator.send(outputs)
        except StopIteration:
            return
        outputs = yield inputs
        request.calls_by_network[inputs.network_name] += 1  # now, since a call may be interrupted


def _isolated(generator: DecodeGenerator, scheduled: ScheduledRequest) -> DecodeGenerator:
    """The generator; an error in it ends its own text only."""
    try:
        yield from generator
    except Exception as error:
        log.warning("a text could not be decoded: %s", error)
        scheduled.failure = error


def _remember(scheduled: ScheduledRequest) -> None:
    """Keep an answer for drafts of later texts, where its request has a memory of answers."""
    request = scheduled.request
    if request.memory is None or not request.calls:
        return
    try:
        request.memory.add(request.prompt, request.tokens)
    except Exception:
        log.exception("a text could not be kept for later drafts")
