"""Divide the forward passes of a batch into calls of fixed shapes, over pages of keys and values in one pool."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import numpy as np
from jaxtyping import Int

from saltus.core.forward import ForwardInputs, QueryStart
from saltus.models.cuda.kv_pages import FixedShapeKVCache

BASE_TREE_DEPTH = 32
MAX_MORE_GROUPS = 2  # times as many groups, each of which reads its text, for fewer rows


@dataclass(frozen=True)
class FixedShapeSettings:
    """The sizes that rounding depends on. Another value of any of them may change a text."""

    max_tree_depth: int = BASE_TREE_DEPTH
    rows_per_call: int = 128  # of decoding calls: rows that an accelerator computes for about the price of one
    rows_per_group: int = 8  # of one text, which attend together; of varied rows perhaps 1
    prefill_chunk: int = 256  # rows of a call that reads a prompt
    page_size: int = 256  # positions
    pages_per_block: int = 2  # that one product of attention reads
    varied_rows: bool = False  # rows round alike in calls of any size: a call has as few groups as it needs

    @classmethod
    def for_max_draft_tokens(cls, max_draft_tokens: int) -> FixedShapeSettings:
        """For trees of `max_draft_tokens` nodes: a depth of one more, rounded up to a multiple of 32."""
        return cls(max_tree_depth=(max_draft_tokens // BASE_TREE_DEPTH + 1) * BASE_TREE_DEPTH)

    def num_pages(self, num_entries: int) -> int:
        """The pages that calls over so many entries attend to: 1, 2, 4, 8, … blocks, so that there are few graphs."""
        blocks = -(-num_entries // (self.page_size * self.pages_per_block))
        return self.pages_per_block << (blocks - 1).bit_length()


class FixedShape(NamedTuple):
    """The shape of one call: groups of rows, each of one text, and the pages that each group attends to."""

    num_groups: int
    rows_per_group: int
    num_pages: int
    num_logits: int  # of the last rows; 0: of all

    @property
    def num_rows(self) -> int:
        return self.num_groups * self.rows_per_group


class TextRows(NamedTuple):
    """The rows of one text, or those of them that share a call. Parents come before children."""

    text: int  # its number in the batch
    inputs: ForwardInputs | None  # None: of a drafter
    kv_cache: FixedShapeKVCache
    num_prompt_rows: int  # the first ones, which belong to the prompt without its last token
    tokens: Int[np.ndarray, "rows"]
    positions: Int[np.ndarray, "rows"]
    entries: Int[np.ndarray, "rows"]  # of the KV cache, that a row writes to
    slots: Int[np.ndarray, "rows"]  # of the pool, that hold these entries
    recent_slots: Int[np.ndarray, "rows recent"]  # that a row gathers
    output_rows: Int[np.ndarray, "rows"]  # row of the outputs: 0 after the decided text, i + 1 of node i; −1: none

    @property
    def num_rows(self) -> int:
        return len(self.tokens)

    @property
    def query_rows(self) -> Int[np.ndarray, "queries"]:
        """Which rows are queries; a drafter's rows have none."""
        if self.inputs is None or not self.inputs.query_nodes:
            return np.empty(0, dtype=np.int64)
        return np.flatnonzero(self.output_rows > self.inputs.num_draft_tokens)

    def without_queries(self) -> tuple[TextRows, TextRows | None]:
        """The rows that are no queries, then the queries, which are the last ones, if there are any."""
        if not (queries := len(self.query_rows)):
            return self, None
        border = self.num_rows - queries
        drafts = self.select(slice(0, border))._replace(num_prompt_rows=self.num_prompt_rows)
        return drafts, self.select(slice(border, self.num_rows))

    def select(self, rows: slice) -> TextRows:
        """Some of the rows, none of which counts as a prompt's."""
        return TextRows(self.text, self.inputs, self.kv_cache, 0, *(array[rows] for array in self[4:]))


