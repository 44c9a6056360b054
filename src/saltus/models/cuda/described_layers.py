"""The layers of described decoders that our kernels for GPUs compute: their weights as the kernels take them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from saltus.models.architectures import describe_decoder
from saltus.models.cpu.decoder_weights import Resolver
from saltus.models.cpu.native_decoder import STATIC_ROPE_TYPES, is_unmodified_decoder
from saltus.models.cuda.described_experts import is_known_experts
from saltus.models.cuda.gpu_recurrent import is_known_recurrence
from saltus.models.cuda.packed_weight import GPUPackedWeight
from saltus.models.decoder_description import (
    MLP,
    Angles,
    Attention,
    DecoderDescription,
    Experts,
    Layer,
    MLPAndExperts,
    Norm,
    PerLayerEmbeddings,
    Weight,
    mixers_of,
)
from saltus.models.decoder_of import decoder_of

ACTIVATIONS = {"silu", "gelu_tanh"}  # of gates, that `linear_kernels` computes


def described_for_gpu(model: Any) -> DecoderDescription | None:
    """What an unmodified model of an architecture computes, if our kernels for GPUs know all of it; else None."""
    description = describe_decoder(model) if is_unmodified_decoder(model) else None
    if description is None or description.streams is not None:
        return None
    base = decoder_of(model)
    known = all(_is_known(layer, base) for layer in description.layers) and model.lm_head.bias is None
    known &= description.per_layer_embeddings is None or _have_all_tokens(description.per_layer_embeddings, model)
    return description if known and _is_known_norm(description.norm, base) else None


def _have_all_tokens(inputs: PerLayerEmbeddings, model: Any) -> bool:
    embedded = len(decoder_of(model).get_submodule(inputs.embedding).weight)
    return embedded >= len(model.lm_head.weight) and not inputs.others_are_first


def _is_known(layer: Layer, base: Any) -> bool:
    if layer.laurel or layer.altup:
        return False
    output_norms = layer.mixer_output_norm, layer.mlp_output_norm
    return (
        all(_is_known_mixer(mixer, base) for mixer, _ in mixers_of(layer))
        and _is_known_mlp_or_experts(layer.mlp, base)
        and (layer.per_layer_input is None or layer.per_layer_input.activation in ACTIVATIONS)
        and all(_is_known_norm(norm, base) for norm in (layer.mixer_norm, layer.mlp_norm))
        and all(_is_known_norm(norm, base) and not _is_centred(norm) for norm in output_norms)
    )


def _is_known_norm(norm: Norm | None, base: Any) -> bool:
    return norm is None or (norm.path is not None and getattr(base.get_submodule(norm.path), "bias", None) is None)


def _is_centred(norm: Norm | None) -> bool:
    return norm is not None and norm.kind == "layer"


def _is_known_mixer(mixer: Any, base: Any) -> bool:
    if isinstance(mixer, Attention):
        return _is_known_attention(mixer, base)
    return is_known_recurrence(mixer, base)


def _is_known_attention(a: Attention, base: Any) -> bool:
    if ((a.norms_rotated or a.gated) and not a.norm_per_head) or not (a.span is None or isinstance(a.span, int)):
        return False
    if a.shares is None and (a.key is None or (a.query_norm is None) != (a.key_norm is None)):
        return False
    if (
        not _is_known_norm(a.query_norm, base)
        or _is_centred(a.query_norm)
        or (a.value_norm is not None and a.value_norm.path is not None)
    ):
        return False
    projections = [each for each in (a.query, a.key, a.value) if each]
    biases = {base.get_submodule(each.path).bias is None for each in projections}
    return (
        _whole(projections, base) is not None
        and len(biases) == 1
        and a.output.stop is None
        and all(_are_known_angles(angles, a.dim, base) for angles, _ in kinds_of_angles(a))
    )


def _are_known_angles(angles: Angles, dim: int, base: Any) -> bool:
    """True for angles that depend on the position alone."""
    if angles.zeros:
        return False
    rotary: Any = base.get_submodule(angles.path)
    kind = rotary.rope_type
    kind = kind[angles.layer_type] if isinstance(kind, dict) else kind
    given = {} if angles.layer_type is None else {"layer_type": angles.layer_type}
    like = next(base.parameters())
    positions = torch.zeros(1, 1, dtype=torch.long, device=like.device)
    found = rotary(like[None, :1], position_ids=positions, **given)
    if isinstance(found, torch.Tensor):  # of complex numbers
        return False
    cos = found[0]
    width = cos.shape[-1] * (2 if angles.layout == "once" else 1)
    return kind in STATIC_ROPE_TYPES and width <= dim


def kinds_of_angles(a: Attention) -> list[tuple[Angles, bool]]:
    """Those of queries and of keys, and whether pairs of dimensions lie beside each other; none without rotation."""
    return [] if a.angles is None else [(each, a.rope_interleaved) for each in (a.query_angles or a.angles, a.angles)]


def _is_known_mlp_or_experts(mlp: MLP | Experts | MLPAndExperts | None, base: Any) -> bool:
    if isinstance(mlp, Experts):
        return is_known_experts(mlp, base) and (mlp.shared is None or _is_known_mlp(mlp.shared, base))
    if isinstance(mlp, MLPAndExperts):
        norms = mlp.experts_norm, mlp.mlp_output_norm, mlp.experts_output_norm
        parts = _is_known_mlp(mlp.mlp, base), _is_known_mlp_or_experts(mlp.experts, base)
        return all(parts) and all(_is_known_norm(norm, base) and not _is_centred(norm) for norm in norms)
    return mlp is None or _is_known_mlp(mlp, base)


def _is_known_mlp(mlp: MLP, base: Any) -> bool:
    known = ACTIVATIONS if mlp.gate is not None else ACTIVATIONS | {"relu_squared"}
    if mlp.gate_cutoff is not None or mlp.activation not in known or mlp.down.stop is not None:
        return False
    feeding = [each for each in (mlp.gate, mlp.up) if each is not None]
    unbiased = all(base.get_submodule(each.path).bias is None for each in (*feeding, mlp.down))
    return unbiased and _whole(feeding, base) is not None


def _whole(weights: Sequence[Weight], base: Any) -> list[Any] | None:
    """The linear layers whose outputs these are, all of them and in this order; None if they are not."""
    layers, at = [base.get_submodule(weights[0].path)], 0
    for weight in weights:
        layer: Any = base.get_submodule(weight.path)
        if layer is not layers[-1]:
            if at not in (0, len(layers[-1].weight)):
                return None
            layers.append(layer)
            at = 0
        if weight.start != at:
            return None
        at = len(layer.weight) if weight.stop is None else weight.stop
    return layers if at == len(layers[-1].weight) else None


def layers_of(weights: Sequence[Weight], base: Any) -> list[Any]:
    """The linear layers whose outputs these are, in order."""
    layers = _whole(weights, base)
    assert layers is not None, "of a known description"
    return layers


def parts_of(layers: Sequence[Any], count: int) -> list[Tensor]:
    """The weights of linear layers in `count` parts of one size, views of a layer's where it has several.

    Packed ones stay whole.
    """
    weights = [layer.weight.detach() for layer in layers]
    if len(weights) == count or isinstance(weights[0], GPUPackedWeight):
        return weights
    (weight,) = weights
    return list(weight.chunk(count))


def norm_of(norm: Norm | None, weights: Resolver, all_heads: bool = False) -> Any:
    """A norm as the kernels read it; of queries and keys perhaps one of all heads together."""
    from saltus.models.cuda.row_kernels import KernelNorm

    if norm is None:
        return None
    assert norm.path is not None, "of a known description"
    values = weights.module(norm.path).weight.detach()
    if norm.kind == "rms":
        return KernelNorm(values, norm.epsilon, all_heads=all_heads)
    values = weights.keep(values.float() + norm.offset)
    return KernelNorm(values, norm.epsilon, True, all_heads, centred=norm.kind == "layer")
