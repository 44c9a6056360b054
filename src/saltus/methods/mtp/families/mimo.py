"""MiMo: `model.mtp_layers`, whose projections read the state first."""

from saltus.methods.mtp.family import MtpFamily

FAMILY = MtpFamily(
    projection="model.mtp_layers.{module}.input_proj", embedding_norm="model.mtp_layers.{module}.token_layernorm",
    state_norm="model.mtp_layers.{module}.hidden_layernorm", layer="model.mtp_layers.{module}",
    norm="model.mtp_layers.{module}.final_layernorm", state_first=True,
)  # fmt: skip
