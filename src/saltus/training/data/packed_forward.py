"""Forward a packed batch through any causal model of Transformers: the attention of decoding, with gradients."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from saltus.core.forward import NO_TOKEN, PLACEHOLDER_TOKEN
from saltus.methods.shared.context_layers import MASKED_SCORE
from saltus.models.attention_span import AttentionSpan, first_visible
from saltus.models.cpu import attention
from saltus.models.decoder_of import decoder_of
from saltus.models.gated_lora import Adapter, Gate, gated_adapter
from saltus.models.recurrent_layers import other_key_types, recurrent_layer_types
from saltus.training.data.window_packing import PackedBatch, pack_rows, slice_rows


def prepare_model(model: Any) -> Any:
    """The model as `packed_logits` needs it: frozen, without dropout, with the attention of `models.cpu.attention`.

    Errors: ValueError for a model with layers that keep a state or choose keys, which cannot read windows beside each
    other.
    """
    if kinds := recurrent_layer_types(model):
        raise ValueError(
            f"{type(model).__name__} keeps a state in {kinds[0]} layers, so many windows cannot be read in one pass;"
            " train a drafter of hidden states, or draft by lookup"
        )
    if others := other_key_types(model):
        raise ValueError(
            f"{type(model).__name__} chooses keys in {others[0]} layers, so many windows cannot be read in one pass;"
            " train a drafter of hidden states, or draft by lookup"
        )
    attention.install_attention(model)
    return without_dropout(model).requires_grad_(False).eval()


def without_dropout(model: Any) -> Any:
    """The model, whose dropout is off in training, too: a step's loss follows from the weights alone."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name, value in list(vars(module).items()):  # models that have none of torch's modules for it
            if isinstance(value, float) and ("dropout" in name or name.endswith("pdrop")):
                setattr(module, name, 0.0)
    return model


def pack_causal(tokens: Int[Tensor, "batch length"]) -> PackedBatch:
    """Texts without queries, with a causal mask."""
    batch, length = tokens.shape
    mask = torch.ones(length, length, dtype=torch.bool, device=tokens.device).tril().expand(batch, -1, -1)
    return pack_rows(tokens, mask)


