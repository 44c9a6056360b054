"""Hunyuan 4: GLM-5's layers with gates and sinks, between which a token has several streams (hyper-connections)."""

from collections.abc import Callable, Mapping
from typing import Any

from saltus.models.architectures import deepseek_v3, deepseek_v32, glm_moe_dsa
from saltus.models.common_layers import (
    activation,
    deepseek_mixture,
    indexer,
    latent_attention,
    llama_decoder,
    llama_layer,
    llama_mlp,
)
from saltus.models.decoder_description import DecoderDescription, Experts, HyperConnection, HyperStreams, NotDescribed
from saltus.models.gguf_architecture import (
    GgufArchitecture,
    GgufModel,
    Rows,
    Target,
    TensorPart,
    llama_config,
    num_layers,
)
from saltus.models.mixer_description import LatentAttention, Weight

CLASSES = {"HYV4ForCausalLM"}


def attention(config: Any, layer: int, chosen: dict[str, Any]) -> LatentAttention:
    """Latent attention whose outputs have gates, and whose heads have sinks."""
    path = f"layers.{layer}.self_attn"
    return latent_attention(
        config, layer, rope_interleaved=False, gate=Weight(f"{path}.gate_proj"), sinks=f"{path}.sinks", **chosen
    )


def experts(config: Any, layer: int) -> Experts:
    """DeepSeek V3's, with limited gates and values; the shared one has no limits."""
    if not config.swiglu_limit > 0:
        return deepseek_mixture(config, layer)
    if activation(config.hidden_act) != "silu":
        raise NotDescribed(f"the activation {config.hidden_act} with limits")
    return deepseek_mixture(config, layer, activation="clamped_silu", limit=config.swiglu_limit)


def connection(config: Any, path: str, prefix: str = "") -> HyperConnection:
    """What is done to the streams around a part of a layer."""
    mix, base, scale = (f"{path}.{prefix}{name}" for name in ("fn", "base", "scale"))
    return HyperConnection(
        mix, base, scale, config.rms_norm_eps, config.hc_eps, config.hc_magnitude, written_least=config.hc_eps
    )


def describe(config: Any) -> DecoderDescription:
    """See saltus.models.architectures."""
    layers = []
    choices = glm_moe_dsa.choices(
        config, lambda layer: indexer(config, layer, False, config.rms_norm_eps, rotates_last=True)
    )
    for layer, chosen in enumerate(choices):
        is_sparse = config.mlp_layer_types[layer] == "sparse"
        layers.append(llama_layer(
            config, layer, mixer=attention(config, layer, chosen),
            mlp=experts(config, layer) if is_sparse else llama_mlp(config, layer),
            mixer_streams=connection(config, f"layers.{layer}.attn_hc"),
            mlp_streams=connection(config, f"layers.{layer}.ffn_hc"),
        ))  # fmt: skip
    streams = HyperStreams(config.hc_mult, connection(config, "hc_head", "hc_"))
    return llama_decoder(config, layers, hyper_streams=streams)


def gguf_config(model: GgufModel) -> dict[str, Any]:
    """See GgufArchitecture."""
    if not model.has("attention.indexer.top_k"):
        raise ValueError("it has no indexers, which is not supported")
    layers = num_layers(model)
    limits = set(model.numbers("swiglu_clamp_exp", layers, [0.0] * layers))
    if len(limits) > 1:
        raise ValueError("the limits of its experts differ from layer to layer, which is not supported")
    settings = deepseek_v32.sparse_settings(model)
    dense = settings.pop("first_k_dense_replace")
    kinds = glm_moe_dsa.indexer_types(model)
    return llama_config(
        model, "hy_v4", "HYV4ForCausalLM", indexer_types=kinds, swiglu_limit=limits.pop(),
        mlp_layer_types=["dense" if layer < dense else "sparse" for layer in range(len(kinds))],
        hc_mult=model.size("hyper_connection.count"), hc_eps=model.number("hyper_connection.epsilon"),
        hc_magnitude=model.number("hyper_connection.magnitude"), **settings,
    )  # fmt: skip


def halves(size: str, *sizes: str) -> Callable[[Mapping[str, Any], int], Rows]:
    """Rows of heads of the sum of these sizes, by their names; llama.cpp rotates pairs beside each other, at the end.

    Transformers rotates pairs that are half the rotated rows apart.
    """

    def rows(config: Mapping[str, Any], count: int) -> Rows:
        head, rotated = sum(config[name] for name in (size, *sizes)), config["qk_rope_head_dim"]
        found: list[tuple[int, int]] = []
        for begin in range(0, count, head):
            end = begin + head
            first = end - rotated
            found += [(begin, first), *((row, row + 1) for half in (0, 1) for row in range(first + half, end, 2))]
        return tuple(found)

    return rows


def stream_tensors(names: dict[str, str]) -> dict[str, Target]:
    """The tensors of hyper-connections, by what llama.cpp calls their parts."""
    parts = ("fn", "base", "scale")
    return {f"{theirs}_{part}.weight": f"{ours}{part}" for theirs, ours in names.items() for part in parts}


TENSORS: dict[str, Target] = {
    **deepseek_v32.TENSORS, **{
        f"{theirs}.{part}": TensorPart(f"self_attn.{ours}.{part}", rows=halves(*sizes))
        for theirs, ours, sizes in (
            ("attn_q_b", "q_b_proj", ("qk_nope_head_dim", "qk_rope_head_dim")),
            ("attn_kv_a_mqa", "kv_a_proj_with_mqa", ("kv_lora_rank", "qk_rope_head_dim")),
            ("indexer.attn_q_b", "indexer.wq_b", ("index_head_dim",)),
            ("indexer.attn_k", "indexer.wk", ("index_head_dim",)),
            ("indexer.k_norm", "indexer.k_norm", ("index_head_dim",)),
        )
        for part in ("weight", "bias")
    },
    "attn_gate": "self_attn.gate_proj", "attn_sinks.weight": "self_attn.sinks",
    **stream_tensors({"hc_attn": "attn_hc.", "hc_ffn": "ffn_hc.", "output_hc": "model.hc_head.hc_"}),
}  # fmt: skip
GGUF = GgufArchitecture("hy_v4", gguf_config, TENSORS, repeated=deepseek_v3.SPLIT)
