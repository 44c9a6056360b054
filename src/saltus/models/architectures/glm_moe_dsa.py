"""GLM-5: DeepSeek V3.2's layers; some attend to the keys that the layer before them chose."""

from typing import Any

from saltus.models.architectures import deepseek_v3, deepseek_v32
from saltus.models.common_layers import deepseek_mlp, indexer, latent_attention, llama_decoder, llama_layer
from saltus.models.decoder_description import DecoderDescription, NotDescribed
from saltus.models.gguf_architecture import GgufArchitecture, GgufModel, llama_config, num_layers

CLASSES = {"GlmMoeDsaForCausalLM"}


def describe(config: Any) -> DecoderDescription:
    """See saltus.models.architectures."""
    layers, chooser = [], None
    chosen: dict[str, Any] = {}
    for layer in range(config.num_hidden_layers):
        if config.indexer_types[layer] != "shared":
            chooser, chosen = layer, {"indexer": indexer(config, layer, rope_interleaved=True)}
        elif chooser is None:
            raise NotDescribed("a first layer without an indexer")
        else:
            chosen = {"shares_choice": chooser}
        mixer = latent_attention(config, layer, **chosen)
        mlp = deepseek_mlp(config, layer, config.mlp_layer_types[layer] == "sparse")
        layers.append(llama_layer(config, layer, mixer=mixer, mlp=mlp))
    return llama_decoder(config, layers)


def gguf_config(model: GgufModel) -> dict[str, Any]:
    """See GgufArchitecture; in a file that does not say which layers have indexers, those with its tensors do."""
    given, layers = model.get("attention.indexer.types"), num_layers(model)
    if given is None:
        given = model.layers_with("indexer.attn_k.weight")
    if not isinstance(given, list) or len(given) < layers or not all(each in (0, 1) for each in given):
        raise ValueError(f"it does not say of each of its {layers:,} layers whether it has an indexer; fetch it again")
    kinds = ["full" if each else "shared" for each in given[:layers]]
    settings = deepseek_v32.sparse_settings(model)
    return llama_config(model, "glm_moe_dsa", "GlmMoeDsaForCausalLM", indexer_types=kinds, **settings)


GGUF = GgufArchitecture("glm-dsa", gguf_config, deepseek_v32.TENSORS, repeated=deepseek_v3.SPLIT)