@dataclass(frozen=True)
class Call:
    """Rows of several texts; each text's rows begin with a group of their own."""

    shape: FixedShape
    parts: tuple[TextRows, ...]

    def placed(self) -> Iterator[tuple[int, TextRows]]:
        """The first row of each part, and the part."""
        group = 0
        for part in self.parts:
            yield group * self.shape.rows_per_group, part
            group += -(-part.num_rows // self.shape.rows_per_group)


def split_into_calls(texts: Sequence[TextRows], settings: FixedShapeSettings) -> Iterator[Call]:
    """The rows of prompts, of which no logits are needed, by chunks; then all other rows.

    A chunk is of one text, unless rows are varied.
    """
    chunk, by = settings.prefill_chunk, settings.rows_per_group
    prompts = [text.select(slice(0, text.num_prompt_rows)) for text in texts if text.num_prompt_rows]
    if settings.varied_rows:
        for parts, groups in _packed(prompts, by, chunk):
            yield _call(parts, size_class(groups), by, 1, settings)
    else:
        for prompt in prompts:
            for start in range(0, prompt.num_rows, chunk):
                yield _call((prompt.select(slice(start, start + chunk)),), 1, chunk, 1, settings)
    by = _decoding_group(texts, settings)
    others = [text.select(slice(text.num_prompt_rows, text.num_rows)) if text.num_prompt_rows else text
              for text in texts]  # fmt: skip
    for parts, groups in _packed(others, by, settings.rows_per_call):
        yield _call(
            parts, size_class(groups) if settings.varied_rows else settings.rows_per_call // by, by, 0, settings
        )


def _packed(texts: Sequence[TextRows], by: int, rows_per_call: int) -> list[tuple[tuple[TextRows, ...], int]]:
    """Rows of texts in as few calls as first fit finds, those of a text in their order, and the groups of each call."""
    calls, groups_of_calls = list[list[TextRows]](), list[int]()
    for text in texts:
        call = 0
        for start in range(0, text.num_rows, rows_per_call):
            part = text if text.num_rows <= rows_per_call else text.select(slice(start, start + rows_per_call))
            groups = -(-part.num_rows // by)
            while call < len(calls) and groups_of_calls[call] + groups > rows_per_call // by:
                call += 1
            if call == len(calls):
                calls.append([])
                groups_of_calls.append(0)
            calls[call].append(part)
            groups_of_calls[call] += groups
    return [(tuple(parts), groups) for parts, groups in zip(calls, groups_of_calls, strict=True)]


def _decoding_group(texts: Sequence[TextRows], settings: FixedShapeSettings) -> int:
    """The rows of a group: one each where a group for each row is at most twice as many, as in a plain batch."""
    counts = [text.num_rows - text.num_prompt_rows for text in texts]
    groups = sum(-(-count // settings.rows_per_group) for count in counts)
    single = settings.varied_rows and len(texts) > 1 and sum(counts) <= MAX_MORE_GROUPS * groups
    return 1 if single else settings.rows_per_group


def size_class(count: int) -> int:
    """The next of 1, 2, 4, 8, 12, 16, 24, 32, 48, …, so that there are few graphs."""
    power = 1 << (count - 1).bit_length()
    return power * 3 // 4 if power >= 16 and count <= power * 3 // 4 else power


def _call(
    parts: tuple[TextRows, ...], num_groups: int, rows_per_group: int, num_logits: int, settings: FixedShapeSettings
) -> Call:
    num_pages = settings.num_pages(1 + max(int(part.entries[-1]) for part in parts))
    return Call(FixedShape(num_groups, rows_per_group, num_pages, num_logits), parts)


def rows_of_texts(
    batch: Sequence[ForwardInputs],
    kv_caches: Sequence[FixedShapeKVCache],
    past_lengths: Sequence[int],
    settings: FixedShapeSettings,
    query_start: QueryStart = "blank",
) -> list[TextRows]:
    """The rows of a batch: of each text the decided tokens that are not in its cache, then its nodes.

    A prompt is read from the start of a chunk on, unless rows are varied, and its last token in a decoding call. Caches
    have pages for all rows.
    """
    chunk, bases = settings.prefill_chunk, [len(inputs.canvas.decided_prefix) for inputs in batch]
    prompts = [int(inputs.canvas.order[0] if len(inputs.canvas.order) else base) - 1
               for inputs, base in zip(batch, bases, strict=True)]  # fmt: skip
    starts = [past // chunk * chunk if past < prompt and not settings.varied_rows else past
              for past, prompt in zip(past_lengths, prompts, strict=True)]  # fmt: skip
    counts = [base + len(inputs.tokens) - start for inputs, base, start in zip(batch, bases, starts, strict=True)]
    entries, text, spans = _entries_of_texts(starts, counts)
    tokens, positions = np.empty_like(entries), entries.copy()
    visible_entries = []  # of the nodes of trees that are no single path: other entries than their positions
    for inputs, base, start, rows in zip(batch, bases, starts, spans, strict=True):
        nodes = slice(rows.start + base - start, rows.stop)
        tokens[rows.start : nodes.start] = inputs.canvas.decided_prefix[start:]
        if inputs.is_path:
            tokens[nodes] = inputs.tokens
        else:
            node_rows = inputs.node_rows(query_start)
            tokens[nodes], positions[nodes] = node_rows.tokens, base + node_rows.offsets
            visible_entries.append((nodes, _visible_entries(inputs, positions[nodes], settings.max_tree_depth)))
    visible = _path_entries(positions, settings.max_tree_depth)
    for nodes, entries_of_nodes in visible_entries:
        visible[nodes] = entries_of_nodes
    slots, recent_slots = _slots_of_texts(kv_caches, text, entries, visible)
    output_rows = (entries - np.array(bases)[text] + 1).clip(-1)
    return [
        TextRows(number, inputs, kv_cache, max(prompt - start, 0), tokens[rows], positions[rows], entries[rows],
                 slots[rows], recent_slots[rows], output_rows[rows])
        for number, (inputs, kv_cache, prompt, start, rows) in enumerate(
            zip(batch, kv_caches, prompts, starts, spans, strict=True)
        )
    ]  # fmt: skip


def chains_of_texts(
    kv_caches: Sequence[FixedShapeKVCache], past_lengths: Sequence[int], tokens: Sequence[Int[np.ndarray, "_rows"]],
    settings: FixedShapeSettings, blocks: Sequence[int] | None = None,
) -> list[TextRows]:  # fmt: skip
    """Rows of a drafter: of each text some tokens after the positions in its cache, for which pages are taken.

    The last `blocks` rows of a text see each other's keys.
    """
    counts = list(map(len, tokens))
    for kv_cache, past, count in zip(kv_caches, past_lengths, counts, strict=True):
        kv_cache.reserve(past + count)
    positions, text, spans = _entries_of_texts(past_lengths, counts)
    seen = positions.copy()
    for rows, block in zip(spans, blocks or (), strict=False):
        seen[rows.stop - block : rows.stop] = positions[rows.stop - 1]
    slots, recent_slots = _slots_of_texts(kv_caches, text, positions, _path_entries(seen, settings.max_tree_depth))
    return [
        TextRows(number, None, kv_cache, 0, own, positions[rows], positions[rows], slots[rows], recent_slots[rows],
                 positions[rows])
        for number, (kv_cache, own, rows) in enumerate(zip(kv_caches, tokens, spans, strict=True))
    ]  # fmt: skip


def _entries_of_texts(
    starts: Sequence[int], counts: Sequence[int]
) -> tuple[Int[np.ndarray, "rows"], Int[np.ndarray, "rows"], list[slice]]:
    """Of rows of several texts, one after another in one array: their entries, their texts, and the rows of each text.

    NumPy takes about as long for the rows of one text as for those of many.
    """
    ends = list(accumulate(counts))
    spans = [slice(end - count, end) for count, end in zip(counts, ends, strict=True)]
    text = np.repeat(np.arange(len(counts)), counts)
    shifts = np.array([start - rows.start for start, rows in zip(starts, spans, strict=True)])
    return np.arange(ends[-1]) + shifts[text], text, spans


def _path_entries(positions: Int[np.ndarray, "rows"], max_tree_depth: int) -> Int[np.ndarray, "rows recent"]:
    """The entries that rows gather where each position has an entry of its own; hidden columns are the last one."""
    recent = first_recent_position(positions, max_tree_depth)[:, None] + np.arange(2 * max_tree_depth)
    return np.minimum(recent, positions[:, None])


def _slots_of_texts(
    kv_caches: Sequence[FixedShapeKVCache], text: Int[np.ndarray, "rows"], entries: Int[np.ndarray, "rows"],
    recent: Int[np.ndarray, "rows recent"],
) -> tuple[Int[np.ndarray, "rows"], Int[np.ndarray, "rows recent"]]:  # fmt: skip
    """The slots of the pool that hold entries of rows, given the number of each row's text."""
    page = kv_caches[0].pool.page_size
    first_slots = np.zeros((len(kv_caches), max(len(kv_cache.pages) for kv_cache in kv_caches)), dtype=np.int64)
    for row, kv_cache in zip(first_slots, kv_caches, strict=True):
        row[: len(kv_cache.pages)] = kv_cache.pages
    first_slots *= page
    own, of_recent = (np.divmod(each, page) for each in (entries, recent))
    return first_slots[text, own[0]] + own[1], first_slots[text[:, None], of_recent[0]] + of_recent[1]


def _visible_entries(
    inputs: ForwardInputs, positions: Int[np.ndarray, "nodes"], max_tree_depth: int
) -> Int[np.ndarray, "nodes recent"]:
    """The entries that the nodes of a tree gather: of the text, and of their ancestors."""
    base = len(inputs.canvas.decided_prefix)
    ancestors = np.zeros((len(positions), max(inputs.depths) + 1), dtype=np.int64)  # entries by depth
    for node, (parent, depth) in enumerate(zip(inputs.parents, inputs.depths, strict=True)):
        if parent >= 0:
            ancestors[node] = ancestors[parent]
        ancestors[node, depth] = base + node
    recent = first_recent_position(positions, max_tree_depth)[:, None] + np.arange(2 * max_tree_depth)
    visible = np.take_along_axis(ancestors, (recent - base).clip(0, ancestors.shape[1] - 1), 1)
    visible = np.where(recent < base, recent, visible)
    own = base + np.arange(len(positions))
    return np.where(recent > positions[:, None], own[:, None], visible)  # hidden columns


def first_recent_position(positions, max_tree_depth: int):
    """The first of the at most 2 · max_tree_depth positions that a row gathers; its own is the last."""
    return (positions // max_tree_depth * max_tree_depth - max_tree_depth).clip(0)
