"""Draft with an assistant of Gemma 4 by our kernels for GPUs, over its target's pages; each draft is a CUDA graph."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from saltus.models.architectures import gemma4_text
from saltus.models.common_layers import llama_attention, llama_mlp
from saltus.models.cuda.fixed_shape_calls import Call, FixedShape, chains_of_texts, size_class
from saltus.models.cuda.fixed_shapes import FixedShapeRunner
from saltus.models.cuda.gpu_decoder import GPUDecoder
from saltus.models.cuda.gpu_decoder_support import fits_described, has_kernels_for
from saltus.models.cuda.graphed_passes import SETTINGS, GraphedPasses, PassInputs
from saltus.models.cuda.host_copies import to_device
from saltus.models.cuda.kv_pages import FixedShapeKVCache
from saltus.models.decoder_description import DecoderDescription, Layer
from saltus.models.mixer_description import Angles


class GPUAssistant:
    """The drafts of an assistant whose target our kernels decode."""

    def __init__(self, model: Any, runner: FixedShapeRunner) -> None:
        self.model = model
        decoder = GPUDecoder(_as_decoder(model), description=_description(model))
        self.passes = GraphedPasses(decoder, runner.use_cuda_graphs, runner.pool)
        self.settings = replace(SETTINGS, page_size=runner.settings.page_size)

    @staticmethod
    def supports(model: Any) -> bool:
        """True for an assistant whose sizes our kernels know."""
        if not has_kernels_for(model.embeddings.dtype, model.embeddings.device):
            return False
        return fits_described(_as_decoder(model), _description(model))

    def chains(
        self, tokens: Sequence[int], states: Float[Tensor, "texts hidden"], kv_caches: Sequence[FixedShapeKVCache],
        lengths: Sequence[int], counts: Sequence[int],
    ) -> list[tuple[Float[Tensor, "_drafts vocab"], Float[Tensor, "_drafts width"]]]:  # fmt: skip
        """For each text the logits and states of its drafts, token after likeliest token.

        `tokens` are the last ones, `states` those before them, `lengths` how many tokens before them the caches have.
        """
        count, shape = len(tokens), FixedShape(size_class(len(tokens)), 1, self.settings.num_pages(max(lengths)), 0)
        make = partial(_DraftInputs, shape, self.model)
        inputs, run = self.passes.prepared(("draft", shape), max(lengths) + 1, make, self._draft)
        rows = [np.zeros(1, dtype=np.int64)] * count
        seen = chains_of_texts(kv_caches, [length - 1 for length in lengths], rows, self.settings)
        inputs.static.fill(Call(shape, tuple(seen)))
        inputs.tokens.zero_()
        inputs.tokens[:count] = to_device(np.array(tokens, dtype=np.int64), inputs.tokens.device)
        inputs.states.zero_()
        inputs.states[:count] = states
        found = [[each[:count].clone() for each in run()] for _ in range(max(counts))]
        logits, outputs = (torch.stack(each, 1) for each in zip(*found, strict=True))
        return [(logits[text, :each], outputs[text, :each]) for text, each in enumerate(counts)]

    def _draft(self, inputs: _DraftInputs) -> tuple[Tensor, Tensor]:
        """The logits and states of rows; the inputs become those of the next draft."""
        from saltus.models.cuda.linear_kernels import padded_rows, product

        model, rows, static = self.model, len(inputs.tokens), copy.copy(inputs.static)
        static.positions = inputs.static.positions + 1  # rows stand after what they see
        read = torch.cat([model.embedded(inputs.tokens), inputs.states], -1)
        hidden = read.new_zeros(padded_rows(rows), model.config.hidden_size)
        hidden[:rows] = product(read, model.weights["pre_projection.weight"], rows)
        x, _ = self.passes.decoder.run_layers(hidden, static, self.passes.pool, last_seen=inputs.static.positions)
        logits = model.logits_by(lambda name, x: product(x, model.weights[f"{name}.weight"], rows), x)
        inputs.tokens.copy_(logits.float().nan_to_num().argmax(-1))
        inputs.states.copy_(product(x, model.weights["post_projection.weight"], rows))
        return logits, x[:rows]


class _DraftInputs(PassInputs):
    """The inputs of a draft of each text: its last token, and the state before it."""

    def __init__(self, shape: FixedShape, model: Any) -> None:
        device, rows = model.tokens.device, shape.num_rows
        super().__init__(shape, device)
        self.tokens = torch.zeros(rows, dtype=torch.int64, device=device)
        size = model.embeddings.shape[1]
        self.states = torch.zeros(rows, size, dtype=model.embeddings.dtype, device=device)


def _description(model: Any) -> DecoderDescription:
    """Layers of queries alone, which see one position more than their windows: they stand after what they see."""
    config = model.config

    def layer(number: int, kind: str) -> Layer:
        window = config.sliding_window + 1 if kind == "sliding_attention" else None
        attention = llama_attention(
            config.per_layer_config[number], number, key=None, value=None, scale=1.0, angles=Angles(layer_type=kind),
            query_norm=gemma4_text.norm(config, f"layers.{number}.self_attn.q_norm"), span=window,
            shares=model.layers_of_target[number],
        )  # fmt: skip
        scale = f"layers.{number}.layer_scalar"
        return gemma4_text.layer(config, number, attention, llama_mlp(config, number), output_scale=scale)

    layers = (layer(*each) for each in enumerate(config.layer_types))
    return DecoderDescription(tuple(layers), gemma4_text.norm(config, "norm"))


def _as_decoder(model: Any) -> Any:
    """The assistant's layers as modules by their published names."""
    whole = _Module()
    for name, weight in model.weights.items():
        *path, attribute = name.split(".")
        module: Any = whole
        for part in path:
            if part not in module._modules:
                module.add_module(part, _Module())
            module = module._modules[part]
        module.register_parameter(attribute, nn.Parameter(weight, requires_grad=False))
    base: Any = whole.get_submodule("model")
    base.rotary_emb = model.rotary
    dtype = model.embeddings.dtype
    return SimpleNamespace(
        get_decoder=lambda: base, dtype=dtype, named_parameters=base.named_parameters, named_modules=base.named_modules
    )


class _Module(nn.Module):
    """A linear layer without biases, a norm, or a part that has some."""

    bias = None
