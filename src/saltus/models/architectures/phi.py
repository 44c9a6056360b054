"""Phi 1, 1.5 and 2: LayerNorm, which mixer and MLP read alike, and biases; a part of each head is rotated."""

from typing import Any

from saltus.models.architectures.glm import FUSED_QUERIES
from saltus.models.common_layers import activation, llama_attention
from saltus.models.decoder_description import MLP, DecoderDescription, Layer, NotDescribed
from saltus.models.gguf_architecture import GgufArchitecture, GgufModel, decoder_config, partial_rope
from saltus.models.mixer_description import Norm, Weight

CLASSES = {"PhiForCausalLM"}


def describe(config: Any) -> DecoderDescription:
    """See saltus.models.architectures."""
    if config.qk_layernorm:
        raise NotDescribed("norms of heads that take off a mean")
    layers = []
    for layer in range(config.num_hidden_layers):
        path = f"layers.{layer}"
        norm = Norm(f"{path}.input_layernorm", config.layer_norm_eps, "layer")
        mixer = llama_attention(config, layer, output=Weight(f"{path}.self_attn.dense"))
        mlp = MLP(None, Weight(f"{path}.mlp.fc1"), Weight(f"{path}.mlp.fc2"), activation(config.hidden_act))
        layers.append(Layer(mixer, mlp, norm, norm, parallel=True))
    return DecoderDescription(tuple(layers), Norm("final_layernorm", config.layer_norm_eps, "layer"))


def gguf_config(model: GgufModel) -> dict[str, Any]:
    """See GgufArchitecture."""
    return decoder_config(
        model, "phi", "PhiForCausalLM", hidden_act="gelu_new", rope_parameters=partial_rope(model),
        layer_norm_eps=model.number("attention.layer_norm_epsilon"),
    )  # fmt: skip


TENSORS = {
    **FUSED_QUERIES, "attn_output": "self_attn.dense", "ffn_up": "mlp.fc1", "ffn_down": "mlp.fc2",
    "output_norm": "model.final_layernorm",
}  # fmt: skip
GGUF = GgufArchitecture("phi2", gguf_config, TENSORS)
