"""IQuest-Coder: layers as Llama's."""

from saltus.models.architectures import llama

CLASSES = {"LlamaForCausalLM"}
describe = llama.describe
