"""Make the operations of per-layer embeddings: all layers' parts before the first layer, and one in each layer."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from saltus.kernels.native import structs
from saltus.kernels.packed_weight import kernel_arguments
from saltus.models.cpu.operations import Operations
from saltus.models.decoder_description import PerLayerEmbeddings, PerLayerInput


class PerLayerOps:
    """Adds per-layer embeddings to the operations of a decoder of so many layers and tokens.

    Errors: ValueError if some tokens have none.
    """

    def __init__(self, ops: Operations, inputs: PerLayerEmbeddings, layers: int, tokens: int) -> None:
        self.ops = ops
        table = ops.weights.module(inputs.embedding).weight
        weight, format = kernel_arguments(table)
        count, width = table.shape
        if count < tokens and not inputs.others_are_first:
            raise ValueError(f"{count:,} of its {tokens:,} tokens have per-layer embeddings")
        self.every = embedded = ops.buffer("per-layer embeddings", width)
        projected = ops.buffer("projected", width)
        ops.op(structs.EMBED_TOKENS, structs.Expansion(
            weight=weight, out=embedded.data_ptr(), format=format, inputs=width,
        ), which=count, place=inputs.others_are_first)  # fmt: skip
        ops.add(embedded, None, float(torch.tensor(inputs.embedding_scale, dtype=embedded.dtype)), embedded)
        ops.product(ops.hidden, [(inputs.projection, projected)])
        size = width // layers
        given = ops.weights.norm(inputs.norm, size)
        ops.op(structs.NORMALIZE, structs.Norm(
            x=projected.data_ptr(), out=embedded.data_ptr(), size=size, parts=layers, add=embedded.data_ptr(),
            **given.arguments("weight", "kind"),
        ))  # fmt: skip
        ops.add(embedded, None, 0.5**0.5, embedded)

    def add(self, number: int, layer: PerLayerInput, x: Tensor, outputs: Sequence[Tensor]) -> None:
        """Add the part of a layer, gated by x, to the outputs."""
        size = len(self.ops.weights.matrix(layer.gate).weight)
        gate, embedded = self.ops.buffer("per-layer gate", size), self.ops.buffer("per-layer embedding", size)
        made = self.ops.buffer("made", self.ops.hidden.shape[1])
        self.ops.product(x, [(layer.gate, gate)])
        self.ops.copy(self.every, embedded, number * size)
        activation = structs.ACTIVATION_NUMBERS[layer.activation]
        self.ops.product(embedded, [(layer.output, made)], gate=gate, activation=activation)
        for out in outputs:
            self.ops.normalize(made, layer.output_norm, out, add=out)
