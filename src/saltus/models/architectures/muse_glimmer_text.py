"""The text of Muse Glimmer: four norms, norms of heads without weights, gates of attention, rotation in windows."""

from typing import Any

from saltus.models.architectures import gemma2
from saltus.models.common_layers import float32_norm, head_dim, llama_attention, llama_decoder, llama_layer
from saltus.models.decoder_description import DecoderDescription
from saltus.models.gguf_architecture import FULL, GgufArchitecture, GgufModel, layer_types, llama_config, num_layers
from saltus.models.mixer_description import Angles, Norm, Weight

CLASSES = {"MuseGlimmerForCausalLM"}


def describe(config: Any) -> DecoderDescription:
    """See saltus.models.architectures."""
    layers, plain = [], Norm(None, config.rms_norm_eps)
    for layer, theta in enumerate(config.layer_rope_theta):
        path = f"layers.{layer}"
        mixer = llama_attention(
            config, layer, angles=Angles() if theta else None, gate=Weight(f"{path}.self_attn.gate_proj"),
            query_norm=plain, key_norm=plain, scale=head_dim(config) ** -0.5 * config.qk_scale_factor,
        )  # fmt: skip
        before, after = (
            {"epsilon": epsilon, "kind": "rms-float32", "offset": 1.0}
            for epsilon in (config.rms_norm_eps, config.post_norm_eps)
        )
        layers.append(
            llama_layer(
                config, layer, mixer=mixer, mixer_norm=Norm(f"{path}.input_layernorm", **before),
                mixer_output_norm=Norm(f"{path}.post_attention_layernorm", **after),
                mlp_norm=Norm(f"{path}.pre_feedforward_layernorm", **before),
                mlp_output_norm=Norm(f"{path}.post_feedforward_layernorm", **after),
            )
        )  # fmt: skip
    return llama_decoder(
        config, layers, norm=float32_norm(config, "norm"), input_norm=plain, logit_scale=config.output_multiplier,
        logit_softcap=config.final_logit_softcapping or 0.0,
    )  # fmt: skip


def gguf_config(model: GgufModel) -> dict[str, Any]:
    """See GgufArchitecture. Files have the factor of queries as weights of their norms; those of keys are 1."""
    factor, others = model.read_numbers("blk.0.attn_q_norm.weight")[0], {1.0}
    for layer in range(num_layers(model)):
        others |= {number / factor for number in model.read_numbers(f"blk.{layer}.attn_q_norm.weight")}
        others |= set(model.read_numbers(f"blk.{layer}.attn_k_norm.weight"))
    if others != {1.0}:
        raise ValueError("its norms of queries or keys have weights of their own, which is not supported")
    types = layer_types(model, 4)
    config = llama_config(
        model, "muse_glimmer_text", "MuseGlimmerForCausalLM", hidden_activation="silu", layer_types=types,
        sliding_window=model.size("attention.sliding_window", 2048), qk_scale_factor=factor,
        output_multiplier=model.number("logit_scale"), post_norm_eps=1e-8,
        final_logit_softcapping=model.number("final_logit_softcapping", 0.0),
    )  # fmt: skip
    theta = config["rope_parameters"]["rope_theta"]
    return config | {"layer_rope_theta": [0 if kind == FULL else theta for kind in types]}


TENSORS = {**gemma2.TENSORS, "attn_gate": "self_attn.gate_proj"}
GGUF = GgufArchitecture(
    "muse-glimmer", gguf_config, TENSORS, interleaves_heads=True,
    ignored=lambda config, tensor: tensor.endswith(("attn_q_norm.weight", "attn_k_norm.weight")),
)  # fmt: skip
