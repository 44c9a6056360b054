"""Seed-OSS: layers as Llama's, with biases."""

from saltus.models.architectures import llama

CLASSES = {"SeedOssForCausalLM"}
describe = llama.describe
