"""GLM-4's first models, ChatGLM: Llama's layers with fused MLPs; half of each head is rotated, interleaved."""

from collections.abc import Callable, Mapping
from typing import Any

from saltus.models.common_layers import fused_mlp, llama_attention, llama_decoder, llama_layer
from saltus.models.decoder_description import DecoderDescription
from saltus.models.gguf_architecture import (
    GgufArchitecture,
    GgufModel,
    Rows,
    Target,
    TensorPart,
    llama_config,
    partial_rope,
)

CLASSES = {"GlmForCausalLM"}


def describe(config: Any) -> DecoderDescription:
    """See saltus.models.architectures."""
    layers = []
    for layer in range(config.num_hidden_layers):
        attention = llama_attention(config, layer, rope_interleaved=True)
        layers.append(llama_layer(config, layer, mixer=attention, mlp=fused_mlp(config, layer)))
    return llama_decoder(config, layers)


def gguf_config(model: GgufModel) -> dict[str, Any]:
    """See GgufArchitecture."""
    heads = model.size("attention.head_count")
    has_biases = bool({"blk.0.attn_q.bias", "blk.0.attn_qkv.bias"} & set(model.shapes))
    return llama_config(
        model, "glm", "GlmForCausalLM", attention_bias=has_biases,
        head_dim=model.size("attention.key_length", model.size("embedding_length") // heads),
        num_key_value_heads=model.size("attention.head_count_kv", heads), rope_parameters=partial_rope(model),
    )  # fmt: skip


def rows_of(part: int) -> Callable[[Mapping[str, Any], int], Rows]:
    """The rows of queries, keys or values in a layer that gives all three, in this order."""

    def rows(config: Mapping[str, Any], count: int) -> Rows:
        dim, keys = config["head_dim"], config["num_key_value_heads"]
        borders = [0, config["num_attention_heads"] * dim]
        borders += [borders[1] + keys * dim, borders[1] + 2 * keys * dim]
        return ((borders[part], borders[part + 1]),)

    return rows


FUSED_QUERIES: Mapping[str, Target] = {
    f"attn_qkv.{kind}": tuple(
        TensorPart(f"self_attn.{name}_proj.{kind}", rows=rows_of(part)) for part, name in enumerate("qkv")
    )
    for kind in ("weight", "bias")
}
GGUF = GgufArchitecture("chatglm", gguf_config, {"ffn_up": "mlp.gate_up_proj", **FUSED_QUERIES})
