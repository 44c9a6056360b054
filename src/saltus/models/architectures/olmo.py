"""OLMo 1: Llama's layers with LayerNorm that has no weights."""

from typing import Any

from saltus.models.common_layers import llama_layer
from saltus.models.decoder_description import DecoderDescription, NotDescribed
from saltus.models.gguf_architecture import GgufArchitecture, GgufModel, decoder_config
from saltus.models.mixer_description import Norm

CLASSES = {"OlmoForCausalLM"}
NORM = Norm(None, 1e-5, "layer")


def describe(config: Any) -> DecoderDescription:
    """See saltus.models.architectures."""
    if config.clip_qkv is not None:
        raise NotDescribed("queries, keys and values that are clipped")
    layers = [
        llama_layer(config, layer, mixer_norm=NORM, mlp_norm=NORM) for layer in range(config.num_hidden_layers)
    ]  # fmt: skip
    return DecoderDescription(tuple(layers), NORM)


def gguf_config(model: GgufModel) -> dict[str, Any]:
    """See GgufArchitecture."""
    return decoder_config(
        model, "olmo", "OlmoForCausalLM", attention_bias="blk.0.attn_q.bias" in model.shapes,
        clip_qkv=model.number("attention.clamp_kqv", 0.0) or None,
    )  # fmt: skip


GGUF = GgufArchitecture("olmo", gguf_config, interleaves_heads=True)
