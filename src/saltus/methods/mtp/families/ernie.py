"""ERNIE 4.5: blocks without experts, whose outputs go through the target's own norm."""

from saltus.methods.mtp.family import MtpFamily

FAMILY = MtpFamily(
    projection="model.mtp_linear_proj.{module}", embedding_norm="model.mtp_emb_norm.{module}",
    state_norm="model.mtp_hidden_norm.{module}", layer="model.mtp_block.{module}",
)  # fmt: skip
