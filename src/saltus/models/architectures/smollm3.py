"""SmolLM3: Llama's layers, some of them without rotary embeddings."""

from typing import Any

from saltus.models.decoder_description import Angles, DecoderDescription, llama_attention, llama_decoder, llama_layer

CLASSES = {"SmolLM3ForCausalLM"}


def describe(config: Any) -> DecoderDescription:
    """See saltus.models.architectures."""
    layers = []
    for layer in range(config.num_hidden_layers):
        angles = Angles() if config.no_rope_layers[layer] else None
        layers.append(llama_layer(config, layer, mixer=llama_attention(config, layer, angles=angles)))
    return llama_decoder(config, layers)
