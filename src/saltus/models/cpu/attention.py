"""Tree attention over many texts in one call, registered as an attention implementation of Transformers.

The arithmetic of a row does not depend on the other rows of the call, so a token's logits do not depend on the decoding
method. The compiled kernels have this property by construction. Without a compiler each row is evaluated by
operations whose shapes depend on the row alone. On an accelerator fixed shapes are used instead (fixed_shapes.py).
Without `batch_invariant` shapes are free, as in other engines: for models that neither of these can serve, and for
comparisons.

Outside `attention_context` a model attends as it did before `install_attention`.
"""

from __future__ import annotations

import ctypes
import sys
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import UInt8

from saltus.kernels import native
from saltus.kernels.native import structs
from saltus.models.attention_span import AttentionSpan, Chunks, first_visible
from saltus.models.cpu.kv_cache import KVCache
from saltus.models.cuda.host_copies import to_device
from saltus.models.temperature_tuning import is_tuned, leave_out_tuning, tuned_queries

ATTENTION_NAME = "saltus"
FROM_FIRST_SLOT = np.zeros(1024, dtype=np.int32)  # of rows that see the whole text
FROM_FIRST_SLOT_ADDRESS = native.address(FROM_FIRST_SLOT)
UNSUPPORTED_ARGUMENTS = {  # of an attention layer, which change what it computes
    "position_bias": "position biases",
    "sinks": "attention sinks that depend on the token",
    "indices": "an indexer that chooses keys",
}


def ancestor_mask(parents: Sequence[int]) -> UInt8[np.ndarray, "nodes nodes"]:
    """mask[i, j] is 1 if node j is node i or an ancestor of it. `parents[i] < i`; −1 is none."""
    mask = np.eye(len(parents), dtype=np.uint8)
    for node, parent in enumerate(parents):
        if parent >= 0:
            mask[node] |= mask[parent]
    return mask


@dataclass
class SequenceRows:
    """The rows of one text in a call: they follow `past_length` entries of its KV cache; `tree_mask` is among them."""

    kv_cache: KVCache
    past_length: int
    positions: np.ndarray  # [rows]
    tree_mask: np.ndarray  # [rows, rows] uint8
    parents: Sequence[int] = ()  # of the last rows, which are nodes of a tree
    ends_text: bool = True  # False: more decided tokens follow in the next call
    window_mask: np.ndarray | None = None  # in place of `tree_mask` in layers with a sliding window
    # Kept alive here because kernels get pointers to them.
    masks_by_span: dict[AttentionSpan, tuple[np.ndarray, np.ndarray]] = field(default_factory=dict)

    @property
    def num_rows(self) -> int:
        return len(self.positions)

    def first_visible_slots(self, span: AttentionSpan) -> np.ndarray:
        """The first entry of the KV cache that each row sees; entries of decided tokens are positions.

        A node's entry is never before its position, so this hides no row of the call that is visible.
        """
        return first_visible(self.positions, span).astype(np.int32)

    def tree_mask_within(self, span: AttentionSpan) -> np.ndarray:
        """Which rows of the call each row sees."""
        mask = self.tree_mask if span is None or self.window_mask is None else self.window_mask
        first = first_visible(self.positions, span)
        if first.max() <= self.positions.min():
            return mask
        return mask & (self.positions >= first[:, None])

    def fill_rows(self, struct: structs.Attention, span: AttentionSpan) -> None:
        """Set the kernel's arguments that say which rows there are and what they see."""
        struct.rows, struct.past = self.num_rows, self.past_length
        if span is None and self.num_rows <= len(FROM_FIRST_SLOT):
            struct.visible, struct.first = native.address(self.tree_mask), FROM_FIRST_SLOT_ADDRESS
            return
        if span not in self.masks_by_span:
            self.masks_by_span[span] = self.first_visible_slots(span), self.tree_mask_within(span)
        first, visible = self.masks_by_span[span]
        struct.visible, struct.first = native.address(visible), native.address(first)

    def kernel_arguments(
        self, span: AttentionSpan, query, key, value, out, scale, softcap=None, sinks=None
    ) -> structs.Attention:
        """The kernel's arguments but the layer's KV cache. Tensors: [heads, rows, dim]; out: [rows, heads, dim]."""
        struct = structs.Attention(
            query=query.data_ptr(), query_head=query.stride(0), query_row=query.stride(1),
            key=key.data_ptr(), key_head=key.stride(0), key_row=key.stride(1),
            value=value.data_ptr(), value_head=value.stride(0), value_row=value.stride(1),
            out=out.data_ptr(), heads=query.shape[0], kv_heads=key.shape[0],
            dim=query.shape[-1], value_dim=value.shape[-1], value_size=value.shape[-1], scale=scale,
            softcap=softcap or 0.0, sinks=None if sinks is None else sinks.data_ptr(),
        )  # fmt: skip
        self.fill_rows(struct, span)
        return struct


