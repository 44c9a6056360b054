"""Gemma 3n: a token has several states (AltUp), which the kernels do not compute; the layers of Transformers run."""

import math
from typing import Any, NoReturn

from saltus.models.architectures import gemma2
from saltus.models.architectures.gemma4_text import PER_LAYER_TENSORS, is_of_unused_keys
from saltus.models.decoder_description import NotDescribed
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

CLASSES: set[str] = set()  # none runs on our kernels
STATES = 4  # of a token; llama.cpp writes no other models


def describe(config: Any) -> NoReturn:
    """See saltus.models.architectures."""
    raise NotDescribed("several states of a token (AltUp)")


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
