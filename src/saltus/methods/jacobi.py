"""Propose the next iterate of a fixed point: guess a block, and let each call correct all of its tokens at once."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from saltus.core.canvas import Canvas
from saltus.core.control.controller import Controller
from saltus.core.distributions import Step
from saltus.core.forward import ForwardInputs
from saltus.core.noise import Noise
from saltus.core.protocols import Drafter
from saltus.core.rules import Rule, reject
from saltus.core.sampling import Sampling, most_likely, probability
from saltus.core.tree import Branch
from saltus.drafting.ptp_queries import with_token_queries

MAX_ADAPTER_GUESSES = 127  # that an adapter reads in a call, at most: beside 128 nodes they fit into one
NGRAMS_PER_TOKEN = 12  # n-grams kept that start with the same token


@dataclass(frozen=True)
class Jacobi:
    """Jacobi decoding of blocks, with rejection recycling and multi-block decoding (Jacobi Forcing, §3.2, Alg. 1).

    The blocks are one chain of the tree: later ones continue the first, are corrected in the same call, and are
    verified like it when the text reaches them. Argmax and sampling alike: the answers are the text's own picks.
    What `saltus train jacobi` made of a model is decoded like any model; an adapter that it made corrects the guesses
    in rows of its own, in the very calls that verify.
    """

    model: str = ""  # a folder of `saltus train jacobi` with an adapter; empty: the target corrects its guesses
    block: int = 16  # tokens of a block
    blocks: int = 2  # blocks that may be live at once
    spawn: float = 0.85  # share of the last block that is decided or settled when the next one starts
    running: bool = False  # top the first block up as its tokens are decided, so that it keeps its length
    candidates: int = 4  # recycled n-grams offered beside the chain
    ngram: int = 4  # tokens of a recycled n-gram, the one it is found by included
    pool: int = 1024  # n-grams kept

    def __post_init__(self) -> None:
        for name, least in {"block": 1, "blocks": 1, "candidates": 0, "ngram": 2, "pool": 1}.items():
            if getattr(self, name) < least:
                raise ValueError(f"jacobi: {name} is {getattr(self, name)}, but must be {least} or more")
        if not 0 <= self.spawn <= 1:
            raise ValueError(f"jacobi: spawn is {self.spawn}, but is a share of a block, in [0, 1]")

    @property
    def draft_models(self) -> dict[str, str]:
        return {"jacobi": f"adapter:{self.model}"} if self.model else {}

    def drafter(self, noise: Noise, sampling: Sampling, rule: Rule) -> Drafter:
        window = BlockWindow(self.block, self.blocks, math.ceil(self.spawn * self.block), self.running)
        parts = noise, rule, Iterate(self.ngram), window, NgramPool(self.pool), self.candidates
        return AdapterJacobiDrafter(*parts, sampling.temperature) if self.model else JacobiDrafter(*parts)


@dataclass
class JacobiDrafter:
    """Guesses of one text, each of which the target's answer to the one before it corrects."""

    noise: Noise
    rule: Rule
    iterate: Iterate
    window: BlockWindow
    pool: NgramPool
    candidates: int

    def __call__(self, canvas: Canvas, last: Step | None, room: int) -> Sequence[Branch]:
        iterate = self.iterate
        if last is not None:
            iterate.start_at(last.canvas.num_decided)
            nodes = self.nodes_of_iterate(last)
            inputs = [last.inputs.tokens[i] for i in nodes]
            for guess in iterate.correct(inputs, *self.corrections(last, nodes)):
                for start in range(len(guess.ngram) - 1):
                    self.pool.add(guess.ngram[start:])
            iterate.start_at(canvas.num_decided)
        if not len(canvas.decided_prefix):  # a hole is first: there is nothing to guess from
            return []
        end = self.window.end(canvas.num_decided, iterate.settled)
        missing = range(len(iterate.guesses), min(end - canvas.num_decided, room))
        text = canvas.decided_prefix
        for u in self.noise.uniforms("jacobi/guess", canvas.open_positions[missing.start : missing.stop]):
            iterate.guesses.append(Guess((int(text[int(u * len(text))]),)))
        chain = iterate.guesses[: min(end - canvas.num_decided, room)]
        recycled = self.pool.starting_with(int(text[-1]), self.candidates)
        return [
            self.branch(chain),
            *(Branch(tail[:room], probabilities[:room], "jacobi/pool") for tail, probabilities in recycled),
        ]

    def nodes_of_iterate(self, last: Step) -> list[int]:
        """The nodes whose answers are the next iterate."""
        return nodes_of_next_iterate(last, self.iterate.tokens)

    def corrections(self, last: Step, nodes: Sequence[int]) -> tuple[list[int], list[float]]:
        """The next guesses, after the decided text and after each node, and their chances, where they are stated."""
        return [self.correction(last, node) for node in [-1, *nodes]], []

    def correction(self, last: Step, node: int) -> int:
        """The next guess after a node. `reject` keeps the text's uniforms for itself, so there it is the mode."""
        if self.rule is not reject:
            return last.distributions.pick(node)
        distribution = last.distributions[node]
        best = int(distribution.weights.argmax())
        return best if distribution.tokens is None else int(distribution.tokens[best])

    def branch(self, chain: Sequence[Guess]) -> Branch:
        """The guesses; a node that is asked for brings its correction too."""
        tokens, worths = [guess.ngram[-1] for guess in chain], [_payoff(depth) for depth in range(len(chain))]
        return Branch(tokens, _acceptance_probabilities(chain), "jacobi/chain", payoffs=worths)


