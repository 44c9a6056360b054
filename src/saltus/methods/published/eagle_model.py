"""Hold and read heads of the EAGLE-3 family: a layer that reads token embeddings beside hidden states, and more layers.

Two formats are read: that of the library speculators, with the layers' settings in a table of their own, and that of
the authors, whose only layer is `midlayer`: their config.json may give the number of the target's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from saltus.kernels.packed_weight import select_rows
from saltus.methods.shared.decoder_rows import attend_rows, gated_mlp
from saltus.methods.shared.published_files import (
    QWEN3_DEFAULTS,
    check_sizes,
    check_weights,
    drafted_tokens,
    layer_spans,
    read_config,
    read_weights,
    refuse,
    take_own_matrices,
)
from saltus.methods.shared.query_predictions import rows_linear
from saltus.methods.shared.rotary import rope_parameters, rotary_embedding, unsupported_rope
from saltus.models.cpu.attention import AttentionCall
from saltus.models.cpu.torch_decoder import normed
from saltus.models.packed_decoder import (
    DecoderConfig,
    RMSNorm,
    UninitializedLinear,
    check_decoder_sizes,
    check_layer_count,
)

AUTHORS_LAYER = "midlayer."
LLAMA_DEFAULTS = {  # of Transformers' LlamaConfig
    "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32,
    "rms_norm_eps": 1e-6, "hidden_act": "silu",
}  # fmt: skip


@dataclass(frozen=True)
class EagleShape:
    """The sizes of a head, and which states are normalised."""

    hidden: int  # the target's hidden size
    intermediate: int
    hidden_state_layers: tuple[int, ...]  # the target's layers whose states are inputs
    heads: int
    kv_heads: int
    head_dim: int
    rope: Mapping[str, Any] = field(default_factory=lambda: {"rope_type": "default", "rope_theta": 10000.0})
    max_positions: int = 4096  # of training
    norm_epsilon: float = 1e-6
    layers: int = 1
    spans: tuple[int | None, ...] = (None,)  # sliding windows of the layers; None: the whole text
    norm_before_residual: bool = False  # the residual is the normalised state
    norm_output: bool = False  # the next row reads the normalised output
    norm_all: bool = False  # the states of all layers are normalised together before they are fused
    norm_each: bool = False  # the states of each layer are normalised before they are fused
    biased: bool = False  # projections of attention have biases
    head_norms: bool = False  # queries and keys are normalised, as in Qwen3

    reads_uniforms: ClassVar[bool] = False  # queries have no uniforms

    def __post_init__(self) -> None:
        check_decoder_sizes(
            self.heads, self.kv_heads, hidden=self.hidden, intermediate=self.intermediate,
            head_dim=self.head_dim, layers=self.layers,
        )  # fmt: skip


class EagleModel(nn.Module):
    """The weights of a head by their published names, empty ("meta") at first."""

    tokens: Tensor  # [draft] ascending ids of the tokens that are drafted
    correction: None = None

    def __init__(self, shape: EagleShape, tokens: Int[Tensor, "draft"], embeddings: Tensor, lm_head: Tensor) -> None:
        super().__init__()
        self.shape, hidden, epsilon = shape, shape.hidden, shape.norm_epsilon
        states = len(shape.hidden_state_layers)
        with torch.device("meta"):
            if shape.norm_all:
                self.input_norm = RMSNorm(states * hidden, epsilon)
            if shape.norm_each:
                self.fc_norm = nn.ModuleList([RMSNorm(hidden, epsilon) for _ in range(states)])
            self.fc = UninitializedLinear(states * hidden, hidden, bias=False)
            self.layers = nn.ModuleList([_layer(shape, number) for number in range(shape.layers)])
            self.norm = RMSNorm(hidden, epsilon)
        self.head = [nn.Linear(1, 1, bias=False)]  # in a list, as the embeddings: not a submodule
        self.head[0].weight = lm_head if isinstance(lm_head, nn.Parameter) else nn.Parameter(lm_head, False)
        self.register_buffer("tokens", tokens, persistent=False)
        self.embeddings = [embeddings]
        self.config = DecoderConfig(
            num_hidden_layers=shape.layers, num_attention_heads=shape.heads, num_key_value_heads=shape.kv_heads,
            head_dim=shape.head_dim, hidden_size=hidden, intermediate_size=shape.intermediate,
            max_position_embeddings=shape.max_positions, rope_parameters=shape.rope, hidden_act="silu",
        )  # fmt: skip
        self.rotary = rotary_embedding(self.config)

    @property
    def dtype(self) -> torch.dtype:
        """The type of the weights."""
        return self.fc.weight.dtype

    @property
    def lm_head(self) -> nn.Linear:
        """Over the drafted tokens."""
        return self.head[0]

    def likeliest(self, logits: Float[Tensor, "rows draft"]) -> Int[Tensor, "rows"]:
        """The token of the greatest logit of each row; a logit that is no number counts as 0."""
        return self.tokens[logits.float().nan_to_num().argmax(-1)]

    def fused(self, states: Float[Tensor, "rows states"]) -> Float[Tensor, "rows hidden"]:
        """The target's states of several layers as one."""
        states = states.to(self.dtype)
        if self.shape.norm_all:
            states = normed(self.input_norm, states)
        if self.shape.norm_each:
            parts = states.chunk(len(self.fc_norm), -1)
            states = torch.cat([normed(norm, part) for norm, part in zip(self.fc_norm, parts, strict=True)], -1)
        return rows_linear(self.fc, states)

    def rows(
        self,
        tokens: Int[Tensor, "rows"],
        hidden: Float[Tensor, "rows hidden"],
        positions: Int[Tensor, "rows"],
        call: AttentionCall,
    ) -> Float[Tensor, "rows hidden"]:
        """The layers over rows, each a token beside the state before it: outputs before the norm."""
        cos, sin = (part[0].to(hidden.device, hidden.dtype) for part in self.rotary(hidden, positions[None]))
        embedded = select_rows(self.embeddings[0], tokens.to(hidden.device)).to(hidden.dtype)
        first: Any = self.layers[0]
        state = normed(first.hidden_norm, hidden)
        residual = state if self.shape.norm_before_residual else hidden
        x = torch.cat([normed(first.input_layernorm, embedded), state], -1)
        for number, (layer, span) in enumerate(zip(self.layers, self.shape.spans, strict=True)):
            part: Any = layer
            if number:
                residual, x = hidden, normed(part.input_layernorm, hidden)
            residual = residual + attend_rows(part.self_attn, x, (cos, sin), call, span)
            hidden = residual + gated_mlp(part.mlp, normed(part.post_attention_layernorm, residual))
        return hidden


