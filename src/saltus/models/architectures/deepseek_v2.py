"""DeepSeek V2: latent attention; experts are chosen by their softmax, perhaps from the best groups."""

from typing import Any

from saltus.models.common_layers import latent_attention, llama_decoder, llama_layer, llama_mlp, mixture
from saltus.models.decoder_description import DecoderDescription
from saltus.models.mixer_description import Angles

CLASSES = {"DeepseekV2ForCausalLM"}


def describe(config: Any) -> DecoderDescription:
    """See saltus.models.architectures."""
    groups, layers = {}, []
    if config.topk_method == "group_limited_greedy":
        groups = {"groups": config.n_group, "top_groups": config.topk_group}
    for layer in range(config.num_hidden_layers):
        mlp = llama_mlp(config, layer)
        if layer >= config.first_k_dense_replace:
            shared = llama_mlp(config, layer, "mlp.shared_experts")
            mlp = mixture(config, layer, scale=config.routed_scaling_factor, shared=shared, **groups)
        mixer = latent_attention(config, layer, angles=Angles(layout="once"), rope_interleaved=True)
        layers.append(llama_layer(config, layer, mixer=mixer, mlp=mlp))
    return llama_decoder(config, layers)
