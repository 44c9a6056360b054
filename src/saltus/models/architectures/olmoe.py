"""OLMoE: one norm over all heads of queries, and one of keys; a mixture of experts in every layer."""

from typing import Any

from saltus.models.common_layers import head_norms, llama_attention, llama_decoder, llama_layer, mixture
from saltus.models.decoder_description import DecoderDescription, NotDescribed
from saltus.models.gguf_architecture import GgufArchitecture, GgufModel, expert_counts, expert_tensors, llama_config

CLASSES = {"OlmoeForCausalLM"}


def describe(config: Any) -> DecoderDescription:
    """See saltus.models.architectures."""
    if config.clip_qkv is not None:
        raise NotDescribed("queries, keys and values that are clipped")
    layers = []
    for layer in range(config.num_hidden_layers):
        attention = llama_attention(config, layer, norm_per_head=False, **head_norms(config, layer))
        mlp = mixture(config, layer, is_normalized=config.norm_topk_prob)
        layers.append(llama_layer(config, layer, mixer=attention, mlp=mlp))
    return llama_decoder(config, layers)


def gguf_config(model: GgufModel) -> dict[str, Any]:
    """See GgufArchitecture."""
    counts = expert_counts(model)
    return llama_config(
        model, "olmoe", "OlmoeForCausalLM", norm_topk_prob=False, clip_qkv=None,
        intermediate_size=counts.pop("moe_intermediate_size"), **counts,
    )  # fmt: skip


GGUF = GgufArchitecture("olmoe", gguf_config, expert_tensors())
