"""Run the layers of an EAGLE head on a GPU by our kernels: a CUDA graph that reads the text, and one for each draft."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from saltus.methods.published.eagle_model import EagleModel
from saltus.methods.shared.context_rows import ContextKVCache
from saltus.models.cpu.torch_decoder import normed
from saltus.models.cuda.fixed_shape_attention import StaticInputs
from saltus.models.cuda.fixed_shape_calls import Call, FixedShape, chains_of_texts, size_class, split_into_calls
from saltus.models.cuda.gpu_decoder import GPUDecoder
from saltus.models.cuda.gpu_decoder_support import fits_kernels, has_kernels_for
from saltus.models.cuda.graphed_passes import READING, SETTINGS, GraphedPasses, PassInputs, write_rows


class GPUEagleLayers:
    """The layers of a head whose weights are not changed any more; see `TorchEagleLayers`."""

    def __init__(self, model: EagleModel, use_cuda_graphs: bool = True) -> None:
        self.model, self.device = model, model.tokens.device
        self.decoder = GPUDecoder(_as_decoder(model), model.shape.spans)
        self.passes = GraphedPasses(self.decoder, use_cuda_graphs)

    @staticmethod
    def supports(model: EagleModel) -> bool:
        """True on a GPU whose kernels know the layers, if all weights have one dtype."""
        embeddings, device = model.embeddings[0], model.tokens.device
        return (
            device.type == "cuda"
            and has_kernels_for(model.dtype, device)
            and embeddings.is_contiguous()
            and embeddings.dtype == model.dtype
            and fits_kernels(_as_decoder(model))
        )

    def new_kv_cache(self) -> ContextKVCache:
        return ContextKVCache(self.passes.new_kv_cache)

    def read(
        self, tokens: Sequence[np.ndarray], states: Sequence[Tensor], kv_caches: Sequence[ContextKVCache],
        starts: Sequence[int],
    ) -> list[Float[Tensor, "_rows hidden"]]:  # fmt: skip
        texts = chains_of_texts([cache.kv_cache for cache in kv_caches], starts, tokens, SETTINGS)
        positions, pieces = 1 + max(int(text.positions[-1]) for text in texts), list[list[Tensor]]([] for _ in texts)
        for call in split_into_calls(texts, READING):
            make = partial(_ReadingInputs, call.shape, self.model)
            inputs, run = self.passes.prepared(("read", call.shape), positions, make, self._read)
            write_rows(call, states, starts, inputs.states)
            inputs.static.fill(call)
            hidden = run()
            for start, part in call.placed():
                pieces[part.text].append(hidden[start : start + part.num_rows].clone())
        return [torch.cat(rows) for rows in pieces]

    def chains(
        self, last: Float[Tensor, "texts hidden"], queries: Sequence[int], kv_caches: Sequence[ContextKVCache],
        ends: Sequence[int],
    ) -> list[tuple[Float[Tensor, "_queries draft"], Float[Tensor, "_queries hidden"]]]:  # fmt: skip
        """As many rows are drafted for every text as for the one with most queries."""
        count, steps = len(queries), max(1, *queries)
        for cache, end in zip(kv_caches, ends, strict=True):
            cache.kv_cache.reserve(end + steps)
        shape = FixedShape(size_class(count), 1, SETTINGS.num_pages(max(ends) + steps), 0)
        make = partial(_DraftInputs, shape, self.model)
        inputs, run = self.passes.prepared(("draft", shape), max(ends) + steps, make, self._draft)
        for rows, given in ((inputs.hidden, last), (inputs.normalised, normed(self.model.norm, last))):
            rows.zero_()  # padding rows, which would grow from draft to draft
            rows[:count] = given
        found = []
        for step in range(steps):
            inputs.fill(step, kv_caches, ends)
            found.append([each[:count].clone() for each in run()])
        logits, states = (torch.stack(each, 1) for each in zip(*found, strict=True))
        return [(logits[text, : max(1, each)], states[text, : max(1, each)]) for text, each in enumerate(queries)]

    def _read(self, inputs: _ReadingInputs) -> Tensor:
        """The outputs of rows that read the target's states."""
        from saltus.models.cuda import linear_kernels

        fused, rows = self.model.fused(inputs.states), inputs.static.shape.num_rows
        hidden = fused.new_empty(linear_kernels.padded_rows(rows), fused.shape[1])
        hidden[:rows] = fused
        return self._layers(hidden, inputs.static.tokens, inputs.static)[0]

    def _draft(self, inputs: _DraftInputs) -> tuple[Tensor, Tensor]:
        """The logits and normalised states of rows; the inputs become those of the next draft."""
        from saltus.models.cuda import linear_kernels

        rows, model = inputs.static.shape.num_rows, self.model
        states = inputs.normalised[:rows].clone()
        logits = linear_kernels.product(inputs.normalised, model.lm_head.weight, rows)
        before = inputs.normalised if model.shape.norm_output else inputs.hidden
        hidden, normalised = self._layers(before.clone(), model.likeliest(logits), inputs.static)
        inputs.hidden[:rows] = hidden
        inputs.normalised[:rows] = normalised
        return logits, states

    def _layers(
        self, hidden: Float[Tensor, "padded hidden"], tokens: Int[Tensor, "rows"], static: StaticInputs
    ) -> tuple[Float[Tensor, "rows hidden"], Float[Tensor, "rows hidden"]]:
        """The layers' outputs, and these normalised."""
        from saltus.models.cuda import row_kernels

        model, rows = self.model, static.shape.num_rows
        first: Any = model.layers[0]
        state, embedded = torch.empty_like(hidden), torch.empty_like(hidden)
        row_kernels.add_and_norm(None, hidden, first.hidden_norm, state, rows)
        own = model.embeddings[0].index_select(0, tokens)
        row_kernels.add_and_norm(None, own, first.input_layernorm, embedded, rows)
        read, layers = torch.cat([embedded, state], -1), model.shape.layers
        residual = state if model.shape.norm_before_residual else hidden
        normalised, (outputs,) = self.decoder.run_layers(residual, static, self.passes.pool, (layers,), read)
        return outputs, normalised[:rows]


