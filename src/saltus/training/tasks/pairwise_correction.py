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

from saltus.drafting.pairwise_correction import PairwiseCorrection
from saltus.networks.models.any_subset import LINK_TENSORS
from saltus.training.data.seeded_generator import seeded_generator
from saltus.training.tasks.any_subset import AnySubsetTrainingTask, lattice_ranks, sample_similar_lengths


class PairwiseCorrectionModel(nn.Module):
    """What is changed by neighbours: nothing, at first."""

    def __init__(self, vocab: int, hidden: int, rank: int, seed: int = 0) -> None:
        super().__init__()
        self.left = nn.Parameter(
            torch.from_numpy(seeded_generator(seed, "links").normal(0, 0.02, (vocab, rank))).float()
        )
        self.before = nn.Parameter(torch.zeros(vocab, rank))
        self.right = nn.Parameter(torch.zeros(vocab, rank))
        self.told = nn.Parameter(torch.zeros(hidden, rank + 1))

    def forward(
        self,
        logits: Float[Tensor, "rows vocab"],
        hidden_states: Float[Tensor, "rows hidden"],
        left: Int[Tensor, "rows"],
        second_left: Int[Tensor, "rows"],
    ) -> Float[Tensor, "rows vocab"]:
        """Logits behind these tokens, as `Links` has them; `before` is −1 where the law knew it."""
        weights = 1 + hidden_states @ self.told
        said = self.left[left] + torch.where(second_left[:, None] >= 0, self.before[second_left.clamp_min(0)], 0.0)
        return logits * weights[:, -1:] + (said * weights[:, :-1]) @ self.right.T

    def correction(self) -> PairwiseCorrection:
        return PairwiseCorrection(*(getattr(self, name).detach().cpu().numpy() for name in LINK_TENSORS))


@dataclass(eq=False)
class PairwiseCorrectionTrainingTask:
    """Bring laws of holes that do not know the last 1 to `ahead` tokens near those that do; the model stays.

    Drafts of such laws are accepted as often as the two overlap.
    """

    base_task: AnySubsetTrainingTask
    rank: int = 64
    max_unknown: int = 16
    module: PairwiseCorrectionModel = field(init=False)

    def __post_init__(self) -> None:
        self.base_task.module.requires_grad_(False).eval()
        words = self.base_task.model.get_output_embeddings().weight
        vocab, hidden = words.shape
        self.module = PairwiseCorrectionModel(vocab, hidden, self.rank, self.base_task.seed).to(words.device)

    def loss(self, step: int) -> Float[Tensor, ""]:
        """Cross-entropy, in nats, of holes whose left neighbour is one; its least is the entropy of their own laws."""
        course, generator = self.base_task, seeded_generator(self.base_task.seed, "links", step)
        texts = [course.texts[place] for place in sample_similar_lengths(course.lengths, course.batch_size, generator)]
        shares = course.hole_settings.hole_fractions(course.batch_size, 1.0, generator)
        tokens, ranks = course.make_batch(texts, shares, generator, course.hole_settings.blank_probability[1])
        own, (logits, *conditioning) = self._batch_logits(
            tokens, ranks, int(generator.integers(1, self.max_unknown + 1))
        )
        if not len(own):
            return self.module.right.sum() * 0
        return F.cross_entropy(self.module(logits, *conditioning), own)

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        """Of held-out texts, half of them holes: how often a draft is accepted behind one that was."""
        course, generator = self.base_task, seeded_generator(1, "exam")
        alone, linked = [], []
        for start in range(0, 4 * course.batch_size, course.batch_size):
            texts = course.validation_texts[start : start + course.batch_size]
            if not texts:
                break
            tokens, ranks = course.make_batch(texts, [0.5] * len(texts), generator)
            own, (logits, *conditioning) = self._batch_logits(tokens, ranks, self.max_unknown // 2)
            for found, drafted in ((alone, logits), (linked, self.module(logits, *conditioning))):
                found += torch.minimum(own, drafted.softmax(-1)).sum(-1).tolist()
        return {"accepted without links": float(np.mean(alone)), "with": float(np.mean(linked))}

    @torch.no_grad()
    def _batch_logits(self, tokens: Tensor, ranks: Tensor, num_unknown: int) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Holes behind holes: their own laws, and what drafts are of: logits, states, the tokens that they lack."""
        ranks = lattice_ranks(ranks)
        behind, left, before = consecutive_holes(tokens, ranks, num_unknown)
        own = self.base_task.hole_logits(tokens, ranks)[0][behind].softmax(-1)
        with _capture_hidden_states(self.base_task.model) as states:
            logits = self.base_task.hole_logits(tokens, ranks, num_unknown)[0][behind]
        return own, (logits, states[0].flatten(0, -2)[behind].float(), left, before)


@contextmanager
def _capture_hidden_states(model: Any) -> Iterator[list[Tensor]]:
    """While open, the states that logits are of are kept."""
    states: list[Tensor] = []
    hook = model.get_output_embeddings().register_forward_pre_hook(lambda _, given: states.append(given[0]))
    try:
        yield states
    finally:
        hook.remove()


def consecutive_holes(
    tokens: Int[Tensor, "batch laid"], ranks: Int[Tensor, "batch laid"], num_unknown: int
) -> tuple[Bool[Tensor, "asked"], Int[Tensor, "behind"], Int[Tensor, "behind"]]:
    """Which of the holes stand right behind the hole that is decided before them, and the tokens to their left.

    Those two to the left are −1 where they were known to a law that lags so far behind.
    """
    (left, left_rank), (before, before_rank) = (_shift_right(tokens, ranks, by) for by in (1, 2))
    behind = (ranks > 1) & (left_rank == ranks - 1)
    unknown = (before_rank > 0) & (before_rank >= (ranks - num_unknown).clamp_min(1))
    before = torch.where(unknown, before, -1)
    return behind[ranks > 0], left[behind], before[behind]


def _shift_right(tokens: Tensor, ranks: Tensor, by: int) -> tuple[Tensor, Tensor]:
    """To each place the token and the rank that stand so far to its left; rank 0 where nothing does."""
    return F.pad(tokens, (by, 0))[:, : tokens.shape[1]], F.pad(ranks, (by, 0))[:, : ranks.shape[1]]
