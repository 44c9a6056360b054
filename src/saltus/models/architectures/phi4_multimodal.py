"""The text of Phi-4 multimodal: Phi-4's layers."""

from saltus.models.architectures import phi3

CLASSES = {"Phi4MultimodalForCausalLM"}
describe = phi3.describe
