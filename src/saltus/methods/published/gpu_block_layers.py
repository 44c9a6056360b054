"""Run a DFlash drafter on a GPU by our kernels: one CUDA graph that reads the text, and one for the blocks of texts."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from saltus.methods.published.dflash_model import DFlashModel
from saltus.methods.shared.context_layers import ContextKVCache, ContextRows, run_in_passes
from saltus.models.cuda.fixed_shape_calls import Call, FixedShape, size_class, split_into_calls
from saltus.models.cuda.gpu_decoder import DEPTH_MULTIPLE, GPUDecoder, supports_gpu_decoder
from saltus.models.cuda.graphed_passes import READING, SETTINGS, GraphedPasses, PassInputs, chain_rows, write_rows


class GPUBlockLayers:
    """The layers of a drafter whose weights are not changed any more."""

    def __init__(self, drafter: DFlashModel, use_cuda_graphs: bool = True) -> None:
        self.drafter, self.decoder = drafter, GPUDecoder(drafter.decoder)
        self.passes = GraphedPasses(self.decoder, use_cuda_graphs)

    @staticmethod
    def supports(drafter: DFlashModel) -> bool:
        """True on a GPU whose kernels know the layers, unless rows of a sliding window see later rows."""
        shape, fuse = drafter.shape, drafter.fc.weight
        return (
            supports_gpu_decoder(drafter.decoder)
            and (shape.causal or not any(shape.layer_spans))
            and fuse.is_contiguous()
            and fuse.dtype == drafter.decoder.dtype
            and fuse.shape[1] % DEPTH_MULTIPLE == 0
        )

    @property
    def model(self) -> Any:
        """The decoder, whose configuration says what a text's keys and values take."""
        return self.drafter.decoder

    def new_kv_cache(self) -> ContextKVCache:
        return ContextKVCache(self.passes.new_kv_cache)

    def write_context(
        self, states: Sequence[Tensor], kv_caches: Sequence[ContextKVCache], lengths: Sequence[int]
    ) -> None:
        """Write the keys and values of new context positions, the last ones before `lengths`, for every layer."""
        starts = [length - len(each) for length, each in zip(lengths, states, strict=True)]
        texts = [
            chain_rows(number, cache.kv_cache, start, np.zeros(len(each), dtype=np.int64))
            for number, (cache, start, each) in enumerate(zip(kv_caches, starts, states, strict=True))
        ]
        for call in split_into_calls(texts, READING):
            make = partial(_ContextInputs, call.shape, self.drafter)
            inputs, run = self.passes.prepared(("context", call.shape), max(lengths), make, self._write)
            inputs.fill(call, states, starts)
            run()

    def run_together(self, texts: Sequence[ContextRows]) -> list[tuple[Tensor, Tensor]]:
        """Logits and last hidden states of the rows of blocks, in few passes."""
        return run_in_passes(texts, self._run, self._run)

    def _run(self, texts: Sequence[ContextRows]) -> list[tuple[Tensor, Tensor]]:
        blocks = [0 if self.drafter.shape.causal else text.num_rows for text in texts]
        parts = tuple(
            chain_rows(number, text.kv_cache.kv_cache, text.past_length, np.zeros(text.num_rows, dtype=np.int64), block)
            for number, (text, block) in enumerate(zip(texts, blocks, strict=True))
        )
        by, end = SETTINGS.rows_per_group, max(text.past_length + text.num_rows for text in texts)
        groups = size_class(sum(-(-text.num_rows // by) for text in texts))
        call = Call(FixedShape(groups, by, SETTINGS.num_pages(end), 0), parts)
        make = partial(_BlockInputs, call.shape, self.drafter)
        inputs, run = self.passes.prepared(("block", call.shape), end, make, self._evaluate)
        inputs.fill(call, texts)
        logits, states = run()
        rows = [slice(start, start + len(part)) for start, part in call.placed()]
        return [(logits[part].clone(), states[part].clone()) for part in rows]

    def _write(self, inputs: _ContextInputs) -> None:
        from saltus.models.cuda import linear_kernels, row_kernels

        rows = inputs.static.shape.num_rows
        fused = linear_kernels.product(inputs.states, self.drafter.fc.weight, rows)
        context = fused.new_empty(len(inputs.states), fused.shape[1])
        row_kernels.add_and_norm(None, fused, self.drafter.hidden_norm, context, rows)
        self.decoder.write_context(context, inputs.static, self.passes.pool)

    def _evaluate(self, inputs: _BlockInputs) -> tuple[Tensor, Tensor]:
        """Logits and last hidden states of all rows."""
        from saltus.models.cuda import linear_kernels

        rows = inputs.static.shape.num_rows
        states, _ = self.decoder.run_layers(
            inputs.hidden.clone(), inputs.static, self.passes.pool, last_seen=inputs.last_seen
        )
        return linear_kernels.product(states, self.drafter.lm_head.weight, rows), states[:rows]


class _ContextInputs(PassInputs):
    """The inputs of context positions."""

    def __init__(self, shape: FixedShape, drafter: DFlashModel) -> None:
        from saltus.models.cuda import linear_kernels

        weight = drafter.fc.weight
        super().__init__(shape, weight.device)
        self.states = weight.new_zeros(linear_kernels.padded_rows(shape.num_rows), weight.shape[1])

    def fill(self, call: Call, states: Sequence[Tensor], starts: Sequence[int]) -> None:
        """Write the rows of a call, of texts whose states begin at the positions `starts`."""
        write_rows(call, states, starts, self.states)
        self.static.fill(call)


class _BlockInputs(PassInputs):
    """The inputs of blocks."""

    def __init__(self, shape: FixedShape, drafter: DFlashModel) -> None:
        from saltus.models.cuda import linear_kernels

        weight = drafter.fc.weight
        super().__init__(shape, weight.device)
        self.hidden = weight.new_zeros(linear_kernels.padded_rows(shape.num_rows), drafter.shape.hidden)
        self.last_seen = torch.zeros(shape.num_rows, dtype=torch.long, device=weight.device)

    def clear(self) -> None:
        super().clear()
        self.last_seen.zero_()

    def fill(self, call: Call, texts: Sequence[ContextRows]) -> None:
        """Write the rows of a call."""
        seen = torch.zeros(call.shape.num_rows, dtype=torch.long, pin_memory=self.last_seen.device.type == "cuda")
        for (start, part), text in zip(call.placed(), texts, strict=True):
            rows = slice(start, start + len(part))
            self.hidden[rows] = text.inputs
            seen[rows] = torch.from_numpy(part.recent_entries[:, -1])
        self.last_seen.copy_(seen, non_blocking=True)
        self.static.fill(call)
