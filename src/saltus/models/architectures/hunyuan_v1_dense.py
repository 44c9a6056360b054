"""Hunyuan without experts: Llama's layers; queries and keys have norms after they are rotated."""

from typing import Any

from saltus.models.common_layers import llama_attention, llama_decoder, llama_layer
from saltus.models.decoder_description import DecoderDescription
from saltus.models.gguf_architecture import GgufArchitecture, GgufModel, llama_config
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
    """See GgufArchitecture; the base of angles in a file has Hunyuan's scaling."""
    return llama_config(model, "hunyuan_v1_dense", "HunYuanDenseV1ForCausalLM")


TENSORS = {"attn_q_norm": "self_attn.query_layernorm", "attn_k_norm": "self_attn.key_layernorm"}
GGUF = GgufArchitecture("hunyuan-dense", gguf_config, TENSORS)
