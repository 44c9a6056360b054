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
from saltus.networks.adapters import load_adapter, save_adapter
from saltus.networks.gated import Adapter, Gating, new_adapter
from saltus.networks.trained import ITERATES
from saltus.networks.trained_files import fingerprint
from saltus.training import losses
from saltus.training.blocks import BlockNoise, Blocks, pack_blocks
from saltus.training.course import examined
from saltus.training.distillation import compare
from saltus.training.draws import draws
from saltus.training.edges import picks
from saltus.training.lessons import Lessons, held_out
from saltus.training.packed_model import causal, prepared, said
from saltus.training.trajectories import Trajectory

ROWS = 64  # laws of a vocabulary in float64 at a time
DECODING = BlockNoise("any", "clean")  # what a call finds: some iterate, behind decided text


@dataclass(eq=False)
class JacobiCourse:
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
    gating: Gating | None = None
    noise: BlockNoise = field(default_factory=BlockNoise)
    loss_of: Literal["kl", "ce"] = "kl"
    text_weight: float = 1.0
    anchor: Literal["text", "laws"] = "text"
    lessons: Lessons = field(default_factory=lambda: Lessons(texts=2, discount=1.0))
    name: str = "its model"
    recompute: bool = False
    autocast: bool = False
    tokenizer: Any = None
    module: nn.Module = field(init=False)
    before: Any = field(init=False, default=None)  # the model as it was
    own: list[Trajectory] = field(init=False)
    held_out: list[Trajectory] = field(init=False)

    def __post_init__(self) -> None:
        texts = [short for one in self.trajectories if (short := _cut(one, self.lessons.slots)) is not None]
        if len(texts) < 2:
            raise ValueError(
                f"there are fewer than two texts of more than a block within {self.lessons.slots} tokens to learn from"
                " and to hold out; collect more or longer ones, or raise lessons.slots"
            )
        blocks = -(-max(len(one.completion) for one in texts) // texts[0].block)
        if self.noise.window > blocks:
            raise ValueError(
                f"the noise's window is {self.noise.window} blocks, but the longest text has {blocks} of"
                f" {texts[0].block} tokens; take a smaller window, or collect longer texts"
            )
        chosen = held_out([np.asarray(one.prompt).tobytes() for one in texts], self.lessons.held_out, self.lessons.seed)
        self.held_out = [one for one, out in zip(texts, chosen, strict=True) if out]
        own = [one for one, out in zip(texts, chosen, strict=True) if not out]
        self.own = sorted(own, key=lambda one: len(one.prompt) + len(one.completion))  # like lengths share a batch
        prepared(self.model)
        if self.gating is None:
            self.before = copy.deepcopy(self.model) if self.anchor == "laws" else None
            self.module = self.model.requires_grad_(True)
        else:
            self.gating = replace(self.gating, window=texts[0].block)
            self.module = new_adapter(self.model, self.gating, self.lessons.seed, reads_tokens=True)

    @property
    def adapter(self) -> Adapter | None:
        return self.module if isinstance(self.module, Adapter) else None

    def begin(self, folder: Path) -> None:
        """Go on with an adapter. Errors: ValueError where its settings are others, or where a model is trained."""
        if self.adapter is None:
            raise ValueError("a model is gone on with by --model, not by --from")
        found = load_adapter(folder, self.model, fingerprint(self.model), self.name)
        if replace(found.settings, window=self.adapter.settings.window) != self.adapter.settings:
            raise ValueError(f"the adapter in {folder} has other settings than the recipe; take the one it was made by")
        self.adapter.go_on_from(found)

    def loss(self, step: int) -> Float[Tensor, ""]:
        """The mean over the rows behind wrong guesses, and that over the text."""
        generator = draws(self.lessons.seed, "blocks", step)
        count = min(self.lessons.texts, len(self.own))
        first = int(generator.integers(len(self.own) - count + 1))
        texts = self.own[first : first + count]
        return self.loss_on(texts, [self.noise.iterates(one.blocks(), generator) for one in texts])

    def loss_on(self, texts: Sequence[Trajectory], iterates: Sequence[Sequence[int]]) -> Float[Tensor, ""]:
        """Of these iterates of these texts."""
        blocks = self._packed(texts, iterates, self.noise)
        counted, anchored = blocks.misled & blocks.followed, self.adapter is None and self.text_weight > 0
        read = blocks.followed if anchored else counted  # rows of the text that are asked
        noisy, text = blocks.noisy[counted], blocks.clean[read]
        logits = self._said(blocks, texts, torch.cat([noisy, text]))
        guessed, now = logits[: len(noisy)], logits[len(noisy) :]
        follows, weights = blocks.tokens.roll(-1, 1), self._weights(blocks)[counted]
        own = compare(guessed, follows[counted], now[counted[read]].detach(), self.loss_of) * weights
        total = own.sum() / weights.sum().clamp_min(1e-9)
        if anchored:
            kept = losses.cross_entropy(now, follows[read]) if self.before is None else self._drift(blocks, now)
            total = total + self.text_weight * kept.mean()
        return total

    def _drift(self, blocks: Blocks, now: Float[Tensor, "rows vocab"]) -> Float[Tensor, "rows"]:
        """How far the laws along the text are from those of the model as it was."""
        packed = blocks.packed
        length = packed.tokens.shape[1]
        rows = blocks.clean[blocks.followed]
        with torch.no_grad(), self._precision():
            laws = said(
                self.before, causal(packed.tokens[:, : packed.context]), rows // length * packed.context + rows % length
            )
        return losses.divergence(laws, now)

    def report(self) -> dict[str, float]:
        """What the call after this one will decide, the verifier's own token included, on held-out texts."""
        return examined(self.module, self._tokens_per_call)

    def save(self, folder: Path, card: Mapping[str, Any]) -> None:
        """A folder for `saltus.networks.adapters.load_adapter`, or a model for `saltus.load`."""
        block = self.own[0].block
        if self.adapter is not None:
            made = {**card, "form": ITERATES, "window": block}
            save_adapter(self.adapter, folder, fingerprint(self.model), self.name, made)
            return
        self.model.save_pretrained(folder)
        if self.tokenizer is not None:
            self.tokenizer.save_pretrained(folder)
        papers = {"trained_from": self.name, "training": {**card, "block": block}}
        Path(folder, "saltus.json").write_text(json.dumps(papers, indent=2) + "\n")

    def _packed(self, texts: Sequence[Trajectory], iterates: Sequence[Sequence[int]], noise: BlockNoise) -> Blocks:
        prompts, completions = [one.prompt for one in texts], [one.completion for one in texts]
        return pack_blocks(prompts, completions, iterates, texts[0].block, noise).to(self.model.device)

    def _said(
        self, blocks: Blocks, texts: Sequence[Trajectory], keep: Int[Tensor, "kept"]
    ) -> Float[Tensor, "kept vocab"]:
        temperatures = torch.tensor([[one.temperature] for one in texts], dtype=torch.float64, device=keep.device)
        told = None if self.adapter is None else temperatures
        with self._precision():
            return said(self.model, blocks.packed, keep, self.adapter, told, self.recompute)

    def _precision(self) -> torch.autocast:
        return torch.autocast(self.model.device.type, torch.bfloat16, enabled=self.autocast)

    def _weights(self, blocks: Blocks) -> Float[Tensor, "batch slots"]:
        """Discounted by how many rows of the same block were misled before."""
        size = self.own[0].block
        batch, slots = blocks.misled.shape
        padded = nn.functional.pad(blocks.misled.long(), (0, -slots % size)).view(batch, -1, size)
        before = (padded.cumsum(-1) - padded).view(batch, -1)[:, :slots]
        return torch.tensor(self.lessons.discount) ** before

    @torch.no_grad()
    def _tokens_per_call(self, greedy: bool) -> float:
        """NaN without such texts."""
        chosen = [one for one in self.held_out if (one.temperature == 0) == greedy]
        found = [count for number, one in enumerate(chosen) for count in self._counted(one, number)]
        return float(np.mean(found)) if found else math.nan

    def _counted(self, one: Trajectory, number: int) -> Iterator[int]:
        """For each block an iterate that is not its text: one token, and as many as the answers get right behind it."""
        blocks = one.blocks()
        iterate = DECODING.iterates([iterates[:-1] or iterates for iterates in blocks], draws(1, "exam", number))
        packed = self._packed([one], [iterate], DECODING)
        answers = self._answers(one, self._said(packed, [one], packed.noisy[0]))
        right, wrong = answers[:-1] == np.array(one.completion[1:]), np.array(iterate) != np.array(one.completion)
        for start in range(0, len(iterate), one.block):
            here = np.flatnonzero(wrong[start : start + one.block])
            if len(here):
                behind = right[start + here[0] : start + one.block - 1]
                yield 1 + int(np.cumprod(behind).sum())

    def _answers(self, one: Trajectory, logits: Float[Tensor, "slots vocab"]) -> np.ndarray:
        """The token that each row says comes next, by the text's own uniforms."""
        if one.temperature == 0:
            return logits.argmax(-1).cpu().numpy()
        places = len(one.prompt) + 1 + np.arange(len(logits))
        uniforms = torch.from_numpy(Noise(one.seed).at("text", places)).to(logits.device)
        parts = zip(uniforms.split(ROWS), logits.split(ROWS), strict=True)
        return torch.cat([picks(*part, one.temperature) for part in parts]).cpu().numpy()


def _cut(one: Trajectory, slots: int) -> Trajectory | None:
    """Its beginning, if that is more than a block; whole blocks, where it is not all."""
    size = len(one.completion)
    if len(one.prompt) + size > slots:
        size = max(slots - len(one.prompt), 0) // one.block * one.block
    if size <= one.block:
        return None
    return replace(one, completion=one.completion[:size], calls=[call for call in one.calls if call[0] < size])
