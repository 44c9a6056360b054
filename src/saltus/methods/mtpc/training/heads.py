"""Training of heads, a joint distribution of the next tokens, on cached states of overlapping windows (MtPC, §4.1)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from saltus.loading.metadata import Kind
from saltus.methods.mtpc.circuits import CircuitFilter
from saltus.methods.mtpc.files import load_heads
from saltus.methods.mtpc.heads import CircuitParameters, HeadModel, new_head_model
from saltus.methods.mtpc.training.circuit_likelihood import token_log_probabilities
from saltus.methods.shared.context_rows import select_hidden_states
from saltus.training.cached_state_task import CachedStateTask
from saltus.training.data.seeded_generator import seeded_generator
from saltus.training.data.window_dataset import Batch

EXTENSIBLE_CIRCUITS = (("cp", "hmm"), ("cp", "btree"))  # from circuits with components to richer ones


@dataclass(eq=False)
class HeadsTrainingTask(CachedStateTask):
    """Heads of a circuit.

    The loss covers the tokens of a window up to the first that is not drafted, or to the end of the text. The tokens
    after are marginalized: their factors are left out.
    """

    kind: ClassVar[Kind] = "heads"
    module: HeadModel = field(init=False)

    def _check_corpus(self) -> None:
        super()._check_corpus()
        if missing := set(self.shape.hidden_state_layers) - set(self.corpus.hidden_state_layers):
            raise ValueError(f"these states are without those after layer {min(missing)}; collect them anew")

    def _new_module(self, draft_tokens: Int[Tensor, "draft"]) -> HeadModel:
        self.target.requires_grad_(False)
        generator = seeded_generator(self.window_settings.seed, "weights")
        return new_head_model(self.shape, draft_tokens, self.target, generator)

    @classmethod
    def load_initial(cls, folder: Path, target: Any, target_name: str, shape: Any) -> HeadModel:
        """Saved heads from which those of this shape can go on. Errors: ValueError if the shapes do not fit."""
        heads = load_heads(folder, target, target_name).float()
        old, new = replace(heads.shape, self_transition_init=shape.self_transition_init), shape
        if not old.layers:
            old = replace(old, layers=new.layers, lora_rank=new.lora_rank, hidden_state_layers=new.hidden_state_layers)
        if old.circuit == "ff":
            names = ("window", "embeds_last_token", "untied_unembedding", "layers", "lora_rank")
            fits = all(getattr(old, name) == getattr(new, name) for name in names)
        else:
            same_sizes = replace(old, circuit=new.circuit) == new
            fits = same_sizes and (old == new or (old.circuit, new.circuit) in EXTENSIBLE_CIRCUITS)
        if not fits:
            raise ValueError(f"the recipe's heads cannot go on from {folder}, made as {old}; take what made them")
        return heads

    def initialize_from(self, folder: Path) -> None:
        """Start with saved heads and their vocabulary; a richer circuit starts with the distribution of a poorer one.

        FF initializes any circuit, and CP initializes HMM and BTree approximately (see `new_head_model`). The recipe
        may add adapted layers. Errors: ValueError if the shapes do not fit.
        """
        heads = self.load_initial(folder, self.target, self.target_name, self.shape)
        module = self._new_module(heads.tokens)
        with torch.no_grad():
            for name, weight in heads.state_dict().items():
                new_weight = module.state_dict()[name]
                if new_weight.shape == weight.shape or name == "untied_unembedding":  # a component starts as that of FF
                    new_weight.copy_(weight)
                elif heads.shape.circuit == "cp":  # sums: CP has only that of the start, which comes first
                    new_weight[: len(weight)] = weight
        self._set_module(module)

    def loss(self, step: int) -> Float[Tensor, ""]:
        """The discounted mean of −log q(token | those before it in its window) (MtPC, Eq. 4).

        Plus, weighted by the recipe's `distillation_weight`, the cross-entropy between the target's own distribution
        and each q.
        """
        batch = self.training_batch(step)
        tokens, counted = self._draft_targets(batch)
        depths = torch.arange(counted.shape[-1], device=counted.device)
        weights = self.window_settings.discount**depths * (counted & (depths < self.shape.num_draft_tokens))
        losses = torch.zeros_like(weights)
        if self.window_settings.distillation_weight:
            for depth, log_probabilities in enumerate(self._log_distributions(batch, tokens)):
                expected = tokens[..., depth].clamp_min(0)
                losses[..., depth] = -log_probabilities.gather(-1, expected[..., None])[..., 0]
                losses[..., depth] -= self.window_settings.distillation_weight * (
                    self._target_distribution(batch, depth) * log_probabilities
                ).sum(-1)
        else:
            parameters, circuit_filter, first = self._start_filter(batch)
            for depth in range(self.shape.num_draft_tokens):
                leaf = token_log_probabilities(self.module, parameters, first + depth, tokens[:, depth].clamp_min(0))
                losses[..., depth] = -(circuit_filter.state_log_weights + leaf).logsumexp(-1)
                circuit_filter.observe(leaf)
        return self.processes.weighted_mean(losses, weights, floor=1.0)

    def _draft_targets(self, batch: Batch) -> tuple[Int[Tensor, "windows window"], Bool[Tensor, "windows window"]]:
        """The windows' tokens as indices in the draft vocabulary, and which of them have a loss."""
        tokens = self.draft_indices[batch.targets].flatten(0, 1)
        counted = (batch.loss_mask.flatten(0, 1) & (tokens >= 0)).to(torch.uint8).cummin(-1).values.bool()
        return tokens.to(self.target.device), counted.to(self.target.device)

    def _start_filter(self, batch: Batch) -> tuple[CircuitParameters, CircuitFilter[Tensor], int]:
        """The windows' circuits, a filter of each, and the position of a window's first unknown token."""
        last_rows = batch.corpus_rows.gather(1, batch.window_starts - 1).flatten()  # of the token before each window
        last_tokens = self.corpus.tokens[last_rows]
        parameters = self.module(self._last_hidden_states(batch, last_rows), last_tokens.to(self.target.device))
        circuit_filter = CircuitFilter(self.shape.circuit_structure, parameters.initial, parameters.transitions)
        if self.shape.embeds_last_token:
            return parameters, circuit_filter, 0
        first = self.draft_indices[last_tokens].to(self.target.device)  # position 0 is the text's last token
        leaf = token_log_probabilities(self.module, parameters, 0, first.clamp_min(0))
        circuit_filter.observe(torch.where(first[:, None] >= 0, leaf, 0.0))
        return parameters, circuit_filter, 1

    def _log_distributions(
        self, batch: Batch, tokens: Int[Tensor, "windows window"]
    ) -> Iterator[Float[Tensor, "windows draft"]]:
        """Log-probabilities at each position of the windows, given the tokens before it, position by position."""
        parameters, circuit_filter, first = self._start_filter(batch)
        for depth in range(self.shape.num_draft_tokens):
            by_state = self.module.log_probabilities(parameters, first + depth)
            yield (circuit_filter.state_log_weights[..., None] + by_state).logsumexp(-2)
            if depth + 1 < self.shape.num_draft_tokens:
                observed = tokens[:, depth].clamp_min(0)[:, None, None].expand(-1, by_state.shape[1], 1)
                circuit_filter.observe(by_state.gather(-1, observed)[..., 0])

    def _last_hidden_states(
        self, batch: Batch, last_token_rows: Int[Tensor, "windows"]
    ) -> Float[Tensor, "windows hidden"]:
        """The hidden states before each window's last known token, after the adapted layers if there are some."""
        device, upper = self.target.device, self.module.upper
        if upper is None:
            return self.corpus.hidden_states[last_token_rows - 1][..., -self.shape.hidden :].to(device)
        below = select_hidden_states(
            self.corpus.hidden_states[batch.corpus_rows - 1],
            self.corpus.hidden_state_layers,
            self.shape.hidden_state_layers,
        )
        states = upper(below.to(device, upper.lora_layers[0].down.dtype))
        last = (batch.window_starts - 1)[..., None].expand(-1, -1, states.shape[-1]).to(device)
        return states.gather(1, last).flatten(0, 1)

    @torch.no_grad()
    def _target_distribution(self, batch: Batch, position: int) -> Float[Tensor, "windows draft"]:
        """The target's distribution of a window's token over the drafted tokens; arbitrary after a text's end."""
        last = batch.corpus_rows.gather(1, batch.window_starts - 1).flatten() + position
        states = self.corpus.hidden_states[last.clamp_max(len(self.corpus.tokens) - 1)][..., -self.shape.hidden :]
        unembedding = self.module.unembedding
        products = (states.to(unembedding.device, unembedding.dtype) @ unembedding.T).float()
        return self.scale_logits(products).softmax(-1)

    @property
    def drafts_per_call(self) -> int:
        return self.shape.num_draft_tokens

    def matching_drafts(self, batch: Batch) -> Bool[Tensor, "all_windows drafts"]:
        tokens, counted = self._draft_targets(batch)
        drafts = torch.stack([logs.argmax(-1) for logs in self._log_distributions(batch, tokens)], -1)
        length = drafts.shape[1]
        return counted[:, :length] & (drafts == tokens[:, :length])
