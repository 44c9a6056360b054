"""Train a categorical student without a teacher, on its own uniforms, and let it verify itself (PTP, Alg. 3)."""

from __future__ import annotations

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import DynamicCache

from saltus.training.data.uniform_intervals import (
    SkippedTokens,
    TokenOrder,
    pick_tokens,
    sample_uniforms,
    uniform_intervals,
)
from saltus.training.data.window_packing import gather_windows, pack_windows, query_uniforms, valid_prefix
from saltus.training.tasks import losses
from saltus.training.tasks.distillation import draft_window
from saltus.training.tasks.student import Student


@torch.no_grad()
def infer_uniforms(
    student: Student,
    texts: Int[Tensor, "batch length"],
    window_starts: Int[Tensor, "batch windows"],
    window: int,
    generator: np.random.Generator,
    *,
    beta: float = 1.0,
    token_order: TokenOrder = "pick",
    skipped: SkippedTokens | None = None,
) -> tuple[Float[Tensor, "batch windows window"], Tensor]:
    """The uniforms under which the student itself would write the windows, and which tokens count (Alg. 3, lines 4–7).

    Token after token: the law of each depends on the uniforms before it. The context is read once, into a cache.
    """
    tokens = gather_windows(texts, window_starts, window)
    uniforms = torch.full(tuple(tokens.shape), torch.nan, dtype=torch.float64, device=texts.device)
    holds = torch.zeros(tuple(tokens.shape), dtype=torch.bool, device=texts.device)
    windows, cache = window_starts.shape[1], DynamicCache()
    packed = pack_windows(texts, window_starts, uniforms)
    student.forward_cached(packed.row_slice(0, packed.context_length), cache)
    for depth in range(window):
        start = packed.context_length + depth * windows
        if depth:  # each query is given the uniform of the token before it
            packed.uniforms[:, start : start + windows] = uniforms[..., depth - 1]
        distributions = student.forward_cached(packed.row_slice(start, start + windows), cache)
        borders = uniform_intervals(distributions, tokens[..., depth], token_order=token_order)
        uniforms[..., depth], holds[..., depth] = sample_uniforms(borders, generator, beta)
        if skipped is not None:
            skipped.record(holds[..., depth], tokens[..., depth], borders)
    return uniforms, valid_prefix(holds)


def loss(
    student: Student,
    texts: Int[Tensor, "batch length"],
    window_starts: Int[Tensor, "batch windows"],
    window: int,
    generator: np.random.Generator,
    skipped: SkippedTokens,
    *,
    beta: float = 1.0,
    token_order: TokenOrder = "pick",
) -> Float[Tensor, ""]:
    """−log P(t_k | t_<i, u_i … u_{k−1}) over the windows, in nats a token (PTP, Eq. 13)."""
    uniforms, counted = infer_uniforms(
        student, texts, window_starts, window, generator, beta=beta, token_order=token_order, skipped=skipped
    )
    logits = student(pack_windows(texts, window_starts, query_uniforms(uniforms, "categorical")))
    return losses.masked_mean(losses.cross_entropy(logits, gather_windows(texts, window_starts, window)), counted)


@torch.no_grad()
def verifier_logits(
    student: Student, texts: Int[Tensor, "batch length"], first_position: int = 1
) -> Float[Tensor, "batch positions vocab"]:
    """P(t_k | t_<k) for k = first … length, in one call: at every position one query that is given no uniform.

    So no law depends on more than one auxiliary, and the model is its own verifier (PTP, §2.3).
    """
    count = texts.shape[1] - first_position + 1
    splits = first_position + torch.arange(count, device=texts.device).expand(len(texts), -1)
    none = torch.full((*splits.shape, 1), torch.nan, dtype=torch.float64, device=texts.device)
    return student(pack_windows(texts, splits, none))[:, :, 0]


@torch.no_grad()
def self_speculative_decode(
    student: Student,
    context: Int[Tensor, "1 context"],
    uniforms: Float[Tensor, "length"],
    window: int,
    token_order: TokenOrder = "pick",
) -> tuple[Int[Tensor, "length"], int]:
    """One text from a categorical student that verifies itself, and the calls it took (PTP, Alg. 1).

    The text is that of a window of one token, whatever the window: Pick(u_k, P(t_k | t_<k)).
    """
    text, calls, before = context, 0, context.shape[1]
    end = before + len(uniforms)
    while text.shape[1] < end:
        here = uniforms[text.shape[1] - before :][:window]
        drafted = draft_window(student, text, here[None], "categorical", token_order)
        distributions = verifier_logits(student, torch.cat([text, drafted[:, :-1]], 1), text.shape[1])
        own = pick_tokens(here[None], distributions, token_order=token_order)
        agreed = int((own == drafted).to(torch.int64).cumprod(-1).sum())
        text = torch.cat([text, own[:, : agreed + 1]], 1)
        calls += 2
    return text[0, before:], calls
