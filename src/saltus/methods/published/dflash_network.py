"""Run a DFlash drafter over texts: new context positions become keys and values, then the block of each text runs."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from saltus.core.forward import ForwardInputs, ForwardOutputs
from saltus.kernels import native
from saltus.kernels.batch_invariant_ops import BatchInvariantMode, linear
from saltus.kernels.native import structs
from saltus.methods.published.dflash_model import DFlashModel
from saltus.methods.published.gpu_block_layers import GPUBlockLayers
from saltus.methods.shared.context_layers import ContextLayers
from saltus.methods.shared.context_rows import ContextKVCache, ContextRows, unread_states
from saltus.methods.shared.draft_tree import DraftOutputs, LikelyTokens, PathLogits, PositionPredictions
from saltus.methods.shared.query_predictions import QueryPredictor, rows_linear
from saltus.methods.shared.timed_outputs import timed_outputs
from saltus.models.cpu.torch_decoder import normed, rotated
from saltus.models.cuda.host_copies import to_device

UNREAD_STATES = 1024  # hidden states that are read at once; a context position costs little


Predictor = Callable[[Tensor, Tensor], PositionPredictions]
"""The predictions of queries, given their logits over the drafted tokens and their last hidden states."""

Refiner = Callable[[Sequence[LikelyTokens], Tensor], PathLogits]
"""What is added to the logits of the queries' likely tokens, given the last hidden states of all rows of the block."""


@runtime_checkable
class RunsRows(Protocol):
    """The layers of a drafter."""

    def run_together(self, texts: Sequence[ContextRows]) -> list[tuple[Tensor, Tensor]]:
        """Logits and last hidden states of the last rows of each text."""
        ...


