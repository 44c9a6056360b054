"""StarCoder and SantaCoder (GPT-BigCode): GPT-2's layers with one head of keys and values."""

from typing import Any

from saltus.models.architectures import gpt2
from saltus.models.decoder_description import DecoderDescription, NotDescribed
from saltus.models.gguf_architecture import GgufArchitecture, GgufModel

CLASSES = {"GPTBigCodeForCausalLM"}


def describe(config: Any) -> DecoderDescription:
    """See saltus.models.architectures."""
    if config.add_cross_attention or not config.multi_query:
        raise NotDescribed("attention to another text, or several heads of keys")
    return gpt2.decoder(config, 1)


def gguf_config(model: GgufModel) -> dict[str, Any]:
    """See GgufArchitecture; whether there is one head of keys, the size of its layers says."""
    return gpt2.gpt2_config(
        model, "gpt_bigcode", "GPTBigCodeForCausalLM", activation_function="gelu_pytorch_tanh", multi_query=True,
    ) | {"num_key_value_heads": 1}  # fmt: skip


GGUF = GgufArchitecture("starcoder", gguf_config, gpt2.TENSORS, layers="transformer.h")
