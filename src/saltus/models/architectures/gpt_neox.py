"""Pythia and GPT-NeoX: LayerNorm, biases; one layer gives each head's query, key and value, partly rotated."""

from collections.abc import Mapping
from typing import Any

from saltus.models.common_layers import activation, layer_norms
from saltus.models.decoder_description import MLP, DecoderDescription, Layer
from saltus.models.gguf_architecture import GgufArchitecture, GgufModel, Rows, TensorPart, decoder_config, partial_rope
from saltus.models.mixer_description import Attention, Norm, Weight

CLASSES = {"GPTNeoXForCausalLM"}


def describe(config: Any) -> DecoderDescription:
    """See saltus.models.architectures."""
    epsilon, layers = config.layer_norm_eps, []
    heads, dim = config.num_attention_heads, config.hidden_size // config.num_attention_heads
    for layer in range(config.num_hidden_layers):
        path = f"layers.{layer}"
        fused = Weight(f"{path}.attention.query_key_value")
        attention = Attention(
            fused, fused, fused, Weight(f"{path}.attention.dense"), heads, heads, dim, dim**-0.5, fused=True
        )  # fmt: skip
        up, down = Weight(f"{path}.mlp.dense_h_to_4h"), Weight(f"{path}.mlp.dense_4h_to_h")
        norms = layer_norms(path, epsilon, "input_layernorm", "post_attention_layernorm")
        mlp = MLP(None, up, down, activation(config.hidden_act))
        layers.append(Layer(attention, mlp, *norms, parallel=config.use_parallel_residual))
    return DecoderDescription(tuple(layers), Norm("final_layer_norm", epsilon, "layer"), embedding="embed_in")


def gguf_config(model: GgufModel) -> dict[str, Any]:
    """See GgufArchitecture."""
    return decoder_config(
        model, "gpt_neox", "GPTNeoXForCausalLM", hidden_act="gelu", rope_parameters=partial_rope(model),
        layer_norm_eps=model.number("attention.layer_norm_epsilon"),
        use_parallel_residual=model.flag("use_parallel_residual", True),
        attention_bias="blk.0.attn_qkv.bias" in model.shapes,
    )  # fmt: skip


def _rows_of_heads(config: Mapping[str, Any], _: int) -> Rows:
    """Files have all queries, then all keys, then all values."""
    heads, size = config["num_attention_heads"], config["hidden_size"]
    dim = size // heads
    return tuple(
        (part * size + head * dim, part * size + (head + 1) * dim) for head in range(heads) for part in (0, 1, 2)
    )


TENSORS = {
    **{
        f"attn_qkv.{kind}": TensorPart(f"attention.query_key_value.{kind}", rows=_rows_of_heads)
        for kind in ("weight", "bias")
    },
    "token_embd": "gpt_neox.embed_in", "output_norm": "gpt_neox.final_layer_norm", "attn_output": "attention.dense",
    "ffn_up": "mlp.dense_h_to_4h", "ffn_down": "mlp.dense_4h_to_h",
}  # fmt: skip
GGUF = GgufArchitecture("gptneox", gguf_config, TENSORS, layers="gpt_neox.layers")
