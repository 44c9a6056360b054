"""Mamba-2: layers of a selective state space, without attention and MLPs."""

from typing import Any

from saltus.models.decoder_description import DecoderDescription, Layer, NotDescribed
from saltus.models.gguf_architecture import GgufArchitecture, GgufModel, Target, TensorPart, num_layers
from saltus.models.mixer_description import Mamba2, Norm, Weight

CLASSES = {"Mamba2ForCausalLM"}


def describe(config: Any) -> DecoderDescription:
    """See saltus.models.architectures. The hidden states are of the model's dtype, `residual_in_fp32` or not."""
    if config.hidden_act not in ("silu", "swish"):
        raise NotDescribed(f"the activation {config.hidden_act}")
    epsilon, layers = config.layer_norm_epsilon, []
    for number in range(config.num_hidden_layers):
        path = f"layers.{number}.mixer"
        mixer = Mamba2(
            Weight(f"{path}.in_proj"), path, Weight(f"{path}.out_proj"), heads=config.num_heads,
            head_dim=config.head_dim, groups=config.n_groups, state=config.state_size, epsilon=epsilon,
            limits=tuple(config.time_step_limit), norm_groups=config.n_groups,
        )  # fmt: skip
        layers.append(Layer(mixer, None, Norm(f"layers.{number}.norm", epsilon), None))
    return DecoderDescription(tuple(layers), Norm("norm_f", epsilon), embedding="embeddings")


def mamba_tensors(path: str) -> dict[str, Target]:
    """Of a layer with a state."""
    return {
        "ssm_in": f"{path}.in_proj", "ssm_out": f"{path}.out_proj", "ssm_dt.bias": f"{path}.dt_bias",
        "ssm_conv1d": f"{path}.conv1d", "ssm_conv1d.weight": TensorPart(f"{path}.conv1d.weight", is_reshaped=True),
        "ssm_a": TensorPart(f"{path}.A_log", is_negative_exponential=True, is_reshaped=True),
        "ssm_d": TensorPart(f"{path}.D", is_reshaped=True),
        "ssm_norm.weight": TensorPart(f"{path}.norm.weight", is_reshaped=True),
    }  # fmt: skip


def mamba_sizes(model: GgufModel) -> dict[str, Any]:
    """Sizes of layers with a state, by their names in models that have attention, too."""
    heads, size = model.size("ssm.time_step_rank"), model.size("ssm.inner_size")
    return {
        "mamba_n_heads": heads, "mamba_d_head": size // heads, "mamba_n_groups": model.size("ssm.group_count", 1),
        "mamba_d_state": model.size("ssm.state_size"), "mamba_d_conv": model.size("ssm.conv_kernel"),
        "mamba_expand": size // model.size("embedding_length"), "mamba_proj_bias": False,
        "mamba_conv_bias": any(model.layers_with("ssm_conv1d.bias")),
    }  # fmt: skip


def gguf_config(model: GgufModel) -> dict[str, Any]:
    """See GgufArchitecture."""
    sizes = mamba_sizes(model)
    return {
        "architectures": ["Mamba2ForCausalLM"], "model_type": "mamba2", "hidden_act": "silu", "use_bias": False,
        "hidden_size": model.size("embedding_length"), "num_hidden_layers": num_layers(model),
        "num_heads": sizes["mamba_n_heads"], "head_dim": sizes["mamba_d_head"], "n_groups": sizes["mamba_n_groups"],
        "state_size": sizes["mamba_d_state"], "conv_kernel": sizes["mamba_d_conv"], "expand": sizes["mamba_expand"],
        "use_conv_bias": sizes["mamba_conv_bias"], "max_position_embeddings": model.size("context_length"),
        "layer_norm_epsilon": model.number("attention.layer_norm_rms_epsilon"),
    }  # fmt: skip


TENSORS = {
    **mamba_tensors("mixer"), "token_embd": "backbone.embeddings", "output_norm": "backbone.norm_f",
    "attn_norm": "norm",
}  # fmt: skip
GGUF = GgufArchitecture("mamba2", gguf_config, TENSORS, layers="backbone.layers")
