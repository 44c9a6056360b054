"""Turn the predictions of one draft call into branches: the likeliest paths, each token given those before it."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float, Int

from saltus.core.coupling import PARALLEL_ERROR, draft_tokens, favoured, largest
from saltus.core.forward import ForwardOutputs
from saltus.core.noise import Noise
from saltus.core.rules import Rule, reject
from saltus.core.sampling import Sampling, float_row, token_distribution
from saltus.core.tree import DraftNodes
from saltus.methods.shared.logit_correction import TokenCorrection

MIN_PATH_PROBABILITY = 0.01  # nodes that are reached with a smaller probability are not offered
MAX_NODES = 12  # nodes of the branches, at most
MAX_GAP = 8.0  # a token whose logit is further below the largest one is no candidate
MAX_CANDIDATES = 64  # of a position


@dataclass(frozen=True, eq=False)
class LikelyTokens:
    """The likely tokens of one position, without the corrections. Empty where a logit is not a number."""

    columns: Int[np.ndarray, "likely"]  # of the logits, ascending
    logits: Float[np.ndarray, "likely"]  # relative to the greatest
    rest: float  # Σ exp of the logits of all other tokens


def likely_tokens(row: Float[np.ndarray, "vocab"]) -> LikelyTokens:
    """The tokens less than MAX_GAP below the greatest logit, at most MAX_CANDIDATES."""
    greatest = row.max()
    if not np.isfinite(greatest):
        return LikelyTokens(np.empty(0, dtype=np.int64), row[:0], 0.0)
    logits = row - greatest
    columns = np.flatnonzero(logits > -MAX_GAP)
    return most_likely(columns, logits[columns], float(np.exp(logits).sum(dtype=np.float64)))


def most_likely(columns: np.ndarray, logits: np.ndarray, total: float) -> LikelyTokens:
    """At most MAX_CANDIDATES of tokens with these logits, of equal ones the first; `total` is Σ exp of all logits."""
    if len(columns) > MAX_CANDIDATES:
        kept = np.sort(np.argsort(-logits, kind="stable")[:MAX_CANDIDATES])
        columns, logits = columns[kept], logits[kept]
    return LikelyTokens(columns, logits, max(total - float(np.exp(logits).sum(dtype=np.float64)), 0.0))


PathLogits = Callable[[int, Sequence[int]], Float[np.ndarray, "likely"]]
"""What is added to the logits of a position's likely tokens after a path, as `DraftPredictions.candidates` gets it."""


@dataclass(eq=False)
class PositionPredictions:
    """The distributions that one draft call predicts for the next positions.

    With a correction the distribution of a position depends on the two tokens before it, with `after_path` on all
    drafts before it. It is then exact for the likely tokens of the position; the others keep their uncorrected logits.
    """

    positions: Sequence[LikelyTokens]
    token_ids: Int[np.ndarray, "vocab"] | None = None  # the ids of the columns; None: 0, 1, …
    correction: TokenCorrection | None = None
    position_inputs: Sequence[np.ndarray] | np.ndarray = ()  # of the correction
    reads_uniforms: bool = True  # False: computed without uniforms, so these are distributions at temperature 1
    grow: GrowPaths | None = None
    confidence: Callable[[int, int], float] | None = None  # that a position's likeliest token after a token is accepted
    after_path: PathLogits | None = None
    _candidates: dict[int, tuple[np.ndarray, np.ndarray]] = field(default_factory=dict, init=False)

    @property
    def num_positions(self) -> int:
        """How many positions are predicted, from the first open one on."""
        return len(self.positions)

    def candidates(self, position: int, path: Sequence[int]) -> tuple[np.ndarray, np.ndarray, float]:
        """See DraftPredictions; empty for logits that are not finite."""
        likely = self.positions[position]
        if position not in self._candidates:
            ids = likely.columns if self.token_ids is None else self.token_ids[likely.columns]
            right = self.correction.right[likely.columns] if self.correction is not None else likely.logits
            self._candidates[position] = ids, right
        ids, right = self._candidates[position]
        logits = likely.logits
        if self.correction is not None and len(ids) and path:
            second_left = path[-2] if len(path) > 1 else None
            sharpness, vector = self.correction.vector(self.position_inputs[position], path[-1], second_left)
            logits = logits * sharpness + right @ vector
        if self.after_path is not None and len(ids) and path:
            logits = logits + self.after_path(position, path)
        if logits is not likely.logits and not np.isfinite(logits).all():
            return ids[:0], logits[:0], 0.0
        return ids, logits, likely.rest


