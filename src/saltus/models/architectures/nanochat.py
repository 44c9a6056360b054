"""nanochat: norms without weights, one of the embeddings, too; queries and keys rotate backwards."""

from typing import Any

from saltus.models.common_layers import activation, llama_attention, llama_layer
from saltus.models.decoder_description import MLP, DecoderDescription
from saltus.models.mixer_description import Angles, Norm, Weight

CLASSES = {"NanoChatForCausalLM"}


def describe(config: Any) -> DecoderDescription:
    """See saltus.models.architectures."""
    layers, norm = [], Norm(None, config.rms_norm_eps)
    for layer in range(config.num_hidden_layers):
        path = f"layers.{layer}.mlp"
        mlp = MLP(None, Weight(f"{path}.fc1"), Weight(f"{path}.fc2"), activation(config.hidden_act))
        attention = llama_attention(
            config, layer, angles=Angles(backwards=True), query_norm=norm, key_norm=norm, norms_rotated=True
        )
        layers.append(llama_layer(config, layer, mixer=attention, mlp=mlp, mixer_norm=norm, mlp_norm=norm))
    return DecoderDescription(
        tuple(layers), norm, input_norm=norm, logit_softcap=config.final_logit_softcapping or 0.0
    )  # fmt: skip
