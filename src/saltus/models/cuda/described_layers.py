"""Say which layers of described decoders our kernels for GPUs compute."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from saltus.models.architectures import describe_decoder
from saltus.models.cpu.native_decoder import STATIC_ROPE_TYPES, is_unmodified_decoder
from saltus.models.cuda.described_experts import is_known_experts
from saltus.models.cuda.gpu_recurrent import is_known_recurrence
from saltus.models.cuda.gpu_selective_scan import is_known_scan
from saltus.models.cuda.layer_weights import whole_layers
from saltus.models.decoder_description import (
    MLP,
    DecoderDescription,
    Experts,
    Layer,
    MLPAndExperts,
    PerLayerEmbeddings,
    mixers_of,
)
from saltus.models.decoder_of import decoder_of
from saltus.models.mixer_description import Angles, Attention, LatentAttention, Norm, Weight
from saltus.models.rotary_angles import angles_of_positions

ACTIVATIONS = {"silu", "gelu_tanh", "gelu"}  # of gates, that `linear_kernels` computes
UNGATED = ACTIVATIONS | {"relu", "relu_squared", "xielu"}
ROPE_TYPES_BY_LENGTH = {"longrope", "dynamic"}  # whose angles follow from a text's length, see `LongRope`


def described_for_gpu(model: Any) -> DecoderDescription | None:
    """What an unmodified model of an architecture computes, if our kernels for GPUs know all of it; else None."""
    description = describe_decoder(model) if is_unmodified_decoder(model) else None
    if description is None:
        return None
    base = decoder_of(model)
    known = all(_is_known(layer, base) for layer in description.layers)
    known &= description.per_layer_embeddings is None or _have_all_tokens(description.per_layer_embeddings, model)
    return description if known else None


def _have_all_tokens(inputs: PerLayerEmbeddings, model: Any) -> bool:
    embedded = len(decoder_of(model).get_submodule(inputs.embedding).weight)
    return embedded >= len(model.lm_head.weight) or inputs.others_are_first


def _is_known(layer: Layer, base: Any) -> bool:
    output_norms = layer.mixer_output_norm, layer.mlp_output_norm
    if layer.mixer is None and layer.mlp is None:
        return False
    if (
        layer.mixer_streams is not None
        or layer.shortcut is not None
        or (layer.parallel and isinstance(layer.mlp, Experts))
    ):
        return False
    if layer.parallel and not _have_like_settings(layer.mlp_norm, layer.mixer_norm, base):
        return False
    if layer.altup is not None and (layer.output_scale is not None or not layer.mixer_norm or not layer.mlp):
        return False
    return (
        all(_is_known_mixer(mixer, base) for mixer, _ in mixers_of(layer))
        and _is_known_mlp_or_experts(layer.mlp, base)
        and (layer.per_layer_input is None or layer.per_layer_input.activation in ACTIVATIONS)
        and all(_is_known_norm(norm, base) and not _is_centred(norm) for norm in output_norms)
    )


def _is_known_norm(norm: Norm | None, base: Any) -> bool:
    """True for one that is not of a layer's inputs: it has no bias."""
    return norm is None or norm.path is None or getattr(base.get_submodule(norm.path), "bias", None) is None


def _have_like_settings(norm: Norm | None, other: Norm | None, base: Any) -> bool:
    """True for norms that differ in their weights and biases alone, or not at all."""
    if norm is None or other is None or norm.path is None or other.path is None:
        return norm == other
    unbiased = {getattr(base.get_submodule(path), "bias", None) is None for path in (norm.path, other.path)}
    return norm == replace(other, path=norm.path) and len(unbiased) == 1


def _is_centred(norm: Norm | None) -> bool:
    return norm is not None and norm.kind == "layer"


def _is_known_mixer(mixer: Any, base: Any) -> bool:
    if isinstance(mixer, Attention):
        return _is_known_attention(mixer, base)
    if isinstance(mixer, LatentAttention):
        return _is_known_latent_attention(mixer, base)
    return is_known_recurrence(mixer, base) or is_known_scan(mixer, base)


def _is_known_attention(a: Attention, base: Any) -> bool:
    if (
        ((a.fused or a.grouped) and (a.gated or a.gate is not None or a.head_gate is not None or a.shares is not None))
        or a.size_of_values != a.dim
        or a.value_scale != 1
        or (a.gate is not None and a.head_gate is not None)
        or ((a.norms_rotated or a.gated) and not a.norm_per_head)
        or not _are_known_angles(a, base)
    ):
        return False
    if a.shares is None and (a.key is None or (a.query_norm is None) != (a.key_norm is None)):
        return False
    if (
        not _is_known_norm(a.query_norm, base)
        or _is_centred(a.query_norm)
        or (a.value_norm is not None and a.value_norm.path is not None)
    ):
        return False
    return whole_layers(projections_of(a), base) is not None and a.output.stop is None


