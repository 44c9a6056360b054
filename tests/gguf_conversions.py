"""What llama.cpp's converter makes of weights that it does not store as they are, and the way back."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

Arrays = list[np.ndarray]
RENAMED = {  # by the names that checkpoints have them under
    "gate.moe_statics": "moe_statics", "expert_bias": "expert_bias.bias",
    "e_score_correction_bias": "e_score_correction.bias", "dt_bias": "dt_proj.bias",
    "block_sparse_moe.router.weight": "block_sparse_moe.router.layer.weight", "mlp.router.bias": "mlp.router.bias",
}  # fmt: skip


@dataclass(frozen=True)
class Conversion:
    """Names and numbers of the tensors that a weight becomes, and the weight that such numbers stand for."""

    names: list[str]
    arrays: Arrays
    back: Callable[[Arrays], np.ndarray]


def convert(architecture: str, config: Any, name: str, values: np.ndarray) -> Conversion:
    """Names are those of checkpoints, from which tensor_mapping of `gguf` makes those of files."""
    whole = name if name.endswith(("weight", "bias")) else f"{name}.weight"
    for ours, theirs in RENAMED.items():
        whole = whole.replace(ours, theirs)
    whole, shape = whole.replace(".forget_gate.", "."), values.shape
    if config.__dict__.get("fuses_qkv"):
        whole = re.sub(r"model\.(.*)self_attn\.[qkv]_proj", r"encoder.\1self_attention.query_key_value", whole)
    if architecture == "gpt2" and name.endswith((".c_attn.weight", ".c_proj.weight", ".c_fc.weight")):
        return Conversion([whole], [values.T], lambda made: made[0].T)
    if architecture == "hy_v3" and name.endswith("e_score_correction_bias"):
        return Conversion([name.replace("e_score_correction", "expert")], [values], lambda made: made[0])
    if architecture == "gptneox" and "query_key_value" in name:
        order = np.arange(len(values)).reshape(config.num_attention_heads, 3, -1).swapaxes(0, 1).ravel()
        return Conversion([whole], [values[order]], lambda made: made[0][np.argsort(order)])
    if architecture == "glm4" and "mrope_section" in config.rope_parameters and re.search("[qk]_proj", name):
        rotated, dim = int(config.head_dim * config.rope_parameters["partial_rotary_factor"]), config.head_dim
        of_head = np.concatenate([np.arange(0, rotated, 2), np.arange(1, rotated, 2), np.arange(rotated, dim)])
        order = (np.arange(0, len(values), dim)[:, None] + of_head).ravel()
        return Conversion([whole], [values[order]], lambda made: made[0][np.argsort(order)])
    rotated = {"q_b_proj": -1, "kv_a_proj_with_mqa": 0, "wq_b": -1, "wk": 0, "k_norm": 0}  # 0: of one head
    if architecture == "hy_v4" and (kind := name.split(".")[-2]) in rotated:
        size = config.index_head_dim if kind == "wq_b" else config.qk_nope_head_dim + config.qk_rope_head_dim
        order = np.arange(len(values)).reshape(-1, size if rotated[kind] else len(values))
        turned = order[:, -config.qk_rope_head_dim :]
        turned[:] = turned.reshape(len(order), 2, -1).swapaxes(1, 2).reshape(turned.shape)
        order = order.ravel()  # the halves of what is rotated by turns
        return Conversion([whole], [values[order]], lambda made: made[0][np.argsort(order)])
    if architecture == "bailingmoe3" and re.search(r"[fg]_proj", name):
        is_recurrent = config.layer_types[int(name.split(".")[2])] == "linear_attention"
        whole = whole.replace("_proj", "_a_proj") if is_recurrent else whole
    if architecture == "bailingmoe3" and name.endswith("A_log"):
        return Conversion(
            [whole.removesuffix(".weight")], [np.exp(values)[:, None]], lambda made: np.log(made[0][:, 0])
        )
    if architecture in ("kimi-linear", "bailingmoe3", "glm5-next") and name.endswith("conv1d.weight"):
        names = [whole.replace("conv1d", f"{each}_conv1d") for each in "qkv"]
        by_part = values.reshape(3, 1, -1, 1, shape[-1])
        return Conversion(names, [*by_part], lambda made: np.concatenate(made, 1).reshape(shape))
    if architecture in ("kimi-linear", "glm5-next") and name.endswith("A_log"):
        return Conversion([whole.removesuffix(".weight")], [-np.exp(values)], lambda made: np.log(-made[0]))
    if name.endswith(("A_log", ".D", "conv1d.weight", "conv.conv.weight", "mamba.norm.weight", "mixer.norm.weight")):
        return _state(architecture, config, name, whole, values)
    if ".experts.gate_up_proj" in name:
        return _gate_and_up(architecture, name, values)
    if ".experts.down_proj" in name:
        whole = f"{name.removesuffix('_bias')}.{'bias' if name.endswith('bias') else 'weight'}"
        swaps = architecture in ("gpt-oss", "llama4") and values.ndim == 3
        stored = values.swapaxes(1, 2) if swaps else values
        return Conversion([whole], [stored], lambda made: made[0].swapaxes(1, 2) if swaps else made[0])
    if name.endswith("shared_mlp.input_linear.weight") and architecture != "granite-swa":
        gate, up = np.split(values, 2)
        place = name.replace("shared_mlp.input_linear.weight", "mlp.shared_experts.{}_proj.weight")
        place = place if config.num_local_experts else place.replace("shared_experts.", "")
        return Conversion([place.format("gate"), place.format("up")], [gate, up], np.concatenate)
    if name.endswith("shared_mlp.output_linear.weight") and not config.num_local_experts:
        whole = name.replace("shared_mlp.output_linear", "mlp.down_proj")
    if name.endswith("kv_b_proj.weight") and architecture != "minicpm3" and config.__dict__.get("splits_kv_b", True):
        heads, dim = config.num_attention_heads, config.qk_nope_head_dim
        by_head = values.reshape(heads, -1, values.shape[1])
        names = [name.replace("kv_b_proj", f"{each}_b_proj") for each in "kv"]
        return Conversion(
            names, [by_head[:, :dim].swapaxes(1, 2), by_head[:, dim:]],
            lambda made: np.concatenate([made[0].swapaxes(1, 2), made[1]], 1).reshape(shape),
        )  # fmt: skip
    if architecture == "falcon" and "query_key_value" in name:
        heads, kv_heads = config.num_attention_heads, config.num_kv_heads if config.new_decoder_architecture else 1
        order = np.arange(len(values)).reshape(kv_heads, heads // kv_heads + 2, config.head_dim)
        taken = np.concatenate([order[:, :-2].ravel(), order[:, -2].ravel(), order[:, -1].ravel()])
        return Conversion([whole], [values[taken]], lambda made: made[0][np.argsort(taken)])
    if name.endswith("shared_expert_gate.weight"):
        return Conversion([whole], [values[0]], lambda made: made[0][None])
    if "linear_attn" in name:
        return _delta_net(architecture, config, name, whole, values)
    if architecture == "falcon-h1" and (scale := _multiplier(config, name)) is not None:
        return Conversion([whole], [values * scale], lambda made: made[0] / scale)
    return Conversion([whole], [values], lambda made: made[0])


def _gate_and_up(architecture: str, name: str, values: np.ndarray) -> Conversion:
    is_bias = name.endswith("bias")
    path = name.removesuffix("_bias").removesuffix("gate_up_proj")
    names = [f"{path}{part}_proj.{'bias' if is_bias else 'weight'}" for part in ("gate", "up")]
    if architecture == "gemma4":
        return Conversion([f"{path}gate_up_proj.weight"], [values], lambda made: made[0])
    if architecture == "llama4":
        parts = np.split(values.swapaxes(1, 2), 2, 1)
        return Conversion(names, parts, lambda made: np.concatenate(made, 1).swapaxes(1, 2))
    if architecture != "gpt-oss":
        return Conversion(names, np.split(values, 2, 1), lambda made: np.concatenate(made, 1))

    def back(made: Arrays) -> np.ndarray:
        joined = np.stack(made, 2).reshape(made[0].shape[0], -1, *made[0].shape[2:])
        return joined if is_bias else joined.swapaxes(1, 2)

    stored = values if is_bias else values.swapaxes(1, 2)
    return Conversion(names, [stored[:, ::2], stored[:, 1::2]], back)


def _state(architecture: str, config: Any, name: str, whole: str, values: np.ndarray) -> Conversion:
    shape, groups = values.shape, getattr(config, "mamba_n_groups", None) or getattr(config, "n_groups", 1)
    is_delta_net = "linear_attn" in name
    order = _order(architecture, config, name, len(values)) if is_delta_net else np.arange(len(values))
    stored = values[order]
    if name.endswith("A_log"):
        whole, stored = name, -np.exp(stored)
    if name.endswith(".D"):
        whole = name
    if name.endswith(("A_log", ".D")) and not is_delta_net and architecture not in ("mamba", "jamba"):
        stored = stored[:, None]
    elif "conv" in name:
        stored = stored.reshape(shape[0], shape[-1])
    elif name.endswith("norm.weight"):
        stored = stored.reshape(groups, -1)

    def back(made: Arrays) -> np.ndarray:
        numbers = np.log(-made[0]) if name.endswith("A_log") else made[0]
        return numbers.reshape(shape)[np.argsort(order)]

    return Conversion([whole], [stored], back)


def _order(architecture: str, config: Any, name: str, rows: int) -> np.ndarray:
    """Of rows of values by heads: of Qwen3.5, heads of values that read other keys follow each other."""
    keys, heads = config.linear_num_key_heads, config.linear_num_value_heads
    dim = 1 if re.search(r"in_proj_[ab]\.|A_log|dt_bias", name) else config.linear_value_head_dim
    first = rows - heads * dim  # rows of queries and keys
    order = np.arange(heads * dim).reshape(keys, heads // keys, dim).swapaxes(0, 1).reshape(-1)
    moved = architecture in ("qwen35", "qwen35moe") and not name.endswith("norm.weight")
    return np.concatenate([np.arange(first), first + order]) if moved else np.arange(rows)


def _delta_net(architecture: str, config: Any, name: str, whole: str, values: np.ndarray) -> Conversion:
    if name.endswith("norm.weight"):
        return Conversion([whole], [values], lambda made: made[0])
    if name.endswith("out_proj.weight"):
        order = _order(architecture, config, name, values.shape[1])
        return Conversion([whole], [values[:, order]], lambda made: made[0][:, np.argsort(order)])
    if name.endswith("in_proj_qkvz.weight"):
        groups, dim = config.linear_num_key_heads, config.linear_key_head_dim
        size = config.linear_num_value_heads // groups * config.linear_value_head_dim
        by_group = np.arange(len(values)).reshape(groups, -1)
        query, key, value, gate = np.split(by_group, [dim, 2 * dim, 2 * dim + size], 1)
        order = np.concatenate([query.ravel(), key.ravel(), value.ravel()])
        gates = gate.ravel()
        if config.__dict__.get("has_old_names"):
            return Conversion([whole], [values], lambda made: made[0])
        names = [name.replace("in_proj_qkvz", each) for each in ("in_proj_qkv", "in_proj_z")]
        both = np.argsort(np.concatenate([order, gates]))
        return Conversion(names, [values[order], values[gates]], lambda made: np.concatenate(made)[both])
    order = np.arange(len(values)) if "in_proj_ba" in name else _order(architecture, config, name, len(values))
    return Conversion([whole], [values[order]], lambda made: made[0][np.argsort(order)])


def _multiplier(config: Any, name: str) -> Any:
    """What Falcon-H1's converter multiplies a weight by."""
    size, keys = config.mamba_d_ssm, config.mamba_n_groups * config.mamba_d_state
    inner, gate, output = config.attention_in_multiplier, *config.mlp_multipliers
    found = {
        "down_proj": output, "gate_proj": gate, "k_proj": config.key_multiplier * inner, "q_proj": inner,
        "v_proj": inner, "o_proj": config.attention_out_multiplier, "mamba.out_proj": config.ssm_out_multiplier,
        "lm_head": config.lm_head_multiplier, "embed_tokens": config.embedding_multiplier,
    }  # fmt: skip
    if "mamba.in_proj" in name:
        parts = np.repeat(config.ssm_multipliers, (size, size, keys, keys, config.mamba_n_heads))
        return (parts * config.ssm_in_multiplier).astype(np.float32)[:, None]
    return next((scale for key, scale in found.items() if name.endswith(f"{key}.weight")), None)
