"""Small transformers for experiments with PTP: distillation from a teacher, and training without one (PTP, Alg. 2, 3).

No command of Saltus needs this module. The taxi programs and pair_map.py import it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional
from transformers import DynamicCache, GPT2Config, GPT2Model

from saltus.core.picking import Coupling
from saltus.methods.ptp.network import MASKED_SCORE
from saltus.models.uniform_embedding import UniformEmbedding
from saltus.training import losses
from saltus.training.data.seeded_generator import seeded_generator
from saltus.training.data.uniform_intervals import (
    UniformIntervals,
    pick_tokens,
    sample_uniforms,
    uniform_intervals,
)
from saltus.training.data.window_packing import (
    PackedBatch,
    UniformConditioning,
    gather_windows,
    pack_windows,
    query_uniforms,
    valid_prefix,
)
from saltus.training.losses import DistillationSettings, token_loss

QueryNetwork = Callable[[PackedBatch], Tensor]  # logits of all queries: [batch, windows, window, vocab]
MAX_EXAMPLES = 5  # skipped tokens that are shown


class Student(nn.Module):
    """GPT-2's layers with an own vocabulary, one extra token that starts every text, and queries (PTP, §3.1).

    A query's input is the embedding of its uniform; a query without a uniform has a learned embedding of its own.
    """

    def __init__(
        self,
        vocab_size: int,
        max_length: int,
        *,
        hidden: int,
        layers: int,
        heads: int,
        embedding: str = "bits",
        seed: int = 0,
    ) -> None:
        super().__init__()
        config = GPT2Config(
            vocab_size=vocab_size + 1, n_positions=max_length + 1, n_embd=hidden, n_layer=layers, n_head=heads,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False, bos_token_id=None, eos_token_id=None,
            activation_function="gelu_pytorch_tanh",  # GPT-2's own, as one operation
        )  # fmt: skip
        self.body = GPT2Model(config)
        self.auxiliary = UniformEmbedding(hidden, embedding)
        self.none = nn.Parameter(torch.zeros(hidden))
        self.vocab_size = vocab_size
        _initialize(self, layers, seed)

    @property
    def start_token(self) -> int:
        """The token before every text, at position 0."""
        return self.vocab_size

    def prepend_start_token(self, texts: Int[Tensor, "batch length"]) -> Int[Tensor, "batch length_with_start"]:
        return torch.cat([torch.full_like(texts[:, :1], self.start_token), texts], 1)

    def next_token_logits(self, tokens: Int[Tensor, "batch length"]) -> Float[Tensor, "batch length vocab"]:
        """Logits after each token, as of a causal model."""
        return self._logits(self.body(input_ids=tokens).last_hidden_state)

    def forward(self, packed: PackedBatch) -> Float[Tensor, "batch windows window vocab"]:
        """Logits of all queries, in one call."""
        return self._logits(packed.queries_by_window(self._hidden_states(packed, None)))

    def forward_cached(self, packed: PackedBatch, cache: DynamicCache) -> Float[Tensor, "batch rows vocab"]:
        """Logits of some rows. The cache holds the rows before them, and these too afterwards."""
        return self._logits(self._hidden_states(packed, cache))

    def generate(
        self, uniforms: Float[Tensor, "batch length"], coupling: Coupling = "probability"
    ) -> tuple[Int[Tensor, "batch length"], Float[Tensor, "batch length vocab"]]:
        """Texts token by token, each token picked by its uniform, and the logits that they were picked from."""
        batch, length = uniforms.shape
        token = torch.full((batch, 1), self.start_token, device=uniforms.device)
        cache, tokens, logits = DynamicCache(), [], []
        with torch.no_grad():
            for k in range(length):
                outputs = self.body(input_ids=token, past_key_values=cache, use_cache=True)
                logits.append(self._logits(outputs.last_hidden_state))
                token = pick_tokens(uniforms[:, k : k + 1], logits[-1], coupling=coupling)
                tokens.append(token)
        return torch.cat(tokens, 1), torch.cat(logits, 1)

    def _hidden_states(self, packed: PackedBatch, cache: DynamicCache | None) -> Float[Tensor, "batch rows hidden"]:
        queries = self.auxiliary(packed.uniforms.nan_to_num(0.0), torch.ones_like(packed.uniforms))
        queries = torch.where(packed.uniforms.isnan()[..., None], self.none, queries)
        is_query = (packed.tokens < 0)[..., None]
        embedded = torch.where(is_query, queries, self.body.wte(packed.tokens.clamp_min(0)))
        return self.body(
            inputs_embeds=embedded,
            position_ids=packed.positions,
            attention_mask=torch.where(packed.mask, 0.0, MASKED_SCORE).to(embedded.dtype)[:, None],
            past_key_values=cache,
            use_cache=cache is not None,
        ).last_hidden_state

    def _logits(self, hidden: Tensor) -> Tensor:
        return hidden @ self.body.wte.weight[: self.vocab_size].T


def _initialize(student: Student, layers: int, seed: int) -> None:
    """GPT-2's initial values, from the seed alone: 0.02 at its width, less for projections into the residual stream."""
    generator, spread = seeded_generator(seed, "weights"), 0.02 * math.sqrt(768 / student.body.config.hidden_size)
    with torch.no_grad():
        for name, weight in student.named_parameters():
            if weight.dim() < 2 or not (name.startswith("body.") or weight.any()):
                continue
            scale = spread / math.sqrt(2 * layers) if name.endswith("c_proj.weight") else spread
            if name.startswith("auxiliary."):
                scale = 1 / math.sqrt(weight.shape[1])
            weight.copy_(torch.from_numpy(generator.normal(0.0, scale, tuple(weight.shape))))
        for name, bias in student.named_parameters():
            if name.startswith("auxiliary.") and bias.dim() == 1:
                bias.zero_()


