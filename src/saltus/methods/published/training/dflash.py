"""Training of a DFlash drafter: many blocks of masks after one context, in one packed forward."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from saltus.methods.published import dflash, find_form
from saltus.methods.published.dflash_files import load_dflash
from saltus.methods.published.dflash_model import DFlashModel, DFlashShape
from saltus.methods.shared.context_rows import select_hidden_states
from saltus.methods.shared.drafter_files import embeddings_of
from saltus.models.output_layer import last_norm_factors
from saltus.training.data.hidden_states import HiddenStateCorpus
from saltus.training.data.window_dataset import Batch
from saltus.training.query_drafter_task import QueryDrafterTask, require_same_shape, set_initial_values

SCALED_ROWS = 4096  # of the corpus, that the factors of the hidden states are taken from, at most


def new_dflash_model(
    shape: DFlashShape, draft_tokens: Tensor, target: Any, corpus: HiddenStateCorpus, seed: int = 0
) -> DFlashModel:
    """An untrained drafter of these tokens for a Hugging Face model, in float32.

    GPT-2's initial values, from the seed alone. Each number of the hidden states is divided by its root mean square in
    the corpus, since some are a thousand times as large as others; files have these factors in the weights. The last
    norm is the target's.
    """
    embeddings, unembedding = (weight.float() for weight in embeddings_of(target))
    model = DFlashModel(shape, draft_tokens, embeddings, unembedding)
    set_initial_values(model, shape.layers, seed, skipped=("correction.output.",))
    norm = last_norm_factors(target)
    with torch.no_grad():
        if norm is not None:
            model.decoder.model.norm.weight.copy_(norm)
        model.state_scale.copy_(1 / _root_mean_squares(corpus, shape))
    return model


def _root_mean_squares(corpus: HiddenStateCorpus, shape: DFlashShape) -> Float[Tensor, "states"]:
    """Of each number of the hidden states that are inputs; no smaller than a thousandth of the median."""
    count = len(corpus.tokens)
    rows = corpus.hidden_states[torch.arange(0, count, math.ceil(count / SCALED_ROWS))]
    states = select_hidden_states(rows, corpus.hidden_state_layers, shape.hidden_state_layers).float()
    scales = (states * states).mean(0).sqrt()
    return scales.clamp_min(max(float(scales.median()) * 1e-3, 1e-12))


def forward_blocks(
    module: DFlashModel, corpus: HiddenStateCorpus, batch: Batch
) -> Float[Tensor, "batch windows window hidden"]:
    """The last hidden states of the queries of all windows, as inputs of the LM head.

    Slot j of the context is the state before token j. A window that starts at s sees slots 0 to s − 1; its block, the
    token before s and the masks, stands behind them.
    """
    device = module.tokens.device
    batch, rows, window = batch.to(device), batch.corpus_rows, module.shape.window
    starts, length = batch.window_starts, int(batch.window_starts.max())
    states = corpus.hidden_states[rows[:, :length].cpu() - 1].to(device)
    context = module.context_inputs(
        select_hidden_states(states, corpus.hidden_state_layers, module.shape.hidden_state_layers)
    )
    blocks = module.block_inputs(batch.tokens.gather(1, starts - 1))
    numbers = torch.arange(starts.shape[1], device=device).repeat_interleave(window + 1)
    slots = torch.arange(length, device=device)
    same_block = (numbers[:, None] == numbers).expand(len(starts), -1, -1)
    mask = torch.cat([slots < starts[:, numbers, None], same_block], -1)
    places = (starts[..., None] + torch.arange(window + 1, device=device)).flatten(1)
    positions = torch.cat([slots.expand(len(starts), -1), places], 1)
    hidden = module(context, blocks.flatten(1, 2), positions, mask)
    return hidden.unflatten(1, (-1, window + 1))[:, :, 1:]


@dataclass(eq=False)
class DFlashTrainingTask(QueryDrafterTask):
    """A DFlash drafter, whose queries are masks. It predicts nothing at context positions."""

    module: DFlashModel = field(init=False)

    def _new_module(self, draft_tokens: Int[Tensor, "draft"]) -> DFlashModel:
        return new_dflash_model(self.shape, draft_tokens, self.target, self.corpus, self.window_settings.seed)

    def _forward(
        self, batch: Batch, context_length: int | None = None
    ) -> tuple[Float[Tensor, "batch slots hidden"], Float[Tensor, "batch windows window hidden"]]:
        queries = forward_blocks(self.module, self.corpus, batch)
        return queries.new_empty(len(queries), 0, queries.shape[-1]), queries

    @classmethod
    def load_initial(cls, folder: Path, target: Any, target_name: str, shape: Any) -> DFlashModel:
        """A saved drafter; a longer window and a correction may be new. Errors: ValueError for another shape."""
        if find_form(folder) is not dflash:
            raise ValueError(f"{folder} holds no drafter of the network dflash; take one, or leave out --from")
        drafter = load_dflash(folder, target, target_name, trainable=True)
        require_same_shape(folder, drafter.shape, shape)
        return drafter

    def initialize_from(self, folder: Path) -> None:
        """Start with a saved drafter and its vocabulary. Errors: ValueError if its shape differs."""
        drafter = self.load_initial(folder, self.target, self.target_name, self.shape)
        module = self._new_module(drafter.tokens)
        weights = module.trained_weights(drafter.float().state_dict())
        module.load_state_dict(module.state_dict() | weights)
        self._set_module(module)
