"""Propose what the model said of holes ahead, or what stood behind such a token before; it verifies itself."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from saltus.core.auxiliary_groups import in_two_calls, uniforms_of, with_groups
from saltus.core.canvas import HOLE, Canvas
from saltus.core.control import Controller
from saltus.core.decode import Drafter
from saltus.core.forward import Forward, Step
from saltus.core.links import Links
from saltus.core.noise import Noise
from saltus.core.rules import Rule, reject
from saltus.core.sampling import Law, Sampling, draw, float_row, law, log_probability, pick, probability
from saltus.core.tree import Branch

SOURCE = "assd"
REST = 32  # calls without drafts, where they did not pay


@dataclass(frozen=True)
class Assd:
    """Any-subset speculative decoding (ASSD, Guo and Ermon 2025): fill several holes in a call, from the joint law.

    Drafts are of the model's laws of the next holes, each given what was decided alone, and the same model verifies
    them (Alg. 1). It is asked for the laws of many holes in a call that verifies, so that a round is one call and not
    two. Or drafts are drawn from pairs of neighbours counted in the text (Alg. 2), which any model can verify, a causal
    one too.
    """

    draft: Literal["self", "bigram"] = "self"
    length: int = 2  # holes drafted, at most
    ahead: int = 16  # holes whose laws are asked for at once, by a call that verifies; at least two for each drafted
    two_calls: bool = False  # draft in a call of its own, as the paper does

    def __post_init__(self) -> None:
        if self.length < 1:
            raise ValueError(f"assd: length is {self.length}, but must be 1 or more")
        if self.ahead < 1:
            raise ValueError(f"assd: ahead is {self.ahead}, but must be 1 or more")
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
        return SelfDrafter(noise, sampling, rule, self.length, max(self.ahead, 2 * self.length))


@dataclass(frozen=True, eq=False)
class _Said:
    """A hole's law, asked for ahead."""

    logits: Tensor
    knew: int  # how many of the new tokens were decided
    weights: np.ndarray | None  # of the links


@dataclass
class SelfDrafter:
    """Draft from laws of the holes ahead, which were asked for in an earlier call that verified.

    They were asked for at once, so none knows the tokens of the others, nor what was decided since; the model's links
    tell each draft the tokens to its left. (With those they hardly age: what a law lacks is those.) Under `reject`
    drafts are drawn with uniforms of their own, and the laws are told to the rule. These uniforms are others in each
    call: what was drawn may have a say in when laws are asked for, so a law must not meet them again.
    """

    noise: Noise
    sampling: Sampling
    rule: Rule
    length: int
    ahead: int
    laws: dict[int, _Said] = field(default_factory=dict)  # of holes
    links: Links | None = None
    first: int | None = None  # of the drafts of this step, if there are any
    idle: int = 0  # calls that are still to go without asking

    def __call__(self, canvas: Canvas, last: Step | None, room: int) -> Sequence[Branch]:
        if last is not None:
            self._keep(last)
        holes = canvas.open[: min(self.length, room)]
        drawn = self.rule is reject
        found = _Drafts(SOURCE, drawn)
        uniforms = _uniforms(self.noise, self.sampling, canvas, holes, drawn)
        context = canvas.tokens[canvas.known] if self.sampling.repetition_penalty != 1 else None
        latest = canvas.tokens[canvas.order[max(canvas.done - 2, 0) : canvas.done]].tolist()
        for index, hole, u in zip(range(canvas.done, canvas.done + len(holes)), holes.tolist(), uniforms, strict=True):
            if hole not in self.laws:
                break
            seen = None if context is None else np.append(context, found.tokens).astype(np.int64)
            logits = self._linked(self.laws[hole], canvas.order, index, [*latest, *found.tokens])
            found.add(law(logits, self.sampling, seen, index), u, logits if self.sampling.greedy else None)
            if self.sampling.closed(index, found.tokens[-1]):
                break
        self.first = found.tokens[0] if found.tokens else None
        return found.branches()

    def _linked(self, said: _Said, order: np.ndarray, index: int, new: Sequence[int]) -> Tensor:
        """Logits of new token number `index` behind the last of the new ones, where these were not known to its law."""
        unknown = index - said.knew
        if said.weights is None or self.links is None or not unknown or order[index - 1] != order[index] - 1:
            return said.logits
        before = new[-2] if unknown > 1 and order[index - 2] == order[index] - 2 else None
        row = self.links(float_row(said.logits), said.weights, new[-1], before)
        return torch.from_numpy(row) if math.isfinite(row.max()) else said.logits  # broken links break no text

    def _keep(self, last: Step) -> None:
        """What the step said of holes that are open still."""
        canvas, reply, self.links = last.canvas, last.reply, last.reply.links
        if queries := last.asked.group(-1):
            weights: Sequence[np.ndarray | None] = [None] * len(queries)
            if self.links is not None and reply.features is not None:
                weights = list(self.links.weights(float_row(reply.features[[query + 1 for query in queries]])))
            for hole, query, own in zip(canvas.open[: len(queries)].tolist(), queries, weights, strict=True):
                self.laws[hole] = _Said(reply.logits[query + 1], canvas.done, own)
        for hole in canvas.open[: len(last.tokens)].tolist():
            self.laws.pop(hole, None)

    def ride(self, asked: Forward, chances: Sequence[float], controller: Controller) -> Forward:
        """Ask for the laws of the holes ahead, where those that are known will not do for the next drafts."""
        taken = any(asked.tokens[node] == self.first for node in asked.children(-1))
        if controller.adaptive and self.first is not None and not taken:
            self.idle = REST
        self.idle = max(self.idle - 1, 0)
        holes = asked.canvas.open[: self.ahead].tolist()
        needed = holes[1 : max(asked.depths, default=-1) + 2 + self.length]
        if not controller.budget or self.idle or all(hole in self.laws for hole in needed):
            return asked
        asked = with_groups(asked, [(-1, [math.nan] * len(holes))], self.sampling.temperature)
        return replace(asked, features=self.links is not None or not self.laws)


