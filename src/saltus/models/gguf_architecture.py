"""Say what GGUF files have of an architecture: Transformers' configuration from their settings, and names of tensors.

A file of saltus.models.architectures has it as `GGUF`; saltus.loading reads files by it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from saltus.models.packed_decoder import MAX_SIZE

LLAMA_TENSORS = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_norm": "input_layernorm",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_norm": "post_attention_layernorm",
    # of blocks after the last layer, which predict later tokens: the names that DeepSeek V3 has them under
    "nextn.eh_proj": "eh_proj",
    "nextn.enorm": "enorm",
    "nextn.hnorm": "hnorm",
    "nextn.embed_tokens": "embed_tokens",
    "nextn.shared_head_norm": "shared_head.norm",
    "nextn.shared_head_head": "shared_head.head",
}
Rows = tuple[tuple[int, int], ...]  # from a row to another
LONG_FACTORS, SHORT_FACTORS = "rope_factors_long.weight", "rope_factors_short.weight"  # of LongRoPE
SLIDING, FULL = "sliding_attention", "full_attention"
SOFTMAX, SIGMOID = 1, 2  # of llama.cpp's scores of experts


@dataclass(frozen=True)
class GgufModel:
    """Settings and tensors of a model in a GGUF file, as llama.cpp names them.

    What is asked for is there and of a fitting type, or the error is a ValueError of one line.
    """

    name: str  # of the architecture
    metadata: Mapping[str, Any]
    shapes: Mapping[str, tuple[int, ...]]  # of tensors
    read_numbers: Callable[[str], list[float]]  # of a tensor in float32

    def has(self, key: str) -> bool:
        return f"{self.name}.{key}" in self.metadata

    def get(self, key: str, default: Any = None) -> Any:
        """A setting as it is."""
        return self.metadata.get(f"{self.name}.{key}", default)

    def size(self, key: str, default: int | None = None, least: int = 1) -> int:
        """A whole number."""
        value = self.get(key, default)
        if type(value) is not int or not least <= value <= MAX_SIZE:
            raise self._wrong(key, value, f"a whole number from {least} to {MAX_SIZE:,}")
        return value

    def sizes(self, key: str, layers: int, least: int = 1) -> list[int]:
        """A whole number for each layer; a single one is that of all."""
        values = self.get(key)
        values = values if isinstance(values, list) else [values] * layers
        if len(values) != layers or any(type(value) is not int or not least <= value <= MAX_SIZE for value in values):
            raise self._wrong(key, values, f"whole numbers from {least} to {MAX_SIZE:,}, one or {layers:,} of them")
        return values

    def flag(self, key: str, default: bool = False) -> bool:
        value = self.get(key, default)
        if not isinstance(value, bool):
            raise self._wrong(key, value, "true or false")
        return value

    def layers_with(self, tensor: str) -> list[bool]:
        """Which layers have a tensor, "ffn_gate_inp.weight"."""
        return [f"blk.{layer}.{tensor}" in self.shapes for layer in range(num_layers(self))]

    def rows(self, tensor: str) -> int:
        """How many rows a tensor has."""
        if not self.shapes.get(tensor):
            raise ValueError(f"it lacks {tensor}; fetch it again")
        return self.shapes[tensor][0]

    def number(self, key: str, default: float | None = None) -> float:
        """A number, which float32 stores, as the decimal that was meant."""
        value = self.get(key, default)
        if type(value) not in (int, float) or not math.isfinite(value):
            raise self._wrong(key, value, "a number")
        single = np.float32(value) if abs(value) < np.finfo(np.float32).max else value
        return float(str(single)) if single == value else float(value)

    def numbers(self, key: str, layers: int, default: list[float] | None = None) -> list[float]:
        """A number for each layer, as it is; a single one is that of all."""
        values = self.get(key, default)
        values = [values] * layers if type(values) in (int, float) else values
        is_list = isinstance(values, list) and len(values) == layers
        if not is_list or not all(type(value) in (int, float) and math.isfinite(value) for value in values):
            raise self._wrong(key, values, f"numbers, one or {layers:,} of them")
        return values

    def word(self, key: str, default: str) -> str:
        value = self.get(key, default)
        if not isinstance(value, str):
            raise self._wrong(key, value, "a word")
        return value

    def _wrong(self, key: str, value: Any, what: str) -> ValueError:
        shown = repr(value)
        shown = shown if len(shown) < 100 else f"{shown[:100]}…"
        return ValueError(f"its {self.name}.{key} is {shown}, but must be {what}; fetch it again")


@dataclass(frozen=True)
class TensorPart:
    """A tensor of a file that is a weight of Transformers in another form, or a part of one.

    Weights of several tensors have their rows one after the other, by `number`, or `alternating`. Matrices of heads or
    experts are joined one by one.
    """

    name: str  # of the weight
    number: int = 0
    alternating: bool = False
    rows: Callable[[Mapping[str, Any], int], Rows] | None = None  # which of so many rows, in turn; (): all
    is_transposed: bool = False
    is_negative_exponential: bool = False  # -exp(weight) is stored
    is_exponential: bool = False  # exp(weight) is stored
    is_reshaped: bool = False  # stored with the numbers in the same order
    matrix: int | None = None  # which one of a stack, that has a matrix for each of several weights


Target = str | TensorPart | tuple[TensorPart, ...]


@dataclass(frozen=True)
class GgufArchitecture:
    """How llama.cpp writes models of an architecture.

    Linear layers and norms have the names of `LLAMA_TENSORS`, but for `tensors`: names of tensors, or of their parts
    ("x.weight"), and what they are in Transformers, beside "model.layers.0." where they begin with "blk.0.". A part or
    a TensorPart stands for a whole name, with its attribute.
    """

    name: str
    config: Callable[[GgufModel], dict[str, Any]]  # Transformers' configuration, without tokens
    tensors: Mapping[str, Target] = field(default_factory=dict)
    layers: str = "model.layers"
    interleaves_heads: bool = False  # of queries and keys, the rows of a head's two halves alternate
    added_to_norms: int = 0  # the weights of norms are stored as so much more
    ignored: Callable[[Mapping[str, Any], str], bool] = lambda config, tensor: False  # of this configuration
    repeated: Mapping[str, str] = field(default_factory=dict)  # not read beside a tensor that has the same numbers
    numbers: Mapping[str, str] = field(default_factory=dict)  # settings with a number of each layer, and its weight

    def repeats(self, tensor: str, names: Container[str]) -> bool:
        """True for a tensor ("blk.0.attn_k_b.weight") whose numbers another one of the file has, too."""
        kind = tensor.split(".")[-2] if tensor.count(".") == 3 else ""
        return kind in self.repeated and tensor.replace(kind, self.repeated[kind]) in names

    def targets(self, block: str | None, kind: str, part: str | None) -> list[TensorPart]:
        """The weights in Transformers of "blk.{block}.{kind}.{part}", without a block or a part where there is none."""
        names: dict[str, Target] = {**LLAMA_TENSORS, **self.tensors}
        found = names.get(kind if part is None else f"{kind}.{part}")
        if found is None and part is not None and isinstance(name := names.get(kind), str):
            found = f"{name}.{part}"
        if isinstance(found, str):
            found = TensorPart(found)
        parts = found if isinstance(found, tuple) else (found,) if found is not None else ()
        return [part if block is None else replace(part, name=f"{self.layers}.{block}.{part.name}") for part in parts]


def decoder_config(model: GgufModel, model_type: str, architecture: str, **changes: Any) -> dict[str, Any]:
    """What configurations of Transformers have in common, changed in places."""
    heads, hidden = model.size("attention.head_count"), model.size("embedding_length")
    settings = {
        "architectures": [architecture],
        "hidden_size": hidden,
        "intermediate_size": model.get("feed_forward_length", model.get("expert_feed_forward_length")),
        "max_position_embeddings": model.size("context_length"),
        "model_type": model_type,
        "num_attention_heads": heads,
        "num_hidden_layers": num_layers(model),
        "num_key_value_heads": model.get("attention.head_count_kv", heads),
        "head_dim": model.get("attention.key_length") or hidden // heads,
    }
    if "hidden_activation" not in changes:  # its name in some
        settings["hidden_act"] = "silu"
    if "rope_parameters" not in changes:
        settings["rope_parameters"] = rope(model)
    return settings | changes


def llama_config(model: GgufModel, model_type: str, architecture: str, **changes: Any) -> dict[str, Any]:
    """A configuration with the names of Llama's, changed in places."""
    settings = {
        "attention_bias": "blk.0.attn_q.bias" in model.shapes,
        "mlp_bias": "blk.0.ffn_up.bias" in model.shapes,
        "rms_norm_eps": model.number("attention.layer_norm_rms_epsilon"),
    }
    return decoder_config(model, model_type, architecture, **settings | changes)


