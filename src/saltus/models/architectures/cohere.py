"""Command R (Cohere): mixer and MLP read one norm."""

from typing import Any

from saltus.models.architectures.cohere2 import ANGLES, decoder, layer
from saltus.models.decoder_description import DecoderDescription, NotDescribed

CLASSES = {"CohereForCausalLM"}


def describe(config: Any) -> DecoderDescription:
    """See saltus.models.architectures."""
    if config.use_qk_norm:
        raise NotDescribed("norms with weights of each head")
    return decoder(config, [layer(config, number, ANGLES) for number in range(config.num_hidden_layers)])
