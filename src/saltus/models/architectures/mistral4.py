"""Mistral 4: DeepSeek V3's layers, whose queries grow with the position; experts are chosen by their softmax."""

from typing import Any

from saltus.models.architectures import deepseek_v3
from saltus.models.common_layers import deepseek_mixture, latent_attention, llama_decoder, llama_layer, llama_mlp
from saltus.models.decoder_description import DecoderDescription
from saltus.models.gguf_architecture import GgufArchitecture

CLASSES = {"Mistral4ForCausalLM"}


def describe(config: Any) -> DecoderDescription:
    """See saltus.models.architectures."""
    rope, layers = config.rope_parameters, []
    growth, steps = rope.get("llama_4_scaling_beta") or 0.0, rope.get("original_max_position_embeddings") or 1
    for layer in range(config.num_hidden_layers):
        mlp = llama_mlp(config, layer)
        if layer >= config.first_k_dense_replace:
            mlp = deepseek_mixture(config, layer, scoring="softmax", selection_bias=None)
        mixer = latent_attention(config, layer, growth=growth, steps=steps)
        layers.append(llama_layer(config, layer, mixer=mixer, mlp=mlp))
    return llama_decoder(config, layers)


GGUF = GgufArchitecture("mistral4", deepseek_v3.gguf_config, deepseek_v3.TENSORS, repeated=deepseek_v3.SPLIT)
