"""Training of any-subset models: the distributions of all holes given the rest, in one packed call (ASSD, Eq. 7)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from saltus.loading.gguf_storage import remove_gguf, store_as_gguf
from saltus.loading.metadata import DrafterMetadata, write_metadata
from saltus.loading.model_folders import PAIRWISE_CORRECTION_FILE
from saltus.methods.assd.network import ANY_SUBSET
from saltus.methods.assd.training.holes import HoleSettings
from saltus.training.data.packed_forward import pack_causal, packed_logits, prepare_model, without_dropout
from saltus.training.data.seeded_generator import seeded_generator
from saltus.training.data.similar_lengths import sample_similar_lengths
from saltus.training.data.window_packing import PackedBatch, pack_rows
from saltus.training.training_task import TrainingTask

PADDING_MULTIPLE = 16  # of a batch's length: oneDNN compiles its kernels anew for every shape, for a second or more


def pack_holes(
    tokens: Int[Tensor, "batch length"], ranks: Int[Tensor, "batch length"], mask_token: int, num_unknown: int = 0
) -> tuple[PackedBatch, Int[Tensor, "holes"], Int[Tensor, "holes"]]:
    """Content rows, then a query row for each hole; also the rows of the holes, counted through the batch, and tokens.

    Content attends to tokens of its own or a lower rank. A query attends to itself and to the tokens decided before
    its hole, except the last `num_unknown` holes. Tokens of rank −1 are padding: nothing attends to them, and they and
    spare queries attend to themselves alone.
    """
    batch, length = tokens.shape
    holes = ranks > 0
    positions, is_hole = _hole_positions(holes)
    total = length + positions.shape[1]
    mask = torch.zeros(batch, total, total, dtype=torch.bool, device=tokens.device)
    mask[:, :length, :length] = ranks[:, None, :] <= ranks[:, :, None]
    first_unknown = (ranks.gather(1, positions) - num_unknown).clamp_min(1)
    mask[:, length:, :length] = (ranks[:, None, :] < first_unknown[:, :, None]) & is_hole[:, :, None]
    mask[:, :, :length] &= (ranks >= 0)[:, None]
    mask |= torch.eye(total, dtype=torch.bool, device=tokens.device)
    packed = pack_rows(tokens, mask, torch.full_like(positions, mask_token), positions, context_length=total)
    rows = F.pad(is_hole, (length, 0)).flatten().nonzero()[:, 0]
    return packed, rows, tokens.gather(1, positions)[is_hole]


def _hole_positions(
    holes: Bool[Tensor, "batch length"],
) -> tuple[Int[Tensor, "batch most"], Bool[Tensor, "batch most"]]:
    """The holes' positions, filled up with others to the largest number of holes; True for those of holes."""
    most = int(holes.sum(1).max())
    positions = torch.argsort(holes.int(), dim=1, descending=True, stable=True)[:, :most]
    return positions, holes.gather(1, positions)


