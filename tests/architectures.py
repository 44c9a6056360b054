"""Make tiny random models of the architectures that a causal network must serve, and ask them."""

from copy import deepcopy
from importlib import import_module

import numpy as np
import pytest
import torch
import transformers
from transformers import PretrainedConfig, PreTrainedModel, set_seed

from saltus.core.canvas import continuation
from saltus.core.forward import ForwardInputs
from saltus.loading.model_folders import OWN_CLASSES
from saltus.models import causal
from saltus.models.causal import CausalNetwork
from saltus.models.cuda.fixed_shape_calls import FixedShapeSettings
from saltus.models.cuda.gpu_decoder import GPUDecoder

VOCAB = 96
LLAMA_LIKE = {"hidden_size": 48, "intermediate_size": 72, "num_attention_heads": 6, "num_key_value_heads": 2}
WINDOW = {"sliding_window": 12}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 40}
DEEPSEEK_EXPERTS = {
    "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 40,
    "n_shared_experts": 1,
}  # fmt: skip
ALTERNATING = {"layer_types": ["sliding_attention", "full_attention"]}

LATENT_LIKE = {
    **LLAMA_LIKE, **DEEPSEEK_EXPERTS, "num_key_value_heads": 6, "q_lora_rank": 16, "kv_lora_rank": 16,
    "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 12,
}  # fmt: skip
INDEXER = {"index_topk": 8, "index_n_heads": 14, "index_head_dim": 12}  # which chooses fewer keys than texts have

SHARED_KEYS = {  # the last two layers attend to the keys of the first two
    **LLAMA_LIKE, **WINDOW, "head_dim": 16, "num_hidden_layers": 4, "num_kv_shared_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"] * 2, "vocab_size_per_layer_input": VOCAB,
    "hidden_size_per_layer_input": 8,
}  # fmt: skip

