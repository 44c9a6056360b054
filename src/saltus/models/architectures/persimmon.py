"""Persimmon: LayerNorm, also of heads, MLPs without gates; one layer gives each head's query, key and value."""

from typing import Any

from saltus.models.common_layers import activation, layer_norms
from saltus.models.decoder_description import MLP, DecoderDescription, Layer
from saltus.models.mixer_description import Attention, Norm, Weight

CLASSES = {"PersimmonForCausalLM"}


def describe(config: Any) -> DecoderDescription:
    """See saltus.models.architectures."""
    epsilon, layers = config.layer_norm_eps, []
    heads, dim = config.num_attention_heads, config.hidden_size // config.num_attention_heads
    for layer in range(config.num_hidden_layers):
        path = f"layers.{layer}"
        fused = Weight(f"{path}.self_attn.query_key_value")
        norms: dict[str, Any] = {}
        if config.qk_layernorm:
            names = {"query_norm": "q_layernorm", "key_norm": "k_layernorm"}
            norms = {key: Norm(f"{path}.self_attn.{name}", epsilon, "layer") for key, name in names.items()}
        attention = Attention(
            fused, fused, fused, Weight(f"{path}.self_attn.dense"), heads, heads, dim, dim**-0.5, fused=True, **norms
        )
        up, down = Weight(f"{path}.mlp.dense_h_to_4h"), Weight(f"{path}.mlp.dense_4h_to_h")
        mlp = MLP(None, up, down, activation(config.hidden_act))
        layers.append(Layer(attention, mlp, *layer_norms(path, epsilon, "input_layernorm", "post_attention_layernorm")))
    return DecoderDescription(tuple(layers), Norm("final_layernorm", epsilon, "layer"))
