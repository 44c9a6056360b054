"""Train a categorical student without a teacher, on its own uniforms, and let it verify itself (PTP, Alg. 3)."""

from __future__ import annotations

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import DynamicCache

from saltus.training import losses
from saltus.training.distillation import draft
from saltus.training.edges import Order, Skipped, edges, picks, place
from saltus.training.student import Student
from saltus.training.windows import followed, given, inside, pack


@torch.no_grad()
def invert(
    student: Student,
    texts: Int[Tensor, "batch length"],
    splits: Int[Tensor, "batch windows"],
    window: int,
    generator: np.random.Generator,
    *,
    b: float = 1.0,
    order: Order = "pick",
    skipped: Skipped | None = None,
) -> tuple[Float[Tensor, "batch windows window"], Tensor]:
    """The uniforms under which the student itself would write the windows, and which tokens count (Alg. 3, lines 4–7).

    Token after token: the law of each depends on the uniforms before it. The context is read once, into a cache.
    """
    tokens = inside(texts, splits, window)
    uniforms = torch.full(tuple(tokens.shape), torch.nan, dtype=torch.float64, device=texts.device)
    holds = torch.zeros(tuple(tokens.shape), dtype=torch.bool, device=texts.device)
    windows, cache = splits.shape[1], DynamicCache()
    packed = pack(texts, splits, uniforms)
    student.read(packed.rows(0, packed.context), cache)
    for depth in range(window):
        start = packed.context + depth * windows
        if depth:  # each query is given the uniform of the token before it
            packed.uniforms[:, start : start + windows] = uniforms[..., depth - 1]
        laws = student.read(packed.rows(start, start + windows), cache)
        borders = edges(laws, tokens[..., depth], order=order)
        uniforms[..., depth], holds[..., depth] = place(borders, generator, b)
        if skipped is not None:
            skipped.add(holds[..., depth], tokens[..., depth], borders)
    return uniforms, followed(holds)


def loss(
    student: Student,
    texts: Int[Tensor, "batch length"],
    splits: Int[Tensor, "batch windows"],
    window: int,
    generator: np.random.Generator,
    skipped: Skipped,
    *,
    b: float = 1.0,
    order: Order = "pick",
) -> Float[Tensor, ""]:
    """−log P(t_k | t_<i, u_i … u_{k−1}) over the windows, in nats a token (PTP, Eq. 13)."""
    uniforms, counted = invert(student, texts, splits, window, generator, b=b, order=order, skipped=skipped)
    logits = student(pack(texts, splits, given(uniforms, "categorical")))
    return losses.mean(losses.cross_entropy(logits, inside(texts, splits, window)), counted)


@torch.no_grad()
def own_laws(
    student: Student, texts: Int[Tensor, "batch length"], first: int = 1
) -> Float[Tensor, "batch positions vocab"]:
    """P(t_k | t_<k) for k = first … length, in one call: at every position one query that is given no uniform.

    So no law depends on more than one auxiliary, and the model is its own verifier (PTP, §2.3).
    """
    count = texts.shape[1] - first + 1
    splits = first + torch.arange(count, device=texts.device).expand(len(texts), -1)
    none = torch.full((*splits.shape, 1), torch.nan, dtype=torch.float64, device=texts.device)
    return student(pack(texts, splits, none))[:, :, 0]


@torch.no_grad()
def write(
    student: Student,
    context: Int[Tensor, "1 context"],
    uniforms: Float[Tensor, "length"],
    window: int,
    order: Order = "pick",
) -> tuple[Int[Tensor, "length"], int]:
    """One text from a categorical student that verifies itself, and the calls it took (PTP, Alg. 1).

    The text is that of a window of one token, whatever the window: Pick(u_k, P(t_k | t_<k)).
    """
    text, calls, before = context, 0, context.shape[1]
    end = before + len(uniforms)
    while text.shape[1] < end:
        here = uniforms[text.shape[1] - before :][:window]
        drafted = draft(student, text, here[None], "categorical", order)
        laws = own_laws(student, torch.cat([text, drafted[:, :-1]], 1), text.shape[1])
        own = picks(here[None], laws, order=order)
        agreed = int((own == drafted).to(torch.int64).cumprod(-1).sum())
        text = torch.cat([text, own[:, : agreed + 1]], 1)
        calls += 2
    return text[0, before:], calls
