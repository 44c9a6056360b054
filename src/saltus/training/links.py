"""Teach what tokens say of the one behind them, where a law was asked for without knowing them: the links of `assd`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from saltus.core.links import Links
from saltus.training.any_subset import AnySubsetCourse, alike, from_left_to_right
from saltus.training.draws import draws


class LinkModel(nn.Module):
    """What is changed by neighbours: nothing, at first."""

    def __init__(self, vocab: int, hidden: int, rank: int, seed: int = 0) -> None:
        super().__init__()
        self.left = nn.Parameter(torch.from_numpy(draws(seed, "links").normal(0, 0.02, (vocab, rank))).float())
        self.before = nn.Parameter(torch.zeros(vocab, rank))
        self.right = nn.Parameter(torch.zeros(vocab, rank))
        self.told = nn.Parameter(torch.zeros(hidden, rank + 1))

    def forward(
        self,
        logits: Float[Tensor, "rows vocab"],
        states: Float[Tensor, "rows hidden"],
        left: Int[Tensor, "rows"],
        before: Int[Tensor, "rows"],
    ) -> Float[Tensor, "rows vocab"]:
        """Logits behind these tokens, as `Links` has them; `before` is −1 where the law knew it."""
        weights = 1 + states @ self.told
        said = self.left[left] + torch.where(before[:, None] >= 0, self.before[before.clamp_min(0)], 0.0)
        return logits * weights[:, -1:] + (said * weights[:, :-1]) @ self.right.T

    def links(self) -> Links:
        return Links(**{name: weight.detach().cpu().numpy() for name, weight in self.named_parameters()})


@dataclass(eq=False)
class LinkCourse:
    """Bring laws of holes that do not know the last 1 to `ahead` tokens near those that do; the model stays.

    Drafts of such laws are accepted as often as the two overlap.
    """

    course: AnySubsetCourse
    rank: int = 64
    ahead: int = 16
    module: LinkModel = field(init=False)

    def __post_init__(self) -> None:
        self.course.module.requires_grad_(False).eval()
        words = self.course.model.get_output_embeddings().weight
        vocab, hidden = words.shape
        self.module = LinkModel(vocab, hidden, self.rank, self.course.seed).to(words.device)

    def loss(self, step: int) -> Float[Tensor, ""]:
        """Cross-entropy, in nats, of holes whose left neighbour is one; its least is the entropy of their own laws."""
        course, generator = self.course, draws(self.course.seed, "links", step)
        texts = [course.texts[place] for place in alike(course.sizes, course.batch, generator)]
        shares = course.holes.shares(course.batch, 1.0, generator)
        tokens, ranks = course.lay(texts, shares, generator, course.holes.open[1])
        own, (logits, *told) = self._said(tokens, ranks, int(generator.integers(1, self.ahead + 1)))
        if not len(own):
            return self.module.right.sum() * 0
        return F.cross_entropy(self.module(logits, *told), own)

    @torch.no_grad()
    def report(self) -> dict[str, float]:
        """Of held-out texts, half of them holes: how often a draft is accepted behind one that was."""
        course, generator = self.course, draws(1, "exam")
        alone, linked = [], []
        for start in range(0, 4 * course.batch, course.batch):
            texts = course.held_out[start : start + course.batch]
            if not texts:
                break
            tokens, ranks = course.lay(texts, [0.5] * len(texts), generator)
            own, (logits, *told) = self._said(tokens, ranks, self.ahead // 2)
            for found, drafted in ((alone, logits), (linked, self.module(logits, *told))):
                found += torch.minimum(own, drafted.softmax(-1)).sum(-1).tolist()
        return {"accepted without links": float(np.mean(alone)), "with": float(np.mean(linked))}

    @torch.no_grad()
    def _said(self, tokens: Tensor, ranks: Tensor, lag: int) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Holes behind holes: their own laws, and what drafts are of: logits, states, the tokens that they lack."""
        ranks = from_left_to_right(ranks)
        behind, left, before = neighbours(tokens, ranks, lag)
        own = self.course.say(tokens, ranks)[0][behind].softmax(-1)
        with _heard(self.course.model) as states:
            logits = self.course.say(tokens, ranks, lag)[0][behind]
        return own, (logits, states[0].flatten(0, -2)[behind].float(), left, before)


@contextmanager
def _heard(model: Any) -> Iterator[list[Tensor]]:
    """While open, the states that logits are of are kept."""
    states: list[Tensor] = []
    hook = model.get_output_embeddings().register_forward_pre_hook(lambda _, given: states.append(given[0]))
    try:
        yield states
    finally:
        hook.remove()


def neighbours(
    tokens: Int[Tensor, "batch laid"], ranks: Int[Tensor, "batch laid"], lag: int
) -> tuple[Bool[Tensor, "asked"], Int[Tensor, "behind"], Int[Tensor, "behind"]]:
    """Which of the holes stand right behind the hole that is decided before them, and the tokens to their left.

    Those two to the left are −1 where they were known to a law that lags so far behind.
    """
    (left, left_rank), (before, before_rank) = (_shifted(tokens, ranks, by) for by in (1, 2))
    behind = (ranks > 1) & (left_rank == ranks - 1)
    unknown = (before_rank > 0) & (before_rank >= (ranks - lag).clamp_min(1))
    before = torch.where(unknown, before, -1)
    return behind[ranks > 0], left[behind], before[behind]


def _shifted(tokens: Tensor, ranks: Tensor, by: int) -> tuple[Tensor, Tensor]:
    """To each place the token and the rank that stand so far to its left; rank 0 where nothing does."""
    return F.pad(tokens, (by, 0))[:, : tokens.shape[1]], F.pad(ranks, (by, 0))[:, : ranks.shape[1]]
