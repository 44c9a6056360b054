"""Run a drafter's whole pass as one kernel call: context inputs, queries, layers, logits and their likely tokens."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from saltus.kernels import native
from saltus.kernels.native import structs
from saltus.kernels.packed_weight import is_kernel_weight, kernel_arguments
from saltus.methods.shared.context_layers import ContextLayers
from saltus.methods.shared.context_rows import DraftRows, plan_pass, run_in_passes
from saltus.methods.shared.draft_tree import LikelyTokens
from saltus.methods.shared.hidden_state_correction import RMS_EPSILON
from saltus.methods.shared.row_candidates import RowCandidates
from saltus.models.cpu.decoder_weights import linear_struct
from saltus.models.cpu.native_decoder import DecoderCall, raise_if_failed
from saltus.models.cpu.prepared_call import MAX_ROWS, PreparedRows


@dataclass(frozen=True)
class DraftedRows:
    """What a pass found for one text; the first row is that of the last context position, the others are queries."""

    logits: Float[Tensor, "rows draft"]
    hidden_states: Float[Tensor, "rows hidden"]
    likely: Sequence[LikelyTokens]
    projected: Float[np.ndarray, "rows rank"]  # of the correction; rank 0 without one


class NativeDraftPass:
    """The pass of a drafter (`DraftModel`) whose weights are not changed any more."""

    def __init__(self, model: Any, layers: ContextLayers) -> None:
        decoder, fuse = layers.native_decoder, model.fuse
        assert decoder is not None
        size, inputs = fuse.weight.shape
        kernel = native.kernel("draft", fuse.weight.dtype, fuse.weight.device)
        assert kernel is not None
        self.kernel, self.decoder, self.state_size = kernel, decoder, inputs - size
        self.ones = torch.ones(size, dtype=fuse.weight.dtype)
        embeddings, state = model.embeddings[0], None if model.correction is None else model.correction.state
        weight, format = kernel_arguments(embeddings)
        self.rank = 0 if state is None else len(state.weight)
        self.constants = structs.DraftPass(
            embedding=structs.Expansion(weight=weight, format=format, inputs=size),
            fuse=linear_struct(self.ones, [(fuse, None)]), ones=self.ones.data_ptr(),
            likely=structs.NearGreatest(size=len(model.tokens)),
            parts=self.state_size // size, vocab=len(embeddings), epsilon=RMS_EPSILON,
        )  # fmt: skip
        if state is not None:
            self.constants.project = linear_struct(self.ones, [(state, None)])
        self.lock = threading.Lock()  # of the decoder's buffers, and of the arguments that are made once
        self.of_one_text = PreparedDraftPass(self) if PreparedRows.supports(decoder) else None

    @staticmethod
    def supports(model: Any, layers: ContextLayers) -> bool:
        """True on a machine with compiled kernels, if all weights have one dtype."""
        modules = [model.fuse, *([] if model.correction is None else [model.correction.state])]
        weights = [model.embeddings[0], *(module.weight for module in modules)]
        return layers.native_decoder is not None and all(
            is_kernel_weight(weight) and weight.is_contiguous() and weight.dtype == layers.native_decoder.dtype
            for weight in weights
        )

    def __call__(self, texts: Sequence[DraftRows]) -> list[DraftedRows]:
        """The pass over texts, in calls of limited rows. A row rounds as if it were alone. Errors: MemoryError."""
        with self.lock:
            if self.of_one_text is not None and len(texts) == 1 and texts[0].num_rows <= MAX_ROWS:
                return [self.of_one_text(texts[0])]
            return run_in_passes(texts, self._evaluate, self._evaluate)

    def _evaluate(self, texts: Sequence[DraftRows]) -> list[DraftedRows]:
        positions, attention, kept = plan_pass(texts, self.decoder.num_layers)
        call = self.decoder.prepare(len(positions), positions, attention, kept)
        candidates = RowCandidates(len(kept))
        projected = np.empty((len(kept), self.rank), dtype=np.float32)
        self._run(texts, call, candidates, projected)
        ends = list(accumulate(text.num_outputs for text in texts))
        parts = [slice(end - text.num_outputs, end) for end, text in zip(ends, texts, strict=True)]
        return [DraftedRows(call.logits[rows], call.states[rows], candidates[rows], projected[rows]) for rows in parts]

    def _run(
        self, texts: Sequence[DraftRows], call: DecoderCall, candidates: RowCandidates, projected: np.ndarray
    ) -> None:
        struct = structs.DraftPass.from_buffer_copy(self.constants)
        struct.decoder = call.struct
        states, queries = ((structs.POINTER * len(texts))() for _ in range(2))
        counts, query_counts = ((structs.INTEGER * len(texts))() for _ in range(2))
        for i, text in enumerate(texts):
            assert len(text.tokens) == len(text.states) > 0 and text.states.is_contiguous()
            assert text.states.shape[1] == self.state_size
            states[i], queries[i] = text.states.data_ptr(), text.queries.data_ptr()
            counts[i], query_counts[i] = len(text.states), len(text.queries)
        tokens = texts[0].tokens if len(texts) == 1 else np.concatenate([text.tokens for text in texts])
        struct.states, struct.vectors = ctypes.addressof(states), ctypes.addressof(queries)
        struct.contexts, struct.queries = ctypes.addressof(counts), ctypes.addressof(query_counts)
        struct.embedding.rows = native.address(tokens)
        struct.projected = native.address(projected) if self.rank else None
        struct.likely.x = call.logits.data_ptr()
        candidates.point(struct.likely)
        raise_if_failed(self.kernel(ctypes.byref(struct)), struct.vocab)


class PreparedDraftPass:
    """The same for few rows of one text: the arguments are made once, and only what changes is written."""

    def __init__(self, draft_pass: NativeDraftPass) -> None:
        self.decoder, self.kernel, self.rank = draft_pass.decoder, draft_pass.kernel, draft_pass.rank
        self.struct = struct = structs.DraftPass.from_buffer_copy(draft_pass.constants)
        struct.decoder = self.decoder.constants
        self.set_rows = PreparedRows(self.decoder, struct.decoder)
        self.embedding, self.likely = struct.embedding, struct.likely
        self.states, self.queries = ((structs.POINTER * 1)() for _ in range(2))
        self.counts, self.query_counts = ((structs.INTEGER * 1)() for _ in range(2))
        self.tokens = (structs.INTEGER * MAX_ROWS)()
        self.embedding.rows = ctypes.addressof(self.tokens)
        struct.states, struct.vectors = ctypes.addressof(self.states), ctypes.addressof(self.queries)
        struct.contexts, struct.queries = ctypes.addressof(self.counts), ctypes.addressof(self.query_counts)
        self.state_size, self.size, self.vocab = draft_pass.state_size, len(draft_pass.ones), struct.likely.size

    def __call__(self, text: DraftRows) -> DraftedRows:
        made, outputs, contexts = self.set_rows, text.num_outputs, len(text.tokens)
        assert contexts == len(text.states) > 0 and text.states.is_contiguous()
        assert text.states.shape[1] == self.state_size
        made(text.kv_cache.kv_cache, text.past_length, text.num_rows, (), outputs)
        logits = text.states.new_empty(outputs, self.vocab)
        states = text.states.new_empty(outputs, self.size)
        projected = np.empty((outputs, self.rank), dtype=np.float32)
        candidates = RowCandidates(outputs)
        candidates.point(self.likely)
        self.tokens[:contexts] = text.tokens.tolist()
        self.states[0], self.queries[0] = text.states.data_ptr(), text.queries.data_ptr()
        self.counts[0], self.query_counts[0] = contexts, outputs - 1
        made.norm.out = states.data_ptr()
        made.head_out[0] = self.likely.x = logits.data_ptr()
        self.struct.projected = native.address(projected) if self.rank else None
        raise_if_failed(self.kernel(ctypes.byref(self.struct)), self.struct.vocab)
        return DraftedRows(logits, states, candidates, projected)
