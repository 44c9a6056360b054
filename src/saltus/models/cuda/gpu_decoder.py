"""Run decoders on a GPU by our own kernels, nine a layer, whose rows round alike in calls of any size.

Layers have Llama's names, or are described (`described_layers`). These may have a mixture of experts in place of an
MLP, which takes five kernels more.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from saltus.models.common_layers import sliding_window
from saltus.models.cpu.decoder_weights import Resolver
from saltus.models.cpu.native_decoder import STATIC_ROPE_TYPES, is_unmodified_decoder
from saltus.models.cuda.described_layers import described_for_gpu, kinds_of_angles
from saltus.models.cuda.fixed_shape_attention import StaticInputs
from saltus.models.cuda.gpu_attention import AttentionOfCall, GPUAttention, ShapesOfKeys, places_of_keys
from saltus.models.cuda.gpu_latent import GPULatentAttention
from saltus.models.cuda.gpu_layers import KINDS_OF_ATTENTION, GPULayer, GPUMLPAndExperts, GPUPerLayerEmbeddings
from saltus.models.cuda.gpu_recurrent import StatesOfCall
from saltus.models.cuda.gpu_streams import GPUStreams
from saltus.models.cuda.kernel_support import has_kernels
from saltus.models.cuda.kv_pages import KVPagePool
from saltus.models.cuda.layer_weights import is_transposed, norm_of
from saltus.models.cuda.state_pages import StateShape
from saltus.models.decoder_description import (
    LLAMA_DECODERS,
    DecoderDescription,
    experts_of,
    mixers_of,
    mlp_of,
    weights_perhaps_in_float32,
)
from saltus.models.decoder_of import decoder_of
from saltus.models.mixer_description import Angles, Attention, KimiDeltaNet, LatentAttention, Mamba, Mamba2
from saltus.models.packed_decoder import PackedDecoder

KERNEL_DTYPES = {torch.bfloat16, torch.float16}
DEPTH_MULTIPLE = 64  # of the sizes that products sum over
MIN_HEAD_DIM, MAX_HEAD_DIM = 32, 512
DIM_MULTIPLE = 16  # of heads' sizes
FIRST_ANGLES = 8192  # positions of the table of angles, at first


def supports_gpu_decoder(model: Any) -> bool:
    """True for a model on a GPU that our kernels decode by Llama's names."""
    return model.device.type == "cuda" and can_decode(model, model.device)


def gpu_decoder_of(model: Any) -> GPUDecoder | None:
    """What decodes a model on a GPU by our kernels; None where they do not know its layers."""
    if supports_gpu_decoder(model):
        return GPUDecoder(model)
    description = description_on_gpu(model)
    return None if description is None else GPUDecoder(model, (), description)


def description_on_gpu(model: Any) -> DecoderDescription | None:
    """What a model on a GPU computes, if our kernels decode it by its description; else None."""
    if model.device.type != "cuda" or not has_kernels_for(model.dtype, model.device):
        return None
    description = described_for_gpu(model)
    return None if description is None or not fits_described(model, description) else description


def can_decode(model: Any, device: str | torch.device) -> bool:
    """True for an unmodified decoder of a supported type whose sizes the kernels know, where they run on the device."""
    if not has_kernels_for(model.dtype, device):
        return False
    is_llama = type(model).__name__ in LLAMA_DECODERS and is_unmodified_decoder(model)
    return (isinstance(model, PackedDecoder) or is_llama) and fits_kernels(model)


def has_kernels_for(dtype: torch.dtype, device: str | torch.device) -> bool:
    """True where our kernels run on the device, for a dtype of theirs."""
    return dtype in KERNEL_DTYPES and has_kernels(device)


def fits_kernels(model: Any) -> bool:
    """True if the kernels compute what the layers of a decoder of a supported type do."""
    config, attend = model.config, model.model.layers[0].self_attn
    dim, mlp = attend.head_dim, model.model.layers[0].mlp
    unbiased = attend.o_proj, model.lm_head, mlp.gate_proj, mlp.up_proj, mlp.down_proj
    summed = config.hidden_size, config.num_attention_heads * dim, config.intermediate_size
    return (
        config.hidden_act == "silu"
        and model.model.rotary_emb.rope_type in STATIC_ROPE_TYPES
        and all(layer.bias is None for layer in unbiased)
        and len({each.bias is None for each in (attend.q_proj, attend.k_proj, attend.v_proj)}) == 1
        and _are_known_sizes([dim], summed)
        and _have_dtype(model)
    )


