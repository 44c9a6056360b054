"""The text of Qwen3.5: Qwen3-Next's layers, dense, with products of their own for gates, weights and steps."""

from collections.abc import Mapping
from typing import Any

from saltus.models.architectures import qwen3_next
from saltus.models.common_layers import llama_mlp
from saltus.models.decoder_description import DecoderDescription
from saltus.models.gguf_architecture import GgufArchitecture, GgufModel, Rows, llama_config
from saltus.models.mixer_description import DeltaNet, Weight

CLASSES = {"Qwen3_5ForCausalLM"}


def delta_net(config: Any, path: str) -> DeltaNet:
    """A layer whose queries, gates, weights and steps have products of their own."""
    names = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
    return qwen3_next.delta_net(config, path, tuple(Weight(f"{path}.{name}") for name in names))


def describe(config: Any) -> DecoderDescription:
    """See saltus.models.architectures."""
    return qwen3_next.decoder(config, delta_net, llama_mlp)


def repeated_rows(config: Mapping[str, Any], rows: int) -> Rows:
    """Of queries, keys and values, so that each head of values has queries and keys of its own.

    llama.cpp orders heads of values so that head i reads keys i modulo their number. Transformers has values of the
    same keys beside each other; to bring them into this order would cut blocks of K-quants.
    """
    keys = config["linear_num_value_heads"] * config["linear_key_head_dim"]
    values = config["linear_num_value_heads"] * config["linear_value_head_dim"]
    stored = (rows - values) // 2
    if stored <= 0 or keys % stored:
        raise ValueError(
            f"it has {rows:,} rows of queries, keys and values, which do not fit its heads; fetch it again"
        )
    if keys == stored:
        return ()
    times = keys // stored
    return ((0, stored),) * times + ((stored, 2 * stored),) * times + ((2 * stored, rows),)


def qwen3_5_sizes(model: GgufModel) -> dict[str, Any]:
    """The same with as many heads of keys as of values (`repeated_rows`)."""
    sizes = qwen3_next.delta_net_sizes(model)
    return sizes | {"linear_num_key_heads": sizes["linear_num_value_heads"]}


def gguf_config(model: GgufModel) -> dict[str, Any]:
    """See GgufArchitecture."""
    return llama_config(model, "qwen3_5_text", "Qwen3_5ForCausalLM", **qwen3_5_sizes(model))


GGUF = GgufArchitecture("qwen35", gguf_config, qwen3_next.delta_net_tensors(repeated_rows), added_to_norms=1)
