"""Hunyuan with experts: a mixture beside a shared MLP in every layer."""

from typing import Any

from saltus.models.architectures.hunyuan_v1_dense import attention
from saltus.models.decoder_description import DecoderDescription, llama_decoder, llama_layer, llama_mlp, mixture

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
        layers.append(llama_layer(config, layer, mixer=attention(config, layer), mlp=mlp))
    return llama_decoder(config, layers)
