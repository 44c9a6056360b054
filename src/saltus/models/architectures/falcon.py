"""Falcon 7B to 180B, Falcon 2: LayerNorm, mixer and MLP beside each other; one layer gives a group's vectors."""

from collections.abc import Mapping
from typing import Any

from saltus.models.common_layers import activation, layer_norms
from saltus.models.decoder_description import MLP, DecoderDescription, Layer, NotDescribed
from saltus.models.gguf_architecture import GgufArchitecture, GgufModel, Rows, TensorPart, num_layers, rope
from saltus.models.mixer_description import Attention, Norm, Weight

CLASSES = {"FalconForCausalLM"}


def describe(config: Any) -> DecoderDescription:
    """See saltus.models.architectures."""
    is_new, heads, dim = config.new_decoder_architecture, config.num_attention_heads, config.head_dim
    if config.alibi or (is_new and not config.parallel_attn):
        raise NotDescribed("biases of scores by distance (ALiBi), or Falcon 40B's layers one after the other")
    kv_heads = config.num_kv_heads if is_new or not config.multi_query else 1
    norms_of = config.num_ln_in_parallel_attn or (2 if is_new else 1)
    if not config.parallel_attn:
        names = "input_layernorm", "post_attention_layernorm"
    elif norms_of == 2:
        if not is_new:
            raise NotDescribed("two norms in the layers of Falcon 7B")
        names = "ln_attn", "ln_mlp"
    else:
        names = "input_layernorm", "input_layernorm"
    layers = []
    for layer in range(config.num_hidden_layers):
        path = f"h.{layer}"
        vectors = Weight(f"{path}.self_attention.query_key_value")
        attention = Attention(
            vectors, vectors, vectors, Weight(f"{path}.self_attention.dense"), heads, kv_heads, dim, dim**-0.5,
            grouped=True,
        )  # fmt: skip
        up, down = Weight(f"{path}.mlp.dense_h_to_4h"), Weight(f"{path}.mlp.dense_4h_to_h")
        mlp = MLP(None, up, down, activation(config.activation))
        norms = layer_norms(path, config.layer_norm_epsilon, *names)
        layers.append(Layer(attention, mlp, *norms, parallel=config.parallel_attn))
    norm = Norm("ln_f", config.layer_norm_epsilon, "layer")
    return DecoderDescription(tuple(layers), norm, embedding="word_embeddings")


def gguf_config(model: GgufModel) -> dict[str, Any]:
    """See GgufArchitecture; what files say of heads of keys may be wrong."""
    if "blk.0.attn_norm_2.weight" in model.shapes:
        raise ValueError(
            "it has two norms in a layer (Falcon 40B), which is not supported in GGUF files; load its folder"
        )
    heads, hidden = model.size("attention.head_count"), model.size("embedding_length")
    kv_heads, rest = divmod(model.rows("blk.0.attn_qkv.weight") - hidden, max(2 * (hidden // heads), 1))
    if rest or kv_heads < 1 or heads % kv_heads:
        raise ValueError("its blk.0.attn_qkv.weight has another number of rows than its heads need; fetch it again")
    width = model.rows("blk.0.ffn_up.weight")
    return {
        "architectures": ["FalconForCausalLM"], "model_type": "falcon", "hidden_size": hidden, "num_kv_heads": kv_heads,
        "num_key_value_heads": kv_heads, "ffn_hidden_size": width, "intermediate_size": width,
        "num_attention_heads": heads, "num_hidden_layers": num_layers(model), "parallel_attn": True, "alibi": False,
        "new_decoder_architecture": kv_heads > 1, "multi_query": kv_heads == 1, "num_ln_in_parallel_attn": 1,
        "bias": "blk.0.attn_qkv.bias" in model.shapes,
        "layer_norm_epsilon": model.number("attention.layer_norm_epsilon"), "activation": "gelu",
        "max_position_embeddings": model.size("context_length"), "rope_parameters": rope(model),
    }  # fmt: skip


def _rows_of_groups(config: Mapping[str, Any], _: int) -> Rows:
    """Files have all queries, then all keys, then all values."""
    heads, groups = config["num_attention_heads"], config["num_kv_heads"]
    dim = config["hidden_size"] // heads
    size, keys, values = heads // groups * dim, heads * dim, (heads + groups) * dim
    return tuple(
        (first, first + length)
        for group in range(groups)
        for first, length in ((group * size, size), (keys + group * dim, dim), (values + group * dim, dim))
    )


TENSORS = {
    **{
        f"attn_qkv.{kind}": TensorPart(f"self_attention.query_key_value.{kind}", rows=_rows_of_groups)
        for kind in ("weight", "bias")
    },
    "token_embd": "transformer.word_embeddings", "output_norm": "transformer.ln_f",
    "attn_norm": "input_layernorm", "attn_output": "self_attention.dense", "ffn_up": "mlp.dense_h_to_4h",
    "ffn_down": "mlp.dense_4h_to_h",
}  # fmt: skip
GGUF = GgufArchitecture("falcon", gguf_config, TENSORS, layers="transformer.h")
