"""Training of a drafter on cached states: many windows of queries after one context, in one packed forward."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from saltus.networks.draft_models.dflash import DFlashModel, DFlashShape
from saltus.networks.draft_models.drafter import DrafterShape, DraftModel
from saltus.networks.loading.drafter_files import load_drafter
from saltus.networks.loading.metadata import Kind
from saltus.training.data.hidden_states import HiddenStateCorpus
from saltus.training.data.seeded_generator import seeded_generator
from saltus.training.data.window_dataset import Batch
from saltus.training.data.window_packing import pack_windows
from saltus.training.tasks.cached_state_task import CachedStateTask
from saltus.training.tasks.dflash import forward_blocks, new_dflash_model

UNKNOWN_TOKENS = 0.25  # fraction of windows in which queries do not know the window's tokens, as before drafting
CONTEXT_POSITIONS = 0.25  # fraction of context positions that have a loss


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
            if weight.dim() == 2 and weight.requires_grad and not name.startswith(("auxiliary.", "correction.output")):
                inner = name.endswith(("o_proj.weight", "down_proj.weight"))
                scale = 0.02 / math.sqrt(2 * shape.layers) if inner else 0.02
                weight.copy_(torch.from_numpy(generator.normal(0.0, scale, tuple(weight.shape))))
        if norm is not None:
            model.llama.model.norm.weight.copy_(norm.weight)
        parts = model.fuse.weight.mul_(0.25).unflatten(1, (-1, shape.hidden))
        parts[:, -2] += 0.7 * torch.eye(shape.hidden)
    return model


def forward_windows(
    module: DraftModel | DFlashModel, corpus: HiddenStateCorpus, batch: Batch, context_length: int | None = None
) -> tuple[Float[Tensor, "batch slots hidden"], Float[Tensor, "batch windows window hidden"]]:
    """The last hidden states of the context positions, if there are any, and of the queries: inputs of the LM head.

    The context ends before the last window, or is as long as `context_length`.
    """
    if isinstance(module, DFlashModel):
        queries = forward_blocks(module, corpus, batch)
        return queries.new_empty(len(queries), 0, queries.shape[-1]), queries
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
class DrafterTrainingTask(CachedStateTask):
    """A drafter: queries, perhaps conditioned on uniforms, that read the target's hidden states."""

    kind: ClassVar[Kind] = "drafter"
    module: DraftModel | DFlashModel = field(init=False)

    @property
    def _learns_distributions(self) -> bool:
        return self.corpus.coupling == "gumbel"

    def _check_corpus(self) -> None:
        super()._check_corpus()
        if self.corpus.hidden_state_layers != self.shape.hidden_state_layers:
            raise ValueError(
                f"these are states of other layers of {self.target_name} than hidden_state_layers; collect them anew"
            )

    def _new_module(self, draft_tokens: Int[Tensor, "draft"]) -> DraftModel | DFlashModel:
        if isinstance(self.shape, DFlashShape):
            return new_dflash_model(self.shape, draft_tokens, self.target, self.corpus, self.window_settings.seed)
        return new_drafter(self.shape, draft_tokens, self.target, self.window_settings.seed)

    @classmethod
    def load_initial(cls, folder: Path, target: Any, target_name: str, shape: Any) -> DraftModel | DFlashModel:
        """A saved drafter; a longer window and a correction may be new. Errors: ValueError for another shape."""
        drafter = load_drafter(folder, target, target_name, trainable=True)
        old = drafter.shape
        changed: dict[str, Any] = {"window": old.window, "correction": old.correction}
        changed |= {"reads_uniforms": old.reads_uniforms} if isinstance(shape, DrafterShape) else {}
        kept = replace(shape, **changed)
        if kept != old or shape.window < old.window or old.correction not in (0, shape.correction):
            raise ValueError(f"the drafter in {folder} has another shape than the recipe; take the one it was made by")
        return drafter

    def initialize_from(self, folder: Path) -> None:
        """Start with a saved drafter and its vocabulary. Errors: ValueError if its shape differs."""
        drafter = self.load_initial(folder, self.target, self.target_name, self.shape)
        module, weights = self._new_module(drafter.tokens), drafter.float().state_dict()
        if isinstance(module, DFlashModel):
            weights = module.trained_weights(weights)
        else:
            query = weights["query"]
            weights["query"] = torch.cat([query, query[-1:].expand(self.shape.window - drafter.shape.window, -1)])
        module.load_state_dict(module.state_dict() | weights)
        self._set_module(module)

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
        own = self.processes.share(len(texts.tokens))
        batch = texts.select(own)
        unknown, chosen = (part[own] for part in self._random_positions(texts, step))
        tokens, counted = self._draft_targets(batch)
        depths = torch.arange(self.shape.window, device=tokens.device).expand(counted.shape)[counted]
        weights = self.window_settings.discount**depths
        length = int(texts.window_starts.max())  # of all texts, so that every process has the same positions
        context, queries = forward_windows(self.module, self.corpus, batch, length)
        logits = self._logits(self._corrected(batch, queries, unknown)[counted])
        losses = F.cross_entropy(logits, tokens[counted], reduction="none")
        if not self.shape.reads_uniforms:
            sampled = (batch.temperatures > 0)[..., None].to(counted.device).expand(counted.shape)[counted]
            distributions = self._target_distributions(batch.target_rows[counted.cpu()][sampled.cpu()] - 1)
            losses[sampled] = F.cross_entropy(logits[sampled], distributions, reduction="none")
        distribution_losses = self._distribution_losses(batch, context, chosen)
        mean = self.processes.weighted_mean(losses, weights)
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
        if self.module.correction is None:
            return queries
        starts, rows = batch.window_starts, torch.arange(len(batch.tokens))[:, None]
        before = [torch.where(starts >= n, batch.tokens[rows, (starts - n).clamp_min(0)], -1) for n in (2, 1)]
        tokens = torch.cat([torch.stack(before, -1), batch.targets], -1)
        if unknown is not None:
            tokens[..., 2:] = torch.where(unknown[..., None], -1, tokens[..., 2:])
        window, tokens = queries.shape[-2], tokens.to(queries.device)
        return self.module.corrected(queries, tokens[..., 1 : window + 1], tokens[..., :window])

    def _draft_targets(
        self, batch: Batch
    ) -> tuple[Int[Tensor, "batch windows window"], Bool[Tensor, "batch windows window"]]:
        """The targets as indices in the draft vocabulary, and where they have a loss."""
        tokens = self.draft_indices[batch.targets]
        counted = batch.loss_mask & (tokens >= 0)
        return tokens.to(self.target.device), counted.to(self.target.device)

    def _logits(self, hidden_states: Float[Tensor, "rows hidden"]) -> Float[Tensor, "rows draft"]:
        head = self.module.lm_head
        return head(hidden_states.to(head.weight.dtype)).float()

    def _target_distributions(self, rows: Int[Tensor, "rows"]) -> Float[Tensor, "rows draft"]:
        """The target's distributions over the drafted tokens after these tokens of the corpus, at temperature 1."""
        states = self.corpus.hidden_states[rows][..., -self.shape.hidden :].to(self.module.tokens.device)
        with torch.no_grad():
            return self._logits(states).softmax(-1)

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
        queries = self._corrected(batch, forward_windows(self.module, self.corpus, batch)[1])
        drafts = self._logits(queries.flatten(0, -2)).argmax(-1).view(tokens.shape)
        return (counted & (drafts == tokens)).flatten(0, 1)
