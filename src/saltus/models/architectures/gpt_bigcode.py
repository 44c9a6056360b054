"""StarCoder and SantaCoder (GPT-BigCode): GPT-2's layers with one head of keys and values."""

from typing import Any

from saltus.models.architectures import gpt2
from saltus.models.decoder_description import DecoderDescription, NotDescribed

CLASSES = {"GPTBigCodeForCausalLM"}


def describe(config: Any) -> DecoderDescription:
    """See saltus.models.architectures."""
    if config.add_cross_attention or not config.multi_query:
        raise NotDescribed("attention to another text, or several heads of keys")
    return gpt2.decoder(config, 1)
