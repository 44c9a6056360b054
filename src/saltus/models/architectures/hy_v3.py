"""Hunyuan 3: norms of heads; experts by sigmoids and a bias, beside shared ones."""

from typing import Any

from saltus.models.common_layers import head_norms, llama_attention, llama_decoder, llama_layer, llama_mlp, mixture
from saltus.models.decoder_description import DecoderDescription
from saltus.models.gguf_architecture import (
    SIGMOID,
    GgufArchitecture,
    GgufModel,
    check_gates,
    expert_counts,
    expert_tensors,
    llama_config,
    shared_expert_tensors,
)

CLASSES = {"HYV3ForCausalLM"}


def describe(config: Any) -> DecoderDescription:
    """See saltus.models.architectures."""
    layers = []
    for layer, kind in enumerate(config.mlp_layer_types):
        experts = mixture(
            config, layer, scoring="sigmoid", is_normalized=True, least_sum=1e-20, scale=config.router_scaling_factor,
            selection_bias=f"layers.{layer}.mlp.e_score_correction_bias",
            shared=llama_mlp(config, layer, "mlp.shared_experts"),
        )  # fmt: skip
        mixer = llama_attention(config, layer, **head_norms(config, layer))
        mlp = experts if kind == "sparse" else llama_mlp(config, layer)
        layers.append(llama_layer(config, layer, mixer=mixer, mlp=mlp))
    return llama_decoder(config, layers)


def gguf_config(model: GgufModel) -> dict[str, Any]:
    """See GgufArchitecture."""
    check_gates(model, SIGMOID)
    if not model.flag("expert_weights_norm", True):
        raise ValueError("the weights of its experts do not have the sum 1, which is not supported")
    counts, sparse = expert_counts(model), model.layers_with("ffn_gate_inp.weight")
    shared = model.size("expert_shared_feed_forward_length", counts["moe_intermediate_size"])
    return llama_config(
        model, "hy_v3", "HYV3ForCausalLM", router_scaling_factor=model.number("expert_weights_scale", 0.0) or 1.0,
        mlp_layer_types=["sparse" if is_sparse else "dense" for is_sparse in sparse],
        num_shared_experts=shared // counts["moe_intermediate_size"], **counts,
    )  # fmt: skip


BIAS = "mlp.e_score_correction_bias"
TENSORS = {
    **expert_tensors(), **shared_expert_tensors("mlp.shared_experts"), "exp_probs_b": BIAS, "exp_probs_b.bias": BIAS,
}  # fmt: skip
GGUF = GgufArchitecture("hy_v3", gguf_config, TENSORS)
