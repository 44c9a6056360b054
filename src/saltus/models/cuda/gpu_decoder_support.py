"""Say which decoders our kernels run on a GPU: layers that they know, of sizes and dtypes that they take."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from saltus.models.cpu.native_decoder import STATIC_ROPE_TYPES, is_unmodified_decoder
from saltus.models.cuda.described_layers import described_for_gpu
from saltus.models.cuda.kernel_support import has_kernels
from saltus.models.cuda.layer_weights import is_transposed
from saltus.models.decoder_description import (
    LLAMA_DECODERS,
    DecoderDescription,
    experts_of,
    mixers_of,
    mlp_of,
    weights_perhaps_in_float32,
)
from saltus.models.decoder_of import decoder_of
from saltus.models.mixer_description import Attention, KimiDeltaNet, LatentAttention, Mamba, Mamba2
from saltus.models.packed_decoder import PackedDecoder

KERNEL_DTYPES = {torch.bfloat16, torch.float16}
DEPTH_MULTIPLE = 64  # of the sizes that products sum over
MIN_HEAD_DIM, MAX_HEAD_DIM = 32, 512
DIM_MULTIPLE = 16  # of heads' sizes


def supports_gpu_decoder(model: Any) -> bool:
    """True for a model on a GPU that our kernels decode by Llama's names."""
    return model.device.type == "cuda" and can_decode(model, model.device)


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