def num_layers(model: GgufModel) -> int:
    """How many layers a text passes: those that only predict later tokens come after them."""
    return model.size("block_count") - model.size("nextn_predict_layers", 0, least=0)


def rope(model: GgufModel) -> dict[str, Any]:
    """How positions are scaled; what a file does not say has llama.cpp's defaults."""
    parameters: dict[str, Any] = {"rope_theta": model.number("rope.freq_base", 10000.0), "rope_type": "default"}
    if LONG_FACTORS in model.shapes:
        return parameters | {
            "rope_type": "longrope",
            "original_max_position_embeddings": original_length(model),
            "long_factor": model.read_numbers(LONG_FACTORS),
            "short_factor": model.read_numbers(SHORT_FACTORS),
        }
    factor = model.get("rope.scaling.factor") or model.get("rope.scale_linear") or 1.0
    kind = model.word("rope.scaling.type", "linear")
    if kind not in ("none", "linear", "yarn"):
        raise ValueError(f"it scales positions by {kind!r}; supported are none, linear and yarn")
    if kind == "none" or factor == 1:
        return parameters
    parameters |= {"rope_type": kind, "factor": factor}
    if kind == "yarn":
        parameters["original_max_position_embeddings"] = original_length(model)
        for ours, theirs in {
            "attention_factor": "attn_factor",
            "beta_fast": "beta_fast",
            "beta_slow": "beta_slow",
        }.items():
            if model.has(key := f"rope.scaling.yarn_{theirs}"):
                parameters[ours] = model.number(key)
    return parameters


