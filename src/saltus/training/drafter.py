"""Train a drafter on cached states: many windows of queries behind one reading of a text, in one packed forward."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import Trainer, TrainerCallback, TrainingArguments

from saltus.core.noise import Noise
from saltus.networks.drafter import DraftModel
from saltus.training.states import States

Batch = dict[str, Tensor]
SLOTS = 384  # of a text at most; its end is kept


@dataclass(frozen=True)
class Recipe:
    """How a drafter is trained."""

    steps: int = 2000
    texts: int = 6  # of a batch
    windows: int = 40  # of a text
    learning_rate: float = 1e-3
    warmup: int = 100
    discount: float = 0.85  # weight of a query relative to the one before it: it counts only if that is right
    placement: float = 1.0  # b of Beta(b, b): where u lies between its edges (PTP, App. D)
    greedy: float = 0.6  # share of windows at temperature 0, of texts that were written so
    seed: int = 0
    held_out: float = 0.03  # share of the texts
    checkpoint: int = 200  # steps


class Windows(Dataset[Batch]):
    """Batches by number: a function of the seed and the number, so that a resumed run goes on as if never stopped."""

    def __init__(
        self,
        states: States,
        texts: np.ndarray,
        recipe: Recipe,
        window: int,
        draft: Tensor,
        temperatures: Sequence[float],
    ) -> None:
        self.states, self.texts, self.recipe, self.window = states, texts, recipe, window
        self.temperatures = tuple(temperatures)
        self.place = torch.full((int(max(states.tokens.max(), draft.max())) + 1,), -100)
        self.place[draft] = torch.arange(len(draft))

    def __len__(self) -> int:
        return self.recipe.steps

    def __getitem__(self, number: int) -> Batch:
        noise = np.random.Generator(np.random.Philox(key=[self.recipe.seed, number]))
        chosen = noise.choice(len(self.texts), self.recipe.texts)
        return joined([self.packed(self.texts[text], noise) for text in chosen])

    def packed(self, text: np.ndarray, noise: Any, windows: int | None = None, greedy: bool | None = None) -> Batch:
        """One text: its slots, then windows of queries that each see the slots before their split and themselves."""
        start, prompt, length, written = (int(x) for x in text)
        first = max(1, length - SLOTS)
        slots, size = length - first, self.window
        splits = np.arange(max(prompt, first + 1), length)
        count = min(windows or self.recipe.windows, len(splits))
        splits = np.sort(noise.choice(splits, count, replace=False))
        asked = splits[:, None] + np.arange(size)  # positions that queries are for
        known = asked < length
        at = start + np.minimum(asked, length - 1)
        share = noise.random(count) < self.recipe.greedy if greedy is None else np.full(count, greedy)
        cold = share & (written == 0)
        which = noise.integers(len(self.temperatures), size=count)
        low, high = np.moveaxis(self.states.edges.numpy()[which[:, None], at], -1, 0)
        b = self.recipe.placement
        u = np.where(cold[:, None], noise.random(asked.shape), low + noise.beta(b, b, asked.shape) * (high - low))
        told = np.where(cold, 0.0, np.array(self.temperatures)[which])
        own = np.arange(start + first, start + length)
        visible = torch.zeros(slots + count * size, slots + count * size, dtype=torch.bool)
        visible[:slots, :slots] = torch.ones(slots, slots, dtype=torch.bool).tril()
        for window, split in enumerate(splits):
            rows = slice(slots + window * size, slots + (window + 1) * size)
            visible[rows, : split - first] = True
            visible[rows, rows] = torch.ones(size, size, dtype=torch.bool).tril()
        labels = torch.where(torch.from_numpy(known), self.place[self.states.tokens[torch.from_numpy(at)]], -100)
        return {
            "features": self.states.features[own - 1],
            "tokens": self.states.tokens[own],
            "u": torch.from_numpy(u.clip(0, 1 - 2**-24).reshape(-1)),
            "temperature": torch.from_numpy(np.repeat(told, size)),
            "positions": torch.from_numpy(np.concatenate([np.arange(first, length), asked.reshape(-1)])),
            "visible": visible,
            "labels": labels.reshape(-1),
        }


def joined(texts: Sequence[Batch]) -> Batch:
    """Texts of unlike sizes in one batch: slots at the front, queries behind, what is missing is seen by none."""
    slots, queries = (max(len(text[name]) for text in texts) for name in ("tokens", "u"))
    batch: dict[str, list[Tensor]] = {name: [] for name in texts[0]}
    for text in texts:
        more, later = slots - len(text["tokens"]), queries - len(text["u"])
        end = len(text["tokens"])
        for name in ("features", "tokens"):
            batch[name].append(F.pad(text[name], (0, 0, 0, more) if text[name].dim() > 1 else (0, more)))
        for name, value in (("u", 0.0), ("temperature", 0.0), ("labels", -100)):
            batch[name].append(F.pad(text[name], (0, later), value=value))
        rows = torch.cat([torch.arange(end), torch.arange(slots, slots + len(text["u"]))])
        visible = torch.eye(slots + queries, dtype=torch.bool)
        visible[rows[:, None], rows] = text["visible"]
        positions = torch.zeros(slots + queries, dtype=torch.long)
        positions[rows] = text["positions"]
        batch["visible"].append(visible)
        batch["positions"].append(positions)
    return {name: torch.stack(parts) for name, parts in batch.items()}


class Objective(nn.Module):
    """Cross-entropy of the tokens that the uniforms pick (O-PTP, Eq. 10), later queries of a window discounted."""

    weights: Tensor  # [window]

    def __init__(self, model: DraftModel, discount: float) -> None:
        super().__init__()
        self.model = model
        weights = discount ** torch.arange(model.shape.window)
        self.register_buffer("weights", weights / weights.mean(), persistent=False)

    def forward(self, **batch: Tensor) -> dict[str, Tensor]:
        logits = predicted(self.model, batch)
        losses = F.cross_entropy(logits.float(), batch["labels"].flatten(), reduction="none", ignore_index=-100)
        weights = self.weights.repeat(len(losses) // len(self.weights)) * (batch["labels"].flatten() >= 0)
        return {"loss": (losses * weights).sum() / weights.sum()}


def predicted(model: DraftModel, batch: Batch) -> Tensor:
    """Logits of all queries, [queries, draft]."""
    slots = model.slots(batch["features"], batch["tokens"])
    queries = model.queries(batch["u"], batch["temperature"])
    hidden = model(torch.cat([slots, queries.to(slots.dtype)], 1), batch["positions"], batch["visible"])
    states = hidden[:, slots.shape[1] :].flatten(0, 1)
    return model.llama.lm_head(states.to(model.llama.lm_head.weight.dtype))


@torch.inference_mode()
def tokens_per_call(model: DraftModel, windows: Windows, texts: np.ndarray, greedy: bool, seed: int = 1) -> float:
    """Of chains on held-out texts: leading right drafts, and the target's own token."""
    noise = np.random.Generator(np.random.Philox(key=[seed, 2**32]))
    total = count = 0
    for text in texts[texts[:, 3] == 0] if greedy else texts[texts[:, 3] > 0]:
        batch = joined([windows.packed(text, noise, windows=8, greedy=greedy)])
        with torch.autocast("cpu", torch.bfloat16):
            best = predicted(model, batch).argmax(-1)
        right = (best == batch["labels"].flatten()).view(-1, model.shape.window)
        total += int(right.long().cumprod(-1).sum()) + len(right)
        count += len(right)
    return total / max(count, 1)


