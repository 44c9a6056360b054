"""Command R (Cohere): mixer and MLP read one norm."""

from typing import Any

from saltus.models.architectures.cohere2 import ANGLES, decoder, layer
from saltus.models.decoder_description import DecoderDescription, NotDescribed
from saltus.models.gguf_architecture import GgufArchitecture, GgufModel, decoder_config

CLASSES = {"CohereForCausalLM"}


def describe(config: Any) -> DecoderDescription:
    """See saltus.models.architectures."""
    if config.use_qk_norm:
        raise NotDescribed("norms with weights of each head")
    return decoder(config, [layer(config, number, ANGLES) for number in range(config.num_hidden_layers)])


def gguf_config(model: GgufModel) -> dict[str, Any]:
    """See GgufArchitecture."""
    return decoder_config(
        model, "cohere", "CohereForCausalLM", attention_bias="blk.0.attn_q.bias" in model.shapes,
        use_qk_norm="blk.0.attn_q_norm.weight" in model.shapes, logit_scale=model.number("logit_scale", 0.0) or 1.0,
        layer_norm_eps=model.number("attention.layer_norm_epsilon"),
    )  # fmt: skip


GGUF = GgufArchitecture("command-r", gguf_config)
