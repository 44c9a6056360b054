"""OPT: LayerNorm, biases, learned positions, and MLPs without gates."""

from typing import Any

from saltus.models.common_layers import activation, layer_norms
from saltus.models.decoder_description import MLP, DecoderDescription, Layer, NotDescribed, PositionEmbedding
from saltus.models.mixer_description import Attention, Norm, Weight

CLASSES = {"OPTForCausalLM"}
EPSILON = 1e-5
NORM = Norm(None, EPSILON, "layer")


def describe(config: Any) -> DecoderDescription:
    """See saltus.models.architectures."""
    if not config.do_layer_norm_before or config._remove_final_layer_norm:
        raise NotDescribed("norms after layers, or no last norm")
    if config.word_embed_proj_dim != config.hidden_size:
        raise NotDescribed("embeddings of another size")
    heads, has_weights, layers = config.num_attention_heads, config.layer_norm_elementwise_affine, []
    dim = config.hidden_size // heads
    for layer in range(config.num_hidden_layers):
        path = f"layers.{layer}"
        query, key, value, output = (Weight(f"{path}.self_attn.{name}_proj") for name in ("q", "k", "v", "out"))
        mixer = Attention(query, key, value, output, heads, heads, dim, dim**-0.5, angles=None)
        mlp = MLP(None, Weight(f"{path}.fc1"), Weight(f"{path}.fc2"), activation(config.activation_function))
        norms = layer_norms(path, EPSILON, "self_attn_layer_norm", "final_layer_norm") if has_weights else (NORM, NORM)
        layers.append(Layer(mixer, mlp, *norms))
    last = Norm("final_layer_norm", EPSILON, "layer") if has_weights else NORM
    return DecoderDescription(tuple(layers), last, position_embedding=PositionEmbedding("embed_positions", 2))
