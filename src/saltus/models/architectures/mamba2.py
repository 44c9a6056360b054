"""Mamba-2: layers of a selective state space, without attention and MLPs."""

from typing import Any

from saltus.models.decoder_description import DecoderDescription, Layer, Mamba2, Norm, NotDescribed, Weight

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
