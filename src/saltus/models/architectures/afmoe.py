"""Trinity (AFMoE): norms before and after mixer and MLP; gates of attention's outputs; rotation in windows alone."""

from typing import Any

from saltus.models.common_layers import (
    float32_norm,
    head_norms,
    llama_attention,
    llama_decoder,
    llama_layer,
    llama_mlp,
    mixture,
)
from saltus.models.decoder_description import DecoderDescription
from saltus.models.gguf_architecture import (
    SIGMOID,
    GgufArchitecture,
    GgufModel,
    check_gates,
    expert_counts,
    expert_tensors,
    layer_types,
    llama_config,
    shared_expert_tensors,
)
from saltus.models.mixer_description import Angles, Weight

CLASSES = {"AfmoeForCausalLM"}


def describe(config: Any) -> DecoderDescription:
    """See saltus.models.architectures."""
    layers = []
    for layer, kind in enumerate(config.layer_types):
        path = f"layers.{layer}"
        mixer = llama_attention(
            config, layer, angles=Angles() if kind == "sliding_attention" else None,
            gate=Weight(f"{path}.self_attn.gate_proj"), **head_norms(config, layer, kind="rms-float32"),
        )  # fmt: skip
        experts = mixture(
            config, layer, router=f"{path}.mlp.router.gate", scoring="sigmoid", is_normalized=True, least_sum=1e-20,
            scale=config.route_scale, selection_bias=f"{path}.mlp.expert_bias",
            shared=llama_mlp(config, layer, "mlp.shared_experts") if config.num_shared_experts else None,
        )  # fmt: skip
        layers.append(
            llama_layer(
                config, layer, mixer=mixer,
                mlp=experts if layer >= config.num_dense_layers else llama_mlp(config, layer),
                mixer_norm=float32_norm(config, f"{path}.input_layernorm"),
                mixer_output_norm=float32_norm(config, f"{path}.post_attention_layernorm"),
                mlp_norm=float32_norm(config, f"{path}.pre_mlp_layernorm"),
                mlp_output_norm=float32_norm(config, f"{path}.post_mlp_layernorm"),
            )
        )  # fmt: skip
    scale = config.hidden_size**0.5 if config.mup_enabled else 1.0
    return llama_decoder(config, layers, norm=float32_norm(config, "norm"), input_scale=scale)


def gguf_config(model: GgufModel) -> dict[str, Any]:
    """See GgufArchitecture; llama.cpp always multiplies embeddings by the root of their size."""
    check_gates(model, SIGMOID)
    if not model.flag("expert_weights_norm"):
        raise ValueError("it does not normalise the weights of experts, which Transformers does; it is not supported")
    return llama_config(
        model, "afmoe", "AfmoeForCausalLM", sliding_window=model.size("attention.sliding_window"),
        layer_types=layer_types(model, 4), mup_enabled=True,
        num_dense_layers=model.size("leading_dense_block_count", 0, least=0),
        num_shared_experts=model.size("expert_shared_count", 0, least=0),
        route_scale=model.number("expert_weights_scale", 0.0) or 1.0, **expert_counts(model),
    )  # fmt: skip


TENSORS = {
    **expert_tensors(router="mlp.router.gate"), **shared_expert_tensors("mlp.shared_experts"),
    "exp_probs_b.bias": "mlp.expert_bias", "attn_gate": "self_attn.gate_proj",
    "post_attention_norm": "post_attention_layernorm", "ffn_norm": "pre_mlp_layernorm",
    "post_ffw_norm": "post_mlp_layernorm",
}  # fmt: skip
GGUF = GgufArchitecture("afmoe", gguf_config, TENSORS)
