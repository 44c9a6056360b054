"""The text of Qwen3.5: Qwen3-Next's layers, dense, with products of their own for gates, weights and steps."""

from typing import Any

from saltus.models.architectures import qwen3_next
from saltus.models.decoder_description import DecoderDescription, DeltaNet, Weight, llama_mlp

CLASSES = {"Qwen3_5ForCausalLM"}


def delta_net(config: Any, path: str) -> DeltaNet:
    """A layer whose queries, gates, weights and steps have products of their own."""
    names = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
    return qwen3_next.delta_net(config, path, tuple(Weight(f"{path}.{name}") for name in names))


def describe(config: Any) -> DecoderDescription:
    """See saltus.models.architectures."""
    return qwen3_next.decoder(config, delta_net, llama_mlp)
