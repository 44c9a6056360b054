"""Write texts of tokens with a method: seats for many, records of each call, and what was learned of the costs."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from saltus.core.canvas import Canvas, continuation
from saltus.core.control.acceptance import Acceptance
from saltus.core.control.call_cost import CallCost
from saltus.core.control.controller import Controller
from saltus.core.distributions import DecodeGenerator, Step
from saltus.core.forward import ForwardInputs, ForwardOutputs
from saltus.core.noise import Noise
from saltus.core.protocols import Drafter, Network
from saltus.core.rules import RULES
from saltus.core.sampling import Sampling, log_probability
from saltus.core.scheduler import SequenceState, run_batch
from saltus.core.speculate import speculate
from saltus.methods import Method

CALIBRATION_ROWS = (1, 2, 4, 8, 16, 32)  # rows of the calls that are timed


@dataclass(frozen=True)
class CallRecord:
    """What a call of the target did for a text."""

    index: int
    tokens: tuple[int, ...]  # decided by it
    num_draft_tokens: int  # drafted tokens that it checked
    seconds: float  # wall time, of the whole batch where there is one
    context_tokens_read: int  # decided tokens that it read: the prompt, at first
    num_forced_tokens: int = 0  # of the tokens, those that follow from the one before them, which closed a hole


@dataclass
class Request:
    """One text to write: what is asked for, and what came of it."""

    prompt: Sequence[int]
    max_new_tokens: int  # tokens to write at most
    seed: int
    sampling: Sampling
    is_end: Callable[[int], bool] = lambda token: False  # told each token in turn: does the text end with it?
    logprobs: bool = False
    canvas: Canvas | None = None  # what is to be filled, where that is not a continuation of the prompt
    calls: list[CallRecord] = field(default_factory=list, init=False)
    log_probabilities: list[float] = field(default_factory=list, init=False)
    calls_by_network: Counter[str] = field(default_factory=Counter, init=False)  # calls by network
    seconds: float = field(default=0.0, init=False)
    ended: bool = field(default=False, init=False)  # by its own decision

    @property
    def tokens(self) -> list[int]:
        return [token for call in self.calls for token in call.tokens]

    @property
    def finished(self) -> bool:
        return self.ended or sum(len(call.tokens) for call in self.calls) >= self.max_new_tokens

    def stop(self, canvas: Canvas, tokens: np.ndarray) -> int | None:
        for count, token in enumerate(tokens.tolist(), start=1):
            if self.is_end(token):
                self.ended = True
                return count
        return None

    def record(self, step: Step) -> None:
        tokens = tuple(step.tokens.tolist())
        counted = (
            step.inputs.num_draft_tokens,
            step.outputs.seconds,
            step.outputs.context_tokens_read,
            step.num_forced_tokens,
        )
        self.calls.append(CallRecord(len(self.calls), tokens, *counted))
        if self.logprobs:
            decided = tokens[: len(tokens) - step.num_forced_tokens]
            rows = [0, *(node + 1 for node in _accepted_nodes(step))]
            self.log_probabilities += [
                log_probability(step.outputs.logits[row], token) for row, token in zip(rows, decided, strict=False)
            ]
            self.log_probabilities += [0.0] * step.num_forced_tokens


def _accepted_nodes(step: Step) -> list[int]:
    """The accepted nodes, first to last."""
    nodes, node = [], step.last_node
    while node >= 0:
        nodes.append(node)
        node = step.inputs.parents[node]
    return nodes[::-1]


@dataclass
class DecodingSetup:
    """Methods, the networks that they use, and what was learned about both."""

    methods: Sequence[Method]
    networks: Mapping[str, Network]  # "target", and those of the methods' own
    rule: str = "match"
    budget: int = 16  # nodes of a call
    adaptive: bool = True
    context_lengths: Mapping[str, int | None] = field(default_factory=dict)  # tokens that a method's own network reads
    call_cost: CallCost = field(default_factory=CallCost)
    acceptance: Acceptance = field(default_factory=Acceptance)
    controllers: dict[int, Controller] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Errors: ValueError where a method drafts by a model that fills holes anywhere, and the target is none."""
        wants = any(getattr(method, "any_subset", False) for method in self.methods)
        if wants and not getattr(self.networks["target"], "any_subset", True):
            raise ValueError(
                "assd drafts by a model that fills holes anywhere, but this one writes from left to right; take another"
                " model, such as stories, or the option assd.draft=bigram"
            )

    def new_drafters(self, request: Request) -> list[Drafter]:
        made = []
        for method in self.methods:
            drafter = method.drafter(Noise(request.seed), request.sampling, RULES[self.rule])
            limits = [limit for name in method.draft_models if (limit := self.context_lengths.get(name)) is not None]
            if drafter is not None:
                made.append(_limit_to_context(min(limits), drafter) if limits else drafter)
        return made

    def controller(self, batch_size: int) -> Controller:
        """Shared over texts where it cannot touch them; by `reject` the tree has a say, so its size is fixed."""
        if self.rule != "match" or not self.adaptive:
            return Controller(self.budget, adaptive=False)
        if not self.call_cost.seconds:
            self.call_cost.seconds.update(measure_call_seconds(self.networks["target"]))
        if batch_size not in self.controllers:  # a node more for each of the texts
            costs = (
                self.call_cost
                if batch_size == 1
                else CallCost({rows: self.call_cost.seconds_for(rows * batch_size) for rows in CALIBRATION_ROWS})
            )
            self.controllers[batch_size] = Controller(self.budget, True, self.acceptance, costs)
        return self.controllers[batch_size]


