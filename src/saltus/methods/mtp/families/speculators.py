"""Heads in a folder of their own as speculators 0.9 writes them: `mtp_layers`, whose experts are stacked."""

from saltus.methods.mtp.family import MtpFamily

FAMILY = MtpFamily(
    projection="mtp_layers.{module}.input_proj", embedding_norm="mtp_layers.{module}.token_layernorm",
    state_norm="mtp_layers.{module}.hidden_layernorm", layer="mtp_layers.{module}",
    norm="mtp_layers.{module}.final_layernorm",
)  # fmt: skip