@dataclass
class SkippedTokens:
    """Tokens left out of the loss, since rounding put their uniform outside their interval."""

    num_tokens: int = 0
    num_skipped: int = 0
    examples: list[str] = field(default_factory=list)

    def record(self, valid: Bool[Tensor, "*shape"], tokens: Int[Tensor, "*shape"], intervals: UniformIntervals) -> None:
        """Count the tokens that are not valid, and keep the first few as examples."""
        self.num_tokens += valid.numel()
        if valid.all():
            return
        self.num_skipped += int((~valid).sum())
        rows = zip(*(part[~valid].tolist() for part in (tokens, intervals.low, intervals.high)), strict=True)
        for token, low, high in list(rows)[: MAX_EXAMPLES - len(self.examples)]:
            self.examples.append(f"{token} in [{low:.17g}, {high:.17g})")

    def __str__(self) -> str:
        shown = f": {'; '.join(self.examples)}" if self.examples else ""
        skipped = f"{self.num_skipped:,} of {self.num_tokens:,} tokens"
        return f"{skipped} were skipped, since their intervals do not contain them{shown}"


def masked_mean(values: Float[Tensor, "*shape"], mask: Bool[Tensor, "*shape"]) -> Float[Tensor, ""]:
    """The mean over the masked tokens; 0 where there are none."""
    return torch.where(mask, values, 0.0).sum() / mask.sum().clamp_min(1)


def sample_window_starts(
    batch_size: int, length: int, num_windows: int, window_size: int, generator: np.random.Generator, first: int = 1
) -> Int[Tensor, "batch windows"]:
    """Random starts of whole windows, one in each of equal parts of the text.

    Errors: ValueError for a text shorter than `first` + window tokens.
    """
    num_starts = length - window_size - first + 1
    if num_starts < 1:
        raise ValueError(
            f"a text of {length} tokens has no room for a window of {window_size} after {first}; take longer texts"
        )
    places = (np.arange(num_windows) + generator.random((batch_size, num_windows))) / num_windows
    return torch.from_numpy(first + (places * num_starts).astype(np.int64))