def original_length(model: GgufModel) -> int:
    """The length for which positions were not scaled yet."""
    return model.size("rope.scaling.original_context_length", 0, least=0) or model.size("context_length")


def partial_rope(model: GgufModel) -> dict[str, Any]:
    """The same where a part of each head may be rotated."""
    dim = model.get("attention.key_length") or model.size("embedding_length") // model.size("attention.head_count")
    return rope(model) | {"partial_rotary_factor": model.size("rope.dimension_count", dim) / dim}


def layer_types(model: GgufModel, period: int) -> list[str]:
    """Which layers see a window: as the file says, or all but the last of each `period`."""
    layers = num_layers(model)
    found = model.get("attention.sliding_window_pattern", period)
    if isinstance(found, list):
        if len(found) < layers:
            raise ValueError(f"it says of {len(found):,} layers whether they have windows, but has {layers:,}")
        return [SLIDING if slides else FULL for slides in found[:layers]]
    period = model.size("attention.sliding_window_pattern", period)
    return [SLIDING if number % period < period - 1 else FULL for number in range(layers)]


def is_norm(kind: str) -> bool:
    """True for the name of a norm in GGUF, but for those inside of layers with a state."""
    return kind.endswith("norm") and not kind.startswith("ssm_")


def expert_tensors(path: str = "mlp.experts", router: str = "mlp.gate", alternating: bool = False) -> dict[str, Target]:
    """Stacks of experts, and what chooses among them."""
    found: dict[str, Target] = {"ffn_gate_inp": router, "exp_probs_b.bias": f"{router}.e_score_correction_bias"}
    for suffix, ours in (("weight", ""), ("bias", "_bias")):
        gate_up = f"{path}.gate_up_proj{ours}"
        for number, name in enumerate(("gate", "up")):
            found[f"ffn_{name}_exps.{suffix}"] = TensorPart(gate_up, number, alternating)
        found |= {f"ffn_gate_up_exps.{suffix}": gate_up, f"ffn_down_exps.{suffix}": f"{path}.down_proj{ours}"}
    return found


def shared_expert_tensors(path: str) -> dict[str, Target]:
    """An MLP that every token uses beside its experts."""
    return {f"ffn_{name}_shexp": f"{path}.{name}_proj" for name in ("gate", "up", "down")}


def expert_counts(model: GgufModel, count: str = "num_experts") -> dict[str, Any]:
    """How many experts there are, how many a token has, and how wide they are."""
    width = model.get("expert_feed_forward_length") or model.get("feed_forward_length")
    return {
        count: model.size("expert_count"), "num_experts_per_tok": model.size("expert_used_count"),
        "moe_intermediate_size": width,
    }  # fmt: skip


def check_gates(model: GgufModel, gates: int) -> None:
    """Errors: ValueError if experts are chosen by other scores than these; files may not say by which."""
    if model.get("expert_gating_func", gates) not in (0, gates):
        raise ValueError("it chooses experts by other scores than Transformers, which is not supported")


def same_for_layers(values: Sequence[int], what: str) -> int:
    """The number that all layers have. Errors: ValueError if they have several."""
    if len(set(values)) != 1:
        raise ValueError(f"its layers have different {what} ({values[0]}, {max(values)}), which is not supported")
    return values[0]
