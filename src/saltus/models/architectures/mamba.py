"""Mamba: layers of a selective state space, without attention and MLPs."""

from typing import Any

from saltus.models.decoder_description import DecoderDescription, Layer, NotDescribed
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
