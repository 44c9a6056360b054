"""Run decoders on a GPU by our own kernels, nine a layer, whose rows round alike in calls of any size.

Layers have Llama's names, or are described (`described_layers`). These may have a mixture of experts in place of an
MLP, which takes five kernels more.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from saltus.models.common_layers import sliding_window
from saltus.models.cpu.decoder_weights import Resolver
from saltus.models.cuda.described_layers import kinds_of_angles
from saltus.models.cuda.fixed_shape_attention import StaticInputs
from saltus.models.cuda.gpu_attention import AttentionOfCall, GPUAttention, ShapesOfKeys, places_of_keys
from saltus.models.cuda.gpu_decoder_support import description_on_gpu, supports_gpu_decoder
from saltus.models.cuda.gpu_latent import GPULatentAttention
from saltus.models.cuda.gpu_layer_calls import CallOfLayers, HiddenStates, run_layer
from saltus.models.cuda.gpu_layers import GPULayer, GPUPerLayerEmbeddings
from saltus.models.cuda.gpu_recurrent import StatesOfCall
from saltus.models.cuda.gpu_streams import GPUStreams
from saltus.models.cuda.kv_pages import KVPagePool
from saltus.models.cuda.layer_weights import norm_of
from saltus.models.cuda.state_pages import StateShape
from saltus.models.decoder_description import (
    DecoderDescription,
    mixers_of,
)
from saltus.models.decoder_of import decoder_of
from saltus.models.mixer_description import Angles, Attention, LatentAttention

FIRST_ANGLES = 8192  # positions of the table of angles, at first


def gpu_decoder_of(model: Any) -> GPUDecoder | None:
    """What decodes a model on a GPU by our kernels; None where they do not know its layers."""
    if supports_gpu_decoder(model):
        return GPUDecoder(model)
    description = description_on_gpu(model)
    return None if description is None else GPUDecoder(model, (), description)


class GPUDecoder:
    """The decoder's layers as kernel calls, which CUDA graphs may hold.

    It rounds to the model's dtype where Transformers does; the order of sums inside a product differs. Without a
    description layers have Llama's names, and `windows` are their sliding windows, unless the configuration has them.
    """

    @torch.inference_mode(False)  # weights that are merged stay such that gradients pass through them
    @torch.no_grad()
    def __init__(
        self,
        model: Any,
        windows: Sequence[int | None] | None = None,
        description: DecoderDescription | None = None,
    ) -> None:
        self.model, self.description = model, description
        self.per_layer_embeddings: GPUPerLayerEmbeddings | None = None
        self.streams: GPUStreams | None = None
        self.positions: Tensor | None = None  # their embeddings [positions, hidden], if they are learned
        if description is None:
            self.base, self.kinds_of_angles = model.model, [(Angles(), False)]
            windows = windows or [sliding_window(model.config, number) for number in range(len(self.base.layers))]
            self.layers = [GPULayer.of_llama(*each) for each in zip(self.base.layers, windows, strict=True)]
            self.norm, self.input_norm = self.base.norm, None
        else:
            self.base, self.weights = decoder_of(model), Resolver(decoder_of(model))
            mixers = [mixer for each in description.layers for mixer, _ in mixers_of(each)]
            attention = [each for each in mixers if isinstance(each, Attention | LatentAttention)]
            self.kinds_of_angles = list(dict.fromkeys(kind for each in attention for kind in kinds_of_angles(each)))
            self.layers = [GPULayer.described(each, self.weights, self.kinds_of_angles) for each in description.layers]
            self.norm = norm_of(description.norm, self.weights)
            self.input_norm = norm_of(description.input_norm, self.weights)
            if (learned := description.position_embedding) is not None:
                self.positions = self.weights.module(learned.path).weight.detach()[learned.first :]
            if description.streams is not None:
                self.streams = GPUStreams.described(description.streams, self.weights)
            if description.per_layer_embeddings is not None:
                self.per_layer_embeddings = GPUPerLayerEmbeddings.described(
                    description.per_layer_embeddings, self.weights
                )
        self.angles = self._angles(FIRST_ANGLES)
        self.kind_of_texts: bool | None = None  # whose angles these are
        self.angles_of_texts: dict[bool, list[Any]] = {}
        recurrent = [number for number, layer in enumerate(self.layers) if layer.recurrence is not None]
        self.places_of_states = {number: place for place, number in enumerate(recurrent)}

    @property
    def keeps_latents(self) -> bool:
        """True if some layer has latent attention."""
        return any(isinstance(layer.attention, GPULatentAttention) for layer in self.layers)

    @property
    def state_shape(self) -> StateShape | None:
        """What each recurrent layer keeps; None if there are none."""
        shapes = {layer.recurrence.shape for layer in self.layers if layer.recurrence is not None}
        assert len(shapes) <= 1, "layers keep the same"
        return shapes.pop() if shapes else None

    def _angles(self, count: int) -> list[Any]:
        from saltus.models.cuda.row_kernels import angle_table

        like = self.norm.weight.to(self.model.dtype)
        return [angle_table(attrgetter(kind[0].path)(self.base), count, like, *kind) for kind in self.kinds_of_angles]

    def reserve_positions(self, count: int) -> bool:
        """Extend the tables of angles to so many positions; True if they moved, and graphs hold their old addresses."""
        if not self.angles or count <= len(self.angles[0][0]):
            return False
        self.angles = self._angles(2 * count)
        self.angles_of_texts = {}
        return True

    def use_angles(self, kind: bool) -> None:
        """Let the tables be those of long texts, or of short ones, as the model computes them now (`LongRope.angles`).

        Graphs read the new numbers at the same addresses.
        """
        if not self.angles or kind == self.kind_of_texts:
            return
        if kind not in self.angles_of_texts:
            self.angles_of_texts[kind] = self._angles(len(self.angles[0][0]))
        for own, given in zip(self.angles, self.angles_of_texts[kind], strict=True):
            for to, numbers in zip(own, given, strict=True):
                if isinstance(to, Tensor):
                    to.copy_(numbers)
        self.kind_of_texts = kind

    def __call__(
        self, inputs: StaticInputs, pool: KVPagePool, hidden_state_layers: Sequence[int] = (),
        recurrent: StatesOfCall | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Logits of the rows that have some, and hidden states of all rows; `recurrent`: of layers that keep a state.

        Memory is taken as it is needed, so that the graphs of all shapes share it.
        """
        rows = inputs.shape.num_rows
        hidden, parts = self._embedded(inputs), None
        if self.per_layer_embeddings is not None:
            parts = self.per_layer_embeddings.gates_and_parts(inputs.tokens, hidden, rows)
        x, collected = self.run_layers(
            hidden, inputs, pool, hidden_state_layers, per_layer_parts=parts, recurrent=recurrent
        )
        first = rows - inputs.shape.num_logits if inputs.shape.num_logits else 0
        states = torch.cat([*collected, x[:rows]], -1) if collected else x[:rows]
        return self._logits(x[first:], rows - first), states

    def _embedded(self, inputs: StaticInputs) -> Tensor:
        """What the first layer reads of tokens, [padded rows, hidden]."""
        from saltus.models.cuda import linear_kernels, row_kernels

        rows, weights, description = inputs.shape.num_rows, self._embeddings(), self.description
        hidden = weights.new_empty(linear_kernels.padded_rows(rows), weights.shape[1])
        torch.index_select(weights, 0, inputs.tokens, out=hidden[:rows])
        if description is not None:
            rounded = float(torch.tensor(description.embedding_scale, dtype=hidden.dtype))
            for scale in (rounded, description.input_scale):
                if scale != 1:
                    hidden[:rows].mul_(scale)
        if self.input_norm is not None:
            row_kernels.add_and_norm(None, hidden, self.input_norm, hidden, rows)
        if self.positions is not None:  # none of a text lies beyond the table, drafts may
            places = inputs.positions.clamp(max=len(self.positions) - 1)
            hidden[:rows] += self.positions.index_select(0, places)
        return hidden

    def _embeddings(self) -> Tensor:
        if self.description is None:
            return self.base.embed_tokens.weight
        return self.weights.module(self.description.embedding).weight

    def _logits(self, x: Tensor, rows: int) -> Tensor:
        """Of the first rows of normalised hidden states."""
        from saltus.models.cuda import linear_kernels

        head, description = self.model.lm_head, self.description
        logits = linear_kernels.product(x, head.weight, rows, head.bias)
        if description is not None and description.logit_scale != 1:
            logits = logits * description.logit_scale
        if description is not None and description.logit_softcap:
            logits = torch.tanh(logits / description.logit_softcap) * description.logit_softcap
        return logits

    def run_layers(
        self,
        hidden: Tensor,
        inputs: StaticInputs,
        pool: KVPagePool,
        hidden_state_layers: Sequence[int] = (),
        first_input: Tensor | None = None,
        last_seen: Tensor | None = None,
        per_layer_parts: Tensor | None = None,
        recurrent: StatesOfCall | None = None,
    ) -> tuple[Tensor, list[Tensor]]:
        """The normalised last hidden states of rows, and their states after some layers.

        `hidden` [padded rows, hidden size] are the inputs of the first layer, and overwritten. `first_input` [padded
        rows, inputs] is what the first layer's attention reads, if that is not their norm. Rows see positions up to
        `last_seen` [rows], without it up to their own. `per_layer_parts`: see `GPUPerLayerEmbeddings`.
        """
        self._allocate(pool, hidden)
        rows = inputs.shape.num_rows
        states = HiddenStates(hidden, rows, hidden_state_layers)
        streams = None if self.streams is None else self.streams.of_call(hidden, rows)
        attention = AttentionOfCall(inputs, pool, last_seen)
        call = CallOfLayers(
            inputs, pool.page_size, states, torch.empty_like(hidden), attention, self.angles, recurrent,
            self.places_of_states, streams, per_layer_parts,
        )  # fmt: skip
        for number, layer in enumerate(self.layers):
            run_layer(layer, number, call, None if number else first_input)
        states.layers_read = len(self.layers)
        if streams is not None:
            states.keep(streams.active)
            streams.end(hidden)
        states.normalise(self.norm, call.x)
        return call.x, list(states.collected.values())

    def write_context(self, x: Tensor, inputs: StaticInputs, pool: KVPagePool) -> None:
        """Write the keys and values that each layer's projections make of x [padded rows, hidden size]."""
        from saltus.models.cuda import linear_kernels, row_kernels

        rows = inputs.shape.num_rows
        self._allocate(pool, x)
        for number, layer in enumerate(self.layers):
            a = layer.attention
            assert isinstance(a, GPUAttention), "of a drafter"
            assert len(a.qkv) == 1, "packed projections of several formats"
            first = a.heads * a.dim
            weight, bias = a.qkv[0][first:], None if a.bias is None else a.bias[first:]
            row_kernels.rotate_and_store(
                linear_kernels.linear_parts(x, [weight], linear_kernels.blocks_of(weight), rows), bias, a.head_norms,
                [self.angles[0]] * 2, inputs.positions, inputs.slots, x.new_empty(rows, 0, a.dim),
                *pool.of_layer(number),
            )  # fmt: skip

    def _allocate(self, pool: KVPagePool, like: Tensor) -> None:
        if not pool.buffers:
            kinds, places = places_of_keys([_keys_of(layer.attention) for layer in self.layers])
            if kinds:
                buffers = [[like.new_empty(heads, 1, size) for heads, size in kind] for kind in kinds]
                pool.allocate([(keys, values) for keys, values in buffers], places)


def _keys_of(attention: GPUAttention | GPULatentAttention | None) -> ShapesOfKeys | int | None:
    """As `places_of_keys` takes it."""
    if isinstance(attention, GPUAttention) and attention.shares is not None:
        return attention.shares
    return None if attention is None else attention.shapes
