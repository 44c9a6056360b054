"""Write weights as quantised checkpoints of the hub have them, from their public descriptions, in plain numpy.

Each writer draws a weight [out, in] and returns the tensors that stand for it, by the last part of their names, and the
numbers that they mean in float32.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

Written = tuple[dict[str, Tensor], np.ndarray]
Writer = Callable[[np.random.Generator, int, int], Written]
AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]
E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def words(integers: np.ndarray, bits: int, order: list[int] | None = None) -> Tensor:
    """Unsigned integers [rows, n] as int32 words [rows, n · bits / 32]: the i-th of a word is shifted by i · bits.

    Those of 3 bits follow one another over the ends of words.
    """
    if 32 % bits:
        rows = [sum(int(each) << bits * place for place, each in enumerate(row)) for row in integers]
        size = integers.shape[1] * bits // 8
        return torch.tensor(
            [list(np.frombuffer(row.to_bytes(size, "little"), "<i4")) for row in rows], dtype=torch.int32
        )
    per_word = 32 // bits
    out = np.zeros((integers.shape[0], integers.shape[1] // per_word), np.uint32)
    for column in range(integers.shape[1]):
        word, place = divmod(column, per_word)
        source = column if order is None else word * per_word + order[place]
        out[:, word] |= integers[:, source].astype(np.uint32) << np.uint32(place * bits)
    return torch.from_numpy(out.view(np.int32).copy())


def drawn(draws: np.random.Generator, outs: int, ins: int, groups: int, bits: int, zero: int | None) -> tuple:
    """Unsigned integers, zeros and scales [out, groups], and the weights scale · (integer − zero)."""
    integers = draws.integers(0, 1 << bits, (outs, ins))
    zeros = np.full((outs, groups), zero) if zero is not None else draws.integers(1, 1 << bits, (outs, groups))
    scales = (draws.uniform(0.5, 1.5, (outs, groups)) * (0.6 / (1 << bits))).astype(np.float16)
    each = np.arange(ins) // (ins // groups)
    return integers, zeros, scales, scales.astype(np.float32)[:, each] * (integers - zeros[:, each])


def gptq(bits: int = 4, group: int = 32, zero: int | None = None, less: int = 1, act_order: bool = False) -> Writer:
    def write(draws: np.random.Generator, outs: int, ins: int) -> Written:
        groups = ins // group if group > 0 else 1
        integers, zeros, scales, weight = drawn(draws, outs, ins, groups, bits, zero)
        of_input = np.arange(ins) // (ins // groups)
        if act_order:
            of_input = draws.permutation(of_input)
            weight = scales.astype(np.float32)[:, of_input] * (integers - zeros[:, of_input])
        return {
            "qweight": words(integers, bits).T.contiguous(), "qzeros": words((zeros - less).T, bits),
            "scales": torch.from_numpy(scales.T.copy()), "g_idx": torch.from_numpy(of_input.astype(np.int32)),
        }, weight  # fmt: skip

    return write


def awq(draws: np.random.Generator, outs: int, ins: int) -> Written:
    integers, zeros, scales, weight = drawn(draws, outs, ins, ins // 32, 4, None)
    return {
        "qweight": words(integers.T, 4, AWQ_ORDER), "qzeros": words(zeros.T, 4, AWQ_ORDER),
        "scales": torch.from_numpy(scales.T.copy()),
    }, weight  # fmt: skip


def packed_integers(
    bits: int = 4, group: int = 32, symmetric: bool = True, act_order: bool = False, dtype: Any = torch.bfloat16
) -> Writer:
    def write(draws: np.random.Generator, outs: int, ins: int) -> Written:
        groups = ins // group if group > 0 else 1
        integers, zeros, scales, weight = drawn(draws, outs, ins, groups, bits, 1 << bits - 1 if symmetric else None)
        of_input = np.arange(ins) // (ins // groups)
        kept = torch.from_numpy(scales).to(dtype)
        if act_order:
            of_input = draws.permutation(of_input)
        weight = kept.float().numpy()[:, of_input] * (integers - zeros[:, of_input])
        tensors = {
            "weight_packed": words(integers, bits), "weight_scale": kept, "weight_shape": torch.tensor([outs, ins])
        }  # fmt: skip
        if not symmetric:
            tensors["weight_zero_point"] = words(zeros.T, bits).T.contiguous()
        if act_order:
            tensors["weight_g_idx"] = torch.from_numpy(of_input.astype(np.int32))
        return tensors, weight

    return write


def permuted_integers(draws: np.random.Generator, outs: int, ins: int) -> Written:
    """Integers of 8 bits in bytes of their own, with a zero and a scale for each group of inputs, in any order."""
    integers, zeros, scales, _ = drawn(draws, outs, ins, ins // 32, 8, None)
    of_input = draws.permutation(np.arange(ins) // 32)
    return {
        "weight": torch.from_numpy((integers - 128).astype(np.int8)), "weight_scale": torch.from_numpy(scales),
        "weight_zero_point": torch.from_numpy((zeros - 128).astype(np.int8)),
        "weight_g_idx": torch.from_numpy(of_input.astype(np.int32)),
    }, scales.astype(np.float32)[:, of_input] * (integers - zeros[:, of_input])  # fmt: skip


def plain_integers(draws: np.random.Generator, outs: int, ins: int) -> Written:
    integers = draws.integers(-128, 128, (outs, ins))
    scales = torch.from_numpy(draws.uniform(0.001, 0.004, (outs, 1))).bfloat16()
    return {
        "weight": torch.from_numpy(integers.astype(np.int8)), "weight_scale": scales
    }, integers * scales.float().numpy()  # fmt: skip


def floats8(scale: str, form: str, power_of_two: bool = False, block: tuple[int, int] = (32, 48)) -> Writer:
    """E4M3 with scales called `scale` for the tensor, an output or blocks, which the edges cut."""

    def write(draws: np.random.Generator, outs: int, ins: int) -> Written:
        values = torch.from_numpy(draws.normal(0, 60, (outs, ins))).float().to(torch.float8_e4m3fn)
        shape = {"tensor": (1,), "output": (outs, 1), "blocks": (-(-outs // block[0]), -(-ins // block[1]))}[form]
        scales = draws.uniform(0.001, 0.003, shape)
        scales = torch.from_numpy(np.exp2(np.round(np.log2(scales))) if power_of_two else scales).float()
        of_weights = scales.numpy()
        if form == "blocks":
            of_weights = of_weights[np.arange(outs) // block[0]][:, np.arange(ins) // block[1]]
        weight = values.float().numpy() * of_weights
        return {"weight": values, scale: scales, "input_scale": torch.tensor(1.0)}, weight

    return write


def floats4(draws: np.random.Generator, outs: int, ins: int) -> tuple[np.ndarray, np.ndarray]:
    """Bytes of pairs of E2M1, the first in the low half, and their numbers."""
    codes = draws.integers(0, 16, (outs, ins))
    numbers = np.array([*E2M1, *(-x for x in E2M1)], np.float32)[codes]
    return (codes[:, ::2] | codes[:, 1::2] << 4).astype(np.uint8), numbers


def nvfp4(draws: np.random.Generator, outs: int, ins: int) -> Written:
    pairs, numbers = floats4(draws, outs, ins)
    scales = torch.from_numpy(draws.uniform(20, 200, (outs, ins // 16))).float().to(torch.float8_e4m3fn)
    of_all = torch.tensor([2000.0])
    weight = numbers * (scales.float() * (1 / of_all)).numpy()[:, np.arange(ins) // 16]
    return {
        "weight_packed": torch.from_numpy(pairs), "weight_scale": scales, "weight_global_scale": of_all
    }, weight  # fmt: skip


def modelopt4(draws: np.random.Generator, outs: int, ins: int) -> Written:
    """As NVIDIA's ModelOpt writes NVFP4: the scale of all multiplies."""
    parts, _ = nvfp4(draws, outs, ins)
    of_all = torch.tensor([0.0005])
    pairs, numbers = floats4(draws, outs, ins)
    weight = numbers * (parts["weight_scale"].float() * of_all).numpy()[:, np.arange(ins) // 16]
    return {
        "weight": torch.from_numpy(pairs), "weight_scale": parts["weight_scale"], "weight_scale_2": of_all,
        "input_scale": torch.tensor(1.0),
    }, weight  # fmt: skip


def modelopt_awq(scaled_inputs: bool = False) -> Writer:
    """As ModelOpt packs INT4 (W4A16_AWQ): bytes of two outputs beside each other."""

    def write(draws: np.random.Generator, outs: int, ins: int) -> Written:
        integers = draws.integers(-8, 8, (outs, ins))
        scales = draws.uniform(0.5, 1.5, (outs, ins // 32)).astype(np.float32) * np.float32(0.04)
        weight = scales.astype(np.float16).astype(np.float32)[:, np.arange(ins) // 32] * integers
        packed = np.zeros((outs // 2, ins), np.uint8)
        for out in range(outs):
            packed[out // 2] |= (integers[out] % 16 << 4 * (out % 2)).astype(np.uint8)
        tensors = {"weight": torch.from_numpy(packed), "weight_scale": torch.from_numpy(scales).half().float()}
        if scaled_inputs:
            of_inputs = torch.from_numpy(draws.uniform(0.5, 2, ins)).bfloat16()
            return tensors | {"pre_quant_scale": of_inputs}, weight * of_inputs.float().numpy()
        return tensors, weight

    return write


def modelopt_int8(draws: np.random.Generator, outs: int, ins: int) -> Written:
    """As ModelOpt writes INT8 (W8A16, W8A8_SQ_PER_CHANNEL)."""
    tensors, weight = plain_integers(draws, outs, ins)
    return {"weight": tensors["weight"], "weight_scale": tensors["weight_scale"].flatten().float()}, weight


def modelopt_mxfp8(draws: np.random.Generator, outs: int, ins: int) -> Written:
    values = torch.from_numpy(draws.normal(0, 60, (outs, ins))).float().to(torch.float8_e4m3fn)
    exponents = draws.integers(115, 119, (outs, ins // 32))
    weight = values.float().numpy() * np.exp2(exponents - 127.0).astype(np.float32)[:, np.arange(ins) // 32]
    return {"weight": values, "weight_scale": torch.from_numpy(exponents.astype(np.uint8))}, weight


def modelopt_mxfp4(draws: np.random.Generator, outs: int, ins: int) -> Written:
    tensors, weight = mxfp4(draws, outs, ins)
    return {"weight": tensors["weight_packed"], "weight_scale": tensors["weight_scale"]}, weight


def mxfp4(draws: np.random.Generator, outs: int, ins: int) -> Written:
    pairs, numbers = floats4(draws, outs, ins)
    exponents = draws.integers(120, 125, (outs, ins // 32)).astype(np.uint8)
    weight = numbers * np.exp2(exponents.astype(np.float32) - 127)[:, np.arange(ins) // 32]
    return {"weight_packed": torch.from_numpy(pairs), "weight_scale": torch.from_numpy(exponents)}, weight


def compressed(form: str, **weights: Any) -> dict[str, Any]:
    """The `quantization_config` of a group for all linear layers but the output layer."""
    group = {"targets": ["Linear"], "weights": {"type": "int", "symmetric": True, **weights}, "format": form}
    return {
        "quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group}, "ignore": ["lm_head"]
    }  # fmt: skip


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "checkpoint_format": "gptq"}
INT4 = compressed("pack-quantized", num_bits=4, strategy="group", group_size=32)
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [32, 48]}
AUTO_ROUND = {"quant_method": "auto-round", "bits": 4, "group_size": 32, "sym": True}
MODELOPT = {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"]}
CASES: dict[str, tuple[dict[str, Any], Writer, str]] = {  # settings, writer, and what the weights become
    "gptq symmetric": (GPTQ, gptq(zero=8), "Q4_0"),
    "gptq": (GPTQ, gptq(), "Q5_0"),
    "gptq v2 of channels": ({**GPTQ, "checkpoint_format": "gptq_v2", "group_size": -1}, gptq(group=-1, less=0), "Q5_0"),
    "gptq 8 bits": ({**GPTQ, "bits": 8}, gptq(8, zero=128), "Q8_0"),
    "gptq 8 bits with zeros": ({**GPTQ, "bits": 8}, gptq(8), "bfloat16"),
    "gptq 2 bits": ({**GPTQ, "bits": 2}, gptq(2), "Q4_0"),
    "gptq 3 bits": ({**GPTQ, "bits": 3}, gptq(3), "Q4_0"),
    "gptq act order": ({**GPTQ, "desc_act": True}, gptq(act_order=True), "bfloat16"),
    "gptq groups of 16": ({**GPTQ, "group_size": 16}, gptq(group=16), "bfloat16"),
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}, awq, "Q5_0"),
    "auto-round": ({**AUTO_ROUND, "packing_format": "auto_round:auto_gptq"}, gptq(zero=8), "Q4_0"),
    "auto-round with zeros": ({**AUTO_ROUND, "packing_format": "auto_round"}, gptq(less=0), "Q5_0"),
    "auto-round as awq": ({**AUTO_ROUND, "packing_format": "auto_round:auto_awq"}, awq, "Q5_0"),
    "int4": (INT4, packed_integers(), "Q4_0"),
    "int4 with zeros": (
        compressed("pack-quantized", num_bits=4, symmetric=False), packed_integers(symmetric=False), "Q5_0"
    ),
    "int4 act order": (INT4, packed_integers(act_order=True), "bfloat16"),
    "int8 of channels": (compressed("pack-quantized", num_bits=8), packed_integers(8, -1), "Q8_0"),
    "int8 and int8 activations": (compressed("int-quantized", num_bits=8), plain_integers, "Q8_0"),
    "int8 act order": (compressed("int-quantized", num_bits=8, symmetric=False), permuted_integers, "bfloat16"),
    "fp8 of channels": (
        compressed("float-quantized", num_bits=8, type="float"), floats8("weight_scale", "output"), "bfloat16"
    ),
    "fp8 blocks by compressed-tensors": (
        compressed("float-quantized", num_bits=8, type="float", block_structure=[32, 48]),
        floats8("weight_scale", "blocks"), "bfloat16",
    ),
    "nvfp4": (compressed("nvfp4-pack-quantized", num_bits=4, type="float"), nvfp4, "bfloat16"),
    "mxfp4": (compressed("mxfp4-pack-quantized", num_bits=4, type="float"), mxfp4, "MXFP4"),
    "modelopt fp8": (MODELOPT, floats8("weight_scale", "tensor"), "bfloat16"),
    "modelopt int4": ({**MODELOPT, "quant_algo": "W4A16_AWQ"}, modelopt_awq(), "Q4_0"),
    "modelopt int4, scaled inputs": ({**MODELOPT, "quant_algo": "W4A16_AWQ"}, modelopt_awq(True), "bfloat16"),
    "modelopt int8": ({**MODELOPT, "quant_algo": "W8A16"}, modelopt_int8, "Q8_0"),
    "modelopt mxfp8": ({**MODELOPT, "quant_algo": "MXFP8"}, modelopt_mxfp8, "bfloat16"),
    "modelopt mxfp4": ({**MODELOPT, "quant_algo": "MXFP4"}, modelopt_mxfp4, "MXFP4"),
    "modelopt nvfp4": ({**MODELOPT, "quant_algo": "NVFP4"}, modelopt4, "bfloat16"),
    "fp8": (FP8, floats8("weight_scale_inv", "blocks"), "bfloat16"),
    "fp8 of powers of two": (FP8, floats8("weight_scale_inv", "blocks", power_of_two=True), "bfloat16"),
    "fp8 of tensors": ({**FP8, "weight_block_size": None}, floats8("weight_scale", "tensor"), "bfloat16"),
}  # fmt: skip


def write_quantised(
    folder: Path,
    settings: dict[str, Any],
    writer: Writer,
    reference: Path,
    chosen: Callable[[str], bool] = lambda name: "proj" in name,
) -> None:
    """Quantise the chosen matrices of a folder's model, drawn anew, and write what they mean to a second folder."""
    shutil.copytree(folder, reference)
    draws = np.random.default_rng(0)
    written, meant = {}, {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if tensor.ndim == 2 and chosen(name):
            parts, weight = writer(draws, *tensor.shape)
            written |= {f"{name.rpartition('.')[0]}.{part}": each for part, each in parts.items()}
            meant[name] = torch.from_numpy(weight).to(tensor.dtype)
        else:
            written[name] = meant[name] = tensor
    written["model.layers.0.self_attn.k_scale"] = torch.tensor(1.0)  # of keys, which stay as they are
    save_file(written, folder / "model.safetensors", {"format": "pt"})
    save_file(meant, reference / "model.safetensors", {"format": "pt"})
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": settings}))
