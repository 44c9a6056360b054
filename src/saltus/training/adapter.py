"""Teach a gated adapter of any causal model to draft: many windows of queries behind one reading of a text (PTP)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from saltus.networks.adapters import load_adapter, save_adapter
from saltus.networks.gated import Adapter, Gating, new_adapter
from saltus.networks.trained_files import fingerprint
from saltus.training import losses
from saltus.training.course import examined
from saltus.training.distillation import Objective, compare, correct
from saltus.training.draws import draws
from saltus.training.edges import picks
from saltus.training.lessons import Corpus, Curriculum, Cut, Lessons
from saltus.training.packed_model import causal, prepared, said
from saltus.training.windows import Packed, given, pack

ROWS = 64  # laws of a vocabulary in float64 at a time
UNDRAFTED = -1  # in the place of a token that does not count


@dataclass(eq=False)
class AdapterCourse:
    """A `Course`: the adapter's weights are trained, on windows whose uniforms pick what the model wrote.

    A window is a group of queries as `core.riding.Rider` hangs it behind an accepted path. Its *first* query stands
    at the place of the token that the verifier itself supplies, and drafts nothing. The later ones read from it which
    token that is: it is told this token's uniform (O-PTP; in C-PTP the second query is). It is trained all the same,
    to say the token, so that it knows it. The second query brings the first draft, and the weights of the loss fall
    from there.

    The model is frozen, and read by our attention from now on. With a `teacher` it is a student, which learns to draft
    that model's texts; then the first query drafts too. `lessons.slots` is the longest context in tokens, and
    `objective.b` places the uniforms. `recompute` saves memory for time; `autocast` computes in bfloat16.
    """

    model: Any  # of Hugging Face
    corpus: Corpus
    gating: Gating = field(default_factory=Gating)
    objective: Objective = field(default_factory=Objective)
    lessons: Lessons = field(default_factory=lambda: Lessons(texts=2, windows=32))
    name: str = "its model"
    recompute: bool = False
    autocast: bool = False
    teacher: Any = None  # of Hugging Face, and of the same vocabulary; None: the model itself
    teacher_name: str = ""
    module: Adapter = field(init=False)
    curriculum: Curriculum = field(init=False)

    def __post_init__(self) -> None:
        if self.objective.window < 2:
            raise ValueError("window is 1, but a group's first query drafts nothing; take 2 or more")
        self.gating = replace(self.gating, window=self.objective.window)
        self.lessons = replace(self.lessons, placement=self.objective.b)
        self.curriculum = Curriculum(self.corpus, self.lessons, self.objective.window, True, self.has_laws)
        self.module = new_adapter(prepared(self.model), self.gating, self.lessons.seed)
        if self.teacher is not None:
            prepared(self.teacher)

    def begin(self, folder: Path) -> None:
        """Go on with an adapter. Errors: ValueError where its settings are others."""
        adapter = load_adapter(folder, self.model, fingerprint(self.model), self.name)
        if adapter.settings != self.gating:
            raise ValueError(f"the adapter in {folder} has other settings than the recipe; take the one it was made by")
        self.module.go_on_from(adapter)

    @property
    def _undrafted(self) -> int:
        """The first queries that draft nothing."""
        return int(self.teacher is None)

    @property
    def has_laws(self) -> bool:
        """Are tokens picked from the student's laws, and not its argmax?"""
        return self.objective.form != "one-hot"

    def loss(self, step: int) -> Float[Tensor, ""]:
        """The mean over the windows' tokens that count, later ones discounted."""
        cut = self.curriculum.lesson(step).to(self.model.device)
        packed, rows = self._packed(cut)
        with self._dropout(step), self._precision():
            logits = said(self.model, packed, rows[cut.counted], self.module, cut.temperatures, self.recompute)
        depths = torch.arange(self.objective.window, device=logits.device).expand(cut.counted.shape)[cut.counted]
        weights = self.lessons.discount ** (depths - self._undrafted).clamp_min(0)
        return (self._compared(logits, cut) * weights).sum() / weights.sum().clamp_min(1)

    def report(self) -> dict[str, float]:
        """Tokens per call on held-out texts, as `Rider` counts them: right drafts, and one of the verifier's own."""
        return examined(self.module, self._tokens_per_call)

    def save(self, folder: Path, card: Mapping[str, Any]) -> None:
        """A folder for `saltus.networks.adapters.load_adapter`."""
        made = {"form": self.objective.form, "window": self.objective.window}
        if self.teacher is not None:
            made["student_of"] = self.teacher_name
        save_adapter(self.module, folder, fingerprint(self.model), self.name, {**card, **made})

    def _packed(self, cut: Cut) -> tuple[Packed, Int[Tensor, "batch windows window"]]:
        """The windows in one forward, and where in the whole batch the row of each query is."""
        packed = pack(cut.tokens, cut.splits, given(cut.uniforms, self.objective.form))
        numbers = torch.arange(packed.tokens.numel(), device=cut.tokens.device)
        return packed, packed.by_window(numbers.view(packed.tokens.shape))

    def _compared(self, logits: Float[Tensor, "counted vocab"], cut: Cut) -> Float[Tensor, "counted"]:
        """The loss of each query that counts. At temperature 0 the teacher's law is one token: cross-entropy."""
        tokens, temperatures = cut.targets[cut.counted], self._temperatures(cut)[cut.counted]
        if self.has_laws:
            logits = _tempered(logits, temperatures)
        if self.objective.loss not in ("kl", "reverse-kl"):
            return compare(logits, tokens, None, self.objective.loss)
        laws = _tempered(self._teacher(cut), temperatures)
        return torch.where(
            temperatures == 0,
            losses.cross_entropy(logits, tokens),
            compare(logits, tokens, laws, self.objective.loss),
        )

    @torch.no_grad()
    def _teacher(self, cut: Cut) -> Float[Tensor, "counted vocab"]:
        """The teacher's logits for the tokens that count: those after the token before each."""
        batch, slots = cut.tokens.shape
        before = cut.splits[..., None] + torch.arange(-1, self.objective.window - 1, device=cut.splits.device)
        rows = torch.arange(batch, device=cut.splits.device)[:, None, None] * slots + before
        with self._precision():
            return said(self.model if self.teacher is None else self.teacher, causal(cut.tokens), rows[cut.counted])

    @torch.no_grad()
    def _tokens_per_call(self, greedy: bool) -> float:
        """NaN without such texts."""
        found = []
        for cut in self.curriculum.exam(greedy):
            cut = cut.to(self.model.device)
            right = torch.where(cut.counted, self._drafts(cut), UNDRAFTED)
            drafts = slice(self._undrafted, None)
            found.append(1 + correct(right[..., drafts].flatten(0, 1), cut.targets[..., drafts].flatten(0, 1)).double())
        return float(torch.cat(found).mean()) if found else math.nan

    def _drafts(self, cut: Cut) -> Int[Tensor, "batch windows window"]:
        """What each query says: the argmax (Eq. 5), or the pick of its token's uniform from its law (Eq. 7)."""
        packed, rows = self._packed(cut)
        with self._precision():
            logits = said(self.model, packed, rows.flatten(), self.module, cut.temperatures)
        said_likeliest = logits.argmax(-1).view(rows.shape)
        if not self.has_laws:
            return said_likeliest
        logits, uniforms = _tempered(logits, self._temperatures(cut).flatten()), cut.uniforms.flatten().nan_to_num()
        parts = zip(uniforms.split(ROWS), logits.split(ROWS), strict=True)
        picked = torch.cat([picks(*part) for part in parts]).view(rows.shape)
        return torch.where(self._temperatures(cut) == 0, said_likeliest, picked)

    def _temperatures(self, cut: Cut) -> Float[Tensor, "batch windows window"]:
        return cut.temperatures[..., None].expand(cut.counted.shape)

    def _precision(self) -> torch.autocast:
        return torch.autocast(self.model.device.type, torch.bfloat16, enabled=self.autocast)

    @contextmanager
    def _dropout(self, step: int) -> Iterator[None]:
        """Dropout has no randomness but the step's, and leaves that of others as it is."""
        if not self.gating.dropout:
            yield
            return
        device = self.model.device
        on_device = [torch.cuda.default_generators[device.index or 0]] if device.type == "cuda" else []
        with torch.random.fork_rng([device] if on_device else []):
            for generator in (torch.default_generator, *on_device):
                generator.manual_seed(int(draws(self.lessons.seed, "dropout", step).integers(2**62)))
            yield


def _tempered(logits: Float[Tensor, "rows vocab"], temperatures: Float[Tensor, "rows"]) -> Float[Tensor, "rows vocab"]:
    """At the temperatures that tokens are picked at; as they are where that is 0."""
    return logits / torch.where(temperatures == 0, 1.0, temperatures).to(logits.dtype)[:, None]
