"""Evaluate trees on a model that fills holes anywhere: content rows and query rows through the layers of one decoder.

Content rows are tokens. Each attends to the given text, which attends to all of itself, and to what was decided before
it. Query rows are mask tokens at the positions of holes. They attend to the same tokens and to themselves, and output
the distribution of their hole (ASSD, §3). The KV cache holds content rows alone, in the order of decisions: later
decisions never change them, so a call runs new tokens and queries only.

The decoder is a causal model's with rotary positions, which are passed for each row, so the same kernels serve it. Its
configuration states that it was trained for any subset.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from saltus.core.canvas import Canvas
from saltus.core.forward import ForwardInputs, ForwardOutputs
from saltus.kernels import native
from saltus.loading.model_folders import PAIRWISE_CORRECTION_FILE
from saltus.methods.assd.hole_paths import with_kernel
from saltus.methods.assd.hole_predictions import AnySubsetOutputs
from saltus.methods.assd.prepared_filling import PreparedFilling
from saltus.methods.shared.logit_correction import PairwiseCorrection
from saltus.models.causal import CausalNetwork
from saltus.models.cpu.attention import SequenceRows, ancestor_mask
from saltus.models.cpu.chunked_prefill import MAX_NODES, Chunk
from saltus.models.cpu.kv_cache import KVCache
from saltus.models.cpu.native_decoder import NativeDecoder
from saltus.models.cpu.prepared_call import MAX_ROWS

ANY_SUBSET = "any_subset"  # in a model's configuration: {"mask": token, "blank": token that ends an open hole}


@dataclass
class OrderedKVCache(KVCache):
    """Keys and values of one text in the order of decisions, and the positions of its tokens."""

    positions: np.ndarray = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    num_given: int = 0  # the first tokens, which attend to each other in both directions

    def reuse_known_tokens(self, canvas: Canvas) -> int:
        """How many of the known tokens are in the cache; none if the given tokens changed."""
        known, before = canvas.known_positions, len(self.positions)
        count = self.reuse_prefix(canvas.tokens[known], num_recomputed=0)
        places = self.positions[: min(before, count)]
        if (
            self.num_given != len(canvas.given_positions)
            or len(places) < self.num_given
            or (places != known[: len(places)]).any()
        ):
            count = 0
        self.tokens, self.positions, self.num_given = self.tokens[:count], known, len(canvas.given_positions)
        return count


@dataclass
class AnySubsetNetwork(CausalNetwork):
    """An any-subset model as a target network.

    Row 0 is for the first open hole, row i + 1 for the hole after that of node i, given the text, the node's
    ancestors and itself. A query node has no uniform. Its logits are for the open hole of its own depth, given the
    token that its chain starts from and the tokens before that. On CUDA rounding depends on the shapes of calls.
    """

    any_subset = True
    accepts_drafters = False
    pairwise_correction: PairwiseCorrection | None = None

    def __post_init__(self) -> None:
        self.batch_invariant = self.batch_invariant and self.model.device.type != "cuda"
        self.fixed_shapes = False
        config = getattr(self.model.config, ANY_SUBSET)
        self.mask_token, self.blank_token = int(config["mask"]), config.get("blank")
        super().__post_init__()
        decoder = self.native_decoder
        self.prepared_filling = None
        if isinstance(decoder, NativeDecoder) and decoder.prepared_call is not None:
            self.prepared_filling = PreparedFilling(decoder, self.mask_token)

    @property
    def max_rows_per_call(self) -> int:
        """A given text is one call, since all of it attends to all of it."""
        return self.model.config.max_position_embeddings + MAX_NODES

    @staticmethod
    def context_tokens(canvas: Canvas) -> np.ndarray:
        """The tokens that a call reads: those given, then the decided ones in deciding order."""
        return canvas.tokens[canvas.known_positions]

    def new_kv_cache(self) -> OrderedKVCache:
        return OrderedKVCache()

    def _check_queries_supported(self) -> None:
        """The model needs no adapter for query nodes."""

    def forward(self, batch: Sequence[ForwardInputs], kv_caches: Sequence[Any]) -> list[ForwardOutputs]:
        return [
            outputs if isinstance(outputs, AnySubsetOutputs) else self._select_outputs(inputs, outputs)
            for inputs, outputs in zip(batch, super().forward(batch, kv_caches), strict=True)
        ]

    def _select_outputs(self, inputs: ForwardInputs, outputs: ForwardOutputs) -> ForwardOutputs:
        """The outputs in the order of nodes; hidden states are of output rows, not of context tokens."""
        states, logits = outputs.hidden_states, outputs.logits
        if inputs.query_nodes or states is not None:
            required, rows = required_distributions(inputs)
            states = None if states is None else states[len(states) - len(required) :]
            if inputs.query_nodes:
                states = None if states is None else repeat_rows(states, rows)
                logits = repeat_rows(logits, rows)
        return AnySubsetOutputs(
            logits, states, outputs.seconds, outputs.context_tokens_read, outputs.num_rows,
            correction=self.pairwise_correction,
        )  # fmt: skip

    def _forward_prepared(self, inputs: ForwardInputs, kv_cache: Any) -> ForwardOutputs | None:
        filling = self.prepared_filling
        if filling is None or inputs.has_token_queries:
            return None
        started = time.perf_counter()
        past = self._reuse_kv_cache(kv_cache, inputs)
        context = self.context_tokens(inputs.canvas)
        unread, nodes = len(context) - past, len(inputs.tokens)
        if unread + 2 * nodes + 1 > MAX_ROWS:
            return None
        native.share_threads()
        logits, states, queries = filling.fill(kv_cache, past, context, inputs)
        kv_cache.tokens, kv_cache.pending_tree = context, inputs if nodes else None
        if inputs.query_nodes:
            logits, states = repeat_rows(logits, queries), repeat_rows(states, queries)
        return AnySubsetOutputs(
            logits, states if inputs.output_hidden_states else None, time.perf_counter() - started, unread,
            unread + nodes, correction=self.pairwise_correction,
        )  # fmt: skip

    def _reuse_kv_cache(self, kv_cache: Any, inputs: ForwardInputs) -> int:
        return kv_cache.reuse_known_tokens(inputs.canvas)

    def _chunks(self, sequence: int, inputs: ForwardInputs, kv_cache: KVCache, past_length: int) -> Iterator[Chunk]:
        """One chunk: new tokens, then draft tokens, then queries."""
        canvas = inputs.canvas
        places = canvas.known_positions[past_length:]
        unread, drafts = len(places), inputs.num_draft_tokens
        queries, _ = required_distributions(inputs)
        contents = unread + drafts
        if contents + len(queries) > self.max_rows_per_call:
            raise ValueError(
                f"a call has {contents + len(queries)} rows, but {self.max_rows_per_call} fit; shorten the text"
            )
        visible = np.eye(contents + len(queries), dtype=np.uint8)
        given = max(len(canvas.given_positions) - past_length, 0)
        visible[:, :unread] = np.tri(len(visible), unread, dtype=np.uint8)
        visible[:given, :given] = 1
        visible[unread:contents, unread:contents] = ancestor_mask(inputs.parents[:drafts])
        for row, (node, _) in enumerate(queries, start=contents):
            if node >= 0:
                visible[row, unread:contents] = visible[unread + node, unread:contents]
        open_positions = canvas.open_positions
        node_positions = open_positions[np.array(inputs.depths[:drafts], dtype=np.int64)]
        query_positions = open_positions[[hole for _, hole in queries]]
        tokens = [*canvas.tokens[places].tolist(), *inputs.tokens[:drafts], *[self.mask_token] * len(queries)]
        rows = SequenceRows(kv_cache, past_length, np.concatenate([places, node_positions, query_positions]), visible)
        yield Chunk(sequence, tokens, rows, len(queries), inputs.output_hidden_states)


CORRECTION_TENSORS = ("left", "second_left", "right", "gate")  # fields of `PairwiseCorrection`, and names in its file


def load_pairwise_correction(folder: Path, vocab_size: int, hidden_size: int) -> PairwiseCorrection | None:
    """The correction in a model's folder, None if there is none.

    Errors: ValueError if it is damaged, or made for another vocabulary or hidden size.
    """
    if not (folder / PAIRWISE_CORRECTION_FILE).is_file():
        return None
    try:
        tensors = load_file(folder / PAIRWISE_CORRECTION_FILE)
        left, second_left, right, gate = (tensors[name].float().numpy() for name in CORRECTION_TENSORS)
        correction = PairwiseCorrection(left, second_left, right, gate)
        _, rank = correction.left.shape
    except (SafetensorError, KeyError, ValueError) as error:
        raise ValueError(
            f"{folder / PAIRWISE_CORRECTION_FILE} is damaged ({error}); delete it, or train the model again"
        ) from None
    shapes = [table.shape for table in correction.tables]
    if shapes != [(vocab_size, rank)] * 3 + [(hidden_size, rank + 1)]:
        raise ValueError(
            f"{folder / PAIRWISE_CORRECTION_FILE} is of another model; delete it, or train the model again"
        )
    return with_kernel(correction)


def save_pairwise_correction(correction: PairwiseCorrection, folder: Path) -> None:
    """Save in bfloat16, beside the model's weights."""
    tables = zip(CORRECTION_TENSORS, correction.tables, strict=True)
    save_file({name: torch.from_numpy(table).bfloat16() for name, table in tables}, folder / PAIRWISE_CORRECTION_FILE)