@dataclass(eq=False)
class AnySubsetTrainingTask(TrainingTask):
    """Predict each hole of a text given the rest of the text and the holes decided before it.

    Texts have three tokens or more. The warm-up of the holes is a fraction of `num_steps`.
    """

    metrics_name, metrics_unit = "held-out bits per hole", " bits"

    model: Any  # a Llama of Hugging Face, whose configuration names its mask
    texts: Sequence[Int[np.ndarray, "_"]]
    validation_texts: Sequence[Int[np.ndarray, "_"]]
    num_steps: int
    batch_size: int = 12
    hole_settings: HoleSettings = field(default_factory=HoleSettings)
    autocast: bool = False
    seed: int = 0
    tokenizer: Any = None  # saved with the model
    weights: str = "bf16"  # as the model is saved, or a name in `PACKINGS`
    trained_from: str = ""  # the model that it started with; empty: none
    module: nn.Module = field(init=False)

    def __post_init__(self) -> None:
        self.lengths = np.array([len(text) for text in self.texts])
        self.module = self._prepared_model()

    def _prepared_model(self) -> nn.Module:
        """The model with trainable weights; those of its layers are for Muon."""
        model = prepare_model(self.model).requires_grad_(True)
        setattr(model, "matrices", [one for one in model.model.layers.parameters() if one.ndim == 2])  # noqa: B010
        return model

    def dataset_digest(self) -> str:
        digest = blake2b(digest_size=16)
        for text in (*self.texts, *self.validation_texts):
            digest.update(len(text).to_bytes(8) + text.tobytes())
        return digest.hexdigest()

    def initialize_from(self, folder: Path) -> None:
        """Its model is already the folder's, whose tokens its texts have."""

    def loss(self, step: int) -> Float[Tensor, ""]:
        """The mean cross-entropy of a hole, in nats."""
        generator = seeded_generator(self.seed, "holes", step)
        blank_probability = self.hole_settings.blank_probability[2 * step >= self.num_steps]
        tokens, ranks = self.sample_batch(generator, step / self.num_steps, blank_probability)
        own = self.processes.share(len(tokens))
        logits, targets = self.hole_logits(tokens[own], ranks[own])
        return self.processes.mean(F.cross_entropy(logits, targets, reduction="none"))

    def sample_batch(
        self, generator: np.random.Generator, progress: float, blank_probability: float
    ) -> tuple[Int[Tensor, "batch padded"], Int[Tensor, "batch padded"]]:
        """A random training batch, as from `make_batch`, when this fraction of the steps is done."""
        texts = [self.texts[index] for index in sample_similar_lengths(self.lengths, self.batch_size, generator)]
        fractions = self.hole_settings.hole_fractions(self.batch_size, progress, generator)
        return self.make_batch(texts, fractions, generator, blank_probability)

    def validation_parts(self) -> list[Sequence[Int[np.ndarray, "_"]]]:
        """At most four batches of held-out texts."""
        size = self.batch_size
        return [part for start in range(0, 4 * size, size) if len(part := self.validation_texts[start : start + size])]

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        """Bits of a hole in held-out texts of which 20 % or 95 % is holes, without blanks, decided left to right."""
        self.module.eval()
        metrics = {}
        for fraction in (0.2, 0.95):
            generator = seeded_generator(1, "exam")
            nats = []
            for part in self.validation_parts():
                tokens, ranks = self.make_batch(part, [fraction] * len(part), generator)
                nats.append(F.cross_entropy(*self.hole_logits(tokens, lattice_ranks(ranks)), reduction="none"))
            metrics[f"{fraction:.0%} holes"] = float(torch.cat(nats).mean()) / math.log(2)
        self.module.train()
        return metrics

    def save(self, folder: Path, card: Mapping[str, Any]) -> None:
        """A folder for `saltus.load`, in bfloat16 or packed, without a pairwise correction."""
        self.model.to(torch.bfloat16)
        self.model.save_pretrained(folder)
        if self.tokenizer is not None:
            self.tokenizer.save_pretrained(folder)
        (folder / PAIRWISE_CORRECTION_FILE).unlink(missing_ok=True)  # of an earlier model in this folder
        remove_gguf(folder)
        if self.weights != "bf16":
            store_as_gguf(folder, self.weights)
        write_metadata(folder, DrafterMetadata("model", self.trained_from, None, training=card))

    def make_batch(
        self,
        texts: Sequence[Int[np.ndarray, "_"]],
        fractions: Sequence[float] | np.ndarray,
        generator: np.random.Generator,
        blank_probability: float = 0.0,
    ) -> tuple[Int[Tensor, "batch padded"], Int[Tensor, "batch padded"]]:
        """Tokens, padded at their ends, and ranks (see `pack_holes`)."""
        examples = [
            self.hole_settings.place_holes(text, float(fraction), generator, blank_probability)
            for text, fraction in zip(texts, fractions, strict=True)
        ]
        padded = -(-max(len(text) for text, _ in examples) // PADDING_MULTIPLE) * PADDING_MULTIPLE
        tokens = torch.zeros(len(examples), padded, dtype=torch.long)
        ranks = torch.full_like(tokens, -1)
        for row, (text, holes) in enumerate(examples):
            tokens[row, : len(text)] = torch.from_numpy(text)
            ranks[row, : len(text)] = torch.from_numpy(self.hole_settings.decoding_ranks(holes, generator))
        return tokens.to(self.model.device), ranks.to(self.model.device)

    def hole_logits(
        self, tokens: Int[Tensor, "batch padded"], ranks: Int[Tensor, "batch padded"], num_unknown: int = 0
    ) -> tuple[Float[Tensor, "holes vocab"], Int[Tensor, "holes"]]:
        """Logits of the holes, text by text in the order of their positions, and their tokens."""
        mask_token = int(getattr(self.model.config, ANY_SUBSET)["mask"])
        packed, rows, targets = pack_holes(tokens, ranks, mask_token, num_unknown)
        with self._autocast():
            logits = packed_logits(self.model, packed, rows)
        return logits.float(), targets


@dataclass(eq=False)
class XlnetTrainingTask(AnySubsetTrainingTask):
    """The same for an XLNet of Hugging Face, whose two streams have a mask of their own (Yang et al. 2019)."""

    def _prepared_model(self) -> nn.Module:
        return without_dropout(self.model).requires_grad_(True)

    def hole_logits(
        self, tokens: Int[Tensor, "batch padded"], ranks: Int[Tensor, "batch padded"], num_unknown: int = 0
    ) -> tuple[Float[Tensor, "holes vocab"], Int[Tensor, "holes"]]:
        """As above, but `num_unknown` holds for content rows too, since the streams share their mask."""
        first_unknown = (ranks - num_unknown).clamp_min(1)
        hidden = (ranks[:, None, :] >= first_unknown[:, :, None]) | (ranks < 0)[:, None, :]
        positions, is_hole = _hole_positions(ranks > 0)
        mapping = F.one_hot(positions, tokens.shape[1])
        with self._autocast():
            logits = self.model(
                input_ids=tokens, perm_mask=hidden.float(), target_mapping=mapping.float(), use_mems=False
            ).logits
        return logits[is_hole].float(), tokens.gather(1, positions)[is_hole]


@dataclass(eq=False)
class LeftToRightTrainingTask(AnySubsetTrainingTask):
    """A causal model on the same texts, to compare with."""

    metrics_name = "held-out bits per token"

    def hole_logits(
        self, tokens: Int[Tensor, "batch padded"], ranks: Int[Tensor, "batch padded"], num_unknown: int = 0
    ) -> tuple[Float[Tensor, "tokens vocab"], Int[Tensor, "tokens"]]:
        """Logits of all tokens but the first, and the tokens."""
        is_token = ranks[:, 1:] >= 0
        with self._autocast():
            logits = packed_logits(self.model, pack_causal(tokens[:, :-1]), is_token.flatten().nonzero()[:, 0])
        return logits.float(), tokens[:, 1:][is_token]

    def evaluate(self) -> dict[str, float]:
        return {"all tokens": super().evaluate()["20% holes"]}


def lattice_ranks(ranks: Int[Tensor, "batch padded"]) -> Int[Tensor, "batch padded"]:
    """The same holes, decided in lattice order."""
    holes = ranks > 0
    return torch.where(holes, holes.cumsum(1), ranks)
