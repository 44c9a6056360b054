"""Mistral: layers as Llama's."""

from saltus.models.architectures import llama

CLASSES = {"MistralForCausalLM"}
describe = llama.describe
