"""Teach a drafter on cached states: many windows of queries behind one reading of a text, in one packed forward."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from saltus.core.noise import Noise
from saltus.networks.drafter import DraftModel, Shape
from saltus.training.distillation import correct
from saltus.training.draws import draws
from saltus.training.edges import Edges, place
from saltus.training.states import States
from saltus.training.windows import Packed, followed, inside, pack

UNDRAFTED = -100  # in the place of a token that is not drafted, or not there


def new_drafter(shape: Shape, tokens: Tensor, target: Any, seed: int = 0) -> DraftModel:
    """An untrained drafter of these tokens for a Hugging Face model, in float32; its last norm starts as the target's.

    GPT-2's starting values, from the seed alone; what tells of uniforms starts at zero.
    """
    embeddings, unembedding = (
        module.weight.detach().float() for module in (target.get_input_embeddings(), target.get_output_embeddings())
    )
    model = DraftModel(shape, tokens, embeddings, unembedding)
    generator, norm = draws(seed, "weights"), getattr(target.get_decoder(), "norm", None)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 2 and weight.requires_grad and not name.startswith("auxiliary."):
                inner = name.endswith(("o_proj.weight", "down_proj.weight"))
                scale = 0.02 / math.sqrt(2 * shape.layers) if inner else 0.02
                weight.copy_(torch.from_numpy(generator.normal(0.0, scale, tuple(weight.shape))))
        if norm is not None:
            model.llama.model.norm.weight.copy_(norm.weight)
    return model


@dataclass(frozen=True)
class Lessons:
    """What a drafter is taught."""

    texts: int = 6  # of a batch
    windows: int = 60  # of a text
    discount: float = 0.85  # weight of a query relative to the one before it: it counts only if that is right
    placement: float = 1.0  # b of Beta(b, b): where u lies between its edges (PTP, App. D)
    greedy: float = 0.7  # share of windows at temperature 0, of texts that were written so
    slots: int = 384  # of a text at most; its end is kept
    held_out: float = 0.04  # share of the texts
    seed: int = 0


@dataclass(frozen=True, eq=False)
class Batch:
    """Windows of some texts, and what their queries should say."""

    packed: Packed
    features: Tensor  # [batch, slots, states]: before each slot's token
    splits: Tensor  # [batch, windows]
    temperatures: Tensor  # [batch, windows]; 0 is greedy
    tokens: Tensor  # [batch, windows, window], as places in the draft vocabulary
    counted: Tensor  # [batch, windows, window]: do they count?


@dataclass(eq=False)
class School:
    """Cached states, and the batches that are cut from them: functions of the seed and their number."""

    states: States
    draft: Tensor  # ids of the tokens that are drafted
    window: int
    lessons: Lessons = field(default_factory=Lessons)

    def __post_init__(self) -> None:
        self.place = torch.full((int(max(self.states.tokens.max(), self.draft.max())) + 1,), UNDRAFTED)
        self.place[self.draft] = torch.arange(len(self.draft))
        texts = self.states.texts[self.states.texts[:, 2] > self.states.texts[:, 1] + 1]
        order = np.argsort(Noise(self.lessons.seed).at("held out", np.arange(len(texts))))
        border = max(1, math.ceil(self.lessons.held_out * len(texts)))
        self.held_out, own = texts[np.sort(order[:border])], texts[np.sort(order[border:])]
        self.texts = own[np.argsort(own[:, 2], kind="stable")]  # a batch holds texts of like length

    def batch(self, number: int) -> Batch:
        """The batch of a training step."""
        generator = draws(self.lessons.seed, "batch", number)
        count = min(self.lessons.texts, len(self.texts))
        first = int(generator.integers(len(self.texts) - count + 1))
        return self.cut(self.texts[first : first + count], generator, self.lessons.windows, self.lessons.greedy)

    def cut(self, texts: np.ndarray, generator: np.random.Generator, windows: int, greedy: float) -> Batch:
        """Windows at random places of texts' completions, `greedy` of them at temperature 0 if they were written so."""
        begins, prompts, lengths, written = texts.T
        firsts = np.maximum(1, lengths - self.lessons.slots)  # what stands first has no state before it
        low = np.maximum(prompts, firsts + 1)
        splits = low[:, None] + (generator.random((len(texts), windows)) * (lengths - low)[:, None]).astype(np.int64)
        slots = int((lengths - firsts).max())
        here = np.minimum(firsts[:, None] + np.arange(slots), lengths[:, None] - 1)
        rows = torch.from_numpy(begins[:, None] + here)
        tokens = self.states.tokens[rows]
        own = torch.from_numpy(splits - firsts[:, None])  # slots before each window
        padded = torch.cat([rows, rows[:, -1:].expand(-1, self.window)], 1)
        asked = inside(padded, own, self.window)
        known = own[..., None] + torch.arange(self.window) < torch.from_numpy(lengths - firsts)[:, None, None]
        which = torch.from_numpy(generator.integers(len(self.states.temperatures), size=splits.shape))
        found = self.states.edges[which[..., None], asked]
        uniforms, holds = place(Edges(found[..., 0], found[..., 1]), generator, self.lessons.placement)
        cold = torch.from_numpy((generator.random(splits.shape) < greedy) & (written == 0)[:, None])
        temperatures = torch.where(cold, 0.0, torch.tensor(self.states.temperatures, dtype=torch.float64)[which])
        uniforms = torch.where(cold[..., None], torch.nan, uniforms)
        places = self.place[self.states.tokens[asked]]
        counted = followed(known & (holds | cold[..., None])) & (places >= 0)
        packed = pack(tokens, own, uniforms)
        features = self.states.features[rows[:, : packed.context] - 1]
        return Batch(packed, features, own, temperatures, places, counted)

    def exam(self, greedy: bool, windows: int = 8, texts: int = 8) -> Iterator[Batch]:
        """Windows of held-out texts, those written greedily, or those that were sampled; always the same."""
        chosen = self.held_out[(self.held_out[:, 3] == 0) == greedy]
        for number in range(0, len(chosen), texts):
            yield self.cut(chosen[number : number + texts], draws(1, "exam", number), windows, float(greedy))