@dataclass
class AdapterJacobiDrafter(JacobiDrafter):
    """Guesses that an adapter corrects, in rows that hang beside the tree; the untouched target verifies.

    These rows read all guesses, verified or not, so that nodes are asked for only to be accepted. Where the adapter
    rests, the target corrects the guesses that it verifies, as without one.
    """

    temperature: float
    adapter_corrected: bool = False  # did the adapter correct the guesses?

    def nodes_of_iterate(self, last: Step) -> list[int]:
        self.adapter_corrected = last.inputs.has_token_queries
        return last.inputs.query_chain(-1) if self.adapter_corrected else super().nodes_of_iterate(last)

    def corrections(self, last: Step, nodes: Sequence[int]) -> tuple[list[int], list[float]]:
        """Ends before a row whose logits are no numbers: a broken adapter guesses nothing, and breaks no text."""
        if not self.adapter_corrected:
            return super().corrections(last, nodes)
        tokens, probabilities = [self.correction(last, -1)], [1.0]
        for node in nodes:
            best, chance = most_likely(last.outputs.logits[node + 1])
            if math.isnan(chance):
                break
            token = best if last.distributions.sampling.plain_argmax else self.correction(last, node)
            tokens.append(token)
            probabilities.append(chance if token == best else probability(token, last.distributions[node]))
        return tokens, probabilities

    def branch(self, chain: Sequence[Guess]) -> Branch:
        if not self.adapter_corrected:
            return super().branch(chain)
        return Branch(
            [guess.ngram[-1] for guess in chain], [guess.acceptance_probability for guess in chain], "jacobi/guided"
        )

    def add_draft_queries(
        self, inputs: ForwardInputs, probabilities: Sequence[float], controller: Controller
    ) -> ForwardInputs:
        """Hang the guesses behind the decided text once more, for the adapter's rows."""
        guesses = self.iterate.tokens[: min(len(inputs.canvas.open_positions) - 1, MAX_ADAPTER_GUESSES)]
        if not guesses or (controller.adaptive and not controller.drafting_switch.drafting):
            return inputs
        return with_token_queries(inputs, guesses, self.temperature)


@dataclass(frozen=True)
class Guess:
    """The token guessed for one hole, and the n-gram that it ends: each token the answer to the one before it."""

    ngram: tuple[int, ...]
    corrected: bool = False  # by a call; at first it is drawn from the text
    settled: bool = False  # the last correction left it as it was
    acceptance_probability: float = 0.01  # to be right if those before it are, where that is stated


class Iterate:
    """The guesses for the holes from `done` on."""

    def __init__(self, ngram: int) -> None:
        self.ngram = ngram
        self.done = 0
        self.guesses: list[Guess] = []

    @property
    def tokens(self) -> list[int]:
        return [guess.ngram[-1] for guess in self.guesses]

    @property
    def settled(self) -> list[bool]:
        return [guess.settled for guess in self.guesses]

    def start_at(self, done: int) -> None:
        """Forget the guesses for holes that are decided."""
        del self.guesses[: done - self.done]
        self.done = done

    def correct(
        self, inputs: Sequence[int], answers: Sequence[int], probabilities: Sequence[float] = ()
    ) -> list[Guess]:
        """Every guess at once: `asked` was evaluated, `answers[i]` follows what stands before hole i (Eq. 3).

        Holes behind the answers keep their guesses: the chain was cut short.
        """
        trails = [guess.ngram for guess in self.guesses[: len(inputs)]]
        for i, token in enumerate(inputs):  # where the text took another branch, the trail is that branch's
            if i >= len(trails) or trails[i][-1] != token:
                trails[i:] = [(token,)]
        corrected = []
        for i, token in enumerate(answers):
            trail = (*trails[i - 1][1 - self.ngram :], token) if i else (token,)
            settled = i < len(inputs) and inputs[i] == token
            corrected.append(
                Guess(trail, True, settled, probabilities[i] if probabilities else Guess.acceptance_probability)
            )
        self.guesses[: len(answers)] = corrected
        return corrected