def prepend_start_position(
    intervals: UniformIntervals, logits: Float[Tensor, "batch length vocab"]
) -> tuple[UniformIntervals, Float[Tensor, "batch length_with_start vocab"]]:
    """Intervals and logits shifted by one position, for the start token. Its own entries are placeholders."""
    low, high = (functional.pad(part, (1, 0)) for part in (intervals.low, intervals.high))
    return UniformIntervals(low, high), functional.pad(logits, (0, 0, 1, 0))


def distillation_loss(
    network: QueryNetwork,
    texts: Int[Tensor, "batch length"],
    intervals: UniformIntervals,
    window_starts: Int[Tensor, "batch windows"],
    settings: DistillationSettings,
    generator: np.random.Generator,
    skipped: SkippedTokens,
    teacher_logits: Float[Tensor, "batch length vocab"] | None = None,
) -> Float[Tensor, ""]:
    """The mean loss over the windows' valid tokens.

    `intervals` [batch, length] and `teacher_logits` (for kl and reverse-kl only) are the teacher's for the token at
    each position, after the sampling settings that the student drafts for.
    """
    window = settings.window
    tokens = gather_windows(texts, window_starts, window)
    own = UniformIntervals(
        gather_windows(intervals.low, window_starts, window), gather_windows(intervals.high, window_starts, window)
    )
    uniforms, valid = sample_uniforms(own, generator, settings.beta)
    skipped.record(valid, tokens, own)
    logits = network(pack_windows(texts, window_starts, query_uniforms(uniforms, settings.form)))
    targets = None if teacher_logits is None else gather_windows(teacher_logits, window_starts, window)
    return masked_mean(token_loss(logits, tokens, targets, settings.loss), valid_prefix(valid))


@torch.no_grad()
def draft_window(
    network: QueryNetwork,
    context: Int[Tensor, "batch context"],
    uniforms: Float[Tensor, "batch window"],
    conditioning: UniformConditioning,
    coupling: Coupling = "probability",
) -> Int[Tensor, "batch window"]:
    """A student's draft after a context: the argmax (Eq. 5), or the tokens that the uniforms pick (Eq. 7)."""
    starts = torch.full((len(context), 1), context.shape[1], device=context.device)
    logits = network(pack_windows(context, starts, query_uniforms(uniforms[:, None], conditioning)))[:, 0]
    return logits.argmax(-1) if conditioning == "one-hot" else pick_tokens(uniforms, logits, coupling=coupling)


def num_correct(drafts: Int[Tensor, "batch window"], texts: Int[Tensor, "batch window"]) -> Int[Tensor, "batch"]:
    """The number of leading tokens that equal the teacher's (PTP, Eq. 16)."""
    return (drafts == texts).to(torch.int64).cumprod(-1).sum(-1)


@torch.no_grad()
def infer_uniforms(
    student: Student,
    texts: Int[Tensor, "batch length"],
    window_starts: Int[Tensor, "batch windows"],
    window: int,
    generator: np.random.Generator,
    *,
    beta: float = 1.0,
    coupling: Coupling = "probability",
    skipped: SkippedTokens | None = None,
) -> tuple[Float[Tensor, "batch windows window"], Bool[Tensor, "batch windows window"]]:
    """The uniforms under which the student itself writes the windows, and the valid tokens (Alg. 3, lines 4-7).

    Token after token, since each distribution depends on the uniforms before it. The context is read once.
    """
    tokens = gather_windows(texts, window_starts, window)
    uniforms = torch.full(tuple(tokens.shape), torch.nan, dtype=torch.float64, device=texts.device)
    valid = torch.zeros(tuple(tokens.shape), dtype=torch.bool, device=texts.device)
    windows, cache = window_starts.shape[1], DynamicCache()
    packed = pack_windows(texts, window_starts, uniforms)
    student.forward_cached(row_slice(packed, 0, packed.context_length), cache)
    for depth in range(window):
        start = packed.context_length + depth * windows
        if depth:  # a query is conditioned on the uniform of the token before its own
            packed.uniforms[:, start : start + windows] = uniforms[..., depth - 1]
        logits = student.forward_cached(row_slice(packed, start, start + windows), cache)
        intervals = uniform_intervals(logits, tokens[..., depth], coupling=coupling)
        uniforms[..., depth], valid[..., depth] = sample_uniforms(intervals, generator, beta)
        if skipped is not None:
            skipped.record(valid[..., depth], tokens[..., depth], intervals)
    return uniforms, valid_prefix(valid)


