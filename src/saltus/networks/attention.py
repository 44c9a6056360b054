"""Attend from the rows of many trees, each over its own text's memory, as an attention of Transformers' own.

Row by row the arithmetic is the same whatever else is in the call, so that a token's logits do not depend on the
method that asked for them. The compiled kernel does that by construction (native.c). Without a compiler each row is
evaluated by operations whose shapes depend on the row alone. On an accelerator fixed shapes take this place
(canonical.py). `free` shapes, as every other engine uses them, are kept for models that neither serves, and to show
the flips that come with them.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import numpy as np
import torch
import torch.nn.functional as F
from transformers import AttentionInterface, AttentionMaskInterface

from saltus.networks import native
from saltus.networks.memory import Memory

NAME = "saltus"


@dataclass
class Part:
    """The rows of one text in a call: they stand behind `past` slots of its memory and see each other by `visible`."""

    memory: Memory
    past: int
    positions: np.ndarray  # [rows]
    visible: np.ndarray  # [rows, rows] uint8
    windows: dict[int | None, tuple[np.ndarray, np.ndarray]] = field(default_factory=dict)  # kernels point to them

    @property
    def rows(self) -> int:
        return len(self.positions)

    def first(self, window: int | None) -> np.ndarray:
        """First slot of the text that each row sees; slots of the text are positions."""
        if window is None:
            return np.zeros(self.rows, dtype=np.int32)
        return np.maximum(self.positions - window + 1, 0).astype(np.int32)

    def seen(self, window: int | None) -> np.ndarray:
        """Which new rows each row sees; slots of nodes are not positions."""
        if window is None or np.ptp(self.positions) < window:
            return self.visible
        return self.visible & (self.positions > self.positions[:, None] - window)

    def struct(self, window, query, key, value, out, scale, softcap=None) -> native.Attention:
        """What the compiled kernel is told, but for where the layer's memory is; all are [heads, rows, dim] but out."""
        if window not in self.windows:
            self.windows[window] = self.first(window), self.seen(window)
        first, visible = self.windows[window]
        return native.Attention(
            query=query.data_ptr(), query_head=query.stride(0), query_row=query.stride(1),
            key=key.data_ptr(), key_head=key.stride(0), key_row=key.stride(1),
            value=value.data_ptr(), value_head=value.stride(0), value_row=value.stride(1),
            out=out.data_ptr(), visible=visible.ctypes.data, first=first.ctypes.data,
            rows=self.rows, past=self.past, heads=query.shape[0], kv_heads=key.shape[0],
            dim=query.shape[-1], value_dim=value.shape[-1], scale=scale, softcap=softcap or 0.0,
        )  # fmt: skip


@dataclass
class Call:
    """What the attention of every layer must know of the call under way."""

    parts: Sequence[Part]
    layers: int
    free: bool = False


@runtime_checkable
class Attends(Protocol):
    """A call that does the arithmetic itself."""

    def attend(self, module, query, key, value, scale, window, softcap) -> torch.Tensor: ...


_local = threading.local()


class during:
    """Make `call` the one that attention serves, in this thread."""

    def __init__(self, call: Call | Attends) -> None:
        self.call = call

    def __enter__(self) -> None:
        _local.call = self.call

    def __exit__(self, *_) -> None:
        _local.call = None