@dataclass
class AttentionCall:
    """What the attention of every layer needs to know of the current call."""

    sequences: Sequence[SequenceRows]
    num_layers: int
    batch_invariant: bool = True
    attended: set[int] = field(default_factory=set)  # layers that have, in a forward pass of Transformers

    @property
    def positions(self) -> torch.Tensor:
        """Those of all rows, [1, rows]."""
        return torch.from_numpy(np.concatenate([part.positions for part in self.sequences]))[None]


@runtime_checkable
class AttentionBackend(Protocol):
    """A call with an attention of its own (fixed shapes, packed training batches)."""

    @property
    def positions(self) -> torch.Tensor: ...  # [batch, rows]

    def attend(self, module, query, key, value, scale, span, softcap, sinks) -> torch.Tensor: ...


_thread_local = threading.local()


class attention_context:
    """Within it, models of this thread attend by `call`."""

    def __init__(self, call: AttentionCall | AttentionBackend) -> None:
        self.call, self.outer = call, None

    def __enter__(self) -> None:
        self.outer, _thread_local.call = _current_call(), self.call

    def __exit__(self, *_) -> None:
        _thread_local.call = self.outer


def _current_call() -> AttentionCall | AttentionBackend | None:
    return getattr(_thread_local, "call", None)


_former_implementations: dict[int, str] = {}  # by id of a config, which cannot be hashed or given another attribute


def install_attention(model: torch.nn.Module) -> None:
    """Let a Transformers model attend by this file within `attention_context`, and as before outside of it."""
    _register()
    leave_out_tuning(model, lambda: _current_call() is not None)
    for module in model.modules():
        config = getattr(module, "config", None)
        former = getattr(config, "_attn_implementation", None)
        if config is not None and former not in (None, ATTENTION_NAME):
            if id(config) not in _former_implementations:
                weakref.finalize(config, _former_implementations.pop, id(config), None)
            _former_implementations[id(config)] = former
    model.set_attn_implementation(ATTENTION_NAME)  # pyright: ignore[reportCallIssue]


