"""Nemotron-H and Nemotron 3: a layer is Mamba-2, attention without angles, an MLP or a mixture of experts alone."""

from typing import Any

from saltus.models.architectures import mamba2
from saltus.models.architectures.deepseek_v3 import deepseek_expert_counts
from saltus.models.common_layers import activation, deepseek_mixture, llama_attention
from saltus.models.decoder_description import MLP, DecoderDescription, Experts, Layer, NotDescribed
from saltus.models.gguf_architecture import FULL, SIGMOID, GgufArchitecture, GgufModel, check_gates, rope
from saltus.models.mixer_description import Mamba2, Norm, Weight

CLASSES = {"NemotronHForCausalLM"}


def mamba(config: Any, path: str) -> Mamba2:
    """A layer with a state; its steps have the least one that the configuration draws them from."""
    return Mamba2(
        Weight(f"{path}.in_proj"), path, Weight(f"{path}.out_proj"), heads=config.mamba_num_heads,
        head_dim=config.mamba_head_dim, groups=config.n_groups, state=config.ssm_state_size,
        epsilon=config.layer_norm_epsilon, limits=(config.time_step_min, float("inf")), norm_groups=config.n_groups,
    )  # fmt: skip


def mlp(config: Any, path: str) -> MLP:
    """Without a gate."""
    return MLP(None, Weight(f"{path}.up_proj"), Weight(f"{path}.down_proj"), activation(config.mlp_hidden_act))


def experts(config: Any, number: int, path: str) -> Experts:
    """DeepSeek's mixture, of experts without gates, which may read latent vectors (Nemotron 3 Super)."""
    latent = Weight(f"{path}.fc1_latent_proj"), Weight(f"{path}.fc2_latent_proj")
    return deepseek_mixture(
        config, number, router=f"{path}.gate", experts=f"{path}.experts", has_gate=False,
        activation=activation(config.mlp_hidden_act), selection_bias=f"{path}.gate.e_score_correction_bias",
        shared=mlp(config, f"{path}.shared_experts") if config.moe_shared_expert_intermediate_size else None,
        latent=None if config.moe_latent_size is None else latent,
    )  # fmt: skip


def describe(config: Any) -> DecoderDescription:
    """See saltus.models.architectures."""
    if config.mamba_hidden_act not in ("silu", "swish"):
        raise NotDescribed(f"the activation {config.mamba_hidden_act}")
    layers, epsilon = [], config.layer_norm_epsilon
    for number, kind in enumerate(config.layers_block_type):
        path, norm = f"layers.{number}.mixer", Norm(f"layers.{number}.norm", epsilon, "rms-float32")
        if kind in ("mlp", "moe"):
            layers.append(
                Layer(None, mlp(config, path) if kind == "mlp" else experts(config, number, path), None, norm)
            )
            continue
        query, key, value, output = (Weight(f"{path}.{name}_proj") for name in "qkvo")
        attention = llama_attention(
            config, number, query=query, key=key, value=value, output=output, angles=None, span=None
        )  # fmt: skip
        layers.append(Layer(mamba(config, path) if kind == "linear_attention" else attention, None, norm, None))
    return DecoderDescription(tuple(layers), Norm("norm_f", epsilon, "rms-float32"), embedding="embeddings")


def gguf_config(model: GgufModel) -> dict[str, Any]:
    """See GgufArchitecture. A layer is of the kind whose tensors it has; files do not have the least step."""
    check_gates(model, SIGMOID)
    owners = {
        "linear_attention": model.layers_with("ssm_a"), FULL: model.layers_with("attn_q.weight"),
        "moe": model.layers_with("ffn_gate_inp.weight"), "mlp": model.layers_with("ffn_up.weight"),
    }  # fmt: skip
    kinds = [_kind(number, owners) for number in range(len(owners["mlp"]))]
    sizes, blocks, heads = mamba2.mamba_sizes(model), model.size("block_count"), model.size("attention.head_count")
    return {
        "architectures": ["NemotronHForCausalLM"], "model_type": "nemotron_h", "layers_block_type": kinds,
        "num_hidden_layers": len(kinds), "hidden_size": model.size("embedding_length"),
        "num_attention_heads": heads, "head_dim": model.size("attention.key_length"),
        "num_key_value_heads": max(model.sizes("attention.head_count_kv", blocks, least=0)) or heads,
        "intermediate_size": max(model.sizes("feed_forward_length", blocks, least=0)) or 1,
        "rope_parameters": rope(model),  # of no layer
        "max_position_embeddings": model.size("context_length"),
        "layer_norm_epsilon": model.number("attention.layer_norm_rms_epsilon"), "mlp_hidden_act": "relu2",
        "mlp_bias": any(model.layers_with("ffn_up.bias")), "use_bias": any(model.layers_with("ssm_in.bias")),
        "mamba_num_heads": sizes["mamba_n_heads"], "mamba_head_dim": sizes["mamba_d_head"],
        "n_groups": sizes["mamba_n_groups"], "ssm_state_size": sizes["mamba_d_state"],
        "conv_kernel": sizes["mamba_d_conv"], "use_conv_bias": sizes["mamba_conv_bias"],
        **(_experts_config(model, kinds.index("moe")) if "moe" in kinds else {}),
    }  # fmt: skip


def _kind(number: int, owners: dict[str, list[bool]]) -> str:
    kind = next((kind for kind, has in owners.items() if has[number]), None)
    if kind is None:
        raise ValueError(f"it lacks the tensors of layer {number}; fetch it again")
    return kind


def _experts_config(model: GgufModel, first: int) -> dict[str, Any]:
    """Of DeepSeek's mixture; `first` is a layer that has one."""
    shared = model.rows(f"blk.{first}.ffn_up_shexp.weight")
    latent = model.rows(name) if (name := f"blk.{first}.ffn_latent_down.weight") in model.shapes else None
    counts = deepseek_expert_counts(model)
    return {**counts, "moe_shared_expert_intermediate_size": shared, "moe_latent_size": latent}


TENSORS = {
    **mamba2.mamba_tensors("mixer"), "token_embd": "model.embeddings", "output_norm": "model.norm_f",
    "attn_norm": "norm", "attn_output": "mixer.o_proj", **{f"attn_{name}": f"mixer.{name}_proj" for name in "qkv"},
    **{f"ffn_{name}": f"mixer.{name}_proj" for name in ("up", "down")},
    **{f"ffn_{name}_shexp": f"mixer.shared_experts.{name}_proj" for name in ("up", "down")},
    **{f"ffn_{name}_exps.weight": f"mixer.experts.{name}_proj" for name in ("up", "down")},
    "ffn_latent_down": "mixer.fc1_latent_proj", "ffn_latent_up": "mixer.fc2_latent_proj",
    "ffn_gate_inp": "mixer.gate", "exp_probs_b.bias": "mixer.gate.e_score_correction_bias",
    # of the block that predicts later tokens, which is two layers
    "post_attention_norm": "post_attention_norm", "nextn.shared_head_norm": "head.norm",
    "nextn.shared_head_head": "head.head",
    **{f"nextn.{name}": f"head.{name}" for name in ("eh_proj", "enorm", "hnorm", "embed_tokens")},
}  # fmt: skip
GGUF = tuple(GgufArchitecture(name, gguf_config, TENSORS) for name in ("nemotron_h", "nemotron_h_moe"))
