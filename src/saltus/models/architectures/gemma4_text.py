"""Gemma 4: other heads where layers see all of the text, shared keys and values, and token inputs of layers."""

from typing import Any

from saltus.models.decoder_description import (
    Angles,
    DecoderDescription,
    Layer,
    MLPAndExperts,
    Norm,
    TokenInput,
    TokenInputs,
    Weight,
    activation,
    head_norms,
    llama_attention,
    llama_mlp,
    mixture,
    sliding_window,
)

CLASSES = {"Gemma4ForCausalLM"}


def norm(config: Any, path: str | None) -> Norm:
    """Gemma 4's norm: its weights are what is stored."""
    return Norm(path, config.rms_norm_eps, "rms-float32")


def attention(config: Any, number: int) -> dict[str, Any]:
    """What an attention layer has beside Llama's, or in its place."""
    kind = config.layer_types[number]
    norms = head_norms(config, number, kind="rms-float32") | {"value_norm": norm(config, None)}
    found = {
        "scale": 1.0, "angles": Angles(layer_type=kind), "reach": sliding_window(config, number), **norms,
    }  # fmt: skip
    if config.attention_k_eq_v and kind != "sliding_attention":
        found["value"] = None
    if config.kv_sharing_modes[number] == "reuse":
        stored = [each for each in range(number) if config.kv_sharing_modes[each] == "store"]
        shared = max(each for each in stored if config.layer_types[each] == kind)
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


def layer(config: Any, number: int) -> Layer:
    """A layer with four norms, and perhaps a token input."""
    path, said, sizes = f"layers.{number}", None, config.per_layer_config[number]
    if config.hidden_size_per_layer_input:
        said = TokenInput(
            Weight(f"{path}.per_layer_input_gate"), Weight(f"{path}.per_layer_projection"),
            norm(config, f"{path}.post_per_layer_input_norm"), activation(config.hidden_activation),
        )  # fmt: skip
    return Layer(
        llama_attention(sizes, number, **attention(config, number)),
        mlp_and_experts(config, number) if config.enable_moe_block else llama_mlp(config, number),
        mixer_norm=norm(config, f"{path}.input_layernorm"),
        mixer_output_norm=norm(config, f"{path}.post_attention_layernorm"),
        mlp_norm=norm(config, f"{path}.pre_feedforward_layernorm"),
        mlp_output_norm=norm(config, f"{path}.post_feedforward_layernorm"),
        token_input=said, output_scale=f"{path}.layer_scalar",
    )  # fmt: skip


def describe(config: Any) -> DecoderDescription:
    """See saltus.models.architectures."""
    inputs, size = None, config.hidden_size_per_layer_input
    if size:
        # its projection is divided by √hidden before the norm, which only makes the norm's epsilon larger
        projection_norm = Norm("per_layer_projection_norm", config.rms_norm_eps * config.hidden_size, "rms-float32")
        inputs = TokenInputs("embed_tokens_per_layer", size**0.5, Weight("per_layer_model_projection"), projection_norm)
    return DecoderDescription(
        tuple(layer(config, number) for number in range(config.num_hidden_layers)), norm(config, "norm"),
        embedding_scale=config.hidden_size**0.5, logit_softcap=config.final_logit_softcapping or 0.0,
        token_inputs=inputs,
    )  # fmt: skip
