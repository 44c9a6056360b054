"""Granite 4: Mamba-2 in most layers, attention without angles in the others; experts beside a shared one, or an MLP."""

from dataclasses import replace
from typing import Any

from saltus.models.architectures import granite, mamba2
from saltus.models.common_layers import activation, llama_attention, mixture
from saltus.models.decoder_description import MLP, DecoderDescription
from saltus.models.gguf_architecture import FULL, GgufArchitecture, GgufModel, TensorPart, expert_tensors
from saltus.models.mixer_description import Mamba2, Weight

CLASSES = {"GraniteMoeHybridForCausalLM"}


def describe(config: Any) -> DecoderDescription:
    """See saltus.models.architectures."""
    plain, layers = granite.describe(config), []
    for number, (kind, layer) in enumerate(zip(config.layer_types, plain.layers, strict=True)):
        path, mlp = f"layers.{number}", shared_mlp(config, number)
        if config.num_local_experts:
            names = {"router": f"{path}.block_sparse_moe.router", "experts": f"{path}.block_sparse_moe.experts"}
            mlp = mixture(config, number, is_normalized=True, shared=mlp, **names)
        if kind == "linear_attention":
            layer = replace(layer, mixer=mamba(config, f"{path}.mamba"))
        elif config.position_embedding_type != "rope":
            attention = llama_attention(config, number, scale=config.attention_multiplier, angles=None)
            layer = replace(layer, mixer=attention)
        layers.append(replace(layer, mlp=mlp))
    return replace(plain, layers=tuple(layers))


def shared_mlp(config: Any, layer: int) -> MLP | None:
    """What stands beside the experts, or alone."""
    path, size = f"layers.{layer}.shared_mlp", config.shared_intermediate_size
    fused = f"{path}.input_linear"
    return None if not size else MLP(
        Weight(fused, 0, size), Weight(fused, size, 2 * size), Weight(f"{path}.output_linear"),
        activation(config.hidden_act),
    )  # fmt: skip


def mamba(config: Any, path: str) -> Mamba2:
    """A layer with a state."""
    return Mamba2(
        Weight(f"{path}.in_proj"), path, Weight(f"{path}.out_proj"), heads=config.mamba_n_heads,
        head_dim=config.mamba_d_head, groups=config.mamba_n_groups, state=config.mamba_d_state,
        epsilon=config.rms_norm_eps, limits=tuple(config.time_step_limit), norm_groups=config.mamba_n_groups,
    )  # fmt: skip


def gguf_config(model: GgufModel) -> dict[str, Any]:
    """See GgufArchitecture."""
    shared = "blk.0.ffn_up_shexp.weight" if "blk.0.ffn_up_shexp.weight" in model.shapes else "blk.0.ffn_up.weight"
    width, has_state = model.rows(shared), model.layers_with("ssm_a")
    experts = model.size("expert_count", 0, least=0)
    kv_heads = max(model.sizes("attention.head_count_kv", len(has_state), least=0))
    return granite.granite_config(
        model, "granitemoehybrid", "GraniteMoeHybridForCausalLM",
        layer_types=["linear_attention" if each else FULL for each in has_state],
        position_embedding_type="rope" if model.flag("rope.scaling.finetuned", True) else "nope",
        shared_intermediate_size=width, num_local_experts=experts,
        num_experts_per_tok=model.size("expert_used_count", 0, least=0),
        num_key_value_heads=kv_heads, **(mamba2.mamba_sizes(model) if any(has_state) else {}),
    )  # fmt: skip


SHARED = "shared_mlp.input_linear.weight"
EXPERT_TENSORS = {
    **expert_tensors("block_sparse_moe.experts", "block_sparse_moe.router"),
    "ffn_gate_shexp.weight": TensorPart(SHARED), "ffn_up_shexp.weight": TensorPart(SHARED, 1),
    "ffn_down_shexp": "shared_mlp.output_linear",
}  # fmt: skip
TENSORS = {
    **EXPERT_TENSORS, **mamba2.mamba_tensors("mamba"), "ffn_gate.weight": TensorPart(SHARED),
    "ffn_up.weight": TensorPart(SHARED, 1), "ffn_down": "shared_mlp.output_linear",
}  # fmt: skip
GGUF = GgufArchitecture("granitehybrid", gguf_config, TENSORS, interleaves_heads=True)