ARCHITECTURES: dict[str, dict] = {  # windows are shorter than the texts of the tests
    "Llama": LLAMA_LIKE,
    "Qwen2": LLAMA_LIKE,
    "Qwen3": {**LLAMA_LIKE, "head_dim": 20},
    "Mistral": {**LLAMA_LIKE, **WINDOW},
    "Gemma": {**LLAMA_LIKE, "head_dim": 16},
    "Gemma2": {**LLAMA_LIKE, **WINDOW, **ALTERNATING, "head_dim": 16, "attn_logit_softcapping": 5.0},
    "Gemma3": {**LLAMA_LIKE, **WINDOW, **ALTERNATING, "head_dim": 16},
    "Gemma4": {  # layers with heads of different sizes and numbers
        **LLAMA_LIKE, **WINDOW, **ALTERNATING, "head_dim": 16, "global_head_dim": 40, "num_global_key_value_heads": 1,
        "attention_k_eq_v": True, "initializer_range": 0.1, "vocab_size_per_layer_input": VOCAB,
        "hidden_size_per_layer_input": 8,
    },
    "Gemma4 of unlike heads": {
        **LLAMA_LIKE, **WINDOW, **ALTERNATING, "head_dim": 16, "global_head_dim": 512, "initializer_range": 0.05,
        "vocab_size_per_layer_input": VOCAB, "hidden_size_per_layer_input": 8,
    },
    "Gemma4 of shared keys": {**SHARED_KEYS, "global_head_dim": 40, "initializer_range": 0.1},
    "Gemma4Unified": {
        **LLAMA_LIKE, **WINDOW, **ALTERNATING, "head_dim": 16, "global_head_dim": 40, "num_global_key_value_heads": 1,
        "attention_k_eq_v": True, "initializer_range": 0.1, "final_logit_softcapping": 5.0,
    },
    "Gemma3n": {**SHARED_KEYS, "laurel_rank": 8, "altup_num_inputs": 2},
    "GptOss": {**LLAMA_LIKE, **WINDOW, **ALTERNATING, "head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2},
    "GraniteSWA": {**LLAMA_LIKE, **WINDOW, **ALTERNATING, "attention_multiplier": 0.35, "initializer_range": 0.1},
    "GraniteMoeSWA": {
        **LLAMA_LIKE, **WINDOW, "num_hidden_layers": 3, "attention_multiplier": 0.35, "initializer_range": 0.1,
        "layer_types": ["full_attention", "sliding_attention", "full_attention"], "layer_rope_theta": [1e4, 0, 1e3],
        "num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 40,
    },
    "MiMoV2Flash": {  # the second layer has sinks, a window and twice the key heads; values are shorter than keys
        **LLAMA_LIKE, **WINDOW, "num_key_value_heads": 1, "layer_types": ["full_attention", "sliding_attention"],
        "head_dim": 16, "v_head_dim": 12, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 40,
        "rope_parameters": {kind: {"rope_type": "default", "rope_theta": theta, "partial_rotary_factor": 0.5}
                            for kind, theta in (("full_attention", 1e4), ("sliding_attention", 1e2))},
    },
    "Phimoe": {
        **LLAMA_LIKE, "num_local_experts": 4, "num_experts_per_tok": 2, "router_jitter_noise": 0.05,
        "attention_bias": True, "lm_head_bias": True,
    },
    "Phimoe with long angles": {
        **LLAMA_LIKE, "num_local_experts": 4, "num_experts_per_tok": 2, "initializer_range": 0.1, "rope_parameters": {
            "rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 16,
            "short_factor": [1.0, 1.5, 2.0, 3.0], "long_factor": [2.0] * 4, "short_mscale": 1.2, "long_mscale": 1.2,
        },
    },
    "Cohere2Moe": {
        **LLAMA_LIKE, **WINDOW, **ALTERNATING, "head_dim": 16, "num_experts": 4, "num_shared_experts": 2,
        "logit_scale": 0.25,
    },
    "Cohere2Moe with a dense layer": {
        **LLAMA_LIKE, **WINDOW, "num_hidden_layers": 3, "head_dim": 8, "num_experts": 4,
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        "mlp_layer_types": ["dense", "sparse", "sparse"], "expert_selection_fn": "sigmoid", "rms_norm_eps": 1e-6,
        "prefix_dense_intermediate_size": 40, "shared_expert_combination_strategy": "sum", "num_shared_experts": 1,
        "attention_bias": True, "norm_topk_prob": False,
    },
    "Kolibri1": {
        **{key: LLAMA_LIKE[key] for key in ("hidden_size", "num_attention_heads", "num_key_value_heads")}, **WINDOW,
        **ALTERNATING, **EXPERTS, "head_dim": 16, "shared_expert_intermediate_size": 56,
    },
    "AXK1": {
        **LLAMA_LIKE, "num_key_value_heads": 6, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8, "v_head_dim": 12, **DEEPSEEK_EXPERTS, "mlp_layer_types": ["dense", "sparse"],
    },
    "Falcon": {"hidden_size": 48, "num_attention_heads": 6, "ffn_hidden_size": 72},
    "Falcon of groups": {
        "hidden_size": 48, "num_attention_heads": 6, "num_kv_heads": 2, "ffn_hidden_size": 72, "bias": True,
        "new_decoder_architecture": True,
    },
    "Falcon of layers after each other": {
        "hidden_size": 48, "num_attention_heads": 6, "ffn_hidden_size": 72, "multi_query": False,
        "parallel_attn": False, "bias": True,
    },
    "LongcatFlash": {
        "hidden_size": 48, "ffn_hidden_size": 72, "num_attention_heads": 6, "num_hidden_layers": 4,
        "q_lora_rank": 16,
        "kv_lora_rank": 24, "qk_rope_head_dim": 8, "head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 12,
        "moe_topk": 3, "n_routed_experts": 4, "zero_expert_num": 3, "expert_ffn_hidden_size": 40,
        "routed_scaling_factor": 2.0,
    },
    "MuseGlimmer": {  # the second layer sees all and is not rotated
        **LLAMA_LIKE, **WINDOW, **ALTERNATING, "head_dim": 8, "layer_rope_theta": [5e5, 0], "qk_scale_factor": 1.5,
        "output_multiplier": 0.5,
        "final_logit_softcapping": 5.0,
    },
    "Persimmon": {"hidden_size": 48, "intermediate_size": 72, "num_attention_heads": 6},
    "Llama4": {  # the first and the last layer attend by chunks, the second one without rotary embeddings
        **LLAMA_LIKE, "num_hidden_layers": 3, "head_dim": 20, "attention_chunk_size": 12, "no_rope_layers": [1, 0, 1],
        "floor_scale": 4, "attn_scale": 0.5, "intermediate_size_mlp": 72, "num_local_experts": 4,
        "interleave_moe_layer_step": 2,
    },
    "Llama4 without experts": {
        **LLAMA_LIKE, "num_hidden_layers": 2, "head_dim": 8, "attention_chunk_size": 12, "no_rope_layers": [1, 0],
        "floor_scale": 4, "attn_scale": 0.5, "intermediate_size_mlp": 72, "moe_layers": [], "num_local_experts": 1,
    },
    "GPT2": {"n_embd": 48, "n_head": 6, "n_layer": 2, "n_positions": 512},
    "BioGpt": {"hidden_size": 48, "intermediate_size": 72, "num_attention_heads": 6},
    "GPTJ": {"n_embd": 48, "n_head": 6, "n_layer": 2, "n_positions": 512, "rotary_dim": 4},
    "GPTNeo": {
        "hidden_size": 48, "intermediate_size": 72, "num_heads": 6, "num_layers": 2, "window_size": 12,
        "attention_types": [[["global", "local"], 1]], "initializer_range": 0.1,  # scores are not scaled
    },
    "GPTNeoX": {"hidden_size": 48, "intermediate_size": 72, "num_attention_heads": 6},
    "OPT without weights of norms": {
        "hidden_size": 48, "ffn_dim": 72, "num_attention_heads": 6, "word_embed_proj_dim": 48, "enable_bias": False,
        "layer_norm_elementwise_affine": False, "activation_function": "gelu",
    },
    "GPTNeoX of layers after each other": {
        "hidden_size": 48, "intermediate_size": 72, "num_attention_heads": 6, "use_parallel_residual": False,
        "attention_bias": False,
    },
    "OPT": {"hidden_size": 48, "ffn_dim": 72, "num_attention_heads": 6, "word_embed_proj_dim": 48},
    "Phi": {"hidden_size": 48, "intermediate_size": 72, "num_attention_heads": 6},
    "Exaone": {**LLAMA_LIKE, "head_dim": 8},
    "Nemotron": {**LLAMA_LIKE, "head_dim": 16},
    "StableLm of parallel layers": {**LLAMA_LIKE, "use_parallel_residual": True, "use_qkv_bias": True},
    "Afmoe": {
        **LLAMA_LIKE, **WINDOW, **ALTERNATING, **EXPERTS, "head_dim": 16, "num_dense_layers": 1,
        "num_shared_experts": 1, "route_scale": 1.5, "mup_enabled": True,
    },
    "SolarOpen": {**LLAMA_LIKE, **DEEPSEEK_EXPERTS, "head_dim": 16},
    "VaultGemma": {**LLAMA_LIKE, **WINDOW, **ALTERNATING, "head_dim": 16, "attn_logit_softcapping": 5.0},
    "HyperCLOVAX": {
        **LLAMA_LIKE, "residual_multiplier": 0.3, "embedding_multiplier": 3.0, "logits_scaling": 0.5,
        "attention_multiplier": 0.2,
    },
    "FlexOlmo": {**LLAMA_LIKE, "num_experts": 4, "num_experts_per_tok": 2},
    "SarvamMoE": {**LLAMA_LIKE, **DEEPSEEK_EXPERTS, "head_dim": 16, "first_k_dense_replace": 1},
    "Flint": {
        **LLAMA_LIKE, **WINDOW, **ALTERNATING, **EXPERTS, "head_dim": 16, "mlp_only_layers": [0],
        "shared_expert_intermediate_size": 40,
    },
    "Laguna": {
        **LLAMA_LIKE, **WINDOW, **ALTERNATING, **EXPERTS, "head_dim": 16, "num_attention_heads_per_layer": [6, 4],
        "shared_expert_intermediate_size": 40, "moe_routed_scaling_factor": 1.5,
    },
    "Step3p7": {
        **LLAMA_LIKE, **WINDOW, **ALTERNATING, "head_dim": 16, "num_sliding_attention_heads": 8,
        "mlp_layer_types": ["dense", "sparse"], "n_routed_experts": 4, "num_experts_per_tok": 2,
        "moe_intermediate_size": 40, "share_expert_dim": 40, "moe_router_scaling_factor": 1.5,
        "swiglu_limits": [0.0, 0.5], "swiglu_limits_shared": [1.0, 0.25],
        "rope_theta": [1e2, 1e4], "partial_rotary_factors": [1.0, 0.5],
    },
    "Laguna with other gates": {
        **LLAMA_LIKE, **WINDOW, **ALTERNATING, **EXPERTS, "head_dim": 16, "gating": "per-element",
        "shared_expert_intermediate_size": 40,
    },
    "Apertus": {**LLAMA_LIKE, "head_dim": 8},
    "Apertus1p5Text": LLAMA_LIKE,
    "HYV3": {**LLAMA_LIKE, **EXPERTS, "head_dim": 16, "num_shared_experts": 1},
    "GraniteMoeShared": {
        **LLAMA_LIKE, "num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 40,
        "residual_multiplier": 0.3, "embedding_multiplier": 3.0, "logits_scaling": 2.0, "attention_multiplier": 0.2,
    },
    "Phi3": {**LLAMA_LIKE, **WINDOW},
    "Phi4Multimodal": {
        **LLAMA_LIKE, "vision_config": {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2},
        "audio_config": {"hidden_size": 32, "num_blocks": 1, "num_attention_heads": 2, "nemo_conv_channels": 8},
    },
    "Mllama": {**LLAMA_LIKE, "num_hidden_layers": 3, "cross_attention_layers": [1]},
    "Granite": {
        **LLAMA_LIKE, "residual_multiplier": 0.3, "embedding_multiplier": 3.0, "logits_scaling": 2.0,
        "attention_multiplier": 0.2,
    },
    "Glm": {**LLAMA_LIKE, "head_dim": 16},
    "Glm4": {**LLAMA_LIKE, "head_dim": 16},
    "Cohere": LLAMA_LIKE,
    "Cohere2": {**LLAMA_LIKE, **WINDOW, **ALTERNATING},
    "CohereCompass": {
        **LLAMA_LIKE, **WINDOW, **ALTERNATING, "logit_scale": 0.25, "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]},
            "full_attention": None,
        },
    },
    "Olmo": LLAMA_LIKE,
    "NanoChat": {**LLAMA_LIKE, "final_logit_softcapping": 5.0},
    "Jais2": {**LLAMA_LIKE, "head_dim": 8},
    "Olmo2": LLAMA_LIKE,
    "Olmo3": {**LLAMA_LIKE, **WINDOW, **ALTERNATING},
    "StableLm": LLAMA_LIKE,
    "Arcee": {**LLAMA_LIKE, "head_dim": 8},
    "Ernie4_5": {**LLAMA_LIKE, "head_dim": 8},
    "Exaone4": {**LLAMA_LIKE, **WINDOW, **ALTERNATING, "sliding_window_pattern": 2},
    "Ministral": {**LLAMA_LIKE, **WINDOW, **ALTERNATING, "head_dim": 8},
    "Ministral3": {
        **LLAMA_LIKE, "head_dim": 8, "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16,
            "llama_4_scaling_beta": 0.1,
        },
    },
    "SeedOss": {**LLAMA_LIKE, "head_dim": 8},
    "SmolLM3": {**LLAMA_LIKE, "no_rope_layers": [1, 0]},
    "Starcoder2": {**LLAMA_LIKE, **WINDOW},
    "GPTBigCode": {"n_embd": 48, "n_head": 6, "n_layer": 2, "n_positions": 512},
    "DeepseekV2": {
        **LLAMA_LIKE, "num_key_value_heads": 6, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8, "v_head_dim": 12, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1,
        "topk_group": 1, "moe_intermediate_size": 40, "first_k_dense_replace": 1,
    },
    "DeepseekV3": {
        **LLAMA_LIKE, "num_key_value_heads": 6, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8, "v_head_dim": 12, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1,
        "topk_group": 1, "moe_intermediate_size": 40, "first_k_dense_replace": 1,
    },
    "DeepseekV32": {**LATENT_LIKE, **INDEXER, "mlp_layer_types": ["dense", "sparse"]},
    "GlmMoeDsa": {
        **LATENT_LIKE, **INDEXER, "num_hidden_layers": 3, "mlp_layer_types": ["dense", "dense", "sparse"],
        "indexer_types": ["full", "shared", "full"],
    },
    "HYV4": {
        **LATENT_LIKE, **INDEXER, "num_hidden_layers": 3, "mlp_layer_types": ["dense", "sparse", "sparse"],
        "indexer_types": ["full", "shared", "full"], "hc_mult": 3, "hc_magnitude": 1.5, "swiglu_limit": 0.5,
    },
    "MistralLarge4": {
        **{name: size for name, size in LATENT_LIKE.items() if name != "q_lora_rank"}, **INDEXER, "n_group": 2,
        "num_hidden_layers": 6, "mlp_layer_types": ["dense"] * 4 + ["sparse"] * 2, "no_rope_layers": [1, 0] * 3,
        "kv_source_layers": [0, 1, 0, 1, 0, 5],
        "indexer_types": ["full", "shared", "shared", "shared", "full", "shared"], "final_logit_softcapping": 5.0,
    },
    "Mistral4": {
        **LLAMA_LIKE, "num_key_value_heads": 6, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 12, "v_head_dim": 12, "n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 4,
        "topk_group": 2, "moe_intermediate_size": 40, "first_k_dense_replace": 1, "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16,
            "llama_4_scaling_beta": 0.1, "mscale": 1.0, "mscale_all_dim": 1.0,
        },
    },
    "Glm4MoeLite": {
        **LLAMA_LIKE, "num_key_value_heads": 6, "q_lora_rank": None, "kv_lora_rank": 16, "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8, "v_head_dim": 12, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1,
        "topk_group": 1, "moe_intermediate_size": 40, "mlp_layer_types": ["dense", "sparse"],
    },
    "MiniCPM3": {
        **LLAMA_LIKE, "num_key_value_heads": 6, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 12, "v_head_dim": 8, "scale_emb": 3, "scale_depth": 0.6, "dim_model_base": 20,
    },
    "Mixtral": {**LLAMA_LIKE, "num_local_experts": 4, "num_experts_per_tok": 2},
    "Qwen2Moe": {
        **LLAMA_LIKE, **EXPERTS, **WINDOW, **ALTERNATING, "use_sliding_window": True, "max_window_layers": 1,
        "shared_expert_intermediate_size": 40,
    },
    "Qwen3Moe": {**LLAMA_LIKE, **EXPERTS, "head_dim": 16, "mlp_only_layers": [0], "norm_topk_prob": True},
    "Mellum": {
        **LLAMA_LIKE, **EXPERTS, **WINDOW, **ALTERNATING, "head_dim": 16, "mlp_layer_types": ["dense", "sparse"],
    },
    "Glm4Moe": {
        **LLAMA_LIKE, "head_dim": 16, "use_qk_norm": True, "n_routed_experts": 8, "num_experts_per_tok": 3,
        "n_group": 4, "topk_group": 2, "moe_intermediate_size": 40, "first_k_dense_replace": 1, "attention_bias": True,
    },
    "GraniteMoe": {
        **LLAMA_LIKE, "num_local_experts": 4, "num_experts_per_tok": 2, "residual_multiplier": 0.3,
        "embedding_multiplier": 3.0, "logits_scaling": 2.0, "attention_multiplier": 0.2,
    },
    "Olmoe": {**LLAMA_LIKE, "num_experts": 4, "num_experts_per_tok": 2},
    "Dots1": {
        **LLAMA_LIKE, **WINDOW, **ALTERNATING, **DEEPSEEK_EXPERTS, "head_dim": 16, "first_k_dense_replace": 1,
    },
    "ExaoneMoe": {
        **LLAMA_LIKE, **WINDOW, **ALTERNATING, **EXPERTS, "head_dim": 16, "mlp_layer_types": ["dense", "sparse"],
    },
    "MiniMaxM2": {
        **LLAMA_LIKE, "head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
    },
    "Ernie4_5_Moe": {
        **LLAMA_LIKE, "moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 40, "moe_num_shared_experts": 1,
        "moe_layer_start_index": 1, "use_bias": True,
    },
    "HunYuanDenseV1": {
        **LLAMA_LIKE, "head_dim": 16,
        "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "alpha": 50.0, "factor": 1.0},
    },
    "HunYuanMoEV1": {**LLAMA_LIKE, "head_dim": 16, "num_experts": 4, "moe_topk": [1, 2]},
    "Helium": {**LLAMA_LIKE, "head_dim": 8},
    "Cwm": {**LLAMA_LIKE, **WINDOW, **ALTERNATING, "head_dim": 8},
    "InternLM3": {**LLAMA_LIKE, "head_dim": 8, "attention_bias": True, "mlp_bias": True},
    "Youtu": {
        **LLAMA_LIKE, "num_key_value_heads": 6, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8, "v_head_dim": 12,
    },
}  # fmt: skip

