"""Qwen3-Next, Qwen3.5 and later: tensors `mtp.*`, also beside the text part of models that read pictures."""

from saltus.methods.mtp.family import MtpFamily

FAMILY = MtpFamily(
    projection="mtp.fc", embedding_norm="mtp.pre_fc_norm_embedding", state_norm="mtp.pre_fc_norm_hidden",
    layer="mtp.layers.{module}", norm="mtp.norm",
)  # fmt: skip
