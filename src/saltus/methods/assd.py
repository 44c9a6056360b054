"""Propose what the model says of each hole alone, or what stood between such neighbours before; it verifies itself."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from saltus.core.auxiliary_groups import in_two_calls, uniforms_of
from saltus.core.canvas import HOLE, Canvas
from saltus.core.decode import Drafter
from saltus.core.forward import Step
from saltus.core.noise import Noise
from saltus.core.riding import Rider
from saltus.core.rules import Rule, reject
from saltus.core.sampling import Law, Sampling, pick, probability
from saltus.core.tree import Branch

SOURCE = "assd"


@dataclass(frozen=True)
class Assd:
    """Any-subset speculative decoding (ASSD, Guo and Ermon 2025): fill several holes in a call, from the joint law.

    The model's laws of the next holes, each given the decided text alone, are drafts that the same model verifies
    (Alg. 1); in the very calls that verify, so that a round is one call and not two. Or drafts are drawn from pairs of
    neighbours counted in the text (Alg. 2), which any model can verify, a causal one too.
    """

    draft: Literal["self", "bigram"] = "self"
    length: int = 8  # holes drafted, at most
    two_calls: bool = False  # draft in a call of its own, as the paper does

    def __post_init__(self) -> None:
        if self.length < 1:
            raise ValueError(f"assd: length is {self.length}, but must be 1 or more")
        if self.draft not in ("self", "bigram"):
            raise ValueError(f"assd: draft is {self.draft!r}, but must be self or bigram")

    @property
    def models(self) -> dict[str, str]:
        return {}

    @property
    def any_subset(self) -> bool:
        """Does it need a model that fills holes anywhere?"""
        return self.draft == "self"

    def drafter(self, noise: Noise, sampling: Sampling, rule: Rule) -> Drafter:
        if self.draft == "bigram":
            return Bigram(noise, sampling, rule, self.length)
        if self.two_calls:
            return in_two_calls(noise, sampling, rule, "independent", self.length, source=SOURCE)
        return SelfDrafter(noise, sampling, "independent", self.length, source=SOURCE, rule=rule)


@dataclass
class SelfDrafter(Rider):
    """Laws of the holes behind every place where the accepted path may end, asked for in the call that verifies.

    They do not know the token that the verifier itself decides there, which Algorithm 1's would; for that a round is
    one call. Under `reject` drafts are drawn with uniforms of their own, and the laws are told to the rule.
    """

    rule: Rule = reject

    def __call__(self, canvas: Canvas, last: Step | None, room: int) -> Sequence[Branch]:
        if self.rule is not reject:
            return super().__call__(canvas, last, room)
        if last is None or not room:
            return []
        laws = [last.laws[query] for query in last.asked.group(last.node)[1 : room + 1]]
        uniforms = self.noise.at(f"{SOURCE}/{canvas.done}", canvas.open[: len(laws)]).tolist()
        return [drawn(laws, uniforms)] if laws else []


def drawn(laws: Sequence[Law], uniforms: Sequence[float]) -> Branch:
    """A draft from laws that do not depend on each other's tokens; nor do the chances that are stated."""
    tokens = [pick(u, law) for u, law in zip(uniforms, laws, strict=True)]
    return Branch(tokens, [float(law.weights.max()) / law.total for law in laws], SOURCE, list(laws))


@dataclass
class Bigram:
    """Draft from counts of neighbours in the decided text, each token given the one to its left (Alg. 2)."""

    noise: Noise
    sampling: Sampling
    rule: Rule
    length: int
    counts: defaultdict[int, Counter[int]] = field(default_factory=lambda: defaultdict(Counter))
    counted: set[int] = field(default_factory=set)  # positions whose left neighbour was counted

    def __call__(self, canvas: Canvas, last: Step | None, room: int) -> Sequence[Branch]:
        self._count(canvas, last)
        holes = canvas.open[: min(self.length, room)]
        text = canvas.tokens.copy()
        own = self.rule is reject
        uniforms = self.noise.at(f"{SOURCE}/{canvas.done}", holes).tolist() if own else self._uniforms(holes)
        tokens, chances, laws = [], [], []
        for hole, u in zip(holes.tolist(), uniforms, strict=True):
            followers = self.counts.get(int(text[hole - 1])) if hole else None
            if not followers:
                break
            ids = np.array(sorted(followers), dtype=np.int64)
            law = Law(ids, np.array([followers[token] for token in ids.tolist()], dtype=np.float64))
            token = pick(u, law)
            text[hole] = token
            tokens.append(token)
            laws.append(law)
            chances.append(float(law.weights.max()) / law.total if own else probability(token, law))
        return [Branch(tokens, chances, f"{SOURCE}/bigram", laws if own else None)] if tokens else []

    def _uniforms(self, holes: np.ndarray) -> list[float]:
        return uniforms_of(self.noise, self.sampling, holes)

    def _count(self, canvas: Canvas, last: Step | None) -> None:
        """Pairs of decided neighbours that were not counted before."""
        places = canvas.given if last is None else canvas.order[last.canvas.done : canvas.done]
        text = canvas.tokens
        for place in {*places.tolist(), *(places + 1).tolist()}:
            pair = 0 < place < len(text) and text[place] != HOLE and text[place - 1] != HOLE
            if pair and place not in self.counted:
                self.counted.add(place)
                self.counts[int(text[place - 1])][int(text[place])] += 1
