"""Ministral: layers as Llama's, some of them with a window."""

from saltus.models.architectures import llama

CLASSES = {"MinistralForCausalLM"}
describe = llama.describe
