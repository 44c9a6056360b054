"""Falcon-H1: Mamba-2 and attention side by side in every layer, and multipliers nearly everywhere."""

from typing import Any

from saltus.models.architectures import mamba2
from saltus.models.common_layers import activation, head_dim, llama_attention
from saltus.models.decoder_description import MLP, DecoderDescription, Layer, NotDescribed
from saltus.models.gguf_architecture import GgufArchitecture, GgufModel, llama_config
from saltus.models.mixer_description import Mamba2, Norm, ParallelMixers, Weight

CLASSES = {"FalconH1ForCausalLM"}


def mamba(config: Any, path: str) -> Mamba2:
    """A layer with a state. A multiplier of its inputs is one of what they give."""
    heads, size = config.mamba_n_heads, config.mamba_n_heads * config.mamba_d_head
    keys = config.mamba_n_groups * config.mamba_d_state
    scales = [config.ssm_in_multiplier * scale for scale in config.ssm_multipliers]
    return Mamba2(
        Weight(f"{path}.in_proj"), path, Weight(f"{path}.out_proj"), heads=heads, head_dim=config.mamba_d_head,
        groups=config.mamba_n_groups, state=config.mamba_d_state, epsilon=config.rms_norm_eps,
        limits=tuple(config.time_step_limit), has_norm=config.mamba_rms_norm, norm_groups=config.mamba_n_groups,
        gate_first=not config.mamba_norm_before_gate,
        scales=tuple(zip(scales, (size, size, keys, keys, heads), strict=True)),
    )  # fmt: skip


def describe(config: Any) -> DecoderDescription:
    """See saltus.models.architectures."""
    inner = config.attention_in_multiplier
    if (config.attention_bias and inner != 1) or (config.mamba_proj_bias and config.ssm_in_multiplier != 1):
        raise NotDescribed("biases of multiplied inputs")
    layers, epsilon = [], config.rms_norm_eps
    gate_scale, output_scale = config.mlp_multipliers
    for number in range(config.num_hidden_layers):
        path = f"layers.{number}"
        scale = head_dim(config) ** -0.5 * inner * inner * config.key_multiplier
        attention = llama_attention(config, number, scale=scale, span=None)
        mixers = (
            (mamba(config, f"{path}.mamba"), config.ssm_out_multiplier),
            (attention, inner * config.attention_out_multiplier),
        )
        gate, up, down = (Weight(f"{path}.feed_forward.{name}_proj") for name in ("gate", "up", "down"))
        active = activation(config.hidden_act)
        mlp = MLP(gate, up, down, active, gate_scale=gate_scale, output_scale=output_scale)
        norms = Norm(f"{path}.input_layernorm", epsilon), Norm(f"{path}.pre_ff_layernorm", epsilon)
        layers.append(Layer(ParallelMixers(mixers), mlp, *norms))
    return DecoderDescription(
        tuple(layers), Norm("final_layernorm", epsilon), input_scale=config.embedding_multiplier,
        logit_scale=config.lm_head_multiplier,
    )  # fmt: skip


def gguf_config(model: GgufModel) -> dict[str, Any]:
    """See GgufArchitecture; files have all multipliers in the weights."""
    sizes = mamba2.mamba_sizes(model)
    ones = "attention_in", "attention_out", "key", "ssm_in", "ssm_out", "lm_head", "embedding"
    return llama_config(
        model, "falcon_h1", "FalconH1ForCausalLM", mamba_d_ssm=model.size("ssm.inner_size"), **sizes,
        mamba_rms_norm=any(model.layers_with("ssm_norm.weight")), mamba_norm_before_gate=False,
        mlp_multipliers=[1.0, 1.0], ssm_multipliers=[1.0] * 5, **{f"{name}_multiplier": 1.0 for name in ones},
    )  # fmt: skip


TENSORS = {
    **mamba2.mamba_tensors("mamba"), "output_norm": "model.final_layernorm", "ffn_norm": "pre_ff_layernorm.weight",
    "ffn_norm.weight": "pre_ff_layernorm.weight", "ffn_gate": "feed_forward.gate_proj",
    "ffn_up": "feed_forward.up_proj", "ffn_down": "feed_forward.down_proj",
}  # fmt: skip
GGUF = GgufArchitecture("falcon-h1", gguf_config, TENSORS)
