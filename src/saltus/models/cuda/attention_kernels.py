"""Attend from rows of trees to pages of keys and values; a row's sums follow from its position and its own tokens.

A row reads its keys in two parts, split where `first_recent_position` says: *recent* columns, which it gathers from
their slots, since they may be nodes of a tree, and *old* ones, which lie in order in the pages of its text. Old columns
are read by splits of SPLIT positions, each by a program of its own for the rows of a group. One more program for
each row adds its splits in the order of positions to its recent columns. A split that a row does not see has
weight zero, so neither the length of other texts nor the number of pages in a call changes a sum.

A group has at most MAX_GROUP rows. A tile has room for so many in every call, since the shape of a product decides how
the hardware adds; fewer rows leave places of it empty. So the same binary runs for groups of one row and of eight.
Where too many query heads for a tile share a key head, several programs read it.
"""

# Triton's own types differ between its releases, and say of `range` in a kernel that nothing comes back.
# pyright: reportGeneralTypeIssues=false, reportCallIssue=false, reportArgumentType=false

from __future__ import annotations

from typing import NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from saltus.models.attention_span import AttentionSpan, Chunks
from saltus.models.cuda.launching import device_function, kernel, largest_power_of_two, power_of_two, rounded_product

SPLIT = 128  # positions
BLOCK = 64  # recent columns of a product
MAX_GROUP = 8  # rows
COMBINED = 16  # splits that are read at once when they are added
COMBINED_DIMS = 32  # of a head, that a program adds
MAX_SUM_BYTES = 1 << 28  # of SplitSums: groups of long texts attend in turn
MAX_DIMS = 256  # of a head, that a product reads at once
# Query heads of a tile, and the numbers of them that it reads at once: a tile has them of eight rows, and more do not
# fit into the shared memory of most GPUs.
MAX_TILE_HEADS, MAX_TILE_NUMBERS = 16, 2048


@device_function
def _scores(products, scale, softcap, CAPPED: tl.constexpr):
    """softcap · tanh(products · scale / softcap), or without a cap products · scale."""
    scores = products * scale
    if CAPPED:  # tanh x = 1 − 2 / (e^2x + 1)
        scores = softcap * (1.0 - 2.0 / (tl.exp(2.0 * (scores / softcap)) + 1.0))
    return scores


@device_function
def _first_visible(position, size, CHUNKED: tl.constexpr):
    """The first position that a row at a position sees: that of its window or chunk of this size."""
    return position // size * size if CHUNKED else position - size + 1


