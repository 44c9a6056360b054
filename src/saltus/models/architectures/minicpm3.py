"""MiniCPM3: DeepSeek's latent attention, rotated by halves, with multipliers of embeddings, residuals and logits."""

from typing import Any

from saltus.models.architectures import deepseek_v3
from saltus.models.common_layers import latent_attention, llama_decoder, llama_layer
from saltus.models.decoder_description import DecoderDescription
from saltus.models.gguf_architecture import GgufArchitecture, GgufModel, llama_config

CLASSES = {"MiniCPM3ForCausalLM"}


def describe(config: Any) -> DecoderDescription:
    """See saltus.models.architectures."""
    layers = [
        llama_layer(
            config, layer, mixer=latent_attention(config, layer, rope_interleaved=False),
            residual_scale=config.scale_depth / config.num_hidden_layers**0.5,
        )
        for layer in range(config.num_hidden_layers)
    ]  # fmt: skip
    return llama_decoder(config, layers, embedding_scale=config.scale_emb, logit_scale=1 / config.logits_scaling)


def gguf_config(model: GgufModel) -> dict[str, Any]:
    """See GgufArchitecture; llama.cpp has the multipliers of MiniCPM3-4B for all, as Transformers' defaults are."""
    heads, rotated = model.size("attention.head_count"), model.size("rope.dimension_count")
    return llama_config(
        model, "minicpm3", "MiniCPM3ForCausalLM", num_key_value_heads=heads, head_dim=rotated,
        qk_rope_head_dim=rotated, qk_nope_head_dim=model.size("attention.key_length") - rotated,
        v_head_dim=model.size("attention.value_length", model.size("embedding_length") // heads),
        kv_lora_rank=model.size("attention.kv_lora_rank"),
        q_lora_rank=model.size("attention.q_lora_rank"),
    )  # fmt: skip


GGUF = GgufArchitecture("minicpm3", gguf_config, deepseek_v3.TENSORS)
