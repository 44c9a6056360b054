"""Turn logits into the distribution of the next token, pick from it with a uniform, and invert the pick.

Plain decoding, drafts, verification and training share this one pipeline. Its order and numerics are those of
Transformers' `generate`: float32; repetition penalty, repeated n-grams, banned, ends that come too early, forced;
temperature, top-k, top-p, min-p. OpenAI's bias and penalties come first. It works on single rows in NumPy, so that
nothing here depends on how rows are batched or on the number of threads.
"""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, get_args

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from saltus.core.penalties import penalised
from saltus.core.truncation import min_p, top_k, top_p
from saltus.kernels import native

BLOCK = 128  # tokens whose cumulative sums are computed together, on demand
LIKELY_THRESHOLD = 2.0**-10  # times the greatest probability: tokens above it are picked in order of probability
TINY = 2.0**-960  # cumulative weights below it count as zero: u · total keeps 53 bits, and pick can be inverted
MAX_BIAS = 1e30  # of a logit; more would be infinite in float32
MIN_TEMPERATURE = 1e-6  # below it only the likeliest token has a probability in float32, and a division may overflow
Coupling = Literal["probability", "token-order", "gumbel"]
"""Which token the random numbers of a position pick: the inverse CDF, with tokens by falling probability or by id as in
PTP's Eq. 2; or argmax log P(t) + G(t) with Gumbel noise G for each token."""
DEFAULT_COUPLING: Coupling = "gumbel"