MIXERS = {"num_hidden_layers": 3, "layer_types": ["linear_attention", "full_attention", "linear_attention"]}
DELTA_RULE = {
    **LLAMA_LIKE, **MIXERS, "head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 10, "linear_value_head_dim": 36,
}  # fmt: skip
SHARED_EXPERT = {**EXPERTS, "shared_expert_intermediate_size": 40, "initializer_range": 0.06}
MAMBA = {
    **LLAMA_LIKE, "mamba_n_heads": 6, "mamba_n_groups": 2, "mamba_d_state": 10, "mamba_d_head": 16, "mamba_expand": 2,
}  # fmt: skip
NEMOTRON = {
    **LLAMA_LIKE, "head_dim": 16, "mamba_num_heads": 6, "mamba_head_dim": 16, "n_groups": 2, "ssm_state_size": 10,
}  # fmt: skip
RECURRENT: dict[str, dict] = {  # on our kernels alone
    "Lfm2": {**LLAMA_LIKE, "num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"]},
    "Lfm3": {
        **LLAMA_LIKE, **WINDOW, "num_hidden_layers": 4, "head_dim": 16,
        "layer_types": ["conv", "sliding_attention", "conv", "full_attention"],
    },
    "KimiLinear": {
        **LLAMA_LIKE, "num_key_value_heads": 6, "num_hidden_layers": 3, "kv_lora_rank": 16, "q_lora_rank": None,
        "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 12, "num_local_experts": 4,
        "num_experts_per_tok": 2, "num_shared_experts": 1, "moe_intermediate_size": 40, "linear_num_heads": 3,
        "linear_head_dim": 20, "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "mlp_layer_types": ["dense", "sparse", "sparse"],
    },
    "BailingHybrid": {
        **LLAMA_LIKE, "num_key_value_heads": 6, "num_hidden_layers": 3, "kv_lora_rank": 16, "q_lora_rank": None,
        "qk_rope_head_dim": 8, "qk_nope_head_dim": 12, "v_head_dim": 12, "head_dim": 8, "num_local_experts": 8,
        "num_experts_per_tok": 3, "n_group": 4, "topk_group": 2, "n_shared_experts": 1, "moe_intermediate_size": 40,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "mlp_layer_types": ["dense", "sparse", "sparse"],
    },
    "Glm5Next": {
        **LATENT_LIKE, **INDEXER, "num_hidden_layers": 4, "qk_rope_head_dim": 0, "linear_num_heads": 3,
        "linear_head_dim": 20, "index_kpool": 4, "swiglu_limit": 0.5,
        "layer_types": ["linear_attention", "full_attention", "full_attention", "linear_attention"],
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"], "indexer_types": ["full", "full", "shared", "full"],
        "hc_mult": 3, "hc_sinkhorn_iters": 4,
    },
    "OlmoHybrid": {
        **LLAMA_LIKE, "num_hidden_layers": 3, "head_dim": 8, "linear_num_key_heads": 3, "linear_num_value_heads": 6,
        "linear_key_head_dim": 12, "linear_value_head_dim": 20, "rope_parameters": None,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    },
    "Qwen3_5": DELTA_RULE,
    "Qwen3Next": {**DELTA_RULE, "num_experts": 0},
    "Qwen3_5Moe": {**DELTA_RULE, **SHARED_EXPERT},
    "Qwen3Next with experts": {**DELTA_RULE, **SHARED_EXPERT},
    "FalconH1": {
        **MAMBA, "mamba_d_ssm": 96, "key_multiplier": 0.7, "attention_in_multiplier": 1.3, "ssm_in_multiplier": 1.2,
        "attention_out_multiplier": 0.8, "ssm_out_multiplier": 0.6, "ssm_multipliers": [0.9, 1.1, 0.8, 1.2, 0.7],
        "mlp_multipliers": [1.3, 0.8], "lm_head_multiplier": 0.5, "embedding_multiplier": 2.0,
    },
    "FalconH1 with a norm": {**MAMBA, "mamba_d_ssm": 96, "mamba_rms_norm": True, "mamba_norm_before_gate": False},
    "GraniteMoeHybrid": {
        **MAMBA, **MIXERS, "num_local_experts": 4, "shared_intermediate_size": 40, "residual_multiplier": 0.3,
        "embedding_multiplier": 3.0, "logits_scaling": 2.0, "attention_multiplier": 0.2,
    },
    "GraniteMoeHybrid without experts": {
        **MAMBA, **MIXERS, "num_local_experts": 0, "shared_intermediate_size": 40, "position_embedding_type": "rope",
    },
    "Mamba": {"hidden_size": 48, "state_size": 10, "time_step_rank": 7},
    "FalconMamba": {"hidden_size": 40, "state_size": 8, "time_step_rank": 6},
    "Jamba": {
        **LLAMA_LIKE, "num_hidden_layers": 4, "attn_layer_period": 4, "attn_layer_offset": 2, "mamba_d_state": 10,
        "mamba_dt_rank": 7, "num_experts": 4, "num_experts_per_tok": 2, "expert_layer_period": 2,
        "expert_layer_offset": 1,
    },
    "Mamba2": {"hidden_size": 48, "num_heads": 6, "head_dim": 16, "state_size": 10, "n_groups": 2},
    "NemotronH": {
        **NEMOTRON, "layers_block_type": ["linear_attention", "mlp", "full_attention", "mlp", "linear_attention"],
        "use_bias": True,
    },
    "NemotronH with experts": {
        **NEMOTRON, **DEEPSEEK_EXPERTS, "layers_block_type": ["linear_attention", "moe", "full_attention", "moe"],
        "moe_shared_expert_intermediate_size": 40, "routed_scaling_factor": 2.5,
    },
    "NemotronH with experts of latent vectors": {
        **NEMOTRON, **DEEPSEEK_EXPERTS, "layers_block_type": ["linear_attention", "moe", "full_attention", "moe"],
        "moe_shared_expert_intermediate_size": 40, "moe_latent_size": 24,
    },
    "Bamba": {**MAMBA, "num_hidden_layers": 3, "attn_layer_indices": [1], "head_dim": 16},
    "Lfm2Moe": {
        **LLAMA_LIKE, **EXPERTS, "num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"],
        "num_dense_layers": 1, "routed_scaling_factor": 1.5,
    },
}  # fmt: skip
ARCHITECTURES |= RECURRENT
OF_WHOLE_BLOCKS = {  # sizes that formats of packed weights can hold
    "hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32,
    "shared_intermediate_size": 32, "moe_shared_expert_intermediate_size": 32, "num_attention_heads": 4,
}  # fmt: skip
LATENT_OF_WHOLE_BLOCKS = {  # the same of latent attention, whose heads have matrices of their own
    **OF_WHOLE_BLOCKS, "num_key_value_heads": 4, "q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 32,
    "v_head_dim": 16,
}  # fmt: skip
MIXTURES = [  # Gemma 4 with the settings below
    "Mixtral", "Olmoe", "Qwen2Moe", "Qwen3Moe", "Glm4Moe", "Glm4MoeLite", "GraniteMoe", "GptOss", "DeepseekV2",
    "DeepseekV3", "Mistral4", "Llama4", "Dots1", "ExaoneMoe", "MiniMaxM2", "Ernie4_5_Moe", "HunYuanMoEV1", "Gemma4",
    "Qwen3_5Moe", "Qwen3Next with experts", "GraniteMoeHybrid", "NemotronH with experts", "Lfm2Moe", "Mellum",
    "MiMoV2Flash", "Cohere2Moe", "Kolibri1",
]  # fmt: skip
GEMMA4_EXPERTS = {
    "enable_moe_block": True, "num_experts": 8, "top_k_experts": 3, "moe_intermediate_size": 40,
    "hidden_size_per_layer_input": 0,
}  # fmt: skip

