"""Draft by Jacobi iteration: guess a block of tokens, and let each call correct all of them at once."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from saltus.core.canvas import Canvas
from saltus.core.control.controller import Controller
from saltus.core.distributions import Step
from saltus.core.forward import ForwardInputs
from saltus.core.noise import Noise
from saltus.core.picking import probability
from saltus.core.protocols import Drafter
from saltus.core.rules import Rule, reject
from saltus.core.sampling import Sampling, most_likely
from saltus.core.tree import Branch
from saltus.core.value_types import require_at_least
from saltus.methods.jacobi.block_window import BlockWindow, FrozenBlocks, new_window
from saltus.methods.jacobi.ngram_pool import NgramPool
from saltus.methods.shared.query_chains import with_token_queries

MAX_ADAPTER_GUESSES = 128  # guesses that an adapter reads in a call, at most


@dataclass(frozen=True)
class Jacobi:
    """Jacobi decoding of blocks, with rejection recycling and multi-block decoding (Jacobi Forcing, §3.2, Alg. 1).

    The blocks form one chain of the tree: later blocks continue the first one, are corrected in the same call, and are
    verified when the text reaches them. The next iterate consists of the text's own picks, greedy or sampled. A model
    trained by `saltus train jacobi` is decoded like any model; an adapter trained by it corrects the guesses with query
    nodes of its own inside the verification call. Unless `multi_block` is frozen, no guess is frozen, and a new block's
    first guesses are drawn from the text (docs/results/jacobi_forcing.md).
    """

    model: str = ""  # a folder with an adapter of `saltus train jacobi`; empty: the target corrects the guesses
    block_size: int = 16  # tokens of a block
    max_blocks: int = 2  # blocks that may be live at once
    spawn_ratio: float = 0.85  # the next block starts when this share of the last one is decided or settled
    multi_block: str = "corrected"  # guesses of later blocks: corrected in each call, or frozen once accepted (Alg. 1)
    sliding: bool = False  # the first block keeps its length: it moves on as its tokens are decided
    candidates: int = 4  # recycled n-grams offered beside the chain
    recycle: str = "diagonals"  # n-grams of what: tails (of iterates, a block long) or diagonals (of successive ones)
    ngram_size: int = 4  # tokens of a diagonal, its first token (the key) included
    ngram_pool_size: int = 1024  # n-grams kept

    def __post_init__(self) -> None:
        require_at_least(self, "jacobi: ", block_size=1, max_blocks=1, candidates=0, ngram_size=2, ngram_pool_size=1)
        if not 0 <= self.spawn_ratio <= 1:
            raise ValueError(f"jacobi: spawn_ratio is {self.spawn_ratio}, but is a share of a block, in [0, 1]")
        if self.recycle not in ("tails", "diagonals"):
            raise ValueError(f"jacobi: recycle is {self.recycle!r}, but must be tails or diagonals")
        if self.multi_block not in ("corrected", "frozen"):
            raise ValueError(f"jacobi: multi_block is {self.multi_block!r}, but must be corrected or frozen")
        if self.sliding and self.multi_block == "frozen":
            raise ValueError("jacobi: a sliding block has no later blocks to freeze; drop sliding or multi_block")

    @property
    def draft_models(self) -> dict[str, str]:
        return {"jacobi": f"adapter:{self.model}"} if self.model else {}

    def drafter(self, noise: Noise, sampling: Sampling, rule: Rule) -> Drafter:
        window = new_window(
            self.block_size, self.max_blocks, self.spawn_ratio, self.sliding, self.multi_block == "frozen"
        )
        tail_length = self.block_size if self.recycle == "tails" else 0
        iterate, pool = Iterate(self.ngram_size), NgramPool(self.ngram_pool_size)
        parts = noise, rule, iterate, window, pool, self.candidates, tail_length
        return AdapterJacobiDrafter(*parts, sampling.temperature) if self.model else JacobiDrafter(*parts)


@dataclass
class JacobiDrafter:
    """The Jacobi iteration of one text: the target's token after each guess corrects the next guess."""

    noise: Noise
    rule: Rule
    iterate: Iterate
    window: BlockWindow | FrozenBlocks
    pool: NgramPool
    candidates: int
    tail_length: int  # tokens after the key of a recycled tail; 0: diagonals are recycled
    tail: tuple[int, ...] = field(default=(), init=False)  # the last decided token and the iterate, at the latest call

    def __call__(self, canvas: Canvas, last: Step | None, max_depth: int) -> Sequence[Branch]:
        iterate = self.iterate
        if last is not None:
            iterate.start_at(last.canvas.num_decided)
            nodes = self.nodes_of_iterate(last)
            answers, probabilities = self.corrections(last, nodes)
            inputs = [last.inputs.tokens[i] for i in nodes[: len(answers)]]
            answers = self.window.keep_frozen(last.canvas.num_decided, inputs, answers)
            corrected = iterate.correct(inputs, answers, probabilities)
            iterate.start_at(canvas.num_decided)
            self._recycle(canvas, corrected)
        if not len(canvas.decided_prefix):  # the text starts with a hole: there are no tokens to guess from
            return []
        end = self.window.end(canvas.num_decided, iterate.settled)
        missing = range(len(iterate.guesses), min(end - canvas.num_decided, max_depth))
        text = canvas.decided_prefix
        uniforms = self.noise.uniforms("jacobi/guess", canvas.open_positions[missing.start : missing.stop])
        for hole, u in zip(missing, uniforms, strict=True):
            cloned = self.window.first_guess(canvas.num_decided + hole, canvas.num_decided, iterate.tokens)
            iterate.guesses.append(Guess((int(text[int(u * len(text))]) if cloned is None else cloned,)))
        chain = iterate.guesses[: min(end - canvas.num_decided, max_depth)]
        recycled = self.pool.starting_with(int(text[-1]), self.candidates)
        return [
            self.branch(chain),
            *(Branch(tail[:max_depth], probabilities[:max_depth], "jacobi/pool") for tail, probabilities in recycled),
        ]

    def _recycle(self, canvas: Canvas, corrected: Sequence[Guess]) -> None:
        """Pool n-grams of guesses: the latest diagonals, or the tail before the latest one.

        A tail is an iterate after the last decided token, all of one call (Alg. 1, line 11). The latest is no use to
        the pool yet, since the chain offers it.
        """
        length = 1 + self.tail_length
        ngrams = [self.tail] if self.tail_length else [guess.ngram for guess in corrected]
        for ngram in ngrams:
            for start in range(len(ngram) - 1):
                self.pool.add(ngram[start : start + length] if self.tail_length else ngram[start:])
        known = itertools.takewhile(lambda guess: guess.corrected, self.iterate.guesses)
        self.tail = (int(canvas.decided_prefix[-1]), *(guess.ngram[-1] for guess in known))

    def nodes_of_iterate(self, last: Step) -> list[int]:
        """The nodes whose logits give the next iterate."""
        return nodes_of_next_iterate(last, self.iterate.tokens)

    def corrections(self, last: Step, nodes: Sequence[int]) -> tuple[list[int], list[float]]:
        """The next guesses, after the decided text and after each node, and their probabilities if they are known.

        They end before a node after which no token may follow.
        """
        answers: list[int] = []
        for node in [-1, *nodes]:
            if (token := self.correction(last, node)) is None:
                break
            answers.append(token)
        return answers, []

    def correction(self, last: Step, node: int) -> int | None:
        """The next guess after a node: the text's pick; the mode under `reject`, which needs the uniforms.

        None after a wrong guess that no token may follow, by a grammar or bans: the text does not go there.
        """
        try:
            if self.rule is not reject:
                return last.distributions.pick(node)
            distribution = last.distributions[node]
        except ValueError:
            return None
        best = int(distribution.weights.argmax())
        return best if distribution.tokens is None else int(distribution.tokens[best])

    def branch(self, chain: Sequence[Guess]) -> Branch:
        """The guesses as a branch; verifying a node also corrects the next guess, which is its payoff."""
        tokens, payoffs = [guess.ngram[-1] for guess in chain], [_payoff(depth) for depth in range(len(chain))]
        return Branch(tokens, _acceptance_probabilities(chain), "jacobi/chain", payoffs=payoffs)


