"""GPT-Neo: GPT-2's layers with separate projections and scores that are not scaled; every second layer has a window."""

from typing import Any

from saltus.models.common_layers import activation, layer_norms
from saltus.models.decoder_description import MLP, DecoderDescription, Layer, PositionEmbedding
from saltus.models.mixer_description import Attention, Norm, Weight

CLASSES = {"GPTNeoForCausalLM"}


def describe(config: Any) -> DecoderDescription:
    """See saltus.models.architectures."""
    epsilon, heads, layers = config.layer_norm_epsilon, config.num_heads, []
    for layer, kind in enumerate(config.attention_layers):
        path = f"h.{layer}"
        query, key, value, output = (Weight(f"{path}.attn.attention.{name}_proj") for name in ("q", "k", "v", "out"))
        mixer = Attention(
            query, key, value, output, heads, heads, config.hidden_size // heads, scale=1.0, angles=None,
            span=config.window_size if kind == "local" else None,
        )  # fmt: skip
        active = activation(config.activation_function)
        mlp = MLP(None, Weight(f"{path}.mlp.c_fc"), Weight(f"{path}.mlp.c_proj"), active)
        layers.append(Layer(mixer, mlp, *layer_norms(path, epsilon, "ln_1", "ln_2")))
    return DecoderDescription(
        tuple(layers), Norm("ln_f", epsilon, "layer"), embedding="wte", position_embedding=PositionEmbedding("wpe")
    )  # fmt: skip