def attend(module, query, key, value, attention_mask=None, scaling=None, sliding_window=None, softcap=None, **kwargs):
    """The attention function that Transformers calls in each layer: [1, heads, rows, dim] → [1, rows, heads, dim]."""
    call: Call | Attends = _local.call
    if kwargs.get("s_aux") is not None:
        raise ValueError(f"{type(module).__name__} has attention sinks, which Saltus does not support yet")
    if isinstance(attention_mask, Window):
        sliding_window = attention_mask.size
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    if not isinstance(call, Call):
        return call.attend(module, query, key, value, scale, sliding_window, softcap), None
    query, key, value = query[0], key[0], value[0]
    out = query.new_zeros(query.shape[1], query.shape[0], value.shape[-1])
    compiled = None if call.free else native.kernel("attend", query.dtype, query.device)
    start = 0
    for part in call.parts:
        rows = slice(start, start + part.rows)
        start += part.rows
        q, k, v = query[:, rows], key[:, rows], value[:, rows]
        part.memory.reserve(call.layers, part.past + part.rows, k, v)
        keys, values = _layer(part.memory, module.layer_idx)
        if compiled is not None:
            _compiled(compiled, part, q, k, v, keys, values, out[rows], scale, sliding_window, softcap)
            continue
        keys[:, part.past : part.past + part.rows] = k
        values[:, part.past : part.past + part.rows] = v
        by = _masked if call.free or query.device.type != "cpu" else _by_row
        out[rows] = by(part, q, keys, values, scale, sliding_window, softcap)
    return out[None], None


def _layer(memory: Memory, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
    assert memory.keys is not None and memory.values is not None
    return memory.keys[layer], memory.values[layer]


def _compiled(kernel, part, q, k, v, keys, values, out, scale, window, softcap) -> None:
    """One text, one layer, by the compiled kernel, which also writes the new keys and values to memory."""
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    struct = part.struct(window, q, k, v, out, scale, softcap)
    struct.keys, struct.values, struct.capacity = keys.data_ptr(), values.data_ptr(), keys.shape[1]
    if kernel(ctypes.byref(struct)):
        raise MemoryError("attention ran out of memory; ask for a shorter text")


def _by_row(part, q, keys, values, scale, window, softcap) -> torch.Tensor:
    """Each row alone over just the keys that it sees: shapes depend on the row's position and on nothing else."""
    group = q.shape[0] // keys.shape[0]
    first, seen, out = part.first(window), part.seen(window), []
    for row in range(part.rows):
        new = torch.from_numpy(np.flatnonzero(seen[row]) + part.past)
        old = slice(int(first[row]), part.past)
        k = torch.cat([keys[:, old], keys[:, new]], 1).float()
        v = torch.cat([values[:, old], values[:, new]], 1).float()
        scores = q[:, row].float().unflatten(0, (-1, group)) @ k.mT * scale  # [kv_heads, group, keys]
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        out.append((scores.softmax(-1) @ v).flatten(0, 1))
    return torch.stack(out).to(q.dtype)


def _masked(part, q, keys, values, scale, window, softcap) -> torch.Tensor:
    """All rows at once under a mask: fast on an accelerator, but what a row rounds to depends on the shapes."""
    end = part.past + part.rows
    seen = np.ones((part.rows, end), dtype=bool)
    seen[:, part.past :] = part.seen(window)
    seen &= np.arange(end) >= part.first(window)[:, None]
    mask = torch.from_numpy(seen).to(q.device)
    if softcap:
        group = q.shape[0] // keys.shape[0]
        k, v = (x[:, :end].repeat_interleave(group, 0) for x in (keys, values))
        scores = softcap * torch.tanh((q @ k.mT).float() * scale / softcap)
        weights = scores.masked_fill(~mask, -30000.0).softmax(-1).to(q.dtype)
        return (weights @ v).transpose(0, 1)
    out = F.scaled_dot_product_attention(
        q[None], keys[None, :, :end], values[None, :, :end], attn_mask=mask, scale=scale, enable_gqa=True
    )
    return out[0].transpose(0, 1)


@dataclass(frozen=True)
class Window:
    """What stands for a mask: how far back a layer looks. Some models tell it by their mask alone."""

    size: int


def mask(*args, config=None, local_size=None, **kwargs) -> Window | None:
    """The mask that Transformers makes for each kind of layer; who sees whom within that, a Call says."""
    if local_size is None:
        return None
    if local_size == getattr(config, "attention_chunk_size", None):
        raise ValueError(
            f"its attention looks back by chunks of {local_size} tokens, which Saltus does not support yet"
        )
    return Window(local_size)


AttentionInterface.register(NAME, attend)
AttentionMaskInterface.register(NAME, mask)
