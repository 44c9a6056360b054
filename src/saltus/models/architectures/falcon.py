"""Falcon 7B to 180B, Falcon 2: LayerNorm, mixer and MLP beside each other; one layer gives a group's vectors."""

from typing import Any

from saltus.models.common_layers import activation, layer_norms
from saltus.models.decoder_description import MLP, DecoderDescription, Layer, NotDescribed
from saltus.models.mixer_description import Attention, Norm, Weight

CLASSES = {"FalconForCausalLM"}


def describe(config: Any) -> DecoderDescription:
    """See saltus.models.architectures."""
    is_new, heads, dim = config.new_decoder_architecture, config.num_attention_heads, config.head_dim
    if config.alibi or (is_new and not config.parallel_attn):
        raise NotDescribed("biases of scores by distance (ALiBi), or Falcon 40B's layers one after the other")
    kv_heads = config.num_kv_heads if is_new or not config.multi_query else 1
    norms_of = config.num_ln_in_parallel_attn or (2 if is_new else 1)
    if not config.parallel_attn:
        names = "input_layernorm", "post_attention_layernorm"
    elif norms_of == 2:
        if not is_new:
            raise NotDescribed("two norms in the layers of Falcon 7B")
        names = "ln_attn", "ln_mlp"
    else:
        names = "input_layernorm", "input_layernorm"
    layers = []
    for layer in range(config.num_hidden_layers):
        path = f"h.{layer}"
        vectors = Weight(f"{path}.self_attention.query_key_value")
        attention = Attention(
            vectors, vectors, vectors, Weight(f"{path}.self_attention.dense"), heads, kv_heads, dim, dim**-0.5,
            grouped=True,
        )  # fmt: skip
        up, down = Weight(f"{path}.mlp.dense_h_to_4h"), Weight(f"{path}.mlp.dense_4h_to_h")
        mlp = MLP(None, up, down, activation(config.activation))
        norms = layer_norms(path, config.layer_norm_epsilon, *names)
        layers.append(Layer(attention, mlp, *norms, parallel=config.parallel_attn))
    norm = Norm("ln_f", config.layer_norm_epsilon, "layer")
    return DecoderDescription(tuple(layers), norm, embedding="word_embeddings")
