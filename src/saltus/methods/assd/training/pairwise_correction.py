"""Training of the pairwise correction of `assd`: it adapts logits to tokens that they were computed without."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from saltus.methods.assd.network import CORRECTION_TENSORS, save_pairwise_correction
from saltus.methods.assd.training.any_subset import AnySubsetTrainingTask, lattice_ranks
from saltus.methods.shared.logit_correction import PairwiseCorrection
from saltus.training.data.seeded_generator import seeded_generator
from saltus.training.loop.training_loop import Schedule
from saltus.training.training_task import TrainingTask


class PairwiseCorrectionModel(nn.Module):
    """A correction of logits of rank `rank`; initially zero. The parameters' names are keys of checkpoints."""

    def __init__(self, vocab: int, hidden: int, rank: int, seed: int = 0) -> None:
        super().__init__()
        self.left = nn.Parameter(
            torch.from_numpy(seeded_generator(seed, "links").normal(0, 0.02, (vocab, rank))).float()
        )
        self.second_left = nn.Parameter(torch.zeros(vocab, rank))
        self.right = nn.Parameter(torch.zeros(vocab, rank))
        self.gate = nn.Parameter(torch.zeros(hidden, rank + 1))

    def forward(
        self,
        logits: Float[Tensor, "rows vocab"],
        hidden_states: Float[Tensor, "rows hidden"],
        left: Int[Tensor, "rows"],
        second_left: Int[Tensor, "rows"],
    ) -> Float[Tensor, "rows vocab"]:
        """Logits after these two tokens, as `PairwiseCorrection` computes them; second_left −1: it was known."""
        weights = 1 + hidden_states @ self.gate
        second = torch.where(second_left[:, None] >= 0, self.second_left[second_left.clamp_min(0)], 0.0)
        return logits * weights[:, -1:] + ((self.left[left] + second) * weights[:, :-1]) @ self.right.T

    def correction(self) -> PairwiseCorrection:
        return PairwiseCorrection(*(getattr(self, name).detach().cpu().numpy() for name in CORRECTION_TENSORS))


@dataclass(eq=False)
class PairwiseCorrectionTrainingTask(TrainingTask):
    """A low-rank correction, so that holes predicted without the last 1 to `max_unknown` tokens match predictions
    with them. The model stays. The acceptance rate of drafts is the overlap of the two distributions.
    """

    phase, metrics_name, metrics_unit = "correction", "held-out acceptance rate", ""

    base_task: AnySubsetTrainingTask
    rank: int = 64
    max_unknown: int = 16
    schedule: Schedule | None = None
    module: PairwiseCorrectionModel = field(init=False)

    def __post_init__(self) -> None:
        self.base_task.module.requires_grad_(False).eval()
        unembedding = self.base_task.model.get_output_embeddings().weight
        vocab, hidden = unembedding.shape
        self.module = PairwiseCorrectionModel(vocab, hidden, self.rank, self.base_task.seed).to(unembedding.device)

    def loss(self, step: int) -> Float[Tensor, ""]:
        """Cross-entropy, in nats, of holes right after a hole; its minimum is the entropy of the full predictions."""
        base, generator = self.base_task, seeded_generator(self.base_task.seed, "links", step)
        tokens, ranks = base.sample_batch(generator, 1.0, base.hole_settings.blank_probability[1])
        num_unknown, own = int(generator.integers(1, self.max_unknown + 1)), self.processes.share(len(tokens))
        targets, inputs = self._batch_logits(tokens[own], ranks[own], num_unknown)
        return self.processes.mean(F.cross_entropy(self.module(*inputs), targets, reduction="none"))

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        """Acceptance rates after an accepted draft, in held-out texts of which half is holes."""
        generator = seeded_generator(1, "exam")
        uncorrected, corrected = [], []
        for texts in self.base_task.validation_parts():
            tokens, ranks = self.base_task.make_batch(texts, [0.5] * len(texts), generator)
            targets, inputs = self._batch_logits(tokens, ranks, self.max_unknown // 2)
            for rates, logits in ((uncorrected, inputs[0]), (corrected, self.module(*inputs))):
                rates += torch.minimum(targets, logits.softmax(-1)).sum(-1).tolist()
        return {"uncorrected": float(np.mean(uncorrected)), "corrected": float(np.mean(corrected))}

    def dataset_digest(self) -> str:
        """Of the texts and of the model's weights: a correction is of one model."""
        digest = blake2b(self.base_task.dataset_digest().encode(), digest_size=16)
        for weight in self.base_task.module.parameters():
            digest.update(weight.detach().float().cpu().numpy().tobytes())
        return digest.hexdigest()

    def save(self, folder: Path, card: Mapping[str, Any]) -> None:
        """Write the correction into the folder of its model."""
        save_pairwise_correction(self.module.correction(), folder)

    @torch.no_grad()
    def _batch_logits(self, tokens: Tensor, ranks: Tensor, num_unknown: int) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Of holes after holes: the full predictions, and the correction's inputs (logits, states, two tokens)."""
        ranks = lattice_ranks(ranks)
        following, left, second_left = consecutive_holes(tokens, ranks, num_unknown)
        targets = self.base_task.hole_logits(tokens, ranks)[0][following].softmax(-1)
        with _capture_hidden_states(self.base_task.model) as states:
            logits = self.base_task.hole_logits(tokens, ranks, num_unknown)[0][following]
        return targets, (logits, states[0].flatten(0, -2)[following].float(), left, second_left)


@contextmanager
def _capture_hidden_states(model: Any) -> Iterator[list[Tensor]]:
    """While open, the inputs of the LM head are appended to the list."""
    states: list[Tensor] = []
    hook = model.get_output_embeddings().register_forward_pre_hook(lambda _, inputs: states.append(inputs[0]))
    try:
        yield states
    finally:
        hook.remove()


def consecutive_holes(
    tokens: Int[Tensor, "batch padded"], ranks: Int[Tensor, "batch padded"], num_unknown: int
) -> tuple[Bool[Tensor, "holes"], Int[Tensor, "following"], Int[Tensor, "following"]]:
    """True for holes right after the hole that is decided before them, and the two tokens to their left.

    The second of these is −1 where a prediction without the last `num_unknown` holes knows it.
    """
    (left, left_rank), (second, second_rank) = (_shift_right(tokens, ranks, by) for by in (1, 2))
    following = (ranks > 1) & (left_rank == ranks - 1)
    unknown = (second_rank > 0) & (second_rank >= (ranks - num_unknown).clamp_min(1))
    return following[ranks > 0], left[following], torch.where(unknown, second, -1)[following]


def _shift_right(tokens: Tensor, ranks: Tensor, by: int) -> tuple[Tensor, Tensor]:
    """The token and the rank `by` positions to the left of each position; rank 0 at the beginning."""
    return F.pad(tokens, (by, 0))[:, : tokens.shape[1]], F.pad(ranks, (by, 0))[:, : ranks.shape[1]]
