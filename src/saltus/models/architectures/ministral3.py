"""Ministral 3: Llama's layers, whose queries grow with the logarithm of the position."""

from typing import Any

from saltus.models.common_layers import llama_attention, llama_decoder, llama_layer
from saltus.models.decoder_description import DecoderDescription
from saltus.models.gguf_architecture import GgufArchitecture, GgufModel, llama_config, rope
from saltus.models.mixer_description import Angles

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


def gguf_config(model: GgufModel) -> dict[str, Any]:
    """See GgufArchitecture; models whose queries do not grow are Mistral's."""
    if not model.has("attention.temperature_scale"):
        return llama_config(model, "mistral", "MistralForCausalLM", sliding_window=None)
    scale = model.number("rope.scaling.yarn_log_multiplier", 1.0)
    found = rope(model) | {"llama_4_scaling_beta": model.number("attention.temperature_scale")}
    return llama_config(
        model, "ministral3", "Ministral3ForCausalLM", sliding_window=None,
        rope_parameters=found | {"mscale": scale, "mscale_all_dim": scale},
    )  # fmt: skip


GGUF = GgufArchitecture("mistral3", gguf_config, interleaves_heads=True)
