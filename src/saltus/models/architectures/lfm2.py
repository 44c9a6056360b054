"""LFM2: short convolutions in most layers, attention with norms of heads in the others."""

from collections.abc import Callable
from typing import Any

from saltus.models.common_layers import llama_attention, llama_layer
from saltus.models.decoder_description import MLP, DecoderDescription, Experts
from saltus.models.gguf_architecture import FULL, GgufArchitecture, GgufModel, TensorPart, decoder_config
from saltus.models.mixer_description import Angles, Attention, Norm, ShortConvolution, Weight

CLASSES = {"Lfm2ForCausalLM"}


def mlp(config: Any, layer: int) -> MLP:
    """A gated MLP by LFM2's names."""
    gate, up, down = (Weight(f"layers.{layer}.feed_forward.{name}") for name in ("w1", "w3", "w2"))
    return MLP(gate, up, down)


def attention(config: Any, layer: int, angles: str = "rotary_emb") -> Attention:
    """Attention of a layer."""
    path, epsilon = f"layers.{layer}.self_attn", config.norm_eps
    return llama_attention(
        config, layer, output=Weight(f"{path}.out_proj"), span=None, angles=Angles(angles),
        query_norm=Norm(f"{path}.q_layernorm", epsilon), key_norm=Norm(f"{path}.k_layernorm", epsilon),
    )  # fmt: skip


def decoder(
    config: Any, mlp: Callable[[Any, int], MLP | Experts], attention: Callable[[Any, int], Attention],
    output_norms: bool = False,
) -> DecoderDescription:  # fmt: skip
    """LFM2's layers around MLPs and attention; with `output_norms` what both give goes through norms."""
    layers, epsilon = [], config.norm_eps
    for number, kind in enumerate(config.layer_types):
        path, mixer = f"layers.{number}", None
        norms = {"mixer_norm": Norm(f"{path}.operator_norm", epsilon), "mlp_norm": Norm(f"{path}.ffn_norm", epsilon)}
        if output_norms:
            norms["mixer_output_norm"] = Norm(f"{path}.post_operator_norm", epsilon)
            norms["mlp_output_norm"] = Norm(f"{path}.post_ffn_norm", epsilon)
        if kind == "conv":
            conv = f"{path}.conv"
            mixer = ShortConvolution(Weight(f"{conv}.in_proj"), f"{conv}.conv", Weight(f"{conv}.out_proj"))
        layers.append(
            llama_layer(config, number, mixer=mixer or attention(config, number), mlp=mlp(config, number), **norms)
        )
    return DecoderDescription(tuple(layers), Norm("embedding_norm", epsilon))


def describe(config: Any) -> DecoderDescription:
    """See saltus.models.architectures."""
    return decoder(config, mlp, attention)


def lfm2_config(model: GgufModel, model_type: str, architecture: str, **changes: Any) -> dict[str, Any]:
    """With LFM2's convolutions, changed in places."""
    has_convolution = model.layers_with("shortconv.conv.weight")
    return decoder_config(
        model, model_type, architecture, norm_eps=model.number("attention.layer_norm_rms_epsilon"),
        layer_types=["conv" if each else FULL for each in has_convolution],
        conv_L_cache=model.size("shortconv.l_cache"), conv_bias="blk.0.shortconv.in_proj.bias" in model.shapes,
        num_key_value_heads=max(model.sizes("attention.head_count_kv", len(has_convolution), least=0)), **changes,
    )  # fmt: skip


def gguf_config(model: GgufModel) -> dict[str, Any]:
    """See GgufArchitecture."""
    return lfm2_config(model, "lfm2", "Lfm2ForCausalLM", block_auto_adjust_ff_dim=False)


TENSORS = {
    "token_embd_norm": "model.embedding_norm", "output_norm": "model.embedding_norm", "attn_norm": "operator_norm",
    "ffn_norm": "ffn_norm", "ffn_gate": "feed_forward.w1", "ffn_up": "feed_forward.w3", "ffn_down": "feed_forward.w2",
    "attn_output": "self_attn.out_proj", "attn_q_norm": "self_attn.q_layernorm", "attn_k_norm": "self_attn.k_layernorm",
    "shortconv.in_proj": "conv.in_proj", "shortconv.out_proj": "conv.out_proj", "shortconv.conv": "conv.conv",
    "shortconv.conv.weight": TensorPart("conv.conv.weight", is_reshaped=True),
}  # fmt: skip
GGUF = GgufArchitecture("lfm2", gguf_config, TENSORS)