@dataclass(frozen=True)
class Sampling:
    """How logits become a distribution. Defaults: greedy decoding. Names and meanings are those of Transformers."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    # added to logits, as OpenAI defines it: −presence for each token of the text so far, without the prompt,
    # −frequency for each time that it occurs there; and a bias by (token, bias)
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    no_repeat_ngram_size: int = 0  # no n-gram of so many tokens comes twice, the prompt's included; 0: off
    # none of the end tokens is among the first new tokens, so many of them, unless nothing else is left
    min_new_tokens: int = 0
    end_tokens: tuple[int, ...] = ()
    banned: tuple[int, ...] = ()
    forced_at_index: tuple[tuple[int, int], ...] = ()  # (index of a new token, token)
    banned_at_index: tuple[tuple[int, int], ...] = ()  # (index of a new token, token that it may not be)
    # (token, first, last): within the new tokens first…last, all tokens after this token repeat it (a hole's end)
    hole_end_tokens: tuple[tuple[int, int, int], ...] = ()
    coupling: Coupling = DEFAULT_COUPLING

    def __post_init__(self) -> None:
        def check(holds: bool, name: str, cure: str) -> None:
            if not holds:
                raise ValueError(f"{name} is {getattr(self, name)}, but {cure}")

        check(0 <= self.temperature < math.inf, "temperature", "must be 0 (greedy) or a positive number")
        check(self.top_k >= 0, "top_k", "must be 0 (off) or a number of tokens")
        check(0 <= self.top_p <= 1, "top_p", "must lie in [0, 1]; use 1 to switch it off")
        if self.temperature < MIN_TEMPERATURE or self.top_p == 0:  # the likeliest token is left: greedy decoding
            object.__setattr__(self, "temperature", 0.0)
            object.__setattr__(self, "top_p", 1.0)
        check(0 <= self.min_p <= 1, "min_p", "must lie in [0, 1]; use 0 to switch it off")
        check(1e-6 <= self.repetition_penalty <= 1e6, "repetition_penalty", "must lie in 1e-6…1e6; 1 switches it off")
        for name in ("presence_penalty", "frequency_penalty"):
            check(math.isfinite(getattr(self, name)), name, "must be a number; use 0 to switch it off")
        check(all(token >= 0 for token, _ in self.logit_bias), "logit_bias", "token ids start at 0")
        low = all(bias <= MAX_BIAS for _, bias in self.logit_bias)
        check(low, "logit_bias", f"a bias must be a number of at most {MAX_BIAS:g}")
        for name in ("no_repeat_ngram_size", "min_new_tokens"):
            check(getattr(self, name) >= 0, name, "must be 0 (off) or a number of tokens")
        check(self.coupling in get_args(Coupling), "coupling", f"must be one of {', '.join(get_args(Coupling))}")
        check(min(self.banned, default=0) >= 0, "banned", "token ids start at 0; remove the negative ones")
        check(min(self.end_tokens, default=0) >= 0, "end_tokens", "token ids start at 0; remove the negative ones")
        for name in ("forced_at_index", "banned_at_index", "hole_end_tokens"):
            check(min(map(min, getattr(self, name)), default=0) >= 0, name, "indices and token ids start at 0")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def truncates(self) -> bool:
        """Whether top-k, top-p or min-p drop unlikely tokens."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0

    @property
    def has_uniforms(self) -> bool:
        """True if one uniform of a position picks its token, so that a draft model can be given it."""
        return self.coupling != "gumbel"

    @property
    def plain_argmax(self) -> bool:
        """True if the text is the argmax of the raw logits: `greedy_tokens` then replaces `token_distribution`."""
        return self.greedy and self.token_independent

    @cached_property
    def plain_gumbel_max(self) -> bool:
        """True if the text is the argmax of the raw logits by temperature and Gumbel noise: see `gumbel_max_token`."""
        return not self.greedy and self.has_argmax and self.token_independent

    @cached_property
    def needs_candidates(self) -> bool:
        """True if the likeliest tokens of a row are usually all that its distribution needs; see core/candidates.py."""
        return not self.greedy and self.truncates and self.token_independent

    @cached_property
    def has_argmax(self) -> bool:
        """True if the text is the argmax of the logits of tokens that are not banned, perhaps with Gumbel noise.

        In a hole that ended nothing is picked.
        """
        return (self.greedy or (self.coupling == "gumbel" and not self.truncates)) and not self._changes_logits

    @property
    def token_independent(self) -> bool:
        """True if the distribution depends on the logits' values only, and not on which tokens they belong to."""
        return not (self._changes_logits or self.banned or self.hole_end_tokens)

    @property
    def _changes_logits(self) -> bool:
        return bool(
            self.uses_context or self.logit_bias or self.forced_at_index or self.banned_at_index
            or (self.min_new_tokens and self.end_tokens)
        )  # fmt: skip

    @property
    def uses_context(self) -> bool:
        """True if the distribution depends on which tokens the text has so far."""
        return (
            self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0
            or self.no_repeat_ngram_size > 0
        )  # fmt: skip

    def num_padding_after(self, index: int, token: int) -> int:
        """How many tokens after new token `index` pad its hole, because `token` ends it: they repeat it."""
        return next(
            (last - index for end, first, last in self.hole_end_tokens if end == token and first <= index <= last), 0
        )

    @cached_property
    def banned_ids(self) -> np.ndarray:
        return np.array(sorted(set(self.banned)), dtype=np.int64)

    @cached_property
    def hole_end_ids(self) -> np.ndarray:
        return np.array([token for token, _, _ in self.hole_end_tokens], dtype=np.int64)

    @cached_property
    def end_ids(self) -> np.ndarray:
        return np.array(self.end_tokens, dtype=np.int64)

    @cached_property
    def _banned_at(self) -> dict[int, list[int]]:
        tokens_by_index: dict[int, list[int]] = {}
        for index, token in self.banned_at_index:
            tokens_by_index.setdefault(index, []).append(token)
        return tokens_by_index

    @cached_property
    def _forced(self) -> dict[int, int]:
        return dict(self.forced_at_index)


