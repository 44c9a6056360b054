"""InternLM3: layers as Llama's, all of them with biases or none."""

from saltus.models.architectures import llama

CLASSES = {"LlamaForCausalLM"}
describe = llama.describe
