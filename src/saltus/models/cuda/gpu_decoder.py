"""Run decoders on a GPU by our own kernels, nine a layer, whose rows round alike in calls of any size.

Layers have Llama's names, or are described (`described_layers`). A layer by Llama's names may have a mixture of experts
in place of its MLP, which takes five kernels more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from saltus.models.common_layers import sliding_window
from saltus.models.cpu.decoder_weights import Resolver
from saltus.models.cpu.native_decoder import STATIC_ROPE_TYPES, is_unmodified_decoder
from saltus.models.cuda.described_layers import described_for_gpu, kinds_of_angles, layers_of, norm_of, parts_of
from saltus.models.cuda.fixed_shape_attention import StaticInputs
from saltus.models.cuda.gpu_experts import Mixture
from saltus.models.cuda.kernel_support import has_kernels
from saltus.models.cuda.kv_pages import KVPagePool
from saltus.models.cuda.packed_weight import GPUPackedWeight, joined_packed
from saltus.models.decoder_description import LLAMA_DECODERS, Angles, DecoderDescription
from saltus.models.decoder_of import decoder_of
from saltus.models.packed_decoder import PackedDecoder

MIXTURES = {"MixtralForCausalLM", "Qwen3MoeForCausalLM"}  # Llama's layers with experts
KERNEL_DTYPES = {torch.bfloat16, torch.float16}
DEPTH_MULTIPLE = 64  # of the sizes that products sum over
# Query heads of one key head, and their numbers: a tile of attention has them of eight rows, and more do not fit into
# the shared memory of most GPUs.
MAX_SHARED_HEADS, MAX_SHARED_NUMBERS = 16, 2048
FIRST_ANGLES = 8192  # positions of the table of angles, at first


def supports_gpu_decoder(model: Any) -> bool:
    """True for a model on a GPU that our kernels decode by Llama's names."""
    return model.device.type == "cuda" and can_decode(model)


def gpu_decoder_of(model: Any) -> GPUDecoder | None:
    """What decodes a model on a GPU by our kernels; None where they do not know its layers."""
    if supports_gpu_decoder(model):
        return GPUDecoder(model)
    if model.device.type != "cuda" or not has_kernels_for(model.dtype):
        return None
    description = described_for_gpu(model)
    return None if description is None or not fits_described(model, description) else GPUDecoder(model, (), description)


def can_decode(model: Any) -> bool:
    """True for an unmodified decoder of a supported type whose sizes the kernels know, where there is Triton."""
    if not has_kernels_for(model.dtype):
        return False
    is_llama = type(model).__name__ in LLAMA_DECODERS | MIXTURES and is_unmodified_decoder(model)
    return (isinstance(model, PackedDecoder) or is_llama) and fits_kernels(model)


def has_kernels_for(dtype: torch.dtype) -> bool:
    """True where there is Triton, for a dtype of its kernels."""
    return dtype in KERNEL_DTYPES and has_kernels()


def fits_kernels(model: Any) -> bool:
    """True if the kernels compute what the layers of a decoder of a supported type do."""
    config, attend = model.config, model.model.layers[0].self_attn
    dim, dense = attend.head_dim, [layer.mlp for layer in model.model.layers if not Mixture.is_of(layer.mlp)][:1]
    unbiased = (
        attend.o_proj,
        model.lm_head,
        *(each for mlp in dense for each in (mlp.gate_proj, mlp.up_proj, mlp.down_proj)),
    )
    summed = config.hidden_size, config.num_attention_heads * dim, *(config.intermediate_size for _ in dense)
    return (
        config.hidden_act == "silu"
        and model.model.rotary_emb.rope_type in STATIC_ROPE_TYPES
        and all(layer.bias is None for layer in unbiased)
        and len({each.bias is None for each in (attend.q_proj, attend.k_proj, attend.v_proj)}) == 1
        and _are_known_sizes(config.num_attention_heads, config.num_key_value_heads, dim, summed)
        and _have_dtype(model)
    )


