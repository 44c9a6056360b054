"""The weights of layers as our kernels for GPUs take them: those with Llama's names, and those that are described."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from saltus.models.cpu.decoder_weights import Resolver
from saltus.models.cuda.fixed_shape_attention import StaticInputs
from saltus.models.cuda.gpu_attention import GPUAttention, KindOfAngles
from saltus.models.cuda.gpu_experts import Mixture
from saltus.models.cuda.gpu_latent import GPULatentAttention
from saltus.models.cuda.gpu_recurrent import GPURecurrence, GPUShortConvolution, recurrence_of
from saltus.models.cuda.gpu_selective_scan import GPUSelectiveScan
from saltus.models.cuda.gpu_streams import GPUAltUp, GPULaurel
from saltus.models.cuda.layer_weights import bias_of, layers_of, linear_layer, norm_of, parts_of
from saltus.models.cuda.packed_weight import joined_packed
from saltus.models.decoder_description import (
    MLP,
    Layer,
    MLPAndExperts,
    PerLayerEmbeddings,
    PerLayerInput,
    experts_of,
    mixers_of,
    mlp_of,
)
from saltus.models.mixer_description import Attention, LatentAttention, Mamba, Mixer

NO_SCALE = 1.0
KINDS_OF_ATTENTION = GPUAttention, GPULatentAttention
Recurrence = GPURecurrence | GPUShortConvolution | GPUSelectiveScan
GPUMixer = GPUAttention | GPULatentAttention | Recurrence


@dataclass(frozen=True)
class GPUMLP:
    """down(activation(gate x) · up x), or down(activation(up x)) without a gate."""

    gate_and_up: Sequence[Tensor]
    down: Sequence[Tensor]
    gate_blocks: Any
    down_blocks: Any
    activation: str = "silu"
    has_gate: bool = True
    gate_scale: float = NO_SCALE  # before the activation
    bias: Tensor | None = None  # of gates, then of the others
    down_bias: Tensor | None = None
    gate_cutoff: float | None = None  # of what the gate gives, in standard deviations above the mean
    xielu: Tensor | None = None  # the numbers of this activation, as `activate` takes them

    @classmethod
    def of(cls, gate_and_up: Sequence[Tensor], down: Tensor, *settings: Any) -> GPUMLP:
        """Of such weights; packed ones become views of merged ones."""
        from saltus.models.cuda.linear_kernels import blocks_of

        feeding = [each.detach() for each in joined_packed(gate_and_up)]
        down = down.detach()
        return cls(feeding, [down], blocks_of(feeding[0], parts=False), blocks_of(down), *settings)

    @classmethod
    def described(cls, mlp: MLP, weights: Resolver) -> GPUMLP:
        """Of a description which `described_for_gpu` knows."""
        given = [each for each in (mlp.gate, mlp.up) if each is not None]
        layers, down = layers_of(given, weights.base), linear_layer(weights.module(mlp.down.path))
        return cls.of(
            parts_of(layers, len(given)), down.weight, mlp.activation, mlp.gate is not None, mlp.gate_scale,
            bias_of(layers), bias_of([down]), mlp.gate_cutoff,
            None if mlp.xielu is None else _xielu_numbers(weights.module(mlp.xielu)),
        )  # fmt: skip

    def parts(self, x: Tensor, inputs: StaticInputs, first_slot: int) -> Tensor:
        """[parts, rows, hidden], float32, of x [padded rows, hidden]; as that of Mixture."""
        from saltus.models.cuda import linear_kernels, stream_kernels

        rows = inputs.shape.num_rows
        active = x.new_empty(len(x), self.down[0].shape[1])
        if self.has_gate and self.gate_scale == NO_SCALE and self.gate_cutoff is None:
            linear_kernels.gate_and_up(x, self.gate_and_up, active, self.gate_blocks, rows, self.activation, self.bias)
        else:
            size = active.shape[1]
            given = x.new_empty(rows, size * (1 + self.has_gate))
            linear_kernels.linear(x, self.gate_and_up, given, self.gate_blocks, rows, bias=self.bias)
            if self.gate_scale != NO_SCALE:
                given[:, :size] *= self.gate_scale
            if self.gate_cutoff is not None:
                stream_kernels.cut_off(given, size, self.gate_cutoff)
            linear_kernels.activate(given, active, self.activation, numbers=self.xielu)
        return linear_kernels.linear_parts(active, self.down, self.down_blocks, rows, self.down_bias)


@torch.inference_mode()
def _xielu_numbers(given: Any) -> Tensor:
    """Of a module of Transformers, rounded as it rounds them."""
    above, below = F.softplus(given.alpha_p), given.beta + F.softplus(given.alpha_n)
    return torch.stack([each.flatten()[0].float() for each in (above, below, given.beta, given.eps)])


@dataclass(frozen=True)
class GPUMLPAndExperts:
    """What `MLPAndExperts` describes."""

    mlp: GPUMLP
    experts: Mixture
    experts_norm: Any
    mlp_output_norm: Any
    experts_output_norm: Any

    @classmethod
    def described(cls, both: MLPAndExperts, weights: Resolver) -> GPUMLPAndExperts:
        norms = both.experts_norm, both.mlp_output_norm, both.experts_output_norm
        mlp, experts = GPUMLP.described(both.mlp, weights), Mixture.described(both.experts, weights)
        return cls(mlp, experts, *(norm_of(norm, weights) for norm in norms))

    def parts(self, x: Tensor, state: Tensor, inputs: StaticInputs, first_slot: int) -> Tensor:
        """[1, rows, hidden], float32, of x, the norm of the layer's state [padded rows, hidden]."""
        from saltus.models.cuda.row_kernels import add_and_norm

        rows, total, read = inputs.shape.num_rows, torch.zeros_like(state), torch.empty_like(state)
        add_and_norm(None, state, self.experts_norm, read, rows)
        of_mlp = self.mlp.parts(x, inputs, first_slot)
        of_experts = self.experts.parts(read, inputs, first_slot, state)
        for parts, norm in ((of_mlp, self.mlp_output_norm), (of_experts, self.experts_output_norm)):
            add_and_norm(parts, total, None, read, rows, norm)
        return total[None, :rows].float()


