"""Training of the models that the taxi tables compare, each once."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from ptp_lab import (
    SkippedTokens,
    Student,
    distillation_loss,
    draft_window,
    infer_uniforms,
    inverse_loss,
    prepend_start_position,
    sample_window_starts,
    verifier_logits,
)
from saltus.core.picking import Coupling
from saltus.training.data.seeded_generator import seeded_generator
from saltus.training.data.uniform_intervals import uniform_intervals
from saltus.training.data.window_packing import UniformConditioning, gather_windows, pack_windows, query_uniforms
from saltus.training.loop.checkpoint import load_checkpoint
from saltus.training.loop.training_loop import Schedule, print_progress, train
from saltus.training.losses import DistillationSettings, cross_entropy
from taxi_data import Stream, chunks, held_out

STRIDE = 10  # between the beginnings of training chunks
FREE = ("steps", "teacher_steps", "test", "every")  # they may change between commands; the file name has the steps
FIRST = 8  # tokens of the first windows, where they grow
TEST_SEED = 1_000_003  # of the uniforms of the test


@dataclass(frozen=True)
class Scale:
    """Sizes. The paper has width 1536, 4 layers, 150,000 steps of 32 chunks."""

    steps: int = 4000
    teacher_steps: int = 2000
    batch: int = 32
    chunk: int = 100
    hidden: int = 128
    layers: int = 4
    heads: int = 4
    rate: float = 1e-3
    pool: int = 16_384  # texts of the teacher, used many times with new uniforms
    test: int = 4000  # texts of the test
    every: int = 200  # steps between checkpoints


@dataclass(frozen=True)
class Run:
    """A student of a distillation."""

    form: UniformConditioning
    loss: Literal["ce", "bce", "kl", "reverse-kl"]
    proposal: Literal["teacher", "student", "dataset"] = "teacher"
    kind: str = "bits"
    b: float = 1.0
    window: int = 16
    seed: int = 0
    order: Coupling = "probability"
    grow: float = 0.0  # fraction of the steps in which windows grow to their length, from FIRST tokens

    @property
    def name(self) -> str:
        """The name of its files."""
        values = {key: value for key, value in asdict(self).items() if key != "grow" or value}
        return "-".join(str(value).replace("+", "_") for value in values.values())

    def objective(self, progress: float) -> DistillationSettings:
        """The settings when this fraction of the steps is done. Windows grow by the same factor every step."""
        window = self.window
        if progress < self.grow:
            window = min(window, round(FIRST * (window / FIRST) ** (progress / self.grow)))
        return DistillationSettings(self.form, self.loss, window, self.b)


def rounded(value: Any) -> float:
    return round(float(value), 4)


@dataclass(eq=False)
class Laboratory:
    """A stream, and the models trained on it."""

    stream: Stream
    scale: Scale
    work: Path
    skipped: SkippedTokens = field(default_factory=SkippedTokens)

    def __post_init__(self) -> None:
        self.chunks = chunks(self.stream.train, 2 * self.scale.chunk, STRIDE)  # the second half: windows' last tokens
        self.held_out_texts = torch.from_numpy(held_out(self.stream, self.scale.chunk)[:, self.scale.chunk :].copy())
        self.pool, self.test, self.teacher = cache(self._pool), cache(self._test), cache(self._teacher)

    def student(self, seed: int, kind: str = "bits") -> Student:
        scale = self.scale
        return Student(
            self.stream.vocab,
            2 * scale.chunk,
            hidden=scale.hidden,
            layers=scale.layers,
            heads=scale.heads,
            embedding=kind,
            seed=seed,
        )

    def random_chunks(self, generator: np.random.Generator, length: int) -> Tensor:
        """A batch of chunks of the training stream."""
        chosen = generator.integers(len(self.chunks), size=self.scale.batch)
        return torch.from_numpy(self.chunks[chosen, :length].copy())

    def fit(self, name: str, module: Student, loss, steps: int) -> dict[str, Any]:
        """Train, continue, or load a model; returns its cost."""
        scale = self.scale
        schedule = Schedule(steps, scale.rate, checkpoint_steps=min(scale.every, steps))

        path = self.work / f"{name}-{steps}.pt"
        settings = {key: value for key, value in asdict(scale).items() if key not in FREE} | {"name": name}
        curve = train(module, loss, schedule, path, settings, print_progress)
        state = load_checkpoint(path)
        return {"seconds": round(state["seconds"], 1) if state else 0.0, "steps": steps, "loss": rounded(curve[-1])}

    def _teacher(self, seed: int) -> tuple[Student, dict[str, Any]]:
        """The autoregressive model, trained on chunks of the stream."""
        teacher = self.student(seed)

        def loss(step: int) -> Tensor:
            texts = self.random_chunks(seeded_generator(seed, "teacher", step), self.scale.chunk)
            return cross_entropy(teacher.next_token_logits(teacher.prepend_start_token(texts)[:, :-1]), texts).mean()

        training = self.fit(f"teacher-{seed}", teacher, loss, self.scale.teacher_steps)
        return teacher, training

    def _pool(self, window: int, seed: int, order: Coupling) -> tuple[Tensor, Tensor]:
        """Texts of the teacher, and their logits."""
        return self._teacher_texts(seeded_generator(seed, "pool").random((self.scale.pool, window)), seed, order)

    def _teacher_texts(self, uniforms: np.ndarray, seed: int, order: Coupling) -> tuple[Tensor, Tensor]:
        teacher = self.teacher(seed)[0]
        parts = [teacher.generate(part, order) for part in torch.from_numpy(uniforms).split(512)]
        return torch.cat([tokens for tokens, _ in parts]), torch.cat([distributions for _, distributions in parts])

    def _test(self, window: int, seed: int, order: Coupling) -> tuple[Tensor, Tensor, Tensor]:
        uniforms = seeded_generator(TEST_SEED + seed, "test").random((self.scale.test, window))
        return (*self._teacher_texts(uniforms, seed, order), torch.from_numpy(uniforms))

    def held_out(self, run: Run) -> tuple[Tensor, Tensor, Tensor]:
        """Texts of the teacher that no student was trained on, their logits and their uniforms."""
        return self.test(run.window, run.seed, run.order)

    def trained(self, run: Run) -> tuple[Student, dict[str, Any]]:
        """A student, initialized with the teacher's weights."""
        student = self.student(run.seed, run.kind)
        teacher = self.teacher(run.seed)[0]
        student.body.load_state_dict(teacher.body.state_dict())

        def loss(step: int) -> Tensor:
            generator = seeded_generator(run.seed, "distil", step)
            settings = run.objective(step / self.scale.steps)
            texts, distributions = self._proposed(run, student, teacher, generator)
            texts, distributions = texts[:, : settings.window], distributions[:, : settings.window]
            starts = torch.ones(len(texts), 1, dtype=torch.int64)
            intervals, distributions = prepend_start_position(
                uniform_intervals(distributions, texts, coupling=run.order), distributions
            )
            return distillation_loss(
                student,
                student.prepend_start_token(texts),
                intervals,
                starts,
                settings,
                generator,
                self.skipped,
                distributions,
            )

        return student, self.fit(f"{run.name}-of-{self.scale.teacher_steps}", student, loss, self.scale.steps)

    @torch.no_grad()
    def _proposed(
        self, run: Run, student: Student, teacher: Student, generator: np.random.Generator
    ) -> tuple[Tensor, Tensor]:
        """A batch of training texts, and the teacher's logits of them (PTP, §2.2.1, Training data)."""
        if run.proposal == "teacher":
            texts, distributions = self.pool(run.window, run.seed, run.order)
            chosen = torch.from_numpy(generator.integers(len(texts), size=self.scale.batch))
            return texts[chosen], distributions[chosen]
        if run.proposal == "dataset":
            texts = self.random_chunks(generator, run.window)
        else:
            uniforms = torch.from_numpy(generator.random((self.scale.batch, run.window)))
            start = torch.full((len(uniforms), 1), student.start_token)
            texts = draft_window(student, start, uniforms, run.form, run.order)
        return texts, teacher.next_token_logits(teacher.prepend_start_token(texts)[:, :-1])

    def marginals(self, run: Run) -> Tensor:
        """The marginals of each position, [window, vocab] logits: the teacher's distributions, averaged."""
        return self.pool(run.window, run.seed, run.order)[1].double().softmax(-1).mean(0).log()

    def inverse(self, run: Run) -> tuple[Student, dict[str, Any]]:
        """C-PTP from data alone, on the model's own uniforms (Alg. 3): as many windows as a chunk has room for."""
        student = self.student(run.seed, run.kind)
        windows = max(1, self.scale.chunk // run.window)

        def loss(step: int) -> Tensor:
            generator = seeded_generator(run.seed, "inverse", step)
            texts = student.prepend_start_token(self.random_chunks(generator, self.scale.chunk + run.window - 1))
            starts = sample_window_starts(len(texts), texts.shape[1], windows, run.window, generator)
            return inverse_loss(student, texts, starts, run.window, generator, self.skipped, coupling=run.order)

        name = f"inverse-{run.window}-{student.auxiliary.kind}-{run.seed}-{run.order}"
        return student, self.fit(name, student, loss, self.scale.teacher_steps)

    @torch.no_grad()
    def perplexity(self, teacher: Student) -> dict[str, Any]:
        """Perplexities of held-out chunks, token by token: of whole chunks, and of their second halves."""
        parts = [
            teacher.next_token_logits(teacher.prepend_start_token(part)[:, :-1])
            for part in self.held_out_texts.split(50)
        ]
        return self._perplexities(torch.cat(parts))

    @torch.no_grad()
    def own_perplexity(self, student: Student, run: Run) -> dict[str, Any]:
        """Perplexities of a categorical student: with one auxiliary at a time, and in windows that tile a chunk."""
        texts = student.prepend_start_token(self.held_out_texts)
        own = torch.cat([verifier_logits(student, part[:, :-1]) for part in texts.split(50)])
        count = self.scale.chunk // run.window
        starts = (1 + run.window * torch.arange(count)).expand(len(texts), -1)
        generator = seeded_generator(run.seed, "tiles")
        uniforms, _ = infer_uniforms(student, texts, starts, run.window, generator, coupling=run.order)
        distributions = student(pack_windows(texts, starts, query_uniforms(uniforms, "categorical")))
        tiled = cross_entropy(distributions, gather_windows(texts, starts, run.window))
        return self._perplexities(own) | {"perplexity in windows": rounded(math.exp(tiled.mean()))}

    def _perplexities(self, distributions: Tensor) -> dict[str, Any]:
        nats = cross_entropy(distributions, self.held_out_texts)
        half = self.scale.chunk // 2
        late = rounded(nats[:, half:].mean().exp())
        return {"perplexity": rounded(nats.mean().exp()), "perplexity of second halves": late, "of": nats.numel()}
