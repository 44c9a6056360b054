"""Teach a model, or a gated adapter of it, to see through wrong guesses: progressive consistency (Jacobi Forcing)."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from saltus.core.noise import Noise
from saltus.networks.adapters.gated_lora import Adapter, GatedLoraSettings, new_adapter
from saltus.networks.loading.adapter_files import load_adapter, save_adapter
from saltus.networks.loading.drafter_files import model_fingerprint
from saltus.networks.loading.target_drafters import JACOBI_FORM
from saltus.training.data.block_packing import BlockNoise, PackedBlocks, pack_blocks
from saltus.training.data.packed_forward import pack_causal, packed_logits, prepare_model
from saltus.training.data.seeded_generator import seeded_generator
from saltus.training.data.trajectories import Trajectory
from saltus.training.data.uniform_intervals import pick_tokens
from saltus.training.data.window_dataset import WindowSettings, select_validation
from saltus.training.tasks import losses
from saltus.training.tasks.distillation import token_loss
from saltus.training.tasks.training_task import evaluate_greedy_and_sampled

ROWS_PER_CHUNK = 64  # laws of a vocabulary in float64 at a time
DECODING_NOISE = BlockNoise("any", "clean")  # what a call finds: some iterate, behind decided text


@dataclass(eq=False)
class JacobiTrainingTask:
    """A `Course`: from an iterate of a block, say the text (Eq. 8, 9).

    The loss is the divergence of what rows behind a wrong guess say from what the text's own rows say, which give no
    gradient there. With a `gating` an adapter is trained, which acts on the guesses' rows alone; the model is frozen,
    and verifies. Without one the model itself is trained, and `text_weight` times a loss of its text keeps it from
    drifting: cross-entropy (`anchor` "text", Eq. 9), or how far its laws are from those of the model as it was ("laws",
    ours, which keeps a second copy). `lessons.discount` is the weight of a row relative to the one before it behind the
    same wrong guess, and `lessons.slots` the longest text in tokens.
    """

    model: Any  # of Hugging Face
    trajectories: Sequence[Trajectory]
    gating: GatedLoraSettings | None = None
    noise: BlockNoise = field(default_factory=BlockNoise)
    loss_name: Literal["kl", "ce"] = "kl"
    text_weight: float = 1.0
    anchor: Literal["text", "laws"] = "text"
    window_settings: WindowSettings = field(default_factory=lambda: WindowSettings(texts=2, discount=1.0))
    name: str = "its model"
    recompute: bool = False
    autocast: bool = False
    tokenizer: Any = None
    module: nn.Module = field(init=False)
    reference_model: Any = field(init=False, default=None)  # the model as it was
    training_trajectories: list[Trajectory] = field(init=False)
    validation_trajectories: list[Trajectory] = field(init=False)

    def __post_init__(self) -> None:
        texts = [
            short for one in self.trajectories if (short := _truncate(one, self.window_settings.slots)) is not None
        ]
        if len(texts) < 2:
            raise ValueError(
                f"there are fewer than two texts of more than a block within {self.window_settings.slots} tokens to"
                " learn from and to hold out; collect more or longer ones, or raise lessons.slots"
            )
        blocks = -(-max(len(one.completion) for one in texts) // texts[0].block_size)
        if self.noise.window > blocks:
            raise ValueError(
                f"the noise's window is {self.noise.window} blocks, but the longest text has {blocks} of"
                f" {texts[0].block_size} tokens; take a smaller window, or collect longer texts"
            )
        chosen = select_validation(
            [np.asarray(one.prompt).tobytes() for one in texts],
            self.window_settings.held_out,
            self.window_settings.seed,
        )
        self.validation_trajectories = [one for one, out in zip(texts, chosen, strict=True) if out]
        own = [one for one, out in zip(texts, chosen, strict=True) if not out]
        self.training_trajectories = sorted(
            own, key=lambda one: len(one.prompt) + len(one.completion)
        )  # like lengths share a batch
        prepare_model(self.model)
        if self.gating is None:
            self.reference_model = copy.deepcopy(self.model) if self.anchor == "laws" else None
            self.module = self.model.requires_grad_(True)
        else:
            self.gating = replace(self.gating, window=texts[0].block_size)
            self.module = new_adapter(self.model, self.gating, self.window_settings.seed, reads_tokens=True)

    @property
    def adapter(self) -> Adapter | None:
        return self.module if isinstance(self.module, Adapter) else None

    def initialize_from(self, folder: Path) -> None:
        """Go on with an adapter. Errors: ValueError where its settings are others, or where a model is trained."""
        if self.adapter is None:
            raise ValueError("a model is gone on with by --model, not by --from")
        found = load_adapter(folder, self.model, model_fingerprint(self.model), self.name)
        if replace(found.settings, window=self.adapter.settings.window) != self.adapter.settings:
            raise ValueError(f"the adapter in {folder} has other settings than the recipe; take the one it was made by")
        self.adapter.copy_weights_from(found)

    def loss(self, step: int) -> Float[Tensor, ""]:
        """The mean over the rows behind wrong guesses, and that over the text."""
        generator = seeded_generator(self.window_settings.seed, "blocks", step)
        count = min(self.window_settings.texts, len(self.training_trajectories))
        first = int(generator.integers(len(self.training_trajectories) - count + 1))
        texts = self.training_trajectories[first : first + count]
        return self.batch_loss(texts, [self.noise.choose_iterates(one.iterates_by_block(), generator) for one in texts])

    def batch_loss(self, texts: Sequence[Trajectory], iterates: Sequence[Sequence[int]]) -> Float[Tensor, ""]:
        """Of these iterates of these texts."""
        blocks = self._pack(texts, iterates, self.noise)
        counted, anchored = (
            blocks.sees_wrong_token & blocks.has_next_token,
            self.adapter is None and self.text_weight > 0,
        )
        read = blocks.has_next_token if anchored else counted  # rows of the text that are asked
        noisy, text = blocks.iterate_rows[counted], blocks.text_rows[read]
        logits = self._logits(blocks, texts, torch.cat([noisy, text]))
        guessed, now = logits[: len(noisy)], logits[len(noisy) :]
        follows, weights = blocks.token_ids.roll(-1, 1), self._row_weights(blocks)[counted]
        own = token_loss(guessed, follows[counted], now[counted[read]].detach(), self.loss_name) * weights
        total = own.sum() / weights.sum().clamp_min(1e-9)
        if anchored:
            kept = (
                losses.cross_entropy(now, follows[read])
                if self.reference_model is None
                else self._reference_divergence(blocks, now)
            )
            total = total + self.text_weight * kept.mean()
        return total

    def _reference_divergence(self, blocks: PackedBlocks, logits: Float[Tensor, "rows vocab"]) -> Float[Tensor, "rows"]:
        """How far the laws along the text are from those of the model as it was."""
        packed = blocks.packed
        length = packed.tokens.shape[1]
        rows = blocks.text_rows[blocks.has_next_token]
        with torch.no_grad(), self._autocast():
            distributions = packed_logits(
                self.reference_model,
                pack_causal(packed.tokens[:, : packed.context_length]),
                rows // length * packed.context_length + rows % length,
            )
        return losses.kl_divergence(distributions, logits)

    def evaluate(self) -> dict[str, float]:
        """What the call after this one will decide, the verifier's own token included, on held-out texts."""
        return evaluate_greedy_and_sampled(self.module, self._tokens_per_call)

    def save(self, folder: Path, card: Mapping[str, Any]) -> None:
        """A folder for `saltus.networks.loading.adapter_files.load_adapter`, or a model for `saltus.load`."""
        block = self.training_trajectories[0].block_size
        if self.adapter is not None:
            made = {**card, "form": JACOBI_FORM, "window": block}
            save_adapter(self.adapter, folder, model_fingerprint(self.model), self.name, made)
            return
        self.model.save_pretrained(folder)
        if self.tokenizer is not None:
            self.tokenizer.save_pretrained(folder)
        papers = {"trained_from": self.name, "training": {**card, "block": block}}
        Path(folder, "saltus.json").write_text(json.dumps(papers, indent=2) + "\n")

    def _pack(self, texts: Sequence[Trajectory], iterates: Sequence[Sequence[int]], noise: BlockNoise) -> PackedBlocks:
        prompts, completions = [one.prompt for one in texts], [one.completion for one in texts]
        return pack_blocks(prompts, completions, iterates, texts[0].block_size, noise).to(self.model.device)

    def _logits(
        self, blocks: PackedBlocks, texts: Sequence[Trajectory], row_indices: Int[Tensor, "kept"]
    ) -> Float[Tensor, "kept vocab"]:
        temperatures = torch.tensor(
            [[one.temperature] for one in texts], dtype=torch.float64, device=row_indices.device
        )
        conditioning = None if self.adapter is None else temperatures
        with self._autocast():
            return packed_logits(self.model, blocks.packed, row_indices, self.adapter, conditioning, self.recompute)

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self.model.device.type, torch.bfloat16, enabled=self.autocast)

    def _row_weights(self, blocks: PackedBlocks) -> Float[Tensor, "batch slots"]:
        """Discounted by how many rows of the same block were misled before."""
        size = self.training_trajectories[0].block_size
        batch, slots = blocks.sees_wrong_token.shape
        padded = nn.functional.pad(blocks.sees_wrong_token.long(), (0, -slots % size)).view(batch, -1, size)
        before = (padded.cumsum(-1) - padded).view(batch, -1)[:, :slots]
        return torch.tensor(self.window_settings.discount) ** before

    @torch.no_grad()
    def _tokens_per_call(self, greedy: bool) -> float:
        """NaN without such texts."""
        chosen = [one for one in self.validation_trajectories if (one.temperature == 0) == greedy]
        found = [count for number, one in enumerate(chosen) for count in self._tokens_per_block(one, number)]
        return float(np.mean(found)) if found else math.nan

    def _tokens_per_block(self, trajectory: Trajectory, number: int) -> Iterator[int]:
        """For each block an iterate that is not its text: one token, and as many as the answers get right behind it."""
        blocks = trajectory.iterates_by_block()
        iterate = DECODING_NOISE.choose_iterates(
            [iterates[:-1] or iterates for iterates in blocks], seeded_generator(1, "exam", number)
        )
        packed = self._pack([trajectory], [iterate], DECODING_NOISE)
        answers = self._predicted_tokens(trajectory, self._logits(packed, [trajectory], packed.iterate_rows[0]))
        right, wrong = (
            answers[:-1] == np.array(trajectory.completion[1:]),
            np.array(iterate) != np.array(trajectory.completion),
        )
        for start in range(0, len(iterate), trajectory.block_size):
            here = np.flatnonzero(wrong[start : start + trajectory.block_size])
            if len(here):
                behind = right[start + here[0] : start + trajectory.block_size - 1]
                yield 1 + int(np.cumprod(behind).sum())

    def _predicted_tokens(self, trajectory: Trajectory, logits: Float[Tensor, "slots vocab"]) -> np.ndarray:
        """The token that each row says comes next, by the text's own uniforms."""
        if trajectory.temperature == 0:
            return logits.argmax(-1).cpu().numpy()
        places = len(trajectory.prompt) + 1 + np.arange(len(logits))
        uniforms = torch.from_numpy(Noise(trajectory.seed).uniforms("text", places)).to(logits.device)
        parts = zip(uniforms.split(ROWS_PER_CHUNK), logits.split(ROWS_PER_CHUNK), strict=True)
        return torch.cat([pick_tokens(*part, trajectory.temperature) for part in parts]).cpu().numpy()


def _truncate(trajectory: Trajectory, max_length: int) -> Trajectory | None:
    """Its beginning, if that is more than a block; whole blocks, where it is not all."""
    size = len(trajectory.completion)
    if len(trajectory.prompt) + size > max_length:
        size = max(max_length - len(trajectory.prompt), 0) // trajectory.block_size * trajectory.block_size
    if size <= trajectory.block_size:
        return None
    return replace(
        trajectory, completion=trajectory.completion[:size], calls=[call for call in trajectory.calls if call[0] < size]
    )
