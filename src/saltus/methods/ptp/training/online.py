"""Train a drafter on texts as they are written: evaluate it on the latest ones before it learns from them."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from saltus.loading.model_identity import model_fingerprint
from saltus.methods.ptp.network import DrafterShape, DraftModel
from saltus.methods.ptp.training.drafter import DrafterTrainingTask
from saltus.models.output_layer import LogitScaling
from saltus.training.data.recent_texts import RecentText, RecentTexts, corpus_of
from saltus.training.data.window_dataset import WindowSettings
from saltus.training.loop.training_loop import Schedule, make_optimizers, optimizer_step
from saltus.training.time_slices import TimeSlices


@dataclass(frozen=True)
class LearningSettings:
    """How much a server's drafter learns from a text, and when it is evaluated."""

    evaluation_texts: int = 24  # the latest ones, on which the trained drafter is compared with the served one
    evaluation_windows: int = 8  # of each
    steps_between_evaluations: int = 12  # at least, while there is something to train on
    margin: float = 1.0  # standard errors by which the trained drafter must be better
    batch_texts: int = 4  # of a step
    windows: int = 12  # of each
    steps_per_text: int = 4  # at most, so that an idle server stops training
    rate: float = 5e-4
    warm_up: int = 5  # steps
    failed_evaluations: int = 4  # one after the other, after which training starts again from the served drafter
    max_bytes: int = 64 * 2**20  # of the texts that are kept


@dataclass(frozen=True, eq=False)
class DrafterWeights:
    """A drafter for another process: bfloat16 numbers, held as int16."""

    shape: DrafterShape
    tokens: Int[np.ndarray, "draft"]
    weights: Mapping[str, np.ndarray]


@dataclass(frozen=True)
class Evaluation:
    """Tokens a call on texts that neither drafter was trained on."""

    served: float
    trained: float
    passed: bool


@dataclass(frozen=True)
class LearningProgress:
    """What one piece of work did."""

    steps: int = 0
    evaluation: Evaluation | None = None
    drafter: DrafterWeights | None = None  # that passed the evaluation
    texts: int = 0  # that were trained on or evaluated, in all
    idle: bool = False  # there is nothing to do until more texts come
    unevaluated: int = 0  # texts that wait for the next evaluation


class TargetEmbeddings(nn.Module):
    """What training of a drafter uses of its target."""

    def __init__(self, embeddings: Tensor, unembedding: Tensor) -> None:
        super().__init__()
        self.embeddings = nn.Embedding.from_pretrained(embeddings)
        self.unembedding = nn.Embedding.from_pretrained(unembedding)

    device = property(lambda self: self.embeddings.weight.device)

    def get_input_embeddings(self) -> nn.Embedding:
        return self.embeddings

    def get_output_embeddings(self) -> nn.Embedding:
        return self.unembedding