def projections_of(a: Attention) -> list[Weight]:
    """The weights of what is computed of attention's input, in the order in which it lies beside each other."""
    if a.fused or a.grouped:
        return [a.query]
    return [each for each in (a.query, a.key, a.value, a.gate, a.head_gate) if each]


def _are_known_angles(a: Attention, base: Any) -> bool:
    if a.angles is None:
        return a.query_angles is None or a.query_angles.zeros == a.dim
    return all(0 < _rotated_dims(angles, base) <= a.dim for angles, _ in kinds_of_angles(a))


def _is_known_latent_attention(a: LatentAttention, base: Any) -> bool:
    if any(each is not None for each in (a.indexer, a.shares_choice, a.head_gate, a.gate, a.sinks, a.head_scale)):
        return False
    whole = [each for each in (a.query, a.latent, a.expand, a.output, a.query_latent) if each is not None]
    biases = [base.get_submodule(each.path).bias is None for each in whole]
    first = len(whole) - 1 if a.query_latent is not None else 1  # one that may have a bias, as the latent layer
    return (
        all(each.start == 0 and each.stop is None for each in whole)
        and a.query_scale == a.latent_scale == 1
        and biases[0]
        and biases[2]
        and biases[first] == biases[1]
        and all(_is_known_norm(norm, base) for norm in (a.latent_norm, a.query_norm))
        and all(norm is None or norm.path is not None for norm in (a.latent_norm, a.query_norm))
        and (a.query_norm is None) == (a.query_latent is None)
        and (a.angles is None or _rotated_dims(a.angles, base) == a.rope_dim)
    )


def _rotated_dims(angles: Angles, base: Any) -> int:
    """How many dimensions have angles, which depend on the position, and perhaps on a text's length; else 0."""
    if angles.zeros:
        return 0
    rotary: Any = base.get_submodule(angles.path)
    kind = rotary.rope_type
    known = STATIC_ROPE_TYPES | (set() if isinstance(kind, dict) else ROPE_TYPES_BY_LENGTH)
    kind = kind[angles.layer_type] if isinstance(kind, dict) else kind
    like = next(base.parameters())
    positions = torch.zeros(1, 1, dtype=torch.long, device=like.device)
    found = angles_of_positions(rotary, like[None, :1], positions, angles.layer_type)
    cos = found if isinstance(found, torch.Tensor) else found[0]  # one tensor of complex numbers, or two
    return cos.shape[-1] * (2 if angles.layout == "once" else 1) if kind in known else 0


def kinds_of_angles(a: Attention | LatentAttention) -> list[tuple[Angles, bool]]:
    """Those of queries and of keys, and whether pairs of dimensions lie beside each other; none without rotation.

    Where queries grow and are not rotated, there is their growth, twice.
    """
    if a.angles is None:
        growth = a.query_angles if isinstance(a, Attention) else None
        return [] if growth is None else [(growth, False)] * 2
    if isinstance(a, LatentAttention):
        of_queries = replace(a.angles, growth=a.growth, steps=a.steps)
        return [(each, a.rope_interleaved) for each in (of_queries, a.angles)]
    return [(each, a.rope_interleaved) for each in (a.query_angles or a.angles, a.angles)]


def _is_known_mlp_or_experts(mlp: MLP | Experts | MLPAndExperts | None, base: Any) -> bool:
    if isinstance(mlp, Experts):
        return is_known_experts(mlp, base) and (mlp.shared is None or _is_known_mlp(mlp.shared, base))
    if isinstance(mlp, MLPAndExperts):
        norms = mlp.experts_norm, mlp.mlp_output_norm, mlp.experts_output_norm
        parts = _is_known_mlp(mlp.mlp, base), _is_known_mlp_or_experts(mlp.experts, base)
        return all(parts) and all(_is_known_norm(norm, base) and not _is_centred(norm) for norm in norms)
    return mlp is None or _is_known_mlp(mlp, base)


def _is_known_mlp(mlp: MLP, base: Any) -> bool:
    if mlp.activation not in (UNGATED if mlp.gate is None else ACTIVATIONS) or mlp.down.stop is not None:
        return False
    if mlp.limit:
        return False
    feeding = [each for each in (mlp.gate, mlp.up) if each is not None]
    return whole_layers(feeding, base) is not None