def _layer(shape: EagleShape, number: int) -> nn.Module:
    """A layer of Llama or Qwen3; the first one reads embeddings and states, each of them normalised."""
    layer: Any = nn.Module()
    attend: Any = nn.Module()
    mlp: Any = nn.Module()
    hidden, biased, queries = shape.hidden, shape.biased, shape.heads * shape.head_dim
    for name, size in (("q_proj", shape.heads), ("k_proj", shape.kv_heads), ("v_proj", shape.kv_heads)):
        setattr(attend, name, UninitializedLinear((1 if number else 2) * hidden, size * shape.head_dim, bias=biased))
    attend.o_proj = UninitializedLinear(queries, hidden, bias=biased)
    if shape.head_norms:
        attend.q_norm, attend.k_norm = (RMSNorm(shape.head_dim, shape.norm_epsilon) for _ in range(2))
    attend.layer_idx, attend.head_dim, attend.scaling = number, shape.head_dim, shape.head_dim**-0.5
    mlp.gate_proj, mlp.up_proj = (UninitializedLinear(hidden, shape.intermediate, bias=False) for _ in range(2))
    mlp.down_proj = UninitializedLinear(shape.intermediate, hidden, bias=False)
    layer.self_attn, layer.mlp = attend, mlp
    names = ["input_layernorm", "post_attention_layernorm"] + ([] if number else ["hidden_norm"])
    for name in names:
        setattr(layer, name, RMSNorm(hidden, shape.norm_epsilon))
    return layer


