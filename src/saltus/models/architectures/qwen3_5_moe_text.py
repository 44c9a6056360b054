"""The text of Qwen3.5 with experts."""

from typing import Any

from saltus.models.architectures import qwen2_moe, qwen3_5_text, qwen3_next
from saltus.models.architectures.qwen2_moe import experts
from saltus.models.decoder_description import DecoderDescription
from saltus.models.gguf_architecture import GgufArchitecture, GgufModel

CLASSES = {"Qwen3_5MoeForCausalLM"}


def describe(config: Any) -> DecoderDescription:
    """See saltus.models.architectures."""
    return qwen3_next.decoder(
        config, qwen3_5_text.delta_net, lambda config, layer: experts(config, layer, is_normalized=True)
    )  # fmt: skip


def gguf_config(model: GgufModel) -> dict[str, Any]:
    """See GgufArchitecture."""
    return qwen3_next.moe_config(model, qwen3_5_text.qwen3_5_sizes(model))


TENSORS = qwen2_moe.TENSORS | qwen3_next.delta_net_tensors(qwen3_5_text.repeated_rows)
GGUF = GgufArchitecture("qwen35moe", gguf_config, TENSORS, added_to_norms=1)