@dataclass
class AdapterJacobiDrafter(JacobiDrafter):
    """Jacobi iteration with an adapter, which corrects the guesses by query nodes; the unchanged target verifies.

    The queries read all guesses, verified or not, so that draft tokens are verified only to be accepted. While the
    adapter is switched off, the target corrects the guesses that it verifies.
    """

    temperature: float
    adapter_corrected: bool = False  # True if the adapter corrected the current guesses

    def nodes_of_iterate(self, last: Step) -> list[int]:
        self.adapter_corrected = last.inputs.has_token_queries
        return last.inputs.query_chain(-1) if self.adapter_corrected else super().nodes_of_iterate(last)

    def corrections(self, last: Step, nodes: Sequence[int]) -> tuple[list[int], list[float]]:
        """The adapter's guesses; they end before a row with NaN logits: a broken adapter drafts nothing."""
        if not self.adapter_corrected:
            return super().corrections(last, nodes)
        (tokens, _), probabilities = super().corrections(last, []), [1.0]
        for node in nodes:
            best, top_probability = most_likely(last.outputs.logits[node + 1])
            if math.isnan(top_probability):
                break
            token = best if last.distributions.sampling.plain_argmax else self.correction(last, node)
            if token is None:
                break
            tokens.append(token)
            probabilities.append(top_probability if token == best else probability(token, last.distributions[node]))
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
        """Add the guesses once more as a chain of queries after the decided text, for the adapter."""
        guesses = self.iterate.tokens[: min(len(inputs.canvas.open_positions) - 1, MAX_ADAPTER_GUESSES)]
        return with_token_queries(inputs, guesses, self.temperature) if guesses else inputs