def nodes_of_next_iterate(last: Step, guesses: Sequence[int]) -> list[int]:
    """The nodes whose answers are the next iterate: our chain, or the branch that the text took instead."""
    inputs: ForwardInputs = last.inputs
    nodes = inputs.match_tokens(guesses)
    if nodes and last.last_node in (-1, *nodes):
        return nodes
    nodes, node = [], last.last_node
    while node >= 0:
        nodes.insert(0, node)
        node = inputs.parents[node]
    node = last.last_node
    while children := inputs.children(node):
        nodes.append(node := children[0])
    return nodes


@dataclass
class BlockWindow:
    """Which holes have guesses: the live blocks, first to last (Jacobi Forcing, Alg. 1, spawn and promote)."""

    size: int
    max_blocks: int
    spawn_threshold: int  # tokens of the last block, decided or settled, that let the next one start
    running: bool
    start: int = 0  # where the first live block starts
    live: int = 1

    def end(self, done: int, settled: Sequence[bool]) -> int:
        """The hole behind the last live block; `settled` says which guesses, from `done` on, have stopped changing."""
        while self.start + self.size <= done:
            self.start += self.size
            self.live = max(self.live - 1, 1)
        if self.running:
            self.start = done
        while self.live < self.max_blocks:
            last = self.start + (self.live - 1) * self.size
            firm = max(done, last)
            while firm < done + len(settled) and settled[firm - done]:
                firm += 1
            if firm - last < self.spawn_threshold:
                break
            self.live += 1
        return self.start + self.live * self.size


class NgramPool:
    """N-grams of answers by their first token, the latest last: `most` in all, `EACH` of a first token."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.size = 0
        self.continuations: dict[int, list[tuple[int, ...]]] = {}  # the first token that was added to last comes last

    def add(self, ngram: tuple[int, ...]) -> None:
        """Keep an n-gram of two tokens or more; it takes the place of the one that it has grown from."""
        first, tail = ngram[0], ngram[1:]
        tails = self.continuations.pop(first, [])
        self.continuations[first] = tails
        if tail[:-1] in tails:
            tails.remove(tail[:-1])
            self.size -= 1
        tails.append(tail)
        self.size += 1
        if len(tails) > NGRAMS_PER_TOKEN:
            del tails[0]
            self.size -= 1
        while self.size > self.capacity:
            oldest = next(iter(self.continuations))
            del self.continuations[oldest][0]
            self.size -= 1
            if not self.continuations[oldest]:
                del self.continuations[oldest]

    def starting_with(self, token: int, count: int) -> list[tuple[tuple[int, ...], list[float]]]:
        """What followed the token in the latest `count` n-grams that start with it, and first estimates of chances.

        The first token's comes from a vote, later answers weighing more; all were fitted on an untrained chat model.
        """
        latest = self.continuations.get(token, [])[::-1]
        weights: dict[int, float] = {}
        for age, tail in enumerate(latest):
            weights[tail[0]] = weights.get(tail[0], 0.0) + 0.75**age
        total = sum(weights.values()) + 0.6
        found = []
        for tail in list(dict.fromkeys(latest))[:count]:
            first = max(weights[tail[0]] - 0.3, 0.1) / total
            found.append((tail, [first, *[0.3] * (len(tail) - 1)]))
        return found


def _acceptance_probabilities(chain: Sequence[Guess]) -> list[float]:
    """First estimates, measured on an untrained chat model: an answer to what still stands there is a good guess."""
    probabilities = []
    before = False  # did what stands before this guess settle?
    for guess in chain:
        if not guess.corrected:
            chance = 0.01
        elif before:
            chance = 0.6 if guess.settled else 0.4
        else:
            chance = 0.09 if guess.settled else 0.06
        probabilities.append(chance)
        before = guess.settled
    return probabilities


def _payoff(depth: int) -> float:
    """Tokens that the answer to a guess brings later, through the next iterate and the pool: measured likewise."""
    return 0.2 * (depth + 1) ** -1.5