def train(
    model: DraftModel, states: States, recipe: Recipe, folder: Path, draft: Tensor, temperatures: Sequence[float]
) -> list[dict[str, Any]]:
    """Train, with checkpoints in `folder` from which it goes on; the history of losses and held-out tokens per call."""
    order = np.argsort(Noise(recipe.seed).at("held out", np.arange(len(states.texts))))
    border = max(1, math.ceil(recipe.held_out * len(order)))
    held, own = states.texts[np.sort(order[:border])], states.texts[np.sort(order[border:])]
    long = own[:, 2] > own[:, 1] + 1
    windows = Windows(states, own[long], recipe, model.shape.window, draft, temperatures)
    history: list[dict[str, Any]] = []

    class HeldOut(TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            if "loss" not in (logs or {}):
                return
            model.eval()
            told = {
                "step": state.global_step,
                "loss": logs["loss"],
                "greedy": tokens_per_call(model, windows, held, True),
                "sampled": tokens_per_call(model, windows, held, False),
            }
            model.train()
            history.append(told)
            print({name: round(value, 3) for name, value in told.items()}, flush=True)

    arguments = TrainingArguments(
        output_dir=str(folder), max_steps=recipe.steps, per_device_train_batch_size=1, seed=recipe.seed,
        learning_rate=recipe.learning_rate, lr_scheduler_type="cosine", warmup_steps=recipe.warmup, weight_decay=0.01,
        adam_beta2=0.98, max_grad_norm=1.0, save_steps=recipe.checkpoint, save_total_limit=2, logging_steps=100,
        report_to="none", bf16=True,
        use_cpu=not torch.cuda.is_available(), remove_unused_columns=False, disable_tqdm=True,
        dataloader_pin_memory=False,
    )  # fmt: skip
    objective = Objective(model, recipe.discount)
    trainer = Trainer(
        objective, arguments, data_collator=lambda found: found[0], train_dataset=windows, callbacks=[HeldOut()]
    )
    resumable = any(folder.glob("checkpoint-*"))
    trainer.train(resume_from_checkpoint=resumable or None)
    return history
