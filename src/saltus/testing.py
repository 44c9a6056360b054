"""Stand in for models in tests: toy networks whose laws can be enumerated, and which check what they are asked."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from saltus.core.auxiliary_groups import Form
from saltus.core.canvas import HOLE, continuation
from saltus.core.control import Controller
from saltus.core.decode import Seat, Stop, rounds, speculate
from saltus.core.forward import Forward, Reply, Step
from saltus.core.noise import Noise
from saltus.core.rules import Rule, match
from saltus.core.sampling import Sampling, law, pick, probabilities
from saltus.methods import make


@dataclass
class ToyMemory:
    """What a toy has been asked about one text: the decided tokens of the last call."""

    decided: np.ndarray = field(default_factory=lambda: np.empty(0, dtype=np.int64))


Adapted = Callable[[tuple[int, int], Sequence[float]], Tensor]
"""Logits of an auxiliary query, of the last two tokens before its group and the uniforms told down to it."""


@dataclass
class Toy:
    """A causal law of the last two tokens. It counts calls, and refuses what no network should be asked.

    `rewrites`: a drafter's text may take decided tokens back (its own drafts); the target's only grows. The state of a
    token, as a feature, is its position: so a drafter that is shown states can tell whether they are the right ones.
    """

    logits: Float[Tensor, "vocab vocab vocab"]
    name: str = "target"
    rewrites: bool = False
    adapted: Adapted | None = None  # answers auxiliary queries
    calls: int = 0
    read: int = 0  # decided tokens, over all texts
    widest: int = 0  # drafted tokens of one Forward, at most
    queries: int = 0  # auxiliary, over all texts

    def memory(self) -> ToyMemory:
        return ToyMemory()

    def forward(self, asks: Sequence[Forward], memories: Sequence[ToyMemory]) -> list[Reply]:
        """One call: logits after the decided text and after each node."""
        assert asks, "a call carries at least one text"
        assert len({id(memory) for memory in memories}) == len(asks) == len(memories), "one memory a text"
        self.calls += 1
        return [self._answer(ask, memory) for ask, memory in zip(asks, memories, strict=True)]

    def _answer(self, ask: Forward, memory: ToyMemory) -> Reply:
        self.check(ask, memory)
        self.widest = max(self.widest, ask.drafts)
        decided = ask.canvas.decided
        shared = min(len(memory.decided), len(decided))
        differs = np.flatnonzero(memory.decided[:shared] != decided[:shared])
        read = int(len(decided) - (differs[0] if len(differs) else shared))
        self.read += read
        if ask.hidden is not None:
            shown = torch.arange(len(decided) - len(ask.hidden), len(decided))[:, None] - 1
            assert torch.equal(ask.hidden, shown), "a drafter is shown the states before the tokens decided since"
            assert len(ask.hidden) > 0, "a drafter is shown something new"
            assert not ask.queries or not len(memory.decided) or read == len(ask.hidden), (
                "no state comes twice, or never"
            )
        memory.decided = decided.copy()
        pairs = [self._last_two(decided.tolist())]
        for token, parent in zip(ask.tokens[: ask.drafts], ask.parents, strict=False):
            pairs.append((pairs[parent + 1][1], token))
        logits = self.logits[tuple(zip(*pairs, strict=True))]
        if ask.queries:
            logits = torch.cat([logits, self._adapted(ask, pairs)])
        states = [*range(len(decided) - read, len(decided)), *(len(decided) + depth for depth in ask.depths)]
        return Reply(logits, torch.tensor(states, dtype=torch.float64)[:, None] if ask.features else None, read=read)

    def _adapted(self, ask: Forward, pairs: list[tuple[int, int]]) -> Tensor:
        assert self.adapted is not None and ask.uniforms is not None, "queries need an adapter"
        self.queries += len(ask.queries)
        told: dict[int, tuple[tuple[int, int], list[float]]] = {}
        for node in ask.queries:
            parent, u = ask.parents[node], ask.uniforms[node]
            before, uniforms = told.get(parent, (pairs[parent + 1] if parent < ask.drafts else None, []))
            assert before is not None and u is not None and (math.isnan(u) or 0 <= u < 1)
            told[node] = before, [*uniforms, u]
        return torch.stack([self.adapted(*told[node]) for node in ask.queries])

    @staticmethod
    def _last_two(text: list[int]) -> tuple[int, int]:
        return (0, *text)[-2], text[-1]

    def check(self, ask: Forward, memory: ToyMemory) -> None:
        """Is the Forward well-formed, does it fit the holes, and does the text only grow?"""
        decided, vocab = ask.canvas.decided, self.logits.shape[0]
        assert ask.to == self.name, f"a Forward to {ask.to} arrived at {self.name}"
        assert len(decided) and HOLE not in decided, "everything before the first hole is decided"
        nodes = ask.tokens[: ask.drafts]
        assert all(0 <= token < vocab for token in (*nodes, *decided)), "tokens lie in the vocabulary"
        assert len(ask.canvas.open), "a finished text asks nothing"
        deepest = max((depth - (node >= ask.drafts) for node, depth in enumerate(ask.depths)), default=-1)
        assert deepest < len(ask.canvas.open) - 1, "the law after the last node, and a query's, is for a hole"
        assert ask.drafted is None or len(ask.drafted) == ask.drafts
        if ask.drafted is None or not any(ask.drafted):
            edges = list(zip(ask.parents, nodes, strict=False))
            assert len(edges) == len(set(edges)), "no node is asked twice"
        if not self.rewrites:
            assert np.array_equal(memory.decided, decided[: len(memory.decided)]), "decided text never changes"


def toy(vocab: int = 6, sharp: float = 2.0, seed: int = 0) -> Toy:
    """A random law; `sharp` is the deviation of its logits: 0 is uniform, 10 nearly certain."""
    return Toy(torch.from_numpy(np.random.default_rng(seed).normal(size=(vocab,) * 3) * sharp))


def student(of: Toy, error: float = 0.5, seed: int = 1, name: str = "drafter", sampling: Sampling | None = None) -> Toy:
    """A drafter's network that has learned a toy's logits up to an error of this deviation, and to read uniforms."""
    noise = torch.from_numpy(np.random.default_rng(seed).normal(size=tuple(of.logits.shape)) * error)
    made = Toy(of.logits + noise, name=name, rewrites=True)
    made.adapted = oracle(made, replace(sampling or Sampling(), repetition_penalty=1.0, banned=(), forced=()))
    return made


def oracle(of: Toy, sampling: Sampling, form: Form = "one-hot") -> Adapted:
    """An adapter that has learned all there is: it reads from the uniforms which tokens come before its own.

    Told its own uniform too (O-PTP), it is certain of its token; else its law is the target's (Theorem 2), or, told
    nothing, the marginal of `independent` prediction.
    """

    marginals: dict[tuple[tuple[int, int], int], Tensor] = {}

    def adapted(before: tuple[int, int], uniforms: Sequence[float]) -> Tensor:
        if form == "independent":
            key = before, len(uniforms)
            if key not in marginals:
                marginals[key] = torch.from_numpy(_marginal(of, sampling, *key)).log()
            return marginals[key]
        uniforms = [0.0 if sampling.greedy else u for u in uniforms]  # greedy picks need none
        known, own = (uniforms[:-1], uniforms[-1]) if form == "one-hot" else (uniforms[1:], None)
        pair = before
        for u in known:
            pair = pair[1], pick(u, law(of.logits[pair], sampling))
        if own is None:
            return of.logits[pair]
        certain = torch.full(of.logits.shape[:1], -40.0, dtype=of.logits.dtype)
        certain[pick(own, law(of.logits[pair], sampling))] = 40.0
        return certain

    return adapted


def _marginal(of: Toy, sampling: Sampling, before: tuple[int, int], ahead: int) -> np.ndarray:
    """The law of the token so many places ahead, whatever those between are."""
    vocab, pairs = of.logits.shape[0], {before: 1.0}
    for _ in range(ahead):
        grown: dict[tuple[int, int], float] = {}
        for pair, weight in pairs.items():
            for token, chance in enumerate(probabilities(law(of.logits[pair], sampling), vocab)):
                grown[pair[1], token] = grown.get((pair[1], token), 0.0) + weight * chance
        pairs = grown
    return np.bincount([token for _, token in pairs], list(pairs.values()), vocab)


def fool(of: Toy, seed: int = 0) -> Adapted:
    """An adapter that has learned nothing."""
    dice = np.random.default_rng(seed)
    return lambda before, uniforms: torch.from_numpy(dice.normal(size=of.logits.shape[0]))


@dataclass
class Writing:
    """One text on toys, being written or done."""

    seat: Seat
    networks: dict[str, Toy]
    steps: list[Step]

    @property
    def tokens(self) -> list[int]:
        return [int(token) for step in self.steps for token in step.tokens]

    def finish(self) -> Writing:
        """Write it, alone."""
        for _ in rounds([self.seat], self.networks):
            pass
        return self


def writing(
    spec: str,
    prompt: Sequence[int],
    length: int,
    *,
    target: Toy,
    seed: int = 0,
    sampling: Sampling | None = None,
    rule: Rule = match,
    controller: Controller | None = None,
    stop: Stop | None = None,
    error: float = 0.5,
    options: Mapping[str, Mapping[str, Any]] | None = None,
    others: Mapping[str, Any] | None = None,
) -> Writing:
    """A text about to be written by the methods of `spec`; their networks are students of the target, or `others`."""
    noise, sampling, steps = Noise(seed), sampling or Sampling(), []
    methods = make(spec, options)
    own = [name for one in methods for name in one.models]
    students = {name: student(target, error, name=name, sampling=sampling) for name in own}
    networks = {"target": target} | students | dict(others or {})
    if target.adapted is None and any(getattr(one, "any_subset", False) for one in methods):
        target.adapted = lambda before, uniforms: target.logits[before]  # quick, and right one time in some
    drafters = [drafter for one in methods if (drafter := one.drafter(noise, sampling, rule)) is not None]
    canvas = continuation(prompt, length)
    writer = speculate(canvas, noise, sampling, drafters, steps.append, rule, controller, stop)
    return Writing(Seat(writer), networks, steps)


def joint(target: Toy, prompt: Sequence[int], length: int, sampling: Sampling) -> Float[np.ndarray, "texts"]:
    """The probability of every text of `length` tokens, the last token changing fastest."""
    vocab, texts = target.logits.shape[0], [([*prompt], 1.0)]
    for index in range(length):
        grown = []
        for text, weight in texts:
            pair = target._last_two(text)
            following = probabilities(law(target.logits[pair], sampling, np.array(text), index), vocab)
            grown += [([*text, token], weight * following[token]) for token in range(vocab)]
        texts = grown
    return np.array([weight for _, weight in texts])


def listening(used: list[tuple[str, int]]) -> type[Noise]:
    """A noise that notes which uniforms it was asked for: their streams and positions."""

    class Listening(Noise):
        def at(self, stream, positions):
            used.extend((stream, int(position)) for position in np.atleast_1d(positions))
            return super().at(stream, positions)

        def one(self, stream, position):
            used.append((stream, int(position)))
            return super().one(stream, position)

    return Listening