def load_eagle(
    folder: Path, target: Any, target_name: str, kind: str, more: Mapping[str, Callable[[EagleShape], tuple[int, ...]]]
) -> tuple[EagleModel, dict[str, Tensor]]:
    """A head of this kind for a target, in its dtype, and its further weights, whose sizes `more` gives.

    Errors: ValueError of one line. The folder does not identify its target by its weights; for another one of these
    sizes it drafts badly and changes no text.
    """
    config, weights = read_config(folder), read_weights(folder)
    shape = _read_shape(config, weights, folder, target, kind)
    check_layer_count(shape.layers, weights)
    check_sizes(folder, shape.hidden, config.get("target_hidden_size"), shape.hidden_state_layers, target, target_name)
    unembedding = target.get_output_embeddings().weight.detach()
    weights = {name.replace(AUTHORS_LAYER, "layers.0."): weight for name, weight in weights.items()}
    tokens, order = drafted_tokens(folder, weights, len(unembedding))
    embeddings, own_head = take_own_matrices(folder, weights, shape.hidden, len(tokens), target)
    tokens = tokens.to(target.device)
    if own_head is not None:
        head = own_head[order].to(target.device, target.dtype)
    else:
        head = unembedding if len(tokens) == len(unembedding) else select_rows(unembedding, tokens)
    model = EagleModel(shape, tokens, embeddings, head)
    extra = {name: torch.empty(size(shape), device="meta") for name, size in more.items()}
    check_weights(folder, weights, model.state_dict() | extra, f"{kind} of Llama or Qwen3 layers")
    moved = {name: weight.to(target.device, target.dtype).contiguous() for name, weight in weights.items()}
    others = {name: moved.pop(name) for name in more}
    model.load_state_dict(moved, assign=True)
    return model.eval().requires_grad_(False), others


def _read_shape(
    config: Mapping[str, Any], weights: Mapping[str, Tensor], folder: Path, target: Any, kind: str
) -> EagleShape:
    """The sizes of either format. Errors: ValueError for what such heads do not compute here."""
    given = dict(config.get("transformer_layer_config", config))
    layers = (QWEN3_DEFAULTS if given.get("model_type") == "qwen3" else LLAMA_DEFAULTS) | given
    rope, eagle = rope_parameters(layers), config.get("eagle_config") or {}
    problem = unsupported_rope(rope, layers)
    refuse(
        folder, kind,
        {
            "biases of its feed-forward layers": layers.get("mlp_bias"),
            problem: problem,
            f"the activation {layers['hidden_act']}": layers["hidden_act"] != "silu",
            "no hidden states of several layers": not eagle.get("use_aux_hidden_state", True),
            "scaled logits": config.get("logit_scale", 1.0) != 1.0,
        },
    )  # fmt: skip
    heads = layers["num_attention_heads"]
    count = 1 if any(name.startswith(AUTHORS_LAYER) for name in weights) else layers["num_hidden_layers"]
    return EagleShape(
        layers["hidden_size"], layers["intermediate_size"], _hidden_state_layers(config, target), heads,
        layers.get("num_key_value_heads") or heads, layers.get("head_dim") or layers["hidden_size"] // heads,
        rope, layers.get("max_position_embeddings") or 4096, layers["rms_norm_eps"], count,
        layer_spans(layers, count, folder),
        norm_before_residual=bool(config.get("norm_before_residual")), norm_output=bool(config.get("norm_output")),
        norm_all=bool(config.get("norm_before_fc") or eagle.get("norm_before_fc")),
        norm_each=bool(config.get("fc_norm") or config.get("use_aux_norm")), biased=bool(layers.get("attention_bias")),
        head_norms=any(name.endswith("self_attn.q_norm.weight") for name in weights),
    )  # fmt: skip


def _hidden_state_layers(config: Mapping[str, Any], target: Any) -> tuple[int, ...]:
    """The target's layers whose states are inputs; those in `eagle_config` count from the first layer's output."""
    nested = (config.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    count = target.config.get_text_config().num_hidden_layers
    given = config.get("eagle_aux_hidden_state_layer_ids") or [layer + 1 for layer in nested or ()]
    return tuple(given or (2, count // 2, count - 3))
