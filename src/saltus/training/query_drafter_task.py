"""What the training of drafters of one pass shares: queries for the next positions, on a target's cached states."""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from saltus.core.picking import Coupling
from saltus.core.value_types import require_at_least
from saltus.loading.metadata import Kind
from saltus.training.cached_state_task import CachedStateTask
from saltus.training.data.seeded_generator import seeded_generator
from saltus.training.data.window_dataset import Batch

UNKNOWN_TOKENS = 0.25  # fraction of windows in which queries do not know the window's tokens, as before drafting
CONTEXT_POSITIONS = 0.25  # fraction of context positions that have a loss
INITIAL_NORMALS = 0.02  # standard deviation


@dataclass(eq=False)
class QueryDrafterTask(CachedStateTask):
    """A drafter with a query for each token of a window.

    Its module has a `shape` with `reads_uniforms`, an `lm_head`, and perhaps a `correction` by the two tokens before.
    """

    kind: ClassVar[Kind] = "drafter"

    @classmethod
    def learns_distributions(cls, coupling: Coupling) -> bool:
        return coupling == "gumbel"

    def _check_corpus(self) -> None:
        super()._check_corpus()
        if self.corpus.hidden_state_layers != self.shape.hidden_state_layers:
            raise ValueError(
                f"these are states of other layers of {self.target_name} than hidden_state_layers; collect them anew"
            )

    @abstractmethod
    def _forward(
        self, batch: Batch, context_length: int | None = None
    ) -> tuple[Float[Tensor, "batch slots hidden"], Float[Tensor, "batch windows window hidden"]]:
        """The last hidden states of the context positions, if they have outputs, and of the queries.

        The context ends before the last window, or is as long as `context_length`.
        """

    def loss(self, step: int) -> Float[Tensor, ""]:
        """The cross-entropy of each query, later queries of a window discounted.

        The target of a query with a uniform, or of a greedy one, is the token (PTP, Eq. 10); of others it is the
        target's own distribution there. Plus, weighted by the recipe's `distillation_weight`, the cross-entropy between
        the target's next-token distribution and the module's at context positions.
        """
        with self._autocast():
            return self._loss(step)

    def _loss(self, step: int) -> Float[Tensor, ""]:
        texts = self.window_dataset.training_batch(step)
        share = self.processes.share(len(texts.tokens))
        batch = texts.select(share)
        unknown, chosen = (part[share] for part in self._random_positions(texts, step))
        tokens, counted = self._draft_targets(batch)
        depths = torch.arange(self.shape.window, device=tokens.device).expand(counted.shape)[counted]
        weights = self.window_settings.discount**depths
        length = int(texts.window_starts.max())  # of all texts, so that every process has the same positions
        context, queries = self._forward(batch, length)
        logits = self._logits(self._corrected(batch, queries, unknown)[counted])
        losses = F.cross_entropy(logits, tokens[counted], reduction="none")
        if not self.shape.reads_uniforms:
            sampled = (batch.temperatures > 0)[..., None].to(counted.device).expand(counted.shape)[counted]
            distributions = self._target_distributions(batch.target_rows[counted.cpu()][sampled.cpu()] - 1)
            losses[sampled] = F.cross_entropy(logits[sampled], distributions, reduction="none")
        distribution_losses = self._distribution_losses(batch, context, chosen)
        mean = self.processes.weighted_mean(losses, weights, floor=1e-9)
        return mean + self.window_settings.distillation_weight * self.processes.mean(distribution_losses)

    @property
    def seed(self) -> int:
        return self.window_settings.seed

    def _random_positions(
        self, batch: Batch, step: int
    ) -> tuple[Bool[Tensor, "batch windows"], Bool[Tensor, "batch positions"]]:
        """The windows whose tokens queries do not know, and the context positions that have a loss, of all texts.

        A position has one only if a token follows, and a random quarter of them have one.
        """
        generator = seeded_generator(self.seed, "unknown", step)
        unknown = torch.from_numpy(generator.random(tuple(batch.window_starts.shape)) < UNKNOWN_TOKENS)
        rows = batch.corpus_rows[:, : int(batch.window_starts.max()) + 1]
        chosen = rows[:, 1:] > rows[:, :-1]  # after the end of a text its last row is repeated
        return unknown, chosen & torch.from_numpy(generator.random(tuple(chosen.shape)) < CONTEXT_POSITIONS)

    def _corrected(
        self,
        batch: Batch,
        queries: Float[Tensor, "batch windows window hidden"],
        unknown: Bool[Tensor, "batch windows"] | None = None,
    ) -> Float[Tensor, "batch windows window hidden"]:
        """The queries' states, given the two tokens before each; of `unknown` windows those before the window only."""
        if (correction := self.module.correction) is None:
            return queries
        starts, rows = batch.window_starts, torch.arange(len(batch.tokens))[:, None]
        before = [torch.where(starts >= n, batch.tokens[rows, (starts - n).clamp_min(0)], -1) for n in (2, 1)]
        tokens = torch.cat([torch.stack(before, -1), batch.targets], -1)
        if unknown is not None:
            tokens[..., 2:] = torch.where(unknown[..., None], -1, tokens[..., 2:])
        window, tokens = queries.shape[-2], tokens.to(queries.device)
        left, second_left = tokens[..., 1 : window + 1], tokens[..., :window]
        return correction.after_tokens(queries, left, second_left, self.module.embeddings[0])

    def _draft_targets(
        self, batch: Batch
    ) -> tuple[Int[Tensor, "batch windows window"], Bool[Tensor, "batch windows window"]]:
        """The targets as indices in the draft vocabulary, and where they have a loss."""
        tokens = self.draft_indices[batch.targets]
        counted = batch.loss_mask & (tokens >= 0)
        return tokens.to(self.target.device), counted.to(self.target.device)

    def _logits(self, hidden_states: Float[Tensor, "rows hidden"]) -> Float[Tensor, "rows draft"]:
        """The module's, of its own last hidden states."""
        return self._products(hidden_states)

    def _products(self, hidden_states: Float[Tensor, "rows hidden"]) -> Float[Tensor, "rows draft"]:
        head = self.module.lm_head
        return head(hidden_states.to(head.weight.dtype)).float()

    def _target_distributions(self, rows: Int[Tensor, "rows"]) -> Float[Tensor, "rows draft"]:
        """The target's distributions over the drafted tokens after these tokens of the corpus, at temperature 1."""
        states = self.corpus.hidden_states[rows][..., -self.shape.hidden :].to(self.module.tokens.device)
        with torch.no_grad():
            return self.scale_logits(self._products(states)).softmax(-1)

    def _distribution_losses(
        self,
        batch: Batch,
        context_states: Float[Tensor, "batch slots hidden"],
        chosen: Bool[Tensor, "batch positions"],
    ) -> Float[Tensor, "chosen"]:
        """The losses of the chosen context positions; none where the module has no outputs there."""
        chosen = chosen[:, : context_states.shape[1]]
        states = context_states[:, : chosen.shape[1]][chosen.to(context_states.device)]
        targets = self._target_distributions(batch.corpus_rows[:, : chosen.shape[1]][chosen])
        return F.cross_entropy(self._logits(states), targets, reduction="none")

    def matching_drafts(self, batch: Batch) -> Bool[Tensor, "all_windows drafts"]:
        tokens, counted = self._draft_targets(batch)
        queries = self._corrected(batch, self._forward(batch)[1])
        drafts = self._logits(queries.flatten(0, -2)).argmax(-1).view(tokens.shape)
        return (counted & (drafts == tokens)).flatten(0, 1)


