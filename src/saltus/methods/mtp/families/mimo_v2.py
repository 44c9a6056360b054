"""MiMo V2: `model.mtp.layers`."""

from saltus.methods.mtp.family import MtpFamily

FAMILY = MtpFamily(
    projection="model.mtp.layers.{module}.eh_proj", embedding_norm="model.mtp.layers.{module}.enorm",
    state_norm="model.mtp.layers.{module}.hnorm", layer="model.mtp.layers.{module}",
    norm="model.mtp.layers.{module}.final_layernorm",
    renamed={"post_attention_layernorm": "pre_mlp_layernorm", "self_attn.sinks": "self_attn.attention_sink_bias"},
)  # fmt: skip
