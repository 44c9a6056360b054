"""Let the adapter draft the training windows itself, for the teacher to judge (PTP, Alg. 2: P(t) is the student)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from saltus.core.picking import Coupling
from saltus.models.gated_lora import Adapter
from saltus.training.data.packed_forward import packed_logits, query_logits
from saltus.training.data.uniform_intervals import Truncation, pick_tokens, sample_uniforms, uniform_intervals
from saltus.training.data.window_dataset import Batch
from saltus.training.data.window_packing import UniformConditioning, pack_windows, query_uniforms, valid_prefix


def choose_windows(batch: Batch, share: float, generator: np.random.Generator) -> Bool[Tensor, "batch windows"]:
    """The windows that the student drafts; none at temperature 0, where the teacher has one token."""
    chosen = torch.from_numpy(generator.random(tuple(batch.temperatures.shape)) < share)
    return chosen.to(batch.tokens.device) & (batch.temperatures > 0)


@torch.no_grad()
def with_student_windows(
    batch: Batch,
    chosen: Bool[Tensor, "batch windows"],
    model: Any,
    adapter: Adapter,
    teacher: Any,
    form: UniformConditioning,
    generator: np.random.Generator,
    coupling: Coupling = "probability",
    beta: float = 1.0,
    truncation: Truncation | None = None,
) -> Batch:
    """The batch with the tokens of the chosen windows replaced by drafts of the adapter from fresh uniforms.

    Their new uniforms are those under which the teacher writes the drafts. A window ends before a draft that the
    teacher's distribution, as truncated, does not have, and after an end token.
    """
    uniforms = torch.from_numpy(generator.random(tuple(batch.targets.shape))).to(batch.tokens.device)
    scale = torch.where(batch.temperatures == 0, 1.0, batch.temperatures)[..., None, None]
    drafts = _draft(batch, uniforms, scale, model, adapter, form, coupling)
    logits = window_logits(teacher, replace(batch, targets=drafts))
    intervals = uniform_intervals(logits / scale.to(logits.dtype), drafts, coupling=coupling, truncation=truncation)
    sampled, valid = sample_uniforms(intervals, generator, beta)
    known = valid | sampled.isnan()  # a coupling without uniforms
    known &= _before_end(drafts, model)
    mask = chosen[..., None]
    return replace(
        batch,
        targets=torch.where(mask, drafts, batch.targets),
        uniforms=torch.where(mask, sampled, batch.uniforms),
        loss_mask=torch.where(mask, valid_prefix(known), batch.loss_mask),
        inside=torch.where(mask, known, batch.inside),
    )


@torch.no_grad()
def window_logits(model: Any, batch: Batch) -> Float[Tensor, "batch windows window vocab"]:
    """The model's logits for every token of every window, given the context and the window's tokens before it."""
    shape, device = batch.targets.shape, batch.tokens.device
    packed = pack_windows(batch.tokens, batch.window_starts, torch.full(shape, torch.nan, device=device).double())
    tokens = packed.tokens.clone()
    tokens[:, packed.context_length :] = batch.targets.transpose(1, 2).flatten(1)
    rows = torch.arange(tokens.numel(), device=device).view(tokens.shape)
    first = rows.gather(1, batch.window_starts - 1)[..., None]
    before = torch.cat([first, packed.queries_by_window(rows)[..., :-1]], -1)  # the row before each token
    return packed_logits(model, replace(packed, tokens=tokens), before.flatten()).view(*shape, -1)


def _draft(
    batch: Batch,
    uniforms: Float[Tensor, "batch windows window"],
    scale: Float[Tensor, "batch windows 1 1"],
    model: Any,
    adapter: Adapter,
    form: UniformConditioning,
    coupling: Coupling,
) -> Int[Tensor, "batch windows window"]:
    """The argmax of each query (Eq. 5), or the token that its uniform picks (Eq. 7)."""
    packed = pack_windows(
        batch.tokens, batch.window_starts, query_uniforms(uniforms, form), query_start=adapter.settings.query_start
    )
    rows = torch.arange(packed.tokens.numel(), device=packed.tokens.device).view(packed.tokens.shape)
    rows = packed.queries_by_window(rows)
    logits = query_logits(model, packed, rows.flatten(), adapter, batch.temperatures).view(*rows.shape, -1)
    if form == "one-hot":
        return logits.argmax(-1)
    order: Coupling = "probability" if coupling == "gumbel" else coupling  # without uniforms any sample will do
    return pick_tokens(uniforms, logits / scale.to(logits.dtype), coupling=order)


def _before_end(drafts: Int[Tensor, "batch windows window"], model: Any) -> Bool[Tensor, "batch windows window"]:
    """True up to the first end token of a window, itself included."""
    ends = getattr(model.config, "eos_token_id", None)
    ends = torch.tensor([ends] if isinstance(ends, int) else list(ends or ()), device=drafts.device)
    ended = torch.isin(drafts, ends).long().cumsum(-1)
    return torch.cat([torch.zeros_like(ended[..., :1]), ended[..., :-1]], -1) == 0
