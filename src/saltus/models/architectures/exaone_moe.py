"""K-EXAONE: EXAONE 4's attention behind norms, and DeepSeek's experts where the configuration says so."""

from typing import Any

from saltus.models.architectures.deepseek_v3 import deepseek_expert_counts
from saltus.models.common_layers import deepseek_mlp, head_norms, llama_attention, llama_decoder, llama_layer
from saltus.models.decoder_description import DecoderDescription, NotDescribed
from saltus.models.gguf_architecture import (
    SIGMOID,
    GgufArchitecture,
    GgufModel,
    check_gates,
    expert_tensors,
    layer_types,
    llama_config,
    shared_expert_tensors,
)
from saltus.models.mixer_description import Angles

CLASSES = {"ExaoneMoeForCausalLM"}


def describe(config: Any) -> DecoderDescription:
    """See saltus.models.architectures."""
    windows, limits = (getattr(config, name, None) or () for name in ("sliding_windows", "swiglu_limits"))
    if {window for window in windows if window} - {config.sliding_window}:
        raise NotDescribed("sliding windows of several lengths", "sliding_windows")
    if any(limits):
        raise NotDescribed("limits of gates", "swiglu_limits")
    layers = []
    for layer, kind in enumerate(config.layer_types):
        angles = Angles() if config.sliding_window is None or kind == "sliding_attention" else None
        attention = llama_attention(config, layer, angles=angles, **head_norms(config, layer))
        mlp = deepseek_mlp(config, layer, config.mlp_layer_types[layer] == "sparse")
        layers.append(llama_layer(config, layer, mixer=attention, mlp=mlp))
    return llama_decoder(config, layers)


def gguf_config(model: GgufModel) -> dict[str, Any]:
    """See GgufArchitecture."""
    check_gates(model, SIGMOID)
    window = model.size("attention.sliding_window", 0, least=0)
    counts = deepseek_expert_counts(model)
    return llama_config(
        model, "exaone_moe", "ExaoneMoeForCausalLM", sliding_window=window or None, sliding_window_pattern=4,
        layer_types=layer_types(model, 4 if window else 1),
        mlp_layer_types=["sparse" if has else "dense" for has in model.layers_with("ffn_gate_inp.weight")],
        num_experts=counts.pop("n_routed_experts"), num_shared_experts=counts.pop("n_shared_experts"), **counts,
    )  # fmt: skip


GGUF = GgufArchitecture("exaone-moe", gguf_config, expert_tensors() | shared_expert_tensors("mlp.shared_experts"))