def row_slice(packed: PackedBatch, start: int, stop: int) -> PackedBatch:
    """Some of the rows, and the columns that they can attend to. Early rows never attend to later ones."""
    part = slice(start, stop)
    return PackedBatch(
        packed.tokens[:, part], packed.uniforms[:, part], packed.positions[:, part], packed.mask[:, part, :stop],
        packed.context_length, packed.num_windows, packed.window_size,
    )  # fmt: skip


def inverse_loss(
    student: Student,
    texts: Int[Tensor, "batch length"],
    window_starts: Int[Tensor, "batch windows"],
    window: int,
    generator: np.random.Generator,
    skipped: SkippedTokens,
    *,
    beta: float = 1.0,
    coupling: Coupling = "probability",
) -> Float[Tensor, ""]:
    """−log P(t_k | t_<i, u_i … u_{k−1}) over the windows, in nats a token (PTP, Eq. 13)."""
    uniforms, valid = infer_uniforms(
        student, texts, window_starts, window, generator, beta=beta, coupling=coupling, skipped=skipped
    )
    logits = student(pack_windows(texts, window_starts, query_uniforms(uniforms, "categorical")))
    return masked_mean(losses.cross_entropy(logits, gather_windows(texts, window_starts, window)), valid)


@torch.no_grad()
def verifier_logits(
    student: Student, texts: Int[Tensor, "batch length"], first_position: int = 1
) -> Float[Tensor, "batch positions vocab"]:
    """P(t_k | t_<k) for k = first … length, in one call: at every position one query without a uniform.

    So no distribution depends on more than one auxiliary, and the model verifies its own drafts (PTP, §2.3).
    """
    count = texts.shape[1] - first_position + 1
    starts = first_position + torch.arange(count, device=texts.device).expand(len(texts), -1)
    none = torch.full((*starts.shape, 1), torch.nan, dtype=torch.float64, device=texts.device)
    return student(pack_windows(texts, starts, none))[:, :, 0]


@torch.no_grad()
def self_speculative_decode(
    student: Student,
    context: Int[Tensor, "1 context"],
    uniforms: Float[Tensor, "length"],
    window: int,
    coupling: Coupling = "probability",
) -> tuple[Int[Tensor, "length"], int]:
    """One text from a categorical student that verifies its own drafts, and the number of calls (PTP, Alg. 1).

    The text is the same for every window: Pick(u_k, P(t_k | t_<k)).
    """
    text, calls, before = context, 0, context.shape[1]
    end = before + len(uniforms)
    while text.shape[1] < end:
        here = uniforms[text.shape[1] - before :][:window]
        drafted = draft_window(student, text, here[None], "categorical", coupling)
        logits = verifier_logits(student, torch.cat([text, drafted[:, :-1]], 1), text.shape[1])
        own = pick_tokens(here[None], logits, coupling=coupling)
        agreed = int((own == drafted).to(torch.int64).cumprod(-1).sum())
        text = torch.cat([text, own[:, : agreed + 1]], 1)
        calls += 2
    return text[0, before:], calls
