"""Jais 2: LayerNorm, biases, and an MLP without a gate."""

from typing import Any

from saltus.models.common_layers import activation, llama_layer
from saltus.models.decoder_description import MLP, DecoderDescription, Norm, Weight
from saltus.models.gguf_architecture import GgufArchitecture, GgufModel, decoder_config

CLASSES = {"Jais2ForCausalLM"}


def describe(config: Any) -> DecoderDescription:
    """See saltus.models.architectures."""
    layers, epsilon = [], config.layer_norm_eps
    for layer in range(config.num_hidden_layers):
        path = f"layers.{layer}"
        mlp = MLP(
            None, Weight(f"{path}.mlp.up_proj"), Weight(f"{path}.mlp.down_proj"), activation(config.hidden_act)
        )  # fmt: skip
        layers.append(
            llama_layer(
                config, layer, mlp=mlp, mixer_norm=Norm(f"{path}.input_layernorm", epsilon, "layer"),
                mlp_norm=Norm(f"{path}.post_attention_layernorm", epsilon, "layer"),
            )
        )  # fmt: skip
    return DecoderDescription(tuple(layers), Norm("norm", epsilon, "layer"))


def gguf_config(model: GgufModel) -> dict[str, Any]:
    """See GgufArchitecture."""
    return decoder_config(
        model, "jais2", "Jais2ForCausalLM", hidden_act="relu2",
        layer_norm_eps=model.number("attention.layer_norm_epsilon"),
        attention_bias="blk.0.attn_q.bias" in model.shapes, mlp_bias="blk.0.ffn_up.bias" in model.shapes,
    )  # fmt: skip


GGUF = GgufArchitecture("jais2", gguf_config)