@dataclass(frozen=True)
class Guess:
    """The token guessed for one hole: the last of an n-gram whose tokens were each predicted from the one before."""

    ngram: tuple[int, ...]
    corrected: bool = False  # by a call; first guesses are random tokens of the text
    settled: bool = False  # the last correction did not change it
    acceptance_probability: float = 0.01  # given that the guesses before it are right


class Iterate:
    """The guesses for the holes from index `done` on."""

    def __init__(self, ngram_size: int) -> None:
        self.ngram_size = ngram_size
        self.done = 0
        self.guesses: list[Guess] = []

    @property
    def tokens(self) -> list[int]:
        """The guessed token of each hole from `done` on."""
        return [guess.ngram[-1] for guess in self.guesses]

    @property
    def settled(self) -> list[bool]:
        """For each guess, whether its last correction left it as it was."""
        return [guess.settled for guess in self.guesses]

    def start_at(self, done: int) -> None:
        """Drop the guesses for decided holes."""
        del self.guesses[: done - self.done]
        self.done = done

    def correct(
        self, inputs: Sequence[int], answers: Sequence[int], probabilities: Sequence[float] = ()
    ) -> list[Guess]:
        """Replace all guesses at once (Eq. 3): `inputs` were evaluated, `answers[i]` is the new token of hole i.

        Holes beyond the answers keep their guesses. Returns the corrected guesses.
        """
        trails = [guess.ngram for guess in self.guesses[: len(inputs)]]
        for i, token in enumerate(inputs):  # if the text took another branch, the n-grams are that branch's
            if i >= len(trails) or trails[i][-1] != token:
                trails[i:] = [(token,)]
        corrected = []
        for i, token in enumerate(answers):
            trail = (*trails[i - 1][1 - self.ngram_size :], token) if i else (token,)
            settled = i < len(inputs) and inputs[i] == token
            likely = probabilities[i] if probabilities else Guess.acceptance_probability
            corrected.append(Guess(trail, True, settled, likely))
        self.guesses[: len(answers)] = corrected
        return corrected


def nodes_of_next_iterate(last: Step, guesses: Sequence[int]) -> list[int]:
    """The nodes whose logits give the next iterate: the chain of guesses, or the branch that was accepted instead."""
    inputs: ForwardInputs = last.inputs
    nodes = inputs.matching_nodes(guesses)
    if nodes and last.last_node in (-1, *nodes):
        return nodes
    nodes, node = inputs.path(last.last_node), last.last_node
    while children := inputs.children(node):
        nodes.append(node := children[0])
    return nodes


def _acceptance_probabilities(chain: Sequence[Guess]) -> list[float]:
    """Estimates measured on a chat model: a guess is better if the guess before it did not change."""
    probabilities = []
    before = False  # True if the guess before has settled
    for guess in chain:
        if not guess.corrected:
            probabilities.append(0.01)
        elif before:
            probabilities.append(0.6 if guess.settled else 0.4)
        else:
            probabilities.append(0.09 if guess.settled else 0.06)
        before = guess.settled
    return probabilities


def _payoff(depth: int) -> float:
    """Tokens that a corrected guess saves in later calls, through the next iterate and the pool; measured likewise."""
    return 0.2 * (depth + 1) ** -1.5