WITH_FLOAT32_ROUTERS = [  # as Transformers loads them in bfloat16
    "DeepseekV2", "DeepseekV3", "Glm4Moe", "Glm4MoeLite", "Dots1", "ExaoneMoe", "Ernie4_5_Moe",
    "NemotronH with experts", "Flint", "HYV3", "SolarOpen", "SarvamMoE", "MiMoV2Flash",
    "AXK1",
]  # fmt: skip
TEXT_PARTS = {  # of models of pictures and text
    "Gemma3", "Gemma3n", "Gemma4", "Gemma4Unified", "Llama4", "Qwen3_5", "Qwen3_5Moe", "MuseGlimmer", "Step3p7",
    "Mllama", "CohereCompass", "Glm5Next", "MistralLarge4",
}  # fmt: skip
OWN_CLASSES_OF = {  # by type of model
    "MuseGlimmer": "muse_glimmer_text", "Step3p7": "step3p5", "Glm5Next": "glm5_next_text",
    "MistralLarge4": "mistral_large4_text",
}  # fmt: skip

OTHER_CLASSES = {
    "GPT2": "GPT2LMHeadModel",
    "InternLM3": "LlamaForCausalLM",
    "Exaone": "LlamaForCausalLM",
    "SarvamMoE": "Glm4MoeForCausalLM",
    "IQuestCoder": "LlamaForCausalLM",
}

