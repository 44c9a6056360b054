"""Command A+ (Cohere 2 with experts): attention and experts read one norm; layers without a window are not rotated."""

from typing import Any

from saltus.models.common_layers import activation, llama_attention, llama_mlp, mixture
from saltus.models.decoder_description import DecoderDescription, Experts, Layer
from saltus.models.gguf_architecture import (
    SIGMOID,
    GgufArchitecture,
    GgufModel,
    check_gates,
    decoder_config,
    expert_counts,
    expert_tensors,
    layer_types,
    num_layers,
    shared_expert_tensors,
)
from saltus.models.mixer_description import Angles, Norm

CLASSES = {"Cohere2MoeForCausalLM"}


def describe(config: Any) -> DecoderDescription:
    """See saltus.models.architectures."""
    layers = []
    for layer, kind in enumerate(config.layer_types):
        is_dense = config.mlp_layer_types[layer] == "dense"
        slides = kind == "sliding_attention" and config.sliding_window is not None
        is_rotated = slides or (is_dense and config.prefix_dense_sliding_window_pattern == 1)
        angles = Angles(layout="interleaved") if is_rotated else None
        norm = _norm(config, f"layers.{layer}.input_layernorm")
        mixer = llama_attention(config, layer, angles=angles, rope_interleaved=True)
        mlp = llama_mlp(config, layer) if is_dense else _experts(config, layer)
        layers.append(Layer(mixer, mlp, norm, norm, parallel=True))
    return DecoderDescription(tuple(layers), _norm(config, "norm"), logit_scale=config.logit_scale)


def _norm(config: Any, path: str) -> Norm:
    if config.rms_norm_eps is not None:
        return Norm(path, config.rms_norm_eps)
    return Norm(path, config.layer_norm_eps, "layer")


def _experts(config: Any, layer: int) -> Experts:
    by_softmax, has_shared = config.expert_selection_fn == "softmax", config.num_shared_experts > 0
    return mixture(
        config, layer, scoring="softmax" if by_softmax else "sigmoid", activation=activation(config.hidden_act),
        is_normalized=by_softmax or config.norm_topk_prob,
        shared=llama_mlp(config, layer, "mlp.shared_experts") if has_shared else None,
        output_scale=0.5 if has_shared and config.shared_expert_combination_strategy == "average" else 1.0,
    )  # fmt: skip


def gguf_config(model: GgufModel) -> dict[str, Any]:
    """See GgufArchitecture; first layers without experts are rotated, also without a window."""
    check_gates(model, SIGMOID)
    counts, dense = expert_counts(model), model.size("leading_dense_block_count", 0, least=0)
    root = model.number("attention.layer_norm_rms_epsilon", 0.0)
    return decoder_config(
        model, "cohere2_moe", "Cohere2MoeForCausalLM", sliding_window=model.size("attention.sliding_window"),
        layer_types=layer_types(model, 4), logit_scale=model.number("logit_scale", 0.0) or 1.0,
        mlp_layer_types=["dense" if layer < dense else "sparse" for layer in range(num_layers(model))],
        prefix_dense_intermediate_size=model.rows("blk.0.ffn_gate.weight") if dense else None,
        intermediate_size=counts.pop("moe_intermediate_size"), rms_norm_eps=root or None,
        layer_norm_eps=model.number("attention.layer_norm_epsilon", 1e-5), expert_selection_fn="sigmoid",
        num_shared_experts=model.size("expert_shared_count", 0, least=0),
        norm_topk_prob=model.flag("expert_weights_norm"), **counts,
    )  # fmt: skip


TENSORS = expert_tensors() | shared_expert_tensors("mlp.shared_experts")
GGUF = GgufArchitecture("cohere2moe", gguf_config, TENSORS)