@kernel("num_pages", "window", "group_rows", anywhere=("positions",))
def _attend_split(
    queries, keys, values, tables, positions, sums, tops, totals, num_pages, scale, softcap, window, group_rows,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, TILES: tl.constexpr, DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    VALUE_STEP: tl.constexpr, TILE: tl.constexpr, PAGE: tl.constexpr, DEPTH: tl.constexpr, SPLIT: tl.constexpr,
    DIMS: tl.constexpr, CAPPED: tl.constexpr, CHUNKED: tl.constexpr,
):  # fmt: skip
    """A split, a tile's heads, a group: for each row and head weighted values, the largest score, the sum of weights.

    DIMS dimensions of a head at once fit into the memory of a program; VALUE_STEP lie between the values of two heads.
    """
    split, heads_of_tile, group = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    shared: tl.constexpr = HEADS // TILES
    kv_head = heads_of_tile * KV_HEADS // TILES
    tile, dim = tl.arange(0, TILE), tl.arange(0, DIMS)
    row, head = group * group_rows + tile % group_rows, heads_of_tile * shared + tile // group_rows
    used = tile < group_rows * shared
    position = tl.load(positions + row, mask=used, other=0)
    border = tl.maximum(position // DEPTH * DEPTH - DEPTH, 0)  # first_recent_position
    first, end = split * SPLIT, tl.max(border, 0)  # the keys from `end` on may be a former text's, and not finite
    if end > first:
        at = first + tl.arange(0, SPLIT)
        slot = tl.load(tables + group * num_pages + first // PAGE) * PAGE + at % PAGE
        place = (slot[:, None] * KV_HEADS + kv_head) * DIM + dim[None, :]
        value_place = (slot[:, None] * KV_HEADS + kv_head) * VALUE_STEP + dim[None, :]
        key, is_own = tl.load(keys + place), at[:, None] < end
        value = key
        if DIM == DIMS:  # it comes while scores are computed
            value = tl.load(values + value_place, mask=is_own, other=0.0)
        own = (row * HEADS + head)[:, None] * DIM + dim[None, :]
        query = tl.load(queries + own, mask=used[:, None], other=0.0)
        products = tl.dot(query, tl.trans(key), input_precision="ieee")
        for part in tl.static_range(DIMS, DIM, DIMS):
            query = tl.load(queries + own + part, mask=used[:, None], other=0.0)
            products = tl.dot(query, tl.trans(tl.load(keys + place + part)), products, input_precision="ieee")
        scores = _scores(products, scale, softcap, CAPPED)
        seen = (at[None, :] < border[:, None]) & (at[None, :] >= _first_visible(position, window, CHUNKED)[:, None])
        scores = tl.where(seen, scores, -1e30)
        top = tl.max(scores, 1)
        weights = tl.where(seen, tl.exp(scores - top[:, None]), 0.0)
        out = ((group * TILES + heads_of_tile) * tl.num_programs(0) + split).to(tl.int64) * TILE + tile
        for part in tl.static_range(0, VALUE_DIM, DIMS):
            if DIM > DIMS:
                value = tl.load(values + value_place + part, mask=is_own, other=0.0)
            weighted = tl.dot(weights.to(value.dtype), value, input_precision="ieee")
            tl.store(sums + out[:, None] * VALUE_DIM + part + dim[None, :], weighted, mask=used[:, None])
        tl.store(tops + out, top)
        tl.store(totals + out, tl.sum(weights, 1))


@kernel("num_splits", "window", "group_rows", anywhere=("positions",))
def _combine(
    queries, keys, values, recent, positions, sinks, sums, tops, totals, out, num_splits, scale, softcap, window,
    group_rows,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, TILES: tl.constexpr, DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    VALUE_STEP: tl.constexpr, TILE: tl.constexpr, PADDED: tl.constexpr, DEPTH: tl.constexpr, SPLIT: tl.constexpr,
    BLOCK: tl.constexpr, COMBINED: tl.constexpr, KEY_DIMS: tl.constexpr, DIMS: tl.constexpr, CAPPED: tl.constexpr,
    CHUNKED: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """A row, a tile's heads, DIMS values: the heads' sinks if they have any, the recent columns, then the splits."""
    row, heads_of_tile = tl.program_id(0), tl.program_id(1)
    shared: tl.constexpr = HEADS // TILES
    kv_head = heads_of_tile * KV_HEADS // TILES
    lane, dim, own_dim = tl.arange(0, PADDED), tl.arange(0, KEY_DIMS), tl.program_id(2) * DIMS + tl.arange(0, DIMS)
    used, head = lane < shared, heads_of_tile * shared + lane
    own = (row * HEADS + head)[:, None] * DIM + dim[None, :]
    query = tl.load(queries + own, mask=used[:, None], other=0.0)
    position = tl.load(positions + row)
    border = tl.maximum(position // DEPTH * DEPTH - DEPTH, 0)
    visible = _first_visible(position, window, CHUNKED)
    top = tl.full((PADDED,), -1e30, dtype=tl.float32)
    total = tl.zeros((PADDED,), dtype=tl.float32)
    if SINKS:
        top, total = tl.load(sinks + head, mask=used, other=0.0).to(tl.float32), total + 1.0
    weighted = tl.zeros((PADDED, DIMS), dtype=tl.float32)
    for start in tl.static_range(0, 2 * DEPTH, BLOCK):
        column = start + tl.arange(0, BLOCK)
        slot = tl.load(recent + row * 2 * DEPTH + column)
        place = (slot[:, None] * KV_HEADS + kv_head) * DIM + dim[None, :]
        value = tl.load(values + (slot[:, None] * KV_HEADS + kv_head) * VALUE_STEP + own_dim[None, :])
        products = tl.dot(query, tl.trans(tl.load(keys + place)), input_precision="ieee")
        for key_part in tl.static_range(KEY_DIMS, DIM, KEY_DIMS):
            other_query = tl.load(queries + own + key_part, mask=used[:, None], other=0.0)
            key = tl.load(keys + place + key_part)
            products = tl.dot(other_query, tl.trans(key), products, input_precision="ieee")
        scores = _scores(products, scale, softcap, CAPPED)
        seen = (border + column <= position) & (border + column >= visible)
        scores = tl.where(seen[None, :], scores, -1e30)
        higher = tl.maximum(top, tl.max(scores, 1))
        before = tl.exp(top - higher)
        weights = tl.where(seen[None, :], tl.exp(scores - higher[:, None]), 0.0)
        weighted = tl.dot(weights.to(value.dtype), value, weighted * before[:, None], input_precision="ieee")
        total = total * before + tl.sum(weights, 1)
        top = higher
    group, part = row // group_rows, tl.arange(0, COMBINED)
    tile = lane * group_rows + row % group_rows  # the row's places in a split
    count = (border + SPLIT - 1) // SPLIT
    start = tl.maximum(visible, 0) // SPLIT // COMBINED * COMBINED
    while start < count:
        split = ((group * TILES + heads_of_tile) * num_splits + start + part).to(tl.int64)
        at = split[:, None] * TILE + tile[None, :]
        read = ((start + part) < count)[:, None] & used[None, :]
        found = tl.load(sums + at[:, :, None] * VALUE_DIM + own_dim[None, None, :], mask=read[:, :, None], other=0.0)
        other = tl.load(tops + at, mask=read, other=-1e30)
        higher = tl.maximum(top, tl.max(other, 0))
        before = tl.exp(top - higher)
        factor = tl.where(read, tl.exp(other - higher[None, :]), 0.0)
        weighted = weighted * before[:, None] + tl.sum(rounded_product(found, factor[:, :, None]), 0)
        of_splits = rounded_product(tl.load(totals + at, mask=read, other=0.0), factor)
        total = total * before + tl.sum(of_splits, 0)
        top = higher
        start += COMBINED
    place = (row * HEADS + head)[:, None] * VALUE_DIM + own_dim[None, :]
    tl.store(out + place, (weighted / total[:, None]).to(out.dtype.element_ty), mask=used[:, None])


def tiles_of_heads(heads: int, kv_heads: int, dim: int) -> int:
    """How many tiles the query heads of a row are read in: one for each key head, or several."""
    shared = heads // kv_heads
    most = min(MAX_TILE_HEADS, MAX_TILE_NUMBERS // dims_at_once(dim))
    return heads // next(count for count in range(min(shared, most), 0, -1) if shared % count == 0)


def dims_at_once(*dims: int) -> int:
    """How many dimensions of heads of these sizes a product reads: a power of two, at most MAX_DIMS."""
    return min(MAX_DIMS, *map(largest_power_of_two, dims))


class SplitSums(NamedTuple):
    """What splits leave for `_combine`, [groups, tiles of heads, splits, tile] and values' dim.

    The layers use it in turn, and so do groups where there are fewer than those of a call.
    """

    weighted: Tensor
    tops: Tensor
    totals: Tensor

    @classmethod
    def empty(cls, like: Tensor, kv_heads: int, groups: int, positions: int, value_dim: int = 0) -> SplitSums:
        """For queries [rows, heads, dim] like these, and groups that attend to so many positions.

        It has at most MAX_SUM_BYTES of weighted values, or those of one group. Values have the keys' size, or another.
        """
        heads, dim = like.shape[1:]
        value_dim, tiles = value_dim or dim, tiles_of_heads(heads, kv_heads, dim)
        splits, tile = -(-positions // SPLIT), max(16, power_of_two(MAX_GROUP * heads // tiles))
        groups = min(groups, max(1, MAX_SUM_BYTES // (tiles * splits * tile * value_dim * 4)))
        tops = like.new_empty(groups, tiles, splits, tile, dtype=torch.float32)
        return cls(tops.new_empty(*tops.shape, value_dim), tops, torch.empty_like(tops))


def attend(
    queries: Tensor, keys: Tensor, values: Tensor, tables: Tensor, recent: Tensor, positions: Tensor,
    sums: SplitSums, out: Tensor, *, rows_per_group: int, page: int, scale: float, span: AttentionSpan,
    softcap: float | None = None, sinks: Tensor | None = None,
) -> None:  # fmt: skip
    """out [rows, heads, value_dim] of queries [rows, heads, dim]; the rows of a group belong to one text.

    keys [slots, kv_heads, dim], values [slots, kv_heads, value_dim], which may be a part of the keys; tables [groups,
    pages]; recent [rows, 2 · depth] slots of the positions from `first_recent_position` on; positions [rows]; `scale`
    multiplies scores; rows see what `span` says. Scores are limited to ± `softcap`; the score `sinks` [heads] of each
    head takes weight and has no value.
    """
    (groups, pages), (rows, wide) = tables.shape, recent.shape
    heads, dim, (kv_heads, value_dim) = *queries.shape[1:], values.shape[1:]
    at_once, tiles, splits, tile = sums.tops.shape
    assert page % SPLIT == 0 and wide % BLOCK == 0 and rows_per_group <= MAX_GROUP
    assert values.stride(0) == kv_heads * values.stride(1)
    constants = {
        "HEADS": heads, "KV_HEADS": kv_heads, "TILES": tiles, "DIM": dim, "VALUE_DIM": value_dim,
        "VALUE_STEP": values.stride(1), "TILE": tile, "DEPTH": wide // 2, "SPLIT": SPLIT, "CAPPED": bool(softcap),
        "CHUNKED": isinstance(span, Chunks), "num_warps": 4,
    }  # fmt: skip
    last, cap = (span.size if isinstance(span, Chunks) else span) or 1 << 30, softcap or 0.0
    padded, dims = max(16, power_of_two(heads // tiles)), min(COMBINED_DIMS, largest_power_of_two(value_dim))
    for first in range(0, groups, at_once):
        own = slice(first * rows_per_group, min(rows, (first + at_once) * rows_per_group))
        _attend_split[(splits, tiles, min(at_once, groups - first))](
            queries[own], keys, values, tables[first:], positions[own], *sums, pages, scale, cap, last,
            rows_per_group, PAGE=page, DIMS=dims_at_once(dim, value_dim), **constants,
        )  # fmt: skip
        _combine[(own.stop - own.start, tiles, value_dim // dims)](
            queries[own], keys, values, recent[own], positions[own], queries if sinks is None else sinks, *sums,
            out[own], splits, scale, cap, last, rows_per_group, PADDED=padded, BLOCK=BLOCK, COMBINED=COMBINED,
            KEY_DIMS=largest_power_of_two(dim), DIMS=dims, SINKS=sinks is not None, **constants,
        )  # fmt: skip
