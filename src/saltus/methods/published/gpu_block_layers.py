"""Run a DFlash drafter on a GPU by our kernels: one CUDA graph that reads the text, and one for the blocks of texts."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from saltus.methods.published.dflash_model import DFlashModel
from saltus.methods.shared.context_rows import ContextKVCache, ContextRows, run_in_passes
from saltus.methods.shared.gpu_context_layers import GPUContextLayers
from saltus.models.cuda.fixed_shape_calls import FixedShape, chains_of_texts, split_into_calls
from saltus.models.cuda.gpu_decoder import GPUDecoder
from saltus.models.cuda.gpu_decoder_support import DEPTH_MULTIPLE, supports_gpu_decoder
from saltus.models.cuda.graphed_passes import READING, SETTINGS, PassInputs, write_rows


class GPUBlockLayers:
    """The layers of a drafter whose weights are not changed any more."""

    def __init__(self, drafter: DFlashModel, use_cuda_graphs: bool = True) -> None:
        self.drafter, self.layers = drafter, GPUContextLayers(GPUDecoder(drafter.decoder), use_cuda_graphs)
        self.passes = self.layers.passes

    @staticmethod
    def supports(drafter: DFlashModel) -> bool:
        """True on a GPU whose kernels know the layers, unless rows of a sliding window see later rows."""
        shape, fuse = drafter.shape, drafter.fc.weight
        return (
            supports_gpu_decoder(drafter.decoder)
            and ((shape.causal and shape.causal_windows) or not any(shape.layer_spans))
            and fuse.is_contiguous()
            and fuse.dtype == drafter.decoder.dtype
            and fuse.shape[1] % DEPTH_MULTIPLE == 0
        )

    @property
    def model(self) -> Any:
        """The decoder, whose configuration says what a text's keys and values take."""
        return self.drafter.decoder

    def new_kv_cache(self) -> ContextKVCache:
        return ContextKVCache(self.layers.new_kv_cache)

    @torch.inference_mode()
    def write_context(
        self, states: Sequence[Tensor], kv_caches: Sequence[ContextKVCache], lengths: Sequence[int]
    ) -> None:
        """Write the keys and values of new context positions, the last ones before `lengths`, for every layer."""
        starts = [length - len(each) for length, each in zip(lengths, states, strict=True)]
        tokens = [np.zeros(len(each), dtype=np.int64) for each in states]
        texts = chains_of_texts([cache.kv_cache for cache in kv_caches], starts, tokens, SETTINGS)
        for call in split_into_calls(texts, READING):
            make = partial(_ContextInputs, call.shape, self.drafter)
            inputs, run = self.passes.prepared(("context", call.shape), max(lengths), make, self._write)
            write_rows(call, states, starts, inputs.states)
            inputs.static.fill(call)
            run()

    def run_together(self, texts: Sequence[ContextRows]) -> list[tuple[Tensor, Tensor]]:
        """Logits and last hidden states of the rows of blocks, in few passes."""
        return run_in_passes(texts, self.layers, self.layers)

    def _write(self, inputs: _ContextInputs) -> None:
        from saltus.models.cuda import linear_kernels, row_kernels

        rows = inputs.static.shape.num_rows
        fused = linear_kernels.product(inputs.states, self.drafter.fc.weight, rows)
        context = fused.new_empty(len(inputs.states), fused.shape[1])
        row_kernels.add_and_norm(None, fused, self.drafter.hidden_norm, context, rows)
        self.layers.decoder.write_context(context, inputs.static, self.passes.pool)


class _ContextInputs(PassInputs):
    """The inputs of context positions."""

    def __init__(self, shape: FixedShape, drafter: DFlashModel) -> None:
        from saltus.models.cuda import linear_kernels

        weight = drafter.fc.weight
        super().__init__(shape, weight.device)
        self.states = weight.new_zeros(linear_kernels.padded_rows(shape.num_rows), weight.shape[1])
