"""The text of Llama 4: chunks with rotary embeddings, the whole text without, where queries grow; experts or an MLP."""

from typing import Any

from saltus.models.attention_span import Chunks
from saltus.models.common_layers import head_dim, llama_attention, llama_decoder, llama_layer, llama_mlp, mixture
from saltus.models.decoder_description import DecoderDescription, Experts
from saltus.models.gguf_architecture import (
    GgufArchitecture,
    GgufModel,
    expert_counts,
    expert_tensors,
    llama_config,
    num_layers,
    shared_expert_tensors,
)
from saltus.models.mixer_description import Angles, Attention, Norm

CLASSES = {"Llama4ForCausalLM"}
ANGLES = Angles(layout="once")


def attention(config: Any, layer: int) -> Attention:
    """Attention of one of both kinds; rotated heads may have a norm without weights."""
    in_chunks = config.layer_types[layer] == "chunked_attention"
    settings: dict[str, Any] = {
        "span": Chunks(config.attention_chunk_size) if in_chunks else None, "rope_interleaved": True,
    }  # fmt: skip
    if config.no_rope_layers[layer]:  # 1: rotary embeddings
        norm = Norm(None, config.rms_norm_eps) if config.use_qk_norm else None
        settings |= {"angles": ANGLES, "query_norm": norm, "key_norm": norm, "norms_rotated": True}
    else:
        growth = config.attn_scale if config.attn_temperature_tuning else 0.0
        scale = Angles(growth=growth, steps=config.floor_scale, shift=1, zeros=head_dim(config))
        settings |= {"angles": None, "query_angles": scale if growth else None}
    return llama_attention(config, layer, **settings)


def experts(config: Any, layer: int) -> Experts:
    """A mixture whose weights, sigmoids, multiply what experts read, beside a shared expert."""
    path = f"layers.{layer}.feed_forward"
    return mixture(
        config, layer, router=f"{path}.router", experts=f"{path}.experts", scoring="sigmoid", scales_inputs=True,
        is_transposed=True, shared=llama_mlp(config, layer, "feed_forward.shared_expert"),
    )  # fmt: skip


def describe(config: Any) -> DecoderDescription:
    """See saltus.models.architectures."""
    layers = []
    for layer in range(config.num_hidden_layers):
        is_sparse = layer in config.moe_layers
        mlp = experts(config, layer) if is_sparse else llama_mlp(config, layer, "feed_forward")
        layers.append(llama_layer(config, layer, mixer=attention(config, layer), mlp=mlp))
    return llama_decoder(config, layers)


def gguf_config(model: GgufModel) -> dict[str, Any]:
    """See GgufArchitecture; what files leave out is that of Scout and Maverick, as in llama.cpp."""
    counts = expert_counts(model, "num_local_experts")
    in_chunks = model.size("attention.sliding_window", 1, least=0) > 0
    has_experts = model.layers_with("ffn_gate_inp.weight")
    return llama_config(
        model, "llama4_text", "Llama4ForCausalLM", intermediate_size_mlp=model.size("feed_forward_length"),
        intermediate_size=counts.pop("moe_intermediate_size"), use_qk_norm=counts["num_local_experts"] != MAVERICK,
        moe_layers=[layer for layer, is_sparse in enumerate(has_experts) if is_sparse],
        no_rope_layers=[int(not in_chunks or (layer + 1) % 4 > 0) for layer in range(num_layers(model))],
        attention_chunk_size=8192 if in_chunks else None, attn_temperature_tuning=in_chunks, floor_scale=8192,
        attn_scale=0.1, **counts,
    )  # fmt: skip


MAVERICK = 128  # experts of the model whose heads have no norms
EXPERTS = expert_tensors("feed_forward.experts", "feed_forward.router")
TENSORS = {
    **EXPERTS, **shared_expert_tensors("feed_forward.shared_expert"),
    **{f"ffn_{name}": f"feed_forward.{name}_proj" for name in ("gate", "up", "down")},
}  # fmt: skip
GGUF = GgufArchitecture("llama4", gguf_config, TENSORS)
