"""Read packed windows with any causal model of Transformers: the same attention as at decoding, with gradients."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from saltus.core.forward import AUXILIARY
from saltus.networks import attention
from saltus.networks.causal import STAND_IN
from saltus.networks.drafter import HIDDEN
from saltus.networks.gated import Adapter, Gate, applied
from saltus.training.windows import Packed


def prepared(model: Any) -> Any:
    """The model as `said` reads it: frozen, without dropout, and with the attention that a call is told of."""
    model.set_attn_implementation(attention.NAME)
    return model.requires_grad_(False).eval()


def causal(tokens: Int[Tensor, "batch length"]) -> Packed:
    """Texts as they are, without queries."""
    batch, length = tokens.shape
    mask = torch.ones(length, length, dtype=torch.bool, device=tokens.device).tril().expand(batch, -1, -1)
    none = torch.full(tokens.shape, torch.nan, dtype=torch.float64, device=tokens.device)
    positions = torch.arange(length, device=tokens.device).expand(batch, -1)
    return Packed(tokens, none, positions, mask, length, 0, 0)


def said(
    model: Any,
    packed: Packed,
    keep: Int[Tensor, "kept"],
    adapter: Adapter | None = None,
    temperatures: Float[Tensor, "batch windows"] | None = None,
    recompute: bool = False,
) -> Float[Tensor, "kept vocab"]:
    """Logits of the rows to keep, which count through the whole batch, in one call of a `prepared` model.

    In float32 or better. Queries, if there are any, are served by the adapter, which is told the windows' temperatures.
    `recompute`: layers keep what they read alone, and are computed again for the gradients.
    """
    seen = _Seen(packed)
    gate = None if temperatures is None else gate_of(packed, temperatures)

    @contextmanager
    def during() -> Iterator[None]:
        """All that a layer needs around it, also when it is computed again."""
        with attention.during(seen), applied(model, adapter, gate) if adapter and gate else nullcontext():
            yield

    with during(), _kept(model, keep), _recomputed(model, during) if recompute else nullcontext():
        ids = packed.tokens.clamp_min(STAND_IN)
        logits = model(input_ids=ids, position_ids=packed.positions, use_cache=False).logits[0]
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def gate_of(packed: Packed, temperatures: Float[Tensor, "batch windows"]) -> Gate:
    """The queries of all windows, and what they are told."""
    batch, length = packed.tokens.shape
    rows = torch.arange(batch * length, device=packed.tokens.device).view(batch, length)[:, packed.context :]
    told = temperatures.repeat(1, packed.window)  # rows stand depth by depth
    tokens, uniforms = (part[:, packed.context :].flatten() for part in (packed.tokens, packed.uniforms))
    return Gate(rows.flatten(), uniforms, told.flatten(), tokens != AUXILIARY)


@dataclass(eq=False)
class _Seen:
    """Attention by the mask of packed windows: an additive one, [batch, 1, rows, columns], for each sliding window."""

    packed: Packed
    masks: dict[tuple[int | None, torch.dtype], Tensor] = field(default_factory=dict)

    def attend(self, module, query, key, value, scale, window, softcap) -> Tensor:
        """[batch, heads, rows, dim] to [batch, rows, heads, dim]."""
        mask = self._mask(window, query.dtype)
        if not softcap:
            out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale, enable_gqa=True)
            return out.transpose(1, 2)
        key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
        scores = softcap * torch.tanh((query @ key.mT).float() * scale / softcap) + mask
        return (scores.softmax(-1).to(query.dtype) @ value).transpose(1, 2)

    def _mask(self, window: int | None, dtype: torch.dtype) -> Tensor:
        if (window, dtype) not in self.masks:
            mask, positions = self.packed.mask, self.packed.positions
            if window is not None:
                mask = mask & (positions[:, :, None] - positions[:, None] < window)
            self.masks[window, dtype] = torch.where(mask, 0.0, HIDDEN).to(dtype)[:, None]
        return self.masks[window, dtype]


@contextmanager
def _kept(model: Any, keep: Int[Tensor, "kept"]) -> Iterator[None]:
    """While open, the decoder gives out the chosen rows alone, as one text: no others reach the vocabulary."""

    def choose(module, inputs, out):
        out.last_hidden_state = out.last_hidden_state.flatten(0, 1)[keep][None]
        return out

    hook = model.get_decoder().register_forward_hook(choose)
    try:
        yield
    finally:
        hook.remove()


@contextmanager
def _recomputed(model: Any, during) -> Iterator[None]:
    """While open, layers are checkpointed (Chen et al. 2016), whatever mode they are in: dropout stays off."""
    layers = [layer for layer in model.modules() if isinstance(layer, GradientCheckpointingLayer)]
    for layer in layers:
        again = partial(checkpoint, layer.forward, use_reentrant=False, context_fn=lambda: (nullcontext(), during()))
        layer.forward = again
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward
