"""MiniMax M2: norms of all heads together, a part of each head is rotated; experts by sigmoids and a bias."""

from typing import Any

from saltus.models.decoder_description import (
    DecoderDescription,
    head_norms,
    llama_attention,
    llama_decoder,
    llama_layer,
    mixture,
)

CLASSES = {"MiniMaxM2ForCausalLM"}


def describe(config: Any) -> DecoderDescription:
    """See saltus.models.architectures."""
    layers = []
    for layer in range(config.num_hidden_layers):
        attention = llama_attention(config, layer, norm_per_head=False, span=None, **head_norms(config, layer))
        bias = f"layers.{layer}.mlp.e_score_correction_bias"
        mlp = mixture(config, layer, scoring="sigmoid", is_normalized=True, selection_bias=bias)
        layers.append(llama_layer(config, layer, mixer=attention, mlp=mlp))
    return llama_decoder(config, layers)
