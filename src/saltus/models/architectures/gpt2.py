"""GPT-2: LayerNorm, biases, learned positions, and MLPs without gates."""

from typing import Any

from saltus.models.common_layers import activation, layer_norms
from saltus.models.decoder_description import MLP, DecoderDescription, Layer, NotDescribed, PositionEmbedding
from saltus.models.gguf_architecture import GgufArchitecture, GgufModel, num_layers
from saltus.models.mixer_description import Attention, Norm, Weight

CLASSES = {"GPT2LMHeadModel"}


def describe(config: Any) -> DecoderDescription:
    """See saltus.models.architectures."""
    if config.add_cross_attention or config.scale_attn_by_inverse_layer_idx:
        raise NotDescribed("attention to another text, or scores scaled by layer")
    return decoder(config, config.num_attention_heads)


def decoder(config: Any, kv_heads: int) -> DecoderDescription:
    """GPT-2's layers, with so many heads of keys."""
    epsilon, size, layers = config.layer_norm_epsilon, config.hidden_size, []
    dim = size // config.num_attention_heads
    keys = kv_heads * dim
    for layer in range(config.num_hidden_layers):
        path = f"h.{layer}"
        fused = f"{path}.attn.c_attn"
        attention = Attention(
            Weight(fused, 0, size), Weight(fused, size, size + keys), Weight(fused, size + keys, size + 2 * keys),
            Weight(f"{path}.attn.c_proj"), config.num_attention_heads, kv_heads, dim,
            scale=dim**-0.5 if config.scale_attn_weights else 1.0, angles=None,
        )  # fmt: skip
        active = activation(config.activation_function)
        mlp = MLP(None, Weight(f"{path}.mlp.c_fc"), Weight(f"{path}.mlp.c_proj"), active)
        layers.append(Layer(attention, mlp, *layer_norms(path, epsilon, "ln_1", "ln_2")))
    return DecoderDescription(
        tuple(layers), Norm("ln_f", epsilon, "layer"), embedding="wte", position_embedding=PositionEmbedding("wpe")
    )  # fmt: skip


def gguf_config(model: GgufModel) -> dict[str, Any]:
    """See GgufArchitecture."""
    return gpt2_config(model, "gpt2", "GPT2LMHeadModel", activation_function="gelu_new")


def gpt2_config(model: GgufModel, model_type: str, architecture: str, **more: Any) -> dict[str, Any]:
    """A configuration with the names of GPT-2's, and what other parts of Saltus ask for."""
    layers, heads = num_layers(model), model.size("attention.head_count")
    length, size, width = (
        model.size("context_length"),
        model.size("embedding_length"),
        model.rows("blk.0.ffn_up.weight"),
    )
    return {
        "architectures": [architecture], "model_type": model_type, "n_layer": layers, "num_hidden_layers": layers,
        "n_head": heads, "num_attention_heads": heads, "n_embd": size, "hidden_size": size, "n_positions": length,
        "max_position_embeddings": length, "n_inner": width, "intermediate_size": width,
        "num_key_value_heads": heads,
        "layer_norm_epsilon": model.number("attention.layer_norm_epsilon"), **more,
    }  # fmt: skip


TENSORS = {
    "token_embd": "transformer.wte", "position_embd": "transformer.wpe", "output_norm": "transformer.ln_f",
    "attn_norm": "ln_1", "attn_qkv": "attn.c_attn", "attn_output": "attn.c_proj", "ffn_norm": "ln_2",
    "ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj",
}  # fmt: skip
GGUF = GgufArchitecture("gpt2", gguf_config, TENSORS, layers="transformer.h")