@dataclass
class PrefixCache:
    """The memories of the latest texts, for the next turn of a conversation. It begins with all that was said."""

    max_entries: int = 4
    max_bytes: int = 2**30  # bytes; the latest text is kept whatever it takes
    entries: list[tuple[int, dict[str, Any]]] = field(
        default_factory=list
    )  # (tokens of the prompt, memories), oldest first

    def put(self, prompt: Sequence[int], kv_caches: dict[str, Any]) -> None:
        if "target" in kv_caches:
            self.entries.append((len(prompt), kv_caches))
        while len(self.entries) > self.max_entries or (len(self.entries) > 1 and self._num_bytes() > self.max_bytes):
            del self.entries[0]

    def _num_bytes(self) -> int:
        return sum(_kv_cache_bytes(kv_cache) for _, kv_caches in self.entries for kv_cache in kv_caches.values())

    def take(self, prompt: Sequence[int]) -> dict[str, Any]:
        """The memories that share most with the prompt, if it goes beyond theirs; a mere repetition is read afresh."""
        best, most = None, 0
        for entry in self.entries:
            shared = _common_prefix_length(entry[1]["target"].tokens, np.asarray(prompt))
            if shared > max(entry[0], most):
                best, most = entry, shared
        if best is None:
            return {}
        self.entries = [entry for entry in self.entries if entry is not best]
        return best[1]


def run_requests(
    setup: DecodingSetup, requests: Sequence[Request], batch_size: int = 16, prefix_cache: PrefixCache | None = None
) -> Generator[None]:
    """Write all texts, `batch_size` at once, others joining as seats free; yields after each round of calls."""
    waiting = deque(text for text in requests if text.max_new_tokens > 0)
    drafting = bool(waiting and setup.new_drafters(waiting[0]))
    together = 1 << (min(len(waiting), batch_size) - 1).bit_length() if waiting else 1
    controller = setup.controller(together) if drafting else Controller(setup.budget, adaptive=False)
    sequences: list[SequenceState] = []
    live: list[tuple[SequenceState, Request]] = []

    def sit_down() -> None:
        while waiting and len(sequences) < batch_size:
            text = waiting.popleft()
            generator = _counting_generator(setup, text, controller)
            live.append((SequenceState(generator, prefix_cache.take(text.prompt) if prefix_cache else {}), text))
            sequences.append(live[-1][0])

    def leave(sequence: SequenceState, text: Request) -> None:
        live.remove((sequence, text))
        if prefix_cache:
            prefix_cache.put(text.prompt, sequence.kv_caches)

    sit_down()
    started = time.perf_counter()
    for _ in run_batch(sequences, setup.networks):
        spent = time.perf_counter() - started
        for sequence, text in list(live):
            text.seconds += spent
            if sequence.pending is None:
                leave(sequence, text)
        sit_down()
        try:
            yield
        except GeneratorExit:  # between calls every memory is sound
            for sequence, text in list(live):
                leave(sequence, text)
            raise
        started = time.perf_counter()


def _counting_generator(setup: DecodingSetup, request: Request, controller: Controller) -> DecodeGenerator:
    """`speculate`, and a count of what is asked of each network."""
    canvas = continuation(request.prompt, request.max_new_tokens) if request.canvas is None else request.canvas
    drafters, rule = setup.new_drafters(request), RULES[setup.rule]
    noise = Noise(request.seed)
    generator = speculate(canvas, noise, request.sampling, drafters, request.record, rule, controller, request.stop)
    outputs: ForwardOutputs | None = None
    while True:
        try:
            inputs = next(generator) if outputs is None else generator.send(outputs)
        except StopIteration:
            return
        request.calls_by_network[inputs.network_name] += 1
        outputs = yield inputs


def _limit_to_context(context_length: int, drafter: Drafter) -> Drafter:
    """Rest where the text outgrows what the drafter's own network reads."""
    return lambda canvas, last, room: (
        drafter(canvas, last, room) if len(canvas.decided_prefix) + room <= context_length else ()
    )


def _kv_cache_bytes(kv_cache: Any) -> int:
    """Of keys and values."""
    tensors = getattr(kv_cache, "keys", None), getattr(kv_cache, "values", None)
    return sum(tensor.nbytes for tensor in tensors if tensor is not None)


def _common_prefix_length(one: np.ndarray, other: np.ndarray) -> int:
    length = min(len(one), len(other))
    differs = np.flatnonzero(one[:length] != other[:length])
    return int(differs[0]) if len(differs) else length


def check_rule(name: str) -> str:
    """The name of a rule, or a ValueError."""
    if name not in RULES:
        raise ValueError(f"rule is {name!r}, but must be one of {', '.join(RULES)}")
    return name


def measure_call_seconds(network: Network) -> dict[int, float]:
    """Seconds of a call by its rows next to a short text: the best of three, since noise only adds."""
    kv_cache = network.new_kv_cache()
    vocab = network.forward([ForwardInputs(continuation([0], 1))], [kv_cache])[0].logits.shape[-1]
    canvas = continuation(np.arange(48) % vocab, 2)

    def seconds(rows: int) -> float:
        nodes = np.arange(rows - 1) % vocab
        inputs = ForwardInputs(canvas, tuple(nodes.tolist()), (-1,) * len(nodes))
        return network.forward([inputs], [kv_cache])[0].seconds

    seconds(max(CALIBRATION_ROWS))
    turns = [[seconds(rows) for rows in CALIBRATION_ROWS] for _ in range(3)]
    return dict(zip(CALIBRATION_ROWS, map(min, *turns), strict=True))
