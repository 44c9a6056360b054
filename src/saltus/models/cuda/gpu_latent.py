"""Latent attention on a GPU: its weights as our kernels take them, and what is kept of a token.

Of a token its latent vector is kept, and the key that all heads share; keys and values are not expanded (DeepSeek-AI
2024, section 2.1.2). A query goes through its head's matrix of keys instead, so that it meets latent vectors, and what
it attends to goes through the matrix of values. All heads read the same numbers, and few of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from saltus.models.cpu.decoder_weights import Resolver
from saltus.models.cuda.described_layers import kinds_of_angles
from saltus.models.cuda.gpu_attention import AttentionOfCall, KindOfAngles, ShapesOfKeys, output_parts
from saltus.models.cuda.layer_weights import layers_of, merged, norm_of, one_weight
from saltus.models.cuda.packed_weight import GPUPackedWeight
from saltus.models.mixer_description import LatentAttention


@dataclass(frozen=True)
class GPULatentAttention:
    """What `LatentAttention` describes; the weights of latent vectors lie beside each other."""

    heads: int
    nope_dim: int
    rope_dim: int
    scale: float
    angles: tuple[int, ...]  # which tables, of queries and keys; without them no rotation
    latent: Sequence[Tensor]  # of queries' latent vectors, if they have some, and those of keys with their rotated part
    latent_blocks: Any
    latent_bias: Tensor | None
    query_norm: Any  # of queries' latent vectors, if they have some
    latent_norm: Any
    query: Sequence[Tensor]  # of queries' latent vectors, or of hidden states
    query_blocks: Any
    to_keys: Tensor  # [heads, latent size, nope_dim]: what queries are multiplied by
    to_values: Tensor  # [heads, value_dim, latent size]
    output: Sequence[Tensor]
    output_blocks: Any
    output_bias: Tensor | None

    @property
    def shapes(self) -> ShapesOfKeys:
        """Of a token's keys and values, which are the first numbers of keys."""
        return (1, self.to_values.shape[2] + self.rope_dim), (1, 0)

    @classmethod
    def described(cls, a: LatentAttention, weights: Resolver, kinds: Sequence[KindOfAngles]) -> GPULatentAttention:
        """That of a description which `described_for_gpu` knows; `kinds`: the tables of angles."""
        expand = weights.module(a.expand.path).weight.detach()
        if isinstance(expand, GPUPackedWeight):
            expand = expand.dequantize()
        to_keys, to_values = expand.view(a.heads, -1, expand.shape[1]).split([a.nope_dim, a.value_dim], 1)
        first = [each for each in (a.query_latent, a.latent) if each is not None]
        output = weights.module(a.output.path)
        return cls(
            a.heads, a.nope_dim, a.rope_dim, a.scale, tuple(map(kinds.index, kinds_of_angles(a))),
            *merged(layers_of(first, weights.base)), norm_of(a.query_norm, weights), norm_of(a.latent_norm, weights),
            *one_weight(weights.module(a.query.path), parts=False), to_keys.transpose(1, 2), to_values,
            *one_weight(output), output.bias,
        )  # fmt: skip

    def parts(self, x: Tensor, number: int, angles: Sequence[Any], call: AttentionOfCall) -> Tensor:
        """[parts, rows, hidden], float32, of what layer `number` reads [padded rows, inputs]."""
        from saltus.models.cuda import latent_kernels, linear_kernels

        rows, inputs, size = call.rows, call.inputs, self.to_values.shape[2]
        parts = linear_kernels.linear_parts(x, self.latent, self.latent_blocks, rows)
        read, first = x, 0
        if self.query_norm is not None:
            first = len(self.query_norm.weight)
            read = x.new_empty(len(x), first)
            latent_kernels.norm_columns(parts, self.latent_bias, 0, self.query_norm, read)
        made = x.new_empty(len(x), self.heads, self.nope_dim + self.rope_dim)
        linear_kernels.linear(read, self.query, made.flatten(1), self.query_blocks, rows)
        keys, _ = call.pool.of_layer(number)
        latent_kernels.norm_columns(parts, self.latent_bias, first, self.latent_norm, keys, inputs.slots)
        memory = call.memory(x, self.heads, self.shapes[0], (1, size))
        latent_kernels.rotate(
            made, parts, self.latent_bias, angles, inputs.positions, inputs.slots, memory.queries, keys, self.rope_dim
        )
        latent_kernels.per_head(made[..., : self.nope_dim], self.to_keys, memory.queries[..., :size], rows)
        call.attend(memory, keys, keys[..., :size], scale=self.scale, span=None)
        out = x.new_empty(len(x), self.heads, self.to_values.shape[1])
        latent_kernels.per_head(memory.attended, self.to_values, out, rows)
        return output_parts(out, self.output, self.output_blocks, self.output_bias, rows)
