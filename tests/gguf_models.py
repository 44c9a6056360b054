"""Write tiny random models of each architecture to GGUF files, as llama.cpp's converter does."""

from __future__ import annotations

import math
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, field
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
}  # fmt: skip
INTERLEAVED = {"llama", "granite", "smollm3"}
MORE_IN_NORMS = {"gemma", "gemma2", "gemma3"}


def tiny(case: Case) -> Any:
    """Two layers or more, with weights large enough to tell settings apart."""
    torch.manual_seed(0)
    rope = {"rope_theta": 10000.0 if case.name in MORE_IN_NORMS else 5000.0, "rope_type": "default"}
    if case.model_type == "glm4":
        rope["partial_rotary_factor"] = 0.5
    rope = {} if case.name == "gemma4" else {"rope_parameters": rope}
    settings = SIZES | {"tie_word_embeddings": case.tied} | rope | case.settings
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(case.model_type, **settings), dtype=torch.bfloat16)
    for name, weight in model.named_parameters():
        if "norm" in name or name.endswith("bias"):
            is_whole = name.endswith("weight") and case.name not in MORE_IN_NORMS
            weight.data = torch.rand_like(weight) + (0.5 if is_whole else -0.5)
    for name, scale in model.named_buffers():
        if name.endswith("layer_scalar"):
            scale.fill_(1.5)
    return model.eval()


def write(
    model: Any, case: Case, file: Path, formats: Sequence[Q], left_out: str = "", more: Any = None, pre: str = "smollm"
) -> None:
    """Write a model, matrices in these formats by turns; it gets the weights that were written.

    Without the tensor `left_out`; `more` is called with the writer before anything is written.
    """
    config = copy(model.config)
    config.allow_global_per_layer_attribute_access = True  # of what most layers of Gemma 4 have
    out = gguf.GGUFWriter(file, case.name)
    _add_settings(out, config, case)
    add_vocabulary(out, pre)
    architecture = next(each for each, name in gguf.MODEL_ARCH_NAMES.items() if name == case.name)
    names = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
    at = 0
    stored = model.state_dict().keys()
    buffers = [(name, buffer) for name, buffer in model.named_buffers() if name in stored]
    for name, weight in [*model.named_parameters(), *buffers]:
        whole = name if name.endswith(("weight", "bias")) else f"{name}.weight"
        target = names.get_name(whole, (".weight", ".bias"))
        assert target is not None, name
        kind, plain = target.split(".")[-2], weight.ndim == 1 or target.endswith("_norm.weight")
        format = Q.F32 if plain else formats[at % len(formats)]
        at += not plain
        values = weight.detach().float().numpy()
        added = case.name in MORE_IN_NORMS and name.endswith("norm.weight")
        heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}.get(kind, 0)
        heads = heads if case.name in INTERLEAVED else 0
        if heads:
            values = values.reshape(heads, 2, len(values) // heads // 2, -1).swapaxes(1, 2).reshape(values.shape)
        blocks = quantize(np.ascontiguousarray(values + np.float32(added)), format)
        if target != left_out:
            out.add_tensor(target, blocks, raw_dtype=None if format in (Q.F32, Q.F16) else format)
        made = dequantize(blocks, format) - np.float32(added)
        if heads:
            made = made.reshape(heads, len(made) // heads // 2, 2, -1).swapaxes(1, 2)
        weight.data = torch.from_numpy(np.array(made)).bfloat16().reshape(weight.shape)
    _add_angles(out, config, case)
    if more is not None:
        more(out)
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()


def _add_settings(out: gguf.GGUFWriter, config: Any, case: Case) -> None:
    out.add_block_count(config.num_hidden_layers)
    out.add_context_length(config.max_position_embeddings)
    out.add_embedding_length(config.hidden_size)
    out.add_feed_forward_length(config.intermediate_size)
    out.add_head_count(config.num_attention_heads)
    out.add_head_count_kv(config.num_key_value_heads)
    if "head_dim" in case.settings:
        out.add_key_length(config.head_dim)
        out.add_value_length(config.head_dim)
    if hasattr(config, "rms_norm_eps"):
        out.add_layer_norm_rms_eps(config.rms_norm_eps)
    else:
        out.add_layer_norm_eps(getattr(config, "layer_norm_eps", None) or config.norm_epsilon)
    if case.name not in ("gemma", "gemma2"):
        _add_rope(out, config.rope_parameters)
    if window := getattr(config, "sliding_window", None):
        out.add_sliding_window(window)
    elif case.name == "phi3":
        out.add_sliding_window(0)
    head_dim = config.hidden_size // config.num_attention_heads
    if case.name in ("phi3", "glm4"):
        out.add_rope_dimension_count(int(head_dim * config.rope_parameters["partial_rotary_factor"]))
    elif case.name in ("granite", "smollm3", "cohere2"):
        out.add_rope_dimension_count(head_dim)
    if case.name == "gemma2":
        out.add_attn_logit_softcapping(config.attn_logit_softcapping)
    if getattr(config, "final_logit_softcapping", None):
        out.add_final_logit_softcapping(config.final_logit_softcapping)
    if case.name == "granite":
        out.add_attention_scale(config.attention_multiplier)
        out.add_embedding_scale(config.embedding_multiplier)
        out.add_residual_scale(config.residual_multiplier)
        out.add_logit_scale(config.logits_scaling)
    if case.model_type in ("cohere", "cohere2"):
        out.add_logit_scale(config.logit_scale)
        out.add_rope_scaling_type(RopeScalingType.NONE)
    if case.model_type == "olmo3":
        out.add_sliding_window_pattern([kind == SLIDING for kind in config.layer_types])
    if case.name == "gemma4":
        _add_gemma4(out, config, case)


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


def _add_rope(out: gguf.GGUFWriter, parameters: dict[str, Any]) -> None:
    full = parameters.get(FULL, parameters)
    if full["rope_type"] in ("linear", "yarn"):
        out.add_rope_scaling_type(RopeScalingType(full["rope_type"]))
        out.add_rope_scaling_factor(full["factor"])
    if full["rope_type"] == "yarn":
        out.add_rope_scaling_orig_ctx_len(full["original_max_position_embeddings"])
        out.add_rope_scaling_yarn_attn_factor(full["attention_factor"])
        out.add_rope_scaling_yarn_beta_fast(full["beta_fast"])
        out.add_rope_scaling_yarn_beta_slow(full["beta_slow"])
    out.add_rope_freq_base(full["rope_theta"])
    if SLIDING in parameters:
        out.add_rope_freq_base_swa(parameters[SLIDING]["rope_theta"])


def _add_angles(out: gguf.GGUFWriter, config: Any, case: Case) -> None:
    """Tensors by which frequencies are divided."""
    rope = config.rope_parameters
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
