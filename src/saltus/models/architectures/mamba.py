"""Mamba: layers of a selective state space, without attention and MLPs."""

from typing import Any

from saltus.models.decoder_description import DecoderDescription, Layer, NotDescribed
from saltus.models.gguf_architecture import GgufArchitecture, GgufModel, Target, TensorPart, num_layers
from saltus.models.mixer_description import Mamba, Norm, Weight

CLASSES = {"MambaForCausalLM"}


def describe(config: Any) -> DecoderDescription:
    """See saltus.models.architectures. The hidden states are of the model's dtype, `residual_in_fp32` or not."""
    return decoder(config, None)


def decoder(config: Any, norms: tuple[Norm, Norm, Norm] | None) -> DecoderDescription:
    """Mamba's layers, whose steps, B and C have these norms."""
    if config.hidden_act not in ("silu", "swish"):
        raise NotDescribed(f"the activation {config.hidden_act}")
    epsilon, layers = config.layer_norm_epsilon, []
    for number in range(config.num_hidden_layers):
        mixer = mamba(
            f"layers.{number}.mixer", config.intermediate_size, config.state_size, int(config.time_step_rank), norms
        )
        layers.append(Layer(mixer, None, Norm(f"layers.{number}.norm", epsilon), None))
    return DecoderDescription(tuple(layers), Norm("norm_f", epsilon), embedding="embeddings")


def mamba(path: str, channels: int, state: int, rank: int, norms: tuple[Norm, Norm, Norm] | None) -> Mamba:
    """A layer with a state, by its usual names."""
    return Mamba(
        Weight(f"{path}.in_proj"), path, Weight(f"{path}.x_proj"), Weight(f"{path}.dt_proj", has_bias=False),
        f"{path}.dt_proj.bias", Weight(f"{path}.out_proj"), channels, state, rank, norms,
    )  # fmt: skip


def mamba_tensors(path: str) -> dict[str, Target]:
    """Of a layer with a state."""
    return {
        "ssm_in": f"{path}.in_proj", "ssm_x": f"{path}.x_proj", "ssm_dt": f"{path}.dt_proj",
        "ssm_out": f"{path}.out_proj", "ssm_conv1d": f"{path}.conv1d",
        "ssm_conv1d.weight": TensorPart(f"{path}.conv1d.weight", is_reshaped=True),
        "ssm_a": TensorPart(f"{path}.A_log", is_negative_exponential=True), "ssm_d": TensorPart(f"{path}.D"),
    }  # fmt: skip


def gguf_config(model: GgufModel) -> dict[str, Any]:
    """See GgufArchitecture; Falcon Mamba has norms besides."""
    kind, name = ("falcon_mamba", "FalconMamba") if model.flag("ssm.dt_b_c_rms") else ("mamba", "Mamba")
    hidden, size = model.size("embedding_length"), model.size("ssm.inner_size")
    return {
        "architectures": [f"{name}ForCausalLM"], "model_type": kind, "hidden_act": "silu", "use_bias": False,
        "hidden_size": hidden, "intermediate_size": size, "expand": size // hidden,
        "num_hidden_layers": num_layers(model), "state_size": model.size("ssm.state_size"),
        "conv_kernel": model.size("ssm.conv_kernel"), "time_step_rank": model.size("ssm.time_step_rank"),
        "use_conv_bias": "blk.0.ssm_conv1d.bias" in model.shapes,
        "max_position_embeddings": model.size("context_length"),
        "layer_norm_epsilon": model.number("attention.layer_norm_rms_epsilon"),
    }  # fmt: skip


TENSORS = {
    **mamba_tensors("mixer"), "token_embd": "backbone.embeddings", "output_norm": "backbone.norm_f",
    "attn_norm": "norm",
}  # fmt: skip
GGUF = GgufArchitecture("mamba", gguf_config, TENSORS, layers="backbone.layers")
