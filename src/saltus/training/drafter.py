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

from saltus.networks.drafter import DraftModel, Shape
from saltus.networks.trained_files import fingerprint, load_drafter, save
from saltus.training.course import examined
from saltus.training.distillation import correct
from saltus.training.draws import draws
from saltus.training.lessons import Curriculum, Cut, Lessons
from saltus.training.states import States
from saltus.training.windows import pack

UNDRAFTED = -100  # in the place of a token that is not drafted, or not there


def new_drafter(shape: Shape, tokens: Tensor, target: Any, seed: int = 0) -> DraftModel:
    """An untrained drafter of these tokens for a Hugging Face model, in float32.

    GPT-2's starting values, from the seed alone; what tells of uniforms starts at zero. A slot starts as the target's
    last state, and the last norm as the target's: so all is said in the terms of the unembedding from the beginning.
    """
    embeddings, unembedding = (
        module.weight.detach().float() for module in (target.get_input_embeddings(), target.get_output_embeddings())
    )
    model = DraftModel(shape, tokens, embeddings, unembedding)
    generator, norm = draws(seed, "weights"), getattr(target.get_decoder(), "norm", None)
    with torch.no_grad():
        for name, weight in model.auxiliary.named_parameters():
            if name.startswith("map.0."):  # of a small network, whose last map is zero
                weight.copy_(torch.from_numpy(draws(seed, name).normal(0.0, 0.2, tuple(weight.shape))))
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


def frequent(states: States, count: int) -> Tensor:
    """The ids of the tokens that occur most often, in their order, and nothing that never occurs."""
    counts = torch.bincount(states.tokens)
    return counts.argsort(descending=True)[: min(count, int((counts > 0).sum()))].sort().values


def places(draft: Int[Tensor, "draft"], states: States) -> Int[Tensor, "vocab"]:
    """Where each token stands among those drafted."""
    found = torch.full((int(max(states.tokens.max(), draft.max())) + 1,), UNDRAFTED)
    found[draft] = torch.arange(len(draft))
    return found


def answers(
    module: DraftModel, states: States, cut: Cut
) -> tuple[Float[Tensor, "batch slots hidden"], Float[Tensor, "batch windows window hidden"]]:
    """The last states of the slots and of the queries; the unembedding reads both."""
    device = module.tokens.device
    cut, here = cut.to(device), cut.rows
    packed = pack(cut.tokens, cut.splits, cut.uniforms)
    features = states.features[here[:, : packed.context] - 1].to(device)
    slots = module.slots(features, packed.tokens[:, : packed.context])
    depths = torch.arange(packed.window, device=device).repeat_interleave(packed.windows).expand(len(slots), -1)
    last = slots.gather(1, (cut.splits - 1)[..., None].expand(-1, -1, slots.shape[-1]))
    told = packed.uniforms[:, packed.context :], cut.temperatures.repeat(1, packed.window)
    queries = module.queries(last.repeat(1, packed.window, 1), *told, depths)
    hidden = module(torch.cat([slots, queries], 1), packed.positions, packed.mask)
    return hidden[:, : packed.context], packed.by_window(hidden)


@dataclass(eq=False)
class DrafterCourse:
    """A `Course`: a drafter of the `vocabulary` most frequent tokens, on what its target has read.

    Errors: ValueError for states of another target or of other taps.
    """

    target: Any  # of Hugging Face
    states: States
    shape: Shape
    vocabulary: int = 8192
    lessons: Lessons = field(default_factory=Lessons)
    name: str = "its target"
    module: DraftModel = field(init=False)
    curriculum: Curriculum = field(init=False)
    places: Int[Tensor, "vocab"] = field(init=False)  # of tokens in the draft vocabulary

    def __post_init__(self) -> None:
        if self.states.target != fingerprint(self.target) or self.states.taps != self.shape.taps:
            raise ValueError(f"these are states of another model than {self.name}, or of other taps; collect them anew")
        self.curriculum = Curriculum(self.states, self.lessons, self.shape.window)
        draft = frequent(self.states, self.vocabulary)
        self._teach(new_drafter(self.shape, draft, self.target, self.lessons.seed))

    def begin(self, folder: Path) -> None:
        """Go on with a drafter, its own tokens included. Errors: ValueError where its shape is another."""
        drafter = load_drafter(folder, self.target, self.name)
        if drafter.shape != self.shape:
            raise ValueError(f"the drafter in {folder} has another shape than the recipe; take the one it was made by")
        self._teach(drafter.float())

    def _teach(self, module: DraftModel) -> None:
        self.places = places(module.tokens, self.states)
        self.module = module.to(self.target.device)

    def loss(self, step: int) -> Float[Tensor, ""]:
        """Cross-entropy of the tokens that the uniforms pick (PTP, Eq. 10), later queries of a window discounted.

        To that comes the cross-entropy of the law behind every slot with the target's own, which is known there.
        """
        cut = self.curriculum.lesson(step)
        tokens, counted = self._drafted(cut)
        depths = torch.arange(self.shape.window, device=tokens.device).expand(counted.shape)[counted]
        weights = self.lessons.discount**depths
        slots, queries = answers(self.module, self.states, cut)
        losses = F.cross_entropy(self._logits(queries[counted]), tokens[counted], reduction="none")
        return (losses * weights).sum() / weights.sum() + self.lessons.laws * self._law_loss(cut, slots)

    def report(self) -> dict[str, float]:
        """Tokens per call on held-out texts: the leading right drafts, and the target's own token."""
        return examined(self.module, self._tokens_per_call)

    def save(self, folder: Path, card: Mapping[str, Any]) -> None:
        """A folder for `saltus.networks.trained_files.load_drafter`."""
        save("drafter", self.module, folder, self.name, fingerprint(self.target), card)

    def _drafted(self, cut: Cut) -> tuple[Int[Tensor, "batch windows window"], Tensor]:
        """The targets as places in the draft vocabulary, and which of them count."""
        tokens = self.places[cut.targets]
        counted = cut.counted & (tokens >= 0)
        return tokens.to(self.target.device), counted.to(self.target.device)

    def _logits(self, states: Float[Tensor, "rows hidden"]) -> Float[Tensor, "rows draft"]:
        head = self.module.llama.lm_head
        return head(states.to(head.weight.dtype)).float()

    def _law_loss(self, cut: Cut, slots: Float[Tensor, "batch slots hidden"]) -> Float[Tensor, ""]:
        """Over all slots that a token of their text follows; laws are over the drafted tokens, at temperature 1."""
        rows = cut.rows[:, : slots.shape[1] + 1]
        inside = rows[:, 1:] > rows[:, :-1]  # behind its end a text's last row is repeated
        here = rows[:, :-1][inside]
        after = self.states.features[here][..., -self.shape.hidden :].to(slots.device)
        with torch.no_grad():
            laws = self._logits(after).softmax(-1)
        return F.cross_entropy(self._logits(slots[:, : inside.shape[1]][inside.to(slots.device)]), laws)

    @torch.inference_mode()
    def _tokens_per_call(self, greedy: bool) -> float:
        """NaN without such texts."""
        found = []
        for cut in self.curriculum.exam(greedy):
            tokens, counted = self._drafted(cut)
            said = self._logits(answers(self.module, self.states, cut)[1].flatten(0, -2)).argmax(-1).view(tokens.shape)
            right = torch.where(counted, said, UNDRAFTED - 1)
            found.append(1 + correct(right.flatten(0, 1), tokens.flatten(0, 1)).double())
        return float(torch.cat(found).mean()) if found else math.nan