def repeat_rows(table: Float[Tensor, "rows size"], rows: Sequence[int]) -> Float[Tensor, "places size"]:
    """Rows of a table, which may repeat; on the CPU by NumPy, since torch would wake its threads."""
    if table.device.type != "cpu":
        return table[rows]
    bits = table.view(torch.int16 if table.element_size() == 2 else torch.int32).numpy()
    return torch.from_numpy(bits[rows]).view(table.dtype)


def required_distributions(inputs: ForwardInputs) -> tuple[list[tuple[int, int]], list[int]]:
    """The distributions that a call computes, and the index of the one that each output row shows.

    Each is (last draft token that it depends on, number of the open hole). The first query of a chain is for the same
    hole as the row of the node before it, so both share a distribution.
    """
    numbers: dict[tuple[int, int], int] = {}
    rows = [numbers.setdefault((-1, 0), 0)]
    last_tokens: list[int] = []  # of each node: the last draft token on its path
    for node, parent in enumerate(inputs.parents):
        own_position = inputs.has_own_position(node)
        last_tokens.append((last_tokens[parent] if parent >= 0 else -1) if own_position else node)
        key = last_tokens[node], inputs.depths[node] + (not own_position)
        rows.append(numbers.setdefault(key, len(numbers)))
    return list(numbers), rows
