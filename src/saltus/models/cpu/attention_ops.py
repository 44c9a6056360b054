"""Add attention to a decoder's operations: products, norms and angles of queries and keys, and the call itself."""

from __future__ import annotations

from dataclasses import replace

import torch
from gguf import GGML_QUANT_SIZES
from torch import Tensor

from saltus.kernels.native import structs
from saltus.kernels.packed_blocks import GROUP_OUTPUTS, Q, quantized_blocks
from saltus.kernels.packed_weight import PackedWeight, select_outputs
from saltus.models.cpu.attention_kinds import AttentionKinds
from saltus.models.cpu.mixer_ops import MixerOps
from saltus.models.cpu.operations import Operations
from saltus.models.mixer_description import (
    Angles,
    Attention,
    Indexer,
    KeyPools,
    LatentAttention,
    Norm,
    PositionLogarithms,
)
from saltus.models.packed_decoder import check_heads, check_sizes


class AttentionOps:
    """The operations of layers of attention."""

    def __init__(self, ops: Operations, kinds: AttentionKinds) -> None:
        self.ops, self.kinds = ops, kinds

    def add(self, number: int, layer: Attention, norm: Norm | None) -> Tensor:
        """The outputs of attention [rows, heads · size]."""
        ops = self.ops
        check_heads(layer.heads, layer.kv_heads, layer.dim)
        assert not (layer.grouped and (layer.fused or layer.gated))
        parts = 3 if layer.fused else 1 + layer.gated  # a head's query, perhaps with its gate, or its key and value
        dim, width, value_dim = layer.dim, layer.dim * parts, layer.size_of_values
        assert value_dim == dim or not (layer.fused or layer.value is None)
        check_sizes(value_length=value_dim)
        q, out = ops.buffer("q", layer.heads * width), ops.buffer("out", layer.heads * value_dim)
        wide = q.view(len(q), -1, width)
        given = [(layer.query, q)]
        if layer.fused:
            k, v = q[:, dim:], q[:, 2 * dim :]
            keys, values = wide[..., dim : 2 * dim], wide[..., 2 * dim :]
        else:
            k, v = ops.buffer("k", layer.kv_heads * dim), ops.buffer("v", layer.kv_heads * value_dim)
            keys, values = k.view(len(k), -1, dim), v.view(len(v), -1, value_dim)
            given += [(weight, x) for weight, x in ((layer.key, k), (layer.value, v)) if weight is not None]
        grouped = None
        if layer.grouped:
            grouped = ops.buffer("queries, keys and values", (layer.heads + 2 * layer.kv_heads) * dim)
            given = [(layer.query, grouped)]
        if layer.head_gate is not None:
            given.append((layer.head_gate, ops.buffer("head gate", layer.heads)))
        if layer.gate is not None:
            given.append((layer.gate, ops.buffer("gate of heads", layer.heads * value_dim)))
        ops.product(ops.hidden, given, norm)
        if grouped is not None:
            parts_of_group = layer.heads // layer.kv_heads * dim, dim, dim
            ungrouped = MixerOps(ops).ungrouped(grouped, layer.kv_heads, parts_of_group)
            for x, first in ((q, 0), (k, q.shape[1]), (v, q.shape[1] + k.shape[1])):
                ops.copy(ungrouped, x, first)
        if layer.key is not None and layer.value is None:
            ops.copy(k, v)
        self._prepare_heads(q, layer.heads, layer, layer.query_norm, layer.query_angles or layer.angles)
        if layer.key is not None:
            self._prepare_heads(k, layer.kv_heads, layer, layer.key_norm, layer.angles)
            if layer.value_norm is not None:
                self._rotate(v, layer.kv_heads, value_dim, layer.value_norm)
            if layer.value_scale != 1:
                ops.add(v, None, layer.value_scale, v)
        self._attend(number, layer, wide[..., :dim], keys, values, out.view(len(out), -1, value_dim))
        if layer.gated:
            MixerOps(ops).gate(out, wide[..., dim:], dim, None, activation=structs.ACTIVATION_NUMBERS["sigmoid"])
        activation = structs.ACTIVATION_NUMBERS[layer.gate_activation]
        if layer.gate is not None:
            gate = ops.buffer("gate of heads", layer.heads * value_dim)
            MixerOps(ops).gate(out, gate.view(len(gate), -1, value_dim), value_dim, None, activation=activation)
        if layer.head_gate is not None:
            gate = ops.buffer("head gate", layer.heads)
            MixerOps(ops).gate(out, gate[..., None], value_dim, None, activation=activation)
        return out

    def add_latent(self, number: int, layer: LatentAttention, norm: Norm | None) -> Tensor:
        """The same of latent attention: queries go through the matrix of keys, and outputs through that of values."""
        ops = self.ops
        nope, rope, heads, latent = layer.nope_dim, layer.rope_dim, layer.heads, layer.latent_dim
        check_heads(heads, 1, rope or 2)
        check_sizes(kv_lora_rank=latent, qk_nope_head_dim=nope, v_head_dim=layer.value_dim)
        q, given, indexer = ops.buffer("q", heads * (nope + rope)), [], layer.indexer
        if layer.latent is not None:
            given.append((layer.latent, ops.buffer("latent", latent + rope)))
        if layer.head_gate is not None:
            given.append((layer.head_gate, ops.buffer("head gate", heads)))
        if layer.gate is not None:
            given.append((layer.gate, ops.buffer("gate of heads", heads * layer.value_dim)))
        if indexer is not None:
            check_sizes(index_topk=indexer.top_k, index_n_heads=indexer.heads, index_head_dim=indexer.dim)
            given.append((indexer.key, ops.buffer("index key", indexer.dim)))
            if indexer.pools is not None:
                given.append((indexer.pools.gate, ops.buffer("index gate", indexer.dim)))
        if layer.query_latent is None:
            ops.product(ops.hidden, [(layer.query, q), *given], norm)
        else:
            of_queries = ops.buffer("query latent", len(ops.weights.matrix(layer.query_latent).weight))
            ops.product(ops.hidden, [(layer.query_latent, of_queries), *given], norm)
            ops.product(of_queries, [(layer.query, q)], layer.query_norm)
        if layer.angles is not None and not rope:
            raise ValueError("a decoder's qk_rope_head_dim is 0, but its positions rotate; fetch it again")
        if layer.query_scale != 1:
            ops.add(q, None, layer.query_scale, q)
        k = self._latent_keys(layer)
        if layer.angles is not None:
            growing = replace(layer.angles, growth=layer.growth, steps=layer.steps)
            self._rotate(q[:, nope:], heads, rope, None, growing, layer.rope_interleaved)
            if layer.growth:
                self._rotate(q, heads, nope, None, replace(growing, zeros=nope))
        self._scale_heads(layer.head_scale, q, heads)
        queries, attended = ops.buffer("latent q", heads * (latent + rope)), ops.buffer("attended", heads * latent)
        to_keys, to_values = self._matrices_of_heads(layer)
        self._multiply_heads(q, to_keys, queries, rope)
        simple = Attention(
            layer.query, layer.latent, None, layer.output, heads, 1, latent + rope, layer.scale, sinks=layer.sinks,
            shares=layer.shares,
        )  # fmt: skip
        new_queries, new_keys = (x.view(len(x), -1, latent + rope) for x in (queries, k))
        index_key = None
        if indexer is not None:
            self.kinds.indexers[number], index_key = self._indexer(layer, indexer, norm)
        elif layer.shares_choice is not None:
            self.kinds.indexers[number] = self.kinds.indexers[layer.shares_choice]
        new_values = attended.view(len(attended), heads, latent)
        self._attend(number, simple, new_queries, new_keys, None, new_values, index_key)
        out = ops.buffer("out", heads * layer.value_dim)
        self._multiply_heads(attended, to_values, out)
        sigmoid = structs.ACTIVATION_NUMBERS["sigmoid"]
        if layer.gate is not None:
            MixerOps(ops).gate(out, ops.buffer("gate of heads", out.shape[1]), out.shape[1], None, activation=sigmoid)
        if layer.head_gate is not None:
            gate = ops.buffer("head gate", heads)
            MixerOps(ops).gate(out, gate[..., None], layer.value_dim, None, activation=sigmoid)
        return out

    def _latent_keys(self, layer: LatentAttention) -> Tensor:
        """The latent vectors of new rows after their norm, then what is rotated; none where a layer has none."""
        ops, latent, rope = self.ops, layer.latent_dim, layer.rope_dim
        k = ops.buffer("k", latent + rope)
        if layer.latent is None:
            return k
        made = ops.buffer("latent", latent + rope)
        vector, rotated = k if rope == 0 else ops.buffer("vector", latent), ops.buffer("rotated", rope)
        ops.copy(made, vector)
        ops.normalize(vector, layer.latent_norm, vector)
        if layer.latent_scale != 1:
            ops.add(vector, None, layer.latent_scale, vector)
        if rope == 0:
            return k
        ops.copy(made, rotated, latent)
        self._rotate(rotated, 1, rope, None, layer.angles, layer.rope_interleaved)
        runs = ops.weights.keep(torch.tensor([[0, latent], [latent, rope]]))
        ops.op(structs.REARRANGE, structs.Rearrangement(
            x=vector.data_ptr(), other=rotated.data_ptr(), out=k.data_ptr(), runs=runs.data_ptr(),
            inputs=latent, others=rope, size=latent + rope, num_runs=len(runs),
        ))  # fmt: skip
        return k

    def _scale_heads(self, path: str | None, x: Tensor, heads: int) -> None:
        """Multiply each head's numbers by its scale · log(1 + position) + its bias, if there is such a path."""
        ops = self.ops
        if path is None:
            return
        scale, bias = (ops.weights.floats(ops.weights.tensor(f"{path}.{name}"), heads) for name in ("scale", "bias"))
        if (logarithms := PositionLogarithms()) not in ops.angles:
            ops.angles.append(logarithms)
        ops.op(structs.SCALE_HEADS, structs.HeadScale(
            x=x.data_ptr(), scale=scale.data_ptr(), bias=bias.data_ptr(), heads=heads, dim=x.shape[1] // heads,
        ), ops.angles.index(logarithms))  # fmt: skip

    def _indexer(self, layer: LatentAttention, indexer: Indexer, norm: Norm | None) -> tuple[structs.Indexer, Tensor]:
        """The kernel's arguments of a choice, and the new keys [rows, 1, size] that it is made by.

        What only a choice needs is skipped while texts are so short that there is none.
        """
        ops, heads, dim = self.ops, indexer.heads, indexer.dim
        key, query, normed = (
            ops.buffer(name, width)
            for name, width in (("index key", dim), ("index q", heads * dim), ("index x", ops.hidden.shape[1]))
        )
        weight = ops.weights.dense(ops.weights.module(indexer.weights).weight)
        if weight.shape != (heads, ops.hidden.shape[1]):
            raise ValueError(f"a decoder's {indexer.weights} does not have {heads} outputs; fetch it again")
        struct = structs.Indexer(
            x=normed.data_ptr(), weight=weight.data_ptr(), query=query.data_ptr(), key=key.data_ptr(),
            inputs=ops.hidden.shape[1], heads=heads, dim=dim, most=indexer.top_k, kept=dim,
            weight_is_float32=weight.dtype == torch.float32,
        )  # fmt: skip
        first = dim - layer.rope_dim if indexer.rotates_last else 0
        if first < 0:
            raise ValueError(
                f"a decoder's index_head_dim is {dim}, but must be at least qk_rope_head_dim, {layer.rope_dim};"
                " fetch it again"
            )
        ops.normalize(key, indexer.key_norm, key)
        self._rotate(key[:, first:], 1, dim - first, None, layer.angles, indexer.rope_interleaved)
        with ops.skipped_unless_choosing(struct):
            if norm is None:
                ops.copy(ops.hidden, normed)
            else:
                ops.normalize(ops.hidden, norm, normed)
            if indexer.query_norm is not None:
                ops.product(normed, [(indexer.query, query)], indexer.query_norm)
            else:
                assert layer.query_latent is not None
                of_queries = ops.buffer("query latent", len(ops.weights.matrix(layer.query_latent).weight))
                ops.product(of_queries, [(indexer.query, query)], layer.query_norm)
            self._scale_heads(indexer.head_scale, query, heads)
            self._rotate(query[:, first:], heads, dim - first, None, layer.angles, indexer.rope_interleaved)
        if indexer.pools is not None:
            key = self._with_pools(struct, key, indexer.pools)
        return struct, key[:, None]

    def _with_pools(self, struct: structs.Indexer, key: Tensor, pools: KeyPools) -> Tensor:
        """What is kept of a token: its key, its gate, and room for the key of the pool that it may end."""
        ops, dim, size = self.ops, key.shape[1], pools.size
        check_sizes(index_kpool=size, pools=struct.most // size)
        if size > structs.MOST_POOL:
            raise ValueError(
                f"a decoder's index_kpool is {size}, but must be at most {structs.MOST_POOL}; fetch it again"
            )
        kept, gate = ops.buffer("kept of index", 3 * dim), ops.buffer("index gate", dim)
        runs = ops.weights.keep(torch.tensor([[0, dim], [dim, dim], [0, dim]]))
        ops.op(structs.REARRANGE, structs.Rearrangement(
            x=key.data_ptr(), other=gate.data_ptr(), out=kept.data_ptr(), runs=runs.data_ptr(),
            inputs=dim, others=dim, size=3 * dim, num_runs=len(runs),
        ))  # fmt: skip
        offsets = ops.weights.floats(ops.weights.tensor(pools.offsets).flatten(), size * dim)
        struct.key, struct.kept, struct.offsets, struct.pool = kept.data_ptr(), 3 * dim, offsets.data_ptr(), size
        struct.most = struct.most // size * size + size - 1
        return kept

    def _matrices_of_heads(self, layer: LatentAttention) -> tuple[Tensor, Tensor]:
        """What queries are multiplied by [heads, latent, nope], and what is attended to [heads, value, latent].

        Where the model multiplies activations of 8 bits, these matrices are packed, too: those of values as they are in
        the model, those of keys, which are transposed, in 8 bits.
        """
        weight, nope, value = self.ops.weights.matrix(layer.expand).weight.detach(), layer.nope_dim, layer.value_dim
        if weight.shape != (size := (layer.heads * (nope + value), layer.latent_dim)):
            raise ValueError(f"a decoder's {layer.expand.path} is not {size[0]} x {size[1]} numbers; fetch it again")
        whole = weight.dequantize() if isinstance(weight, PackedWeight) else weight
        keys, values = whole.view(layer.heads, -1, layer.latent_dim).split([nope, value], 1)
        output = self.ops.weights.matrix(layer.output).weight
        if not isinstance(output, PackedWeight) or output.arithmetic != "int8":
            return keys.mT, values
        to_keys, is_whole = _in_8_bits(keys.mT), nope % GROUP_OUTPUTS == value % GROUP_OUTPUTS == 0
        if not (isinstance(weight, PackedWeight) and weight.arithmetic == "int8" and is_whole):
            return to_keys, _in_8_bits(values)
        ends = range(nope + value, len(weight) + 1, nope + value)
        return to_keys, torch.stack([select_outputs(weight, slice(end - value, end)) for end in ends])

    def _multiply_heads(self, x: Tensor, weight: Tensor, out: Tensor, tail: int = 0) -> None:
        """Each head's numbers of x by its matrix of weight [heads, outs, inputs]; the next `tail` of x are copied."""
        heads, outs, inputs = weight.shape
        if isinstance(weight, PackedWeight):
            laid, format, step = weight.rows, weight.kernel_format, weight.matrix_bytes
        else:
            panels = -(-outs // structs.PANEL)
            padded = weight.new_zeros(heads, panels * structs.PANEL, inputs, dtype=x.dtype)
            padded[:, :outs] = weight
            laid = padded.view(heads, panels, structs.PANEL, inputs).transpose(2, 3).contiguous()
            format = step = 0
        self.ops.op(structs.MULTIPLY_HEADS, structs.PerHead(
            x=x.data_ptr(), weight=self.ops.weights.keep(laid).data_ptr(), out=out.data_ptr(), format=format,
            weight_step=step, heads=heads, inputs=inputs, outs=outs, tail=tail, x_row=x.stride(0), x_head=inputs + tail,
            out_row=out.stride(0), out_head=outs + tail,
        ))  # fmt: skip

    def _prepare_heads(self, x: Tensor, heads: int, layer: Attention, norm: Norm | None, angles: Angles | None) -> None:
        """Norms and angles of queries or keys."""
        ops = self.ops
        assert layer.norm_per_head or not (layer.gated or layer.norms_rotated)
        if norm is not None and not layer.norm_per_head:
            ops.normalize(x, norm, x)
            norm = None
        if layer.norms_rotated:
            self._rotate(x, heads, layer.dim, None, angles, layer.rope_interleaved)
            angles = None
        self._rotate(x, heads, layer.dim, norm, angles, layer.rope_interleaved)

    def _rotate(
        self,
        x: Tensor,
        heads: int,
        dim: int,
        norm: Norm | None,
        angles: Angles | None = None,
        interleaved: bool = False,
    ) -> None:
        """Norm the first `dim` numbers of each head, and rotate them where there are angles."""
        ops = self.ops
        if norm is None and angles is None:
            return
        assert x.stride(0) % heads == 0
        rotation = structs.Rotary(
            x=x.data_ptr(), heads=heads, dim=dim, stride=x.stride(0) // heads, interleaved=interleaved
        )  # fmt: skip
        if norm is not None:
            given = ops.weights.norm(norm, dim)
            rotation.norm, rotation.norm_kind, rotation.epsilon = given.values.data_ptr(), given.kind, given.epsilon
        if angles is not None and angles not in ops.angles:
            ops.angles.append(angles)
        ops.op(structs.ROTATE, rotation, -1 if angles is None else ops.angles.index(angles))

    def _attend(
        self,
        number: int,
        layer: Attention,
        q: Tensor,
        k: Tensor,
        v: Tensor | None,
        out: Tensor,
        index_key: Tensor | None = None,
    ) -> None:
        sinks = None
        if layer.sinks is not None:
            sinks = self.ops.weights.tensor(layer.sinks).float().contiguous()
            assert sinks.shape == (layer.heads,)
            self.ops.weights.made.append(sinks)
        indexer = self.kinds.indexers.get(number)
        if index_key is not None and layer.shares is not None:  # whose memory has no room for the indexer's keys
            alone = replace(layer, key=layer.query, shares=None, dim=0)
            which, place = self.kinds.add(number, alone, q, k[..., :0], v, out, sinks, index_key)
            self.ops.op(structs.CHOOSE_KEYS, indexer, which, place)
        which, place = self.kinds.add(number, layer, q, k, v, out, sinks, index_key)
        if index_key is not None and layer.shares is None:
            self.ops.op(structs.CHOOSE_KEYS, indexer, which, place)
        self.ops.op(structs.ATTEND, indexer, which, place)


def _in_8_bits(matrices: Tensor) -> Tensor:
    """Matrices [heads, outs, inputs], packed where inputs are whole blocks."""
    if matrices.shape[-1] % GGML_QUANT_SIZES[Q.Q8_0][0]:
        return matrices
    return PackedWeight.from_blocks(quantized_blocks(matrices, Q.Q8_0), Q.Q8_0, "int8")