def answers(model: DraftModel, batch: Batch) -> Tensor:
    """The last states of all queries, [batch, windows, window, hidden]; the unembedding reads them."""
    packed, windows = batch.packed, batch.packed.windows
    slots = model.slots(batch.features, packed.tokens[:, : packed.context])
    depths = torch.arange(packed.window, device=slots.device).repeat_interleave(windows)
    last = slots.gather(1, (batch.splits - 1)[..., None].expand(-1, -1, slots.shape[-1]))
    told = packed.uniforms[:, packed.context :], batch.temperatures.repeat(1, packed.window)
    queries = model.queries(last.repeat(1, packed.window, 1), *told, depths)
    return packed.by_window(model(torch.cat([slots, queries], 1), packed.positions, packed.mask))


def loss(model: DraftModel, batch: Batch, discount: float) -> Tensor:
    """Cross-entropy of the tokens that the uniforms pick (PTP, Eq. 10), later queries of a window discounted."""
    depth = torch.arange(batch.packed.window, device=batch.tokens.device).expand(batch.counted.shape)[batch.counted]
    weights = discount**depth
    logits = model.llama.lm_head(answers(model, batch)[batch.counted])
    losses = F.cross_entropy(logits.float(), batch.tokens[batch.counted], reduction="none")
    return (losses * weights).sum() / weights.sum()


@torch.inference_mode()
def tokens_per_call(model: DraftModel, exam: Iterator[Batch]) -> float:
    """Of chains on held-out texts: the leading right drafts, and the target's own token. NaN without texts."""
    found = []
    for batch in exam:
        said = model.llama.lm_head(answers(model, batch).flatten(0, -2)).argmax(-1).view(batch.tokens.shape)
        right = torch.where(batch.counted, said, UNDRAFTED - 1)
        found.append(1 + correct(right.flatten(0, 1), batch.tokens.flatten(0, 1)).double())
    return float(torch.cat(found).mean()) if found else math.nan


def report(model: DraftModel, school: School) -> dict[str, float]:
    """Held-out tokens per call, greedy and sampled."""
    model.eval()
    found = {"greedy": tokens_per_call(model, school.exam(True)), "sampled": tokens_per_call(model, school.exam(False))}
    model.train()
    return found


def frequent(states: States, count: int) -> Tensor:
    """The ids of the tokens that occur most often, in their order, and nothing that never occurs."""
    counts = torch.bincount(states.tokens)
    return counts.argsort(descending=True)[: min(count, int((counts > 0).sum()))].sort().values


def objective(model: DraftModel, school: School) -> Callable[[int], Tensor]:
    """The loss of a step, for `training.loop.train`."""
    return lambda step: loss(model, school.batch(step), school.lessons.discount)