@lru_cache
def _register() -> None:
    """Make the functions of this file known to Transformers, whose model classes take seconds to import."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(ATTENTION_NAME, attend)
    AttentionMaskInterface.register(ATTENTION_NAME, attention_mask)


def _former_attention(module: torch.nn.Module):
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    name = _former_implementations.get(id(module.config), "sdpa")
    if name == "eager":
        return getattr(sys.modules[type(module).__module__], "eager_attention_forward", ALL_ATTENTION_FUNCTIONS["sdpa"])
    return ALL_ATTENTION_FUNCTIONS[name]


def attend(module, query, key, value, attention_mask=None, **kwargs):
    """The attention function that Transformers calls in each layer: [1, heads, rows, dim] → [1, rows, heads, dim]."""
    call = _current_call()
    if call is None:
        return _former_attention(module)(module, query, key, value, attention_mask, **kwargs)
    for name, what in UNSUPPORTED_ARGUMENTS.items():
        if kwargs.get(name) is not None:
            raise ValueError(f"{type(module).__name__} has {what}, which Saltus does not support")
    scaling, span, softcap, sinks = (kwargs.get(name) for name in ("scaling", "sliding_window", "softcap", "s_aux"))
    if isinstance(attention_mask, SpanMask):
        span = attention_mask.span
    elif attention_mask is not None:
        raise ValueError(f"{type(module).__name__} adds a mask of its own to its scores, which Saltus does not support")
    if key.shape[2] != query.shape[2] or value.shape[2] != query.shape[2]:
        raise ValueError(f"{type(module).__name__} attends to other keys than those of the text")
    if sinks is not None and sinks.shape != query.shape[1:2]:
        raise ValueError(f"{type(module).__name__} has {sinks.numel()} sinks for {query.shape[1]} heads")
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    if is_tuned(module):
        query = tuned_queries(module, query, call.positions.to(query.device))
    if not isinstance(call, AttentionCall):
        return call.attend(module, query, key, value, scale, span, softcap, sinks), None
    note_layer(call.attended, module)
    query, key, value = query[0], key[0], value[0]
    sinks = None if sinks is None else sinks.float().contiguous()
    if query.shape[1] != sum(part.num_rows for part in call.sequences):
        raise ValueError(f"{type(module).__name__} attends from other rows than those of the call")
    out = query.new_zeros(query.shape[1], query.shape[0], value.shape[-1])
    compiled = native.kernel("attend", query.dtype, query.device) if call.batch_invariant else None
    start = 0
    for part in call.sequences:
        rows = slice(start, start + part.num_rows)
        start += part.num_rows
        q, k, v = query[:, rows], key[:, rows], value[:, rows]
        slots = part.past_length + part.num_rows
        keys, values = part.kv_cache.reserve_layer(module.layer_idx, call.num_layers, slots, k, v)
        if compiled is not None:
            _attend_compiled(compiled, part, q, k, v, keys, values, out[rows], scale, span, softcap, sinks)
            continue
        keys[:, part.past_length : part.past_length + part.num_rows] = k
        values[:, part.past_length : part.past_length + part.num_rows] = v
        by = _attend_row_by_row if call.batch_invariant and query.device.type == "cpu" else _attend_masked
        out[rows] = by(part, q, keys, values, scale, span, softcap, sinks)
    return out[None], None


def note_layer(attended: set[int], module: Any) -> None:
    """Add a layer to those that have attended. Errors: ValueError for the second time: its first keys would be lost."""
    if module.layer_idx in attended:
        raise ValueError(f"{type(module).__name__} attends more than once in a layer, which Saltus does not support")
    attended.add(module.layer_idx)


def _attend_compiled(kernel, sequence, q, k, v, keys, values, out, scale, span, softcap, sinks) -> None:
    """One text, one layer, by the compiled kernel, which also writes the new keys and values to the KV cache."""
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    _check_shapes(sequence, q, k, v, keys, values, out)
    struct = sequence.kernel_arguments(span, q, k, v, out, scale, softcap, sinks)
    struct.keys, struct.values, struct.capacity = keys.data_ptr(), values.data_ptr(), keys.shape[1]
    if kernel(ctypes.byref(struct)):
        raise MemoryError("attention ran out of memory; ask for a shorter text")


def _check_shapes(sequence, q, k, v, keys, values, out) -> None:
    """Raise ValueError unless what the kernel is handed has the sizes that it reads and writes."""
    heads, rows, dim = q.shape
    kv_heads, slots, value_dim = values.shape
    fits = (
        k.shape == (kv_heads, rows, dim)
        and v.shape == (kv_heads, rows, value_dim)
        and heads % kv_heads == 0
        and k.dtype == v.dtype == q.dtype
    )
    if not fits:
        raise ValueError(
            f"a layer attends by queries {list(q.shape)} of {q.dtype} to keys {list(k.shape)} of {k.dtype} and values"
            f" {list(v.shape)} of {v.dtype} [heads, rows, size], which do not fit together"
        )
    assert rows == sequence.num_rows and sequence.past_length + rows <= slots
    assert keys.shape == (kv_heads, slots, dim) and out.shape == (rows, heads, value_dim)
    assert all(x.is_contiguous() and x.dtype == q.dtype for x in (keys, values, out))


def _attend_row_by_row(sequence, q, keys, values, scale, span, softcap, sinks) -> torch.Tensor:
    """Each row alone over just the keys that it sees: shapes depend on the row's position and on nothing else."""
    group = q.shape[0] // keys.shape[0]
    first, seen, out = sequence.first_visible_slots(span), sequence.tree_mask_within(span), []
    sinks = None if sinks is None else sinks.view(-1, group, 1)
    for row in range(sequence.num_rows):
        new = torch.from_numpy(np.flatnonzero(seen[row]) + sequence.past_length)
        old = slice(int(first[row]), sequence.past_length)
        k = torch.cat([keys[:, old], keys[:, new]], 1).float()
        v = torch.cat([values[:, old], values[:, new]], 1).float()
        scores = q[:, row].float().unflatten(0, (-1, group)) @ k.mT * scale  # [kv_heads, group, keys]
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        out.append((softmax_with_sinks(scores, sinks) @ v).flatten(0, 1))
    return torch.stack(out).to(q.dtype)