@dataclass
class DFlashNetwork:
    """A DFlash drafter as a network; its inputs carry the target's hidden states of the newly decided tokens.

    A block always has all masks of training, since its rows see each other; those that were not asked for are dropped.
    """

    model: DFlashModel
    target: Any  # the network whose hidden states it reads
    max_unread: int = UNREAD_STATES
    predictor: Predictor | None = None  # None: by the model's correction, if it has one
    refiner: Refiner | None = None
    context_layers: RunsRows | None = None  # what runs the rows of blocks; None: the model's decoder

    def __post_init__(self) -> None:
        self.device = self.model.tokens.device
        self.predict = self.predictor or QueryPredictor(self.model)
        if self.context_layers is None:
            on_gpu = GPUBlockLayers.supports(self.model)
            self.context_layers = GPUBlockLayers(self.model) if on_gpu else ContextLayers(self.model.decoder)

    def new_kv_cache(self) -> ContextKVCache:
        layers = self.context_layers
        return layers.new_kv_cache() if isinstance(layers, GPUBlockLayers) else ContextKVCache()

    @torch.inference_mode()
    def forward(self, batch: Sequence[ForwardInputs], kv_caches: Sequence[ContextKVCache]) -> list[ForwardOutputs]:
        """Logits over the drafted tokens: of the last token's row, and of each query.

        Queries beyond the window of training get no logits.
        """
        return timed_outputs(lambda: self._forward(batch, kv_caches), self.device)

    def _forward(self, batch: Sequence[ForwardInputs], kv_caches: Sequence[ContextKVCache]) -> list[ForwardOutputs]:
        pairs, layers = list(zip(batch, kv_caches, strict=True)), self.model.shape.hidden_state_layers
        states = [unread_states(inputs, kv_cache, self.target, layers) for inputs, kv_cache in pairs]
        lengths = [len(inputs.canvas.decided_prefix) - kv_cache.first_position for inputs, kv_cache in pairs]
        self._write_context(states, kv_caches, lengths)
        last_tokens = to_device(np.array([inputs.canvas.decided_prefix[-1] for inputs in batch]), self.device)
        blocks, shape = self.model.block_inputs(last_tokens), self.model.shape
        assert self.context_layers is not None
        texts = [
            ContextRows(block, kv_cache, length, len(block), shape.causal, shape.causal_windows)
            for block, kv_cache, length in zip(blocks, kv_caches, lengths, strict=True)
        ]
        num_rows, outputs = sum(map(len, states)) + blocks.shape[0] * blocks.shape[1], []
        by_text = self.context_layers.run_together(texts)
        for (inputs, kv_cache), read, (logits, hidden) in zip(pairs, states, by_text, strict=True):
            kv_cache.tokens, block_states = inputs.canvas.decided_prefix[kv_cache.first_position :].copy(), hidden
            if shape.from_anchor:  # the row of the last token is that of the first query, too
                logits, hidden = torch.cat([logits[:1], logits]), torch.cat([hidden[:1], hidden])
            rows = 1 + min(len(inputs.uniforms), shape.window)
            predictions = self.predict(logits[1:rows], hidden[1:rows])
            if self.refiner is not None:
                predictions.after_path = self.refiner(predictions.positions, block_states)
            outputs.append(
                DraftOutputs(
                    logits[:rows], hidden[:rows], 0.0, len(read), num_rows, self.model.tokens, predictions=predictions
                )
            )  # fmt: skip
        return outputs

    def _write_context(
        self, states: Sequence[Tensor], kv_caches: Sequence[ContextKVCache], lengths: Sequence[int]
    ) -> None:
        """Write the keys and values of new context positions, the last ones of each cache, for every layer."""
        if isinstance(self.context_layers, GPUBlockLayers):
            self.context_layers.write_context(states, kv_caches, lengths)
            return
        counts = [len(each) for each in states]
        positions = np.concatenate(
            [np.arange(length - count, length) for length, count in zip(lengths, counts, strict=True)]
        )
        with BatchInvariantMode() if self.device.type == "cpu" else nullcontext():
            fused = rows_linear(self.model.fc, torch.cat(list(states)).to(self.model.fc.weight.dtype))
            context = self._hidden_norm(fused)
            places = torch.from_numpy(positions).to(self.device)
            angles = self.model.decoder.model.rotary_emb(context[None], position_ids=places[None])
            cos, sin = (each[0].contiguous().to(self.device) for each in angles)
            written = [self._keys_and_values(layer, context, cos, sin) for layer in self.model.decoder.model.layers]
        start, window = 0, self.model.shape.window
        for kv_cache, count, length in zip(kv_caches, counts, lengths, strict=True):
            rows, cache = slice(start, start + count), kv_cache.kv_cache
            start += count
            cache.reserve(len(written), length + 1 + window, *(each[rows].transpose(0, 1) for each in written[0]))
            assert cache.keys is not None and cache.values is not None
            for number, (keys, values) in enumerate(written):
                cache.keys[number, :, length - count : length] = keys[rows].transpose(0, 1)
                cache.values[number, :, length - count : length] = values[rows].transpose(0, 1)

    def _hidden_norm(self, x: Tensor) -> Tensor:
        norm, kernel = self.model.hidden_norm, native.kernel("norm", x.dtype, self.device)
        if kernel is None:
            return normed(norm, x)
        out = torch.empty_like(x)
        struct = structs.Norm(x=x.data_ptr(), weight=norm.weight.data_ptr(), out=out.data_ptr())
        struct.rows, struct.size, struct.epsilon = *x.shape, norm.variance_epsilon
        kernel(ctypes.byref(struct))
        return out

    def _keys_and_values(self, layer: Any, context: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """[rows, kv_heads, head_dim] each; keys are normalised and rotated."""
        attention, size = layer.self_attn, self.model.shape.head_dim
        keys, values = (
            linear(context, [attention.k_proj.weight, attention.v_proj.weight], [None, None])
            if self.device.type == "cpu"
            else (attention.k_proj(context), attention.v_proj(context))
        )
        keys, values = keys.unflatten(-1, (-1, size)), values.unflatten(-1, (-1, size))
        norm, kernel = attention.k_norm, native.kernel("rotate", keys.dtype, self.device)
        if kernel is None:
            return rotated(normed(norm, keys), cos[:, None], sin[:, None]), values
        struct = structs.Rotary(
            x=keys.data_ptr(), cos=cos.data_ptr(), sin=sin.data_ptr(), norm=norm.weight.data_ptr(),
            rows=len(keys), heads=keys.shape[1], dim=size, epsilon=norm.variance_epsilon,
        )  # fmt: skip
        kernel(ctypes.byref(struct))
        return keys, values
