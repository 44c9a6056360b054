"""OLMo 2: norms after mixer and MLP alone, and of all queries' and all keys' heads together."""

from typing import Any

from saltus.models.common_layers import head_norms, llama_attention, llama_mlp
from saltus.models.decoder_description import DecoderDescription, Layer
from saltus.models.gguf_architecture import FULL, SLIDING, GgufArchitecture, GgufModel, layer_types, llama_config, rope
from saltus.models.mixer_description import Attention, Norm

CLASSES = {"Olmo2ForCausalLM"}


def attention(config: Any, layer: int, **changes: Any) -> Attention:
    """OLMo's attention, changed in places."""
    norms = head_norms(config, layer, kind="rms-float32")
    return llama_attention(config, layer, **norms, norm_per_head=False, **changes)


def decoder(config: Any, mixers: list[Attention]) -> DecoderDescription:
    """OLMo's layers around attention."""
    epsilon = config.rms_norm_eps
    layers = [
        Layer(
            mixer, llama_mlp(config, number), mixer_norm=None, mlp_norm=None,
            mixer_output_norm=Norm(f"layers.{number}.post_attention_layernorm", epsilon, "rms-float32"),
            mlp_output_norm=Norm(f"layers.{number}.post_feedforward_layernorm", epsilon, "rms-float32"),
        )
        for number, mixer in enumerate(mixers)
    ]  # fmt: skip
    return DecoderDescription(tuple(layers), Norm("norm", epsilon, "rms-float32"))


def describe(config: Any) -> DecoderDescription:
    """See saltus.models.architectures."""
    return decoder(config, [attention(config, layer) for layer in range(config.num_hidden_layers)])


def gguf_config(model: GgufModel) -> dict[str, Any]:
    """See GgufArchitecture; models with windows are OLMo 3's, which scale positions where there is none."""
    if not (window := model.size("attention.sliding_window", 0, least=0)):
        return llama_config(model, "olmo2", "Olmo2ForCausalLM")
    full = rope(model)
    local = {"rope_theta": model.number("rope.freq_base_swa", full["rope_theta"]), "rope_type": "default"}
    return llama_config(
        model, "olmo3", "Olmo3ForCausalLM", sliding_window=window, layer_types=layer_types(model, 4),
        rope_parameters={FULL: full, SLIDING: local},
    )  # fmt: skip


TENSORS = {"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"}
GGUF = GgufArchitecture("olmo2", gguf_config, TENSORS)
