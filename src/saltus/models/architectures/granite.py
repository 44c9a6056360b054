"""Granite: Llama's layers, with multipliers of embeddings, residuals, scores and logits."""

from typing import Any

from saltus.models.common_layers import llama_attention, llama_decoder, llama_layer
from saltus.models.decoder_description import DecoderDescription
from saltus.models.gguf_architecture import GgufArchitecture, GgufModel, llama_config, num_layers

CLASSES = {"GraniteForCausalLM"}


def describe(config: Any) -> DecoderDescription:
    """See saltus.models.architectures."""
    layers = [
        llama_layer(
            config, layer, mixer=llama_attention(config, layer, scale=config.attention_multiplier),
            residual_scale=config.residual_multiplier,
        )
        for layer in range(config.num_hidden_layers)
    ]  # fmt: skip
    return llama_decoder(
        config, layers, input_scale=config.embedding_multiplier, logit_scale=1 / config.logits_scaling
    )  # fmt: skip


def granite_config(model: GgufModel, model_type: str, architecture: str, **changes: Any) -> dict[str, Any]:
    """With Granite's multipliers, changed in places."""
    dim = model.size("embedding_length") // model.size("attention.head_count")
    return llama_config(
        model, model_type, architecture,
        attention_multiplier=model.number("attention.scale", 0.0) or dim**-0.5,
        embedding_multiplier=model.number("embedding_scale", 0.0) or 1.0,
        residual_multiplier=model.number("residual_scale", 0.0) or 1.0,
        logits_scaling=model.number("logit_scale", 0.0) or 1.0, **changes,
    )  # fmt: skip


def gguf_config(model: GgufModel) -> dict[str, Any]:
    """See GgufArchitecture."""
    if not model.flag("rope.scaling.finetuned", True):
        raise ValueError("it has no rotary embeddings, which is not supported")
    return granite_config(model, "granite", "GraniteForCausalLM")


def minicpm_config(model: GgufModel) -> dict[str, Any]:
    """MiniCPM 1, 2 and 4, with the multipliers of the first where a file has none."""
    size = model.size("embedding_length")
    return llama_config(
        model, "granite", "GraniteForCausalLM",
        attention_multiplier=(size // model.size("attention.head_count")) ** -0.5,
        embedding_multiplier=model.number("embedding_scale", 12.0),
        residual_multiplier=model.number("residual_scale", 1.4 / num_layers(model) ** 0.5),
        logits_scaling=model.number("logit_scale", size / 256),
    )  # fmt: skip


GGUF = (
    GgufArchitecture("granite", gguf_config, interleaves_heads=True),
    GgufArchitecture("minicpm", minicpm_config, interleaves_heads=True),
)
