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

from saltus.networks.adapters.gated_lora import Adapter, GatedLoraSettings, new_adapter
from saltus.networks.loading.adapter_files import load_adapter, save_adapter
from saltus.networks.loading.drafter_files import model_fingerprint
from saltus.training.data.packed_forward import pack_causal, packed_logits, prepare_model
from saltus.training.data.seeded_generator import seeded_generator
from saltus.training.data.uniform_intervals import pick_tokens
from saltus.training.data.window_dataset import Batch, Corpus, WindowDataset, WindowSettings
from saltus.training.data.window_packing import PackedBatch, pack_windows, query_uniforms
from saltus.training.tasks import losses
from saltus.training.tasks.distillation import Objective, num_correct, token_loss
from saltus.training.tasks.training_task import evaluate_greedy_and_sampled

ROWS_PER_CHUNK = 64  # laws of a vocabulary in float64 at a time
IGNORED_TOKEN = -1  # in the place of a token that does not count


@dataclass(eq=False)
class AdapterTrainingTask:
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
    gating: GatedLoraSettings = field(default_factory=GatedLoraSettings)
    objective: Objective = field(default_factory=Objective)
    window_settings: WindowSettings = field(default_factory=lambda: WindowSettings(texts=2, windows=32))
    name: str = "its model"
    recompute: bool = False
    autocast: bool = False
    teacher: Any = None  # of Hugging Face, and of the same vocabulary; None: the model itself
    teacher_name: str = ""
    module: Adapter = field(init=False)
    window_dataset: WindowDataset = field(init=False)

    def __post_init__(self) -> None:
        if self.objective.window < 2:
            raise ValueError("window is 1, but a group's first query drafts nothing; take 2 or more")
        self.gating = replace(self.gating, window=self.objective.window)
        self.window_settings = replace(self.window_settings, placement=self.objective.beta)
        self.window_dataset = WindowDataset(
            self.corpus, self.window_settings, self.objective.window, True, self.predicts_distributions
        )
        self.module = new_adapter(prepare_model(self.model), self.gating, self.window_settings.seed)
        if self.teacher is not None:
            prepare_model(self.teacher)

    def initialize_from(self, folder: Path) -> None:
        """Go on with an adapter. Errors: ValueError where its settings are others."""
        adapter = load_adapter(folder, self.model, model_fingerprint(self.model), self.name)
        if adapter.settings != self.gating:
            raise ValueError(f"the adapter in {folder} has other settings than the recipe; take the one it was made by")
        self.module.copy_weights_from(adapter)

    @property
    def _num_undrafted_queries(self) -> int:
        """The first queries that draft nothing."""
        return int(self.teacher is None)

    @property
    def predicts_distributions(self) -> bool:
        """Are tokens picked from the student's laws, and not its argmax?"""
        return self.objective.form != "one-hot"

    def loss(self, step: int) -> Float[Tensor, ""]:
        """The mean over the windows' tokens that count, later ones discounted."""
        cut = self.window_dataset.training_batch(step).to(self.model.device)
        packed, rows = self._pack(cut)
        with self._dropout(step), self._autocast():
            logits = packed_logits(
                self.model, packed, rows[cut.loss_mask], self.module, cut.temperatures, self.recompute
            )
        depths = torch.arange(self.objective.window, device=logits.device).expand(cut.loss_mask.shape)[cut.loss_mask]
        weights = self.window_settings.discount ** (depths - self._num_undrafted_queries).clamp_min(0)
        return (self._token_losses(logits, cut) * weights).sum() / weights.sum().clamp_min(1)

    def evaluate(self) -> dict[str, float]:
        """Tokens per call on held-out texts, as `Rider` counts them: right drafts, and one of the verifier's own."""
        return evaluate_greedy_and_sampled(self.module, self._tokens_per_call)

    def save(self, folder: Path, card: Mapping[str, Any]) -> None:
        """A folder for `saltus.networks.loading.adapter_files.load_adapter`."""
        made = {"form": self.objective.form, "window": self.objective.window}
        if self.teacher is not None:
            made["student_of"] = self.teacher_name
        save_adapter(self.module, folder, model_fingerprint(self.model), self.name, {**card, **made})

    def _pack(self, batch: Batch) -> tuple[PackedBatch, Int[Tensor, "batch windows window"]]:
        """The windows in one forward, and where in the whole batch the row of each query is."""
        packed = pack_windows(batch.tokens, batch.window_starts, query_uniforms(batch.uniforms, self.objective.form))
        numbers = torch.arange(packed.tokens.numel(), device=batch.tokens.device)
        return packed, packed.queries_by_window(numbers.view(packed.tokens.shape))

    def _token_losses(self, logits: Float[Tensor, "counted vocab"], batch: Batch) -> Float[Tensor, "counted"]:
        """The loss of each query that counts. At temperature 0 the teacher's law is one token: cross-entropy."""
        tokens, temperatures = batch.targets[batch.loss_mask], self._query_temperatures(batch)[batch.loss_mask]
        if self.predicts_distributions:
            logits = _scale_by_temperature(logits, temperatures)
        if self.objective.loss not in ("kl", "reverse-kl"):
            return token_loss(logits, tokens, None, self.objective.loss)
        distributions = _scale_by_temperature(self._teacher_logits(batch), temperatures)
        return torch.where(
            temperatures == 0,
            losses.cross_entropy(logits, tokens),
            token_loss(logits, tokens, distributions, self.objective.loss),
        )

    @torch.no_grad()
    def _teacher_logits(self, cut: Batch) -> Float[Tensor, "counted vocab"]:
        """The teacher's logits for the tokens that count: those after the token before each."""
        batch, slots = cut.tokens.shape
        before = cut.window_starts[..., None] + torch.arange(
            -1, self.objective.window - 1, device=cut.window_starts.device
        )
        rows = torch.arange(batch, device=cut.window_starts.device)[:, None, None] * slots + before
        with self._autocast():
            return packed_logits(
                self.model if self.teacher is None else self.teacher, pack_causal(cut.tokens), rows[cut.loss_mask]
            )

    @torch.no_grad()
    def _tokens_per_call(self, greedy: bool) -> float:
        """NaN without such texts."""
        found = []
        for cut in self.window_dataset.validation_batches(greedy):
            cut = cut.to(self.model.device)
            right = torch.where(cut.loss_mask, self._drafted_tokens(cut), IGNORED_TOKEN)
            drafts = slice(self._num_undrafted_queries, None)
            found.append(
                1 + num_correct(right[..., drafts].flatten(0, 1), cut.targets[..., drafts].flatten(0, 1)).double()
            )
        return float(torch.cat(found).mean()) if found else math.nan

    def _drafted_tokens(self, batch: Batch) -> Int[Tensor, "batch windows window"]:
        """What each query says: the argmax (Eq. 5), or the pick of its token's uniform from its law (Eq. 7)."""
        packed, rows = self._pack(batch)
        with self._autocast():
            logits = packed_logits(self.model, packed, rows.flatten(), self.module, batch.temperatures)
        said_likeliest = logits.argmax(-1).view(rows.shape)
        if not self.predicts_distributions:
            return said_likeliest
        logits, uniforms = (
            _scale_by_temperature(logits, self._query_temperatures(batch).flatten()),
            batch.uniforms.flatten().nan_to_num(),
        )
        parts = zip(uniforms.split(ROWS_PER_CHUNK), logits.split(ROWS_PER_CHUNK), strict=True)
        picked = torch.cat([pick_tokens(*part) for part in parts]).view(rows.shape)
        return torch.where(self._query_temperatures(batch) == 0, said_likeliest, picked)

    def _query_temperatures(self, batch: Batch) -> Float[Tensor, "batch windows window"]:
        return batch.temperatures[..., None].expand(batch.loss_mask.shape)

    def _autocast(self) -> torch.autocast:
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
                generator.manual_seed(int(seeded_generator(self.window_settings.seed, "dropout", step).integers(2**62)))
            yield


def _scale_by_temperature(
    logits: Float[Tensor, "rows vocab"], temperatures: Float[Tensor, "rows"]
) -> Float[Tensor, "rows vocab"]:
    """At the temperatures that tokens are picked at; as they are where that is 0."""
    return logits / torch.where(temperatures == 0, 1.0, temperatures).to(logits.dtype)[:, None]
