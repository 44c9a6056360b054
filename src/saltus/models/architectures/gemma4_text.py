"""Gemma 4: other heads where layers see all of the text, shared keys and values, and per-layer embeddings."""

from collections.abc import Mapping
from typing import Any

from saltus.models.architectures import gemma2
from saltus.models.common_layers import activation, head_norms, llama_attention, llama_mlp, mixture, sliding_window
from saltus.models.decoder_description import (
    MLP,
    DecoderDescription,
    Layer,
    MLPAndExperts,
    PerLayerEmbeddings,
    PerLayerInput,
)
from saltus.models.gguf_architecture import (
    FULL,
    SLIDING,
    GgufArchitecture,
    GgufModel,
    Target,
    decoder_config,
    expert_counts,
    expert_tensors,
    layer_types,
    num_layers,
    same_for_layers,
)
from saltus.models.mixer_description import Angles, Attention, Norm, Weight

CLASSES = {"Gemma4ForCausalLM"}


def norm(config: Any, path: str | None) -> Norm:
    """Gemma 4's norm: its weights are what is stored."""
    return Norm(path, config.rms_norm_eps, "rms-float32")


def attention(config: Any, number: int) -> dict[str, Any]:
    """What an attention layer has beside Llama's, or in its place."""
    kind = config.layer_types[number]
    norms = head_norms(config, number, kind="rms-float32") | {"value_norm": norm(config, None)}
    found = {
        "scale": 1.0, "angles": Angles(layer_type=kind), "span": sliding_window(config, number), **norms,
    }  # fmt: skip
    if getattr(config, "attention_k_eq_v", False) and kind != "sliding_attention":
        found["value"] = None
    own_layers = config.num_hidden_layers - (getattr(config, "num_kv_shared_layers", None) or 0)
    if number >= own_layers:
        shared = max(each for each in range(own_layers) if config.layer_types[each] == kind)
        found |= {"key": None, "value": None, "key_norm": None, "value_norm": None, "shares": shared}
    return found


def mlp_and_experts(config: Any, number: int) -> MLPAndExperts:
    """An MLP, and experts that read the same hidden states through norms of their own."""
    path = f"layers.{number}"
    experts = mixture(
        config, number, router=f"{path}.router.proj", experts=f"{path}.experts", top_k=config.top_k_experts,
        activation=activation(config.hidden_activation), is_normalized=True,
        expert_scale=f"{path}.router.per_expert_scale", router_norm=norm(config, None),
        router_scale=f"{path}.router.scale", router_factor=config.hidden_size**-0.5,
    )  # fmt: skip
    return MLPAndExperts(
        llama_mlp(config, number), experts, norm(config, f"{path}.pre_feedforward_layernorm_2"),
        norm(config, f"{path}.post_feedforward_layernorm_1"), norm(config, f"{path}.post_feedforward_layernorm_2"),
    )  # fmt: skip


def per_layer_input(config: Any, number: int) -> PerLayerInput:
    """The input of a token to a layer."""
    path = f"layers.{number}"
    return PerLayerInput(
        Weight(f"{path}.per_layer_input_gate"), Weight(f"{path}.per_layer_projection"),
        norm(config, f"{path}.post_per_layer_input_norm"), activation(config.hidden_activation),
    )  # fmt: skip


def per_layer_embeddings(config: Any, **changes: Any) -> PerLayerEmbeddings:
    """Those of all layers; the projection is divided by √hidden before the norm, which only makes epsilon larger."""
    return PerLayerEmbeddings(
        "embed_tokens_per_layer", config.hidden_size_per_layer_input**0.5, Weight("per_layer_model_projection"),
        Norm("per_layer_projection_norm", config.rms_norm_eps * config.hidden_size, "rms-float32"), **changes,
    )  # fmt: skip


def layer(config: Any, number: int, mixer: Attention, mlp: MLP | MLPAndExperts, **changes: Any) -> Layer:
    """A layer with four norms."""
    path = f"layers.{number}"
    return Layer(
        mixer, mlp,
        mixer_norm=norm(config, f"{path}.input_layernorm"),
        mixer_output_norm=norm(config, f"{path}.post_attention_layernorm"),
        mlp_norm=norm(config, f"{path}.pre_feedforward_layernorm"),
        mlp_output_norm=norm(config, f"{path}.post_feedforward_layernorm"), **changes,
    )  # fmt: skip


def describe(config: Any) -> DecoderDescription:
    """See saltus.models.architectures."""
    has_inputs = bool(getattr(config, "hidden_size_per_layer_input", 0))
    has_experts = getattr(config, "enable_moe_block", False)
    layers = [
        layer(
            config, number, llama_attention(config.per_layer_config[number], number, **attention(config, number)),
            mlp_and_experts(config, number) if has_experts else llama_mlp(config, number),
            per_layer_input=per_layer_input(config, number) if has_inputs else None,
            output_scale=f"layers.{number}.layer_scalar",
        )
        for number in range(config.num_hidden_layers)
    ]  # fmt: skip
    return DecoderDescription(
        tuple(layers), norm(config, "norm"), embedding_scale=config.hidden_size**0.5,
        logit_softcap=config.final_logit_softcapping or 0.0,
        per_layer_embeddings=per_layer_embeddings(config) if has_inputs else None,
    )  # fmt: skip


