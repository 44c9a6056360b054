"""Cut what a text still has to be read into chunks, and gather those of many texts into calls (chunked prefill)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from saltus.core.forward import ForwardInputs, QueryStart, depths
from saltus.core.native_tree import tree_rows
from saltus.models.cpu.attention import SequenceRows, ancestor_mask
from saltus.models.cpu.kv_cache import KVCache
from saltus.models.gated_lora import Gate

MAX_ROWS_PER_CALL = 256  # limits the memory that a long prompt needs
MAX_NODES = 512  # of a tree, its queries included; a tree is never split


@dataclass
class Chunk:
    """The rows that one text adds to a call: decided tokens, and in its last chunk the tree."""

    sequence: int  # the number of its text
    tokens: list[int]
    rows: SequenceRows
    num_logits: int  # of its last rows
    output_hidden_states: bool  # of all its rows
    uniforms: tuple[float, ...] = ()  # of its last rows, which are queries
    has_token: tuple[bool, ...] = ()  # of each query
    temperature: float = 0.0


def prefill_and_tree_chunks(
    sequence: int,
    inputs: ForwardInputs,
    kv_cache: KVCache,
    past_length: int,
    window: int | None = None,
    query_start: QueryStart = "blank",
) -> Iterator[Chunk]:
    """Decided tokens in pieces of MAX_ROWS_PER_CALL, the tree with the last piece, whatever its size.

    With a `window` pieces also end where windows of so many tokens do.
    """
    decided, nodes = inputs.canvas.decided_prefix, len(inputs.tokens)
    assert nodes <= MAX_NODES
    while True:
        unread = len(decided) - past_length
        window_left = unread if window is None else window - past_length % window
        if unread <= window_left and unread + nodes <= max(MAX_ROWS_PER_CALL, 1 + nodes):
            break
        count = min(MAX_ROWS_PER_CALL, window_left, unread - 1)
        yield Chunk(
            sequence,
            decided[past_length : past_length + count].tolist(),
            _sequence_rows(kv_cache, past_length, count),
            0,
            inputs.output_hidden_states,
        )
        past_length += count
    tokens, offsets, has_token = inputs.tokens, None, ()
    if inputs.query_nodes:
        tokens, offsets, has_token = inputs.node_rows(query_start)
    part = _sequence_rows(kv_cache, past_length, unread, inputs.parents, offsets, ends_text=True)
    yield Chunk(
        sequence, [*decided[past_length:].tolist(), *tokens], part, nodes + 1, inputs.output_hidden_states,
        inputs.uniforms, has_token, inputs.temperature,
    )  # fmt: skip


def _sequence_rows(
    kv_cache: KVCache,
    past_length: int,
    num_new_tokens: int,
    parents: Sequence[int] = (),
    offsets: np.ndarray | None = None,
    ends_text: bool = False,
) -> SequenceRows:
    """Rows of decided tokens, and perhaps of a tree's nodes after them, by depth or at `offsets` from the first one."""
    num_rows = num_new_tokens + len(parents)
    if offsets is None and (found := tree_rows(parents, num_new_tokens, past_length)) is not None:
        return SequenceRows(kv_cache, past_length, *found, parents, ends_text)
    visible = np.zeros((num_rows, num_rows), dtype=np.uint8)
    visible[:, :num_new_tokens] = np.tri(num_rows, num_new_tokens) if num_new_tokens > 1 else 1
    positions = np.arange(past_length, past_length + num_rows)
    if parents:
        visible[num_new_tokens:, num_new_tokens:] = ancestor_mask(parents)
        positions[num_new_tokens:] = (
            past_length + num_new_tokens + np.array(depths(parents) if offsets is None else offsets)
        )
    return SequenceRows(kv_cache, past_length, positions, visible, parents, ends_text)


def chunks_by_call(queues: Sequence[list[Chunk]], max_rows: int) -> Iterator[list[Chunk]]:
    """The chunks of each call, taken out of the texts' queues: of each text the next one, where it still has room."""
    while any(queues):
        chunks, rows_left = [], max_rows
        for queue in queues:
            if queue and (not chunks or queue[0].rows.num_rows <= rows_left):
                chunks.append(queue.pop(0))
                rows_left -= chunks[-1].rows.num_rows
        yield chunks


def rows_of_call(chunks: Sequence[Chunk]) -> tuple[Tensor, Tensor, Tensor]:
    """The tokens and positions of the rows of a call, and the numbers of the rows that need logits."""
    tokens = [token for chunk in chunks for token in chunk.tokens]
    positions = chunks[0].rows.positions
    if len(chunks) > 1:
        positions = np.concatenate([chunk.rows.positions for chunk in chunks])
    ends = accumulate(len(chunk.tokens) for chunk in chunks)
    logit_rows = [row for chunk, end in zip(chunks, ends, strict=True) for row in range(end - chunk.num_logits, end)]
    tokens, logit_rows = (torch.from_numpy(np.array(each, dtype=np.int64)) for each in (tokens, logit_rows))
    return tokens, torch.from_numpy(positions), logit_rows


def gate_of_queries(chunks: Sequence[Chunk], device: torch.device) -> Gate | None:
    """The query rows of a call and their conditioning; None if there are none."""
    if not any(chunk.uniforms for chunk in chunks):
        return None
    rows, uniforms, temperatures, has_token, end = [], [], [], [], 0
    for chunk in chunks:
        end += len(chunk.tokens)
        rows += range(end - len(chunk.uniforms), end)
        uniforms += chunk.uniforms
        temperatures += [chunk.temperature] * len(chunk.uniforms)
        has_token += chunk.has_token
    values = (rows, torch.long), (uniforms, torch.float64), (temperatures, torch.float64), (has_token, torch.bool)
    return Gate(*(torch.tensor(value, dtype=dtype, device=device) for value, dtype in values))
