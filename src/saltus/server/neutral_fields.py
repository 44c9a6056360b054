"""Fields that clients send whether they matter or not, in a request or a part of it: ignored, or some values of them.

With any other value they are fields that the server does not know. Fields that an object reads itself stay.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

IGNORED = frozenset({
    # llama.cpp: timing, the order of samplers, which is always the same here, and what an answer has besides its text
    "id_slot", "n_indent", "n_keep", "n_discard", "n_probs", "min_keep", "samplers", "t_max_predict_ms",
    "t_max_prompt_ms", "timings_per_token", "return_progress", "return_tokens", "extra_context", "backend_sampling",
    "post_sampling_probs", "penalize_nl", "sampler_seq", "time", "response_fields", "n_cache_reuse",
    "sse_ping_interval",
    # what matters only with one of the fields below
    "dynatemp_exponent", "xtc_threshold", "dry_base", "dry_allowed_length", "dry_penalty_last_n",
    "dry_sequence_breakers", "mirostat_tau", "mirostat_eta",
    # vLLM: names, order, and what its own tokenizers need
    "request_id", "session_id", "priority", "spaces_between_special_tokens", "guided_decoding_backend",
    # OpenAI: who asks, what is stored, and hints
    "user", "store", "metadata", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
    "prompt_cache_options", "prompt_cache_breakpoint", "phase", "verbosity", "summary", "generate_summary",
    "stream_options", "include_obfuscation", "annotations", "client_metadata", "max_tool_calls",
    # Anthropic's hint, which agents send to any server
    "cache_control",
})  # fmt: skip
"""They do nothing here, whatever their value is."""
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    # llama.cpp
    "dynatemp_range": (0,), "typical_p": (1,), "typ_p": (1,), "tfs_z": (1,), "xtc_probability": (0,),
    "dry_multiplier": (0,), "mirostat": (0,), "top_n_sigma": (0, -1), "grammar": ("",), "lora": ([],),
    "multimodal_data": ([],), "n_cmpl": (1,), "reasoning_control": (False,),
    # vLLM
    "best_of": (1,), "use_beam_search": (False,), "length_penalty": (1,), "early_stopping": (False,),
    "include_stop_str_in_output": (False,), "echo": (False,), "detokenize": (True,), "bad_words": ([],),
    "logits_processors": ([],), "return_tokens_as_token_ids": (False,), "return_token_ids": (False,),
    "truncate_prompt_tokens": (0, -1), "documents": ([],), "mm_processor_kwargs": ({},),
    "vllm_xargs": ({},),
    # SGLang
    "separate_reasoning": (True,), "stream_reasoning": (True,), "no_stop_trim": (False,),
    "return_hidden_states": (False,), "min_new_tokens": (0,),
    # OpenAI
    "function_call": ("none", "auto"),
    "modalities": (["text"],), "functions": ([],), "web_search_options": ({},), "top_logprobs": (0,),
    "background": (False,),
}  # fmt: skip
"""Values with which a field changes nothing."""


def without_neutral_fields(given: Mapping[str, Any], known: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of an object that matter: what is not null, and is known there or may be a mistake."""
    return {
        name: value
        for name, value in given.items()
        if value is not None and (name in known or not (name in IGNORED or value in NEUTRAL.get(name, ())))
    }
