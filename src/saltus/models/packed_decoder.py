"""Hold the weights of a Llama-type decoder by their names in Transformers, without importing its model classes.

They take seconds to import, and `NativeDecoder` needs only the weights and a few settings. `transformers_model` makes
the Hugging Face model of the same weights when somebody asks for it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

MAX_SIZE = 1 << 24  # of any number in a decoder's configuration
LLAMA_TYPES = {"llama", "mistral", "qwen2", "qwen3"}  # model types that PackedDecoder has the modules of
ROPE_TYPES = {"default", "linear"}  # that RotaryEmbedding computes
ATTENTION_TYPES: dict[str, type] = {  # of fields that configurations with attention have
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size"), int),
    "rope_parameters": dict,
}
OF_SOME = ("head_dim", "rope_parameters")  # of these fields; the others are never left out


def check_sizes(**sizes: Any) -> None:
    """Raise ValueError unless sizes are whole numbers above zero that fit into memory."""
    for name, size in sizes.items():
        if type(size) is not int or not 1 <= size <= MAX_SIZE:
            raise ValueError(
                f"a decoder's {name} is {size!r}, but must be a whole number from 1 to {MAX_SIZE:,}; fetch it again"
            )


def check_decoder_sizes(heads: int, kv_heads: int, **sizes: Any) -> None:
    """Raise ValueError unless sizes are positive and `heads` is a multiple of `kv_heads`; kernels rely on it."""
    check_sizes(heads=heads, kv_heads=kv_heads, **sizes)
    if heads % kv_heads:
        raise ValueError(
            f"a decoder has {heads} attention heads, which {kv_heads} heads of keys and values cannot share evenly;"
            " fetch it again"
        )


def check_decoder_config(config: Any) -> None:
    """`check_decoder_sizes` of the fields of a config.json; without heads of attention, of what else there is."""
    check_widths(config)
    if not hasattr(config, "num_attention_heads"):
        return
    check_decoder_sizes(config.num_attention_heads, config.num_key_value_heads)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    check_heads(config.num_attention_heads, config.num_key_value_heads, head_dim)


def check_widths(config: Any) -> None:
    """`check_sizes` of what all layers have in common, or of each layer."""
    for name in ("hidden_size", "intermediate_size", "num_hidden_layers", "vocab_size"):
        size = getattr(config, name, 1)
        for each in size if isinstance(size, list | tuple) else (size,):
            check_sizes(**{name: each})


def check_heads(heads: int, kv_heads: int, head_dim: int) -> None:
    """`check_decoder_sizes` of an attention layer."""
    check_decoder_sizes(heads, kv_heads, head_dim=head_dim)
    if head_dim % 2:
        raise ValueError(f"a decoder's head_dim is {head_dim}, but must be even; fetch it again")


def check_layer_count(layers: int, tensors: Collection[Any]) -> None:
    """Raise ValueError for more layers than tensors, before modules are made of them: a file may say anything."""
    if layers > len(tensors):
        raise ValueError(f"a model of {layers:,} layers has {len(tensors):,} tensors; fetch it again")


class DecoderConfig(SimpleNamespace):
    """The fields of a config.json as attributes."""

    def get_text_config(self) -> DecoderConfig:
        return self


def read_decoder_config(fields: Mapping[str, Any]) -> DecoderConfig:
    """The configuration of any decoder. Errors: ValueError for fields that are missing or of another type."""
    config = DecoderConfig(**fields)
    types = {"model_type": str, "tie_word_embeddings": bool}
    types |= dict.fromkeys(("hidden_size", "num_hidden_layers", "vocab_size"), int)
    if hasattr(config, "num_attention_heads"):
        types |= {name: type for name, type in ATTENTION_TYPES.items() if name not in OF_SOME or hasattr(config, name)}
    _check_types(config, types)
    check_decoder_config(config)
    if isinstance(rope := getattr(config, "rope_parameters", None), dict):
        for parameters in rope.values() if rope and all(isinstance(each, dict) for each in rope.values()) else [rope]:
            _check_rope(parameters)
    for name in ("max_position_embeddings", "sliding_window"):
        if (length := getattr(config, name, None)) is not None and (not isinstance(length, int) or length < 1):
            raise ValueError(f"a decoder's {name} is {length!r}, but must be 1 or more; fetch it again")
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        _check_token_ids(name, getattr(config, name, None), config.vocab_size)
    return config


def make_decoder_config(fields: Mapping[str, Any]) -> DecoderConfig:
    """The configuration of a Llama-type decoder. Errors: ValueError for fields that are missing or of another type."""
    config = read_decoder_config(fields)
    _check_types(config, ATTENTION_TYPES | {"attention_bias": bool, "hidden_act": str})
    _check_positive("rms_norm_eps", getattr(config, "rms_norm_eps", None))
    if not isinstance(config.rope_parameters.get("rope_type"), str):
        raise ValueError("a decoder of Llama's type has one rope_type for all layers; fetch it again")
    return config


def _check_types(config: DecoderConfig, types: Mapping[str, type]) -> None:
    for name, type in types.items():
        if not isinstance(value := getattr(config, name, None), type):
            raise ValueError(f"a decoder's {name} is {value!r}, but must be of type {type.__name__}; fetch it again")


def _check_rope(rope: Mapping[str, Any]) -> None:
    if not isinstance(kind := rope.get("rope_type"), str):
        raise ValueError(f"a decoder's rope_type is {kind!r}, but must be a word, such as default; fetch it again")
    _check_positive("rope_theta", rope.get("rope_theta"))
    if kind in ("linear", "yarn", "dynamic"):
        _check_positive("factor", rope.get("factor"))


def _check_positive(name: str, value: Any) -> None:
    if not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ValueError(f"a decoder's {name} is {value!r}, but must be a number above 0; fetch it again")


def _check_token_ids(name: str, value: Any, vocabulary: int) -> None:
    for token in value if isinstance(value, list) else [value]:
        if token is not None and (not isinstance(token, int) or not 0 <= token < vocabulary):
            raise ValueError(f"a decoder's {name} is {token!r}, but its vocabulary has {vocabulary:,}; fetch it again")


class UninitializedLinear(nn.Linear):
    """A linear layer whose weights are not drawn at first, which would import half of torch on "meta"."""

    def reset_parameters(self) -> None: ...


class RMSNorm(nn.Module):
    """The weight of a norm (Zhang & Sennrich 2019); kernels compute it."""

    def __init__(self, size: int, epsilon: float) -> None:
        super().__init__()
        self.weight, self.variance_epsilon = nn.Parameter(torch.empty(size), requires_grad=False), epsilon


class RotaryEmbedding(nn.Module):
    """Cosines and sines of rotary position embeddings (Su et al. 2021), computed as Transformers does."""

    inv_freq: Tensor

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        rope = config.rope_parameters
        self.rope_type = rope["rope_type"]
        exponents = torch.arange(0, config.head_dim, 2, dtype=torch.int64).float() / config.head_dim
        frequencies = 1.0 / (rope["rope_theta"] ** exponents)
        if self.rope_type == "linear":
            frequencies /= rope["factor"]
        self.register_buffer("inv_freq", frequencies, persistent=False)  # moves with the model

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """[batch, positions, head_dim] each, in the dtype of x."""
        angles = position_ids[..., None].float() * self.inv_freq
        angles = torch.cat([angles, angles], -1)
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)


def _attention(config: DecoderConfig) -> nn.Module:
    part: Any = nn.Module()
    queries, keys = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    hidden, biased = config.hidden_size, config.attention_bias
    output_biased = getattr(config, "attention_output_bias", False)
    part.head_dim, part.scaling = config.head_dim, config.head_dim**-0.5
    part.q_proj, part.k_proj = (
        UninitializedLinear(hidden, queries, bias=biased),
        UninitializedLinear(hidden, keys, bias=biased),
    )
    part.v_proj, part.o_proj = (
        UninitializedLinear(hidden, keys, bias=biased),
        UninitializedLinear(queries, hidden, bias=output_biased),
    )
    if getattr(config, "attention_sinks", False):  # of drafters; no model of Transformers has them so
        part.attention_sink_bias = nn.Parameter(torch.empty(config.num_attention_heads), False)
    if config.model_type == "qwen3":
        part.q_norm, part.k_norm = (RMSNorm(config.head_dim, config.rms_norm_eps) for _ in range(2))
    return part


def _layer(config: DecoderConfig) -> nn.Module:
    layer: Any = nn.Module()
    layer.self_attn, mlp = _attention(config), nn.Module()
    hidden, wide, biased = config.hidden_size, config.intermediate_size, getattr(config, "mlp_bias", False)
    mlp.gate_proj, mlp.up_proj = (
        UninitializedLinear(hidden, wide, bias=biased),
        UninitializedLinear(hidden, wide, bias=biased),
    )
    mlp.down_proj = UninitializedLinear(wide, hidden, bias=biased)
    layer.mlp = mlp
    layer.input_layernorm, layer.post_attention_layernorm = (RMSNorm(hidden, config.rms_norm_eps) for _ in range(2))
    return layer


class PackedDecoder(nn.Module):
    """The modules of a LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM or Qwen3ForCausalLM, on "meta" at first.

    `make_transformers_model` builds the Hugging Face model, without weights.
    """

    def __init__(self, config: DecoderConfig, make_transformers_model: Callable[[], Any]) -> None:
        super().__init__()
        check_decoder_config(config)
        self.config, self._make, self._transformers_model = config, make_transformers_model, []
        self.generation_config = SimpleNamespace(eos_token_id=config.eos_token_id)
        with torch.device("meta"):
            decoder: Any = nn.Module()
            table = torch.empty(config.vocab_size, config.hidden_size)  # given, since it would be drawn
            decoder.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, _weight=table)
            decoder.layers = nn.ModuleList([_layer(config) for _ in range(config.num_hidden_layers)])
            decoder.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
            self.model: Any = decoder
            self.lm_head: nn.Linear = UninitializedLinear(config.hidden_size, config.vocab_size, bias=False)
        decoder.rotary_emb = RotaryEmbedding(config)
        if config.tie_word_embeddings:
            self.lm_head.weight = decoder.embed_tokens.weight

    @property
    def dtype(self) -> torch.dtype:
        return self.lm_head.weight.dtype

    @property
    def device(self) -> torch.device:
        return self.lm_head.weight.device

    def get_decoder(self) -> Any:
        return self.model

    def get_input_embeddings(self) -> nn.Embedding:
        return self.model.embed_tokens

    def get_output_embeddings(self) -> nn.Linear:
        return self.lm_head

    def set_input_embeddings(self, embeddings: nn.Embedding) -> None:
        self.model.embed_tokens = embeddings

    def set_output_embeddings(self, head: nn.Linear) -> None:
        self.lm_head = head

    def transformers_model(self) -> Any:
        """The Hugging Face model; it shares these weights."""
        if not self._transformers_model:
            made = self._make()
            for name, weight in self.named_parameters():
                path, _, attribute = name.rpartition(".")
                setattr(made.get_submodule(path), attribute, weight)
            if self.config.tie_word_embeddings:
                made.lm_head.weight = made.model.embed_tokens.weight
            made.model.rotary_emb.to(self.device).inv_freq.copy_(self.model.rotary_emb.inv_freq)
            self._transformers_model.append(made.eval())
        return self._transformers_model[0]


def transformers_model(model: Any) -> Any:
    """The Hugging Face model of a network's model."""
    return model.transformers_model() if isinstance(model, PackedDecoder) else model