@dataclass(eq=False)
class OnlineDrafterTraining:
    """A drafter in training beside the one that is served. Work comes in small pieces, by `advance`.

    New texts first wait in a pool. When it is full, both drafters are compared on it, and then its texts are trained
    on: no text is trained on before it was used to evaluate.
    """

    initial: DrafterWeights
    embeddings: Float[Tensor, "vocab hidden"]
    unembedding: Float[Tensor, "vocab hidden"]
    settings: LearningSettings = field(default_factory=LearningSettings)
    logit_scaling: LogitScaling = field(default_factory=LogitScaling)  # of the target
    time_slices: TimeSlices | None = None  # in which it works; None: all the time
    served: DraftModel = field(init=False)
    trained: DraftModel = field(init=False)
    steps: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self.target = TargetEmbeddings(self.embeddings, self.unembedding)
        self.fingerprint = model_fingerprint(self.target)
        self.pool: RecentTexts = RecentTexts(self.settings.max_bytes)
        self.kept: RecentTexts = RecentTexts(self.settings.max_bytes)
        self.token_counts = np.zeros(len(self.embeddings), dtype=np.int64)
        self.autocast = getattr(torch.cpu, "_is_avx512_bf16_supported", bool)()
        self.num_texts = self.steps_left = self.num_failed = 0
        self.served = self._model(self.initial)
        self._begin_again()
        self.work = self._work()

    def add(self, text: RecentText) -> None:
        """A text that was just written. Where training cannot keep up, it learns from some without an evaluation."""
        self.pool.add(text)
        self.num_texts += 1
        if len(self.pool) > 2 * self.settings.evaluation_texts:
            self._learn_from(self.pool.take_oldest())

    def advance(self) -> LearningProgress:
        """Do the next small piece of work: a step, or a part of an evaluation."""
        before = self.steps
        evaluation, drafter, idle = next(self.work)
        return LearningProgress(self.steps - before, evaluation, drafter, self.num_texts, idle, len(self.pool))

    def _work(self) -> Iterator[tuple[Evaluation | None, DrafterWeights | None, bool]]:
        while True:
            unevaluated = self.steps - self.steps_evaluated
            trains = self.task is not None and self.steps_left > 0
            enough = unevaluated >= self.settings.steps_between_evaluations or not trains
            if enough and len(self.pool) >= self.settings.evaluation_texts:
                if unevaluated:
                    yield from self._evaluate()
                while len(self.pool):
                    self._learn_from(self.pool.take_oldest())
                self._prepare_training()
            elif trains:
                self._step()
                yield None, None, False
            else:
                yield None, None, True

    def _model(self, given: DrafterWeights) -> DraftModel:
        tokens = torch.from_numpy(given.tokens)
        model = DraftModel(given.shape, tokens, self.embeddings, self.unembedding)
        weights = {name: torch.from_numpy(x).view(torch.bfloat16) for name, x in given.weights.items()}
        model.load_state_dict(weights, strict=False)
        if self.time_slices is not None:
            self.time_slices.add_pause_points(model)
        return model.float()

    def _begin_again(self) -> None:
        """Train from the served drafter on."""
        self.trained = _copy(self.served)
        self.schedule = Schedule(1, self.settings.rate, weight_decay=0.0)
        self.optimizers = make_optimizers(self.trained, self.schedule)
        self.first_step = self.steps_evaluated = self.steps
        self.num_failed = 0
        self.task: DrafterTrainingTask | None = None
        self._prepare_training()

    def _learn_from(self, text: RecentText) -> None:
        self.kept.add(text)
        np.add.at(self.token_counts, text.tokens, 1)
        self.steps_left += self.settings.steps_per_text

    def _prepare_training(self) -> None:
        if not len(self.kept):
            return
        self.trained.tokens = recent_vocabulary(self.trained.tokens, self.token_counts)
        head: Any = self.trained.llama.lm_head
        head.weight = nn.Parameter(self.unembedding[self.trained.tokens].float(), requires_grad=False)
        self.task = self._new_task(self.trained, [*self.kept], held_out=0)
        self.steps_left = min(self.steps_left, self.settings.steps_per_text * len(self.kept))

    def _new_task(self, model: DraftModel, texts: list[RecentText], held_out: int) -> DrafterTrainingTask:
        """A task on these texts, of which the last `held_out` are for evaluations."""
        settings, shape = self.settings, model.shape
        corpus = corpus_of(texts, shape.hidden_state_layers, self.fingerprint)
        windows = WindowSettings(settings.batch_texts, settings.windows, seed=self.steps)
        evaluated = np.arange(len(texts)) >= len(texts) - held_out
        task = DrafterTrainingTask(
            self.target, corpus, shape, len(model.tokens), windows, initial_module=model, held_out=evaluated,
            logit_scaling=self.logit_scaling,
        )  # fmt: skip
        task.autocast = self.autocast
        return task

    def _step(self) -> None:
        assert self.task is not None
        warm = min(1.0, (self.steps - self.first_step + 1) / self.settings.warm_up)
        self.trained.train()
        loss = self.task.loss(self.steps)
        if math.isfinite(float(loss.detach())):
            optimizer_step(self.trained, self.optimizers, loss, self.settings.rate * warm, self.schedule.max_grad_norm)
        self.steps += 1
        self.steps_left -= 1

    def _evaluate(self) -> Iterator[tuple[Evaluation | None, DrafterWeights | None, bool]]:
        """Compare both drafters on the latest texts; the trained one takes the place of the served one if it wins."""
        texts = [*self.pool][-self.settings.evaluation_texts :]
        evaluated = rounded_copy(self.trained)
        tokens_by_model: list[Tensor] = []
        for model in (self.served, evaluated):
            task = self._new_task(model.eval(), texts, len(texts))
            counts = []
            for greedy in (True, False):
                with torch.autocast("cpu", torch.bfloat16, enabled=self.autocast):
                    counts.append(task.window_tokens(greedy, self.settings.evaluation_windows))
                yield None, None, False
            tokens_by_model.append(torch.cat(counts).view(-1, self.settings.evaluation_windows).mean(1))  # by text
        served, trained = tokens_by_model
        if not len(served):  # texts that are too short for a window
            return
        difference = trained - served
        error = float(difference.std(correction=0)) / math.sqrt(len(difference))
        passed = float(difference.mean()) > self.settings.margin * error
        evaluation = Evaluation(float(served.mean()), float(trained.mean()), passed)
        self.steps_evaluated = self.steps
        if evaluation.passed:
            self.served, self.num_failed = evaluated, 0
            yield evaluation, drafter_weights(evaluated), False
            return
        self.num_failed += 1
        if self.num_failed >= self.settings.failed_evaluations:
            self._begin_again()
        yield evaluation, None, False


