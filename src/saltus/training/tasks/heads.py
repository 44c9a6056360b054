"""Teach heads the joint law of the next tokens on cached states: overlapping windows, discounted (MtPC, §4.1)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from saltus.networks.draft_models.circuits import CircuitFilter
from saltus.networks.draft_models.context_layers import select_hidden_states
from saltus.networks.draft_models.heads import CircuitParameters, HeadModel, HeadShape, new_head_model
from saltus.networks.loading.drafter_files import load_heads, model_fingerprint, save_drafter
from saltus.training.data.hidden_states import HiddenStateCorpus
from saltus.training.data.seeded_generator import seeded_generator
from saltus.training.data.window_dataset import Batch, WindowDataset, WindowSettings
from saltus.training.tasks.circuit_likelihood import token_log_probabilities
from saltus.training.tasks.distillation import num_correct
from saltus.training.tasks.drafter import IGNORED_TOKEN, draft_vocabulary_indices, most_frequent_tokens
from saltus.training.tasks.training_task import evaluate_greedy_and_sampled

EXTENSIBLE_CIRCUITS = (("cp", "hmm"), ("cp", "btree"))  # from circuits with components to richer ones


@dataclass(eq=False)
class HeadsTrainingTask:
    """A `Course`: heads for the `vocabulary` most frequent tokens, on what their target has read.

    A window's tokens are counted up to the first that is not drafted, or to the end of the text; those behind are
    marginalised out, which for a circuit means leaving them away. Errors: ValueError for states of another target.
    """

    target: Any  # of Hugging Face
    corpus: HiddenStateCorpus
    shape: HeadShape
    vocabulary_size: int = 8192
    window_settings: WindowSettings = field(default_factory=WindowSettings)
    target_name: str = "its target"
    module: HeadModel = field(init=False)
    window_dataset: WindowDataset = field(init=False)
    draft_indices: Int[Tensor, "vocab"] = field(init=False)  # of tokens among those drafted

    def __post_init__(self) -> None:
        if self.corpus.target_fingerprint != model_fingerprint(self.target):
            raise ValueError(f"these are states of another model than {self.target_name}; collect them anew")
        if missing := set(self.shape.taps) - set(self.corpus.hidden_state_layers):
            raise ValueError(f"these states are without those after layer {min(missing)}; collect them anew")
        self.target.requires_grad_(False)
        self.window_dataset = WindowDataset(self.corpus, self.window_settings, self.shape.window)
        tokens = most_frequent_tokens(self.corpus, self.vocabulary_size)
        self._set_module(
            new_head_model(self.shape, tokens, self.target, seeded_generator(self.window_settings.seed, "weights"))
        )

    def initialize_from(self, folder: Path) -> None:
        """Go on with heads, their own tokens included; richer circuits go on with the law that poorer ones had.

        Any goes on from FF, and HMM and BTree from CP, nearly (see `new_heads`); adapted layers may come
        to them. Errors: ValueError where shapes do not fit.
        """
        heads = load_heads(folder, self.target, self.target_name).float()
        old, new = replace(heads.shape, stay=self.shape.stay), self.shape
        if not old.layers:
            old = replace(old, layers=new.layers, lora=new.lora, taps=new.taps)
        if old.circuit == "ff":
            kept = ("window", "told", "own", "layers", "lora")
            fits = all(getattr(old, name) == getattr(new, name) for name in kept)
        else:
            alike = replace(old, circuit=new.circuit) == new
            fits = alike and (old == new or (old.circuit, new.circuit) in EXTENSIBLE_CIRCUITS)
        if not fits:
            raise ValueError(f"the recipe's heads cannot go on from {folder}, made as {old}; take what made them")
        module = new_head_model(new, heads.tokens, self.target, seeded_generator(self.window_settings.seed, "weights"))
        with torch.no_grad():
            for name, weight in heads.state_dict().items():
                own = module.state_dict()[name]
                if own.shape == weight.shape or name == "own":  # every component begins with the only one's
                    own.copy_(weight)
                elif old.circuit == "cp":  # sums, the start's first, which is all that CP has
                    own[: len(weight)] = weight
        self._set_module(module)

    def _set_module(self, module: HeadModel) -> None:
        self.draft_indices = draft_vocabulary_indices(module.tokens, self.corpus)
        self.module = module.to(self.target.device)

    def loss(self, step: int) -> Float[Tensor, ""]:
        """The mean of −log q(token | those before it in its window) over what counts, discounted (MtPC, Eq. 4).

        To that comes, by `lessons.laws`, the cross-entropy of each such law with the target's own there.
        """
        cut = self.window_dataset.training_batch(step)
        tokens, counted = self._draft_targets(cut)
        depths = torch.arange(counted.shape[-1], device=counted.device)
        weights = self.window_settings.discount**depths * (counted & (depths < self.shape.num_draft_tokens))
        losses = torch.zeros_like(weights)
        if self.window_settings.laws:
            for place, distribution in enumerate(self._log_distributions(cut, tokens)):
                own = tokens[..., place].clamp_min(0)
                losses[..., place] = -distribution.gather(-1, own[..., None])[..., 0]
                losses[..., place] -= self.window_settings.laws * (
                    self._target_distribution(cut, place) * distribution
                ).sum(-1)
        else:
            found, reader, begun = self._start_reader(cut)
            for place in range(self.shape.num_draft_tokens):
                leaf = token_log_probabilities(self.module, found, begun + place, tokens[:, place].clamp_min(0))
                losses[..., place] = -(reader.state_log_weights + leaf).logsumexp(-1)
                reader.observe(leaf)
        return (losses * weights).sum() / weights.sum().clamp_min(1)

    def evaluate(self) -> dict[str, float]:
        """Tokens per call on held-out texts: the leading right drafts, and the target's own token."""
        return evaluate_greedy_and_sampled(self.module, self._tokens_per_call)

    def save(self, folder: Path, card: Mapping[str, Any]) -> None:
        """A folder for `saltus.networks.loading.drafter_files.load_heads`."""
        save_drafter("heads", self.module, folder, self.target_name, model_fingerprint(self.target), card)

    def _draft_targets(self, batch: Batch) -> tuple[Int[Tensor, "windows window"], Bool[Tensor, "windows window"]]:
        """The windows' tokens as places among those drafted, and which of them count."""
        tokens = self.draft_indices[batch.targets].flatten(0, 1)
        counted = (batch.loss_mask.flatten(0, 1) & (tokens >= 0)).to(torch.uint8).cummin(-1).values.bool()
        return tokens.to(self.target.device), counted.to(self.target.device)

    def _start_reader(self, batch: Batch) -> tuple[CircuitParameters, CircuitFilter[Tensor], int]:
        """What the heads say of the windows, a reader of them, and at which position their tokens begin."""
        here = batch.corpus_rows.gather(1, batch.window_starts - 1).flatten()  # of the last token before each window
        found = self.module(self._last_hidden_states(batch, here), self.corpus.tokens[here].to(self.target.device))
        reader = CircuitFilter(self.shape.circuit_structure, found.initial, found.transitions)
        if self.shape.told:
            return found, reader, 0
        first = self.draft_indices[self.corpus.tokens[here]].to(self.target.device)  # the text's last token, and known
        leaf = token_log_probabilities(self.module, found, 0, first.clamp_min(0))
        reader.observe(torch.where(first[:, None] >= 0, leaf, 0.0))
        return found, reader, 1

    def _log_distributions(
        self, batch: Batch, tokens: Int[Tensor, "windows window"]
    ) -> Iterator[Float[Tensor, "windows draft"]]:
        """The log-law of each place of the windows, given the tokens before it, one by one."""
        found, reader, begun = self._start_reader(batch)
        for place in range(self.shape.num_draft_tokens):
            distributions = self.module.log_probabilities(found, begun + place)
            yield (reader.state_log_weights[..., None] + distributions).logsumexp(-2)
            if place + 1 < self.shape.num_draft_tokens:
                own = tokens[:, place].clamp_min(0)[:, None, None].expand(-1, distributions.shape[1], 1)
                reader.observe(distributions.gather(-1, own)[..., 0])

    def _last_hidden_states(
        self, batch: Batch, last_token_rows: Int[Tensor, "windows"]
    ) -> Float[Tensor, "windows hidden"]:
        """The states before each window's last known token, as adapted layers see the text where there are some."""
        device, upper = self.target.device, self.module.upper
        if upper is None:
            return self.corpus.hidden_states[last_token_rows - 1][..., -self.shape.hidden :].to(device)
        below = select_hidden_states(
            self.corpus.hidden_states[batch.corpus_rows - 1], self.corpus.hidden_state_layers, self.shape.taps
        )
        read = upper(below.to(device, upper.lora_layers[0].down.dtype))
        return read.gather(1, (batch.window_starts - 1)[..., None].expand(-1, -1, read.shape[-1]).to(device)).flatten(
            0, 1
        )

    @torch.no_grad()
    def _target_distribution(self, batch: Batch, position: int) -> Float[Tensor, "windows draft"]:
        """The target's own law of a window's token, among those drafted; of none behind its text's end that counts."""
        last = batch.corpus_rows.gather(1, batch.window_starts - 1).flatten() + position
        states = self.corpus.hidden_states[last.clamp_max(len(self.corpus.tokens) - 1)][..., -self.shape.hidden :]
        unembedding = self.module.unembedding
        return (states.to(unembedding.device, unembedding.dtype) @ unembedding.T).float().softmax(-1)

    @torch.inference_mode()
    def _tokens_per_call(self, greedy: bool) -> float:
        """NaN without such texts."""
        found = []
        for cut in self.window_dataset.validation_batches(greedy):
            tokens, counted = self._draft_targets(cut)
            said = torch.stack([distribution.argmax(-1) for distribution in self._log_distributions(cut, tokens)], -1)
            right = torch.where(counted[:, : said.shape[1]], said, IGNORED_TOKEN - 1)
            found.append(1 + num_correct(right, tokens[:, : said.shape[1]]).double())
        return float(torch.cat(found).mean()) if found else math.nan
