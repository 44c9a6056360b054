"""StarCoder2: LayerNorm, biases, and an MLP without a gate."""

from typing import Any

from saltus.models.common_layers import layer_norm_decoder
from saltus.models.decoder_description import DecoderDescription
from saltus.models.gguf_architecture import GgufArchitecture, GgufModel, decoder_config

CLASSES = {"Starcoder2ForCausalLM"}


def describe(config: Any) -> DecoderDescription:
    """See saltus.models.architectures."""
    return layer_norm_decoder(config, config.norm_epsilon, "c_fc", "c_proj")


def gguf_config(model: GgufModel) -> dict[str, Any]:
    """See GgufArchitecture."""
    return decoder_config(
        model, "starcoder2", "Starcoder2ForCausalLM", hidden_act="gelu_pytorch_tanh", sliding_window=None,
        norm_epsilon=model.number("attention.layer_norm_epsilon"), use_bias="blk.0.attn_q.bias" in model.shapes,
    )  # fmt: skip


GGUF = GgufArchitecture("starcoder2", gguf_config, {"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"})
