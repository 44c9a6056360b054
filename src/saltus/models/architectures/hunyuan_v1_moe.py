"""Hunyuan with experts: a mixture beside a shared MLP in every layer."""

from typing import Any

from saltus.models.architectures import hunyuan_v1_dense
from saltus.models.common_layers import llama_decoder, llama_layer, llama_mlp, mixture
from saltus.models.decoder_description import DecoderDescription
from saltus.models.gguf_architecture import (
    SOFTMAX,
    GgufArchitecture,
    GgufModel,
    check_gates,
    expert_counts,
    expert_tensors,
    llama_config,
    shared_expert_tensors,
)

CLASSES = {"HunYuanMoEV1ForCausalLM"}


def describe(config: Any) -> DecoderDescription:
    """See saltus.models.architectures."""
    layers = []
    for layer in range(config.num_hidden_layers):
        top_k = config.moe_topk if isinstance(config.moe_topk, int) else config.moe_topk[layer]
        mlp = mixture(
            config, layer, router=f"layers.{layer}.mlp.gate.wg", top_k=top_k, is_normalized=True,
            shared=llama_mlp(config, layer, "mlp.shared_mlp"),
        )  # fmt: skip
        layers.append(llama_layer(config, layer, mixer=hunyuan_v1_dense.attention(config, layer), mlp=mlp))
    return llama_decoder(config, layers)


def gguf_config(model: GgufModel) -> dict[str, Any]:
    """See GgufArchitecture."""
    check_gates(model, SOFTMAX)
    counts = expert_counts(model)
    return llama_config(
        model, "hunyuan_v1_moe", "HunYuanMoEV1ForCausalLM", num_experts=counts["num_experts"],
        intermediate_size=counts["moe_intermediate_size"], moe_topk=counts["num_experts_per_tok"],
    )  # fmt: skip


SHARED = shared_expert_tensors("mlp.shared_mlp")
TENSORS = {**hunyuan_v1_dense.TENSORS, **expert_tensors(router="mlp.gate.wg"), **SHARED}
GGUF = GgufArchitecture("hunyuan-moe", gguf_config, TENSORS)
