"""Find the uniforms under which a teacher writes a given text: the edges of every token, and a place between them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional

from saltus.core.sampling import LIKELY, Sampling, interval, law

Order = Literal["pick", "token"]  # the order of the tokens in Pick: core.sampling's, or that of their ids
SHOWN = 5  # skipped tokens that are shown
MARGIN = 2.0**-20  # of an interval, kept free at both ends, so that rounding cannot leave it


@dataclass(frozen=True, eq=False)
class Edges:
    """u in [low, high) picks the token; float64. Where high = low no uniform does."""

    low: Float[Tensor, "*shape"]
    high: Float[Tensor, "*shape"]


@dataclass
class Skipped:
    """The tokens that were left out, since their edges do not contain them by numerics."""

    seen: int = 0
    count: int = 0
    examples: list[str] = field(default_factory=list)

    def add(self, holds: Bool[Tensor, "*shape"], tokens: Int[Tensor, "*shape"], edges: Edges) -> None:
        """Count those that do not hold, and keep the first few to show."""
        self.seen += holds.numel()
        if holds.all():
            return
        lost = ~holds
        self.count += int(lost.sum())
        rows = zip(*(part[lost].tolist() for part in (tokens, edges.low, edges.high)), strict=True)
        for token, low, high in list(rows)[: SHOWN - len(self.examples)]:
            self.examples.append(f"{token} in [{low:.17g}, {high:.17g})")

    def __str__(self) -> str:
        shown = f": {'; '.join(self.examples)}" if self.examples else ""
        return f"{self.count:,} of {self.seen:,} tokens were skipped, since their edges do not contain them{shown}"


def text_edges(
    logits: Float[Tensor, "length vocab"],
    tokens: Int[Tensor, "length"],
    sampling: Sampling,
    before: np.ndarray | None = None,
    first: int = 0,
) -> Edges:
    """[F_{k,t−1}, F_{k,t}) of every token of a text, by the one sampling pipeline (PTP, Eq. 9); row k is token k's law.

    `before`: the tokens before them, which a repetition penalty reads. `first`: the first one's number among the new
    tokens. It goes row by row: some 0.1 ms a token for large vocabularies.
    """
    before = np.empty(0, dtype=np.int64) if before is None else before
    text = np.concatenate([before, tokens.cpu().numpy()])
    rows = logits.detach().cpu()
    edges = np.zeros((len(rows), 2))
    for k, row in enumerate(rows):
        here = len(before) + k
        edges[k] = interval(int(text[here]), law(row, sampling, text[:here], first + k))
    low, high = torch.from_numpy(edges).T
    return Edges(low.contiguous(), high.contiguous())


def ranked(
    logits: Float[Tensor, "*shape vocab"], temperature: float = 1.0, order: Order = "pick"
) -> tuple[Int[Tensor, "*shape vocab"], Float[Tensor, "*shape vocab"]]:
    """The tokens in the order of Pick, and their running sums, which end at 1: `law` for whole tensors, in float64.

    For small vocabularies and no sampling setting but a temperature; tested to agree with `law`, `pick`, `interval`.
    """
    weights = _weights(logits, temperature)
    keys = torch.where(weights >= LIKELY, -weights, 1.0) if order == "pick" else torch.zeros_like(weights)
    tokens = keys.argsort(dim=-1, stable=True)
    sums = weights.gather(-1, tokens).cumsum(-1)
    return tokens, sums / sums[..., -1:]


def edges(
    logits: Float[Tensor, "*shape vocab"],
    tokens: Int[Tensor, "*shape"],
    temperature: float = 1.0,
    order: Order = "pick",
) -> Edges:
    """`text_edges` for whole tensors, but for the last digits; float64 sums over the tokens picked before, unsorted."""
    weights = _weights(logits, temperature)
    own = weights.gather(-1, tokens[..., None])
    before = torch.arange(weights.shape[-1], device=weights.device) < tokens[..., None]
    if order == "pick":
        likelier = (weights > own) | ((weights == own) & before)
        before = torch.where(own >= LIKELY, likelier, before | (weights >= LIKELY))
    low, total = (weights * before).sum(-1), weights.sum(-1)
    return Edges(low / total, ((low + own[..., 0]) / total).clamp_max(1))


def _weights(logits: Float[Tensor, "*shape vocab"], temperature: float) -> Float[Tensor, "*shape vocab"]:
    """Unnormalised, 1 for the likeliest token, as `law` has them."""
    scores = logits.detach().float()
    if temperature != 1:
        scores = scores / temperature
    return (scores - scores.amax(-1, keepdim=True)).double().exp()


def begun(edges: Edges, laws: Float[Tensor, "batch length vocab"]) -> tuple[Edges, Float[Tensor, "batch begun vocab"]]:
    """Edges and laws of texts that a starting token now stands before; what is there for it is not to be read."""
    low, high = (functional.pad(part, (1, 0)) for part in (edges.low, edges.high))
    return Edges(low, high), functional.pad(laws, (0, 0, 1, 0))


def picks(
    uniforms: Float[Tensor, "*shape"],
    logits: Float[Tensor, "*shape vocab"],
    temperature: float = 1.0,
    order: Order = "pick",
) -> Int[Tensor, "*shape"]:
    """`pick` for whole tensors: the first token whose running sum exceeds u (PTP, Eq. 2)."""
    ids, sums = ranked(logits, temperature, order)
    rank = torch.searchsorted(sums, uniforms[..., None].double().contiguous(), right=True)
    return ids.gather(-1, rank.clamp_max(sums.shape[-1] - 1))[..., 0]


def place(edges: Edges, generator: np.random.Generator, b: float = 1.0) -> tuple[Tensor, Tensor]:
    """A uniform for every token, at a Beta(b, b) place between its edges (PTP, App. D), and whether they contain it.

    b = 1 is uniform, less is nearer to the edges; infinite is the middle. Both results have the shape of the edges.
    """
    if not b > 0:
        raise ValueError(f"b is {b}, but Beta(b, b) needs a positive number; 1 places u uniformly")
    shape = tuple(edges.low.shape)
    places = torch.from_numpy(generator.beta(b, b, shape) if b < np.inf else np.full(shape, 0.5)).to(edges.low.device)
    uniforms = edges.low + places.clamp(MARGIN, 1 - MARGIN) * (edges.high - edges.low)
    return uniforms.clamp(0, 1 - 2.0**-53), (edges.low < uniforms) & (uniforms < edges.high)
