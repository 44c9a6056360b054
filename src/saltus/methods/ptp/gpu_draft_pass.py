"""Run a drafter's whole pass on a GPU as one CUDA graph: context inputs, queries, layers, logits."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor

from saltus.methods.ptp.native_draft_pass import DraftedRows
from saltus.methods.shared.context_rows import ContextKVCache, DraftRows, run_in_passes
from saltus.methods.shared.hidden_state_correction import RMS_EPSILON
from saltus.methods.shared.row_candidates import rows_likely_tokens
from saltus.models.cuda.fixed_shape_calls import Call, FixedShape, chains_of_texts
from saltus.models.cuda.gpu_decoder import GPUDecoder
from saltus.models.cuda.gpu_decoder_support import supports_gpu_decoder
from saltus.models.cuda.graphed_passes import SETTINGS, GraphedPasses, PassInputs, whole_call
from saltus.models.cuda.host_copies import to_host
from saltus.models.cuda.kv_pages import FixedShapeKVCache


class GPUDraftPass:
    """The pass of a drafter (`DraftModel`) whose weights are not changed any more."""

    def __init__(self, model: Any, use_cuda_graphs: bool = True) -> None:
        self.model, self.decoder = model, GPUDecoder(model.llama)
        self.passes = GraphedPasses(self.decoder, use_cuda_graphs)

    @staticmethod
    def supports(model: Any) -> bool:
        """True on a GPU whose kernels know the layers, if all weights have one dtype."""
        weights = [model.embeddings[0], model.fuse.weight, model.lm_head.weight]
        return supports_gpu_decoder(model.llama) and all(
            weight.is_contiguous() and weight.dtype == model.llama.dtype for weight in weights
        )

    def new_kv_cache(self) -> FixedShapeKVCache:
        return self.passes.new_kv_cache()

    def take_over(self, kv_cache: ContextKVCache) -> None:
        """Let a text begin anew whose pages are in another pool: of a drafter that this one has replaced."""
        if getattr(kv_cache.kv_cache, "pool", None) is not self.passes.pool:
            kv_cache.begin_anew(self.new_kv_cache)

    @torch.inference_mode()
    def __call__(self, texts: Sequence[DraftRows]) -> list[DraftedRows]:
        """The pass over texts, in calls of limited rows. A row rounds as if it were alone."""
        return run_in_passes(texts, self._run, self._launch)

    def _launch(self, texts: Sequence[DraftRows]) -> tuple[Tensor, Tensor, Tensor]:
        """The outputs of one call, for which nothing has waited: those of each text, one after another."""
        tokens = [np.concatenate([text.tokens, np.zeros(len(text.queries), dtype=np.int64)]) for text in texts]
        caches, past = [text.kv_cache.kv_cache for text in texts], [text.past_length for text in texts]
        call, positions = whole_call(chains_of_texts(caches, past, tokens, SETTINGS))
        make = partial(_DraftInputs, call.shape, self.model)
        inputs, run = self.passes.prepared(call.shape, positions, make, self._evaluate)
        inputs.fill(call, texts)
        return run()

    def _run(self, texts: Sequence[DraftRows]) -> list[DraftedRows]:
        logits, states, projected = self._launch(texts)
        ends = list(accumulate(text.num_outputs for text in texts))
        states = states[: ends[-1]].clone()
        logits, projected = to_host(logits[: ends[-1]], projected[: ends[-1]])
        likely, vectors = rows_likely_tokens(logits), projected.float().numpy()
        rows = [slice(end - text.num_outputs, end) for end, text in zip(ends, texts, strict=True)]
        return [DraftedRows(logits[own], states[own], likely[own], vectors[own]) for own in rows]

    def _evaluate(self, inputs: _DraftInputs) -> tuple[Tensor, Tensor, Tensor]:
        """Logits, last hidden states and the correction's inputs of the rows that have outputs."""
        from saltus.methods.ptp import gpu_draft_kernels as draft_kernels
        from saltus.models.cuda import linear_kernels

        model, rows, static = self.model, inputs.static.shape.num_rows, inputs.static
        wide = linear_kernels.padded_rows(rows)
        features = model.fuse.weight.new_empty(wide, model.fuse.weight.shape[1])
        draft_kernels.normalize_features(
            inputs.states, inputs.state_rows, model.embeddings[0], static.tokens, features[:rows], RMS_EPSILON
        )
        blocks = linear_kernels.blocks_of(model.fuse.weight)
        hidden = features.new_empty(wide, model.shape.hidden)
        context = linear_kernels.linear_parts(features, [model.fuse.weight], blocks, rows)
        draft_kernels.draft_inputs(context, inputs.sources, inputs.queries, inputs.query_rows, hidden[:rows])
        states = self.decoder.run_layers(hidden, static, self.passes.pool)[0].index_select(0, inputs.outputs)
        logits = linear_kernels.product(states, model.lm_head.weight, rows)
        correction = model.correction
        projected = (
            states[:rows, :0] if correction is None else linear_kernels.product(states, correction.state.weight, rows)
        )
        return logits, states[:rows], projected


class _DraftInputs(PassInputs):
    """The inputs of passes of one shape, at addresses that never change.

    Hidden states and vectors of queries lie one after another, whichever rows of the call they belong to, so that they
    are copied for all texts at once.
    """

    def __init__(self, shape: FixedShape, model: Any) -> None:
        from saltus.models.cuda import linear_kernels

        weight, hidden, rows = model.fuse.weight, model.shape.hidden, shape.num_rows
        super().__init__(shape, weight.device)
        self.states = weight.new_zeros(rows, weight.shape[1] - hidden)
        self.queries = weight.new_zeros(1 + rows, hidden)  # the first one is that of context positions, and zero
        self.index = torch.zeros(4, linear_kernels.padded_rows(rows), dtype=torch.long, device=weight.device)
        # of each row: that of `states`, the one whose context input it starts from, and that of `queries`
        self.state_rows, self.sources, self.query_rows = self.index[:3, :rows]
        self.outputs = self.index[3]  # the rows that have outputs, and then 0

    def fill(self, call: Call, texts: Sequence[DraftRows]) -> None:
        """Write the rows of texts: context positions, then queries, which start as the last context position."""
        index = torch.zeros(self.index.shape, dtype=torch.long, pin_memory=self.index.device.type == "cuda")
        state_rows, sources, query_rows, outputs = index.numpy()
        sources[:] = np.arange(len(sources))
        states = queries = found = 0
        for (start, part), text in zip(call.placed(), texts, strict=True):
            border, end = start + len(text.states), start + part.num_rows
            state_rows[start:border] = np.arange(states, states + len(text.states))
            sources[border:end] = border - 1
            query_rows[border:end] = np.arange(1 + queries, 1 + queries + len(text.queries))
            outputs[found : found + text.num_outputs] = np.arange(border - 1, end)
            states, queries, found = states + len(text.states), queries + len(text.queries), found + text.num_outputs
        torch.cat([text.states for text in texts], out=self.states[:states])
        torch.cat([text.queries for text in texts], out=self.queries[1 : 1 + queries])
        self.index.copy_(index, non_blocking=True)
        self.static.fill(call)
