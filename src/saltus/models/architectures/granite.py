"""Granite: Llama's layers, with multipliers of embeddings, residuals, scores and logits."""

from typing import Any

from saltus.models.decoder_description import DecoderDescription, llama_attention, llama_decoder, llama_layer

CLASSES = {"GraniteForCausalLM"}


def describe(config: Any) -> DecoderDescription:
    """See saltus.models.architectures."""
    layers = [
        llama_layer(
            config, layer, mixer=llama_attention(config, layer, scale=config.attention_multiplier),
            residual_scale=config.residual_multiplier,
        )
        for layer in range(config.num_hidden_layers)
    ]  # fmt: skip
    return llama_decoder(
        config, layers, input_scale=config.embedding_multiplier, logit_scale=1 / config.logits_scaling
    )  # fmt: skip
