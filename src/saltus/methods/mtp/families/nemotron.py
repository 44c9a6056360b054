"""Nemotron 3.5 and 3 Super: attention, then experts, as layers of their own."""

from saltus.methods.mtp.family import MtpFamily

FAMILY = MtpFamily(
    projection="mtp.layers.0.eh_proj", embedding_norm="mtp.layers.0.enorm", state_norm="mtp.layers.0.hnorm",
    layer="mtp.layers", norm="mtp.layers.1.final_layernorm",
)  # fmt: skip
