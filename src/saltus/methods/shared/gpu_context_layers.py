"""Run the rows of a drafter's decoder on a GPU by our kernels, one CUDA graph for each size of calls."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from saltus.methods.shared.context_rows import ContextRows
from saltus.models.cuda.fixed_shape_calls import Call, FixedShape, chains_of_texts
from saltus.models.cuda.gpu_decoder import GPUDecoder, gpu_decoder_of
from saltus.models.cuda.graphed_passes import SETTINGS, GraphedPasses, PassInputs, whole_call
from saltus.models.cuda.kv_pages import FixedShapeKVCache
from saltus.models.long_rope import find_long_rope


class GPUContextLayers:
    """The layers of a decoder over given embeddings; its weights are not changed any more.

    Rows that see later rows of their text must have no sliding windows, and layers keep no states.
    """

    def __init__(self, decoder: GPUDecoder, use_cuda_graphs: bool = True) -> None:
        self.model, self.decoder = decoder.model, decoder
        self.passes = GraphedPasses(self.decoder, use_cuda_graphs)

    @classmethod
    def of(cls, model: Any) -> GPUContextLayers | None:
        """Those of a model on a GPU; None where our kernels do not know its layers, or not what follows them."""
        decoder = gpu_decoder_of(model)
        if decoder is None or decoder.state_shape is not None or decoder.per_layer_embeddings is not None:
            return None
        if decoder.input_norm is not None or find_long_rope(model) is not None:
            return None
        description = decoder.description
        unscaled = description is None or (description.logit_scale == 1 and not description.logit_softcap)
        return cls(decoder) if unscaled else None

    def new_kv_cache(self) -> FixedShapeKVCache:
        return self.passes.new_kv_cache()

    @torch.inference_mode()
    def __call__(self, texts: Sequence[ContextRows], output_logits: bool = True) -> list[tuple[Tensor, Tensor]]:
        """Logits and last hidden states of the last rows of each text, in one pass."""
        parts = chains_of_texts(
            [text.kv_cache.kv_cache for text in texts],
            [text.past_length for text in texts],
            [np.zeros(text.num_rows, dtype=np.int64) for text in texts],
            SETTINGS,
            [0 if text.causal else text.num_rows for text in texts],
        )
        call, end = whole_call(parts)
        evaluate = partial(self._evaluate, output_logits=output_logits)
        inputs, run = self.passes.prepared(
            ("rows", call.shape, output_logits), end, partial(_RowInputs, call.shape, self.model), evaluate
        )
        inputs.fill(call, texts)
        logits, states = run()
        rows = [
            slice(start + part.num_rows - text.num_outputs, start + part.num_rows)
            for (start, part), text in zip(call.placed(), texts, strict=True)
        ]
        return [(logits[part].clone() if output_logits else logits, states[part].clone()) for part in rows]

    def _evaluate(self, inputs: _RowInputs, output_logits: bool) -> tuple[Tensor, Tensor]:
        """Logits, if they are needed, and last hidden states of all rows."""
        from saltus.models.cuda import linear_kernels

        rows = inputs.static.shape.num_rows
        states, _ = self.decoder.run_layers(
            inputs.hidden.clone(), inputs.static, self.passes.pool, last_seen=inputs.last_seen
        )
        if not output_logits:
            return states.new_empty(0), states[:rows]
        return linear_kernels.product(states, self.model.lm_head.weight, rows), states[:rows]


class _RowInputs(PassInputs):
    """The inputs of rows, and the last position that each of them sees."""

    def __init__(self, shape: FixedShape, model: Any) -> None:
        from saltus.models.cuda import linear_kernels

        super().__init__(shape, model.device)
        rows, size = linear_kernels.padded_rows(shape.num_rows), model.config.hidden_size
        self.hidden = torch.zeros(rows, size, dtype=model.dtype, device=model.device)
        self.last_seen = torch.zeros(shape.num_rows, dtype=torch.long, device=model.device)

    def clear(self) -> None:
        super().clear()
        self.last_seen.zero_()

    def fill(self, call: Call, texts: Sequence[ContextRows]) -> None:
        """Write the rows of a call."""
        seen = torch.zeros(call.shape.num_rows, dtype=torch.long, pin_memory=self.last_seen.device.type == "cuda")
        for (start, part), text in zip(call.placed(), texts, strict=True):
            rows = slice(start, start + part.num_rows)
            self.hidden[rows] = text.inputs
            seen[rows] = torch.from_numpy(part.positions if text.causal else part.positions[-1:])
        self.last_seen.copy_(seen, non_blocking=True)
        self.static.fill(call)
