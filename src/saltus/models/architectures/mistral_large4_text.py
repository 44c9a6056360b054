"""The text of Mistral Large 4: latent attention to chosen keys, scalable softmax, layers that share latent vectors."""

from typing import Any

from saltus.models.common_layers import (
    deepseek_mixture,
    indexer,
    latent_attention,
    llama_decoder,
    llama_layer,
    llama_mlp,
)
from saltus.models.decoder_description import DecoderDescription, NotDescribed
from saltus.models.mixer_description import Norm

CLASSES = {"MistralLarge4ForCausalLM"}


def describe(config: Any) -> DecoderDescription:
    """See saltus.models.architectures."""
    layers, chooser = [], None
    sources: dict[int, int] = {}  # the layer whose latent vectors later ones of the same kind share
    for layer, source in enumerate(config.kv_source_layers):
        path, is_rotated = f"layers.{layer}.self_attn", bool(config.no_rope_layers[layer])
        changes: dict[str, Any] = {
            "latent_norm": Norm(f"{path}.kv_a_layernorm", config.rms_norm_eps), "rope_interleaved": True,
            "head_scale": f"{path}.softmax_scaling",
        }  # fmt: skip
        if not is_rotated:
            changes |= {"angles": None, "nope_dim": config.qk_nope_head_dim + config.qk_rope_head_dim, "rope_dim": 0}
        if source != layer:
            if sources.get(is_rotated) != source:
                raise NotDescribed("latent vectors of a layer that is not the last of its kind")
            changes |= {"latent": None, "shares": source}
        elif layer in config.kv_source_layers[layer + 1 :]:
            sources[is_rotated] = layer
        if config.indexer_types[layer] != "shared":
            chooser, changes["indexer"] = layer, _indexer(config, layer)
        elif chooser is None:
            raise NotDescribed("a first layer without an indexer")
        else:
            changes["shares_choice"] = chooser
        mlp = llama_mlp(config, layer)
        if config.mlp_layer_types[layer] == "sparse":
            mlp = deepseek_mixture(config, layer, scoring="softmax", selection_bias=None)
        mixer = latent_attention(config, layer, **changes)
        layers.append(llama_layer(config, layer, mixer=mixer, mlp=mlp))
    return llama_decoder(config, layers, logit_softcap=config.final_logit_softcapping)


def _indexer(config: Any, layer: int) -> Any:
    path = f"layers.{layer}.self_attn.indexer"
    return indexer(
        config, layer, rope_interleaved=True, query_norm=Norm(f"{path}.q_input_norm", 1e-6, "layer"),
        head_scale=f"{path}.softmax_scaling",
    )  # fmt: skip
