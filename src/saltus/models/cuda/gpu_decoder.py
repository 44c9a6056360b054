"""Run Llama-type decoders on a GPU by our own kernels, nine a layer, whose rows round alike in calls of any size.

A layer may have a mixture of experts in place of its MLP, which takes five kernels more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from saltus.models.common_layers import sliding_window
from saltus.models.cpu.native_decoder import STATIC_ROPE_TYPES, is_unmodified_decoder
from saltus.models.cuda.fixed_shape_attention import StaticInputs
from saltus.models.cuda.fixed_shape_calls import KVPagePool
from saltus.models.cuda.gpu_experts import Mixture
from saltus.models.cuda.kernel_support import has_kernels
from saltus.models.cuda.packed_weight import GPUPackedWeight, joined_packed
from saltus.models.decoder_description import LLAMA_DECODERS
from saltus.models.packed_decoder import PackedDecoder

MIXTURES = {"MixtralForCausalLM", "Qwen3MoeForCausalLM"}  # Llama's layers with experts
KERNEL_DTYPES = {torch.bfloat16, torch.float16}
DEPTH_MULTIPLE = 64  # of the sizes that products sum over
# Query heads of one key head, and their numbers: a tile of attention has them of eight rows, and more do not fit into
# the shared memory of most GPUs.
MAX_SHARED_HEADS, MAX_SHARED_NUMBERS = 16, 2048
FIRST_ANGLES = 8192  # positions of the table of angles, at first


def supports_gpu_decoder(model: Any) -> bool:
    """True for a model on a GPU that our kernels decode."""
    return model.device.type == "cuda" and can_decode(model)


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
    shared = config.num_attention_heads // config.num_key_value_heads
    return (
        config.hidden_act == "silu"
        and model.model.rotary_emb.rope_type in STATIC_ROPE_TYPES
        and all(layer.bias is None for layer in unbiased)
        and len({each.bias is None for each in (attend.q_proj, attend.k_proj, attend.v_proj)}) == 1
        and all(size % DEPTH_MULTIPLE == 0 for size in summed)
        and 32 <= dim <= 256
        and dim & (dim - 1) == 0
        and shared <= MAX_SHARED_HEADS
        and shared * dim <= MAX_SHARED_NUMBERS
        and all(weight.is_contiguous() and weight.dtype == model.dtype for weight in model.parameters())
    )


@dataclass(frozen=True)
class _MLP:
    gate_and_up: Sequence[Tensor]
    down: Sequence[Tensor]
    gate_blocks: Any
    down_blocks: Any

    @classmethod
    def of(cls, mlp: Any) -> _MLP:
        """The weights of Llama's MLP; packed ones become views of merged ones."""
        from saltus.models.cuda.linear_kernels import blocks_of

        feeding = [each.detach() for each in joined_packed([mlp.gate_proj.weight, mlp.up_proj.weight])]
        down = mlp.down_proj.weight.detach()
        return cls(feeding, [down], blocks_of(feeding[0], parts=False), blocks_of(down))

    def parts(self, x: Tensor, inputs: StaticInputs, first_slot: int) -> Tensor:
        """[parts, rows, hidden], float32, of x [padded rows, hidden]; as that of Mixture."""
        from saltus.models.cuda import linear_kernels

        rows = inputs.shape.num_rows
        active = x.new_empty(len(x), self.down[0].shape[1])
        linear_kernels.gate_and_up(x, self.gate_and_up, active, self.gate_blocks, rows)
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