def fits_described(model: Any, description: DecoderDescription) -> bool:
    """The same for the sizes of layers that `described_for_gpu` knows, all of whose heads must be alike."""
    layers: list[Any] = list(description.layers)
    heads = {(layer.mixer.heads, layer.mixer.kv_heads, layer.mixer.dim) for layer in layers}
    if len(heads) != 1:
        return False
    base = decoder_of(model)
    paths = {each.path for layer in layers for each in (layer.mixer.output, layer.mlp.down, layer.mlp.up)}
    summed = [base.get_submodule(path).weight.shape[-1] for path in paths]
    return _are_known_sizes(*heads.pop(), summed) and _have_dtype(model)


def _are_known_sizes(heads: int, kv_heads: int, dim: int, summed: Sequence[int]) -> bool:
    """`summed`: the sizes that products sum over."""
    shared = heads // kv_heads
    return (
        all(size % DEPTH_MULTIPLE == 0 for size in summed)
        and 32 <= dim <= 256
        and dim & (dim - 1) == 0
        and shared <= MAX_SHARED_HEADS
        and shared * dim <= MAX_SHARED_NUMBERS
    )


def _have_dtype(model: Any) -> bool:
    return all(weight.is_contiguous() and weight.dtype == model.dtype for weight in model.parameters())


@dataclass(frozen=True)
class _MLP:
    gate_and_up: Sequence[Tensor]
    down: Sequence[Tensor]
    gate_blocks: Any
    down_blocks: Any
    activation: str = "silu"

    @classmethod
    def of(cls, gate_and_up: Sequence[Tensor], down: Tensor, activation: str = "silu") -> _MLP:
        """Of such weights; packed ones become views of merged ones."""
        from saltus.models.cuda.linear_kernels import blocks_of

        feeding = [each.detach() for each in joined_packed(gate_and_up)]
        down = down.detach()
        return cls(feeding, [down], blocks_of(feeding[0], parts=False), blocks_of(down), activation)

    def parts(self, x: Tensor, inputs: StaticInputs, first_slot: int) -> Tensor:
        """[parts, rows, hidden], float32, of x [padded rows, hidden]; as that of Mixture."""
        from saltus.models.cuda import linear_kernels

        rows = inputs.shape.num_rows
        active = x.new_empty(len(x), self.down[0].shape[1])
        linear_kernels.gate_and_up(x, self.gate_and_up, active, self.gate_blocks, rows, self.activation)
        return linear_kernels.linear_parts(active, self.down, self.down_blocks, rows)


@dataclass(frozen=True)
class _Layer:
    """The weights of a layer; those of queries, keys and values lie beside each other."""

    input_norm: Any
    qkv: Sequence[Tensor]  # one, or several where packed ones have several formats
    qkv_blocks: Any
    bias: Tensor | None
    head_norms: tuple[Any, Any] | None
    o: Sequence[Tensor]
    post_norm: Any
    mlp: _MLP | Mixture
    scale: float
    window: int | None
    angles: tuple[int, ...] = (0, 0)  # which tables, of queries and keys; without them no rotation
    mixer_output_norm: Any = None
    mlp_output_norm: Any = None
    residual_scale: float = 1.0  # of what mixer and MLP give


