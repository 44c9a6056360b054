"""The text of GLM-5.3 Flash: Kimi Linear's layers with hyper-connections; latent attention chooses pools of keys."""

from dataclasses import replace
from typing import Any

from saltus.models.architectures import deepseek_v3, deepseek_v32, glm_moe_dsa, hy_v4, kimi_linear
from saltus.models.common_layers import (
    activation,
    deepseek_mixture,
    indexer,
    latent_attention,
    llama_decoder,
    llama_layer,
    llama_mlp,
)
from saltus.models.decoder_description import (
    MLP,
    DecoderDescription,
    Experts,
    HyperConnection,
    HyperStreams,
    NotDescribed,
)
from saltus.models.gguf_architecture import FULL, GgufArchitecture, GgufModel, Target, llama_config, num_layers
from saltus.models.mixer_description import Indexer, KeyPools, KimiDeltaNet, LatentAttention, Norm, Weight

CLASSES = {"Glm5NextForCausalLM"}


def pooled_indexer(config: Any, layer: int) -> Indexer:
    """What chooses pools of keys."""
    path = f"layers.{layer}.self_attn.indexer.index_kpool_compress"
    pools = KeyPools(config.index_kpool, Weight(f"{path}_gate"), f"{path}_ape")
    return indexer(config, layer, rope_interleaved=False, pools=pools)


def mixer(config: Any, layer: int, chosen: dict[str, Any]) -> KimiDeltaNet | LatentAttention:
    """The gated delta rule with channel-wise decays, or latent attention without angles."""
    if config.layer_types[layer] == "linear_attention":
        return kimi_linear.delta_net(config, layer, least_decay=config.linear_lower_bound or 0.0)
    path, epsilon = f"layers.{layer}.self_attn", config.rms_norm_eps
    norms = {
        "latent_norm": Norm(f"{path}.kv_a_layernorm", epsilon),
        "query_norm": Norm(f"{path}.q_a_layernorm", epsilon),
    }
    return latent_attention(config, layer, angles=None, **norms, **chosen)


def mlp(config: Any, layer: int) -> MLP | Experts:
    """An MLP, or experts beside a shared one, whose gates and values are all limited."""
    limits: dict[str, Any] = {"activation": "clamped_silu", "limit": config.swiglu_limit}
    if config.mlp_layer_types[layer] == "dense":
        return replace(llama_mlp(config, layer), **limits)
    shared = replace(llama_mlp(config, layer, "mlp.shared_experts"), **limits)
    return deepseek_mixture(config, layer, shared=shared, **limits)


def connection(config: Any, path: str) -> HyperConnection:
    """What is done to the streams around a part of a layer."""
    mix, base, scale = (f"{path}.{name}" for name in ("fn", "base", "scale"))
    return HyperConnection(
        mix, base, scale, config.rms_norm_eps, config.hc_eps, magnitude=2.0, rounds=config.hc_sinkhorn_iters
    )


def describe(config: Any) -> DecoderDescription:
    """See saltus.models.architectures."""
    if activation(config.hidden_act) != "silu" or not config.swiglu_limit > 0:
        raise NotDescribed(f"the activation {config.hidden_act} with the limit {config.swiglu_limit}")
    if (bound := config.linear_lower_bound) is not None and bound >= 0:
        raise NotDescribed("decays with a bound that is not below zero")
    if config.hc_sinkhorn_iters < 1:
        raise NotDescribed("gates of streams that are not balanced")
    if config.qk_rope_head_dim or not config.index_kpool_always_select_tail:
        raise NotDescribed("latent attention with angles, or without the last tokens")
    layers = [
        llama_layer(
            config, layer, mixer=mixer(config, layer, chosen), mlp=mlp(config, layer),
            mixer_streams=connection(config, f"layers.{layer}.attn_hc"),
            mlp_streams=connection(config, f"layers.{layer}.ffn_hc"),
        )
        for layer, chosen in enumerate(choices(config))
    ]  # fmt: skip
    return llama_decoder(config, layers, hyper_streams=HyperStreams(config.hc_mult))


def choices(config: Any) -> list[dict[str, Any]]:
    """Of each layer with attention, the indexer that it has, or whose choice it shares: only of the layer before it."""
    found: list[dict[str, Any]] = []
    chooser = None
    for layer, (kind, choice) in enumerate(zip(config.layer_types, config.indexer_types, strict=True)):
        if kind == "linear_attention":
            chooser = None
            found.append({})
        elif choice == "full":
            chooser = layer
            found.append({"indexer": pooled_indexer(config, layer)})
        elif chooser is None:
            raise NotDescribed("a layer without an indexer after one without a choice")
        else:
            found.append({"shares_choice": chooser})
    return found


def gguf_config(model: GgufModel) -> dict[str, Any]:
    """See GgufArchitecture."""
    layers = num_layers(model)
    of_experts = model.numbers("swiglu_clamp_exp", layers, [0.0] * layers)
    limits = {*of_experts, *model.numbers("swiglu_clamp_shexp", layers, of_experts)}
    if len(limits) > 1:
        raise ValueError("the limits of its gates differ from layer to layer, which is not supported")
    dense, recurrent = model.size("leading_dense_block_count", 0, least=0), model.layers_with("ssm_f_a.weight")
    has_bound = model.has("kda.gate_lower_bound")
    settings = deepseek_v32.indexer_settings(model) | deepseek_v3.deepseek_expert_counts(model)
    del settings["first_k_dense_replace"]
    heads = model.size("attention.head_count")
    return llama_config(
        model, "glm5_next_text", "Glm5NextForCausalLM", num_key_value_heads=heads,
        qk_rope_head_dim=model.size("rope.dimension_count", 0, least=0),
        v_head_dim=model.size("attention.value_length_mla"),
        qk_nope_head_dim=model.size("attention.key_length_mla"), kv_lora_rank=model.size("attention.kv_lora_rank"),
        q_lora_rank=model.size("attention.q_lora_rank"), linear_num_heads=heads,
        linear_head_dim=model.size("kda.head_dim"),
        linear_conv_kernel_dim=model.size("ssm.conv_kernel"),
        linear_lower_bound=model.number("kda.gate_lower_bound") if has_bound else None,
        layer_types=["linear_attention" if each else FULL for each in recurrent],
        mlp_layer_types=["dense" if layer < dense else "sparse" for layer in range(len(recurrent))],
        indexer_types=glm_moe_dsa.indexer_types(model), index_kpool=model.size("attention.indexer.kpool"),
        index_kpool_always_select_tail=model.flag("attention.indexer.kpool_select_tail", True),
        hc_mult=model.size("hyper_connection.count"), hc_eps=model.number("hyper_connection.epsilon"),
        hc_sinkhorn_iters=model.size("hyper_connection.sinkhorn_iterations"), swiglu_limit=limits.pop(), **settings,
    )  # fmt: skip


POOLS = "self_attn.indexer.index_kpool_compress"
TENSORS: dict[str, Target] = {
    **deepseek_v32.TENSORS, **kimi_linear.TENSORS,
    **hy_v4.stream_tensors({"hc_attn": "attn_hc.", "hc_ffn": "ffn_hc."}),
    **{f"indexer_compressor_{part}.weight": f"{POOLS}_{part}" for part in ("gate", "ape")},
}  # fmt: skip
GGUF = GgufArchitecture("glm5-next", gguf_config, TENSORS, repeated=deepseek_v3.SPLIT)