@dataclass(frozen=True, eq=False)
class Distribution:
    """The distribution of one token, as unnormalised weights in token order.

    `tokens` are the ascending ids that the weights belong to, None for the whole vocabulary. Under the coupling
    `probability` tokens are *picked* in another order: the likely ones by falling weight, then the others by id. So a
    small uniform picks the likeliest token, whatever its id.
    """

    tokens: np.ndarray | None  # [n] int64
    weights: np.ndarray  # [n] float64, not negative; [vocabulary] if tokens is None
    coupling: Coupling = "probability"  # what `pick_token` uses

    @cached_property
    def head(self) -> np.ndarray:
        """Indices of the likely tokens, by falling weight; among equal weights the lower id first. None by id alone."""
        if self.coupling == "token-order":
            return np.empty(0, dtype=np.int64)
        likely = np.flatnonzero(self.weights >= max(float(self.weights.max()) * LIKELY_THRESHOLD, 5e-324))
        return likely[np.argsort(-self.weights[likely], kind="stable")]

    @cached_property
    def head_sums(self) -> np.ndarray:
        """Inclusive cumulative sums of the head, in float64; [0] without a head."""
        sums = np.cumsum(self.weights[self.head], dtype=np.float64)
        return sums if len(sums) else np.zeros(1)

    @cached_property
    def rest(self) -> np.ndarray:
        """The weights of the other tokens, in token order; 0 for the head."""
        rest = self.weights.copy()
        rest[self.head] = 0
        return rest

    @cached_property
    def borders(self) -> np.ndarray:
        """Cumulative sums in float64 at the borders of the rest's blocks: [all of the head, first block, …, total]."""
        sums = np.add.reduceat(self.rest, np.arange(0, len(self.rest), BLOCK), dtype=np.float64)
        return np.cumsum(np.concatenate([self.head_sums[-1:], sums]))

    @property
    def total(self) -> float:
        return float(self.borders[-1])

    @cached_property
    def mass(self) -> float:
        """`total` up to rounding, cheaper: no order of the tokens is needed."""
        return float(self.weights.sum())

    @property
    def peak(self) -> float:
        """Probability of the likeliest token."""
        return float(self.weights.max()) / self.mass

    def block(self, number: int) -> np.ndarray:
        """Inclusive cumulative sums c of one block of the rest: u · total in [c[i − 1], c[i]) picks its token i."""
        rest = self.rest[number * BLOCK : (number + 1) * BLOCK]
        return _running(rest, self.borders[number], self.borders[number + 1])


def _running(weights: np.ndarray, low, high) -> np.ndarray:
    """Cumulative sums from `low`; the last token with weight ends exactly at `high`, despite rounding."""
    sums = np.cumsum(weights, axis=-1, dtype=np.float64)
    return np.where(sums == sums[..., -1:], high, np.minimum(sums + low, high))


def one_hot(token: int) -> Distribution:
    """The distribution with all mass on one token, as for greedy decoding and forced tokens."""
    return Distribution(np.array([token], dtype=np.int64), np.ones(1))


def token_distribution(
    logits: Float[Tensor, "vocab"], sampling: Sampling, context: np.ndarray | None = None, index: int = 0
) -> Distribution:
    """The distribution of new token `index` after `context` (prompt, text and path; negative ids are holes).

    Rows on a GPU are copied one by one: move a batch of them to the CPU first. Errors: ValueError for NaN or infinite
    logits.
    """
    if index in sampling._forced:
        return one_hot(sampling._forced[index])
    scores = penalised(float_row(logits), sampling, context, index)
    if index in sampling._banned_at:
        scores = scores.copy()
        scores[sampling._banned_at[index]] = -np.inf
    best = int(scores.argmax())
    if not math.isfinite(scores[best]):
        raise ValueError(_broken_logits_message(float(scores[best]), f"at new token {index}", logits.dtype))
    if sampling.greedy:
        return one_hot(best)
    if sampling.temperature != 1:
        scores = scores / np.float32(sampling.temperature)
    vocab, top, tokens = len(scores), scores[best], None
    if sampling.top_k:
        tokens = top_k(scores, sampling.top_k)
        scores = scores[tokens]
    if sampling.top_p < 1:
        kept = top_p(scores, sampling.top_p, top, vocab)
        tokens, scores = (kept if tokens is None else tokens[kept]), scores[kept]
    if sampling.min_p > 0:
        kept = min_p(scores, sampling.min_p, top, vocab, tokens)
        tokens, scores = (kept if tokens is None else tokens[kept]), scores[kept]
    weights = np.exp((scores - top).astype(np.float64))
    if tokens is not None and not weights.all():
        tokens, weights = tokens[weights > 0], weights[weights > 0]
    return Distribution(tokens, weights, sampling.coupling)