def drafter_weights(model: DraftModel) -> DrafterWeights:
    """A drafter's weights for another process, its rows of the target's unembedding left out."""
    weights = {
        name: tensor.detach().cpu().to(torch.bfloat16).view(torch.int16).numpy()
        for name, tensor in model.state_dict().items()
        if not name.endswith(("lm_head.weight", "embed_tokens.weight"))
    }
    return DrafterWeights(model.shape, model.tokens.cpu().numpy(), weights)


@torch.no_grad()
def rounded_copy(model: DraftModel) -> DraftModel:
    """A copy with the weights that the server will have, which are bfloat16."""
    made = _copy(model)
    for weight in made.parameters():
        weight.copy_(weight.bfloat16())
    return made


def _copy(model: DraftModel) -> DraftModel:
    """A copy that shares the target's embeddings."""
    return copy.deepcopy(model, {id(model.embeddings): model.embeddings})


def recent_vocabulary(tokens: Int[Tensor, "draft"], counts: Int[np.ndarray, "vocab"]) -> Int[Tensor, "draft"]:
    """The drafted tokens, where those that texts have had take the places of some that they have not had.

    The places of those with the highest ids: tokenizers that merge pairs give them to the rarest.
    """
    drafted = tokens.numpy()
    missing = np.setdiff1d(np.flatnonzero(counts), drafted)
    unused = drafted[counts[drafted] == 0]
    number = min(len(missing), len(unused))
    new = missing[np.argsort(-counts[missing], kind="stable")][:number]
    kept = np.setdiff1d(drafted, unused[len(unused) - number :])
    return torch.from_numpy(np.union1d(kept, new))


def serve_training(connection: Any, training: Mapping[str, Any], time_slices: TimeSlices) -> None:
    """The loop of a process that trains: it says "ready", gets texts, and answers "advance" by a LearningProgress.

    None ends it.
    """
    torch.set_num_threads(training["threads"])
    numbers = {name: torch.from_numpy(training[name]).view(torch.bfloat16) for name in ("embeddings", "unembedding")}
    running = OnlineDrafterTraining(
        training["initial"], settings=training["settings"], logit_scaling=training["logit_scaling"],
        time_slices=time_slices, **numbers,
    )  # fmt: skip
    time_slices.begin_waiting()
    connection.send("ready")
    for message in iter(connection.recv, None):
        if isinstance(message, RecentText):
            running.add(message)
        else:
            time_slices.end_waiting()
            progress = running.advance()
            time_slices.begin_waiting()
            connection.send(progress)
