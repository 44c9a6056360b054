"""Write tiny random models of each architecture to GGUF files, as llama.cpp's converter does."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Q
from gguf import RopeScalingType
from gguf.quants import dequantize, quantize
from tokenizers import pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM

from gguf_conversions import convert
from gguf_settings import add_experts, add_states, heads_of_keys, widths_of_mlps
from saltus.loading.model_folders import list_causal_class

VOCAB = 300
SIZES = {
    "vocab_size": VOCAB, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2,
    "initializer_range": 0.1,
}  # fmt: skip
SLIDING, FULL = "sliding_attention", "full_attention"
GEMMA_ROPE = {
    FULL: {"rope_type": "linear", "factor": 8.0, "rope_theta": 5e4},
    SLIDING: {"rope_type": "default", "rope_theta": 1e3},
}
GEMMA4 = {
    "head_dim": 32, "global_head_dim": 64, "sliding_window": 8, "num_hidden_layers": 4,
    "layer_types": [SLIDING, FULL] * 2, "vocab_size_per_layer_input": VOCAB, "final_logit_softcapping": 20.0,
}  # fmt: skip

YARN = {
    "rope_type": "yarn", "rope_theta": 5000.0, "factor": 4.0, "original_max_position_embeddings": 32,
    "beta_fast": 16.0, "beta_slow": 2.0,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
GRANITE = {
    "attention_multiplier": 0.0625, "embedding_multiplier": 12.0, "residual_multiplier": 0.22, "logits_scaling": 8.0,
}  # fmt: skip
GRANITE_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 96}
MIXED = ["linear_attention", FULL, "linear_attention"]
MAMBA = {"mamba_n_heads": 8, "mamba_n_groups": 2, "mamba_d_state": 16, "mamba_d_head": 32, "mamba_expand": 1}
NEMOTRON = {
    "mamba_num_heads": 8, "mamba_head_dim": 32, "n_groups": 2, "ssm_state_size": 16, "head_dim": 32,
}  # fmt: skip
DELTA_NET = {
    "num_hidden_layers": 3, "layer_types": MIXED, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 32, "linear_value_head_dim": 64,
    "rope_parameters": {"rope_theta": 5000.0, "rope_type": "default", "partial_rotary_factor": 0.25},
}  # fmt: skip
DEEPSEEK_EXPERTS = {
    "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 64, "first_k_dense_replace": 1,
    "n_shared_experts": 2, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5, "norm_topk_prob": True,
}  # fmt: skip
LATENT = {
    "num_key_value_heads": 4, "kv_lora_rank": 64, "qk_rope_head_dim": 32, "qk_nope_head_dim": 32, "v_head_dim": 64,
}  # fmt: skip
INDEXER = {"index_topk": 16, "index_n_heads": 12, "index_head_dim": 64}


@dataclass(frozen=True)
class Case:
    """An architecture by its name in Transformers and in GGUF, with settings of its configuration."""

    model_type: str
    name: str
    settings: dict[str, Any] = field(default_factory=dict)
    tied: bool = False


CASES = {
    "gemma": Case("gemma", "gemma", {"head_dim": 64}, tied=True),
    "gemma2": Case("gemma2", "gemma2", {"head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 8}, tied=True),
    "gemma3": Case(
        "gemma3_text", "gemma3",
        {"head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 8, "num_hidden_layers": 6,
         "rope_parameters": GEMMA_ROPE}, tied=True,
    ),
    "phi3": Case("phi3", "phi3", {"sliding_window": 8}),
    "phi3, long": Case(
        "phi3", "phi3",
        {"original_max_position_embeddings": 32,
         "rope_parameters": {
             "rope_type": "longrope", "rope_theta": 5000.0, "partial_rotary_factor": 0.75,
             "original_max_position_embeddings": 32, "short_factor": [1.0 + i / 16 for i in range(24)],
             "long_factor": [1.0 + i / 2 for i in range(24)]}},
        tied=True,
    ),
    "granite": Case(
        "granite", "granite",
        {"attention_multiplier": 0.0625, "embedding_multiplier": 12.0, "residual_multiplier": 0.22,
         "logits_scaling": 8.0},
    ),
    "jais2": Case("jais2", "jais2"),
    "exaone": Case("exaone", "exaone", tied=True),
    "phi2": Case("phi", "phi2", {"intermediate_size": 1024, "num_key_value_heads": 4}),
    "phi2, one layer for queries, keys and values": Case(
        "phi", "phi2", {"intermediate_size": 1024, "num_key_value_heads": 4, "fuses_qkv": True}
    ),
    "internlm2": Case("llama", "internlm2"),
    "xverse": Case("llama", "xverse", {"num_key_value_heads": 4}),
    "baichuan": Case("llama", "baichuan", {"num_key_value_heads": 4}),
    "pangu-embedded": Case("llama", "pangu-embedded", {"attention_bias": True}, tied=True),
    "qwen": Case("qwen2", "qwen", {"num_key_value_heads": 4, "fuses_qkv": True}),
    "orion": Case(
        "stablelm", "orion",
        {"rope_parameters": {"rope_theta": 5000.0, "rope_type": "default", "partial_rotary_factor": 1.0}},
    ),
    "stablelm": Case("stablelm", "stablelm", {"use_qkv_bias": True}),
    "stablelm, parallel": Case("stablelm", "stablelm", {"use_parallel_residual": True}),
    "nemotron": Case("nemotron", "nemotron"),
    "afmoe": Case("afmoe", "afmoe", EXPERTS | {
        "head_dim": 32, "num_hidden_layers": 4, "sliding_window": 8, "num_dense_layers": 1, "num_shared_experts": 1,
        "route_scale": 1.5, "mup_enabled": True, "layer_types": [SLIDING] * 3 + [FULL]}),
    "olmo": Case("olmo", "olmo"),
    "olmo, clipped": Case("olmo", "olmo", {"clip_qkv": 0.5}),
    "olmo2": Case("olmo2", "olmo2"),
    "olmo3": Case(
        "olmo3", "olmo2",
        {"num_hidden_layers": 4, "sliding_window": 8,
         "rope_parameters": {
             FULL: {"rope_type": "yarn", "rope_theta": 5000.0, "factor": 4.0, "beta_fast": 16.0, "beta_slow": 2.0,
                    "attention_factor": 1.25, "original_max_position_embeddings": 32},
             SLIDING: {"rope_type": "default", "rope_theta": 5000.0}}},
    ),
    "smollm3": Case("smollm3", "smollm3", {"num_hidden_layers": 4}, tied=True),
    "chatglm": Case("glm", "chatglm", {"head_dim": 64, "attention_bias": True}),
    "chatglm, one layer for queries, keys and values": Case(
        "glm", "chatglm", {"head_dim": 64, "attention_bias": True, "fuses_qkv": True}
    ),
    "glm4": Case("glm4", "glm4", {"head_dim": 64, "attention_bias": True}),
    "command-r": Case("cohere", "command-r", {"logit_scale": 0.25}, tied=True),
    "command-r, norms of heads": Case("cohere", "command-r", {"logit_scale": 0.25, "use_qk_norm": True}, tied=True),
    "cohere2": Case(
        "cohere2", "cohere2", {"num_hidden_layers": 4, "sliding_window": 8, "logit_scale": 0.25}, tied=True
    ),
    "starcoder2": Case("starcoder2", "starcoder2", tied=True),
    "gemma4, shared": Case(
        "gemma4_text", "gemma4",
        {**GEMMA4, "num_kv_shared_layers": 2, "use_double_wide_mlp": True, "hidden_size_per_layer_input": 64},
        tied=True,
    ),
    "gemma4, keys are values": Case(
        "gemma4_text", "gemma4",
        {**GEMMA4, "attention_k_eq_v": True, "num_global_key_value_heads": 1, "hidden_size_per_layer_input": 0},
        tied=True,
    ),
    "gemma3n": Case(
        "gemma3n_text", "gemma3n",
        {"head_dim": 32, "sliding_window": 8, "num_hidden_layers": 4, "layer_types": [SLIDING, FULL] * 2,
         "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 64, "vocab_size_per_layer_input": VOCAB,
         "laurel_rank": 32, "activation_sparsity_pattern": [0.95, 0.0, 0.3, 0.0], "final_logit_softcapping": 20.0,
         "rope_parameters": GEMMA_ROPE}, tied=True,
    ),
    "llama, experts": Case("mixtral", "llama", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "arcee": Case("arcee", "arcee", {"head_dim": 32}),
    "ernie4_5": Case("ernie4_5", "ernie4_5", {"head_dim": 32}, tied=True),
    "seed_oss": Case("seed_oss", "seed_oss", {"head_dim": 32, "attention_bias": True, "attention_out_bias": False}),
    "exaone4": Case("exaone4", "exaone4", {"sliding_window": None, "layer_types": [FULL] * 2}, tied=True),
    "exaone4, windows": Case(
        "exaone4", "exaone4", {"num_hidden_layers": 4, "sliding_window": 8, "sliding_window_pattern": 4}
    ),
    "mistral3": Case("ministral3", "mistral3", {"head_dim": 32, "rope_parameters": YARN | {
        "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.25}}),
    "qwen2moe": Case("qwen2_moe", "qwen2moe", EXPERTS | {
        "shared_expert_intermediate_size": 96, "norm_topk_prob": False}),
    "qwen3moe": Case("qwen3_moe", "qwen3moe", EXPERTS | {"head_dim": 32, "norm_topk_prob": True}),
    "mellum": Case("mellum", "mellum", EXPERTS | {
        "head_dim": 32, "num_hidden_layers": 4, "sliding_window": 8, "layer_types": [SLIDING] * 3 + [FULL],
        "rope_parameters": {FULL: YARN, SLIDING: {"rope_type": "default", "rope_theta": 1e3}}}),
    "olmoe": Case("olmoe", "olmoe", {"num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": False}),
    "gpt-oss": Case("gpt_oss", "gpt-oss", {
        "head_dim": 32, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8,
        "rope_parameters": YARN | {"truncate": False, "beta_fast": 32.0, "beta_slow": 1.0}}),
    "granitemoe": Case("granitemoe", "granitemoe", GRANITE | {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "granitemoe, shared": Case("granitemoehybrid", "granitemoe", GRANITE | GRANITE_EXPERTS | {
        "layer_types": [FULL] * 2, "position_embedding_type": "rope"}),
    "granitehybrid": Case("granitemoehybrid", "granitehybrid", GRANITE | MAMBA | {
        "num_hidden_layers": 3, "layer_types": MIXED, "num_local_experts": 0, "num_experts_per_tok": 0,
        "shared_intermediate_size": 96}, tied=True),
    "granitehybrid, experts": Case("granitemoehybrid", "granitehybrid", GRANITE | MAMBA | GRANITE_EXPERTS | {
        "num_hidden_layers": 3, "layer_types": MIXED}),
    "granite-swa": Case("granite_swa", "granite-swa", GRANITE | {
        "num_hidden_layers": 4, "layer_types": [FULL, SLIDING, SLIDING, FULL], "sliding_window": 8,
        "layer_rope_theta": [5000.0, 5000.0, 0, 5000.0]}, tied=True),
    "granite-swa, experts": Case("granitemoe_swa", "granite-swa", GRANITE | GRANITE_EXPERTS | {
        "layer_types": [FULL, SLIDING], "sliding_window": 8, "layer_rope_theta": [5000.0, 0]}),
    "glm4moe": Case("glm4_moe", "glm4moe", DEEPSEEK_EXPERTS | {
        "head_dim": 32, "use_qk_norm": True, "attention_bias": True, "n_shared_experts": 1, "n_group": 1,
        "topk_group": 1,
        "rope_parameters": {"rope_theta": 5000.0, "rope_type": "default", "partial_rotary_factor": 0.5}}),
    "deepseek2": Case("deepseek_v3", "deepseek2", LATENT | DEEPSEEK_EXPERTS | {
        "q_lora_rank": 64, "rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}}),
    "deepseek2, softmax": Case("deepseek_v2", "deepseek2", LATENT | DEEPSEEK_EXPERTS | {
        "q_lora_rank": None, "topk_method": "greedy", "n_group": 1, "topk_group": 1, "norm_topk_prob": False}),
    "deepseek32": Case("deepseek_v32", "deepseek32", LATENT | DEEPSEEK_EXPERTS | INDEXER | {
        "q_lora_rank": 64, "rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}}),
    "glm-dsa": Case("glm_moe_dsa", "glm-dsa", LATENT | DEEPSEEK_EXPERTS | INDEXER | {
        "num_hidden_layers": 3, "q_lora_rank": 64, "indexer_types": ["full", "shared", "full"]}),
    "hy_v4": Case("hy_v4", "hy_v4", LATENT | DEEPSEEK_EXPERTS | INDEXER | {
        "num_hidden_layers": 3, "q_lora_rank": 64, "indexer_types": ["full", "shared", "full"], "n_group": 1,
        "mlp_layer_types": ["dense", "sparse", "sparse"], "topk_group": 1, "swiglu_limit": 0.5, "hc_mult": 3,
        "hc_magnitude": 1.5}),
    "mistral4": Case("mistral4", "mistral4", LATENT | DEEPSEEK_EXPERTS | {
        "q_lora_rank": 64, "rope_parameters": YARN | {
            "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.25}}),
    "minicpm3": Case("minicpm3", "minicpm3", LATENT | {"q_lora_rank": 64}, tied=True),
    "minicpm3, long": Case("minicpm3", "minicpm3", LATENT | {"q_lora_rank": 64, "rope_parameters": {
        "rope_type": "longrope", "rope_theta": 5000.0, "original_max_position_embeddings": 128,
        "short_factor": [1.0 + i / 16 for i in range(16)], "long_factor": [1.0 + i / 2 for i in range(16)]}}),
    "kimi-linear": Case("kimi_linear", "kimi-linear", LATENT | {
        "num_hidden_layers": 3, "layer_types": MIXED, "mlp_layer_types": ["dense", "sparse", "sparse"],
        "q_lora_rank": None, "num_local_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 64,
        "num_shared_experts": 2, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5, "linear_num_heads": 4,
        "linear_head_dim": 32}),
    "lfm2": Case("lfm2", "lfm2", {
        "num_hidden_layers": 3, "layer_types": ["conv", FULL, "conv"], "block_auto_adjust_ff_dim": False}, tied=True),
    "qwen3next": Case("qwen3_next", "qwen3next", DELTA_NET | EXPERTS | {
        "shared_expert_intermediate_size": 96, "norm_topk_prob": True, "head_dim": 32}),
    "qwen35": Case("qwen3_5_text", "qwen35", DELTA_NET | {"head_dim": 32}, tied=True),
    "qwen35moe": Case("qwen3_5_moe_text", "qwen35moe", DELTA_NET | EXPERTS | {
        "shared_expert_intermediate_size": 96, "head_dim": 32}),
    "falcon-h1": Case("falcon_h1", "falcon-h1", MAMBA | {
        "head_dim": 32, "mamba_d_ssm": 256, "mamba_rms_norm": True, "mamba_norm_before_gate": False,
        "key_multiplier": 0.5, "attention_in_multiplier": 2.0, "ssm_in_multiplier": 0.5,
        "attention_out_multiplier": 2.0, "ssm_out_multiplier": 0.25, "ssm_multipliers": [0.5, 2.0, 0.5, 2.0, 0.5],
        "mlp_multipliers": [2.0, 0.5], "lm_head_multiplier": 0.5, "embedding_multiplier": 2.0}),
    "mamba2": Case("mamba2", "mamba2", {
        "num_heads": 8, "head_dim": 64, "state_size": 16, "n_groups": 2, "expand": 2}, tied=True),
    "llama4": Case("llama4_text", "llama4", {
        "head_dim": 32, "num_hidden_layers": 4, "intermediate_size": 64, "intermediate_size_mlp": 512,
        "num_local_experts": 4, "num_experts_per_tok": 1, "interleave_moe_layer_step": 2}),
    "dots1": Case("dots1", "dots1", DEEPSEEK_EXPERTS | {
        "head_dim": 32, "n_group": 1, "topk_group": 1, "sliding_window": None}),
    "minimax-m2": Case("minimax_m2", "minimax-m2", {
        "head_dim": 32, "num_local_experts": 4, "num_experts_per_tok": 2,
        "rope_parameters": {"rope_theta": 5000.0, "rope_type": "default", "partial_rotary_factor": 0.5}}),
    "ernie4_5-moe": Case("ernie4_5_moe", "ernie4_5-moe", {
        "moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 64, "moe_num_shared_experts": 2,
        "moe_layer_start_index": 1, "num_hidden_layers": 3}, tied=True),
    "lfm2moe": Case("lfm2_moe", "lfm2moe", EXPERTS | {
        "num_hidden_layers": 3, "layer_types": ["conv", FULL, "conv"], "num_dense_layers": 1}, tied=True),
    "nemotron_h": Case("nemotron_h", "nemotron_h", NEMOTRON | {
        "layers_block_type": ["linear_attention", "mlp", FULL, "mlp", "linear_attention"]}),
    "nemotron_h_moe": Case("nemotron_h", "nemotron_h_moe", NEMOTRON | DEEPSEEK_EXPERTS | {
        "layers_block_type": ["linear_attention", "moe", FULL, "moe"], "n_group": 1, "topk_group": 1,
        "n_shared_experts": 1, "moe_shared_expert_intermediate_size": 96}),
    "nemotron_h_moe, latent": Case("nemotron_h", "nemotron_h_moe", NEMOTRON | DEEPSEEK_EXPERTS | {
        "layers_block_type": ["linear_attention", "moe", FULL, "moe"], "n_group": 1, "topk_group": 1,
        "n_shared_experts": 1, "moe_shared_expert_intermediate_size": 96, "moe_latent_size": 64}),
    "exaone-moe": Case("exaone_moe", "exaone-moe", EXPERTS | {
        "head_dim": 32, "num_hidden_layers": 4, "sliding_window": 8, "sliding_window_pattern": 4,
        "num_shared_experts": 2}),
    "hunyuan-dense": Case("hunyuan_v1_dense", "hunyuan-dense", {"head_dim": 32}, tied=True),
    "hunyuan-moe": Case("hunyuan_v1_moe", "hunyuan-moe", {"head_dim": 32, "num_experts": 4, "moe_topk": [2, 2]}),
    "falcon": Case("falcon", "falcon", tied=True),
    "falcon, groups": Case("falcon", "falcon", {
        "num_kv_heads": 2, "new_decoder_architecture": True, "num_ln_in_parallel_attn": 1, "bias": True}),
    "mimo2": Case("mimo_v2_flash", "mimo2", {
        "head_dim": 48, "v_head_dim": 32, "num_hidden_layers": 3, "sliding_window": 9, "num_key_value_heads": 1,
        "layer_types": [FULL, FULL, SLIDING], "n_routed_experts": 8, "num_experts_per_tok": 3, "n_group": 4,
        "topk_group": 2, "moe_intermediate_size": 64, "attention_value_scale": 0.75, "rope_parameters": {
            kind: {"rope_theta": theta, "rope_type": "default", "partial_rotary_factor": 1 / 3 + 1e-9}
            for kind, theta in ((FULL, 5000.0), (SLIDING, 500.0))}}),
    "qwen2vl": Case("qwen2", "qwen2vl"),
    "qwen3vl": Case("qwen3", "qwen3vl", {"head_dim": 32}),
    "qwen3vlmoe": Case("qwen3_moe", "qwen3vlmoe", EXPERTS | {"head_dim": 32, "norm_topk_prob": True}),
    "laguna": Case("laguna", "laguna", EXPERTS | {
        "head_dim": 32, "num_hidden_layers": 5, "sliding_window": 8, "shared_expert_intermediate_size": 96,
        "layer_types": [FULL, SLIDING, SLIDING, SLIDING, FULL], "num_attention_heads_per_layer": [4, 6, 6, 6, 4],
        "moe_routed_scaling_factor": 2.5, "rope_parameters": {
            FULL: YARN | {"partial_rotary_factor": 0.5},
            SLIDING: {"rope_type": "default", "rope_theta": 1e3, "partial_rotary_factor": 1.0}}}),
    "laguna, other gates": Case("laguna", "laguna", EXPERTS | {
        "head_dim": 32, "shared_expert_intermediate_size": 96, "gating": "per-element", "layer_types": [FULL] * 2,
        "rope_parameters": {kind: {"rope_type": "default", "rope_theta": 5e3, "partial_rotary_factor": 1.0}
                            for kind in (FULL, SLIDING)}}),
    "step35": Case("step3p5", "step35", {
        "head_dim": 32, "num_hidden_layers": 4, "sliding_window": 8, "layer_types": [FULL, SLIDING, SLIDING, FULL],
        "num_sliding_attention_heads": 6, "mlp_layer_types": ["dense"] + ["sparse"] * 3, "n_routed_experts": 8,
        "num_experts_per_tok": 3, "moe_intermediate_size": 64, "share_expert_dim": 64, "moe_router_scaling_factor": 2.5,
        "swiglu_limits": [0.0, 0.0, 0.5, 0.75], "swiglu_limits_shared": [0.0, 0.0, 0.25, 0.5], "rope_parameters": {
            FULL: {"rope_type": "default", "rope_theta": 5e3, "partial_rotary_factor": 0.5},
            SLIDING: {"rope_type": "default", "rope_theta": 1e3, "partial_rotary_factor": 1.0}}}),
    "muse-glimmer": Case("muse_glimmer_text", "muse-glimmer", {
        "head_dim": 32, "num_hidden_layers": 4, "sliding_window": 8, "final_logit_softcapping": 20.0}),
    "phimoe": Case("phimoe", "phimoe", {
        "num_local_experts": 4, "num_experts_per_tok": 2, "attention_bias": True, "lm_head_bias": True,
        "sliding_window": 8}),
    "phimoe, long": Case("phimoe", "phimoe", {
        "num_local_experts": 4, "num_experts_per_tok": 2, "rope_parameters": {
            "rope_type": "longrope", "rope_theta": 5000.0, "original_max_position_embeddings": 32,
            "short_mscale": 1.243163121016122, "long_mscale": 1.243163121016122,
            "short_factor": [1.0 + i / 16 for i in range(32)], "long_factor": [1.0 + i / 2 for i in range(32)]}}),
    "cohere2moe": Case("cohere2_moe", "cohere2moe", {
        "head_dim": 32, "num_hidden_layers": 4, "sliding_window": 8, "logit_scale": 0.25, "num_experts": 4,
        "layer_types": [FULL, SLIDING, SLIDING, FULL], "mlp_layer_types": ["dense"] + ["sparse"] * 3,
        "prefix_dense_intermediate_size": 512, "intermediate_size": 64, "num_shared_experts": 2,
        "expert_selection_fn": "sigmoid"}, tied=True),
    "bailingmoe3": Case("bailing_hybrid", "bailingmoe3", LATENT | {
        "num_hidden_layers": 3, "layer_types": MIXED, "mlp_layer_types": ["dense", "sparse", "sparse"],
        "q_lora_rank": None, "num_local_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 64,
        "n_shared_experts": 2, "n_group": 4, "topk_group": 2, "head_dim": 64, "qk_nope_head_dim": 64}),
    "glm5-next": Case("glm5_next_text", "glm5-next", LATENT | DEEPSEEK_EXPERTS | INDEXER | {
        "num_hidden_layers": 4, "layer_types": [*MIXED[:2], FULL, MIXED[0]], "q_lora_rank": 64, "qk_rope_head_dim": 0,
        "mlp_layer_types": ["dense"] + ["sparse"] * 3, "indexer_types": ["full", "full", "shared", "full"],
        "n_group": 1, "topk_group": 1, "linear_num_heads": 4, "linear_head_dim": 32, "hc_mult": 3, "index_kpool": 4,
        "hc_sinkhorn_iters": 3, "swiglu_limit": 0.5}),
    "apertus": Case("apertus", "apertus"),
    "gpt2": Case("gpt2", "gpt2", tied=True),
    "gptneox": Case("gpt_neox", "gptneox", {"num_key_value_heads": 4}),
    "gptneox, layers after each other": Case("gpt_neox", "gptneox", {
        "num_key_value_heads": 4, "use_parallel_residual": False, "rope_parameters": {
            "rope_theta": 5000.0, "rope_type": "default", "partial_rotary_factor": 1.0}}),
    "starcoder": Case("gpt_bigcode", "starcoder", {"num_key_value_heads": 1}, tied=True),
    "mamba": Case("mamba", "mamba", {"state_size": 16, "time_step_rank": 32}, tied=True),
    "mamba, norms": Case("falcon_mamba", "mamba", {"state_size": 16, "time_step_rank": 32}),
    "jamba": Case("jamba", "jamba", {
        "num_hidden_layers": 4, "attn_layer_period": 4, "attn_layer_offset": 2, "mamba_dt_rank": 32,
        "num_experts": 4, "num_experts_per_tok": 2, "expert_layer_period": 2, "expert_layer_offset": 1}),
    "minicpm": Case("granite", "minicpm", GRANITE | {"attention_multiplier": 0.125}),
    "hy_v3": Case("hy_v3", "hy_v3", EXPERTS | {"head_dim": 32, "num_shared_experts": 2}),
    "hunyuan_vl": Case("hunyuan_v1_dense", "hunyuan_vl", {"head_dim": 32, "rope_parameters": {
        "rope_type": "dynamic", "rope_theta": 1e4, "alpha": 50.0, "factor": 1.0}}, tied=True),
    "bailingmoe2": Case("glm4_moe", "bailingmoe2", DEEPSEEK_EXPERTS | {
        "head_dim": 32, "use_qk_norm": True, "n_shared_experts": 1, "fuses_qkv": True,
        "rope_parameters": {"rope_theta": 5000.0, "rope_type": "default", "partial_rotary_factor": 0.5}}),
    "glm4, images": Case("glm4", "glm4", {"head_dim": 64, "attention_bias": True, "rope_parameters": {
        "rope_theta": 5000.0, "rope_type": "default", "partial_rotary_factor": 0.5, "mrope_section": [4, 6, 6]}}),
    "gemma4, experts": Case("gemma4_text", "gemma4", GEMMA4 | {
        "enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 64,
        "hidden_size_per_layer_input": 0}, tied=True),
}  # fmt: skip
SAME_NAMES = {
    "granite-swa": "granitehybrid",
    "mellum": "qwen3moe",
    "cohere2moe": "dots1",
    "deepseek32": "glm-dsa",
    "hy_v4": "glm-dsa",
    "glm5-next": "kimi-linear",
    "muse-glimmer": "gemma3",
    "laguna": "dots1",
    "hy_v3": "dots1",
    "bailingmoe3": "kimi-linear",
}  # of tensors, as another architecture; `gguf` may not have it yet
INTERLEAVED = {
    "llama", "granite", "smollm3", "arcee", "granitemoe", "granitehybrid", "mistral3", "olmo", "muse-glimmer",
    "minicpm", "granite-swa", "internlm2", "xverse", "baichuan",
}  # fmt: skip
NEMOTRONS = ("nemotron_h", "nemotron_h_moe")
WITHOUT_ANGLES = ("mamba", "mamba2", "jamba", "gpt2", "starcoder", "kimi-linear", "glm5-next", *NEMOTRONS)
MORE_IN_NORMS = {"gemma", "gemma2", "gemma3", "qwen3next", "qwen35", "qwen35moe", "nemotron", "step35"}
HALF_ROTATED = ("glm", "glm4", "phi", "stablelm", "nemotron")
PLAIN = (
    r"indexer\.(proj|k_norm)|_norm(_[12])?(\.weight)?$|ffn_gate_inp|exp_probs_b|\.ssm_(a$|d$|conv1d|norm)|shortconv\.conv"
    r"|hc_(attn_|ffn_)?(fn|base|scale)|indexer_compressor|altup_(correct|predict)_coef|position_embd"
    # always in float32
)


def tiny(case: Case) -> Any:
    """Two layers or more, with weights large enough to tell settings apart."""
    torch.manual_seed(0)
    rope = {"rope_theta": 10000.0 if case.name in MORE_IN_NORMS else 5000.0, "rope_type": "default"}
    if case.model_type in HALF_ROTATED:
        rope["partial_rotary_factor"] = 0.5
    rope = {} if case.name in ("gemma4", *WITHOUT_ANGLES) else {"rope_parameters": rope}
    settings = SIZES | {"tie_word_embeddings": case.tied} | rope | case.settings
    config = AutoConfig.for_model(case.model_type, **settings)
    list_causal_class(config)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    for name, weight in model.named_parameters():
        if "norm" in name or name.endswith("bias"):
            is_whole = name.endswith("weight") and case.name not in MORE_IN_NORMS
            weight.data = torch.rand_like(weight) + (0.5 if is_whole else -0.5)
        if name.endswith((".mlp.gate.weight", "mixer.gate.weight", "router.weight")):
            weight.data *= 8  # so that rounding to bfloat16 seldom chooses other experts
        if name == "model.embed_tokens.weight" and hasattr(config, "index_topk"):
            weight.data[config.pad_token_id] += 0.1  # of zeros, whose scores are all alike
        if name.endswith(
            ("A_log", "e_score_correction_bias", "sinks", "dt_bias", ".D", "output_scale", "alpha_p", "alpha_n")
        ):
            weight.data = torch.rand_like(weight)
    for name, scale in model.named_buffers():
        if name.endswith(("e_score_correction_bias", "expert_bias")):
            scale.copy_(torch.rand_like(scale) / 4)
        if name.endswith("layer_scalar"):
            scale.fill_(1.5)
    return model.eval()


@lru_cache(maxsize=128)
def _blocks_of(numbers: bytes, shape: tuple[int, ...], format: Q) -> tuple[np.ndarray, np.ndarray]:
    """The blocks of an array in float32, and their numbers; files with other settings have the same tensors."""
    blocks = quantize(np.frombuffer(numbers, np.float32).reshape(shape), format)
    return blocks, dequantize(blocks, format)


Tensors = dict[str, tuple[Q, list[np.ndarray]]]
"""The format and the blocks of each tensor of a file, several if it is a stack of weights."""


def converted(
    model: Any, case: Case, formats: Sequence[Q], names: Any = None, later: Mapping[str, torch.Tensor] | None = None
) -> Tensors:
    """A model's tensors in a file of it, see `write`; it gets the weights that these are."""
    config = own_config(model)
    names = names or tensor_names(case, config.num_hidden_layers)
    at, tensors = 0, {}
    stored = model.state_dict().keys()
    buffers = [(name, buffer) for name, buffer in model.named_buffers() if name in stored]
    for name, weight in [*model.named_parameters(), *buffers, *(later or {}).items()]:
        if ".act_fn." in name:
            continue  # settings, in files
        values = weight.detach().float().numpy()
        added = case.name in MORE_IN_NORMS and name.endswith("norm.weight") and "linear_attn" not in name
        heads = _heads(config, case, name)
        if heads:
            values = values.reshape(heads, 2, len(values) // heads // 2, -1).swapaxes(1, 2).reshape(values.shape)
        converted = convert(case.name, config, name, values + np.float32(added))
        targets = [_file_name(names, each) for each in converted.names]
        plain = any(re.search(PLAIN, target) for target in targets) or converted.arrays[0].ndim == 1
        known = tensors.get(targets[0])
        format = known[0] if known else Q.F32 if plain else formats[at % len(formats)]
        at += not plain and known is None
        arrays = [np.ascontiguousarray(array, np.float32) for array in converted.arrays]
        both = [_blocks_of(array.tobytes(), array.shape, format) for array in arrays]
        blocks = [block for block, _ in both]
        for target, block in zip(targets, blocks, strict=True):
            tensors.setdefault(target, (format, []))[1].append(block)
        made = converted.back([numbers for _, numbers in both]) - np.float32(added)
        if heads:
            made = made.reshape(heads, len(made) // heads // 2, 2, -1).swapaxes(1, 2)
        keeps = any(kept in name for kept in model._keep_in_fp32_modules_strict or ()) and name != "lm_head.weight"
        numbers = torch.from_numpy(np.ascontiguousarray(made)).reshape(weight.shape)
        weight.data = numbers if keeps else numbers.bfloat16()
    return tensors


def own_config(model: Any) -> Any:
    config = copy(model.config)
    config.allow_global_per_layer_attribute_access = True  # of what most layers of Gemma 4 have
    return config


def tensor_names(case: Case, layers: int) -> Any:
    file_names = SAME_NAMES.get(case.name, case.name)
    architecture = next(each for each, name in gguf.MODEL_ARCH_NAMES.items() if name == file_names)
    return gguf.get_tensor_name_map(architecture, layers)


def write(
    model: Any,
    case: Case,
    file: Path,
    formats: Sequence[Q],
    left_out: str = "",
    more: Any = None,
    pre: str = "smollm",
    later: Mapping[str, torch.Tensor] | None = None,
    tensors: Tensors | None = None,
) -> None:
    """Write a model, matrices in these formats by turns; it gets the weights that were written.

    Without the tensor `left_out`; `more` is called with the writer before anything is written. `later` are tensors of
    layers after its last one, "model.layers.2.eh_proj.weight"; they, too, get what was written. `tensors`: those of
    the model, where they have been `converted`.
    """
    config = own_config(model)
    out = gguf.GGUFWriter(file, case.name)
    _add_settings(out, config, case)
    add_vocabulary(out, pre)
    if case.name == "apertus":
        for name in ("alpha_p", "alpha_n", "beta", "eps"):
            numbers = [getattr(layer.mlp.act_fn, name).item() for layer in model.model.layers]
            getattr(out, f"add_xielu_{name}")(numbers)
    layers = config.num_hidden_layers
    num_later = len({name.split(".")[2] for name in later or ()})
    names = tensor_names(case, layers + num_later)
    if num_later:
        settings = out.kv_data[0]
        settings[f"{case.name}.block_count"].value = layers + num_later
        for key in ("attention.head_count_kv", "feed_forward_length"):
            if isinstance(by_layer := settings[f"{case.name}.{key}"].value, list):
                by_layer.extend([0] * num_later)
        out.add_nextn_predict_layers(num_later)
    parts_of = tensors if tensors is not None else converted(model, case, formats, names, later)
    for target, (format, parts) in parts_of.items():
        if target != left_out:
            join = np.concatenate if "attn_qkv" in target else np.stack
            block = parts[0] if len(parts) == 1 else join(parts)
            out.add_tensor(target, block, raw_dtype=None if format in (Q.F32, Q.F16) else format)
    _add_angles(out, config, case)
    if more is not None:
        more(out)
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()


def _heads(config: Any, case: Case, name: str) -> int:
    """How many heads have rows that are interleaved."""
    count = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads} if "_attn." in name else {}
    return count.get(name.split(".")[-2], 0) if case.name in INTERLEAVED else 0


def _file_name(names: Any, name: str) -> str:
    direct = {"router.scale": "ffn_gate_inp.scale", "router.per_expert_scale": "ffn_down_exps.scale"}
    nextn = ("eh_proj", "enorm", "hnorm", "embed_tokens", "shared_head.norm", "shared_head.head")
    direct |= {key: f"nextn.{key.replace('.', '_')}.weight" for key in nextn}
    direct |= {"post_attention_norm": "post_attention_norm.weight", "self_attn.sinks": "attn_sinks.weight"}
    direct |= {
        f"shared_mlp.{ours}_linear": f"ffn_{key}_shexp.weight" for ours, key in (("input", "up"), ("output", "down"))
    }
    direct |= {f"self_attn.{key}_proj": "attn_gate.weight" for key in ("g", "gate")}
    if hyper := re.fullmatch(r"model\.(layers\.(\d+)\.(attn|ffn)_hc\.|hc_head\.hc_)(fn|base|scale)(\.weight)?", name):
        _, layer, kind, part, _ = hyper.groups()
        return f"output_hc_{part}.weight" if layer is None else f"blk.{layer}.hc_{kind}_{part}.weight"
    if pooled := re.fullmatch(
        r"model\.layers\.(\d+)\.self_attn\.indexer\.index_kpool_compress_(gate|ape)(\.weight)?", name
    ):
        return f"blk.{pooled[1]}.indexer_compressor_{pooled[2]}.weight"
    indexer = {"wq_b": "attn_q_b", "wk": "attn_k", "k_norm": "k_norm", "weights_proj": "proj"}
    if (parts := re.fullmatch(r"model\.layers\.(\d+)\.self_attn\.indexer\.(\w+)\.(\w+)", name)) and parts[2] in indexer:
        return f"blk.{parts[1]}.indexer.{indexer[parts[2]]}.{parts[3]}"
    for key, found in direct.items():
        if name.startswith("model.layers.") and name.removesuffix(".weight").endswith(f".{key}"):
            return f"blk.{name.split('.')[2]}.{found}"
    name = re.sub(r"(altup_\w*projections)\.\d", r"\1", name.replace(".mixer.experts.", ".mlp.experts."))
    target = names.get_name(name, (".weight", ".bias"))
    target = target or names.get_name(name.replace("model.", "backbone.", 1), (".weight", ".bias"))
    target = target or names.get_name(
        name.replace("block_sparse_moe.experts", "mlp.experts").replace("feed_forward.experts", "mlp.experts"),
        (".weight", ".bias"),
    )
    assert target is not None, name
    return target


def _add_settings(out: gguf.GGUFWriter, config: Any, case: Case) -> None:
    out.add_block_count(config.num_hidden_layers)
    out.add_context_length(getattr(config, "max_position_embeddings", 1 << 20))
    out.add_embedding_length(config.hidden_size)
    if getattr(config, "rms_norm_eps", None):
        out.add_layer_norm_rms_eps(config.rms_norm_eps)
    elif case.name in ("lfm2", "lfm2moe"):
        out.add_layer_norm_rms_eps(config.norm_eps)
    elif case.name in ("mamba", "mamba2", *NEMOTRONS):
        out.add_layer_norm_rms_eps(config.layer_norm_epsilon)
    elif case.name == "olmo":
        out.add_layer_norm_eps(1e-5)
        if config.clip_qkv is not None:
            out.add_clamp_kqv(config.clip_qkv)
    else:
        names = "layer_norm_eps", "norm_epsilon", "norm_eps", "layer_norm_epsilon"
        out.add_layer_norm_eps(next(getattr(config, name) for name in names if hasattr(config, name)))
    if case.name == "stablelm":
        out.add_parallel_residual(True)  # also where it is not so
    add_states(out, config, case.name)
    if case.name in ("mamba", "mamba2"):
        out.add_feed_forward_length(0)
        out.add_head_count(0)
        return
    out.add_feed_forward_length(widths_of_mlps(config, case.name))
    out.add_head_count(config.num_attention_heads)
    out.add_head_count_kv(heads_of_keys(config, case.name))
    add_experts(out, config, case.name)
    if "head_dim" in case.settings and case.name not in ("chatglm", "bailingmoe3"):
        out.add_key_length(config.head_dim)
        out.add_value_length(config.head_dim)
    if case.name not in ("gemma", "gemma2", *WITHOUT_ANGLES):
        _add_rope(out, config.rope_parameters)
    if window := getattr(config, "sliding_window", None):
        out.add_sliding_window(window - (case.name == "mimo2"))  # which counts the tokens before
    elif case.name == "phi3":
        out.add_sliding_window(0)
    head_dim = config.hidden_size // config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or head_dim
    partial = "phi3", "glm4moe", "qwen3next", "qwen35", "qwen35moe", "minimax-m2", "mimo2", "gptneox"
    partial += ("bailingmoe2",)
    if case.name in partial or case.model_type in HALF_ROTATED:
        full = config.rope_parameters.get(FULL, config.rope_parameters)
        out.add_rope_dimension_count(int(head_dim * full["partial_rotary_factor"]))
    elif case.name in ("granite", "smollm3", "cohere2"):
        out.add_rope_dimension_count(head_dim)
    if case.name == "gemma2":
        out.add_attn_logit_softcapping(config.attn_logit_softcapping)
    if getattr(config, "final_logit_softcapping", None):
        out.add_final_logit_softcapping(config.final_logit_softcapping)
    if case.name == "gptneox":
        out.add_parallel_residual(config.use_parallel_residual)
    if alpha := getattr(config, "rope_parameters", {}).get("alpha"):
        out.add_rope_scaling_alpha(alpha)
    if sections := getattr(config, "rope_parameters", {}).get("mrope_section"):
        out.add_rope_dimension_sections([*sections, 0])
    if case.name.startswith("granite"):
        out.add_attention_scale(config.attention_multiplier)
    if case.name.startswith("granite") or case.name == "minicpm":
        out.add_embedding_scale(config.embedding_multiplier)
        out.add_residual_scale(config.residual_multiplier)
        out.add_logit_scale(config.logits_scaling)
    if case.model_type in ("cohere", "cohere2", "cohere2_moe"):
        out.add_logit_scale(config.logit_scale)
        out.add_rope_scaling_type(RopeScalingType.NONE)
    if case.model_type in ("olmo3", "exaone4", "exaone_moe", "mellum", "cohere2_moe"):
        out.add_sliding_window_pattern([kind == SLIDING for kind in config.layer_types])
    if case.name == "mimo2":
        out.add_sliding_window_pattern([int(kind == SLIDING) for kind in config.layer_types])
        out.add_value_length(config.v_head_dim)
        out.add_float32("mimo2.attention.value_scale", config.attention_value_scale)
    if case.name == "laguna":
        out.add_head_count(config.num_attention_heads_per_layer)
        if SLIDING not in config.layer_types:
            del out.kv_data[0]["laguna.attention.sliding_window"]
        for kind, add in ((FULL, out.add_rope_dimension_count), (SLIDING, out.add_rope_dimension_count_swa)):
            add(int(config.head_dim * config.rope_parameters[kind]["partial_rotary_factor"]))
    if case.name in ("qwen2vl", "qwen3vl", "qwen3vlmoe"):
        out.add_rope_dimension_sections([16, 8, 8, 0])  # of positions in pictures
        out.add_num_deepstack_layers(3)
    if case.name == "granite-swa":
        out.add_sliding_window_pattern([kind == SLIDING for kind in config.layer_types])
        out.add_array("granite-swa.attention.rope_pattern", [bool(theta) for theta in config.layer_rope_theta])
    if case.name == "step35":
        slides = [kind == SLIDING for kind in config.layer_types]
        out.add_sliding_window_pattern(slides)
        counts = config.num_attention_heads, config.num_sliding_attention_heads
        out.add_head_count([counts[slide] for slide in slides])
        out.add_head_count_kv([config.num_key_value_heads] * len(slides))
        out.add_rope_dimension_count(config.head_dim)  # which readers halve for the layers without a window
        out.add_swiglu_clamp_exp(config.swiglu_limits)
        out.add_swiglu_clamp_shexp(config.swiglu_limits_shared)
    if case.name == "muse-glimmer":
        out.add_logit_scale(config.output_multiplier)
        out.add_sliding_window_pattern([kind == SLIDING for kind in config.layer_types])
        for layer in range(config.num_hidden_layers):  # the factor of queries, which norms without weights have
            for name, factor in (("q", config.qk_scale_factor), ("k", 1.0)):
                out.add_tensor(f"blk.{layer}.attn_{name}_norm.weight", np.full(config.head_dim, factor, np.float32))
    if case.name == "gemma4":
        _add_gemma4(out, config, case)
    if case.name == "gemma3n":
        _add_gemma3n(out, config)


def _add_gemma4(out: gguf.GGUFWriter, config: Any, case: Case) -> None:
    slides = [kind == SLIDING for kind in config.layer_types]
    dim, shared = case.settings["global_head_dim"], config.num_kv_shared_layers
    out.add_shared_kv_layers(shared)
    out.add_embedding_length_per_layer_input(config.hidden_size_per_layer_input)
    out.add_sliding_window_pattern(slides)
    for add, value in ((out.add_key_length, dim), (out.add_value_length, dim)):
        add(value)
    out.add_key_length_swa(config.head_dim)
    out.add_value_length_swa(config.head_dim)
    if config.use_double_wide_mlp:
        last = config.num_hidden_layers - shared
        size = config.intermediate_size
        out.add_feed_forward_length([size * (1 + (i >= last)) for i in range(config.num_hidden_layers)])
    if heads := case.settings.get("num_global_key_value_heads"):
        out.add_head_count_kv([config.num_key_value_heads if slide else heads for slide in slides])
    out.add_rope_dimension_count(dim)
    out.add_rope_dimension_count_swa(config.head_dim)


def _add_gemma3n(out: gguf.GGUFWriter, config: Any) -> None:
    out.add_altup_active_idx(config.altup_active_idx)
    out.add_altup_num_inputs(config.altup_num_inputs)
    out.add_embedding_length_per_layer_input(config.hidden_size_per_layer_input)
    out.add_shared_kv_layers(config.num_kv_shared_layers)
    out.add_sliding_window_pattern([kind == SLIDING for kind in config.layer_types])
    shares, normal = torch.tensor(config.activation_sparsity_pattern), torch.distributions.Normal(0, 1)
    out.add_activation_sparsity_scale(normal.icdf(shares).tolist())
    out.add_feed_forward_length(config.intermediate_size)  # of each layer
    keys = config.num_key_value_heads * config.head_dim
    for layer in range(config.num_hidden_layers - config.num_kv_shared_layers, config.num_hidden_layers):
        for name in ("attn_k", "attn_v"):  # checkpoints have them for layers that share those of others, too
            out.add_tensor(f"blk.{layer}.{name}.weight", np.ones((keys, config.hidden_size), np.float32))
        out.add_tensor(f"blk.{layer}.attn_k_norm.weight", np.ones(config.head_dim, np.float32))


def _add_rope(out: gguf.GGUFWriter, parameters: dict[str, Any]) -> None:
    full = parameters.get(FULL, parameters)
    if full["rope_type"] in ("linear", "yarn"):
        out.add_rope_scaling_type(RopeScalingType(full["rope_type"]))
        out.add_rope_scaling_factor(full["factor"])
    if full["rope_type"] == "yarn":
        out.add_rope_scaling_orig_ctx_len(full["original_max_position_embeddings"])
        if "attention_factor" in full:
            out.add_rope_scaling_yarn_attn_factor(full["attention_factor"])
        out.add_rope_scaling_yarn_beta_fast(full["beta_fast"])
        out.add_rope_scaling_yarn_beta_slow(full["beta_slow"])
    out.add_rope_freq_base(full["rope_theta"])
    if SLIDING in parameters:
        out.add_rope_freq_base_swa(parameters[SLIDING]["rope_theta"])


def _add_angles(out: gguf.GGUFWriter, config: Any, case: Case) -> None:
    """Tensors by which frequencies are divided."""
    rope = getattr(config, "rope_parameters", {})
    if rope.get("rope_type") == "longrope":
        original = rope["original_max_position_embeddings"]
        scale = config.max_position_embeddings / original
        out.add_rope_scaling_orig_ctx_len(original)
        out.add_rope_scaling_type(RopeScalingType.LONGROPE)
        out.add_rope_scaling_attn_factors(math.sqrt(1 + math.log(scale) / math.log(original)))
        for kind in ("long", "short"):
            out.add_tensor(f"rope_factors_{kind}.weight", np.array(rope[f"{kind}_factor"], np.float32))
    if case.name == "gemma4":
        dim = case.settings["global_head_dim"]
        rotated = int(dim * rope[FULL]["partial_rotary_factor"] / 2)
        divisors = [1.0] * rotated + [1e30] * (dim // 2 - rotated)
        out.add_tensor("rope_freqs.weight", np.array(divisors, np.float32))


def add_vocabulary(out: gguf.GGUFWriter, pre: str = "smollm") -> None:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = ["<s>", "</s>", *alphabet, "Ġt", *(f"<unused{i}>" for i in range(VOCAB - 3 - len(alphabet)))]
    out.add_tokenizer_model("gpt2")
    out.add_tokenizer_pre(pre)
    out.add_token_list(tokens)
    out.add_token_types([3, 3] + [1] * (VOCAB - 2))
    out.add_token_merges(["Ġ t"])
    out.add_bos_token_id(0)
    out.add_eos_token_id(1)
