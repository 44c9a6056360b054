"""Apertus: norms of heads, and an MLP without a gate, whose activation has numbers of each layer."""

from typing import Any

from saltus.models.common_layers import head_norms, llama_attention, llama_decoder, llama_layer
from saltus.models.decoder_description import MLP, DecoderDescription, NotDescribed
from saltus.models.gguf_architecture import GgufArchitecture, GgufModel, llama_config
from saltus.models.mixer_description import Norm, Weight

CLASSES = {"ApertusForCausalLM"}


def describe(config: Any) -> DecoderDescription:
    """See saltus.models.architectures."""
    if config.hidden_act != "xielu":
        raise NotDescribed(f"the activation {config.hidden_act}")
    layers = []
    for layer in range(config.num_hidden_layers):
        path = f"layers.{layer}"
        mlp = MLP(
            None, Weight(f"{path}.mlp.up_proj"), Weight(f"{path}.mlp.down_proj"), "xielu", xielu=f"{path}.mlp.act_fn"
        )
        layers.append(
            llama_layer(
                config, layer, mixer=llama_attention(config, layer, **head_norms(config, layer)), mlp=mlp,
                mixer_norm=Norm(f"{path}.attention_layernorm", config.rms_norm_eps),
                mlp_norm=Norm(f"{path}.feedforward_layernorm", config.rms_norm_eps),
            )
        )  # fmt: skip
    return llama_decoder(config, layers)


def gguf_config(model: GgufModel) -> dict[str, Any]:
    """See GgufArchitecture."""
    return llama_config(model, "apertus", "ApertusForCausalLM", hidden_act="xielu")


TENSORS = {"attn_norm": "attention_layernorm", "ffn_norm": "feedforward_layernorm"}
NUMBERS = {f"xielu.{name}": f"mlp.act_fn.{name}" for name in ("alpha_p", "alpha_n", "beta", "eps")}
GGUF = GgufArchitecture("apertus", gguf_config, TENSORS, numbers=NUMBERS)