@dataclass(frozen=True)
class GPUPerLayerEmbeddings:
    """What `PerLayerEmbeddings` describes."""

    table: Tensor
    scale: float
    projection: Sequence[Tensor]
    blocks: Any
    norm: Any
    others_are_first: bool

    @classmethod
    def described(cls, described: PerLayerEmbeddings, weights: Resolver) -> GPUPerLayerEmbeddings:
        from saltus.models.cuda.linear_kernels import blocks_of

        projection = weights.module(described.projection.path).weight.detach()
        table = weights.module(described.embedding).weight.detach()
        scale = float(torch.tensor(described.embedding_scale, dtype=table.dtype))
        norm, others = norm_of(described.norm, weights), described.others_are_first
        return cls(table, scale, [projection], blocks_of(projection, parts=False), norm, others)

    def gates_and_parts(self, tokens: Tensor, embedded: Tensor, rows: int) -> Tensor:
        """[layers, rows, 2 · size]: room for each layer's gate, then its part, of tokens [rows].

        `embedded` [padded rows, hidden] are their embeddings.
        """
        from saltus.models.cuda import linear_kernels, row_kernels

        size = len(self.norm.weight)
        projected = embedded.new_empty(rows, len(self.projection[0]))
        linear_kernels.linear(embedded, self.projection, projected, self.blocks, rows)
        projected, normed = projected.view(-1, size), torch.empty_like(projected).view(-1, size)
        row_kernels.add_and_norm(None, projected, self.norm, normed, len(projected))
        if self.others_are_first:
            tokens = torch.where(tokens < len(self.table), tokens, 0)
        parts = (normed.view(rows, -1) + self.table.index_select(0, tokens) * self.scale) * 0.5**0.5
        parts = parts.view(rows, -1, size).transpose(0, 1)
        both = embedded.new_empty(len(parts), rows, 2 * size)
        both[..., size:] = parts
        return both


