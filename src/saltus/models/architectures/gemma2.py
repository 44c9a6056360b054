"""Gemma 2: norms before and after mixer and MLP, whose weights are one more than stored; capped scores and logits."""

from typing import Any

from saltus.models.decoder_description import (
    Attention,
    DecoderDescription,
    Layer,
    Norm,
    llama_attention,
    llama_mlp,
)

CLASSES = {"Gemma2ForCausalLM"}


def norm(config: Any, path: str) -> Norm:
    """Gemma's norm."""
    return Norm(path, config.rms_norm_eps, "rms-float32", offset=1.0)


def layer(config: Any, number: int, attention: Attention) -> Layer:
    """A layer with four norms."""
    path = f"layers.{number}"
    return Layer(
        attention, llama_mlp(config, number),
        mixer_norm=norm(config, f"{path}.input_layernorm"),
        mixer_output_norm=norm(config, f"{path}.post_attention_layernorm"),
        mlp_norm=norm(config, f"{path}.pre_feedforward_layernorm"),
        mlp_output_norm=norm(config, f"{path}.post_feedforward_layernorm"),
    )  # fmt: skip


def decoder(config: Any, layers: list[Layer]) -> DecoderDescription:
    """Gemma's embeddings and logits around layers."""
    return DecoderDescription(
        tuple(layers), norm(config, "norm"), embedding_scale=config.hidden_size**0.5,
        logit_softcap=getattr(config, "final_logit_softcapping", None) or 0.0,
    )  # fmt: skip


def describe(config: Any) -> DecoderDescription:
    """See saltus.models.architectures."""
    settings = {"scale": config.query_pre_attn_scalar**-0.5, "softcap": config.attn_logit_softcapping}
    layers = [
        layer(config, number, llama_attention(config, number, **settings)) for number in range(config.num_hidden_layers)
    ]
    return decoder(config, layers)