def _uniforms(noise: Noise, sampling: Sampling, canvas: Canvas, holes: np.ndarray, drawn: bool) -> list[float]:
    """Those of the text, or for drafts that are drawn others, which no other call has."""
    if not drawn:
        return uniforms_of(noise, sampling, holes)
    return noise.at(SOURCE, canvas.done * len(canvas.order) + np.arange(len(holes))).tolist()


@dataclass
class _Drafts:
    """A branch in the making."""

    source: str
    drawn: bool  # with uniforms that are not the text's, for the rule `reject`?
    tokens: list[int] = field(default_factory=list)
    chances: list[float] = field(default_factory=list)
    laws: list[Law] = field(default_factory=list)

    def add(self, law: Law, u: float, logits: Tensor | None = None) -> None:
        """The next token; if its law is told to the rule, the chance that is stated does not depend on it.

        A greedy law is always certain: its `logits` say how much that is worth.
        """
        token = draw(u, law) if self.drawn else pick(u, law)
        self.tokens.append(token)
        self.laws.append(law)
        if self.drawn:
            self.chances.append(law.peak)
        else:
            sure = probability(token, law) if logits is None else math.exp(log_probability(logits, token))
            self.chances.append(sure)

    def branches(self) -> list[Branch]:
        laws = self.laws if self.drawn else None
        return [Branch(self.tokens, self.chances, self.source, laws)] if self.tokens else []


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
        drawn = self.rule is reject
        found = _Drafts(f"{SOURCE}/bigram", drawn)
        uniforms = _uniforms(self.noise, self.sampling, canvas, holes, drawn)
        for hole, u in zip(holes.tolist(), uniforms, strict=True):
            followers = self.counts.get(int(text[hole - 1])) if hole else None
            if not followers:
                break
            ids = np.array(sorted(followers), dtype=np.int64)
            found.add(Law(ids, np.array([followers[token] for token in ids.tolist()], dtype=np.float64)), u)
            text[hole] = found.tokens[-1]
        return found.branches()

    def _count(self, canvas: Canvas, last: Step | None) -> None:
        """Pairs of decided neighbours that were not counted before."""
        places = canvas.given if last is None else canvas.order[last.canvas.done : canvas.done]
        text = canvas.tokens
        for place in {*places.tolist(), *(places + 1).tolist()}:
            pair = 0 < place < len(text) and text[place] != HOLE and text[place - 1] != HOLE
            if pair and place not in self.counted:
                self.counted.add(place)
                self.counts[int(text[place - 1])][int(text[place])] += 1
