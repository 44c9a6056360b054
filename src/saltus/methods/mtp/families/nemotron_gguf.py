"""The same in GGUF files, which have both layers in one block."""

from saltus.methods.mtp.family import MtpFamily

BLOCK = "model.layers.{layer}"
OF_EXPERTS = "gate", "experts", "shared_experts", "fc1_latent_proj", "fc2_latent_proj"
FAMILY = MtpFamily(
    projection=f"{BLOCK}.head.eh_proj", embedding_norm=f"{BLOCK}.head.enorm", state_norm=f"{BLOCK}.head.hnorm",
    layer=BLOCK, norm=f"{BLOCK}.head.norm", embeddings=f"{BLOCK}.head.embed_tokens", head=f"{BLOCK}.head.head",
    renamed={
        "0.norm": "norm", "1.norm": "post_attention_norm",
        **{f"0.mixer.{name}_proj": f"mixer.{name}_proj" for name in "qkvo"},
        **{f"1.mixer.{name}": f"mixer.{name}" for name in OF_EXPERTS},
    },
)  # fmt: skip