@dataclass(eq=False)
class PackedMemory:
    """Keys and values of the rows that were computed so far, for batches whose later rows follow."""

    positions: Int[Tensor, "batch length"]  # of all rows
    layers: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    grows: bool = True  # False: rows from now on are not kept

    def extend(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """All keys and values of a layer so far, [batch, heads, rows, dim], the new ones included."""
        if layer in self.layers:
            key, value = (torch.cat(pair, 2) for pair in zip(self.layers[layer], (key, value), strict=True))
        if self.grows:
            self.layers[layer] = key, value
        return key, value


def packed_logits(
    model: Any,
    packed: PackedBatch,
    row_indices: Int[Tensor, "kept"],
    adapter: Adapter | None = None,
    temperatures: Float[Tensor, "batch windows"] | None = None,
    recompute: bool = False,
    memory: PackedMemory | None = None,
) -> Float[Tensor, "kept vocab"]:
    """Logits of some rows, in float32 or better, in one call of a model that `prepare_model` returned.

    Row indices count through the whole batch. With an adapter, its weights act on the queries, conditioned on the
    windows' temperatures. `recompute` checkpoints the activations: less memory, more time. With a `memory` the rows
    follow those that it holds.
    """
    packed_attention = _PackedAttention(packed, memory)
    gate = None if temperatures is None else query_gate(packed, temperatures)

    @contextmanager
    def during() -> Iterator[None]:
        """The context in which a layer is computed, also when it is computed again."""
        with (
            attention.attention_context(packed_attention),
            gated_adapter(model, adapter, gate) if adapter and gate else nullcontext(),
        ):
            yield

    with (
        during(),
        _keep_rows(model, row_indices),
        _gradient_checkpointing(model, during) if recompute else nullcontext(),
    ):
        ids = packed.tokens.clamp_min(PLACEHOLDER_TOKEN)
        logits = model(input_ids=ids, position_ids=packed.positions, use_cache=False).logits[0]
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def query_logits(
    model: Any,
    packed: PackedBatch,
    row_indices: Int[Tensor, "kept"],
    adapter: Adapter,
    temperatures: Float[Tensor, "batch windows"],
    recompute: bool = False,
) -> Float[Tensor, "kept vocab"]:
    """`packed_logits` of queries alone, in less time and memory: the context is computed first, without gradients.

    The gated adapter does not act on the context, so no gradient flows through its rows.
    """
    context, length = packed.context_length, packed.tokens.shape[1]
    memory = PackedMemory(packed.positions)
    with torch.no_grad():
        packed_logits(model, slice_rows(packed, 0, context), row_indices[:0], memory=memory)
    memory.grows = False  # a checkpointed layer is computed twice
    queries = slice_rows(packed, context, length)
    rows = row_indices // length * (length - context) + row_indices % length - context
    return packed_logits(model, queries, rows, adapter, temperatures, recompute, memory)


def packed_states(
    model: Any, inputs: Float[Tensor, "batch length hidden"], packed: PackedBatch, memory: PackedMemory
) -> Float[Tensor, "batch length hidden"]:
    """The last hidden states of rows with these inputs in place of embeddings, after the rows in the memory."""
    with attention.attention_context(_PackedAttention(packed, memory)):
        decoder = decoder_of(model)
        return decoder(inputs_embeds=inputs, position_ids=packed.positions, use_cache=False).last_hidden_state


def query_gate(packed: PackedBatch, temperatures: Float[Tensor, "batch windows"]) -> Gate:
    """The query rows of all windows, with their uniforms and temperatures."""
    context = packed.context_length
    row_temperatures = temperatures.repeat(1, packed.window_size)  # rows are sorted by depth
    tokens, uniforms = (part[:, context:].flatten() for part in (packed.tokens, packed.uniforms))
    rows = torch.arange(packed.tokens.numel(), device=tokens.device).view(packed.tokens.shape)[:, context:].flatten()
    return Gate(rows if context else None, uniforms, row_temperatures.flatten(), tokens != NO_TOKEN)


@dataclass(eq=False)
class _PackedAttention:
    """Attention with a packed batch's mask: an additive mask [batch, 1, rows, columns] for each span of layers."""

    packed: PackedBatch
    memory: PackedMemory | None = None
    additive_masks: dict[tuple[AttentionSpan, torch.dtype], Tensor] = field(default_factory=dict)

    @property
    def positions(self) -> Int[Tensor, "batch rows"]:
        return self.packed.positions

    def attend(self, module, query, key, value, scale, span, softcap, sinks) -> Tensor:
        """[batch, heads, rows, dim] to [batch, rows, heads, dim]."""
        if self.memory is not None:
            key, value = self.memory.extend(module.layer_idx, key, value)
        mask = self._additive_mask(span, query.dtype)
        if not softcap and sinks is None:
            out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale, enable_gqa=True)
            return out.transpose(1, 2)
        key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
        return attention.capped_attention(query, key, value, mask, scale, softcap, sinks).transpose(1, 2)

    def _additive_mask(self, span: AttentionSpan, dtype: torch.dtype) -> Tensor:
        if (span, dtype) not in self.additive_masks:
            mask, positions = self.packed.mask, self.packed.positions
            columns = positions if self.memory is None else self.memory.positions[:, : mask.shape[2]]
            if span is not None:
                mask = mask & (columns[:, None] >= first_visible(positions, span)[:, :, None])
            self.additive_masks[span, dtype] = torch.where(mask, 0.0, MASKED_SCORE).to(dtype)[:, None]
        return self.additive_masks[span, dtype]


@contextmanager
def _keep_rows(model: Any, row_indices: Int[Tensor, "kept"]) -> Iterator[None]:
    """While open, the decoder returns only these rows, as one text; the LM head computes no others."""

    def choose(module, inputs, out):
        out.last_hidden_state = out.last_hidden_state.flatten(0, 1)[row_indices][None]
        return out

    hook = decoder_of(model).register_forward_hook(choose)
    try:
        yield
    finally:
        hook.remove()


@contextmanager
def _gradient_checkpointing(model: Any, layer_context) -> Iterator[None]:
    """While open, activations of layers are checkpointed (Chen et al. 2016), also in eval mode: dropout stays off."""
    layers = [layer for layer in model.modules() if isinstance(layer, GradientCheckpointingLayer)]
    for layer in layers:
        checkpointed = partial(
            checkpoint, layer.forward, use_reentrant=False, context_fn=lambda: (nullcontext(), layer_context())
        )
        layer.forward = checkpointed
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward
