"""Gemma 2: norms before and after mixer and MLP, whose weights are one more than stored; capped scores and logits."""

from typing import Any

from saltus.models.common_layers import llama_attention, llama_mlp
from saltus.models.decoder_description import DecoderDescription, Layer
from saltus.models.gguf_architecture import GgufArchitecture, GgufModel, layer_types, llama_config
from saltus.models.mixer_description import Attention, Norm

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


def gguf_config(model: GgufModel) -> dict[str, Any]:
    """See GgufArchitecture."""
    return gemma_config(
        model, "gemma2", "Gemma2ForCausalLM", wide_layers=46, layer_types=layer_types(model, 2),
        sliding_window=model.size("attention.sliding_window", 4096),
        attn_logit_softcapping=model.number("attn_logit_softcapping", 50.0),
        final_logit_softcapping=model.number("final_logit_softcapping", 30.0),
    )  # fmt: skip


def gemma_config(
    model: GgufModel, model_type: str, architecture: str, wide_layers: int, **changes: Any
) -> dict[str, Any]:
    """Of Gemma 2 and 3; scores of those with so many layers (27B) are scaled by the width, not the size, of heads."""
    config = llama_config(model, model_type, architecture, hidden_activation="gelu_pytorch_tanh", **changes)
    is_wide = config["num_hidden_layers"] == wide_layers
    width = config["hidden_size"] // config["num_attention_heads"]
    return config | {"query_pre_attn_scalar": width if is_wide else config["head_dim"]}


TENSORS = {
    "post_attention_norm": "post_attention_layernorm", "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}  # fmt: skip
GGUF = GgufArchitecture("gemma2", gguf_config, TENSORS, added_to_norms=1)