def fits_described(model: Any, description: DecoderDescription) -> bool:
    """The same for the sizes of layers that `described_for_gpu` knows."""
    layers: list[Any] = list(description.layers)
    base, routers = decoder_of(model), [experts.router for layer in layers if (experts := experts_of(layer))]
    mixers: list[Any] = [mixer for layer in layers for mixer, _ in mixers_of(layer)]
    matrices = [each.output for each in mixers]
    attention = [each for each in mixers if isinstance(each, Attention)]
    latent = [each for each in mixers if isinstance(each, LatentAttention)]
    matrices += [part for each in latent for part in (each.latent, each.query_latent, each.query) if part is not None]
    matrices += [part for each in mixers if isinstance(each, KimiDeltaNet) for part in (each.decay[1], each.gate[1])]
    matrices += [part for each in mixers if isinstance(each, Mamba) for part in (each.inputs, each.selection)]
    matrices += [each.inputs for each in mixers if isinstance(each, Mamba2)]
    matrices += [each for layer in layers if (mlp := mlp_of(layer)) for each in (mlp.down, mlp.up)]
    matrices += [each for layer in layers if (beside := layer.per_layer_input) for each in (beside.gate, beside.output)]
    matrices += [each for layer in layers if (beside := layer.laurel) for each in (beside.down, beside.up)]
    matrices += description.streams.projections if description.streams is not None else ()
    read = [base.get_submodule(path) for path in {*routers, *(each.path for each in matrices)}]
    summed = [layer.weight.shape[0 if is_transposed(layer) else -1] for layer in read]
    dims = {each.dim for each in attention}
    vectors = {size for each in latent for size in (each.latent_dim, each.nope_dim, each.rope_dim)}
    return (
        _are_known_sizes(dims, summed)
        and all(size % DIM_MULTIPLE == 0 for size in vectors)
        and _have_dtype(model, weights_perhaps_in_float32(description))
    )


def _are_known_sizes(dims: Iterable[int], summed: Sequence[int]) -> bool:
    """`dims`: those of heads; `summed`: the sizes that products sum over."""
    return all(size % DEPTH_MULTIPLE == 0 for size in summed) and all(
        MIN_HEAD_DIM <= dim <= MAX_HEAD_DIM and dim % DIM_MULTIPLE == 0 for dim in dims
    )


