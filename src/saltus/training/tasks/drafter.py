"""Training of a drafter on cached states: many windows of queries after one context, in one packed forward."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from saltus.networks.draft_models.drafter import DrafterShape, DraftModel
from saltus.networks.loading.drafter_files import load_drafter
from saltus.networks.loading.metadata import Kind
from saltus.training.data.hidden_states import HiddenStateCorpus
from saltus.training.data.seeded_generator import seeded_generator
from saltus.training.data.window_dataset import Batch
from saltus.training.data.window_packing import pack_windows
from saltus.training.tasks.cached_state_task import CachedStateTask


def new_drafter(shape: DrafterShape, draft_tokens: Tensor, target: Any, seed: int = 0) -> DraftModel:
    """An untrained drafter of these tokens for a Hugging Face model, in float32.

    GPT-2's initial values, from the seed alone. The uniform embedding is zero at the start. Context positions start
    as the target's last hidden state, and the last norm as the target's, so the LM head applies from step 0.
    """
    embeddings, unembedding = (
        module.weight.detach().float() for module in (target.get_input_embeddings(), target.get_output_embeddings())
    )
    model = DraftModel(shape, draft_tokens, embeddings, unembedding)
    generator, norm = seeded_generator(seed, "weights"), getattr(target.get_decoder(), "norm", None)
    with torch.no_grad():
        for name, weight in model.auxiliary.named_parameters():
            if name.startswith("map.0."):  # the first of two layers, the second of which is zero
                weight.copy_(torch.from_numpy(seeded_generator(seed, name).normal(0.0, 0.2, tuple(weight.shape))))
        for name, weight in model.named_parameters():
            if weight.dim() == 2 and weight.requires_grad and not name.startswith("auxiliary."):
                inner = name.endswith(("o_proj.weight", "down_proj.weight"))
                scale = 0.02 / math.sqrt(2 * shape.layers) if inner else 0.02
                weight.copy_(torch.from_numpy(generator.normal(0.0, scale, tuple(weight.shape))))
        if norm is not None:
            model.llama.model.norm.weight.copy_(norm.weight)
        parts = model.fuse.weight.mul_(0.25).unflatten(1, (-1, shape.hidden))
        parts[:, -2] += 0.7 * torch.eye(shape.hidden)
    return model


def forward_windows(
    module: DraftModel, corpus: HiddenStateCorpus, batch: Batch
) -> tuple[Float[Tensor, "batch slots hidden"], Float[Tensor, "batch windows window hidden"]]:
    """The last hidden states of the context positions and of the queries, as inputs of the LM head."""
    device = module.tokens.device
    batch, rows = batch.to(device), batch.corpus_rows
    packed = pack_windows(batch.tokens, batch.window_starts, batch.uniforms)
    features = corpus.hidden_states[rows[:, : packed.context_length] - 1].to(device)
    context = module.context_inputs(features, packed.tokens[:, : packed.context_length])
    depths = (
        torch.arange(packed.window_size, device=device).repeat_interleave(packed.num_windows).expand(len(context), -1)
    )
    last = context.gather(1, (batch.window_starts - 1)[..., None].expand(-1, -1, context.shape[-1]))
    uniforms, temperatures = packed.uniforms[:, packed.context_length :], batch.temperatures
    queries = module.query_inputs(
        last.repeat(1, packed.window_size, 1), uniforms, temperatures.repeat(1, packed.window_size), depths
    )
    hidden = module(torch.cat([context, queries], 1), packed.positions, packed.mask)
    return hidden[:, : packed.context_length], packed.queries_by_window(hidden)


@dataclass(eq=False)
class DrafterTrainingTask(CachedStateTask):
    """A drafter: queries conditioned on uniforms, after context positions made of the target's hidden states."""

    kind: ClassVar[Kind] = "drafter"
    module: DraftModel = field(init=False)

    @property
    def _learns_distributions(self) -> bool:
        return self.corpus.coupling == "gumbel"

    def _check_corpus(self) -> None:
        super()._check_corpus()
        if self.corpus.hidden_state_layers != self.shape.taps:
            raise ValueError(f"these are states of other layers (taps) of {self.target_name}; collect them anew")

    def _new_module(self, draft_tokens: Int[Tensor, "draft"]) -> DraftModel:
        return new_drafter(self.shape, draft_tokens, self.target, self.window_settings.seed)

    def initialize_from(self, folder: Path) -> None:
        """Start with a saved drafter and its vocabulary. Errors: ValueError if its shape is another."""
        drafter = load_drafter(folder, self.target, self.target_name)
        if drafter.shape != self.shape:
            raise ValueError(f"the drafter in {folder} has another shape than the recipe; take the one it was made by")
        self._set_module(drafter.float())

    def loss(self, step: int) -> Float[Tensor, ""]:
        """Cross-entropy of the tokens that the uniforms pick (PTP, Eq. 10), later queries of a window discounted.

        Plus, weighted by the recipe's `laws`, the cross-entropy between the target's own next-token distribution and
        the module's at every context position.
        """
        batch = self.window_dataset.training_batch(step)
        tokens, counted = self._draft_targets(batch)
        depths = torch.arange(self.shape.window, device=tokens.device).expand(counted.shape)[counted]
        weights = self.window_settings.discount**depths
        context, queries = forward_windows(self.module, self.corpus, batch)
        losses = F.cross_entropy(self._logits(queries[counted]), tokens[counted], reduction="none")
        distribution_loss = self._distribution_loss(batch, context)
        return (losses * weights).sum() / weights.sum() + self.window_settings.laws * distribution_loss

    def _draft_targets(
        self, batch: Batch
    ) -> tuple[Int[Tensor, "batch windows window"], Bool[Tensor, "batch windows window"]]:
        """The targets as indices in the draft vocabulary, and where they have a loss."""
        tokens = self.draft_indices[batch.targets]
        counted = batch.loss_mask & (tokens >= 0)
        return tokens.to(self.target.device), counted.to(self.target.device)

    def _logits(self, hidden_states: Float[Tensor, "rows hidden"]) -> Float[Tensor, "rows draft"]:
        head = self.module.llama.lm_head
        return head(hidden_states.to(head.weight.dtype)).float()

    def _distribution_loss(
        self, batch: Batch, context_states: Float[Tensor, "batch slots hidden"]
    ) -> Float[Tensor, ""]:
        """Over all context positions with a next token; distributions over the drafted tokens, at temperature 1."""
        rows = batch.corpus_rows[:, : context_states.shape[1] + 1]
        has_next = rows[:, 1:] > rows[:, :-1]  # after the end of a text its last row is repeated
        after = self.corpus.hidden_states[rows[:, :-1][has_next]][..., -self.shape.hidden :].to(context_states.device)
        with torch.no_grad():
            distributions = self._logits(after).softmax(-1)
        states = context_states[:, : has_next.shape[1]][has_next.to(context_states.device)]
        return F.cross_entropy(self._logits(states), distributions)

    def _matching_drafts(self, batch: Batch) -> Bool[Tensor, "all_windows drafts"]:
        tokens, counted = self._draft_targets(batch)
        queries = forward_windows(self.module, self.corpus, batch)[1]
        drafts = self._logits(queries.flatten(0, -2)).argmax(-1).view(tokens.shape)
        return (counted & (drafts == tokens)).flatten(0, 1)
