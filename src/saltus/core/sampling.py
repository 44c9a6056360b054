"""Turn logits into the distribution of the next token, or its argmax.

Plain decoding, drafts, verification and training share this one pipeline. Its order and numerics are those of
Transformers' `generate`: float32; repetition penalty, repeated n-grams, banned, ends that come too early, forced;
temperature, top-k, top-p, min-p. OpenAI's bias and penalties come first. It works on single rows in NumPy, so that
nothing here depends on how rows are batched or on the number of threads.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import get_args

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from saltus.core.penalties import penalised
from saltus.core.picking import DEFAULT_COUPLING, Coupling, Distribution, one_hot
from saltus.core.truncation import min_p, top_k, top_p
from saltus.core.value_types import SettingError, short_repr
from saltus.kernels import native
from saltus.kernels.native import structs

MAX_BIAS = 1e30  # of a logit, and of a penalty either way; more would be infinite in float32
MAX_TEMPERATURE = 1e30  # an infinite float32 would make NaN of the −∞ of banned tokens, which could then be picked
MAX_TOKEN = 2**31 - 1  # the greatest id or index, far beyond those of any model
MIN_TEMPERATURE = 1e-6  # below it only the likeliest token has a probability in float32, and a division may overflow


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
                raise SettingError(f"{name} is {short_repr(getattr(self, name))}, but {cure}", name)

        warm = 0 <= self.temperature <= MAX_TEMPERATURE
        check(warm, "temperature", f"must be 0 (greedy) or a positive number of at most {MAX_TEMPERATURE:g}")
        check(self.top_k >= 0, "top_k", "must be 0 (off) or a number of tokens")
        check(0 <= self.top_p <= 1, "top_p", "must lie in [0, 1]; use 1 to switch it off")
        if self.temperature < MIN_TEMPERATURE or self.top_p == 0:  # the likeliest token is left: greedy decoding
            object.__setattr__(self, "temperature", 0.0)
            object.__setattr__(self, "top_p", 1.0)
        check(0 <= self.min_p <= 1, "min_p", "must lie in [0, 1]; use 0 to switch it off")
        check(1e-6 <= self.repetition_penalty <= 1e6, "repetition_penalty", "must lie in 1e-6…1e6; 1 switches it off")
        for name in ("presence_penalty", "frequency_penalty"):
            finite = abs(getattr(self, name)) <= MAX_BIAS
            check(finite, name, f"must be a number in ±{MAX_BIAS:g}; use 0 to switch it off")
        low = all(bias <= MAX_BIAS for _, bias in self.logit_bias)
        check(low, "logit_bias", f"a bias must be a number of at most {MAX_BIAS:g}")
        for name in ("no_repeat_ngram_size", "min_new_tokens"):
            check(getattr(self, name) >= 0, name, "must be 0 (off) or a number of tokens")
        check(self.coupling in get_args(Coupling), "coupling", f"must be one of {', '.join(get_args(Coupling))}")
        self._check_tokens("banned", self.banned)
        self._check_tokens("end_tokens", self.end_tokens)
        self._check_tokens("logit_bias", [token for token, _ in self.logit_bias])
        for name in ("forced_at_index", "banned_at_index", "hole_end_tokens"):
            self._check_tokens(name, [*chain(*getattr(self, name))])

    def _check_tokens(self, name: str, found: Sequence[int]) -> None:
        if (wrong := next((each for each in found if not 0 <= each <= MAX_TOKEN), None)) is not None:
            raise SettingError(
                f"{name} has {short_repr(wrong)}, but ids and indices of tokens lie in 0…{MAX_TOKEN}; remove it", name
            )

    @property
    def greedy(self) -> bool:
        """True if the likeliest token is always taken: for temperature 0, and for top_p 0."""
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
    def is_gumbel_max(self) -> bool:
        """True if the text is the argmax of the scores by temperature with Gumbel noise: see `gumbel_max_token`."""
        return not self.greedy and self.coupling == "gumbel" and not self.truncates

    @cached_property
    def plain_gumbel_max(self) -> bool:
        """True if that is so, and the scores are the raw logits."""
        return self.is_gumbel_max and self.token_independent

    @cached_property
    def needs_candidates(self) -> bool:
        """True if the likeliest tokens of a row are usually all that its distribution needs; see core/candidates.py."""
        return not self.greedy and self.truncates and self.token_independent

    @cached_property
    def has_argmax(self) -> bool:
        """True if the text is the argmax of the logits of tokens that are not banned, perhaps with Gumbel noise.

        In a hole that ended nothing is picked.
        """
        return (self.greedy or self.is_gumbel_max) and not self._changes_logits

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
        """The ids of `banned`, ascending."""
        return np.array(sorted(set(self.banned)), dtype=np.int64)

    @cached_property
    def hole_end_ids(self) -> np.ndarray:
        """The tokens of `hole_end_tokens`, in their order."""
        return np.array([token for token, _, _ in self.hole_end_tokens], dtype=np.int64)

    @cached_property
    def end_ids(self) -> np.ndarray:
        """`end_tokens` as an array."""
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


def token_distribution(
    logits: Float[Tensor, "vocab"], sampling: Sampling, context: np.ndarray | None = None, index: int = 0
) -> Distribution:
    """The distribution of new token `index` after `context` (prompt, text and path; negative ids are holes).

    Rows on a GPU are copied one by one: move a batch of them to the CPU first. Errors: ValueError for NaN or infinite
    logits.
    """
    scores = changed_scores(logits, sampling, context, index)
    if scores is None:
        return one_hot(sampling._forced[index])
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


def changed_scores(
    logits: Float[Tensor, "vocab"], sampling: Sampling, context: np.ndarray | None, index: int
) -> np.ndarray | None:
    """The logits of new token `index` after biases, penalties and bans, in float32; None if the token is forced."""
    if index in sampling._forced:
        return None
    scores = penalised(float_row(logits), sampling, context, index)
    if index in sampling._banned_at:
        scores = scores.copy()
        scores[sampling._banned_at[index]] = -np.inf
    return scores


def greedy_tokens(logits: Float[Tensor, "rows vocab"]) -> list[int]:
    """The first maximum of each row in float32: what `token_distribution` gives for greedy decoding, but faster."""
    logits = logits.detach()
    kernel = native.kernel("greatest", logits.dtype, logits.device)
    if kernel is not None and logits.is_contiguous():
        tokens = (structs.INTEGER * len(logits))()
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


def log_probability(logits: Float[Tensor, "vocab"], token: int) -> float:
    """The log-probability of a token: log-softmax of the raw logits in float32, at temperature 1."""
    return log_probabilities(logits, token, 0)[0]


def log_probabilities(logits: Float[Tensor, "vocab"], token: int, count: int) -> tuple[float, list[tuple[int, float]]]:
    """`log_probability` of a token, and the `count` most likely tokens with theirs, the likeliest first.

    Of equally likely ones the lower ids come first.
    """
    scores = float_row(logits)
    best = scores.max()
    weights = scores - best
    total = math.log(np.exp(weights, out=weights).sum(dtype=np.float64))
    likely = top_k(scores, count) if count else np.empty(0, np.int64)
    likely = likely[np.lexsort((likely, -scores[likely]))][:count].tolist()
    return float(scores[token] - best) - total, [(each, float(scores[each] - best) - total) for each in likely]


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
