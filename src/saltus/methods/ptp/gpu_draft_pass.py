"""Run a drafter's whole pass on a GPU as one CUDA graph: context inputs, queries, layers, logits."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from saltus.methods.ptp.native_draft_pass import DraftedRows
from saltus.methods.shared.context_rows import DraftRows, run_in_passes
from saltus.methods.shared.hidden_state_correction import RMS_EPSILON
from saltus.methods.shared.row_candidates import rows_likely_tokens
from saltus.models.cuda.cuda_graphs import to_host
from saltus.models.cuda.fixed_shape_calls import Call, FixedShape, FixedShapeKVCache, TextRows
from saltus.models.cuda.gpu_decoder import GPUDecoder, supports_gpu_decoder
from saltus.models.cuda.graphed_passes import GraphedPasses, PassInputs, chain_rows, whole_call


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

    @torch.inference_mode()
    def __call__(self, texts: Sequence[DraftRows]) -> list[DraftedRows]:
        """The pass over texts, in calls of limited rows. A row rounds as if it were alone."""
        return run_in_passes(texts, self._run, self._launch)

    def _launch(self, texts: Sequence[DraftRows]) -> tuple[Call, tuple[Tensor, Tensor, Tensor]]:
        """One call, and its outputs, for which nothing has waited."""
        call, positions = whole_call([_text_rows(number, text) for number, text in enumerate(texts)])
        make = partial(_DraftInputs, call.shape, self.model)
        inputs, run = self.passes.prepared(call.shape, positions, make, self._evaluate)
        inputs.fill(call, texts)
        return call, run()

    def _run(self, texts: Sequence[DraftRows]) -> list[DraftedRows]:
        call, (logits, states, projected) = self._launch(texts)
        rows = [slice(start + len(text.states) - 1, start + text.num_rows)
                for (start, _), text in zip(call.placed(), texts, strict=True)]  # fmt: skip
        own_states = [states[part].clone() for part in rows]
        host = to_host(*(logits[part] for part in rows), *(projected[part] for part in rows))
        return [
            DraftedRows(text_logits, kept, rows_likely_tokens(text_logits), vectors.float().numpy())
            for text_logits, vectors, kept in zip(host[: len(texts)], host[len(texts) :], own_states, strict=True)
        ]

    def _evaluate(self, inputs: _DraftInputs) -> tuple[Tensor, Tensor, Tensor]:
        """Logits, last hidden states and the correction's inputs of all rows."""
        from saltus.methods.ptp import gpu_draft_kernels as draft_kernels
        from saltus.models.cuda import linear_kernels

        model, rows, static = self.model, inputs.static.shape.num_rows, inputs.static
        wide = linear_kernels.padded_rows(rows)
        features = model.fuse.weight.new_empty(wide, model.fuse.weight.shape[1])
        draft_kernels.normalize_features(
            inputs.states, model.embeddings[0], static.tokens, features[:rows], RMS_EPSILON
        )
        blocks = linear_kernels.blocks_of(model.fuse.weight)
        hidden = features.new_empty(wide, model.shape.hidden)
        context = linear_kernels.linear_parts(features, [model.fuse.weight], blocks, rows)
        draft_kernels.draft_inputs(context, inputs.sources, inputs.queries, hidden[:rows])
        states = self.decoder.run_layers(hidden, static, self.passes.pool)[0]
        logits = linear_kernels.product(states, model.lm_head.weight, rows)
        correction = model.correction
        projected = (
            states[:rows, :0] if correction is None else linear_kernels.product(states, correction.state.weight, rows)
        )
        return logits, states[:rows], projected


class _DraftInputs(PassInputs):
    """The inputs of passes of one shape, at addresses that never change."""

    def __init__(self, shape: FixedShape, model: Any) -> None:
        weight, hidden = model.fuse.weight, model.shape.hidden
        super().__init__(shape, weight.device)
        self.states = weight.new_zeros(shape.num_rows, weight.shape[1] - hidden)
        self.queries = weight.new_zeros(shape.num_rows, hidden)
        self.sources = torch.zeros(shape.num_rows, dtype=torch.long, device=weight.device)

    def fill(self, call: Call, texts: Sequence[DraftRows]) -> None:
        """Write the rows of texts: context positions, then queries, which start as the last context position."""
        sources = torch.arange(call.shape.num_rows, pin_memory=self.sources.device.type == "cuda")
        self.queries.zero_()
        for (start, _), text in zip(call.placed(), texts, strict=True):
            end = start + len(text.states)
            self.states[start:end].copy_(text.states)
            self.queries[end : end + len(text.queries)].copy_(text.queries)
            sources[end : end + len(text.queries)] = end - 1
        self.sources.copy_(sources, non_blocking=True)
        self.static.fill(call)


def _text_rows(number: int, text: DraftRows) -> TextRows:
    """A text's rows as a chain after the positions in its cache."""
    kv_cache: Any = text.kv_cache.kv_cache
    tokens = np.concatenate([text.tokens, np.zeros(len(text.queries), dtype=np.int64)])
    return chain_rows(number, kv_cache, text.past_length, tokens)
