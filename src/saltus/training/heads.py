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

from saltus.networks.circuits import Reader
from saltus.networks.heads import HeadModel, HeadShape, Parameters, new_heads
from saltus.networks.slots import tapped
from saltus.networks.trained_files import fingerprint, load_heads, save
from saltus.training.course import examined
from saltus.training.distillation import correct
from saltus.training.drafter import UNDRAFTED, frequent, places
from saltus.training.draws import draws
from saltus.training.lessons import Curriculum, Cut, Lessons
from saltus.training.spoken import spoken
from saltus.training.states import States

ONWARD = (("cp", "hmm"), ("cp", "btree"))  # from circuits with components to richer ones


@dataclass(eq=False)
class HeadsCourse:
    """A `Course`: heads for the `vocabulary` most frequent tokens, on what their target has read.

    A window's tokens are counted up to the first that is not drafted, or to the end of the text; those behind are
    marginalised out, which for a circuit means leaving them away. Errors: ValueError for states of another target.
    """

    target: Any  # of Hugging Face
    states: States
    shape: HeadShape
    vocabulary: int = 8192
    lessons: Lessons = field(default_factory=Lessons)
    name: str = "its target"
    module: HeadModel = field(init=False)
    curriculum: Curriculum = field(init=False)
    places: Int[Tensor, "vocab"] = field(init=False)  # of tokens among those drafted

    def __post_init__(self) -> None:
        if self.states.target != fingerprint(self.target):
            raise ValueError(f"these are states of another model than {self.name}; collect them anew")
        if missing := set(self.shape.taps) - set(self.states.taps):
            raise ValueError(f"these states are without those after layer {min(missing)}; collect them anew")
        self.target.requires_grad_(False)
        self.curriculum = Curriculum(self.states, self.lessons, self.shape.window)
        tokens = frequent(self.states, self.vocabulary)
        self._teach(new_heads(self.shape, tokens, self.target, draws(self.lessons.seed, "weights")))

    def begin(self, folder: Path) -> None:
        """Go on with heads, their own tokens included; richer circuits go on with the law that poorer ones had.

        Any goes on from FF, and HMM and BTree from CP, nearly (see `new_heads`); adapted layers may come
        to them. Errors: ValueError where shapes do not fit.
        """
        heads = load_heads(folder, self.target, self.name).float()
        old, new = replace(heads.shape, stay=self.shape.stay), self.shape
        if not old.layers:
            old = replace(old, layers=new.layers, lora=new.lora, taps=new.taps)
        if old.circuit == "ff":
            kept = ("window", "told", "own", "layers", "lora")
            fits = all(getattr(old, name) == getattr(new, name) for name in kept)
        else:
            alike = replace(old, circuit=new.circuit) == new
            fits = alike and (old == new or (old.circuit, new.circuit) in ONWARD)
        if not fits:
            raise ValueError(f"the recipe's heads cannot go on from {folder}, made as {old}; take what made them")
        module = new_heads(new, heads.tokens, self.target, draws(self.lessons.seed, "weights"))
        with torch.no_grad():
            for name, weight in heads.state_dict().items():
                own = module.state_dict()[name]
                if own.shape == weight.shape or name == "own":  # every component begins with the only one's
                    own.copy_(weight)
                elif old.circuit == "cp":  # sums, the start's first, which is all that CP has
                    own[: len(weight)] = weight
        self._teach(module)

    def _teach(self, module: HeadModel) -> None:
        self.places = places(module.tokens, self.states)
        self.module = module.to(self.target.device)

    def loss(self, step: int) -> Float[Tensor, ""]:
        """The mean of −log q(token | those before it in its window) over what counts, discounted (MtPC, Eq. 4).

        To that comes, by `lessons.laws`, the cross-entropy of each such law with the target's own there.
        """
        cut = self.curriculum.lesson(step)
        tokens, counted = self._drafted(cut)
        depths = torch.arange(counted.shape[-1], device=counted.device)
        weights = self.lessons.discount**depths * (counted & (depths < self.shape.drafts))
        losses = torch.zeros_like(weights)
        if self.lessons.laws:
            for place, law in enumerate(self._laws(cut, tokens)):
                own = tokens[..., place].clamp_min(0)
                losses[..., place] = -law.gather(-1, own[..., None])[..., 0]
                losses[..., place] -= self.lessons.laws * (self._teacher(cut, place) * law).sum(-1)
        else:
            found, reader, begun = self._begun(cut)
            for place in range(self.shape.drafts):
                leaf = spoken(self.module, found, begun + place, tokens[:, place].clamp_min(0))
                losses[..., place] = -(reader.expected + leaf).logsumexp(-1)
                reader.read(leaf)
        return (losses * weights).sum() / weights.sum().clamp_min(1)

    def report(self) -> dict[str, float]:
        """Tokens per call on held-out texts: the leading right drafts, and the target's own token."""
        return examined(self.module, self._tokens_per_call)

    def save(self, folder: Path, card: Mapping[str, Any]) -> None:
        """A folder for `saltus.networks.trained_files.load_heads`."""
        save("heads", self.module, folder, self.name, fingerprint(self.target), card)

    def _drafted(self, cut: Cut) -> tuple[Int[Tensor, "windows window"], Bool[Tensor, "windows window"]]:
        """The windows' tokens as places among those drafted, and which of them count."""
        tokens = self.places[cut.targets].flatten(0, 1)
        counted = (cut.counted.flatten(0, 1) & (tokens >= 0)).to(torch.uint8).cummin(-1).values.bool()
        return tokens.to(self.target.device), counted.to(self.target.device)

    def _begun(self, cut: Cut) -> tuple[Parameters, Reader[Tensor], int]:
        """What the heads say of the windows, a reader of them, and at which position their tokens begin."""
        here = cut.rows.gather(1, cut.splits - 1).flatten()  # of the last token before each window
        found = self.module(self._read(cut, here), self.states.tokens[here].to(self.target.device))
        reader = Reader(self.shape.structure, found.start, found.steps)
        if self.shape.told:
            return found, reader, 0
        first = self.places[self.states.tokens[here]].to(self.target.device)  # the text's last token, and known
        leaf = spoken(self.module, found, 0, first.clamp_min(0))
        reader.read(torch.where(first[:, None] >= 0, leaf, 0.0))
        return found, reader, 1

    def _laws(self, cut: Cut, tokens: Int[Tensor, "windows window"]) -> Iterator[Float[Tensor, "windows draft"]]:
        """The log-law of each place of the windows, given the tokens before it, one by one."""
        found, reader, begun = self._begun(cut)
        for place in range(self.shape.drafts):
            laws = self.module.laws(found, begun + place)
            yield (reader.expected[..., None] + laws).logsumexp(-2)
            if place + 1 < self.shape.drafts:
                own = tokens[:, place].clamp_min(0)[:, None, None].expand(-1, laws.shape[1], 1)
                reader.read(laws.gather(-1, own)[..., 0])

    def _read(self, cut: Cut, here: Int[Tensor, "windows"]) -> Float[Tensor, "windows hidden"]:
        """The states before each window's last known token, as adapted layers see the text where there are some."""
        device, upper = self.target.device, self.module.upper
        if upper is None:
            return self.states.features[here - 1][..., -self.shape.hidden :].to(device)
        below = tapped(self.states.features[cut.rows - 1], self.states.taps, self.shape.taps)
        read = upper(below.to(device, upper.low[0].down.dtype))
        return read.gather(1, (cut.splits - 1)[..., None].expand(-1, -1, read.shape[-1]).to(device)).flatten(0, 1)

    @torch.no_grad()
    def _teacher(self, cut: Cut, place: int) -> Float[Tensor, "windows draft"]:
        """The target's own law of a window's token, among those drafted; of none behind its text's end that counts."""
        last = cut.rows.gather(1, cut.splits - 1).flatten() + place
        states = self.states.features[last.clamp_max(len(self.states.tokens) - 1)][..., -self.shape.hidden :]
        unembedding = self.module.unembedding
        return (states.to(unembedding.device, unembedding.dtype) @ unembedding.T).float().softmax(-1)

    @torch.inference_mode()
    def _tokens_per_call(self, greedy: bool) -> float:
        """NaN without such texts."""
        found = []
        for cut in self.curriculum.exam(greedy):
            tokens, counted = self._drafted(cut)
            said = torch.stack([law.argmax(-1) for law in self._laws(cut, tokens)], -1)
            right = torch.where(counted[:, : said.shape[1]], said, UNDRAFTED - 1)
            found.append(1 + correct(right, tokens[:, : said.shape[1]]).double())
        return float(torch.cat(found).mean()) if found else math.nan
