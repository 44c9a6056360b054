"""The uniforms under which a teacher writes a given text: an interval for every token, and a point inside it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from saltus.core.picking import LIKELY_THRESHOLD, Coupling
from saltus.core.sampling import Sampling

INTERVAL_MARGIN = 2.0**-20  # of an interval, excluded at both ends, so that rounding cannot leave it
ROWS_PER_CHUNK = 64  # distributions over a vocabulary in float64 at a time


@dataclass(frozen=True, eq=False)
class UniformIntervals:
    """u in [low, high) picks the token; float64. Where high = low no uniform does; NaN: the coupling has none."""

    low: Float[Tensor, "*shape"]
    high: Float[Tensor, "*shape"]


@dataclass(frozen=True)
class Truncation:
    """The likely tokens that a distribution keeps, after the temperature, as `core.truncation` keeps them."""

    top_k: int = 0  # 0: all
    top_p: float = 1.0

    def __post_init__(self) -> None:
        Sampling(top_k=self.top_k, top_p=self.top_p)  # it raises errors for its settings

    def __bool__(self) -> bool:
        return self.top_k > 0 or self.top_p < 1

    def kept(self, scores: Float[Tensor, "*shape vocab"]) -> Bool[Tensor, "*shape vocab"]:
        """True for tokens that are kept: ties with the k-th are; of equals at the border of p, higher ids."""
        kept = torch.ones_like(scores, dtype=torch.bool)
        if self.top_k:
            kept = scores >= scores.topk(min(self.top_k, scores.shape[-1]), -1).values[..., -1:]
        if self.top_p < 1:
            ordered, ids = scores.masked_fill(~kept, -torch.inf).sort(dim=-1, stable=True)
            dropped = ordered.softmax(-1).cumsum(-1) <= 1 - self.top_p
            dropped[..., -1] = False
            kept = kept & ~torch.zeros_like(dropped).scatter(-1, ids, dropped)
        return kept


def uniform_intervals(
    logits: Float[Tensor, "*shape vocab"],
    tokens: Int[Tensor, "*shape"],
    temperature: float = 1.0,
    coupling: Coupling = "probability",
    truncation: Truncation | None = None,
) -> UniformIntervals:
    """[F_{t−1}, F_t) of every token, F being its row's cumulative probabilities in the coupling's order (PTP, Eq. 9).

    A token that truncation removes has no interval. It sums without sorting, so the last digits may differ from
    `core.picking.uniform_interval`.
    """
    if coupling == "gumbel":
        none = torch.full(tokens.shape, torch.nan, dtype=torch.float64, device=logits.device)
        return UniformIntervals(none, none.clone())
    weights = _weights(logits, temperature)
    if truncation:
        scores = logits.detach().float() / temperature if temperature != 1 else logits.detach().float()
        weights = weights * truncation.kept(scores)
    of_tokens = weights.gather(-1, tokens[..., None])
    before = torch.arange(weights.shape[-1], device=weights.device) < tokens[..., None]
    if coupling == "probability":
        likelier = (weights > of_tokens) | ((weights == of_tokens) & before)
        before = torch.where(of_tokens >= LIKELY_THRESHOLD, likelier, before | (weights >= LIKELY_THRESHOLD))
    low, total = (weights * before).sum(-1), weights.sum(-1)
    return UniformIntervals(low / total, ((low + of_tokens[..., 0]) / total).clamp_max(1))


def _weights(logits: Float[Tensor, "*shape vocab"], temperature: float) -> Float[Tensor, "*shape vocab"]:
    """Unnormalized probabilities, 1 for the likeliest token, as in `core.sampling`."""
    scores = logits.detach().float()
    if temperature != 1:
        scores = scores / temperature
    return (scores - scores.amax(-1, keepdim=True)).double().exp()


def pick_tokens(
    uniforms: Float[Tensor, "*shape"],
    logits: Float[Tensor, "*shape vocab"],
    temperature: float = 1.0,
    coupling: Coupling = "probability",
) -> Int[Tensor, "*shape"]:
    """The first token whose cumulative probability exceeds u; `core.picking.pick` for whole tensors.

    PTP's Eq. 2 sums over the token ids 1…j, as the coupling `token-order` does; `probability` is an order of ours.
    """
    assert coupling != "gumbel"
    picked, chunks = [], (part.split(ROWS_PER_CHUNK) for part in (uniforms.flatten(), logits.flatten(0, -2)))
    for u, rows in zip(*chunks, strict=True):
        weights = _weights(rows, temperature)
        likely = weights >= LIKELY_THRESHOLD
        keys = torch.where(likely, -weights, 1.0) if coupling == "probability" else torch.zeros_like(weights)
        ids = keys.argsort(dim=-1, stable=True)
        sums = weights.gather(-1, ids).cumsum(-1)
        rank = torch.searchsorted(sums / sums[..., -1:], u[:, None].double().contiguous(), right=True)
        picked.append(ids.gather(-1, rank.clamp_max(sums.shape[-1] - 1))[..., 0])
    return torch.cat(picked).view(uniforms.shape)


def sample_uniforms(
    intervals: UniformIntervals, generator: np.random.Generator, beta: float = 1.0
) -> tuple[Tensor, Tensor]:
    """A uniform for every token at a Beta(b, b) point of its interval (PTP, App. D); False where rounding leaves it.

    b = 1 is the uniform distribution, smaller b is nearer to the ends, infinity the middle. NaN intervals give NaN.
    Both results have the shape of the intervals. Errors: ValueError unless b > 0.
    """
    if not beta > 0:
        raise ValueError(f"b is {beta}, but Beta(b, b) needs a positive number; 1 places u uniformly")
    shape = tuple(intervals.low.shape)
    places = torch.from_numpy(generator.beta(beta, beta, shape) if beta < np.inf else np.full(shape, 0.5)).to(
        intervals.low.device
    )
    uniforms = intervals.low + places.clamp(INTERVAL_MARGIN, 1 - INTERVAL_MARGIN) * (intervals.high - intervals.low)
    return uniforms.clamp(0, 1 - 2.0**-53), (intervals.low < uniforms) & (uniforms < intervals.high)
