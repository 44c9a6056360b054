"""Teach what a token says of the one behind it, where a law was asked for without knowing it: the links of `assd`."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from saltus.core.links import Links
from saltus.training.any_subset import AnySubsetCourse, alike, from_left_to_right
from saltus.training.draws import draws


class LinkModel(nn.Module):
    """The scores of neighbours, which begin at none."""

    def __init__(self, vocab: int, rank: int, seed: int = 0) -> None:
        super().__init__()
        self.left = nn.Parameter(torch.from_numpy(draws(seed, "links").normal(0, 0.02, (vocab, rank))).float())
        self.right = nn.Parameter(torch.zeros(vocab, rank))

    def forward(self, before: Int[Tensor, "rows"]) -> Float[Tensor, "rows vocab"]:
        """What is added to the logits of the tokens behind these."""
        return self.left[before] @ self.right.T

    def links(self) -> Links:
        return Links(*(weight.detach().cpu().numpy() for weight in (self.left, self.right)))


@dataclass(eq=False)
class LinkCourse:
    """Laws of holes that do not know the last 1 to `ahead` tokens, told the one to their left; the model stays."""

    course: AnySubsetCourse
    rank: int = 64
    ahead: int = 16
    module: LinkModel = field(init=False)

    def __post_init__(self) -> None:
        self.course.module.requires_grad_(False).eval()
        words = self.course.model.get_output_embeddings().weight
        self.module = LinkModel(len(words), self.rank, self.course.seed).to(words.device)

    def loss(self, step: int) -> Float[Tensor, ""]:
        """Nats of a hole whose left neighbour is one."""
        course, generator = self.course, draws(self.course.seed, "links", step)
        texts = [course.texts[place] for place in alike(course.sizes, course.batch, generator)]
        shares = course.holes.shares(course.batch, 1.0, generator)
        tokens, ranks = course.lay(texts, shares, generator, course.holes.open[1])
        ranks = from_left_to_right(ranks)
        behind, before = neighbours(tokens, ranks)
        logits, wanted = self._said(tokens, ranks, int(generator.integers(1, self.ahead + 1)))
        if not len(before):
            return self.module.right.sum() * 0
        return F.cross_entropy(logits[behind] + self.module(before), wanted[behind])

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
            ranks = from_left_to_right(ranks)
            behind, before = neighbours(tokens, ranks)
            own = self._said(tokens, ranks, 0)[0][behind].softmax(-1)
            logits = self._said(tokens, ranks, self.ahead // 2)[0][behind]
            for found, drafted in ((alone, logits), (linked, logits + self.module(before))):
                found += torch.minimum(own, drafted.softmax(-1)).sum(-1).tolist()
        return {"accepted without links": float(np.mean(alone)), "with": float(np.mean(linked))}

    @torch.no_grad()
    def _said(self, tokens: Tensor, ranks: Tensor, lag: int) -> tuple[Tensor, Tensor]:
        return self.course.say(tokens, ranks, lag)


def neighbours(
    tokens: Int[Tensor, "batch laid"], ranks: Int[Tensor, "batch laid"]
) -> tuple[Bool[Tensor, "asked"], Int[Tensor, "behind"]]:
    """Which of the holes stand right behind the hole that is decided before them, and the tokens of those before."""
    before = torch.zeros_like(ranks)
    before[:, 1:] = ranks[:, :-1]
    behind = (ranks > 1) & (before == ranks - 1)
    left = torch.zeros_like(tokens)
    left[:, 1:] = tokens[:, :-1]
    return behind[ranks > 0], left[behind]