def _attend_masked(sequence, q, keys, values, scale, span, softcap, sinks) -> torch.Tensor:
    """All rows at once under a mask: fast on an accelerator, but rounding depends on the shapes of the call."""
    end = sequence.past_length + sequence.num_rows
    seen = np.ones((sequence.num_rows, end), dtype=bool)
    seen[:, sequence.past_length :] = sequence.tree_mask_within(span)
    seen &= np.arange(end) >= sequence.first_visible_slots(span)[:, None]
    mask = to_device(seen, q.device)
    if softcap or sinks is not None:
        group = q.shape[0] // keys.shape[0]
        k, v = (x[:, :end].repeat_interleave(group, 0) for x in (keys, values))
        return capped_attention(q, k, v, torch.where(mask, 0.0, -30000.0), scale, softcap, sinks).transpose(0, 1)
    out = F.scaled_dot_product_attention(
        q[None], keys[None, :, :end], values[None, :, :end], attn_mask=mask, scale=scale, enable_gqa=True
    )
    return out[0].transpose(0, 1)


def capped_attention(query, key, value, mask, scale, softcap, sinks) -> torch.Tensor:
    """Attention [..., heads, rows, dim] with capped scores or sinks [heads], which torch's own knows not."""
    scores = (query @ key.mT).float() * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    weights = softmax_with_sinks(scores + mask, None if sinks is None else sinks.float().view(-1, 1, 1))
    return weights.to(query.dtype) @ value


def softmax_with_sinks(scores: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    """Weights of keys, along the last axis; a sink is one more score, whose weight is left out (Xiao et al. 2024)."""
    if sinks is None:
        return scores.softmax(-1)
    return torch.cat([scores, sinks.expand(*scores.shape[:-1], 1)], -1).softmax(-1)[..., :-1]


@dataclass(frozen=True)
class SpanMask:
    """Takes the place of a mask: how far back a layer attends. Some models state it by their mask only."""

    span: AttentionSpan


def attention_mask(*args, config=None, local_size=None, **kwargs):
    """The mask function that Transformers calls for each kind of layer; tree masks are in the AttentionCall."""
    if _current_call() is None:
        from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

        former = ALL_MASK_ATTENTION_FUNCTIONS[_former_implementations.get(id(config), "sdpa")]
        size = {} if local_size is None else {"local_size": local_size}
        return former(*args, config=config, **size, **kwargs)
    if local_size is None:
        return None
    return SpanMask(Chunks(local_size) if _is_chunk_size(config, local_size) else local_size)


def _is_chunk_size(config: Any, local_size: int) -> bool:
    """Whether a mask's size is that of chunks or of a sliding window, which Transformers states alike."""
    if local_size != getattr(config, "attention_chunk_size", None):
        return False
    if local_size != getattr(config, "sliding_window", None):
        return True
    kinds = set(getattr(config, "layer_types", None) or ()) & {"chunked_attention", "sliding_attention"}
    if len(kinds) != 1:
        raise ValueError(f"its windows and its chunks have {local_size} tokens each, so that they cannot be told apart")
    return kinds == {"chunked_attention"}
