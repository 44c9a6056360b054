"""DeepSeek V3: latent attention, and experts after the first layers."""

from typing import Any

from saltus.models.common_layers import deepseek_mlp, latent_attention, llama_decoder, llama_layer
from saltus.models.decoder_description import DecoderDescription
from saltus.models.gguf_architecture import (
    SIGMOID,
    SOFTMAX,
    GgufArchitecture,
    GgufModel,
    TensorPart,
    expert_counts,
    expert_tensors,
    llama_config,
    num_layers,
    original_length,
    rope,
    shared_expert_tensors,
)

CLASSES = {"DeepseekV3ForCausalLM"}


def decoder(config: Any, has_experts: list[bool]) -> DecoderDescription:
    """Layers with latent attention, and with experts where it says so."""
    layers = []
    for layer, is_sparse in enumerate(has_experts):
        mlp = deepseek_mlp(config, layer, is_sparse)
        layers.append(llama_layer(config, layer, mixer=latent_attention(config, layer), mlp=mlp))
    return llama_decoder(config, layers)


def describe(config: Any) -> DecoderDescription:
    """See saltus.models.architectures."""
    return decoder(config, [layer >= config.first_k_dense_replace for layer in range(config.num_hidden_layers)])


def deepseek_expert_counts(model: GgufModel) -> dict[str, Any]:
    """Experts after the first layers, by DeepSeek's names."""
    return {
        "first_k_dense_replace": model.size("leading_dense_block_count", 0, least=0),
        "n_shared_experts": model.size("expert_shared_count", 0, least=0),
        "n_group": model.size("expert_group_count", 1), "topk_group": model.size("expert_group_used_count", 1),
        "norm_topk_prob": model.flag("expert_weights_norm"),
        "routed_scaling_factor": model.number("expert_weights_scale", 0.0) or 1.0,
        **expert_counts(model, "n_routed_experts"),
    }  # fmt: skip


def latent_settings(model: GgufModel) -> dict[str, Any]:
    """Heads, latent vectors and positions, by DeepSeek's names."""
    heads, rotated, parameters = model.size("attention.head_count"), model.size("rope.dimension_count"), rope(model)
    mla = "_mla" if model.has("attention.key_length_mla") else ""  # where keys and values are the latent vectors
    dim, value_dim = model.size(f"attention.key_length{mla}"), model.size(f"attention.value_length{mla}")
    if parameters["rope_type"] == "yarn" and (scale := 10 * model.number("rope.scaling.yarn_log_multiplier", 0.0)):
        parameters |= {"mscale": scale, "mscale_all_dim": scale}
    return {
        "num_key_value_heads": heads, "head_dim": rotated, "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": dim - rotated, "v_head_dim": value_dim, "rope_parameters": parameters,
        "kv_lora_rank": model.size("attention.kv_lora_rank"),
        "q_lora_rank": model.size("attention.q_lora_rank", 0, least=0) or None,
    }  # fmt: skip


def gguf_config(model: GgufModel) -> dict[str, Any]:
    """See GgufArchitecture; models that choose experts by their softmax are DeepSeek V2's, or Mistral 4's."""
    settings = latent_settings(model)
    parameters = settings["rope_parameters"]
    has_experts = model.size("expert_count", 0, least=0) > 0
    counts = deepseek_expert_counts(model) if has_experts else {"first_k_dense_replace": num_layers(model)}
    growth, by_sigmoids = model.number("attention.temperature_scale", 0.0), has_experts and _scores(model) == SIGMOID
    if growth and by_sigmoids:
        raise ValueError("its queries grow with the position, which is not supported with experts by sigmoids")
    if growth or (has_experts and not by_sigmoids and counts["norm_topk_prob"]):
        steps = parameters.setdefault("original_max_position_embeddings", original_length(model))
        if model.size("attention.temperature_length", steps) != steps:
            raise ValueError("its queries grow by other steps than its positions are scaled by, which is not supported")
        parameters["llama_4_scaling_beta"] = growth
        return llama_config(
            model,
            "mistral4",
            "Mistral4ForCausalLM",
            **settings | {"head_dim": settings["qk_nope_head_dim"] + settings["qk_rope_head_dim"]},
            **counts,
        )
    if by_sigmoids or not has_experts:
        return llama_config(model, "deepseek_v3", "DeepseekV3ForCausalLM", **settings, **counts)
    method = "group_limited_greedy" if counts["n_group"] > 1 else "greedy"
    return llama_config(model, "deepseek_v2", "DeepseekV2ForCausalLM", topk_method=method, **settings, **counts)


def _scores(model: GgufModel) -> int:
    """The scores that experts are chosen by; a file that does not say it has biases where they are sigmoids."""
    has_bias = any(model.layers_with("exp_probs_b.bias"))
    scores = model.get("expert_gating_func") or (SIGMOID if has_bias else SOFTMAX)
    if scores not in (SOFTMAX, SIGMOID) or (has_bias and scores == SOFTMAX):
        raise ValueError("it chooses experts by other scores than Transformers, which is not supported")
    return scores


EXPANSION = "self_attn.kv_b_proj.weight"
TENSORS = {
    **expert_tensors(), **shared_expert_tensors("mlp.shared_experts"), "attn_q_a": "self_attn.q_a_proj",
    "attn_q_b": "self_attn.q_b_proj", "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa", "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj", "attn_k_b.weight": TensorPart(EXPANSION, is_transposed=True, is_reshaped=True),
    "attn_v_b.weight": TensorPart(EXPANSION, 1, is_reshaped=True),
}  # fmt: skip
SPLIT = {"attn_k_b": "attn_kv_b", "attn_v_b": "attn_kv_b"}
GGUF = GgufArchitecture("deepseek2", gguf_config, TENSORS, repeated=SPLIT)
