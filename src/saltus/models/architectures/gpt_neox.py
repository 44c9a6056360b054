"""Pythia and GPT-NeoX: LayerNorm, biases; one layer gives each head's query, key and value, partly rotated."""

from typing import Any

from saltus.models.common_layers import activation, layer_norms
from saltus.models.decoder_description import MLP, DecoderDescription, Layer
from saltus.models.mixer_description import Attention, Norm, Weight

CLASSES = {"GPTNeoXForCausalLM"}


def describe(config: Any) -> DecoderDescription:
    """See saltus.models.architectures."""
    epsilon, layers = config.layer_norm_eps, []
    heads, dim = config.num_attention_heads, config.hidden_size // config.num_attention_heads
    for layer in range(config.num_hidden_layers):
        path = f"layers.{layer}"
        fused = Weight(f"{path}.attention.query_key_value")
        attention = Attention(
            fused, fused, fused, Weight(f"{path}.attention.dense"), heads, heads, dim, dim**-0.5, fused=True
        )  # fmt: skip
        up, down = Weight(f"{path}.mlp.dense_h_to_4h"), Weight(f"{path}.mlp.dense_4h_to_h")
        norms = layer_norms(path, epsilon, "input_layernorm", "post_attention_layernorm")
        mlp = MLP(None, up, down, activation(config.hidden_act))
        layers.append(Layer(attention, mlp, *norms, parallel=config.use_parallel_residual))
    return DecoderDescription(tuple(layers), Norm("final_layer_norm", epsilon, "layer"), embedding="embed_in")
