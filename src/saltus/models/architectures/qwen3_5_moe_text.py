"""The text of Qwen3.5 with experts."""

from typing import Any

from saltus.models.architectures import qwen3_5_text, qwen3_next
from saltus.models.architectures.qwen2_moe import experts
from saltus.models.decoder_description import DecoderDescription

CLASSES = {"Qwen3_5MoeForCausalLM"}


def describe(config: Any) -> DecoderDescription:
    """See saltus.models.architectures."""
    return qwen3_next.decoder(
        config, qwen3_5_text.delta_net, lambda config, layer: experts(config, layer, is_normalized=True)
    )  # fmt: skip
