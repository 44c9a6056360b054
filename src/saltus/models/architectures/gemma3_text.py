"""Gemma 3: Gemma 2 with norms of each head, and other angles where layers see a window."""

from typing import Any

from saltus.models.architectures import gemma2
from saltus.models.decoder_description import Angles, DecoderDescription, head_norms, llama_attention

CLASSES = {"Gemma3ForCausalLM"}


def describe(config: Any) -> DecoderDescription:
    """See saltus.models.architectures."""
    settings = {"scale": config.query_pre_attn_scalar**-0.5, "softcap": config.attn_logit_softcapping}
    layers = []
    for number, kind in enumerate(config.layer_types):
        norms = head_norms(config, number, kind="rms-float32", offset=1.0)
        attention = llama_attention(config, number, angles=Angles(layer_type=kind), **norms, **settings)
        layers.append(gemma2.layer(config, number, attention))
    return gemma2.decoder(config, layers)