class GPUDecoder:
    """The decoder's layers as kernel calls, which CUDA graphs may hold.

    It rounds to the model's dtype where Transformers does; the order of sums inside a product differs. `windows` are
    the sliding windows of the layers, unless the configuration has them.
    """

    def __init__(self, model: Any, windows: Sequence[int | None] | None = None) -> None:
        from saltus.models.cuda.linear_kernels import blocks_of

        self.model, self.base = model, model.model
        self.dim = self.base.layers[0].self_attn.head_dim
        windows = windows or [sliding_window(model.config, number) for number in range(len(self.base.layers))]
        self.layers = [self._merged(*each) for each in zip(self.base.layers, windows, strict=True)]
        self.o_blocks = blocks_of(*self.layers[0].o)
        self.angles = self._angles(FIRST_ANGLES)

    def _merged(self, layer: Any, window: int | None) -> _Layer:
        """The layer's weights; the model's own that are merged become views of the merged ones."""
        from saltus.models.cuda.linear_kernels import blocks_of

        a = layer.self_attn
        projections = a.q_proj, a.k_proj, a.v_proj
        merged = joined_packed([each.weight for each in projections])
        if not any(isinstance(weight, GPUPackedWeight) for weight in merged):
            merged = [torch.cat([each.weight.detach() for each in projections])]
            for each, part in zip(
                projections, merged[0].split([len(each.weight) for each in projections]), strict=True
            ):
                each.weight.data = part
        norms = (a.q_norm, a.k_norm) if getattr(a, "q_norm", None) is not None else None
        bias = None if a.q_proj.bias is None else torch.cat([each.bias.detach() for each in projections])
        return _Layer(
            layer.input_layernorm, merged, blocks_of(*merged), bias, norms, [a.o_proj.weight.detach()],
            layer.post_attention_layernorm, Mixture.of(layer.mlp) if Mixture.is_of(layer.mlp) else _MLP.of(layer.mlp),
            a.scaling, window,
        )  # fmt: skip

    def _angles(self, count: int) -> tuple[Tensor, Tensor]:
        from saltus.models.cuda.row_kernels import angle_tables

        return angle_tables(self.base.rotary_emb, count, self.base.norm.weight)

    def reserve_positions(self, count: int) -> bool:
        """Extend the table of angles to so many positions; True if it moved, and graphs hold its old address."""
        if count <= len(self.angles[0]):
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

        rows, weights = inputs.shape.num_rows, self.base.embed_tokens.weight
        hidden = weights.new_empty(linear_kernels.padded_rows(rows), self.model.config.hidden_size)
        torch.index_select(weights, 0, inputs.tokens, out=hidden[:rows])
        x, collected = self.run_layers(hidden, inputs, pool, hidden_state_layers)
        first = rows - inputs.shape.num_logits if inputs.shape.num_logits else 0
        states = torch.cat([*collected, x[:rows]], -1)
        return linear_kernels.product(x[first:], self.model.lm_head.weight, rows - first), states

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

        shape, config = inputs.shape, self.model.config
        rows, wide = shape.num_rows, len(hidden)
        key = hidden.new_empty(config.num_key_value_heads, 1, self.dim)
        pool.allocate(key, key)
        assert pool.keys is not None and pool.values is not None
        x, queries = torch.empty_like(hidden), hidden.new_empty(wide, config.num_attention_heads, self.dim)
        attended = torch.empty_like(queries)
        sums = attention_kernels.SplitSums.empty(
            queries,
            config.num_key_value_heads,
            shape.num_groups,
            shape.num_pages * pool.page_size,
        )
        recent, collected, parts = inputs.recent_slots.view(rows, -1), [], None
        seen = inputs.positions if last_seen is None else last_seen
        for number, layer in enumerate(self.layers):
            read = x
            if number == 0 and first_input is not None:
                read = first_input
            else:
                row_kernels.add_and_norm(parts, hidden, layer.input_norm, x, rows)
            if number in hidden_state_layers:
                collected.append(hidden[:rows].clone())
            keys, values = pool.keys[number], pool.values[number]
            row_kernels.rotate_and_store(
                linear_kernels.linear_parts(read, layer.qkv, layer.qkv_blocks, rows), layer.bias, layer.head_norms,
                self.angles, inputs.positions, inputs.slots, queries, keys, values,
            )  # fmt: skip
            attention_kernels.attend(
                queries[:rows], keys, values, inputs.block_tables, recent, seen, sums, attended,
                rows_per_group=shape.rows_per_group, page=pool.page_size, scale=layer.scale, window=layer.window,
            )  # fmt: skip
            parts = linear_kernels.linear_parts(attended.flatten(1), layer.o, self.o_blocks, rows)
            row_kernels.add_and_norm(parts, hidden, layer.post_norm, x, rows)
            parts = layer.mlp.parts(x, inputs, pool.page_size)
        row_kernels.add_and_norm(parts, hidden, self.base.norm, x, rows)
        if len(self.layers) in hidden_state_layers:
            collected.append(hidden[:rows].clone())
        return x, collected

    def write_context(self, x: Tensor, inputs: StaticInputs, pool: KVPagePool) -> None:
        """Write the keys and values that each layer's projections make of x [padded rows, hidden size]."""
        from saltus.models.cuda import linear_kernels, row_kernels

        rows, config = inputs.shape.num_rows, self.model.config
        key = x.new_empty(config.num_key_value_heads, 1, self.dim)
        pool.allocate(key, key)
        assert pool.keys is not None and pool.values is not None
        no_queries = x.new_empty(rows, 0, self.dim)
        for number, layer in enumerate(self.layers):
            assert len(layer.qkv) == 1, "packed projections of several formats"
            weight = layer.qkv[0][config.num_attention_heads * self.dim :]
            bias = None if layer.bias is None else layer.bias[config.num_attention_heads * self.dim :]
            row_kernels.rotate_and_store(
                linear_kernels.linear_parts(x, [weight], linear_kernels.blocks_of(weight), rows), bias,
                layer.head_norms, self.angles, inputs.positions, inputs.slots, no_queries, pool.keys[number],
                pool.values[number],
            )  # fmt: skip
