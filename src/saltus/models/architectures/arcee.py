"""Arcee: Llama's layers with an MLP without a gate."""

from typing import Any

from saltus.models.common_layers import activation, llama_decoder, llama_layer
from saltus.models.decoder_description import MLP, DecoderDescription
from saltus.models.gguf_architecture import GgufArchitecture, GgufModel, llama_config
from saltus.models.mixer_description import Weight

CLASSES = {"ArceeForCausalLM"}


def describe(config: Any) -> DecoderDescription:
    """See saltus.models.architectures."""
    layers = []
    for layer in range(config.num_hidden_layers):
        path = f"layers.{layer}.mlp"
        mlp = MLP(None, Weight(f"{path}.up_proj"), Weight(f"{path}.down_proj"), activation(config.hidden_act))
        layers.append(llama_layer(config, layer, mlp=mlp))
    return llama_decoder(config, layers)


def gguf_config(model: GgufModel) -> dict[str, Any]:
    """See GgufArchitecture."""
    return llama_config(model, "arcee", "ArceeForCausalLM", hidden_act="relu2")


GGUF = GgufArchitecture("arcee", gguf_config, interleaves_heads=True)