def _have_dtype(model: Any, perhaps_float32: tuple[str, ...] = ()) -> bool:
    transposed = {f"{name}.weight" for name, layer in model.named_modules() if is_transposed(layer)}
    return all(
        (weight.is_contiguous() or name in transposed)
        and (weight.dtype == model.dtype or (weight.dtype == torch.float32 and name.endswith(perhaps_float32)))
        for name, weight in model.named_parameters()
    )


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
        parts = None
        if self.per_layer_embeddings is not None:
            parts = self.per_layer_embeddings.gates_and_parts(inputs.tokens, hidden, rows)
        x, collected = self.run_layers(
            hidden, inputs, pool, hidden_state_layers, per_layer_parts=parts, recurrent=recurrent
        )
        first = rows - inputs.shape.num_logits if inputs.shape.num_logits else 0
        states = torch.cat([*collected, x[:rows]], -1) if collected else x[:rows]
        head = self.model.lm_head
        logits = linear_kernels.product(x[first:], head.weight, rows - first, head.bias)
        if description is not None and description.logit_scale != 1:
            logits = logits * description.logit_scale
        if description is not None and description.logit_softcap:
            logits = torch.tanh(logits / description.logit_softcap) * description.logit_softcap
        return logits, states

    def _embeddings(self) -> Tensor:
        if self.description is None:
            return self.base.embed_tokens.weight
        return self.weights.module(self.description.embedding).weight

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
        x, attention = torch.empty_like(hidden), AttentionOfCall(inputs, pool, last_seen)
        rows = inputs.shape.num_rows
        states = _HiddenStates(hidden, rows, hidden_state_layers)
        streams = None if self.streams is None else self.streams.of_call(hidden, rows)
        for number, layer in enumerate(self.layers):
            states.layers_read, read = number, x
            of_mlp = torch.empty_like(x) if layer.parallel and layer.post_norm is not None else x
            if streams is not None and layer.altup is not None:
                states.keep(streams.active)
                streams.predict(layer.altup, hidden)
            if number == 0 and first_input is not None:
                read = first_input
            elif layer.mixers:
                states.normalise(layer.input_norm, x, None if of_mlp is x else (layer.post_norm, of_mlp))
            beside = None if layer.laurel is None else layer.laurel(x, rows)
            for mixer, scale in layer.mixers:
                if isinstance(mixer, KINDS_OF_ATTENTION):
                    parts = mixer.parts(read, number, [self.angles[each] for each in mixer.angles], attention)
                else:
                    assert recurrent is not None
                    parts = mixer.parts(read, self.places_of_states[number], recurrent)
                states.add(parts, output_norm=layer.mixer_output_norm, scale=scale * layer.residual_scale)
            if beside is not None:
                states.add(beside, state_scale=0.5**0.5)
            if layer.mlp is not None:
                if not layer.parallel:
                    states.normalise(layer.post_norm, x)
                if isinstance(layer.mlp, GPUMLPAndExperts):
                    parts = layer.mlp.parts(of_mlp, hidden, inputs, pool.page_size)
                else:
                    parts = layer.mlp.parts(of_mlp, inputs, pool.page_size)
                scale = layer.mlp_scale * layer.residual_scale
                states.add(parts, output_norm=layer.mlp_output_norm, scale=scale)
            if streams is not None and layer.altup is not None:
                states.normalise(None, x)
                streams.correct(layer.altup, hidden, x)
            if layer.per_layer_input is not None:
                assert per_layer_parts is not None
                if streams is None:
                    states.normalise(None, x)
                parts = layer.per_layer_input.parts(x, per_layer_parts[number], rows)
                if streams is None:
                    states.add(parts, output_norm=layer.per_layer_input.norm)
                else:
                    streams.add_to_others(parts, layer.per_layer_input.norm)
            states.output["state_scale"] = layer.output_scale
        states.layers_read = len(self.layers)
        if streams is not None:
            states.keep(streams.active)
            streams.end(hidden)
        states.normalise(self.norm, x)
        return x, list(states.collected.values())

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


class _HiddenStates:
    """The hidden states of a call's rows [padded rows, hidden], and parts that the next kernel adds to them.

    Copies of the states after some layers, `wanted`, are kept.
    """

    def __init__(self, hidden: Tensor, rows: int, wanted: Sequence[int]) -> None:
        self.hidden, self.rows, self.wanted = hidden, rows, wanted
        self.layers_read = 0
        self.collected: dict[int, Tensor] = {}
        self.parts: Tensor | None = None
        self.output: dict[str, Any] = {}  # what parts go through

    def add(self, parts: Tensor, **output: Any) -> None:
        """Add parts [parts, rows, hidden]; see `add_and_norm`."""
        if self.parts is not None:
            self.normalise(None, torch.empty_like(self.hidden))
        self.parts, self.output = parts, output

    def normalise(self, norm: Any, out: Tensor, other: tuple[Any, Tensor] | None = None) -> None:
        """Let `out` [padded rows, hidden] be the norm of the states, or the states; `other`: see `add_and_norm`."""
        from saltus.models.cuda import row_kernels

        row_kernels.add_and_norm(self.parts, self.hidden, norm, out, self.rows, other=other, **self.output)
        self.parts, self.output = None, {}
        self.keep(self.hidden)

    def keep(self, hidden: Tensor) -> None:
        """Copy these states [padded rows, hidden] if those after the layers so far are wanted."""
        if self.layers_read in self.wanted and self.layers_read not in self.collected:
            self.collected[self.layers_read] = hidden[: self.rows].clone()