def gguf_config(model: GgufModel) -> dict[str, Any]:
    """See GgufArchitecture; a part of heads is rotated where angles are not divided by a huge number."""
    layers, kinds = num_layers(model), layer_types(model, 6)
    shared = model.size("attention.shared_kv_layers", 0, least=0)
    dim, widths = model.size("attention.key_length"), model.sizes("feed_forward_length", layers)
    kv_heads = model.sizes("attention.head_count_kv", layers)
    if kinds[-1] != FULL or SLIDING not in kinds or shared >= layers:
        raise ValueError("its last layer must see all of the text, others a window, and some have keys of their own")
    own = [number for number, kind in enumerate(kinds[: layers - shared]) if kind == FULL]
    rotated = sum(divisor < 1e29 for divisor in model.read_numbers(ROPE_FREQUENCIES))
    size = model.size("embedding_length_per_layer_input", 0, least=0)
    full = [kv_heads[number] for number in range(layers) if kinds[number] == FULL]
    local = [kv_heads[number] for number in range(layers) if kinds[number] == SLIDING]
    experts = {}
    if model.size("expert_count", 0, least=0):
        experts = expert_counts(model) | {"enable_moe_block": True}
        experts["top_k_experts"] = experts.pop("num_experts_per_tok")
    return decoder_config(
        model, "gemma4_text", "Gemma4ForCausalLM", hidden_activation="gelu_pytorch_tanh",
        head_dim=model.size("attention.key_length_swa"), global_head_dim=dim,
        num_key_value_heads=same_for_layers(local, "heads of keys"),
        num_global_key_value_heads=same_for_layers(full, "heads of keys"),
        intermediate_size=same_for_layers(widths[: layers - shared], "widths"),
        use_double_wide_mlp=widths[-1] != widths[0], num_kv_shared_layers=shared, layer_types=kinds,
        attention_k_eq_v=any(f"blk.{number}.attn_v.weight" not in model.shapes for number in own),
        sliding_window=model.size("attention.sliding_window"),
        rms_norm_eps=model.number("attention.layer_norm_rms_epsilon"),
        final_logit_softcapping=model.number("final_logit_softcapping", 0.0) or None,
        hidden_size_per_layer_input=size, **experts,
        vocab_size_per_layer_input=model.shapes["per_layer_token_embd.weight"][0] if size else 1,
        rope_parameters={
            FULL: {
                "rope_type": "proportional", "partial_rotary_factor": 2 * rotated / dim,
                "rope_theta": model.number("rope.freq_base", 1e6),
            },
            SLIDING: {"rope_type": "default", "rope_theta": model.number("rope.freq_base_swa", 10000.0)},
        },
    )  # fmt: skip


def is_ignored(config: Mapping[str, Any], tensor: str) -> bool:
    """Angles, which are in the configuration, and keys and values of layers that share those of others."""
    return tensor == ROPE_FREQUENCIES or is_of_unused_keys(config, tensor)


def is_of_unused_keys(config: Mapping[str, Any], tensor: str) -> bool:
    """True for keys and values of layers that share those of others."""
    parts, last = tensor.split("."), config["num_hidden_layers"] - config["num_kv_shared_layers"]
    is_shared = len(parts) == 4 and parts[1].isdecimal() and int(parts[1]) >= last
    return is_shared and parts[2] in ("attn_k", "attn_v", "attn_k_norm")


ROPE_FREQUENCIES = "rope_freqs.weight"
PER_LAYER_TENSORS: dict[str, Target] = {  # of per-layer embeddings
    "inp_gate": "per_layer_input_gate", "proj": "per_layer_projection", "post_norm": "post_per_layer_input_norm",
    "per_layer_token_embd": "model.embed_tokens_per_layer",
    "per_layer_model_proj": "model.per_layer_model_projection",
    "per_layer_proj_norm": "model.per_layer_projection_norm",
}  # fmt: skip
TENSORS: dict[str, Target] = {
    **gemma2.TENSORS, **PER_LAYER_TENSORS, "layer_output_scale.weight": "layer_scalar",
    **expert_tensors("experts", "router.proj"),
    "ffn_gate_inp.scale": "router.scale", "ffn_down_exps.scale": "router.per_expert_scale",
    "pre_ffw_norm_2": "pre_feedforward_layernorm_2", "post_ffw_norm_1": "post_feedforward_layernorm_1",
    "post_ffw_norm_2": "post_feedforward_layernorm_2",
}  # fmt: skip
GGUF = GgufArchitecture("gemma4", gguf_config, TENSORS, ignored=is_ignored)
