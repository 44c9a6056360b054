"""Jamba: Mamba in most layers, attention without angles in the others; experts in some."""

from typing import Any

from saltus.models.architectures.mamba import mamba, mamba_tensors
from saltus.models.common_layers import llama_attention, llama_decoder, llama_layer, llama_mlp, mixture
from saltus.models.decoder_description import DecoderDescription, NotDescribed
from saltus.models.gguf_architecture import GgufArchitecture, GgufModel, expert_tensors, llama_config, num_layers
from saltus.models.mixer_description import Norm

CLASSES = {"JambaForCausalLM"}


def describe(config: Any) -> DecoderDescription:
    """See saltus.models.architectures."""
    if config.hidden_act not in ("silu", "swish"):
        raise NotDescribed(f"the activation {config.hidden_act}")
    layers = []
    for layer, (kind, experts) in enumerate(zip(config.layers_block_type, config.layers_num_experts, strict=True)):
        path = f"layers.{layer}"
        if kind == "attention":
            mixer = llama_attention(config, layer, angles=None, span=None)
        else:
            first, second, third = (
                Norm(f"{path}.mamba.{name}_layernorm", config.rms_norm_eps) for name in ("dt", "b", "c")
            )
            mixer = mamba(
                f"{path}.mamba", config.mamba_expand * config.hidden_size, config.mamba_d_state, config.mamba_dt_rank,
                (first, second, third),
            )  # fmt: skip
        names = {"router": f"{path}.feed_forward.router", "experts": f"{path}.feed_forward.experts"}
        mlp = mixture(config, layer, **names) if experts > 1 else llama_mlp(config, layer, "feed_forward")
        layers.append(
            llama_layer(
                config, layer, mixer=mixer, mlp=mlp,
                mixer_norm=Norm(f"{path}.input_layernorm", config.rms_norm_eps),
                mlp_norm=Norm(f"{path}.pre_ff_layernorm", config.rms_norm_eps),
            )
        )  # fmt: skip
    return llama_decoder(config, layers, norm=Norm("final_layernorm", config.rms_norm_eps))


def gguf_config(model: GgufModel) -> dict[str, Any]:
    """See GgufArchitecture."""
    heads = model.sizes("attention.head_count_kv", num_layers(model), least=0)
    if len(set(heads) - {0}) != 1:
        raise ValueError("its attention.head_count_kv must have one number beside 0; fetch it again")
    attends, mixes = [count > 0 for count in heads], model.layers_with("ffn_gate_inp.weight")
    first, period = _period(attends)
    first_mixture, period_of_mixtures = _period(mixes) if any(mixes) else (0, 1)
    hidden = model.size("embedding_length")
    return llama_config(
        model, "jamba", "JambaForCausalLM", num_key_value_heads=max(heads),
        num_experts=model.size("expert_count") if any(mixes) else 1,
        num_experts_per_tok=model.size("expert_used_count", 1), expert_layer_offset=first_mixture,
        expert_layer_period=period_of_mixtures, attn_layer_offset=first, attn_layer_period=period,
        mamba_d_state=model.size("ssm.state_size"), mamba_d_conv=model.size("ssm.conv_kernel"),
        mamba_expand=model.size("ssm.inner_size") // hidden, mamba_dt_rank=model.size("ssm.time_step_rank"),
        mamba_conv_bias=any(model.layers_with("ssm_conv1d.bias")), mamba_proj_bias=False,
    )  # fmt: skip


def _period(layers: list[bool]) -> tuple[int, int]:
    """The first of these layers, and how many there are from one to the next. Errors: ValueError."""
    first, *others = [number for number, is_one in enumerate(layers) if is_one]
    period = others[0] - first if others else max(len(layers), 1)
    if layers != [number % period == first for number in range(len(layers))]:
        raise ValueError("its layers with attention or experts do not come at one distance, which is not supported")
    return first, period


TENSORS = {
    **mamba_tensors("mamba"), **expert_tensors("feed_forward.experts", "feed_forward.router"),
    **{f"ssm_{name}_norm": f"mamba.{name}_layernorm" for name in ("dt", "b", "c")},
    **{f"ffn_{name}": f"feed_forward.{name}_proj" for name in ("gate", "up", "down")},
    "output_norm": "model.final_layernorm", "ffn_norm": "pre_ff_layernorm",
}  # fmt: skip
GGUF = GgufArchitecture("jamba", gguf_config, TENSORS)
