"""Hunyuan without experts: Llama's layers; queries and keys have norms after they are rotated."""

from typing import Any

from saltus.models.common_layers import llama_attention, llama_decoder, llama_layer
from saltus.models.decoder_description import DecoderDescription
from saltus.models.gguf_architecture import GgufArchitecture, GgufModel, llama_config, rope
from saltus.models.mixer_description import Attention, Norm

CLASSES = {"HunYuanDenseV1ForCausalLM"}


def attention(config: Any, layer: int) -> Attention:
    """Attention with norms of rotated heads."""
    path = f"layers.{layer}.self_attn"
    norms = {f"{name}_norm": Norm(f"{path}.{name}_layernorm", config.rms_norm_eps) for name in ("query", "key")}
    return llama_attention(config, layer, norms_rotated=True, **norms)


def describe(config: Any) -> DecoderDescription:
    """See saltus.models.architectures."""
    layers = [
        llama_layer(config, layer, mixer=attention(config, layer)) for layer in range(config.num_hidden_layers)
    ]  # fmt: skip
    return llama_decoder(config, layers)


def gguf_config(model: GgufModel) -> dict[str, Any]:
    """See GgufArchitecture; the base of angles in a file has Hunyuan's scaling, or it stands beside it."""
    parameters = rope(model)
    if alpha := model.number("rope.scaling.alpha", 0.0):
        dim = model.size("attention.key_length", model.size("embedding_length") // model.size("attention.head_count"))
        parameters["rope_theta"] *= alpha ** (dim / (dim - 2))
    return llama_config(model, "hunyuan_v1_dense", "HunYuanDenseV1ForCausalLM", rope_parameters=parameters)


TENSORS = {"attn_q_norm": "self_attn.query_layernorm", "attn_k_norm": "self_attn.key_layernorm"}
GGUF = tuple(  # also the text part of HunyuanOCR and of Hunyuan's other models of images
    GgufArchitecture(name, gguf_config, TENSORS) for name in ("hunyuan-dense", "hunyuan_vl")
)
