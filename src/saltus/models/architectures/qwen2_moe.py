"""Qwen2-MoE: mixtures with a shared expert that has a gate of its own; some layers have a plain MLP."""

from typing import Any

from saltus.models.common_layers import llama_decoder, llama_layer, llama_mlp, mixture, sparse_layers
from saltus.models.decoder_description import DecoderDescription, Experts
from saltus.models.gguf_architecture import (
    GgufArchitecture,
    GgufModel,
    TensorPart,
    expert_counts,
    expert_tensors,
    llama_config,
    shared_expert_tensors,
)
from saltus.models.mixer_description import Weight

CLASSES = {"Qwen2MoeForCausalLM"}


def experts(config: Any, layer: int, **changes: Any) -> Experts:
    """A mixture, perhaps with a shared expert that has a gate, changed in places."""
    if config.shared_expert_intermediate_size:
        changes["shared"] = llama_mlp(config, layer, "mlp.shared_expert")
        changes["shared_gate"] = Weight(f"layers.{layer}.mlp.shared_expert_gate")
    return mixture(config, layer, **changes)


def describe(config: Any) -> DecoderDescription:
    """See saltus.models.architectures."""
    layers = []
    for layer, is_sparse in enumerate(sparse_layers(config)):
        mlp = experts(config, layer, is_normalized=config.norm_topk_prob) if is_sparse else llama_mlp(config, layer)
        layers.append(llama_layer(config, layer, mlp=mlp))
    return llama_decoder(config, layers)


def qwen_moe_config(model: GgufModel, model_type: str, architecture: str, **changes: Any) -> dict[str, Any]:
    """Of mixtures with the names of Qwen's, changed in places."""
    settings = {"mlp_only_layers": [], "decoder_sparse_step": 1, **expert_counts(model)}
    return llama_config(model, model_type, architecture, **settings | changes)


def gguf_config(model: GgufModel) -> dict[str, Any]:
    """See GgufArchitecture."""
    return qwen_moe_config(
        model, "qwen2_moe", "Qwen2MoeForCausalLM", norm_topk_prob=False, use_sliding_window=False,
        qkv_bias="blk.0.attn_q.bias" in model.shapes, **shared_width(model),
    )  # fmt: skip


def shared_width(model: GgufModel) -> dict[str, Any]:
    """The width of the shared expert."""
    widths = [shape[0] for name, shape in model.shapes.items() if name.endswith(".ffn_up_shexp.weight")]
    return {"shared_expert_intermediate_size": model.size("expert_shared_feed_forward_length", max(widths, default=0))}


TENSORS = {
    **expert_tensors(), **shared_expert_tensors("mlp.shared_expert"),
    "ffn_gate_inp_shexp.weight": TensorPart("mlp.shared_expert_gate.weight", is_reshaped=True),
}  # fmt: skip
GGUF = GgufArchitecture("qwen2moe", gguf_config, TENSORS)
