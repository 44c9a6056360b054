"""Change the logits of a token by what the text has so far: biases, penalties, repeated n-grams and bans."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from saltus.core.sampling import Sampling


def penalised(scores: np.ndarray, sampling: Sampling, context: np.ndarray | None, index: int) -> np.ndarray:
    """OpenAI's bias and penalties; then RepetitionPenaltyLogitsProcessor (Keskar et al. 2019) and bans.

    The bans are those of NoRepeatNGramLogitsProcessor, MinNewTokensLengthLogitsProcessor and
    SuppressTokensLogitsProcessor.
    """
    if sampling.uses_context and context is None:
        raise ValueError("penalties need the text so far; pass it as context")
    if sampling.logit_bias:
        scores = scores.copy()
        known = [(token, bias) for token, bias in sampling.logit_bias if token < len(scores)]
        with np.errstate(over="ignore"):  # less than a float32 is −∞
            np.add.at(scores, [token for token, _ in known], np.array([bias for _, bias in known], np.float32))
    if context is not None and (sampling.presence_penalty or sampling.frequency_penalty):
        tokens, counts = np.unique(context[len(context) - index :], return_counts=True)
        scores = scores.copy()
        scores[tokens] -= np.float32(sampling.presence_penalty) + np.float32(
            sampling.frequency_penalty
        ) * counts.astype(np.float32)
    if context is not None and sampling.repetition_penalty != 1:
        seen, penalty = context[context >= 0], np.float32(sampling.repetition_penalty)
        values = scores[seen]
        scores = scores.copy()
        scores[seen] = np.where(values < 0, values * penalty, values / penalty)
    if context is not None and sampling.no_repeat_ngram_size:
        scores = _without(scores, _completing_ngrams(context, sampling.no_repeat_ngram_size))
    if sampling.banned:
        scores = _without(scores, sampling.banned_ids)
    if index < sampling.min_new_tokens and len(sampling.end_ids):
        longer = _without(scores, sampling.end_ids)
        scores = longer if longer.max() > -np.inf else scores  # a grammar may leave the end alone
    return scores


def _without(scores: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """The scores, −∞ for some tokens."""
    scores = scores.copy()
    scores[tokens[tokens < len(scores)]] = -np.inf
    return scores


def _completing_ngrams(context: np.ndarray, size: int) -> np.ndarray:
    """The tokens that would end an n-gram of the context once more."""
    if len(context) < size:
        return np.empty(0, dtype=np.int64)
    windows = np.lib.stride_tricks.sliding_window_view(context, size)
    repeated = (windows[:, :-1] == context[len(context) + 1 - size :]).all(1)
    return windows[repeated, -1]
