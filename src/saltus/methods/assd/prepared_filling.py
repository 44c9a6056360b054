"""Evaluate the rows of an any-subset model for one text by a call whose arguments were made once."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
from torch import Tensor

from saltus.core.forward import ForwardInputs
from saltus.kernels import native
from saltus.kernels.native import structs
from saltus.models.cpu.kv_cache import KVCache
from saltus.models.cpu.native_decoder import NativeDecoder
from saltus.models.cpu.prepared_call import MAX_ROWS, PreparedCall


class HoleRows(ctypes.Structure):
    """The struct `HoleRows` of hole_rows.c, field for field."""

    _fields_ = [
        *((name, structs.POINTER) for name in ("places", "place_tokens", "tokens", "parents", "open")),
        *((name, structs.INTEGER) for name in ("unread", "given", "drafts", "nodes", "mask")),
        *((name, structs.POINTER) for name in ("row_tokens", "positions", "visible", "outputs")),
    ]


class PreparedFilling(PreparedCall):
    """The arguments of a decoder's calls for the tree of one text with holes."""

    def __init__(self, decoder: NativeDecoder, mask_token: int) -> None:
        super().__init__(decoder)
        self.node_tokens, self.parents, self.outputs = ((structs.INTEGER * MAX_ROWS)() for _ in range(3))
        addresses = map(ctypes.addressof, (self.node_tokens, self.parents, self.tokens, self.outputs))
        tokens, parents, row_tokens, outputs = addresses
        self.rows = HoleRows(
            tokens=tokens, parents=parents, mask=mask_token, row_tokens=row_tokens, outputs=outputs,
            positions=ctypes.addressof(self.set_rows.positions), visible=ctypes.addressof(self.set_rows.visible),
        )  # fmt: skip

    def fill(
        self, kv_cache: KVCache, past_length: int, context: np.ndarray, inputs: ForwardInputs
    ) -> tuple[Tensor, Tensor, Sequence[int]]:
        """The logits and hidden states of all queries, and which of them the decided tokens and each node have.

        `context` are the known tokens, in the order of `known_positions`; they and the nodes fit into MAX_ROWS.
        """
        canvas, rows, nodes = inputs.canvas, self.rows, len(inputs.tokens)
        self.node_tokens[:nodes], self.parents[:nodes] = inputs.tokens, inputs.parents
        places, open_positions = canvas.known_positions, canvas.open_positions
        unread, skipped = len(context) - past_length, 8 * past_length
        rows.places, rows.place_tokens = native.address(places) + skipped, native.address(context) + skipped
        rows.open, rows.unread = native.address(open_positions), unread
        rows.given = max(len(canvas.given_positions) - past_length, 0)
        rows.drafts, rows.nodes = inputs.num_draft_tokens, nodes
        queries = self.set_rows.kernels.saltus_hole_rows(ctypes.byref(rows))
        num_rows = unread + inputs.num_draft_tokens + queries
        self.set_rows.point(kv_cache, past_length, num_rows, len(canvas.tokens), queries)
        return *self.evaluate(num_rows, queries, False, ()), self.outputs[: 1 + nodes]
