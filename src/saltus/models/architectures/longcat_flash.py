"""LongCat-Flash: pairs of layers with latent attention and an MLP; beside the second one are experts."""

from typing import Any

from saltus.models.common_layers import latent_attention, llama_decoder, llama_mlp, mixture
from saltus.models.decoder_description import DecoderDescription, Layer
from saltus.models.mixer_description import Norm

CLASSES = {"LongcatFlashForCausalLM"}


def describe(config: Any) -> DecoderDescription:
    """See saltus.models.architectures; two layers are one of Transformers."""
    size, layers = config.hidden_size, []
    scales = {
        "query_scale": (size / config.q_lora_rank) ** 0.5, "latent_scale": (size / config.kv_lora_rank) ** 0.5,
    }  # fmt: skip
    for number in range(2 * config.num_layers):
        layer, half = divmod(number, 2)
        path = f"layers.{layer}"
        experts = mixture(
            config, layer, router=f"{path}.mlp.router.classifier", top_k=config.moe_topk,
            scale=config.routed_scaling_factor, zero_experts=config.zero_expert_num or 0,
            selection_bias=f"{path}.mlp.router.e_score_correction_bias",
        )  # fmt: skip
        layers.append(
            Layer(
                latent_attention(config, layer, f"self_attn.{half}", **scales),
                llama_mlp(config, layer, f"mlps.{half}"),
                Norm(f"{path}.input_layernorm.{half}", config.rms_norm_eps),
                Norm(f"{path}.post_attention_layernorm.{half}", config.rms_norm_eps),
                shortcut=None if half else experts,
            )
        )  # fmt: skip
    return llama_decoder(config, layers)