@torch.no_grad()
def set_initial_values(module: nn.Module, layers: int, seed: int, skipped: tuple[str, ...] = ()) -> None:
    """Give the matrices of a module of so many layers GPT-2's initial values, from the seed alone.

    Those whose names begin like one of `skipped` stay as they are.
    """
    generator = seeded_generator(seed, "weights")
    for name, weight in module.named_parameters():
        if weight.dim() == 2 and weight.requires_grad and not name.startswith(skipped):
            inner = name.endswith(("o_proj.weight", "down_proj.weight"))
            scale = INITIAL_NORMALS / math.sqrt(2 * layers) if inner else INITIAL_NORMALS
            weight.copy_(torch.from_numpy(generator.normal(0.0, scale, tuple(weight.shape))))


def require_same_shape(folder: Path, old: Any, new: Any) -> None:
    """Raise ValueError unless training for the new shape can start from the old; window and correction may grow."""
    same = replace(new, window=old.window, correction=old.correction) == old
    if not same or new.window < old.window or old.correction not in (0, new.correction):
        raise ValueError(f"the drafter in {folder} has another shape than the recipe; take the one it was made by")


def require_sizes(settings: Any) -> None:
    """Raise ValueError for settings of a drafter that has no layer, no token or no window."""
    require_at_least(settings, "a drafter's ", layers=1, intermediate=1, window=1)
    if settings.vocabulary < 0:
        raise ValueError(f"a drafter's vocabulary is {settings.vocabulary}, but must be 1 or more, or 0 for all tokens")
