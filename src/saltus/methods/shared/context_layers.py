"""Run a few layers over context positions, made of the target's hidden states before each token; each runs once."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from saltus.kernels.batch_invariant_ops import BatchInvariantMode
from saltus.methods.shared.context_rows import MAX_ROWS_PER_CALL, ContextKVCache, ContextRows, plan_pass, run_in_passes
from saltus.methods.shared.gpu_context_layers import GPUContextLayers
from saltus.models.cpu import attention
from saltus.models.cpu.attention import AttentionCall
from saltus.models.cpu.kv_cache import KVCache
from saltus.models.cpu.native_decoder import NativeDecoder, supports_native_decoder
from saltus.models.packed_decoder import PackedDecoder

MASKED_SCORE = -30000.0  # finite, so that no row of a mask is −∞ throughout


class ContextLayers:
    """The layers of a causal model over given embeddings: by compiled kernels where possible, else by Transformers.

    With `by_gpu_kernels` also on a GPU; whoever asks for them takes its caches from `new_kv_cache`.
    """

    def __init__(self, model: Any, by_gpu_kernels: bool = False) -> None:
        self.model, self.device = model, model.device
        self.num_layers = model.config.num_hidden_layers
        self.on_gpu = GPUContextLayers.of(model) if by_gpu_kernels else None
        if not isinstance(model, PackedDecoder):
            attention.install_attention(model)
        self.native_decoder = NativeDecoder(model, MAX_ROWS_PER_CALL) if supports_native_decoder(model) else None

    def new_kv_cache(self, first_position: int = 0) -> ContextKVCache:
        """A cache for these layers."""
        return ContextKVCache(KVCache if self.on_gpu is None else self.on_gpu.new_kv_cache, first_position)

    def __call__(
        self,
        inputs: Float[Tensor, "rows hidden"],
        kv_cache: ContextKVCache,
        past_length: int,
        num_outputs: int,
        output_logits: bool = True,
    ) -> tuple[Float[Tensor, "*logits"], Float[Tensor, "outputs hidden"]]:
        """Run rows after the `past_length` rows in the cache; logits and last hidden states of the last `num_outputs`.

        Rows before these may run in several calls. Without `output_logits` the logits are empty.
        """
        rows = ContextRows(inputs, kv_cache, past_length, num_outputs)
        (result,) = run_in_passes([rows], partial(self._forward, output_logits=output_logits), self._run_without_logits)
        return result

    def run_together(self, texts: Sequence[ContextRows]) -> list[tuple[Tensor, Tensor]]:
        """The same for several texts, in few passes of limited rows. A row rounds as if it were alone."""
        return run_in_passes(texts, self._forward, self._run_without_logits)

    def _run_without_logits(self, texts: Sequence[ContextRows]) -> None:
        self._forward(texts, output_logits=False)

    def _forward(self, texts: Sequence[ContextRows], output_logits: bool = True) -> list[tuple[Tensor, Tensor]]:
        if self.on_gpu is not None:
            return self.on_gpu(texts, output_logits)
        positions, call, kept = plan_pass(texts, self.num_layers)
        inputs, keep = torch.cat([text.inputs for text in texts]), kept.to(self.device)
        logits, states = self._evaluate(inputs, positions.to(self.device), call, keep, output_logits)
        counts = [text.num_outputs for text in texts]
        by_text = logits.split(counts) if output_logits else [logits] * len(texts)
        return list(zip(by_text, states.split(counts), strict=True))

    def _evaluate(
        self, inputs: Tensor, positions: Tensor, call: AttentionCall, keep: Tensor, output_logits: bool
    ) -> tuple[Tensor, Tensor]:
        if self.native_decoder is not None:
            return self.native_decoder(inputs, positions, call, keep, output_logits=output_logits)
        with attention.attention_context(call), BatchInvariantMode() if self.device.type == "cpu" else nullcontext():
            states = self.model.model(inputs_embeds=inputs[None], position_ids=positions[None], use_cache=False)
            states = states.last_hidden_state[0, keep]
            return self.model.lm_head(states) if output_logits else states.new_empty(0), states
