"""Ministral 3: Llama's layers, whose queries grow with the logarithm of the position."""

from typing import Any

from saltus.models.decoder_description import Angles, DecoderDescription, llama_attention, llama_decoder, llama_layer

CLASSES = {"Ministral3ForCausalLM"}


def describe(config: Any) -> DecoderDescription:
    """See saltus.models.architectures."""
    rope = config.rope_parameters
    growth, steps = rope.get("llama_4_scaling_beta") or 0.0, rope.get("original_max_position_embeddings") or 1
    queries = Angles(growth=growth, steps=steps)
    layers = [
        llama_layer(config, layer, mixer=llama_attention(config, layer, query_angles=queries))
        for layer in range(config.num_hidden_layers)
    ]
    return llama_decoder(config, layers)
