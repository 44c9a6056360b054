"""Find the uniforms under which a teacher writes a given text: the edges of every token, and a place between them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional

from saltus.core.sampling import LIKELY_THRESHOLD, Sampling, token_distribution, uniform_interval

TokenOrder = Literal["pick", "token"]  # the order of the tokens in Pick: core.sampling's, or that of their ids
MAX_EXAMPLES = 5  # skipped tokens that are shown
INTERVAL_MARGIN = 2.0**-20  # of an interval, kept free at both ends, so that rounding cannot leave it


@dataclass(frozen=True, eq=False)
class UniformIntervals:
    """u in [low, high) picks the token; float64. Where high = low no uniform does."""

    low: Float[Tensor, "*shape"]
    high: Float[Tensor, "*shape"]


@dataclass
class SkippedTokens:
    """The tokens that were left out, since their edges do not contain them by numerics."""

    num_tokens: int = 0
    num_skipped: int = 0
    examples: list[str] = field(default_factory=list)

    def record(self, valid: Bool[Tensor, "*shape"], tokens: Int[Tensor, "*shape"], intervals: UniformIntervals) -> None:
        """Count those that do not hold, and keep the first few to show."""
        self.num_tokens += valid.numel()
        if valid.all():
            return
        lost = ~valid
        self.num_skipped += int(lost.sum())
        rows = zip(*(part[lost].tolist() for part in (tokens, intervals.low, intervals.high)), strict=True)
        for token, low, high in list(rows)[: MAX_EXAMPLES - len(self.examples)]:
            self.examples.append(f"{token} in [{low:.17g}, {high:.17g})")

    def __str__(self) -> str:
        shown = f": {'; '.join(self.examples)}" if self.examples else ""
        skipped = f"{self.num_skipped:,} of {self.num_tokens:,} tokens"
        return f"{skipped} were skipped, since their edges do not contain them{shown}"


def text_uniform_intervals(
    logits: Float[Tensor, "length vocab"],
    tokens: Int[Tensor, "length"],
    sampling: Sampling,
    previous_tokens: np.ndarray | None = None,
    first_index: int = 0,
) -> UniformIntervals:
    """[F_{k,t−1}, F_{k,t}) of every token of a text, by the one sampling pipeline (PTP, Eq. 9); row k is token k's law.

    `before`: the tokens before them, which a repetition penalty reads. `first`: the first one's number among the new
    tokens. It goes row by row: some 0.1 ms a token for large vocabularies.
    """
    previous_tokens = np.empty(0, dtype=np.int64) if previous_tokens is None else previous_tokens
    text = np.concatenate([previous_tokens, tokens.cpu().numpy()])
    rows = logits.detach().cpu()
    edges = np.zeros((len(rows), 2))
    for k, row in enumerate(rows):
        here = len(previous_tokens) + k
        edges[k] = uniform_interval(int(text[here]), token_distribution(row, sampling, text[:here], first_index + k))
    low, high = torch.from_numpy(edges).T
    return UniformIntervals(low.contiguous(), high.contiguous())


def sorted_cumulative(
    logits: Float[Tensor, "*shape vocab"], temperature: float = 1.0, token_order: TokenOrder = "pick"
) -> tuple[Int[Tensor, "*shape vocab"], Float[Tensor, "*shape vocab"]]:
    """The tokens in the order of Pick, and their running sums, which end at 1: `law` for whole tensors, in float64.

    For small vocabularies and no sampling setting but a temperature; tested to agree with `law`, `pick`, `interval`.
    """
    weights = _weights(logits, temperature)
    keys = (
        torch.where(weights >= LIKELY_THRESHOLD, -weights, 1.0) if token_order == "pick" else torch.zeros_like(weights)
    )
    tokens = keys.argsort(dim=-1, stable=True)
    sums = weights.gather(-1, tokens).cumsum(-1)
    return tokens, sums / sums[..., -1:]


def uniform_intervals(
    logits: Float[Tensor, "*shape vocab"],
    tokens: Int[Tensor, "*shape"],
    temperature: float = 1.0,
    token_order: TokenOrder = "pick",
) -> UniformIntervals:
    """`text_edges` for whole tensors, but for the last digits; float64 sums over the tokens picked before, unsorted."""
    weights = _weights(logits, temperature)
    own = weights.gather(-1, tokens[..., None])
    before = torch.arange(weights.shape[-1], device=weights.device) < tokens[..., None]
    if token_order == "pick":
        likelier = (weights > own) | ((weights == own) & before)
        before = torch.where(own >= LIKELY_THRESHOLD, likelier, before | (weights >= LIKELY_THRESHOLD))
    low, total = (weights * before).sum(-1), weights.sum(-1)
    return UniformIntervals(low / total, ((low + own[..., 0]) / total).clamp_max(1))


def _weights(logits: Float[Tensor, "*shape vocab"], temperature: float) -> Float[Tensor, "*shape vocab"]:
    """Unnormalised, 1 for the likeliest token, as `law` has them."""
    scores = logits.detach().float()
    if temperature != 1:
        scores = scores / temperature
    return (scores - scores.amax(-1, keepdim=True)).double().exp()


def prepend_start_position(
    intervals: UniformIntervals, distributions: Float[Tensor, "batch length vocab"]
) -> tuple[UniformIntervals, Float[Tensor, "batch begun vocab"]]:
    """Edges and laws of texts that a starting token now stands before; what is there for it is not to be read."""
    low, high = (functional.pad(part, (1, 0)) for part in (intervals.low, intervals.high))
    return UniformIntervals(low, high), functional.pad(distributions, (0, 0, 1, 0))


def pick_tokens(
    uniforms: Float[Tensor, "*shape"],
    logits: Float[Tensor, "*shape vocab"],
    temperature: float = 1.0,
    token_order: TokenOrder = "pick",
) -> Int[Tensor, "*shape"]:
    """`pick` for whole tensors: the first token whose running sum exceeds u (PTP, Eq. 2)."""
    ids, sums = sorted_cumulative(logits, temperature, token_order)
    rank = torch.searchsorted(sums, uniforms[..., None].double().contiguous(), right=True)
    return ids.gather(-1, rank.clamp_max(sums.shape[-1] - 1))[..., 0]


def sample_uniforms(
    intervals: UniformIntervals, generator: np.random.Generator, beta: float = 1.0
) -> tuple[Tensor, Tensor]:
    """A uniform for every token, at a Beta(b, b) place between its edges (PTP, App. D), and whether they contain it.

    b = 1 is uniform, less is nearer to the edges; infinite is the middle. Both results have the shape of the edges.
    """
    if not beta > 0:
        raise ValueError(f"b is {beta}, but Beta(b, b) needs a positive number; 1 places u uniformly")
    shape = tuple(intervals.low.shape)
    places = torch.from_numpy(generator.beta(beta, beta, shape) if beta < np.inf else np.full(shape, 0.5)).to(
        intervals.low.device
    )
    uniforms = intervals.low + places.clamp(INTERVAL_MARGIN, 1 - INTERVAL_MARGIN) * (intervals.high - intervals.low)
    return uniforms.clamp(0, 1 - 2.0**-53), (intervals.low < uniforms) & (uniforms < intervals.high)
