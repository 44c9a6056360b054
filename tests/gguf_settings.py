"""Settings of experts and of layers with a state in GGUF files, as llama.cpp's converter writes them."""

from __future__ import annotations

from typing import Any

import gguf
from gguf import ExpertGatingFuncType

LATENT = "deepseek2", "deepseek32", "glm-dsa", "mistral4", "hy_v4"


def heads_of_keys(config: Any, name: str) -> int | list[int]:
    """One number, or one for each layer where some have no attention."""
    if name in LATENT:
        return 1
    if name in ("kimi-linear", "bailingmoe3", "glm5-next"):
        return [int(kind != "linear_attention") for kind in config.layer_types]
    if name == "jamba":
        return [config.num_key_value_heads * (kind == "attention") for kind in config.layers_block_type]
    if name in ("lfm2", "lfm2moe", "granitehybrid", "nemotron_h", "nemotron_h_moe"):
        return [config.num_key_value_heads * (kind == "full_attention") for kind in config.layer_types]
    if name == "mimo2":
        return [config.num_key_value_heads * (1 + (kind == "sliding_attention")) for kind in config.layer_types]
    return config.num_key_value_heads


def widths_of_mlps(config: Any, name: str) -> int | list[int]:
    """One number, or one for each layer where a layer may be something else."""
    if name in ("nemotron_h", "nemotron_h_moe"):
        widths = {"mlp": config.intermediate_size, "moe": config.moe_intermediate_size}
        return [widths.get(kind, 0) for kind in config.layers_block_type]
    if name == "qwen":
        return 2 * config.intermediate_size
    return getattr(config, "intermediate_size_mlp", config.intermediate_size)


