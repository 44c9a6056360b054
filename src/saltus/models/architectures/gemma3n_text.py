"""Gemma 3n: a token has several streams, of which layers compute one (AltUp); a low-rank branch, sparse activations."""

import math
from dataclasses import replace
from statistics import NormalDist
from typing import Any

from saltus.kernels.native.altup import MAX_STREAMS
from saltus.models.architectures import gemma2, gemma4_text
from saltus.models.architectures.gemma4_text import PER_LAYER_TENSORS, is_of_unused_keys, norm
from saltus.models.common_layers import llama_attention, llama_mlp
from saltus.models.decoder_description import MLP, AltUp, DecoderDescription, Laurel, Layer, NotDescribed, Streams
from saltus.models.gguf_architecture import (
    FULL,
    SLIDING,
    GgufArchitecture,
    GgufModel,
    Target,
    TensorPart,
    layer_types,
    llama_config,
    num_layers,
    rope,
    same_for_layers,
)
from saltus.models.mixer_description import Weight

CLASSES = {"Gemma3nForCausalLM"}
STATES = 4  # of a token; llama.cpp writes no other models


def mlp(config: Any, number: int) -> MLP:
    """An MLP whose gate may drop a share of its activations, those below a quantile of the normal distribution."""
    dropped = config.activation_sparsity_pattern[number]
    if not dropped > 0:
        return llama_mlp(config, number)
    if dropped >= 1:
        raise NotDescribed("a layer that keeps no activation")
    return replace(llama_mlp(config, number), gate_cutoff=NormalDist().inv_cdf(dropped))


def layer(config: Any, number: int) -> Layer:
    """Gemma 4's layer with a low-rank branch, and AltUp around it."""
    path = f"layers.{number}"
    laurel = Laurel(
        Weight(f"{path}.laurel.linear_left"), Weight(f"{path}.laurel.linear_right"),
        norm(config, f"{path}.laurel.post_laurel_norm"),
    )  # fmt: skip
    return gemma4_text.layer(
        config, number, llama_attention(config, number, **gemma4_text.attention(config, number)), mlp(config, number),
        per_layer_input=gemma4_text.per_layer_input(config, number), laurel=laurel,
        altup=AltUp(f"{path}.altup", config.rms_norm_eps, config.altup_correct_scale),
    )  # fmt: skip


def describe(config: Any) -> DecoderDescription:
    """See saltus.models.architectures."""
    count, active = config.altup_num_inputs, config.altup_active_idx
    if not 0 <= active < count <= MAX_STREAMS:
        raise NotDescribed(f"stream {active} of {count}")
    projections, last = (
        tuple(Weight(f"{name}.{number}") for number in range(count - 1))
        for name in ("altup_projections", "altup_unembed_projections")
    )
    return DecoderDescription(
        tuple(layer(config, number) for number in range(config.num_hidden_layers)), norm(config, "norm"),
        embedding_scale=config.hidden_size**0.5, logit_softcap=config.final_logit_softcapping or 0.0,
        per_layer_embeddings=gemma4_text.per_layer_embeddings(config, others_are_first=True),
        streams=Streams(active, projections, last),
    )  # fmt: skip


def sparsity(model: GgufModel) -> list[float]:
    """Of each layer, the share of activations that its MLP drops.

    A file has the quantile of the normal distribution above which they stay. Shares are decimals, such as 0.95, and
    float32 is a little off.
    """
    layers, scales = num_layers(model), model.get("activation_sparsity_scale")
    if not isinstance(scales, list) or len(scales) != layers or any(type(scale) is not float for scale in scales):
        raise ValueError(
            f"its activation_sparsity_scale must be a number for each of {layers:,} layers; fetch it again"
        )
    shares = [round((1 + math.erf(scale / math.sqrt(2))) / 2, 6) for scale in scales]
    if not all(0 <= share < 1 for share in shares):
        raise ValueError("its activation_sparsity_scale keeps no activation of some layer; fetch it again")
    return shares


def gguf_config(model: GgufModel) -> dict[str, Any]:
    """See GgufArchitecture; what a file does not say has the values of the released models."""
    layers, active = num_layers(model), model.size("altup.active_idx", 0, least=0)
    shared = model.size("attention.shared_kv_layers", least=0)
    if shared >= layers or active >= STATES or model.size("altup.num_inputs", STATES) != STATES:
        raise ValueError(f"some of its layers must have keys of their own, and a token {STATES} states; fetch it again")
    local = {"rope_theta": model.number("rope.freq_base_swa", 10000.0), "rope_type": "default"}
    return llama_config(
        model, "gemma3n_text", "Gemma3nForCausalLM", hidden_activation="gelu_pytorch_tanh",
        intermediate_size=same_for_layers(model.sizes("feed_forward_length", layers), "widths"),
        num_key_value_heads=same_for_layers(model.sizes("attention.head_count_kv", layers), "heads of keys"),
        layer_types=layer_types(model, 5), sliding_window=model.size("attention.sliding_window"),
        num_kv_shared_layers=shared, rope_parameters={FULL: rope(model), SLIDING: local},
        final_logit_softcapping=model.number("final_logit_softcapping", 30.0),
        hidden_size_per_layer_input=model.size("embedding_length_per_layer_input"),
        vocab_size_per_layer_input=model.rows("per_layer_token_embd.weight"),
        altup_num_inputs=STATES, altup_active_idx=active, laurel_rank=model.rows("blk.0.laurel_l.weight"),
        activation_sparsity_pattern=sparsity(model),
    )  # fmt: skip


def projections(name: str) -> tuple[TensorPart, ...]:
    """A matrix for each state but the first, stored as a stack."""
    return tuple(TensorPart(f"model.{name}.{number}.weight", matrix=number) for number in range(STATES - 1))


TENSORS: dict[str, Target] = {
    **gemma2.TENSORS, **PER_LAYER_TENSORS,
    "altup_proj.weight": projections("altup_projections"),
    "altup_unembd_proj.weight": projections("altup_unembed_projections"),
    "altup_correct_coef": "altup.correction_coefs", "altup_correct_scale.weight": "altup.correct_output_scale",
    "altup_predict_coef": "altup.prediction_coefs", "altup_router": "altup.modality_router",
    "altup_router_norm": "altup.router_norm", "laurel_l": "laurel.linear_left", "laurel_r": "laurel.linear_right",
    "laurel_post_norm": "laurel.post_laurel_norm",
}  # fmt: skip
GGUF = GgufArchitecture("gemma3n", gguf_config, TENSORS, ignored=is_of_unused_keys)