def greedy_tokens(logits: Float[Tensor, "rows vocab"]) -> list[int]:
    """The first maximum of each row in float32: what `token_distribution` gives for greedy decoding, but faster."""
    logits = logits.detach()
    kernel = native.kernel("greatest", logits.dtype, logits.device)
    if kernel is not None and logits.is_contiguous():
        tokens = (native.INTEGER * len(logits))()
        kernel(logits.data_ptr(), *logits.shape, ctypes.addressof(tokens))
        if -1 not in tokens:
            return list(tokens)
    if logits.device.type != "cpu":
        best = logits.float().argmax(-1, keepdim=True)
        top = logits.gather(-1, best).float().cpu().numpy()
        best = best.cpu().numpy()
    else:
        scores = logits.float().numpy()
        best = scores.argmax(-1, keepdims=True)
        top = np.take_along_axis(scores, best, -1)
    broken = np.flatnonzero(~np.isfinite(top))
    if broken.size:
        raise ValueError(_broken_logits_message(float(top[broken[0], 0]), f"in row {broken[0]}", logits.dtype))
    return best[:, 0].tolist()


def pick(u: float, distribution: Distribution) -> int:
    """The first token whose cumulative probability exceeds u in [0, 1); never one of probability zero.

    PTP, Eq. 2: min {j: F_j > u}, F_j = Σ P_l over the token ids l = 1…j. That is the coupling `token-order`. Under
    `probability`, which is ours, the sum runs in the order of `Distribution`: likely tokens first.
    """
    assert distribution.coupling != "gumbel"
    if not 0 <= u < 1:
        raise ValueError(f"pick was given u = {u}, but a uniform lies in [0, 1)")
    x = u * distribution.total
    x = x if x >= TINY else 0.0
    if x < distribution.head_sums[-1]:
        place = int(distribution.head[np.searchsorted(distribution.head_sums, x, side="right")])
    else:
        block = int(np.searchsorted(distribution.borders[1:], x, side="right"))
        place = block * BLOCK + int(np.searchsorted(distribution.block(block), x, side="right"))
    return place if distribution.tokens is None else int(distribution.tokens[place])


def sample(u: float, distribution: Distribution) -> int:
    """Sample with a uniform that is used for nothing else: faster than `pick`, since any order of tokens will do."""
    starts = np.arange(0, len(distribution.weights), BLOCK)
    borders = np.cumsum(np.add.reduceat(distribution.weights, starts))
    block, x = _search_sums(borders, u * borders[-1])
    start = block * BLOCK
    place, _ = _search_sums(np.cumsum(distribution.weights[start : start + BLOCK]), x)
    return start + place if distribution.tokens is None else int(distribution.tokens[start + place])


def _search_sums(sums: np.ndarray, x: float) -> tuple[int, float]:
    """The place of x among cumulative sums (the last with weight if x lies beyond), and x's offset in it."""
    place = int(np.searchsorted(sums, x, side="right"))
    if place == len(sums):
        place = int(np.searchsorted(sums, sums[-1]))
    return place, x - float(sums[place - 1]) if place else x


def uniform_interval(token: int, distribution: Distribution) -> tuple[float, float]:
    """The inverse of `pick`: exactly the u in [low, high) pick the token (none if low = high)."""
    assert distribution.coupling != "gumbel"
    place = token if distribution.tokens is None else int(np.searchsorted(distribution.tokens, token))
    if place >= len(distribution.weights):
        return 1.0, 1.0
    known = distribution.tokens is None or distribution.tokens[place] == token
    if known and len(ranks := np.flatnonzero(distribution.head == place)):
        rank = int(ranks[0])
        low, high = (float(distribution.head_sums[rank - 1]) if rank else 0.0), float(distribution.head_sums[rank])
    else:
        block, offset = divmod(place, BLOCK)
        running = distribution.block(block)
        low, high = float(running[offset - 1] if offset else distribution.borders[block]), float(running[offset])
    low = _least_uniform(low, distribution.total)
    return (low, _least_uniform(high, distribution.total)) if known else (low, low)


def _least_uniform(x: float, total: float) -> float:
    """The least u ≤ 1 with u · total ≥ x in float64 arithmetic; it is within a few steps of the quotient."""
    if x <= 0:
        return 0.0
    if x >= total:
        return 1.0
    x = max(x, TINY)
    u = x / total
    while math.nextafter(u, 0) * total >= x:
        u = math.nextafter(u, 0)
    while u * total < x:
        u = math.nextafter(u, 1)
    return u


