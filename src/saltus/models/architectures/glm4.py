"""GLM-4: norms before and after mixer and MLP; half of each head is rotated, interleaved."""

from collections.abc import Mapping
from typing import Any

from saltus.models.common_layers import float32_norm, fused_mlp, llama_attention, llama_layer
from saltus.models.decoder_description import DecoderDescription
from saltus.models.gguf_architecture import (
    GgufArchitecture,
    GgufModel,
    Rows,
    Target,
    TensorPart,
    llama_config,
    partial_rope,
)

CLASSES = {"Glm4ForCausalLM"}


def describe(config: Any) -> DecoderDescription:
    """See saltus.models.architectures."""
    layers = []
    for layer in range(config.num_hidden_layers):
        path = f"layers.{layer}"
        layers.append(
            llama_layer(
                config, layer, mixer=llama_attention(config, layer, rope_interleaved=True),
                mlp=fused_mlp(config, layer),
                mixer_norm=float32_norm(config, f"{path}.input_layernorm"),
                mixer_output_norm=float32_norm(config, f"{path}.post_self_attn_layernorm"),
                mlp_norm=float32_norm(config, f"{path}.post_attention_layernorm"),
                mlp_output_norm=float32_norm(config, f"{path}.post_mlp_layernorm"),
            )
        )  # fmt: skip
    return DecoderDescription(tuple(layers), float32_norm(config, "norm"))


def gguf_config(model: GgufModel) -> dict[str, Any]:
    """See GgufArchitecture."""
    parameters = partial_rope(model)
    if model.has(SECTIONS):
        parameters["mrope_section"] = model.get(SECTIONS)
    return llama_config(model, "glm4", "Glm4ForCausalLM", rope_parameters=parameters)


def _interleaved(config: Mapping[str, Any], count: int) -> Rows:
    """The rotated rows of a head by pairs, where a file has the first ones of all pairs before the second ones.

    So do those of models that read images (GLM-4.1V), whose positions are of one dimension in texts.
    """
    if "mrope_section" not in config["rope_parameters"]:
        return ()
    dim = config["head_dim"]
    rotated = int(dim * config["rope_parameters"]["partial_rotary_factor"])
    runs = [(half * (rotated // 2) + pair, 1) for pair in range(rotated // 2) for half in (0, 1)]
    runs += [(len(runs), dim - len(runs))] if len(runs) < dim else []
    return tuple((head + row, head + row + length) for head in range(0, count, dim) for row, length in runs)


SECTIONS = "rope.dimension_sections"
TENSORS: dict[str, Target] = {
    **{
        f"attn_{name}.{kind}": TensorPart(f"self_attn.{name}_proj.{kind}", rows=_interleaved)
        for name in "qk" for kind in ("weight", "bias")
    },
    "ffn_up": "mlp.gate_up_proj", "post_attention_norm": "post_self_attn_layernorm",
    "post_ffw_norm": "post_mlp_layernorm",
}  # fmt: skip
GGUF = GgufArchitecture("glm4", gguf_config, TENSORS)
