"""Training of a drafter on cached states: many windows of queries after one context, in one packed forward."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from saltus.methods.ptp.files import load_drafter
from saltus.methods.ptp.network import DrafterShape, DraftModel
from saltus.methods.shared.drafter_files import embeddings_of
from saltus.models.output_layer import last_norm_factors
from saltus.training.data.hidden_states import HiddenStateCorpus
from saltus.training.data.seeded_generator import seeded_generator
from saltus.training.data.window_dataset import Batch
from saltus.training.data.window_packing import pack_windows
from saltus.training.query_drafter_task import QueryDrafterTask, require_same_shape, set_initial_values


def new_drafter(shape: DrafterShape, draft_tokens: Tensor, target: Any, seed: int = 0) -> DraftModel:
    """An untrained drafter of these tokens for a Hugging Face model, in float32.

    GPT-2's initial values, from the seed alone. The uniform embedding is zero at the start. Context positions start
    as the target's last hidden state, and the last norm as the target's, so the LM head applies from step 0.
    """
    embeddings, unembedding = (weight.float() for weight in embeddings_of(target))
    model = DraftModel(shape, draft_tokens, embeddings, unembedding)
    set_initial_values(model, shape.layers, seed, skipped=("auxiliary.", "correction.output."))
    norm = last_norm_factors(target)
    with torch.no_grad():
        for name, weight in model.auxiliary.named_parameters():
            if name.startswith("map.0."):  # the first of two layers, the second of which is zero
                weight.copy_(torch.from_numpy(seeded_generator(seed, name).normal(0.0, 0.2, tuple(weight.shape))))
        if norm is not None:
            model.llama.model.norm.weight.copy_(norm)
        parts = model.fuse.weight.mul_(0.25).unflatten(1, (-1, shape.hidden))
        parts[:, -2] += 0.7 * torch.eye(shape.hidden)
    return model


def forward_windows(
    module: DraftModel, corpus: HiddenStateCorpus, batch: Batch, context_length: int | None = None
) -> tuple[Float[Tensor, "batch slots hidden"], Float[Tensor, "batch windows window hidden"]]:
    """The last hidden states of the context positions and of the queries: inputs of the LM head.

    The context ends before the last window, or is as long as `context_length`.
    """
    device = module.tokens.device
    batch, rows = batch.to(device), batch.corpus_rows
    packed = pack_windows(batch.tokens, batch.window_starts, batch.uniforms, context_length)
    features = corpus.hidden_states[rows[:, : packed.context_length].cpu() - 1].to(device)
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
class DrafterTrainingTask(QueryDrafterTask):
    """A drafter: queries, perhaps conditioned on uniforms, that read the target's hidden states."""

    module: DraftModel = field(init=False)

    def _new_module(self, draft_tokens: Int[Tensor, "draft"]) -> DraftModel:
        return new_drafter(self.shape, draft_tokens, self.target, self.window_settings.seed)

    def _forward(
        self, batch: Batch, context_length: int | None = None
    ) -> tuple[Float[Tensor, "batch slots hidden"], Float[Tensor, "batch windows window hidden"]]:
        return forward_windows(self.module, self.corpus, batch, context_length)

    @classmethod
    def load_initial(cls, folder: Path, target: Any, target_name: str, shape: Any) -> DraftModel:
        """A saved drafter; a longer window and a correction may be new. Errors: ValueError for another shape."""
        drafter = load_drafter(folder, target, target_name, trainable=True)
        require_same_shape(folder, drafter.shape, replace(shape, reads_uniforms=drafter.shape.reads_uniforms))
        return drafter

    def initialize_from(self, folder: Path) -> None:
        """Start with a saved drafter and its vocabulary. Errors: ValueError if its shape differs."""
        drafter = self.load_initial(folder, self.target, self.target_name, self.shape)
        module, weights = self._new_module(drafter.tokens), drafter.float().state_dict()
        query = weights["query"]
        weights["query"] = torch.cat([query, query[-1:].expand(self.shape.window - drafter.shape.window, -1)])
        module.load_state_dict(module.state_dict() | weights)
        self._set_module(module)