def probability(token: int, distribution: Distribution) -> float:
    """The probability of one token."""
    return float(_weights_at(np.array([token]), distribution)[0]) / distribution.mass


def probabilities(distribution: Distribution, vocab: int) -> np.ndarray:
    """The probabilities of all tokens, float64 [vocab]."""
    dense = np.zeros(vocab)
    dense[slice(len(distribution.weights)) if distribution.tokens is None else distribution.tokens] = (
        distribution.weights / distribution.mass
    )
    return dense


def residual(target: Distribution, draft: Distribution) -> Distribution:
    """The distribution to sample from after a rejection: (P − Q)₊, unnormalised (Leviathan et al. 2023, Alg. 1).

    If rounding leaves no excess, P equals Q and a rejection has probability zero; the result is then P.
    """
    if target.tokens is None and draft.tokens is None and len(target.weights) == len(draft.weights):
        likely = draft.weights
    else:
        tokens = np.arange(len(target.weights)) if target.tokens is None else target.tokens
        likely = _weights_at(tokens, draft)
    excess = np.maximum(target.weights - likely * (target.mass / draft.mass), 0)
    return Distribution(target.tokens, excess) if excess.any() else target


def _weights_at(tokens: np.ndarray, distribution: Distribution) -> np.ndarray:
    """The weights of ascending tokens, unnormalised; 0 for tokens that the distribution does not contain."""
    last = len(distribution.weights) - 1
    if distribution.tokens is None and tokens[-1] <= last:
        return distribution.weights[tokens]
    places = np.minimum(tokens if distribution.tokens is None else np.searchsorted(distribution.tokens, tokens), last)
    tokens_there = places if distribution.tokens is None else distribution.tokens[places]
    return np.where(tokens_there == tokens, distribution.weights[places], 0)


def log_probability(logits: Float[Tensor, "vocab"], token: int) -> float:
    """The log-probability of a token: log-softmax of the raw logits in float32, at temperature 1."""
    scores = float_row(logits)
    gaps = scores - scores.max()
    return float(gaps[token]) - math.log(np.exp(gaps).sum(dtype=np.float64))


def top_log_probabilities(logits: Float[Tensor, "vocab"], count: int) -> list[tuple[int, float]]:
    """The `count` most likely tokens and their log-probabilities, as `log_probability` gives them; likeliest first."""
    scores = float_row(logits)
    count = min(count, len(scores))
    likely = np.argpartition(scores, -count)[-count:]
    likely = likely[np.lexsort((likely, -scores[likely]))]
    gaps = scores - scores.max()
    total = math.log(np.exp(gaps).sum(dtype=np.float64))
    return [(token, float(gaps[token]) - total) for token in likely.tolist()]


def most_likely(logits: Float[Tensor, "vocab"]) -> tuple[int, float]:
    """The first maximum, and its probability by the softmax of the raw logits; NaN if these are not finite."""
    scores = float_row(logits)
    best = int(scores.argmax())
    if not math.isfinite(scores[best]):
        return best, math.nan
    return best, 1 / float(np.exp(scores - scores[best]).sum(dtype=np.float64))


def _broken_logits_message(top: float, where: str, dtype: torch.dtype) -> str:
    """The error message for a row whose best score is not finite; float16 overflows where other types do not."""
    if top == -math.inf:
        return f"no token is left to choose {where}: all are banned or have logits of −inf; ban fewer tokens"
    value = "NaN" if math.isnan(top) else "infinite"
    cure = "load it in float32 or bfloat16" if dtype == torch.float16 else "its weights may be damaged: fetch it again"
    return f"the model gave {value} logits {where}; {cure}"


def float_row(logits: Tensor) -> np.ndarray:
    """A row as float32 on the CPU, sharing memory if it can. bfloat16 is shifted, since torch would start threads."""
    logits = logits.detach().cpu()
    if logits.dtype == torch.bfloat16:
        return (logits.view(torch.int16).numpy().astype(np.int32) << 16).view(np.float32)
    return np.ascontiguousarray(logits.numpy(), dtype=np.float32)