DESCRIBED = [  # by a file of saltus.models.architectures
    "Llama", "Qwen2", "Qwen3", "Mistral", "Gemma", "Gemma2", "Gemma3", "Gemma4", "Phi3", "Granite", "Glm4", "Cohere",
    "Cohere2", "Olmo2", "Olmo3", "SmolLM3", "Starcoder2", "Arcee", "Ernie4_5", "Exaone4", "Ministral", "Ministral3",
    "SeedOss", "Mixtral", "Olmoe", "Qwen2Moe", "Qwen3Moe", "Glm4Moe", "GraniteMoe", "GptOss",
    "DeepseekV2", "DeepseekV3", "Mistral4", "Glm4MoeLite", "Llama4", "Dots1", "ExaoneMoe", "MiniMaxM2", "Ernie4_5_Moe",
    "HunYuanDenseV1", "HunYuanMoEV1", "Helium", "Gemma3n", "Gemma4Unified", "Cwm", "InternLM3", "Youtu", "Olmo",
    "Glm", "MiniCPM3", "Mellum", "DeepseekV32", "GlmMoeDsa", "HYV4", "MistralLarge4",
    "NanoChat", "Jais2", "Exaone", "Phi", "StableLm", "StableLm of parallel layers", "Nemotron", "Afmoe", "SolarOpen",
    "VaultGemma", "HyperCLOVAX", "FlexOlmo", "HYV3", "GraniteMoeShared", "SarvamMoE", "Flint", "Laguna",
    "Laguna with other gates", "Step3p7", "Apertus", "GPT2", "GPTBigCode", "GPTNeo", "GPTNeoX", "OPT",
    "OPT without weights of norms", "GPTNeoX of layers after each other", "GraniteSWA",
    "GraniteMoeSWA", "MiMoV2Flash", "Phimoe", "Cohere2Moe", "Cohere2Moe with a dense layer",
    "Falcon", "Falcon of groups", "LongcatFlash", "Persimmon",
    "Kolibri1", "AXK1", "MuseGlimmer", "Apertus1p5Text", "Phi4Multimodal", "Mllama",
    "CohereCompass",
    *RECURRENT,
]  # fmt: skip

