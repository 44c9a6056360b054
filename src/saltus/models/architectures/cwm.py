"""CWM: layers as Llama's, most of them with a window."""

from saltus.models.architectures import llama

CLASSES = {"CwmForCausalLM"}
describe = llama.describe
