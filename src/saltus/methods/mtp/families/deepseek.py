"""DeepSeek V3, GLM-4.5 and its kin: layers after the last one, with copies of the embeddings and the output layer.

So are the heads of GGUF files called, those of Qwen, too.
"""

from saltus.methods.mtp.family import MtpFamily

FAMILY = MtpFamily(
    projection="model.layers.{layer}.eh_proj", embedding_norm="model.layers.{layer}.enorm",
    state_norm="model.layers.{layer}.hnorm", layer="model.layers.{layer}",
    norm="model.layers.{layer}.shared_head.norm", embeddings="model.layers.{layer}.embed_tokens",
    head="model.layers.{layer}.shared_head.head",
)  # fmt: skip
