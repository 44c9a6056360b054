"""Teach a drafter on cached states: many windows of queries behind one reading of a text, in one packed forward."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from saltus.networks.draft_models.drafter import DrafterShape, DraftModel
from saltus.networks.loading.drafter_files import load_drafter, model_fingerprint, save_drafter
from saltus.training.data.hidden_states import HiddenStateCorpus
from saltus.training.data.seeded_generator import seeded_generator
from saltus.training.data.window_dataset import Batch, WindowDataset, WindowSettings
from saltus.training.data.window_packing import pack_windows
from saltus.training.tasks.distillation import num_correct
from saltus.training.tasks.training_task import evaluate_greedy_and_sampled

IGNORED_TOKEN = -100  # in the place of a token that is not drafted, or not there


def new_drafter(shape: DrafterShape, draft_tokens: Tensor, target: Any, seed: int = 0) -> DraftModel:
    """An untrained drafter of these tokens for a Hugging Face model, in float32.

    GPT-2's starting values, from the seed alone; what tells of uniforms starts at zero. A slot starts as the target's
    last state, and the last norm as the target's: so all is said in the terms of the unembedding from the beginning.
    """
    embeddings, unembedding = (
        module.weight.detach().float() for module in (target.get_input_embeddings(), target.get_output_embeddings())
    )
    model = DraftModel(shape, draft_tokens, embeddings, unembedding)
    generator, norm = seeded_generator(seed, "weights"), getattr(target.get_decoder(), "norm", None)
    with torch.no_grad():
        for name, weight in model.auxiliary.named_parameters():
            if name.startswith("map.0."):  # of a small network, whose last map is zero
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


def most_frequent_tokens(corpus: HiddenStateCorpus, count: int) -> Tensor:
    """The ids of the tokens that occur most often, in their order, and nothing that never occurs."""
    counts = torch.bincount(corpus.tokens)
    return counts.argsort(descending=True)[: min(count, int((counts > 0).sum()))].sort().values


def draft_vocabulary_indices(draft_tokens: Int[Tensor, "draft"], corpus: HiddenStateCorpus) -> Int[Tensor, "vocab"]:
    """Where each token stands among those drafted."""
    found = torch.full((int(max(corpus.tokens.max(), draft_tokens.max())) + 1,), IGNORED_TOKEN)
    found[draft_tokens] = torch.arange(len(draft_tokens))
    return found


def forward_windows(
    module: DraftModel, corpus: HiddenStateCorpus, batch: Batch
) -> tuple[Float[Tensor, "batch slots hidden"], Float[Tensor, "batch windows window hidden"]]:
    """The last states of the slots and of the queries; the unembedding reads both."""
    device = module.tokens.device
    batch, here = batch.to(device), batch.corpus_rows
    packed = pack_windows(batch.tokens, batch.window_starts, batch.uniforms)
    features = corpus.hidden_states[here[:, : packed.context_length] - 1].to(device)
    slots = module.context_inputs(features, packed.tokens[:, : packed.context_length])
    depths = (
        torch.arange(packed.window_size, device=device).repeat_interleave(packed.num_windows).expand(len(slots), -1)
    )
    last = slots.gather(1, (batch.window_starts - 1)[..., None].expand(-1, -1, slots.shape[-1]))
    conditioning = packed.uniforms[:, packed.context_length :], batch.temperatures.repeat(1, packed.window_size)
    queries = module.query_inputs(last.repeat(1, packed.window_size, 1), *conditioning, depths)
    hidden = module(torch.cat([slots, queries], 1), packed.positions, packed.mask)
    return hidden[:, : packed.context_length], packed.queries_by_window(hidden)


@dataclass(eq=False)
class DrafterTrainingTask:
    """A `Course`: a drafter of the `vocabulary` most frequent tokens, on what its target has read.

    Errors: ValueError for states of another target or of other taps.
    """

    target: Any  # of Hugging Face
    corpus: HiddenStateCorpus
    shape: DrafterShape
    vocabulary_size: int = 8192
    window_settings: WindowSettings = field(default_factory=WindowSettings)
    target_name: str = "its target"
    module: DraftModel = field(init=False)
    window_dataset: WindowDataset = field(init=False)
    draft_indices: Int[Tensor, "vocab"] = field(init=False)  # of tokens in the draft vocabulary

    def __post_init__(self) -> None:
        if (
            self.corpus.target_fingerprint != model_fingerprint(self.target)
            or self.corpus.hidden_state_layers != self.shape.taps
        ):
            raise ValueError(
                f"these are states of another model than {self.target_name}, or of other taps; collect them anew"
            )
        self.window_dataset = WindowDataset(self.corpus, self.window_settings, self.shape.window)
        draft = most_frequent_tokens(self.corpus, self.vocabulary_size)
        self._set_module(new_drafter(self.shape, draft, self.target, self.window_settings.seed))

    def initialize_from(self, folder: Path) -> None:
        """Go on with a drafter, its own tokens included. Errors: ValueError where its shape is another."""
        drafter = load_drafter(folder, self.target, self.target_name)
        if drafter.shape != self.shape:
            raise ValueError(f"the drafter in {folder} has another shape than the recipe; take the one it was made by")
        self._set_module(drafter.float())

    def _set_module(self, module: DraftModel) -> None:
        self.draft_indices = draft_vocabulary_indices(module.tokens, self.corpus)
        self.module = module.to(self.target.device)

    def loss(self, step: int) -> Float[Tensor, ""]:
        """Cross-entropy of the tokens that the uniforms pick (PTP, Eq. 10), later queries of a window discounted.

        To that comes the cross-entropy of the law behind every slot with the target's own, which is known there.
        """
        cut = self.window_dataset.training_batch(step)
        tokens, counted = self._draft_targets(cut)
        depths = torch.arange(self.shape.window, device=tokens.device).expand(counted.shape)[counted]
        weights = self.window_settings.discount**depths
        slots, queries = forward_windows(self.module, self.corpus, cut)
        losses = F.cross_entropy(self._logits(queries[counted]), tokens[counted], reduction="none")
        return (losses * weights).sum() / weights.sum() + self.window_settings.laws * self._distribution_loss(
            cut, slots
        )

    def evaluate(self) -> dict[str, float]:
        """Tokens per call on held-out texts: the leading right drafts, and the target's own token."""
        return evaluate_greedy_and_sampled(self.module, self._tokens_per_call)

    def save(self, folder: Path, card: Mapping[str, Any]) -> None:
        """A folder for `saltus.networks.loading.drafter_files.load_drafter`."""
        save_drafter("drafter", self.module, folder, self.target_name, model_fingerprint(self.target), card)

    def _draft_targets(self, batch: Batch) -> tuple[Int[Tensor, "batch windows window"], Tensor]:
        """The targets as places in the draft vocabulary, and which of them count."""
        tokens = self.draft_indices[batch.targets]
        counted = batch.loss_mask & (tokens >= 0)
        return tokens.to(self.target.device), counted.to(self.target.device)

    def _logits(self, hidden_states: Float[Tensor, "rows hidden"]) -> Float[Tensor, "rows draft"]:
        head = self.module.llama.lm_head
        return head(hidden_states.to(head.weight.dtype)).float()

    def _distribution_loss(
        self, batch: Batch, context_states: Float[Tensor, "batch slots hidden"]
    ) -> Float[Tensor, ""]:
        """Over all slots that a token of their text follows; laws are over the drafted tokens, at temperature 1."""
        rows = batch.corpus_rows[:, : context_states.shape[1] + 1]
        inside = rows[:, 1:] > rows[:, :-1]  # behind its end a text's last row is repeated
        here = rows[:, :-1][inside]
        after = self.corpus.hidden_states[here][..., -self.shape.hidden :].to(context_states.device)
        with torch.no_grad():
            distributions = self._logits(after).softmax(-1)
        return F.cross_entropy(
            self._logits(context_states[:, : inside.shape[1]][inside.to(context_states.device)]), distributions
        )

    @torch.inference_mode()
    def _tokens_per_call(self, greedy: bool) -> float:
        """NaN without such texts."""
        found = []
        for cut in self.window_dataset.validation_batches(greedy):
            tokens, counted = self._draft_targets(cut)
            said = (
                self._logits(forward_windows(self.module, self.corpus, cut)[1].flatten(0, -2))
                .argmax(-1)
                .view(tokens.shape)
            )
            right = torch.where(counted, said, IGNORED_TOKEN - 1)
            found.append(1 + num_correct(right.flatten(0, 1), tokens.flatten(0, 1)).double())
        return float(torch.cat(found).mean()) if found else math.nan
