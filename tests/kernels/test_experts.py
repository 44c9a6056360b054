"""Mixtures of experts: right for every router and activation, and a row's bits depend on nothing but the row."""

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Q
from test_packed import random_blocks, same_bits
from torch import Tensor

from saltus.kernels import native
from saltus.kernels.batch_invariant_ops import linear
from saltus.kernels.native import structs
from saltus.kernels.packed_blocks import PACKED_FORMATS
from saltus.kernels.packed_weight import PackedWeight, kernel_arguments, select_outputs

pytestmark = pytest.mark.skipif(native.load_kernels() is None, reason="no compiled kernels")

HIDDEN, WIDTH, EXPERTS = 50, 28, 12
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 3e-3}
each_dtype = pytest.mark.parametrize("dtype", list(TOLERANCE), ids=["float32", "bfloat16", "float16"])

# Routers as the architectures have them, by the fields of the struct
ROUTERS: dict[str, dict[str, Any]] = {
    "qwen2_moe": {"top_k": 4},
    "qwen3_moe": {"top_k": 4, "normalized": 1},
    "gpt_oss": {"top_k": 3, "normalized": 1, "router_bias": True},
    "deepseek_v2": {"top_k": 3, "groups": 4, "top_groups": 2, "best_of_group": 1, "scale": 16.0},
    "deepseek_v3": {
        "top_k": 4, "scoring": "sigmoid", "selection_bias": True, "groups": 4, "top_groups": 2, "best_of_group": 2,
        "normalized": 1, "least_sum": 1e-20, "scale": 2.5,
    },
    "lfm2_moe": {"top_k": 2, "scoring": "sigmoid", "normalized": 1, "least_sum": 1e-6, "router_is_float32": 1},
    "llama4": {"top_k": 1, "scoring": "sigmoid", "scales_inputs": 1},
    "gemma4": {"top_k": 2, "normalized": 1, "expert_scale": True, "routed": True},
    "all": {"top_k": EXPERTS},
    "one": {"top_k": 1},
}  # fmt: skip
ACTIVATIONS = ["silu", "limited_silu", "gelu_tanh", "clamped_swiglu", "relu_squared"]


