"""StarCoder2: LayerNorm, biases, and an MLP without a gate."""

from typing import Any

from saltus.models.common_layers import activation, llama_layer
from saltus.models.decoder_description import MLP, DecoderDescription, Norm, Weight
from saltus.models.gguf_architecture import GgufArchitecture, GgufModel, decoder_config

CLASSES = {"Starcoder2ForCausalLM"}


def describe(config: Any) -> DecoderDescription:
    """See saltus.models.architectures."""
    layers, epsilon = [], config.norm_epsilon
    for layer in range(config.num_hidden_layers):
        path = f"layers.{layer}"
        mlp = MLP(None, Weight(f"{path}.mlp.c_fc"), Weight(f"{path}.mlp.c_proj"), activation(config.hidden_act))
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
        model, "starcoder2", "Starcoder2ForCausalLM", hidden_act="gelu_pytorch_tanh", sliding_window=None,
        norm_epsilon=model.number("attention.layer_norm_epsilon"), use_bias="blk.0.attn_q.bias" in model.shapes,
    )  # fmt: skip


GGUF = GgufArchitecture("starcoder2", gguf_config, {"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"})
