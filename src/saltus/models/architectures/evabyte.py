"""EvaByte: layers as Llama's."""

from saltus.models.architectures import llama

CLASSES = {"EvaByteForCausalLM"}
describe = llama.describe