@runtime_checkable
class DraftPredictions(Protocol):
    """What one draft call predicts for the next positions: distributions that may depend on the tokens before."""

    @property
    def num_positions(self) -> int:
        """How many positions are predicted, from the first open one on."""
        ...

    @property
    def grow(self) -> GrowPaths | None:
        """A faster way to grow the likeliest paths, where there is one."""
        ...

    def candidates(self, position: int, path: Sequence[int]) -> tuple[np.ndarray, np.ndarray, float]:
        """The likely tokens of a position after the tokens of `path`: ids, logits, and the weight Σ exp of all others.

        `path` ends with the token before the position: the last two tokens of the text, where it has two, and the
        drafts after them.
        """
        ...


@dataclass(frozen=True)
class DraftOutputs(ForwardOutputs):
    """The outputs of a draft call, with what its queries predict."""

    predictions: DraftPredictions | None = None


def position_predictions(outputs: ForwardOutputs, rows: slice = slice(1, None)) -> PositionPredictions:
    """What a draft call predicts for the next positions, as its network says or else by these rows of the logits.

    By default they are those of its query nodes. A network whose row i is for the i-th position from 0 has no others:
    take `slice(count)`, for no more positions than are open.
    """
    if isinstance(outputs, DraftOutputs) and isinstance(outputs.predictions, PositionPredictions):
        return outputs.predictions
    ids = outputs.token_ids
    likely = [likely_tokens(row) for row in float_row(outputs.logits[rows])]
    return PositionPredictions(likely, None if ids is None else ids.cpu().numpy())


Chooser = Callable[[DraftPredictions, int, Sequence[int]], list[tuple[int, float]]]
"""Tokens to offer at a position (0: the first one) after a path, with their acceptance probabilities, best first."""


@dataclass(frozen=True)
class Likeliest:
    """A chooser: the `top_k` likeliest tokens, with their probabilities at this temperature."""

    top_k: int
    temperature: float = 1.0

    def __call__(self, predictions: DraftPredictions, position: int, path: Sequence[int]) -> list[tuple[int, float]]:
        ids, logits, rest = predictions.candidates(position, path)
        if not len(ids):
            return []
        best = largest(logits, self.top_k)
        top = logits[best[0]]
        weights = np.exp((logits - top) / self.temperature)
        total = float(weights.sum(dtype=np.float64)) + rest * math.exp(-min(max(float(top), -80.0), 80.0))
        return list(zip(ids[best].tolist(), (weights[best] / total).tolist(), strict=True))


@dataclass(frozen=True, eq=False)
class SharedNoise:
    """A chooser: the `top_k` tokens that the text's own random numbers favour at each of `positions`.

    Penalties and bans, which need the whole text, are left out.
    """

    top_k: int
    sampling: Sampling
    noise: Noise
    positions: np.ndarray
    _log_noise: dict[int, tuple[np.ndarray, np.ndarray]] = field(default_factory=dict, init=False)  # ids and theirs

    @property
    def is_gumbel_max(self) -> bool:
        """True if the tokens are those of the greatest log P + G among all tokens."""
        return self.sampling.coupling == "gumbel" and not self.sampling.truncates

    def __call__(self, predictions: DraftPredictions, position: int, path: Sequence[int]) -> list[tuple[int, float]]:
        ids, logits, _ = predictions.candidates(position, path)
        if not len(ids):
            return []
        if not self.is_gumbel_max:
            kept = ("temperature", "top_k", "top_p", "min_p", "coupling")
            sampling = Sampling(**{name: getattr(self.sampling, name) for name in kept})
            distribution = token_distribution(torch.from_numpy(logits), sampling)
            distribution = replace(
                distribution, tokens=ids if distribution.tokens is None else ids[distribution.tokens]
            )
            return draft_tokens(distribution, self.noise, "text", self.positions[position], self.top_k, PARALLEL_ERROR)
        known_ids, log_noise = self._log_noise.get(position, (None, ids))
        if known_ids is not ids:
            numbers = self.noise.of_tokens("text", self.positions[position], int(ids[-1]) + 1)
            log_noise = np.log(numbers.exponentials(ids))
            self._log_noise[position] = ids, log_noise
        values = logits / self.sampling.temperature - log_noise
        return favoured(ids, values, self.top_k, PARALLEL_ERROR)


