"""Training of a gated adapter of a causal model: many windows of queries after one context (PTP)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from saltus.methods.ptp.training.own_uniforms import find_own_uniforms
from saltus.methods.ptp.training.student_windows import choose_windows, window_logits, with_student_windows
from saltus.methods.shared.adapter_files import load_initial_adapter, save_adapter
from saltus.models.gated_lora import Adapter, EmbeddingInit, GatedLoraSettings, new_adapter
from saltus.training import losses
from saltus.training.data.packed_forward import pack_causal, packed_logits, prepare_model, query_logits
from saltus.training.data.seeded_generator import ShareOfDraws, seeded_generator
from saltus.training.data.uniform_intervals import Truncation, pick_tokens
from saltus.training.data.window_dataset import Batch, Corpus, WindowDataset, WindowSettings
from saltus.training.data.window_packing import PackedBatch, pack_windows, query_uniforms
from saltus.training.losses import DistillationSettings, token_loss
from saltus.training.training_task import WindowTrainingTask

FIRST_WINDOW = 2  # queries of the first windows, where they grow


@dataclass(eq=False)
class AdapterTrainingTask(WindowTrainingTask):
    """An adapter, on windows whose uniforms pick the tokens that the model wrote.

    At decoding `FusedPtpDrafter` appends a window of queries to an accepted path. The *first* query predicts the token
    that the verifier itself produces, so it drafts nothing. It is trained all the same, so that later queries can
    attend to it: it is conditioned on this token's uniform (O-PTP; in C-PTP the second query is). The second query
    makes the first draft, and the loss is discounted from there.

    The model is frozen and uses our attention from now on. With a `teacher` it is a student model that learns to
    draft the teacher's texts; then the first query makes a draft too. With `inverse` the uniforms are those under which
    the adapter itself writes the texts, so that it learns the texts' own distribution, without a teacher (PTP, Alg. 3
    and Eq. 13); the target's intervals serve to evaluate it. In the first `growth_steps` steps windows have fewer
    queries. The recipe's `max_length` is the longest context, in tokens. `recompute` saves memory for time; `autocast`
    computes in bfloat16.
    """

    model: Any  # of Hugging Face
    corpus: Corpus
    gating: GatedLoraSettings = field(default_factory=GatedLoraSettings)
    distillation: DistillationSettings = field(default_factory=DistillationSettings)
    window_settings: WindowSettings = field(default_factory=lambda: WindowSettings(batch_size=2, windows_per_text=32))
    name: str = "its model"
    recompute: bool = False
    autocast: bool = False
    teacher: Any = None  # of Hugging Face, with the same vocabulary; None: the model itself
    teacher_name: str = ""
    inverse: bool = False
    student_windows: float = 0.0  # share of the sampled windows whose tokens the adapter drafts
    truncation: Truncation | None = None  # of the teacher's distributions for these
    embedding_init: EmbeddingInit = "zeros"
    growth_steps: int = 0  # in which windows grow to their length
    module: Adapter = field(init=False)
    window_dataset: WindowDataset = field(init=False)

    def __post_init__(self) -> None:
        if self.distillation.window < 2:
            raise ValueError("window is 1, but a group's first query drafts nothing; take 2 or more")
        self.gating = replace(self.gating, window=self.distillation.window)
        self.window_settings = replace(self.window_settings, uniform_beta=self.distillation.beta)
        self.window_dataset = WindowDataset(
            self.corpus, self.window_settings, self.distillation.window, True, self.predicts_distributions
        )
        self.module = new_adapter(
            prepare_model(self.model), self.gating, self.window_settings.seed, embedding_init=self.embedding_init
        )
        if self.teacher is not None:
            prepare_model(self.teacher)

    def initialize_from(self, folder: Path) -> None:
        """Start with a saved adapter. Errors: ValueError if its settings are others."""
        self.module.copy_weights_from(load_initial_adapter(folder, self.model, self.name, self.gating))

    def window_at(self, step: int) -> int:
        """The queries of a window at a step: more of them every step, by the same factor."""
        if step >= self.growth_steps:
            return self.distillation.window
        return round(FIRST_WINDOW * (self.distillation.window / FIRST_WINDOW) ** (step / self.growth_steps))

    @property
    def num_undrafted_queries(self) -> int:
        """The number of leading queries that make no draft."""
        return int(self.teacher is None)

    @property
    def drafts_per_call(self) -> int:
        return self.distillation.window - self.num_undrafted_queries

    @property
    def predicts_distributions(self) -> bool:
        """True if tokens are picked from the adapter's distributions; False if its argmax is the draft."""
        return self.distillation.form != "one-hot"

    def loss(self, step: int) -> Float[Tensor, ""]:
        """The mean over the windows' valid tokens, later ones discounted."""
        batch = self.training_batch(step).leading(self.window_at(step)).to(self.model.device)
        batch = self._with_uniforms(batch, step)
        packed, rows = self._pack(batch)
        with self._dropout(step), self._autocast():
            logits = query_logits(
                self.model, packed, rows[batch.loss_mask], self.module, batch.temperatures, self.recompute
            )
        depths = torch.arange(batch.targets.shape[-1], device=logits.device)
        depths = depths.expand(batch.loss_mask.shape)[batch.loss_mask]
        weights = self.window_settings.discount ** (depths - self.num_undrafted_queries).clamp_min(0)
        return self.processes.weighted_mean(self._token_losses(logits, batch), weights, floor=1.0)

    def _with_uniforms(self, batch: Batch, step: int) -> Batch:
        """The batch with the adapter's own uniforms (`inverse`), or with windows that it drafts; without dropout."""
        if not self.inverse and not self.student_windows:
            return batch
        stream = "inverse" if self.inverse else "student"
        generator = ShareOfDraws(
            seeded_generator(self.window_settings.seed, stream, step),
            self.window_dataset.batch_size,
            self.processes.share(self.window_dataset.batch_size),
        )
        training, settings = self.module.training, self.distillation
        self.module.eval()
        with self._autocast():
            if self.inverse:
                uniforms, valid = find_own_uniforms(
                    self.model, self.module, batch, generator, self.corpus.coupling, settings.beta
                )
                batch = replace(batch, uniforms=uniforms, loss_mask=batch.inside & valid)
            else:
                batch = with_student_windows(
                    batch, choose_windows(batch, self.student_windows, generator), self.model, self.module,
                    self._distilled_model, settings.form, generator, self.corpus.coupling, settings.beta,
                    self.truncation,
                )  # fmt: skip
        self.module.train(training)
        return batch

    @property
    def _distilled_model(self) -> Any:
        return self.model if self.teacher is None else self.teacher

    def save(self, folder: Path, card: Mapping[str, Any]) -> None:
        """A folder for `saltus.methods.shared.adapter_files.load_adapter`."""
        training: dict[str, Any] = {**card, "form": self.distillation.form, "window": self.distillation.window}
        if self.teacher is not None:
            training["student_of"] = self.teacher_name
        save_adapter(self.module, folder, self.model, self.name, training)

    def _pack(self, batch: Batch) -> tuple[PackedBatch, Int[Tensor, "batch windows window"]]:
        """The windows in one forward, and the index of each query's row, counted through the batch."""
        uniforms = query_uniforms(batch.uniforms, self.distillation.form)
        packed = pack_windows(batch.tokens, batch.window_starts, uniforms, query_start=self.gating.query_start)
        numbers = torch.arange(packed.tokens.numel(), device=batch.tokens.device)
        return packed, packed.queries_by_window(numbers.view(packed.tokens.shape))

    def _token_losses(self, logits: Float[Tensor, "counted vocab"], batch: Batch) -> Float[Tensor, "counted"]:
        """The loss of each valid query; cross-entropy at temperature 0, where the teacher has one token."""
        tokens, temperatures = batch.targets[batch.loss_mask], self._query_temperatures(batch)[batch.loss_mask]
        if self.predicts_distributions:
            logits = _scale_by_temperature(logits, temperatures)
        if self.distillation.loss not in ("kl", "reverse-kl"):
            return token_loss(logits, tokens, None, self.distillation.loss)
        teacher_logits = _scale_by_temperature(self._teacher_logits(batch), temperatures)
        return torch.where(
            temperatures == 0,
            losses.cross_entropy(logits, tokens),
            token_loss(logits, tokens, teacher_logits, self.distillation.loss),
        )

    @torch.no_grad()
    def _teacher_logits(self, batch: Batch) -> Float[Tensor, "counted vocab"]:
        """The teacher's logits for the valid tokens: those after the token before each."""
        if self.student_windows:
            with self._autocast():
                return window_logits(self._distilled_model, batch)[batch.loss_mask]
        batch_size, slots = batch.tokens.shape
        device = batch.window_starts.device
        before = batch.window_starts[..., None] + torch.arange(-1, batch.targets.shape[-1] - 1, device=device)
        rows = torch.arange(batch_size, device=device)[:, None, None] * slots + before
        with self._autocast():
            return packed_logits(self._distilled_model, pack_causal(batch.tokens), rows[batch.loss_mask])

    def matching_drafts(self, batch: Batch) -> Bool[Tensor, "all_windows drafts"]:
        return self.matching_queries(batch)[:, self.num_undrafted_queries :]

    @torch.no_grad()
    def matching_queries(
        self, batch: Batch, uniforms: Float[Tensor, "batch windows window"] | None = None
    ) -> Bool[Tensor, "all_windows window"]:
        """The same for all queries, those included that make no draft. They may be conditioned on other `uniforms`.

        The tokens that uniforms pick are picked by the text's own in any case.
        """
        batch = batch.to(self.model.device)
        given = batch if uniforms is None else replace(batch, uniforms=uniforms.to(self.model.device))
        return (batch.loss_mask & (self._drafted_tokens(batch, given) == batch.targets)).flatten(0, 1)

    def accuracy_by_depth(self) -> dict[str, list[float]]:
        """For held-out texts that were sampled: by the uniforms that wrote them, and by others. Without dropout."""
        batches = [*self.window_dataset.validation_batches(False)]
        if self.distillation.form == "independent" or self.corpus.coupling == "gumbel" or not batches:
            return {}
        training = self.module.training
        self.module.eval()
        masks = torch.cat([batch.loss_mask.flatten(0, 1) for batch in batches])
        generator = seeded_generator(1, "other uniforms")
        others = [torch.from_numpy(generator.random(tuple(batch.uniforms.shape))) for batch in batches]
        given = {"its own uniforms": [None] * len(batches), "other uniforms": others}
        found = {}
        for name, uniforms in given.items():
            matches = [self.matching_queries(*pair).cpu() for pair in zip(batches, uniforms, strict=True)]
            found[name] = (torch.cat(matches).double().sum(0) / masks.sum(0).clamp_min(1)).tolist()
        self.module.train(training)
        return found

    @property
    def first_conditioned_query(self) -> int:
        """In C-PTP the second one, which has the first token's uniform."""
        return int(self.distillation.form == "categorical")

    def _drafted_tokens(self, batch: Batch, given: Batch) -> Int[Tensor, "batch windows window"]:
        """Each query's draft: the argmax (Eq. 5), or the token that its uniform picks (Eq. 7).

        The argmax also under Gumbel noise: which noise wrote a text is not known. Queries are conditioned on the
        uniforms of `given`.
        """
        packed, rows = self._pack(given)
        with self._autocast():
            logits = query_logits(self.model, packed, rows.flatten(), self.module, batch.temperatures)
        likeliest = logits.argmax(-1).view(rows.shape)
        if not self.predicts_distributions:
            return likeliest
        temperatures = self._query_temperatures(batch)
        logits = _scale_by_temperature(logits, temperatures.flatten())
        if self.corpus.coupling == "gumbel":
            return likeliest
        uniforms = batch.uniforms.flatten().nan_to_num()
        picked = pick_tokens(uniforms, logits, coupling=self.corpus.coupling).view(rows.shape)
        return torch.where(temperatures == 0, likeliest, picked)

    def _query_temperatures(self, batch: Batch) -> Float[Tensor, "batch windows window"]:
        return batch.temperatures[..., None].expand(batch.loss_mask.shape)

    @contextmanager
    def _dropout(self, step: int) -> Iterator[None]:
        """While open, dropout draws from the step's own generator; the global generators stay as they were.

        Each process has masks of its own, so with dropout the losses depend on the number of processes.
        """
        if not self.gating.dropout:
            yield
            return
        device = self.model.device
        rank = self.processes.rank
        stream = f"dropout/{rank}" if rank else "dropout"
        on_device = [torch.cuda.default_generators[device.index or 0]] if device.type == "cuda" else []
        with torch.random.fork_rng([device] if on_device else []):
            for generator in (torch.default_generator, *on_device):
                generator.manual_seed(int(seeded_generator(self.window_settings.seed, stream, step).integers(2**62)))
            yield


def _scale_by_temperature(
    logits: Float[Tensor, "rows vocab"], temperatures: Float[Tensor, "rows"]
) -> Float[Tensor, "rows vocab"]:
    """Logits divided by their temperature; unchanged where that is 0."""
    return logits / torch.where(temperatures == 0, 1.0, temperatures).to(logits.dtype)[:, None]