def add_experts(out: gguf.GGUFWriter, config: Any, name: str) -> None:
    """Counts of experts, and how they are chosen."""
    values: dict[str, Any] = {key: getattr(config, key, None) for key in (
        "num_experts", "num_local_experts", "n_routed_experts", "num_experts_per_tok", "top_k_experts",
        "num_dense_layers",
        "moe_intermediate_size", "shared_expert_intermediate_size", "shared_intermediate_size")}  # fmt: skip
    if name == "nemotron_h":
        return  # of the defaults of its configuration
    if count := values["num_experts"] or values["num_local_experts"] or values["n_routed_experts"]:
        out.add_expert_count(count)
        used = values["num_experts_per_tok"] or values["top_k_experts"]
        out.add_expert_used_count(used[0] if isinstance(used, list) else used)
    if width := values["moe_intermediate_size"]:
        out.add_expert_feed_forward_length(width)
    if name in ("gpt-oss", "minimax-m2", "hunyuan-moe", "llama4"):
        out.add_expert_feed_forward_length(config.intermediate_size)
    if width := values["shared_expert_intermediate_size"] or values["shared_intermediate_size"]:
        out.add_expert_shared_feed_forward_length(width)
    if name == "mistral3":
        out.add_rope_scaling_yarn_log_mul(config.rope_parameters["mscale_all_dim"])
        out.add_attn_temperature_scale(config.rope_parameters["llama_4_scaling_beta"])
    if (dense := values["num_dense_layers"]) is not None:
        out.add_leading_dense_block_count(dense)
    if name in ("minimax-m2", "lfm2moe"):
        out.add_expert_gating_func(ExpertGatingFuncType.SIGMOID)
    if name == "llama4":
        out.add_interleave_moe_layer_step(config.interleave_moe_layer_step)
    if name == "ernie4_5-moe":
        out.add_leading_dense_block_count(config.moe_layer_start_index)
        out.add_interleave_moe_layer_step(config.moe_layer_interval)
        out.add_expert_shared_count(config.moe_num_shared_experts)
    if name in (*LATENT, "glm5-next", "glm4moe", "dots1", "bailingmoe2"):
        out.add_leading_dense_block_count(getattr(config, "first_k_dense_replace", 1))
        out.add_expert_shared_count(config.n_shared_experts)
        out.add_expert_weights_scale(config.routed_scaling_factor)
        out.add_expert_weights_norm(getattr(config, "norm_topk_prob", False))
        out.add_expert_group_count(config.n_group)
        out.add_expert_group_used_count(config.topk_group)
        is_softmax = config.model_type in ("deepseek_v2", "mistral4")
        out.add_expert_gating_func(ExpertGatingFuncType.SOFTMAX if is_softmax else ExpertGatingFuncType.SIGMOID)
    if name == "cohere2moe":
        out.add_expert_feed_forward_length(config.intermediate_size)
        out.add_leading_dense_block_count(config.mlp_layer_types.count("dense"))
        out.add_expert_shared_count(config.num_shared_experts)
        out.add_expert_weights_norm(config.norm_topk_prob)
        out.add_expert_gating_func(ExpertGatingFuncType.SIGMOID)
    if name == "laguna":
        out.add_leading_dense_block_count(config.mlp_layer_types.count("dense"))
        out.add_expert_weights_scale(config.moe_routed_scaling_factor)
        out.add_expert_weights_norm(True)
        out.add_expert_gating_func(ExpertGatingFuncType.SIGMOID)
    if name == "step35":
        out.add_leading_dense_block_count(config.mlp_layer_types.count("dense"))
        out.add_expert_shared_feed_forward_length(config.share_expert_dim)
        out.add_expert_weights_scale(config.moe_router_scaling_factor)
        out.add_expert_weights_norm(True)
    if name == "hy_v3":
        out.add_expert_shared_feed_forward_length(config.moe_intermediate_size * config.num_shared_experts)
        out.add_expert_weights_scale(config.router_scaling_factor)
        out.add_expert_weights_norm(True)
        out.add_expert_gating_func(ExpertGatingFuncType.SIGMOID)
    if name == "mimo2":
        out.add_expert_group_count(config.n_group)
        out.add_expert_group_used_count(config.topk_group)
        out.add_expert_gating_func(ExpertGatingFuncType.SIGMOID)
    if name in ("kimi-linear", "bailingmoe3"):
        out.add_leading_dense_block_count(config.mlp_layer_types.count("dense"))
        out.add_expert_shared_count(config.num_shared_experts)
        out.add_expert_weights_scale(config.routed_scaling_factor)
        out.add_expert_group_count(config.n_group)
        out.add_expert_group_used_count(config.topk_group)
        if name == "bailingmoe3":
            out.add_expert_weights_norm(config.norm_topk_prob)
    if name == "afmoe":
        out.add_expert_shared_count(config.num_shared_experts)
        out.add_expert_weights_scale(config.route_scale)
        out.add_expert_weights_norm(True)
    if name in ("exaone-moe", "nemotron_h_moe"):
        out.add_expert_shared_count(getattr(config, "num_shared_experts", 1))
        out.add_expert_weights_scale(config.routed_scaling_factor)
        out.add_expert_weights_norm(config.norm_topk_prob)
    if name == "minicpm3":
        out.add_q_lora_rank(config.q_lora_rank)
        out.add_kv_lora_rank(config.kv_lora_rank)
        out.add_key_length(config.qk_nope_head_dim + config.qk_rope_head_dim)
        out.add_rope_dimension_count(config.qk_rope_head_dim)
    if name in ("deepseek32", "glm-dsa", "hy_v4", "glm5-next"):
        out.add_indexer_head_count(config.index_n_heads)
        out.add_indexer_key_length(config.index_head_dim)
        out.add_indexer_top_k(config.index_topk)
    if name in ("hy_v4", "glm5-next"):
        out.add_array(f"{name}.swiglu_clamp_exp", [config.swiglu_limit] * config.num_hidden_layers)
        out.add_uint32(f"{name}.hyper_connection.count", config.hc_mult)
        out.add_float32(f"{name}.hyper_connection.epsilon", config.hc_eps)
    if name == "glm5-next":
        out.add_array("glm5-next.swiglu_clamp_shexp", [config.swiglu_limit] * config.num_hidden_layers)
        out.add_uint32("glm5-next.hyper_connection.sinkhorn_iterations", config.hc_sinkhorn_iters)
        out.add_uint32("glm5-next.attention.indexer.kpool", config.index_kpool)
        out.add_float32("glm5-next.kda.gate_lower_bound", config.linear_lower_bound)
    if name == "hy_v4":
        out.add_float32("hy_v4.hyper_connection.magnitude", config.hc_magnitude)
    if name in ("glm-dsa", "hy_v4", "glm5-next"):
        out.add_array(f"{name}.attention.indexer.types", [kind == "full" for kind in config.indexer_types])
    if name in (*LATENT, "kimi-linear", "bailingmoe3", "glm5-next"):
        rank, rope = config.kv_lora_rank, config.qk_rope_head_dim
        if config.q_lora_rank:
            out.add_q_lora_rank(config.q_lora_rank)
        out.add_kv_lora_rank(rank)
        for add, size in (
            (out.add_key_length, rank + rope), (out.add_value_length, rank), (out.add_rope_dimension_count, rope),
            (out.add_key_length_mla, config.qk_nope_head_dim + rope), (out.add_value_length_mla, config.v_head_dim),
        ):  # fmt: skip
            add(size)
        scaling = getattr(config, "rope_parameters", None) or {}
        if scale := scaling.get("mscale_all_dim"):
            out.add_rope_scaling_yarn_log_mul(0.1 * scale)
        if growth := scaling.get("llama_4_scaling_beta"):
            out.add_attn_temperature_scale(growth)