def chooser(top_k: int, sampling: Sampling, rule: Rule, noise: Noise, positions: np.ndarray) -> Chooser:
    """The `top_k` likeliest tokens, or under `match` with sampling those that the text's own random numbers favour.

    `positions` are the canvas's `open_positions`. Under `reject` no draft may depend on the text's random numbers.
    """
    if sampling.greedy:
        return Likeliest(top_k)
    return Likeliest(top_k, sampling.temperature) if rule is reject else SharedNoise(top_k, sampling, noise, positions)


PathNode = tuple[int, int, float]
"""A node of a draft tree: its parent, −1 for none; its token; its probability if its parent is accepted."""

GrowPaths = Callable[[Sequence[int], Chooser], Sequence[PathNode] | None]
"""`grown_nodes` for the last two tokens of a text; None if it does not know the chooser."""


GrowthRule = Literal["nodes", "siblings"]
"""What is added to a draft tree next. nodes: the likeliest node (DDTree). siblings: all offered children of the
likeliest node that has none yet, however unlikely they are (JetSpec's `accum_logp`)."""


def likely_paths(
    predictions: DraftPredictions,
    text: Sequence[int],
    choose: Chooser,
    source: str,
    max_nodes: int = MAX_NODES,
    growth: GrowthRule = "nodes",
) -> list[DraftNodes]:
    """The likeliest paths, grown best first, of `max_nodes` in all.

    `text` holds the last two decided tokens, or fewer in a shorter text. For drafters that predict each position
    without the drafts before it this is DDTree's rule: the nodes with the greatest products of probabilities.
    """
    if isinstance(predictions, PositionPredictions) and predictions.confidence is not None:
        choose = _confident(choose, predictions.confidence)
    has_kernel = max_nodes == MAX_NODES and growth == "nodes"  # it has room for that many
    grow = predictions.grow if has_kernel else None
    nodes = None if grow is None else grow(text[-2:], choose)
    nodes = grown_nodes(predictions, text[-2:], choose, max_nodes, growth) if nodes is None else nodes
    return draft_nodes(nodes, source)


def draft_nodes(nodes: Sequence[PathNode], source: str) -> list[DraftNodes]:
    """What a drafter offers for the nodes of its paths."""
    if not nodes:
        return []
    parents, tokens, chances = zip(*nodes, strict=True)
    return [DraftNodes(np.array(tokens), np.array(parents), np.array(chances, dtype=np.float64), source)]


def least_probability(max_nodes: int) -> float:
    """Nodes that are reached with a smaller probability are not offered in a tree of so many nodes."""
    return MIN_PATH_PROBABILITY * min(MAX_NODES / max_nodes, 1.0)


def _confident(choose: Chooser, confidence: Callable[[int, int], float]) -> Chooser:
    """A chooser whose first token is accepted with a predicted probability; the others share what it leaves."""

    def chosen(predictions: DraftPredictions, position: int, path: Sequence[int]) -> list[tuple[int, float]]:
        offered = choose(predictions, position, path)
        if not offered or not path:
            return offered
        (token, chance), predicted = offered[0], confidence(position, path[-1])
        rest = (1 - predicted) / (1 - chance) if chance < 1 else 0.0
        return [(token, predicted), *((other, rest * value) for other, value in offered[1:])]

    return chosen


def grown_nodes(
    predictions: DraftPredictions,
    text: Sequence[int],
    choose: Chooser,
    max_nodes: int = MAX_NODES,
    growth: GrowthRule = "nodes",
) -> list[PathNode]:
    """The nodes of the likeliest paths, in the order in which they are added; more of them may be less likely."""
    least = least_probability(max_nodes) if growth == "nodes" else 0.0
    nodes: list[PathNode] = []
    queue: list[tuple[float, int, PathNode, int]] = []  # -probability, number, node, its place in `nodes` or −1
    paths = [tuple(text)]  # the tokens before each node's children, from the text on

    def add(node: PathNode) -> int:
        nodes.append(node)
        paths.append((*paths[node[0] + 1], node[1]))
        return len(nodes) - 1

    def expand(parent: int, reached: float) -> None:
        path = paths[parent + 1]
        depth = len(path) - len(text)
        if depth >= predictions.num_positions or len(nodes) >= max_nodes:
            return
        for token, chance in choose(predictions, depth, path):
            if reached * chance >= least and len(nodes) < max_nodes:
                node, number = (parent, token, chance), len(nodes) + len(queue)
                place = add(node) if growth == "siblings" else -1
                heapq.heappush(queue, (-reached * chance, number, node, place))

    expand(-1, 1.0)
    while queue and len(nodes) < max_nodes:
        reached, _, node, place = heapq.heappop(queue)
        expand(add(node) if place < 0 else place, -reached)
    return nodes
