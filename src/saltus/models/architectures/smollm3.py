"""SmolLM3: Llama's layers, some of them without rotary embeddings."""

from typing import Any

from saltus.models.common_layers import llama_attention, llama_decoder, llama_layer
from saltus.models.decoder_description import DecoderDescription
from saltus.models.gguf_architecture import GgufArchitecture, GgufModel, llama_config, num_layers
from saltus.models.mixer_description import Angles

CLASSES = {"SmolLM3ForCausalLM"}


def describe(config: Any) -> DecoderDescription:
    """See saltus.models.architectures."""
    layers = []
    for layer in range(config.num_hidden_layers):
        angles = Angles() if config.no_rope_layers[layer] else None
        layers.append(llama_layer(config, layer, mixer=llama_attention(config, layer, angles=angles)))
    return llama_decoder(config, layers)


def gguf_config(model: GgufModel) -> dict[str, Any]:
    """See GgufArchitecture; every fourth layer is not rotated, which files do not say."""
    rotated = [int((layer + 1) % 4 != 0) for layer in range(num_layers(model))]
    return llama_config(model, "smollm3", "SmolLM3ForCausalLM", no_rope_layers=rotated)


GGUF = GgufArchitecture("smollm3", gguf_config, interleaves_heads=True)
