"""GLM-4: norms before and after mixer and MLP; half of each head is rotated, interleaved."""

from typing import Any

from saltus.models.common_layers import float32_norm, fused_mlp, llama_attention, llama_layer
from saltus.models.decoder_description import DecoderDescription
from saltus.models.gguf_architecture import GgufArchitecture, GgufModel, llama_config, partial_rope

CLASSES = {"Glm4ForCausalLM"}


def describe(config: Any) -> DecoderDescription:
    """See saltus.models.architectures."""
    layers = []
    for layer in range(config.num_hidden_layers):
        path = f"layers.{layer}"
        layers.append(
            llama_layer(
                config, layer, mixer=llama_attention(config, layer, rope_interleaved=True),
                mlp=fused_mlp(config, layer),
                mixer_norm=float32_norm(config, f"{path}.input_layernorm"),
                mixer_output_norm=float32_norm(config, f"{path}.post_self_attn_layernorm"),
                mlp_norm=float32_norm(config, f"{path}.post_attention_layernorm"),
                mlp_output_norm=float32_norm(config, f"{path}.post_mlp_layernorm"),
            )
        )  # fmt: skip
    return DecoderDescription(tuple(layers), float32_norm(config, "norm"))


def gguf_config(model: GgufModel) -> dict[str, Any]:
    """See GgufArchitecture."""
    if model.has("rope.dimension_sections"):
        raise ValueError("it has positions of images (M-RoPE), which are not supported")
    return llama_config(model, "glm4", "Glm4ForCausalLM", rope_parameters=partial_rope(model))


TENSORS = {
    "ffn_up": "mlp.gate_up_proj", "post_attention_norm": "post_self_attn_layernorm",
    "post_ffw_norm": "post_mlp_layernorm",
}  # fmt: skip
GGUF = GgufArchitecture("glm4", gguf_config, TENSORS)
