"""DeepSeek V3.2: DeepSeek V3's layers, each of which attends to the keys that an indexer chooses."""

from typing import Any

from saltus.models.architectures import deepseek_v3
from saltus.models.common_layers import deepseek_mlp, indexer, latent_attention, llama_decoder, llama_layer
from saltus.models.decoder_description import DecoderDescription
from saltus.models.gguf_architecture import SIGMOID, GgufArchitecture, GgufModel, check_gates, llama_config

CLASSES = {"DeepseekV32ForCausalLM"}


def describe(config: Any) -> DecoderDescription:
    """See saltus.models.architectures."""
    layers = []
    for layer in range(config.num_hidden_layers):
        mixer = latent_attention(config, layer, indexer=indexer(config, layer, rope_interleaved=False))
        mlp = deepseek_mlp(config, layer, config.mlp_layer_types[layer] == "sparse")
        layers.append(llama_layer(config, layer, mixer=mixer, mlp=mlp))
    return llama_decoder(config, layers)


def indexer_settings(model: GgufModel) -> dict[str, Any]:
    """Indexers, by DeepSeek's names; experts are chosen by sigmoids."""
    check_gates(model, SIGMOID)
    return {
        "index_n_heads": model.size("attention.indexer.head_count"),
        "index_head_dim": model.size("attention.indexer.key_length"),
        "index_topk": model.size("attention.indexer.top_k"),
    }


def sparse_settings(model: GgufModel) -> dict[str, Any]:
    """Latent attention, its indexers and experts, by DeepSeek's names."""
    return deepseek_v3.latent_settings(model) | deepseek_v3.deepseek_expert_counts(model) | indexer_settings(model)


def gguf_config(model: GgufModel) -> dict[str, Any]:
    """See GgufArchitecture."""
    return llama_config(model, "deepseek_v32", "DeepseekV32ForCausalLM", **sparse_settings(model))


INDEXER = "self_attn.indexer"
TENSORS = {
    **deepseek_v3.TENSORS, "indexer.attn_q_b": f"{INDEXER}.wq_b", "indexer.attn_k": f"{INDEXER}.wk",
    "indexer.k_norm": f"{INDEXER}.k_norm", "indexer.proj": f"{INDEXER}.weights_proj",
}  # fmt: skip
GGUF = GgufArchitecture("deepseek32", gguf_config, TENSORS, repeated=deepseek_v3.SPLIT)
