"""Add attention to a decoder's operations: products, norms and angles of queries and keys, and the call itself."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from saltus.kernels import native
from saltus.models.cpu.attention_kinds import AttentionKinds
from saltus.models.cpu.mixer_ops import MixerOps
from saltus.models.cpu.operations import Operations
from saltus.models.decoder_description import Angles, Attention, LatentAttention, Norm
from saltus.models.packed_decoder import check_heads


class AttentionOps:
    """The operations of layers of attention."""

    def __init__(self, ops: Operations, kinds: AttentionKinds) -> None:
        self.ops, self.kinds = ops, kinds

    def add(self, number: int, layer: Attention, norm: Norm | None) -> Tensor:
        """The outputs of attention [rows, heads · size]."""
        ops = self.ops
        check_heads(layer.heads, layer.kv_heads, layer.dim)
        dim, width = layer.dim, layer.dim * (1 + layer.gated)  # of a head's query, and perhaps its gate
        q, out = ops.buffer("q", layer.heads * width), ops.buffer("out", layer.heads * dim)
        k, v = (ops.buffer(name, layer.kv_heads * dim) for name in ("k", "v"))
        given = [
            (weight, x) for weight, x in ((layer.query, q), (layer.key, k), (layer.value, v)) if weight is not None
        ]
        ops.product(ops.hidden, given, norm)
        if layer.key is not None and layer.value is None:
            ops.copy(k, v)
        self._prepare_heads(q, layer.heads, layer, layer.query_norm, layer.query_angles or layer.angles)
        if layer.key is not None:
            self._prepare_heads(k, layer.kv_heads, layer, layer.key_norm, layer.angles)
            if layer.value_norm is not None:
                self._rotate(v, layer.kv_heads, dim, layer.value_norm)
        wide, *views = q.view(len(q), -1, width), *(x.view(len(x), -1, dim) for x in (k, v, out))
        self._attend(number, layer, wide[..., :dim], *views)
        if layer.gated:
            MixerOps(ops).gate(out, wide[..., dim:], dim, None, activation=native.ACTIVATION_NUMBERS["sigmoid"])
        return out

    def add_latent(self, number: int, layer: LatentAttention, norm: Norm | None) -> Tensor:
        """The same, with keys and values that are expanded from latent vectors."""
        ops = self.ops
        nope, rope, heads, value = layer.nope_dim, layer.rope_dim, layer.heads, layer.value_dim
        check_heads(heads, heads, nope + rope)
        q, out = ops.buffer("q", heads * (nope + rope)), ops.buffer("out", heads * value)
        latent = ops.buffer("latent", len(ops.weights.matrix(layer.latent).weight))
        normed, k = ops.buffer("latent normed", latent.shape[1] - rope), ops.buffer("k", q.shape[1])
        expanded, rotated = ops.buffer("expanded", heads * (nope + value)), ops.buffer("rotated", rope)
        if layer.query_latent is None:
            ops.product(ops.hidden, [(layer.query, q), (layer.latent, latent)], norm)
        else:
            made = ops.buffer("query latent", len(ops.weights.matrix(layer.query_latent).weight))
            ops.product(ops.hidden, [(layer.query_latent, made), (layer.latent, latent)], norm)
            ops.product(made, [(layer.query, q)], layer.query_norm)
        ops.copy(latent, normed)
        ops.copy(latent, rotated, normed.shape[1])
        ops.product(normed, [(layer.expand, expanded)], layer.latent_norm)
        self._rotate(rotated, 1, rope, None, layer.angles, layer.rope_interleaved)
        growing = replace(layer.angles, growth=layer.growth, steps=layer.steps)
        self._rotate(q[:, nope:], heads, rope, None, growing, layer.rope_interleaved)
        if layer.growth:
            self._rotate(q, heads, nope, None, replace(growing, zeros=nope))
        width = expanded.shape[1]
        runs = [run for head in range(heads) for run in ((head * (nope + value), nope), (width, rope))]
        ops.weights.made.append(torch.tensor(runs))
        ops.op(native.REARRANGE, native.Rearrangement(
            x=expanded.data_ptr(), other=rotated.data_ptr(), out=k.data_ptr(), runs=ops.weights.made[-1].data_ptr(),
            inputs=width, others=rope, size=k.shape[1], num_runs=len(runs),
        ))  # fmt: skip
        views = [x.view(len(x), heads, -1) for x in (q, k, expanded, out)]
        simple = Attention(
            layer.query, layer.latent, layer.expand, layer.output, heads, heads, nope + rope, layer.scale
        )  # fmt: skip
        self._attend(number, simple, views[0], views[1], views[2][..., nope:], views[3])
        return out

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
        rotation = native.Rotary(
            x=x.data_ptr(), heads=heads, dim=dim, stride=x.stride(0) // heads, interleaved=interleaved
        )  # fmt: skip
        if norm is not None:
            given = ops.weights.norm(norm, dim)
            rotation.norm, rotation.norm_kind, rotation.epsilon = given.values.data_ptr(), given.kind, given.epsilon
        if angles is not None and angles not in ops.angles:
            ops.angles.append(angles)
        ops.op(native.ROTATE, rotation, -1 if angles is None else ops.angles.index(angles))

    def _attend(self, number: int, layer: Attention, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
        sinks = None
        if layer.sinks is not None:
            sinks = self.ops.weights.tensor(layer.sinks).float().contiguous()
            assert sinks.shape == (layer.heads,)
            self.ops.weights.made.append(sinks)
        which, place = self.kinds.add(number, layer, q, k, v, out, sinks)
        self.ops.op(native.ATTEND, None, which, place)
