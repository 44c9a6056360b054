"""Training of a model, or of a gated adapter, to predict the text from wrong iterates (Jacobi Forcing)."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from saltus.core.coupling import pick_token
from saltus.core.noise import Noise
from saltus.core.sampling import Sampling, token_distribution
from saltus.engine.target_drafters import JACOBI_FORM
from saltus.loading.metadata import DrafterMetadata, write_metadata
from saltus.methods.jacobi.training.block_packing import BlockNoise, PackedBlocks, pack_blocks
from saltus.methods.jacobi.training.trajectories import Trajectory, texts_to_train_on, trajectories_digest
from saltus.methods.shared.adapter_files import load_initial_adapter, save_adapter
from saltus.models.gated_lora import Adapter, GatedLoraSettings, new_adapter
from saltus.training import losses
from saltus.training.data.packed_forward import pack_causal, packed_logits, prepare_model
from saltus.training.data.seeded_generator import seeded_generator
from saltus.training.data.similar_lengths import sample_similar_lengths
from saltus.training.data.uniform_intervals import pick_tokens
from saltus.training.data.window_dataset import WindowSettings, select_validation
from saltus.training.losses import token_loss
from saltus.training.training_task import TrainingTask

DECODING_NOISE = BlockNoise("any", "clean")  # as at decoding: some iterate, after decided text


@dataclass(eq=False)
class JacobiTrainingTask(TrainingTask):
    """From an iterate of a block, predict the text (Eq. 8, 9).

    The loss is the mean of KL(text rows, detached ‖ iterate rows) over the counted iterate rows. Eq. 8 is a mean over
    blocks of sums over the n tokens of each, which is n times as much. The authors' code divides a mean over rows once
    more, by the number of blocks, as `divide_by_blocks` does. With a `gating` an adapter is trained, which acts on the
    iterate rows alone; the model is frozen, and verifies. Without it the model itself is trained, and a loss on the
    completions, times `text_weight`, limits its drift: cross-entropy (`anchor` "text", Eq. 9), or the divergence from
    the initial model ("distributions", ours; it keeps a second copy of it). The recipe's `discount` is the weight of a
    row relative to the one before it in a block with the same wrong token, and its `max_length` is the longest text in
    tokens.
    """

    model: Any  # of Hugging Face
    trajectories: Sequence[Trajectory]
    gating: GatedLoraSettings | None = None
    noise: BlockNoise = field(default_factory=BlockNoise)
    loss_name: Literal["kl", "ce"] = "kl"
    text_weight: float = 1.0
    anchor: Literal["text", "distributions"] = "text"
    divide_by_blocks: bool = False
    window_settings: WindowSettings = field(default_factory=lambda: WindowSettings(batch_size=2, discount=1.0))
    name: str = "its model"
    recompute: bool = False
    autocast: bool = False
    tokenizer: Any = None
    module: nn.Module = field(init=False)
    reference_model: Any = field(init=False, default=None)  # the initial model
    training_trajectories: list[Trajectory] = field(init=False)
    validation_trajectories: list[Trajectory] = field(init=False)

    def __post_init__(self) -> None:
        texts = texts_to_train_on(self.trajectories, self.window_settings.max_length, self.noise.window)
        prompts = [trajectory.prompt for trajectory in texts]
        held_out = select_validation(prompts, self.window_settings.validation_fraction, self.window_settings.seed)
        self.validation_trajectories = [trajectory for trajectory, out in zip(texts, held_out, strict=True) if out]
        self.training_trajectories = [trajectory for trajectory, out in zip(texts, held_out, strict=True) if not out]
        prepare_model(self.model)
        if self.gating is None:
            self.reference_model = copy.deepcopy(self.model) if self.anchor == "distributions" else None
            self.module = self.model.requires_grad_(True)
        else:
            self.gating = replace(self.gating, window=texts[0].block_size)
            self.module = new_adapter(self.model, self.gating, self.window_settings.seed, reads_tokens=True)

    @property
    def adapter(self) -> Adapter | None:
        return self.module if isinstance(self.module, Adapter) else None

    @property
    def queries_per_step(self) -> int:
        tokens = sum(len(trajectory.completion) for trajectory in self.training_trajectories)
        return self.window_settings.batch_size * tokens // len(self.training_trajectories)

    def dataset_digest(self) -> str:
        return trajectories_digest(self.trajectories)

    def initialize_from(self, folder: Path) -> None:
        """Start with a saved adapter. Errors: ValueError if its settings are others, or where a model is trained."""
        if self.adapter is None:
            raise ValueError("--from is for adapters; give a trained model by --model")
        self.adapter.copy_weights_from(load_initial_adapter(folder, self.model, self.name, self.adapter.settings))

    def loss(self, step: int) -> Float[Tensor, ""]:
        """The mean over the rows that attend to wrong tokens, plus that over the text."""
        generator = seeded_generator(self.window_settings.seed, "blocks", step)
        count = min(self.window_settings.batch_size, len(self.training_trajectories))
        chosen, share = sample_similar_lengths(self._lengths, count, generator), self.processes.share(count)
        texts = [self.training_trajectories[number] for number in chosen]
        iterates = [self.noise.choose_iterates(trajectory.iterates_by_block(), generator) for trajectory in texts]
        return self.batch_loss(texts[share], iterates[share])

    def batch_loss(self, texts: Sequence[Trajectory], iterates: Sequence[Sequence[int]]) -> Float[Tensor, ""]:
        """The loss of these iterates of these texts."""
        blocks = self._pack(texts, iterates, self.noise)
        counted = blocks.counted & blocks.has_next_token
        predicted = counted.roll(1, 1)  # the tokens after these rows
        has_text_loss = self.adapter is None and self.text_weight > 0
        in_text = blocks.has_text_row if has_text_loss else predicted
        iterate_rows, text_rows = blocks.iterate_rows[counted], blocks.text_rows[in_text]
        logits = self._logits(blocks, texts, torch.cat([iterate_rows, text_rows]))
        iterate_logits, text_logits = logits[: len(iterate_rows)], logits[len(iterate_rows) :]
        targets, weights = text_logits[predicted[in_text]].detach(), self._row_weights(blocks)[counted]
        row_losses = token_loss(iterate_logits, blocks.token_ids[predicted], targets, self.loss_name)
        total = self.processes.weighted_mean(row_losses, weights, floor=1e-9)
        if self.divide_by_blocks:
            total = total / self._blocks_per_text
        if has_text_loss:
            text_losses = (
                losses.cross_entropy(text_logits, blocks.token_ids[in_text])
                if self.reference_model is None
                else self._reference_divergence(blocks, text_logits)
            )
            total = total + self.text_weight * self.processes.mean(text_losses)
        return total

    def _reference_divergence(self, blocks: PackedBlocks, logits: Float[Tensor, "rows vocab"]) -> Float[Tensor, "rows"]:
        """The KL divergence along the text from the initial model's distributions."""
        packed = blocks.packed
        length = packed.tokens.shape[1]
        rows = blocks.text_rows[blocks.has_text_row]
        with torch.no_grad(), self._autocast():
            reference_logits = packed_logits(
                self.reference_model,
                pack_causal(packed.tokens[:, : packed.context_length]),
                rows // length * packed.context_length + rows % length,
            )
        return losses.kl_divergence(reference_logits, logits)

    @cached_property
    def _lengths(self) -> np.ndarray:
        return np.array([len(one.prompt) + len(one.completion) for one in self.training_trajectories])

    @cached_property
    def _blocks_per_text(self) -> float:
        """On average over the training texts."""
        counts = [len(trajectory.iterates_by_block()) for trajectory in self.training_trajectories]
        return sum(counts) / len(counts)

    def save(self, folder: Path, card: Mapping[str, Any]) -> None:
        """A folder for `saltus.methods.shared.adapter_files.load_adapter`, or a model for `saltus.load`."""
        block = self.training_trajectories[0].block_size
        if self.adapter is not None:
            training = {**card, "form": JACOBI_FORM, "window": block}
            save_adapter(self.adapter, folder, self.model, self.name, training)
            return
        self.model.save_pretrained(folder)
        if self.tokenizer is not None:
            self.tokenizer.save_pretrained(folder)
        write_metadata(folder, DrafterMetadata("model", self.name, None, training={**card, "block_size": block}))

    def _pack(self, texts: Sequence[Trajectory], iterates: Sequence[Sequence[int]], noise: BlockNoise) -> PackedBlocks:
        prompts, completions = (
            [trajectory.prompt for trajectory in texts],
            [trajectory.completion for trajectory in texts],
        )
        return pack_blocks(prompts, completions, iterates, texts[0].block_size, noise).to(self.model.device)

    def _logits(
        self, blocks: PackedBlocks, texts: Sequence[Trajectory], row_indices: Int[Tensor, "kept"]
    ) -> Float[Tensor, "kept vocab"]:
        temperatures = None
        if self.adapter is not None:
            temperatures = torch.tensor([[trajectory.temperature] for trajectory in texts], dtype=torch.float64)
            temperatures = temperatures.to(row_indices.device)
        with self._autocast():
            return packed_logits(self.model, blocks.packed, row_indices, self.adapter, temperatures, self.recompute)

    def _row_weights(self, blocks: PackedBlocks) -> Float[Tensor, "batch slots"]:
        """Discounted by the number of earlier counted rows in the same block."""
        size = self.training_trajectories[0].block_size
        batch, slots = blocks.counted.shape
        padded = nn.functional.pad(blocks.counted.long(), (0, -slots % size)).view(batch, -1, size)
        before = (padded.cumsum(-1) - padded).view(batch, -1)[:, :slots]
        return torch.tensor(self.window_settings.discount) ** before

    @property
    def drafts_per_call(self) -> int:
        return self.training_trajectories[0].block_size - 1

    @torch.no_grad()
    def _tokens_per_call(self, greedy: bool) -> float:
        """The mean number of tokens that the next call decides, the verifier's own token included."""
        chosen = [trajectory for trajectory in self.validation_trajectories if (trajectory.temperature == 0) == greedy]
        counts = [
            count for number, trajectory in enumerate(chosen) for count in self._tokens_per_block(trajectory, number)
        ]
        return float(np.mean(counts)) if counts else math.nan

    def _tokens_per_block(self, trajectory: Trajectory, number: int) -> Iterator[int]:
        """For each block an iterate with a wrong token: one token, plus the correct predictions right after it."""
        blocks = trajectory.iterates_by_block()
        iterate = DECODING_NOISE.choose_iterates(
            [iterates[:-1] or iterates for iterates in blocks], seeded_generator(1, "exam", number)
        )
        packed = self._pack([trajectory], [iterate], DECODING_NOISE)
        predicted = self._predicted_tokens(trajectory, self._logits(packed, [trajectory], packed.iterate_rows[0]))
        correct = predicted[:-1] == np.array(trajectory.completion[1:])
        wrong = np.array(iterate) != np.array(trajectory.completion)
        for start in range(0, len(iterate), trajectory.block_size):
            first_wrong = np.flatnonzero(wrong[start : start + trajectory.block_size])[:1]
            if len(first_wrong):
                following = correct[start + first_wrong[0] : start + trajectory.block_size - 1]
                yield 1 + int(np.cumprod(following).sum())

    def _predicted_tokens(
        self, trajectory: Trajectory, logits: Float[Tensor, "slots vocab"]
    ) -> Int[np.ndarray, "slots"]:
        """The next token of each row, picked by the text's own random numbers."""
        if trajectory.temperature == 0:
            return logits.argmax(-1).cpu().numpy()
        if trajectory.truncation:
            kept = trajectory.truncation.kept(logits.float() / trajectory.temperature)
            logits = logits.masked_fill(~kept, -torch.inf)
        places, noise = len(trajectory.prompt) + 1 + np.arange(len(logits)), Noise(trajectory.seed)
        if trajectory.coupling == "gumbel":
            sampling = Sampling(trajectory.temperature, coupling="gumbel")
            distributions = [token_distribution(row, sampling) for row in logits.cpu()]
            return np.array(
                [
                    pick_token(distribution, noise, "text", place)
                    for distribution, place in zip(distributions, places, strict=True)
                ]
            )
        uniforms = torch.from_numpy(noise.uniforms("text", places)).to(logits.device)
        return pick_tokens(uniforms, logits, trajectory.temperature, trajectory.coupling).cpu().numpy()
