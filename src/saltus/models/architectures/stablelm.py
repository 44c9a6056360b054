"""StableLM: Llama's layers with LayerNorm, perhaps one that mixer and MLP share; a part of each head is rotated."""

from typing import Any

from saltus.models.common_layers import layer_norms, llama_layer
from saltus.models.decoder_description import DecoderDescription, NotDescribed
from saltus.models.gguf_architecture import GgufArchitecture, GgufModel, decoder_config, partial_rope
from saltus.models.mixer_description import Norm

CLASSES = {"StableLmForCausalLM"}


def describe(config: Any) -> DecoderDescription:
    """See saltus.models.architectures."""
    if config.qk_layernorm:
        raise NotDescribed("norms of heads that take off a mean")
    parallel, layers = config.use_parallel_residual, []
    for layer in range(config.num_hidden_layers):
        names = "input_layernorm", "input_layernorm" if parallel else "post_attention_layernorm"
        norms = layer_norms(f"layers.{layer}", config.layer_norm_eps, *names)
        layers.append(llama_layer(config, layer, mixer_norm=norms[0], mlp_norm=norms[1], parallel=parallel))
    return DecoderDescription(tuple(layers), Norm("norm", config.layer_norm_eps, "layer"))


def gguf_config(model: GgufModel) -> dict[str, Any]:
    """See GgufArchitecture; what files say of parallel layers is not always so."""
    if "blk.0.attn_q_norm.weight" in model.shapes:
        raise ValueError("it has a norm of each head of its own (StableLM 2 12B), which is not supported")
    return decoder_config(
        model, "stablelm", "StableLmForCausalLM", rope_parameters=partial_rope(model),
        layer_norm_eps=model.number("attention.layer_norm_epsilon"), use_qkv_bias="blk.0.attn_q.bias" in model.shapes,
        use_parallel_residual="blk.0.ffn_norm.weight" not in model.shapes, qk_layernorm=False,
    )  # fmt: skip


GGUF = tuple(GgufArchitecture(name, gguf_config) for name in ("stablelm", "orion"))  # Orion's heads rotate whole