def add_states(out: gguf.GGUFWriter, config: Any, name: str) -> None:
    """Sizes of layers that keep a state."""
    if name in ("lfm2", "lfm2moe"):
        out.add_shortconv_l_cache(config.conv_L_cache)
    if name.startswith("qwen3") and hasattr(config, "linear_num_key_heads"):
        heads = config.linear_num_value_heads
        _add_sizes(
            out, config.linear_conv_kernel_dim, config.linear_key_head_dim, config.linear_num_key_heads, heads,
            heads * config.linear_value_head_dim,
        )  # fmt: skip
        out.add_full_attention_interval(4)
    if name in ("kimi-linear", "bailingmoe3", "glm5-next"):
        out.add_ssm_conv_kernel(config.linear_conv_kernel_dim)
        out.add_kda_head_dim(config.linear_head_dim)
    if name == "bailingmoe3":
        out.add_bool("bailingmoe3.kda.safe_gate", True)
        out.add_float32("bailingmoe3.kda.gate_lower_bound", config.kda_lower_bound)
    if name in ("mamba", "jamba"):
        is_jamba = name == "jamba"
        out.add_ssm_conv_kernel(config.mamba_d_conv if is_jamba else config.conv_kernel)
        out.add_ssm_state_size(config.mamba_d_state if is_jamba else config.state_size)
        out.add_ssm_time_step_rank(config.mamba_dt_rank if is_jamba else config.time_step_rank)
        out.add_ssm_inner_size(config.hidden_size * (config.mamba_expand if is_jamba else config.expand))
        if not is_jamba:
            out.add_ssm_dt_b_c_rms(config.model_type == "falcon_mamba")
    if name == "mamba2":
        heads = config.num_heads
        _add_sizes(out, config.conv_kernel, config.state_size, config.n_groups, heads, heads * config.head_dim)
    if name in ("nemotron_h", "nemotron_h_moe"):
        heads = config.mamba_num_heads
        _add_sizes(
            out, config.conv_kernel, config.ssm_state_size, config.n_groups, heads, heads * config.mamba_head_dim
        )
    if name in ("falcon-h1", "granitehybrid"):
        heads = config.mamba_n_heads
        _add_sizes(
            out, config.mamba_d_conv, config.mamba_d_state, config.mamba_n_groups, heads, heads * config.mamba_d_head
        )
    if name.startswith("granite") and config.model_type == "granitemoehybrid":
        out.add_rope_scaling_finetuned(name != "granitehybrid")


def _add_sizes(out: gguf.GGUFWriter, kernel: int, state: int, groups: int, heads: int, inner: int) -> None:
    out.add_ssm_conv_kernel(kernel)
    out.add_ssm_state_size(state)
    out.add_ssm_group_count(groups)
    out.add_ssm_time_step_rank(heads)
    out.add_ssm_inner_size(inner)
