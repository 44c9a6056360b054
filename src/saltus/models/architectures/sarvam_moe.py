"""Sarvam with experts: GLM-4.5's layers."""

from saltus.models.architectures import glm4_moe

CLASSES = {"Glm4MoeForCausalLM"}
describe = glm4_moe.describe