@dataclass(frozen=True)
class GPUPerLayerInput:
    """Adds norm(output(activation(gate x) · part)) to a layer's x."""

    gate: Sequence[Tensor]
    output: Sequence[Tensor]
    gate_blocks: Any
    output_blocks: Any
    norm: Any
    activation: str

    @classmethod
    def described(cls, described: PerLayerInput, weights: Resolver) -> GPUPerLayerInput:
        from saltus.models.cuda.linear_kernels import blocks_of

        gate, output = (weights.module(each.path).weight.detach() for each in (described.gate, described.output))
        norm = norm_of(described.output_norm, weights)
        return cls([gate], [output], blocks_of(gate, parts=False), blocks_of(output), norm, described.activation)

    def parts(self, x: Tensor, gate_and_part: Tensor, rows: int) -> Tensor:
        """[parts, rows, hidden], float32, before the norm, of x [padded rows, hidden]."""
        from saltus.models.cuda import linear_kernels

        linear_kernels.linear(x, self.gate, gate_and_part, self.gate_blocks, rows)
        active = x.new_empty(len(x), gate_and_part.shape[1] // 2)
        linear_kernels.activate(gate_and_part, active, self.activation)
        return linear_kernels.linear_parts(active, self.output, self.output_blocks, rows)


@dataclass(frozen=True)
class GPULayer:
    """A layer: x + mixer(norm(x)), then the same with the MLP; see `Layer` of descriptions."""

    input_norm: Any
    mixers: Sequence[tuple[GPUMixer, float]]  # and what their outputs are multiplied by
    post_norm: Any
    mlp: GPUMLP | Mixture | GPUMLPAndExperts | None
    mixer_output_norm: Any = None
    mlp_output_norm: Any = None
    residual_scale: float = NO_SCALE  # of what mixer and MLP give
    mlp_scale: float = NO_SCALE  # of what the MLP gives, too
    output_scale: float = NO_SCALE  # of what the layer gives
    per_layer_input: GPUPerLayerInput | None = None
    parallel: bool = False  # the MLP reads what attention reads, or the same state through `post_norm`
    laurel: GPULaurel | None = None
    altup: GPUAltUp | None = None

    @property
    def attention(self) -> GPUAttention | GPULatentAttention | None:
        """Its attention, if it has some."""
        return next((each for each, _ in self.mixers if isinstance(each, KINDS_OF_ATTENTION)), None)

    @property
    def recurrence(self) -> Recurrence | None:
        """Its mixer that keeps a state, if it has one."""
        return next((each for each, _ in self.mixers if not isinstance(each, KINDS_OF_ATTENTION)), None)

    @classmethod
    def of_llama(cls, layer: Any, window: int | None) -> GPULayer:
        """A layer whose modules have Llama's names."""
        gate_and_up, down = [layer.mlp.gate_proj.weight, layer.mlp.up_proj.weight], layer.mlp.down_proj.weight
        mixers = [(GPUAttention.of_llama(layer.self_attn, window), NO_SCALE)]
        return cls(layer.input_layernorm, mixers, layer.post_attention_layernorm, GPUMLP.of(gate_and_up, down))

    @classmethod
    def described(cls, layer: Layer, weights: Resolver, kinds: Sequence[KindOfAngles]) -> GPULayer:
        """Of a description which `described_for_gpu` knows; `kinds`: the tables of angles."""
        beside, mlp = layer.per_layer_input, mlp_of(layer)
        mixers = [(_mixer_of(each, weights, kinds), scale) for each, scale in mixers_of(layer)]
        of_mlp: Any = None if mlp is None else GPUMLP.described(mlp, weights)
        if isinstance(layer.mlp, MLPAndExperts):
            of_mlp = GPUMLPAndExperts.described(layer.mlp, weights)
        elif (experts := experts_of(layer)) is not None:
            of_mlp = Mixture.described(experts, weights, of_mlp)
        return cls(
            norm_of(layer.mixer_norm, weights),
            mixers,
            None if layer.parallel and layer.mlp_norm == layer.mixer_norm else norm_of(layer.mlp_norm, weights),
            of_mlp,
            norm_of(layer.mixer_output_norm, weights), norm_of(layer.mlp_output_norm, weights), layer.residual_scale,
            NO_SCALE if mlp is None else mlp.output_scale,
            NO_SCALE if layer.output_scale is None else float(weights.tensor(layer.output_scale)),
            None if beside is None else GPUPerLayerInput.described(beside, weights), layer.parallel,
            None if layer.laurel is None else GPULaurel.described(layer.laurel, weights),
            None if layer.altup is None else GPUAltUp.described(layer.altup, weights),
        )  # fmt: skip


def _mixer_of(mixer: Mixer, weights: Resolver, kinds: Sequence[KindOfAngles]) -> GPUMixer:
    if isinstance(mixer, Attention):
        return GPUAttention.described(mixer, weights, kinds)
    if isinstance(mixer, LatentAttention):
        return GPULatentAttention.described(mixer, weights, kinds)
    if isinstance(mixer, Mamba):
        return GPUSelectiveScan.of(mixer, weights)
    return recurrence_of(mixer, weights)