class Mixture:
    """Random weights and a struct that points to them."""

    def __init__(
        self, dtype: torch.dtype, activation: str = "silu", biased: bool = False, interleaved: bool = False,
        hidden: int = HIDDEN, width: int = WIDTH, packed: Callable[[int, int], Tensor] | None = None, **router: Any,
    ) -> None:  # fmt: skip
        self.seed, self.dtype, self.hidden, self.width = 0, dtype, hidden, width
        self.activation, self.interleaved, self.settings = activation, interleaved, router
        experts = router.get("experts", EXPERTS)
        gated = activation != "relu_squared"
        sizes = {"gate": (2 * width if interleaved else width, hidden), "up": (width, hidden), "down": (hidden, width)}
        self.names = [name for name in sizes if (name != "gate" or gated) and (name != "up" or not interleaved)]
        self.weights = {
            name: packed(experts * outs, inputs) if packed else self.normal(experts * outs, inputs) / inputs**0.5
            for name, (outs, inputs) in sizes.items()
            if name in self.names
        }
        self.biases = {name: self.normal(experts, sizes[name][0]) for name in self.names if biased}
        self.router = self.normal(experts, hidden) / hidden**0.5 * 3
        self.vectors = {
            name: self.normal(experts).float()
            for name in ("router_bias", "selection_bias", "expert_scale")
            if router.get(name)
        }
        if router.get("router_is_float32"):
            self.router = self.router.float()
        self.norm = (1 + self.normal(hidden) / 4).to(dtype)

    def normal(self, *shape: int) -> Tensor:
        self.seed += 1
        return torch.from_numpy(np.random.default_rng(self.seed).normal(size=shape)).to(self.dtype)

    def experts_of(self, name: str) -> Tensor:
        """[experts, outs, in], in float64."""
        weight = self.weights[name]
        weight = weight.dequantize() if isinstance(weight, PackedWeight) else weight
        return weight.unflatten(0, (len(self.router), -1)).double()

    def __call__(
        self, x: Tensor, routed: Tensor | None = None, normed: bool = False, add: Tensor | None = None,
        shared: Tensor | None = None, shared_gate: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """What the kernel computes, of rows [rows, hidden]."""
        experts, out = len(self.router), torch.full_like(x, float("nan")) if add is None else add.clone()
        settings = {k: v for k, v in self.settings.items() if not isinstance(v, bool | str)}
        struct = structs.Experts(**{
            "x": x.data_ptr(), "out": out.data_ptr(), "router": self.router.data_ptr(), "rows": len(x),
            "hidden": self.hidden, "width": self.width, "routed_inputs": self.hidden, "experts": experts, "groups": 1,
            "scoring": structs.SCORINGS[self.settings.get("scoring", "softmax")], "scale": 1.0,
            "limit": 1.5 * (self.activation in ("limited_silu", "clamped_swiglu")),
            "activation": structs.ACTIVATION_NUMBERS[self.activation.removeprefix("limited_")],
            "interleaved": self.interleaved, "alpha": 1.702,
            "epsilon": 1e-5, "add": None if add is None else out.data_ptr(),
            "shared": None if shared is None else shared.data_ptr(),
            "shared_gate": None if shared_gate is None else shared_gate.data_ptr(),
            "routed": None if routed is None else routed.data_ptr(), "norm": self.norm.data_ptr() if normed else None,
            **{name: values.data_ptr() for name, values in self.vectors.items()}, **settings,
        })  # fmt: skip
        for name in self.names:
            number, weight, outs = (
                ("gate", "up", "down").index(name),
                self.weights[name],
                len(self.weights[name]) // experts,
            )
            struct.weight[number], struct.format[number] = kernel_arguments(weight)
            struct.weight_step[number] = (
                kernel_arguments(select_outputs(weight, slice(outs, 2 * outs)))[0] - struct.weight[number]
            )
            if self.biases:
                struct.bias[number] = self.biases[name].data_ptr()
                struct.bias_step[number] = self.biases[name].stride(0) * self.biases[name].element_size()
        kernel = native.kernel("experts", self.dtype, torch.device("cpu"))
        if kernel is None:
            pytest.skip(f"no compiled kernels for {self.dtype}")
        assert kernel(ctypes.byref(struct)) == 0
        return out

    def logits(self, x: Tensor) -> Tensor:
        logits = x.double() @ self.router.double().T
        return logits + self.vectors["router_bias"].double() if "router_bias" in self.vectors else logits

    def route(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Experts and weights [rows, top_k], by the formulas of Transformers."""
        s = self.settings
        scores = logits.softmax(-1) if s.get("scoring", "softmax") == "softmax" else logits.sigmoid()
        choice = scores + (self.vectors["selection_bias"].double() if "selection_bias" in self.vectors else 0)
        if (groups := s.get("groups", 1)) > 1:
            each = choice.unflatten(-1, (groups, -1))
            best = each.topk(s["best_of_group"], -1).values.sum(-1).topk(s["top_groups"], -1).indices
            kept = torch.zeros_like(each[..., 0]).scatter_(-1, best, 1).bool()
            choice = each.masked_fill(~kept[..., None], -torch.inf).flatten(-2)
        chosen = choice.topk(s["top_k"], -1).indices
        weights = scores.gather(-1, chosen)
        if s.get("normalized"):
            weights = weights / (weights.sum(-1, keepdim=True) + s.get("least_sum", 0))
        weights = weights * s.get("scale", 1.0)
        return chosen, weights * self.vectors["expert_scale"].double()[
            chosen
        ] if "expert_scale" in self.vectors else weights

    def expert(self, number: int, x: Tensor) -> Tensor:
        """One expert's output of a row, in float64."""
        given = {
            name: self.experts_of(name)[number] @ x + (self.biases[name][number].double() if self.biases else 0)
            for name in self.names
            if name != "down"
        }
        gate, up = given.get("gate"), given.get("up")
        if self.interleaved:
            gate, up = given["gate"][::2], given["gate"][1::2]
        assert up is not None
        if self.activation == "relu_squared":
            made = up.relu() ** 2
        elif self.activation == "clamped_swiglu":
            assert gate is not None
            gate = gate.clamp(max=1.5)
            made = gate * torch.sigmoid(1.702 * gate) * (up.clamp(-1.5, 1.5) + 1)
        else:
            assert gate is not None
            silu, gelu = torch.nn.functional.silu, torch.nn.functional.gelu
            made = gelu(gate, approximate="tanh") if self.activation == "gelu_tanh" else silu(gate)
            is_limited = self.activation == "limited_silu"
            made = made.clamp(max=1.5) * up.clamp(-1.5, 1.5) if is_limited else made * up
        out = self.experts_of("down")[number] @ made
        return out + self.biases["down"][number].double() if self.biases else out

    def reference(self, x: Tensor, routed: Tensor | None = None) -> Tensor:
        """The definition, in float64."""
        rows = []
        for row, logits in zip(x.double(), self.logits(x if routed is None else routed), strict=True):
            chosen, weights = self.route(logits)
            if self.settings.get("scales_inputs"):
                rows.append(sum(self.expert(int(e), row * w) for e, w in zip(chosen, weights, strict=True)))
            else:
                rows.append(sum(w * self.expert(int(e), row) for e, w in zip(chosen, weights, strict=True)))
        return torch.stack(rows)

    def clear_rows(self, count: int) -> Tensor:
        """Rows whose choice of experts no rounding of logits can change."""
        x = torch.cat([self.normal(count, self.hidden) for _ in range(40)])
        if self.settings["top_k"] == len(self.router):
            return x[:count]
        noise = torch.from_numpy(np.random.default_rng(9).normal(size=(20, 1, len(self.router)))) * 2e-3
        chosen = self.route(self.logits(x) + noise)[0].sort(-1).values
        return x[(chosen == chosen[:1]).all(-1).all(0)][:count].contiguous()


def is_near(out: Tensor, wanted: Tensor, dtype: torch.dtype) -> bool:
    return bool(((out.double() - wanted).abs() <= TOLERANCE[dtype] * (wanted.abs() + wanted.std())).all())


def check_rows(mixture: Mixture, x: Tensor, counts: tuple[int, ...] = (2, 3, 7, 40), **given: Any) -> Tensor:
    """Each row alone, among others and in another order has the same bits; returns all rows."""
    routed = given.get("routed")

    def run(rows: Any) -> Tensor:
        return mixture(
            x[rows].contiguous(), **given | ({} if routed is None else {"routed": routed[rows].contiguous()})
        )

    whole = run(slice(None))
    alone = torch.cat([run(slice(r, r + 1)) for r in range(len(x))])
    assert torch.equal(alone, whole)
    for count in counts:
        start = (count * 5) % (len(x) - count + 1)
        assert torch.equal(run(slice(start, start + count)), whole[start : start + count])
    order = torch.from_numpy(np.random.default_rng(3).permutation(len(x)))
    assert torch.equal(run(order), whole[order])
    return whole


@each_dtype
@pytest.mark.parametrize("router", list(ROUTERS))
def test_every_router_chooses_and_weighs_experts_as_its_architecture_does(router, dtype):
    mixture = Mixture(dtype, **ROUTERS[router])
    x = mixture.clear_rows(40)
    assert len(x) == 40
    routed = x.roll(1, 0).contiguous() if ROUTERS[router].get("routed") else None
    assert is_near(check_rows(mixture, x, routed=routed), mixture.reference(x, routed), dtype)


@each_dtype
@pytest.mark.parametrize("biased", [False, True], ids=["plain", "biased"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_every_activation_is_that_of_its_architecture(activation, biased, dtype):
    mixture = Mixture(dtype, activation, biased, **ROUTERS["qwen3_moe"])
    x = mixture.clear_rows(40)
    assert is_near(check_rows(mixture, x), mixture.reference(x), dtype)


@each_dtype
@pytest.mark.parametrize("activation", ["silu", "clamped_swiglu"])
def test_gates_and_values_may_take_turns_in_one_matrix(activation, dtype):
    mixture = Mixture(dtype, activation, biased=True, interleaved=True, **ROUTERS["gpt_oss"])
    x = mixture.clear_rows(40)
    assert is_near(check_rows(mixture, x), mixture.reference(x), dtype)


@each_dtype
def test_a_norm_comes_before_and_a_sum_after(dtype):
    mixture = Mixture(dtype, **ROUTERS["qwen3_moe"])
    x = mixture.normal(40, HIDDEN)
    normed = torch.empty_like(x)
    struct = structs.Norm(
        x=x.data_ptr(), weight=mixture.norm.data_ptr(), out=normed.data_ptr(), rows=40, size=HIDDEN, epsilon=1e-5
    )
    kernel = native.kernel("norm", dtype, torch.device("cpu"))
    assert kernel is not None
    assert kernel(ctypes.byref(struct)) == 0
    plain = mixture(normed)
    assert torch.equal(mixture(x, normed=True), plain)
    add = mixture.normal(40, HIDDEN)
    assert torch.equal(mixture(normed, add=add), plain + add)
    assert torch.equal(mixture(x, normed=True, add=x), plain + x)


@each_dtype
@pytest.mark.parametrize("gated", [True, False], ids=["gated", "not gated"])
def test_a_shared_expert_is_added_with_its_own_weight(gated, dtype):
    mixture = Mixture(dtype, **ROUTERS["qwen2_moe"])
    x = mixture.clear_rows(20)
    shared, logits = mixture.normal(20, HIDDEN), mixture.normal(20)
    weight = logits.double().sigmoid()[:, None] if gated else 1.0
    out = mixture(x, shared=shared, shared_gate=logits if gated else None)
    assert is_near(out, mixture.reference(x) + weight * shared.double(), dtype)


@each_dtype
def test_one_expert_may_get_all_rows_and_another_none(dtype):
    mixture = Mixture(dtype, **ROUTERS["qwen3_moe"])
    x = mixture.normal(70, HIDDEN).abs()
    mixture.router[:4] = 0.02 + mixture.router[:4].abs() / 50
    mixture.router[4:] = -0.1
    assert bool((mixture.route(mixture.logits(x))[0] < 4).all())
    assert is_near(check_rows(mixture, x, counts=(2, 13, 33, 65)), mixture.reference(x), dtype)


def test_of_equal_logits_the_first_experts_are_chosen():
    mixture = Mixture(torch.float32, **ROUTERS["qwen3_moe"])
    x = mixture.normal(3, HIDDEN)
    mixture.router[:] = mixture.router[:1]
    first = torch.stack([torch.stack([mixture.expert(e, row) for e in range(4)]).mean(0) for row in x.double()])
    assert is_near(mixture(x), first, torch.float32)


@each_dtype
def test_what_is_not_a_number_stays_so_and_in_its_row(dtype):
    mixture = Mixture(dtype, **ROUTERS["deepseek_v3"])
    x = mixture.normal(9, HIDDEN)
    whole = mixture(x)
    x[2, 7], x[5, 0] = float("nan"), float("inf")
    out = mixture(x)
    assert not out[[2, 5]].isfinite().any()
    others = [0, 1, 3, 4, 6, 7, 8]
    assert torch.equal(out[others], whole[others])


def packed_mixture(format: Q, arithmetic: Any, **settings: Any) -> Mixture:
    def packed(outs: int, inputs: int) -> PackedWeight:
        return PackedWeight.from_blocks(random_blocks(format, outs, inputs), format, arithmetic)

    return Mixture(torch.bfloat16, hidden=512, width=256, packed=packed, experts=6, **settings)


def chain(mixture: Mixture, x: Tensor) -> Tensor:
    """The products of each row's only expert, one linear layer after the other."""
    chosen = mixture.route(mixture.logits(x))[0][:, 0]
    out = torch.empty_like(x)
    kernel = native.kernel("linear", torch.bfloat16, torch.device("cpu"))
    assert kernel is not None
    for row, expert in enumerate(chosen.tolist()):
        own = {
            name: select_outputs(weight, slice(expert * (outs := len(weight) // 6), (expert + 1) * outs))
            for name, weight in mixture.weights.items()
        }
        gate, up = linear(x[row : row + 1], [own["gate"], own["up"]], [None, None])
        struct = structs.Linear(x=up.data_ptr(), gate=gate.data_ptr(), rows=1, inputs=mixture.width, count=1)
        struct.weight[0], struct.format[0] = kernel_arguments(own["down"])
        struct.out[0], struct.outs[0] = out[row].data_ptr(), mixture.hidden
        assert kernel(ctypes.byref(struct)) == 0
    return out


def check_packed(format: Q, arithmetic: str, rows: int) -> None:
    mixture = packed_mixture(format, arithmetic, top_k=1, normalized=1)
    x = mixture.clear_rows(rows)
    assert same_bits(check_rows(mixture, x, counts=(2, 9, rows - 3)), chain(mixture, x))


@pytest.mark.parametrize("arithmetic", ["int8", "bf16"])
@pytest.mark.parametrize("format", PACKED_FORMATS, ids=lambda format: format.name)
def test_packed_experts_give_the_products_of_linear_layers(format, arithmetic):
    check_packed(format, arithmetic, 40)


@pytest.mark.parametrize("arithmetic", ["int8", "bf16"])
def test_packed_experts_are_near_the_numbers_that_they_stand_for(arithmetic):
    mixture = packed_mixture(Q.Q4_K, arithmetic, **ROUTERS["qwen3_moe"])
    x = mixture.clear_rows(20)
    out, wanted = mixture(x), mixture.reference(x)
    assert (out.double() - wanted).norm() < 0.03 * wanted.norm()


def test_arithmetics_of_the_two_stages_may_differ():
    mixture = packed_mixture(Q.Q4_1, "int8", top_k=1, normalized=1)
    mixture.weights["down"] = PackedWeight.from_blocks(random_blocks(Q.Q5_0, 6 * 512, 256), Q.Q5_0, "bf16")
    x = mixture.clear_rows(10)
    assert same_bits(check_rows(mixture, x, counts=(3,)), chain(mixture, x))


@pytest.mark.slow
def test_kernels_of_other_processors_give_the_same_bits(instruction_set, monkeypatch):
    """Also the router's choices and weights: of integers all bits are the same."""
    mixtures = [
        packed_mixture(format, "int8", **ROUTERS["deepseek_v3"] | {"groups": 2, "top_groups": 1})
        for format in (Q.Q4_1, Q.Q6_K)
    ]
    x = mixtures[0].normal(60, 512)
    found = [check_rows(mixture, x) for mixture in mixtures]
    for dtype in TOLERANCE:
        small = Mixture(dtype, **ROUTERS["qwen3_moe"])
        rows = small.clear_rows(20)
        assert is_near(check_rows(small, rows, counts=(3, 7)), small.reference(rows), dtype), instruction_set
    check_packed(Q.Q4_0, "bf16", 20)
    monkeypatch.delenv("SALTUS_ISA")
    native.load_kernels.cache_clear()
    for mixture, bits in zip(mixtures, found, strict=True):
        assert same_bits(mixture(x), bits), instruction_set