ONE_PER_FEATURE = [  # of attention, and of what is computed around it
    "Llama", "Mistral",  # the C decoder; with a window
    "Gemma2", "Gemma4",  # norms of outputs, capped scores; layers with heads of different sizes
    "GptOss", "Llama4", "Gemma3n",  # sinks; chunks, and queries scaled by position; layers that share keys
    "Glm4", "Cohere2", "Olmo2", "Ministral3",  # interleaved rotation; parallel MLP; norms of all heads
    "Granite", "Starcoder2",  # multipliers; LayerNorm, no gates
    "GPT2", "GPTNeoX",  # learned positions; one layer for a head's query, key and value
    "BioGpt", "GPTJ",  # the same through Transformers' layers; a part of each head is rotated
    "GPTBigCode", "DeepseekV3",  # one key head; short values
    "Qwen2Moe", "Qwen3Moe", "Glm4Moe",  # experts, with a shared one; in some layers; by groups
    "HunYuanDenseV1", "MiniMaxM2",  # norms of rotated heads; of all heads, and experts by sigmoids and a bias
    "NanoChat",  # norms of inputs
    *RECURRENT,
]  # fmt: skip


def by_our_kernels(model, description, settings: FixedShapeSettings) -> CausalNetwork:
    """A model decoded by our kernels for GPUs; without a GPU Triton's interpreter runs them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(causal, "gpu_decoder_of", lambda model: GPUDecoder(model, description=description))
        return CausalNetwork(model, fixed_shapes=True, fixed_shape_settings=settings)


ZEROS = (
    "correction_bias",
    "expert_bias",
    "correct_output_scale",
    "alpha_p",
    "alpha_n",
    "sinks",
    "compress_ape",
    "compress_gate",
    "softmax_scaling.scale",
    "rotary_emb.alpha",
)  # at first, or alike


def tiny(name: str, seed: int = 0, **changes) -> PreTrainedModel:
    """Two layers of random weights, large enough that its laws have favourites."""
    common = {
        "vocab_size": VOCAB, "num_hidden_layers": 2, "max_position_embeddings": 512, "initializer_range": 0.2,
        "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2,
    }  # fmt: skip
    settings = deepcopy(common | ARCHITECTURES.get(name, {}) | changes)  # configurations change what they are given
    config: PretrainedConfig = getattr(transformers, configuration(name))(**settings)
    set_seed(seed)
    model = model_class(name)(config).eval()
    for path, values in (*model.named_parameters(), *model.named_buffers()):
        if path.endswith(ZEROS):
            torch.nn.init.uniform_(values, -0.3, 0.3)
    return model


def configuration(name: str) -> str:
    name = name.split()[0]
    return f"{name}TextConfig" if name in TEXT_PARTS else f"{name}Config"


def model_class(name: str) -> type[PreTrainedModel]:
    name = name.split()[0]
    if name in OWN_CLASSES_OF:
        module, own = OWN_CLASSES[OWN_CLASSES_OF[name]]  # of classes that older Transformers lack
        return getattr(import_module(module), own)
    return getattr(transformers, OTHER_CLASSES.get(name, f"{name}ForCausalLM"))


def text(length: int, seed: int = 0) -> np.ndarray:
    """Random tokens, none of them special."""
    return np.random.default_rng(seed).integers(3, VOCAB, length)


def read(network, decided, tokens=(), parents=(), kv_cache=None) -> torch.Tensor:
    """The logits after the decided text and after each node; on a fresh memory unless one is given."""
    inputs = ForwardInputs(
        continuation(np.asarray(decided), len(tokens) + 1), tuple(int(t) for t in tokens), tuple(parents)
    )
    return network.forward([inputs], [network.new_kv_cache() if kv_cache is None else kv_cache])[0].logits


def chain(network, tokens) -> torch.Tensor:
    """The logits after each token, all from one call: the first token is text, the others are nodes."""
    return read(network, tokens[:1], tokens[1:], range(-1, len(tokens) - 2))


def random_tree(nodes: int, seed: int = 0) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Tokens and parents: wide and deep, siblings of one token among them."""
    draws = np.random.default_rng(seed)
    parents = tuple(int(draws.integers(max(-1, node - 6), node)) for node in range(nodes))
    return tuple(draws.integers(3, 20, nodes).tolist()), parents
