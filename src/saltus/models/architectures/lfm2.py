"""LFM2: short convolutions in most layers, attention with norms of heads in the others."""

from collections.abc import Callable
from typing import Any

from saltus.models.decoder_description import (
    MLP,
    Angles,
    DecoderDescription,
    Experts,
    Norm,
    ShortConvolution,
    Weight,
    llama_attention,
    llama_layer,
)

CLASSES = {"Lfm2ForCausalLM"}


def mlp(config: Any, layer: int) -> MLP:
    """A gated MLP by LFM2's names."""
    gate, up, down = (Weight(f"layers.{layer}.feed_forward.{name}") for name in ("w1", "w3", "w2"))
    return MLP(gate, up, down)


def decoder(config: Any, mlp: Callable[[Any, int], MLP | Experts], angles: str) -> DecoderDescription:
    """LFM2's layers around MLPs."""
    layers, epsilon = [], config.norm_eps
    for number, kind in enumerate(config.layer_types):
        path = f"layers.{number}"
        if kind == "conv":
            conv = f"{path}.conv"
            mixer = ShortConvolution(Weight(f"{conv}.in_proj"), f"{conv}.conv", Weight(f"{conv}.out_proj"))
        else:
            attention = f"{path}.self_attn"
            mixer = llama_attention(
                config, number, output=Weight(f"{attention}.out_proj"), span=None, angles=Angles(angles),
                query_norm=Norm(f"{attention}.q_layernorm", epsilon),
                key_norm=Norm(f"{attention}.k_layernorm", epsilon),
            )  # fmt: skip
        norms = {"mixer_norm": Norm(f"{path}.operator_norm", epsilon), "mlp_norm": Norm(f"{path}.ffn_norm", epsilon)}
        layers.append(llama_layer(config, number, mixer=mixer, mlp=mlp(config, number), **norms))
    return DecoderDescription(tuple(layers), Norm("embedding_norm", epsilon))


def describe(config: Any) -> DecoderDescription:
    """See saltus.models.architectures."""
    return decoder(config, mlp, angles="rotary_emb")
