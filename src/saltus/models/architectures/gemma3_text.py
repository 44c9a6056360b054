"""Gemma 3: Gemma 2 with norms of each head, and other angles where layers see a window."""

from typing import Any

from saltus.models.architectures import gemma2
from saltus.models.common_layers import head_norms, llama_attention
from saltus.models.decoder_description import DecoderDescription
from saltus.models.gguf_architecture import FULL, SLIDING, GgufArchitecture, GgufModel, layer_types, rope
from saltus.models.mixer_description import Angles

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


def gguf_config(model: GgufModel) -> dict[str, Any]:
    """See GgufArchitecture; positions are scaled where layers see all of the text."""
    window = model.size("attention.sliding_window", 0, least=0)
    local = {"rope_theta": model.number("rope.freq_base_swa", 10000.0), "rope_type": "default"}
    return gemma2.gemma_config(
        model, "gemma3_text", "Gemma3ForCausalLM", wide_layers=62,
        layer_types=layer_types(model, 6 if window else 1), sliding_window=window or None,
        attn_logit_softcapping=None,
        final_logit_softcapping=model.number("final_logit_softcapping", 0.0) or None,
        rope_parameters={FULL: rope(model), SLIDING: local},
    )  # fmt: skip


GGUF = GgufArchitecture("gemma3", gguf_config, gemma2.TENSORS, added_to_norms=1)
