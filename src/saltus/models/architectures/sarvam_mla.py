"""Sarvam 105B: DeepSeek V3's layers."""

from saltus.models.architectures import deepseek_v3

CLASSES = {"DeepseekV3ForCausalLM"}
describe = deepseek_v3.describe