class GPUDecoder:
    """The decoder's layers as kernel calls, which CUDA graphs may hold.

    It rounds to the model's dtype where Transformers does; the order of sums inside a product differs. Without a
    description layers have Llama's names, and `windows` are their sliding windows, unless the configuration has them.
    """

    def __init__(
        self,
        model: Any,
        windows: Sequence[int | None] | None = None,
        description: DecoderDescription | None = None,
    ) -> None:
        from saltus.models.cuda.linear_kernels import blocks_of

        self.model, self.description = model, description
        if description is None:
            self.base, config = model.model, model.config
            self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
            self.dim, self.kinds_of_angles = self.base.layers[0].self_attn.head_dim, [(Angles(), False)]
            windows = windows or [sliding_window(config, number) for number in range(len(self.base.layers))]
            self.layers = [self._llama_layer(*each) for each in zip(self.base.layers, windows, strict=True)]
            self.norm = self.base.norm
        else:
            self.base, self.weights = decoder_of(model), Resolver(decoder_of(model))
            mixers: list[Any] = [layer.mixer for layer in description.layers]
            self.heads, self.kv_heads, self.dim = mixers[0].heads, mixers[0].kv_heads, mixers[0].dim
            kinds = (kind for each in mixers for kind in kinds_of_angles(each))
            self.kinds_of_angles = list(dict.fromkeys(kinds))
            self.layers = [self._described_layer(layer) for layer in description.layers]
            self.norm = norm_of(description.norm, self.weights)
        self.o_blocks = blocks_of(*self.layers[0].o)
        self.angles = self._angles(FIRST_ANGLES)

    def _llama_layer(self, layer: Any, window: int | None) -> _Layer:
        a, mlp = layer.self_attn, layer.mlp
        norms = (a.q_norm, a.k_norm) if getattr(a, "q_norm", None) is not None else None
        of_mlp = (
            None if Mixture.is_of(mlp) else _MLP.of([mlp.gate_proj.weight, mlp.up_proj.weight], mlp.down_proj.weight)
        )
        return _Layer(
            layer.input_layernorm, *self._merged([a.q_proj, a.k_proj, a.v_proj]), norms, [a.o_proj.weight.detach()],
            layer.post_attention_layernorm, of_mlp or Mixture.of(mlp), a.scaling, window,
        )  # fmt: skip

    def _described_layer(self, layer: Any) -> _Layer:
        a, mlp, weights, base = layer.mixer, layer.mlp, self.weights, self.base
        norms, all_heads = None, not a.norm_per_head
        if a.query_norm is not None:
            norms = norm_of(a.query_norm, weights, all_heads), norm_of(a.key_norm, weights, all_heads)
        feeding = parts_of(layers_of([mlp.gate, mlp.up], base), 2)
        return _Layer(
            norm_of(layer.mixer_norm, weights), *self._merged(layers_of([a.query, a.key, a.value], base)), norms,
            [weights.module(a.output.path).weight.detach()], norm_of(layer.mlp_norm, weights),
            _MLP.of(feeding, weights.module(mlp.down.path).weight, mlp.activation), a.scale, a.span,
            tuple(map(self.kinds_of_angles.index, kinds_of_angles(a))),
            norm_of(layer.mixer_output_norm, weights), norm_of(layer.mlp_output_norm, weights), layer.residual_scale,
        )  # fmt: skip

    @staticmethod
    def _merged(projections: Sequence[Any]) -> tuple[Sequence[Tensor], Any, Tensor | None]:
        """The weights of linear layers beside each other, how to cut their product, and the bias.

        The model's own that are merged become views of the merged ones.
        """
        from saltus.models.cuda.linear_kernels import blocks_of

        merged = joined_packed([each.weight for each in projections])
        if len(projections) > 1 and not any(isinstance(weight, GPUPackedWeight) for weight in merged):
            merged = [torch.cat([each.weight.detach() for each in projections])]
            for each, part in zip(
                projections, merged[0].split([len(each.weight) for each in projections]), strict=True
            ):
                each.weight.data = part
        merged = [weight.detach() for weight in merged]
        bias = None if projections[0].bias is None else torch.cat([each.bias.detach() for each in projections])
        return merged, blocks_of(*merged), bias

    def _angles(self, count: int) -> list[Any]:
        from saltus.models.cuda.row_kernels import angle_table

        like = self.norm.weight.to(self.model.dtype)
        return [angle_table(getattr(self.base, kind[0].path), count, like, *kind) for kind in self.kinds_of_angles]

    def reserve_positions(self, count: int) -> bool:
        """Extend the tables of angles to so many positions; True if they moved, and graphs hold their old addresses."""
        if not self.angles or count <= len(self.angles[0][0]):
            return False
        self.angles = self._angles(2 * count)
        return True

    def __call__(
        self, inputs: StaticInputs, pool: KVPagePool, hidden_state_layers: Sequence[int] = ()
    ) -> tuple[Tensor, Tensor]:
        """Logits of the rows that have some, and hidden states of all rows.

        Memory is taken as it is needed, so that the graphs of all shapes share it.
        """
        from saltus.models.cuda import linear_kernels

        rows, weights, description = inputs.shape.num_rows, self._embeddings(), self.description
        hidden = weights.new_empty(linear_kernels.padded_rows(rows), weights.shape[1])
        torch.index_select(weights, 0, inputs.tokens, out=hidden[:rows])
        if description is not None:
            rounded = float(torch.tensor(description.embedding_scale, dtype=hidden.dtype))
            for scale in (rounded, description.input_scale):
                if scale != 1:
                    hidden[:rows].mul_(scale)
        x, collected = self.run_layers(hidden, inputs, pool, hidden_state_layers)
        first = rows - inputs.shape.num_logits if inputs.shape.num_logits else 0
        states = torch.cat([*collected, x[:rows]], -1) if collected else x[:rows]
        logits = linear_kernels.product(x[first:], self.model.lm_head.weight, rows - first)
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
    ) -> tuple[Tensor, list[Tensor]]:
        """The normalised last hidden states of rows, and their states after some layers.

        `hidden` [padded rows, hidden size] are the inputs of the first layer, and overwritten. `first_input` [padded
        rows, inputs] is what the first layer's attention reads, if that is not their norm. Rows see positions up to
        `last_seen` [rows], without it up to their own.
        """
        from saltus.models.cuda import attention_kernels, linear_kernels, row_kernels

        shape = inputs.shape
        rows, wide = shape.num_rows, len(hidden)
        key = hidden.new_empty(self.kv_heads, 1, self.dim)
        pool.allocate(key, key)
        assert pool.keys is not None and pool.values is not None
        x, queries = torch.empty_like(hidden), hidden.new_empty(wide, self.heads, self.dim)
        attended = torch.empty_like(queries)
        sums = attention_kernels.SplitSums.empty(
            queries,
            self.kv_heads,
            shape.num_groups,
            shape.num_pages * pool.page_size,
        )
        recent, collected, parts = inputs.recent_slots.view(rows, -1), [], None
        seen, output = inputs.positions if last_seen is None else last_seen, {}  # what parts go through
        for number, layer in enumerate(self.layers):
            read = x
            if number == 0 and first_input is not None:
                read = first_input
            else:
                row_kernels.add_and_norm(parts, hidden, layer.input_norm, x, rows, **output)
            if number in hidden_state_layers:
                collected.append(hidden[:rows].clone())
            keys, values = pool.keys[number], pool.values[number]
            angles = [self.angles[each] for each in layer.angles]
            row_kernels.rotate_and_store(
                linear_kernels.linear_parts(read, layer.qkv, layer.qkv_blocks, rows), layer.bias, layer.head_norms,
                angles, inputs.positions, inputs.slots, queries, keys, values,
            )  # fmt: skip
            attention_kernels.attend(
                queries[:rows], keys, values, inputs.block_tables, recent, seen, sums, attended,
                rows_per_group=shape.rows_per_group, page=pool.page_size, scale=layer.scale, window=layer.window,
            )  # fmt: skip
            parts = linear_kernels.linear_parts(attended.flatten(1), layer.o, self.o_blocks, rows)
            output = {"output_norm": layer.mixer_output_norm, "scale": layer.residual_scale}
            row_kernels.add_and_norm(parts, hidden, layer.post_norm, x, rows, **output)
            parts = layer.mlp.parts(x, inputs, pool.page_size)
            output = {"output_norm": layer.mlp_output_norm, "scale": layer.residual_scale}
        row_kernels.add_and_norm(parts, hidden, self.norm, x, rows, **output)
        if len(self.layers) in hidden_state_layers:
            collected.append(hidden[:rows].clone())
        return x, collected

    def write_context(self, x: Tensor, inputs: StaticInputs, pool: KVPagePool) -> None:
        """Write the keys and values that each layer's projections make of x [padded rows, hidden size]."""
        from saltus.models.cuda import linear_kernels, row_kernels

        rows, first = inputs.shape.num_rows, self.heads * self.dim
        key = x.new_empty(self.kv_heads, 1, self.dim)
        pool.allocate(key, key)
        assert pool.keys is not None and pool.values is not None
        no_queries = x.new_empty(rows, 0, self.dim)
        for number, layer in enumerate(self.layers):
            assert len(layer.qkv) == 1, "packed projections of several formats"
            weight = layer.qkv[0][first:]
            bias = None if layer.bias is None else layer.bias[first:]
            row_kernels.rotate_and_store(
                linear_kernels.linear_parts(x, [weight], linear_kernels.blocks_of(weight), rows), bias,
                layer.head_norms, [self.angles[0]] * 2, inputs.positions, inputs.slots, no_queries, pool.keys[number],
                pool.values[number],
            )  # fmt: skip
