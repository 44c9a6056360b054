"""The text of Qwen3.5 with experts in every layer."""

from typing import Any

from saltus.models.architectures import qwen3_next
from saltus.models.architectures.qwen3_5_text import delta_net
from saltus.models.decoder_description import DecoderDescription

CLASSES = {"Qwen3_5MoeForCausalLM"}


def describe(config: Any) -> DecoderDescription:
    """See saltus.models.architectures."""
    return qwen3_next.decoder(config, delta_net, qwen3_next.experts)
