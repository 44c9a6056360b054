"""GLM-5: DeepSeek V3.2's layers; some attend to the keys that the layer before them chose."""

from collections.abc import Callable
from typing import Any

from saltus.models.architectures import deepseek_v3, deepseek_v32
from saltus.models.common_layers import deepseek_mlp, indexer, latent_attention, llama_decoder, llama_layer
from saltus.models.decoder_description import DecoderDescription, NotDescribed
from saltus.models.gguf_architecture import GgufArchitecture, GgufModel, llama_config, num_layers
from saltus.models.mixer_description import Indexer

CLASSES = {"GlmMoeDsaForCausalLM"}


def choices(config: Any, indexer_of: Callable[[int], Indexer]) -> list[dict[str, Any]]:
    """Of each layer, the indexer that it has, or whose choice it shares."""
    found: list[dict[str, Any]] = []
    chooser = None
    for layer in range(config.num_hidden_layers):
        if config.indexer_types[layer] != "shared":
            chooser = layer
            found.append({"indexer": indexer_of(layer)})
        elif chooser is None:
            raise NotDescribed("a first layer without an indexer")
        else:
            found.append({"shares_choice": chooser})
    return found


def describe(config: Any) -> DecoderDescription:
    """See saltus.models.architectures."""
    layers = []
    for layer, chosen in enumerate(choices(config, lambda layer: indexer(config, layer, rope_interleaved=True))):
        mixer = latent_attention(config, layer, **chosen)
        mlp = deepseek_mlp(config, layer, config.mlp_layer_types[layer] == "sparse")
        layers.append(llama_layer(config, layer, mixer=mixer, mlp=mlp))
    return llama_decoder(config, layers)


def indexer_types(model: GgufModel) -> list[str]:
    """Which layers have an indexer; in a file that does not say it, those with its tensors."""
    given, layers = model.get("attention.indexer.types"), num_layers(model)
    if given is None:
        given = model.layers_with("indexer.attn_k.weight")
    if not isinstance(given, list) or len(given) < layers or not all(each in (0, 1) for each in given):
        raise ValueError(f"it does not say of each of its {layers:,} layers whether it has an indexer; fetch it again")
    return ["full" if each else "shared" for each in given[:layers]]


def gguf_config(model: GgufModel) -> dict[str, Any]:
    """See GgufArchitecture."""
    settings = deepseek_v32.sparse_settings(model)
    return llama_config(model, "glm_moe_dsa", "GlmMoeDsaForCausalLM", indexer_types=indexer_types(model), **settings)


GGUF = GgufArchitecture("glm-dsa", gguf_config, deepseek_v32.TENSORS, repeated=deepseek_v3.SPLIT)