class _ReadingInputs(PassInputs):
    """The inputs of rows that read the target's states."""

    def __init__(self, shape: FixedShape, model: EagleModel) -> None:
        super().__init__(shape, model.tokens.device)
        self.states = torch.zeros(
            shape.num_rows, model.fc.weight.shape[1], dtype=model.dtype, device=model.tokens.device
        )


class _DraftInputs(PassInputs):
    """The inputs of a draft of each text."""

    def __init__(self, shape: FixedShape, model: EagleModel) -> None:
        from saltus.models.cuda import linear_kernels

        super().__init__(shape, model.tokens.device)
        wide = linear_kernels.padded_rows(shape.num_rows)
        self.hidden, self.normalised = torch.zeros(
            2, wide, model.shape.hidden, dtype=model.dtype, device=model.tokens.device
        )

    def fill(self, step: int, kv_caches: Sequence[ContextKVCache], ends: Sequence[int]) -> None:
        """Let the rows stand `step` positions after the ends of the texts."""
        token = np.zeros(1, dtype=np.int64)  # the graph itself picks it
        caches = [cache.kv_cache for cache in kv_caches]
        parts = chains_of_texts(caches, [end + step for end in ends], [token] * len(ends), SETTINGS)
        self.static.fill(Call(self.static.shape, tuple(parts)))


def _as_decoder(model: EagleModel) -> Any:
    """The head by the names of a decoder."""
    rotary: Any = copy.deepcopy(model.rotary).to(model.tokens.device)
    layers = SimpleNamespace(layers=model.layers, norm=model.norm, rotary_emb=rotary)
    return SimpleNamespace(
        model=layers, config=model.config, lm_head=model.lm_head, dtype=model.dtype,
        named_parameters=model.named_parameters, named_modules=model.named_modules,
    )  # fmt: skip
