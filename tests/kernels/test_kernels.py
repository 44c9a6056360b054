"""The kernels: right, and so that a row's bits depend on nothing but the row."""

import ctypes
import io
import logging
import multiprocessing
import multiprocessing.connection
import os
import shlex
import shutil
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from architectures import RECURRENT, random_tree
from forked_python import FOR_COMMANDS, forked_python
from saltus.core.canvas import continuation
from saltus.core.forward import ForwardInputs
from saltus.core.sampling import greedy_tokens
from saltus.kernels import native
from saltus.kernels.batch_invariant_ops import BatchInvariantMode, batch_invariant_elementwise, linear
from saltus.kernels.native import compiling, processor, structs
from saltus.models.attention_span import Chunks
from saltus.models.causal import CausalNetwork
from saltus.models.cpu import attention
from saltus.models.cpu.attention import AttentionCall, SequenceRows
from saltus.models.cpu.kv_cache import KVCache
from saltus.storage import cache_files
from saltus.storage.cache_files import is_own_file, make_private_folder, new_file_with_digest
from tiny_models import tiny_llama

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
STEPS = {torch.float32: 2.0**-23, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}  # between numbers near one
SIZES = [(1, 1), (7, 3), (31, 130), (32, 8), (33, 5), (48, 20), (576, 49), (1536, 64)]  # inputs, outputs

each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "bfloat16", "float16"])
compiled = pytest.mark.skipif(native.load_kernels() is None, reason="no compiled kernels")


@pytest.fixture
def run(dtype):
    """Call a compiled kernel by name; some compilers have no float16."""

    def call(name: str, struct) -> None:
        kernel = native.kernel(name, dtype, torch.device("cpu"))
        if kernel is None:
            pytest.skip(f"no compiled kernels for {dtype}")
        assert kernel(ctypes.byref(struct)) == 0

    return call


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(size=shape)).float()


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Bit for bit, NaN included."""
    return one.dtype == other.dtype and bool(((one == other) | (one.isnan() & other.isnan())).all())


def layer(inputs: int, outputs: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    return (normal(outputs, inputs, seed=1) / inputs**0.5).to(dtype), normal(outputs, seed=2).to(dtype)


# Linear layers


@each_dtype
@pytest.mark.parametrize(("inputs", "outputs"), SIZES)
def test_a_row_of_a_linear_layer_rounds_alike_at_every_width_and_place(dtype, inputs, outputs):
    x = normal(150, inputs).to(dtype)
    weight, bias = layer(inputs, outputs, dtype)
    whole = linear(x, [weight], [bias])[0]
    for width in (*range(1, 66), 80, 81, 128, 149):
        start = (width * 7) % (151 - width)
        assert same(linear(x[start : start + width], [weight], [bias])[0], whole[start : start + width])
    shuffled = torch.from_numpy(np.random.default_rng(3).permutation(150))
    assert same(linear(x[shuffled], [weight], [bias])[0], whole[shuffled])


@each_dtype
def test_a_row_of_a_linear_layer_does_not_see_what_other_rows_hold(dtype):
    x = normal(24, 100).to(dtype)
    weight, bias = layer(100, 30, dtype)
    whole = linear(x, [weight], [bias])[0]
    for other in (0.0, 3e4, float("inf"), float("nan")):
        for kept in (0, 5, 6, 23):
            changed = torch.full_like(x, other)
            changed[kept] = x[kept]
            assert same(linear(changed, [weight], [bias])[0][kept], whole[kept])


@each_dtype
@pytest.mark.parametrize(("inputs", "outputs"), SIZES)
def test_a_linear_layer_is_right(dtype, inputs, outputs):
    x = normal(9, inputs).to(dtype)
    weight, bias = layer(inputs, outputs, dtype)
    exact = F.linear(x.double(), weight.double(), bias.double())
    size = F.linear(x.double().abs(), weight.double().abs(), bias.double().abs())
    error = (linear(x, [weight], [bias])[0].double() - exact).abs()
    assert (error <= exact.abs() * STEPS[dtype] / 2 + size * (inputs**0.5 + 2) * 2.0**-23 + 2.0**-24).all()


@each_dtype
def test_several_linear_layers_at_once_give_what_each_gives(dtype):
    x = normal(3, 5, 40).to(dtype)
    weights, biases = zip(*(layer(40, outputs, dtype) for outputs in (20, 7, 1)), strict=True)
    together = linear(x, weights, [biases[0], None, biases[2]])
    for weight, bias, out in zip(weights, (biases[0], None, biases[2]), together, strict=True):
        assert out.shape == (3, 5, len(weight))
        assert same(out, linear(x, [weight], [bias])[0])


@each_dtype
def test_what_is_not_a_number_stays_so_in_a_linear_layer(dtype):
    x = normal(4, 50).to(dtype)
    x[1, 7], x[2, 9] = float("nan"), float("inf")
    weight, bias = layer(50, 20, dtype)
    ours, torchs = linear(x, [weight], [bias])[0], F.linear(x, weight, bias)
    assert torch.equal(ours.isnan(), torchs.isnan())
    assert torch.equal(ours.isinf(), torchs.isinf())
    assert ours[1].isnan().all()
    assert not ours[[0, 3]].isnan().any()


@each_dtype
def test_sums_beyond_a_format_become_infinite(dtype):
    largest = torch.finfo(dtype).max
    weight = torch.tensor([[1.0, 1.0], [-1.0, -1.0], [1.0, -1.0]]).to(dtype)
    out = linear(torch.tensor([[largest, largest]], dtype=dtype), [weight], [None])[0]
    assert out.tolist() == [[float("inf"), float("-inf"), 0.0]]


@each_dtype
def test_a_norm_by_itself_is_that_of_transformers_and_of_the_row_alone(run, dtype):
    x, norm = normal(9, 72).to(dtype), LlamaRMSNorm(72, 1e-5).to(dtype)
    norm.weight.data = (1 + normal(72, seed=7) / 8).to(dtype)

    def normed(rows: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(rows)
        struct = structs.Norm(x=rows.data_ptr(), weight=norm.weight.data_ptr(), out=out.data_ptr())
        struct.rows, struct.size, struct.epsilon = *rows.shape, 1e-5
        run("norm", struct)
        return out

    with torch.inference_mode():
        whole, wanted = normed(x), norm(x)
    assert (whole - wanted).float().abs().max() <= 2 * STEPS[dtype] * wanted.float().abs().max()
    assert same(torch.cat([normed(x[i : i + 1].clone()) for i in range(9)]), whole)


def product(run, x, weight, norm=None, gate=None, add=None) -> torch.Tensor:
    """One call of the kernel as the native decoders make it."""
    out = torch.empty(len(x), len(weight), dtype=x.dtype)
    struct = structs.Linear(x=x.data_ptr(), rows=len(x), inputs=x.shape[1], count=1, epsilon=1e-5)
    struct.weight[0], struct.out[0], struct.outs[0] = weight.data_ptr(), out.data_ptr(), len(weight)
    for name, given in (("norm", norm), ("gate", gate), ("add", add)):
        setattr(struct, name, None if given is None else given.data_ptr())
    run("linear", struct)
    return out


@each_dtype
@pytest.mark.parametrize("inputs", [20, 48, 576])
def test_norms_gates_and_sums_around_a_product_are_those_of_transformers(run, dtype, inputs):
    x, gate, add = (normal(33, n, seed=n).to(dtype) for n in (inputs, inputs, 30))
    weight, norm = layer(inputs, 30, dtype)[0], LlamaRMSNorm(inputs, 1e-5).to(dtype)
    norm.weight.data = (1 + normal(inputs, seed=7) / 8).to(dtype)
    with torch.inference_mode():
        expected = [
            linear(norm(x), [weight], [None])[0],
            linear(F.silu(gate) * x, [weight], [None])[0],
            linear(x, [weight], [None])[0] + add,
        ]
    given = [{"norm": norm.weight}, {"gate": gate}, {"add": add}]
    for settings, wanted in zip(given, expected, strict=True):
        whole = product(run, x, weight, **settings)
        assert (whole - wanted).float().norm() < 0.3 * STEPS[dtype] * wanted.float().norm() + 1e-6 * wanted.numel()
        for width in (1, 2, 3, 5, 8, 13):
            for start in (0, 33 - width):
                rows = slice(start, start + width)
                part = {k: v if k == "norm" else v[rows].contiguous() for k, v in settings.items()}
                assert same(product(run, x[rows].contiguous(), weight, **part), whole[rows])


@each_dtype
@pytest.mark.parametrize("dim", [8, 20, 64, 80, 96, 128, 256])
def test_rotations_are_those_of_transformers_row_by_row(run, dtype, dim):
    x = normal(9, 3, dim).to(dtype)
    angles = torch.cat([normal(9, dim // 2, seed=4)] * 2, -1)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    expected = apply_rotary_pos_emb(x[None].transpose(1, 2), x[None].transpose(1, 2), cos[None], sin[None])[0]

    def rotate(rows: slice) -> torch.Tensor:
        turned, c, s = (part[rows].clone() for part in (x, cos, sin))
        struct = structs.Rotary(
            x=turned.data_ptr(), cos=c.data_ptr(), sin=s.data_ptr(), rows=len(turned), heads=3, dim=dim
        )
        run("rotate", struct)
        return turned

    whole = rotate(slice(0, 9))
    torch.testing.assert_close(whole, expected[0].transpose(0, 1), rtol=STEPS[dtype], atol=STEPS[dtype])
    for row in range(9):
        assert same(rotate(slice(row, row + 1))[0], whole[row])


# Curves


@each_dtype
@pytest.mark.parametrize("size", [1, 20, 72, 4864])
@pytest.mark.parametrize("name", ["silu", "gelu", "gelu_tanh", "sigmoid", "tanh", "softplus", "rsqrt", "pow"])
def test_a_curve_rounds_alike_wherever_its_argument_stands(dtype, size, name):
    curves = {
        "gelu": F.gelu,
        "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
        "pow": lambda x: torch.pow(x, 1.5),
        "rsqrt": lambda x: x.rsqrt(),
        "sigmoid": lambda x: x.sigmoid(),
        "silu": F.silu,
        "softplus": F.softplus,
        "tanh": torch.tanh,
    }
    curve, x = curves[name], normal(64, size).abs().to(dtype) * 2
    with BatchInvariantMode():
        whole = curve(x)
        for start, width in ((0, 1), (63, 1), (7, 3), (40, 5), (17, 33)):
            assert same(curve(x[start : start + width]), whole[start : start + width])
        assert same(curve(x.t()).t(), whole)
    torch.testing.assert_close(whole, curve(x), rtol=2 * STEPS[dtype], atol=2.0**-24)


def test_arguments_by_name_in_place_and_without_numbers_are_those_of_torch():
    x, y, weight, out = normal(3, 20), normal(3, 20), normal(8, 20), torch.empty(3, 20)
    calls = {
        "linear": lambda: F.linear(input=x, weight=weight),
        "linear without outputs": lambda: F.linear(x, weight[:0]),
        "linear without inputs": lambda: F.linear(x[:, :0], weight[:, :0]),
        "matmul": lambda: torch.matmul(x, other=weight.T),
        "bmm": lambda: torch.bmm(x[None], mat2=weight.T[None]),
        "mul": lambda: torch.mul(x, other=y),
        "sigmoid": lambda: torch.sigmoid(input=x),
        "pow": lambda: torch.pow(x.abs(), exponent=y),
        "exp": lambda: torch.exp(x, out=out),
        "silu": lambda: F.silu(copy := x.clone(), inplace=True) is copy and copy,
        "elu": lambda: F.elu(copy := x.clone(), 1.0, True) is copy and copy,
    }
    for name, call in calls.items():
        with BatchInvariantMode():
            found = call()
        torch.testing.assert_close(found, call(), msg=name)


def test_torch_alone_rounds_a_curve_by_its_place():
    """Why `evenly` is needed: the last elements of a tensor go through other code."""
    x = normal(64, 20)
    assert not all(same(F.silu(x[row : row + 1]), F.silu(x)[row : row + 1]) for row in range(64))
    assert all(
        same(
            batch_invariant_elementwise(F.silu, x[row : row + 1]), batch_invariant_elementwise(F.silu, x)[row : row + 1]
        )
        for row in range(64)
    )


def test_a_complex_number_is_multiplied_alike_at_every_place():
    """As rotary embeddings of Llama 4 and DeepSeek V2 are: torch rounds those of a vector's end otherwise."""
    one, other = (torch.view_as_complex(normal(39, 2, seed=seed)) for seed in (1, 2))
    with BatchInvariantMode():
        alone = torch.cat([one[i : i + 1] * other[i : i + 1] for i in range(39)])
        for length in range(1, 40):
            assert torch.equal(one[:length] * other[:length], alone[:length])
    torch.testing.assert_close(alone, one * other)


# Attention


class Rows:
    """Random queries, keys and values: of a text, and of a tree's nodes behind it."""

    def __init__(
        self, dtype, past=37, nodes=24, kv_heads=2, group=3, dim=16, value_dim=None, window=None, softcap=None,
        sinks=None,
    ):  # fmt: skip
        self.text = normal(2, kv_heads, past, dim, seed=1).to(dtype)
        self.q = normal(kv_heads * group, nodes, dim, seed=2).to(dtype)
        self.k, self.v = normal(2, kv_heads, nodes, dim, seed=3).to(dtype)
        self.text_v, self.v = self.text[1][..., :value_dim], self.v[..., :value_dim]
        self.tree = ForwardInputs(continuation(range(past), 99), *random_tree(nodes))
        sinks = None if sinks is None else normal(kv_heads * group, seed=4) + sinks
        self.past, self.settings = past, {"sliding_window": window, "softcap": softcap, "s_aux": sinks}

    def ancestors(self, node: int) -> list[int]:
        """The node itself comes last."""
        found = []
        while node >= 0:
            found.insert(0, node)
            node = self.tree.parents[node]
        return found

    def attend(self, before: list[int], rows: list[int], batch_invariant: bool = True) -> torch.Tensor:
        """The outputs of nodes `rows`, where nodes `before` have become text: [rows, heads, dim]."""
        kv_cache, past = KVCache(), self.past + len(before)
        keys, values = torch.cat([self.text[0], self.k[:, before]], 1), torch.cat([self.text_v, self.v[:, before]], 1)
        if past:
            kv_cache.reserve(1, past, keys, values)
            kv_cache.keys[0, :, :past], kv_cache.values[0, :, :past] = keys, values
        visible = np.array([[j in self.ancestors(i) for j in rows] for i in rows], dtype=np.uint8)
        positions = self.past + np.array([self.tree.depths[node] for node in rows])
        part, module = SequenceRows(kv_cache, past, positions, visible), SimpleNamespace(layer_idx=0)
        with attention.attention_context(AttentionCall([part], 1, batch_invariant)):
            q, k, v = (x[None, :, rows] for x in (self.q, self.k, self.v))
            return attention.attend(module, q, k, v, **self.settings)[0][0]

    def exact(self, node: int) -> torch.Tensor:
        """By the book, in float64: [heads, dim]."""
        path, group = self.ancestors(node), len(self.q) // len(self.k)
        keys, values = (
            torch.cat([text, new[:, path]], 1).double().repeat_interleave(group, 0)
            for text, new in ((self.text[0], self.k), (self.text_v, self.v))
        )
        last = self.past + len(path) - 1
        if isinstance(span := self.settings["sliding_window"], Chunks):
            span = last % span.size + 1
        if span is not None:
            keys, values = keys[:, -span:], values[:, -span:]
        scores = (keys @ self.q[:, node, :, None].double())[..., 0] * keys.shape[-1] ** -0.5
        if softcap := self.settings["softcap"]:
            scores = softcap * (scores / softcap).tanh()
        if (sinks := self.settings["s_aux"]) is not None:
            scores = torch.cat([scores, sinks[:, None].double()], 1)
        return (scores.softmax(-1)[:, None, : keys.shape[1]] @ values)[:, 0]


SHAPES = [
    {"dim": 8}, {"dim": 20}, {"dim": 64}, {"dim": 80}, {"dim": 96}, {"dim": 128}, {"dim": 256},
    {"dim": 48, "value_dim": 20}, {"kv_heads": 1, "group": 8}, {"kv_heads": 5, "group": 1}, {"kv_heads": 3, "group": 7},
    {"window": 12}, {"window": 3}, {"window": 40}, {"softcap": 5.0}, {"softcap": 5.0, "window": 9}, {"past": 0},
    {"past": 1}, {"past": 15}, {"past": 300, "nodes": 70}, {"sinks": 0.0}, {"sinks": 9.0, "window": 12, "nodes": 70},
    {"sinks": -200.0}, {"sinks": 1.0, "softcap": 5.0, "kv_heads": 1, "group": 7}, {"window": Chunks(20)},
    {"window": Chunks(3), "past": 7, "sinks": 0.0}, {"window": Chunks(1)}, {"window": Chunks(38), "nodes": 70},
]  # fmt: skip
each_shape = pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "-".join(f"{k}{v}" for k, v in shape.items()))


@each_dtype
@each_shape
def test_a_row_of_attention_rounds_alike_in_a_tree_and_as_the_end_of_a_text(dtype, shape):
    rows = Rows(dtype, **shape)
    nodes = list(range(len(rows.tree.tokens)))
    whole = rows.attend([], nodes)
    for node in nodes[:: max(1, len(nodes) // 12)]:
        *before, last = rows.ancestors(node)
        assert same(rows.attend(before, [last])[0], whole[node])
        assert same(rows.attend([], [*before, last])[-1], whole[node])
    for width in (1, 2, 7, 8, 9, 16, 17):
        assert same(rows.attend([], nodes[:width]), whole[:width])


@each_dtype
@each_shape
def test_attention_is_right(dtype, shape):
    rows = Rows(dtype, **shape)
    nodes = list(range(len(rows.tree.tokens)))
    ours, exact = rows.attend([], nodes).double(), torch.stack([rows.exact(node) for node in nodes])
    assert ((ours - exact).abs() <= exact.abs() * STEPS[dtype] / 2 + 4e-6).all()


@each_dtype
@pytest.mark.parametrize("other", [0.0, 3e4, float("inf"), float("nan")])
def test_a_row_of_attention_does_not_see_what_other_branches_hold(dtype, other):
    rows = Rows(dtype)
    nodes, node = list(range(24)), 23
    before = rows.attend([], nodes)[node]
    mine = rows.ancestors(node)
    for one in set(nodes) - set(mine):
        rows.k[:, one] = rows.v[:, one] = rows.q[:, one] = other
    assert same(rows.attend([], nodes)[node], before)
    assert same(rows.attend(mine[:-1], mine[-1:])[0], before)


@each_dtype
def test_what_is_not_a_number_in_a_text_is_not_hidden(dtype):
    for kind in (0, 1):  # keys, values
        rows = Rows(dtype)
        rows.text[kind, :, 5] = float("nan")
        assert rows.attend([], [0, 1]).isnan().all()


@each_dtype
@pytest.mark.parametrize("other", [float("inf"), float("nan")])
def test_a_value_without_weight_is_stepped_over_in_the_text_and_among_new_rows(dtype, other):
    """A score may be so low that its weight is an exact zero."""
    rows = Rows(dtype)
    last = max(range(len(rows.tree.tokens)), key=lambda node: rows.tree.depths[node])
    first, *between = rows.ancestors(last)[:-1]
    rows.q[:, last] = rows.q[:, last].abs()
    rows.k[:, first], rows.v[:, first, 0] = -300, other
    alone = rows.attend([first, *between], [last])[0]
    assert alone.isfinite().all()
    assert same(rows.attend([], [first, *between, last])[-1], alone)


@each_dtype
def test_a_sink_that_is_not_a_number_is_not_hidden(dtype):
    rows = Rows(dtype, sinks=0.0)
    rows.settings["s_aux"][3] = float("nan")
    out = rows.attend([], [0, 1])
    assert out[:, 3].isnan().all()
    assert out[:, [0, 1, 2, 4, 5]].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_without_a_kernel_the_same_sinks_and_chunks_count(dtype, monkeypatch):
    rows = Rows(dtype, window=Chunks(20), sinks=1.0)
    nodes = list(range(24))
    exact = torch.stack([rows.exact(node) for node in nodes])
    monkeypatch.setattr(native, "kernel", lambda *_: None)
    whole = rows.attend([], nodes)
    assert ((whole.double() - exact).abs() <= exact.abs() * STEPS[dtype] / 2 + 4e-6).all()
    *before, last = rows.ancestors(23)
    assert same(rows.attend(before, [last])[0], whole[23])
    free = rows.attend([], nodes, batch_invariant=False)
    assert (free.double() - exact).norm() <= exact.norm() * STEPS[dtype] * 2


@compiled
@each_dtype
def test_keys_and_values_that_are_in_the_memory_already_are_attended_to_and_stay(dtype):
    """As in layers that share those of another layer: the kernel gets no new ones."""
    rows = Rows(dtype, sinks=0.0)
    visible, heads, past = np.tri(24, dtype=np.uint8), 6, rows.past
    kv_cache = KVCache()
    kv_cache.reserve(1, past + 24, rows.k, rows.v)
    kv_cache.keys[0, :, :past], kv_cache.values[0, :, :past] = rows.text[0], rows.text_v
    part = SequenceRows(kv_cache, past, past + np.arange(24), visible)
    kernel, outs, sinks = native.kernel("attend", dtype, torch.device("cpu")), [], rows.settings["s_aux"]
    for new in (True, False):
        outs.append(torch.zeros(24, heads, 16, dtype=dtype))
        struct = part.kernel_arguments(None, rows.q, rows.k, rows.v, outs[-1], 0.25, sinks=sinks)
        struct.keys, struct.values = kv_cache.keys.data_ptr(), kv_cache.values.data_ptr()
        struct.capacity = kv_cache.keys.shape[2]
        if not new:
            before = kv_cache.keys.clone(), kv_cache.values.clone()
            struct.key = struct.value = None
        assert kernel(ctypes.byref(struct)) == 0
    assert torch.equal(*outs)
    assert torch.equal(before[0][..., : past + 24, :], kv_cache.keys[..., : past + 24, :])
    assert torch.equal(before[1][..., : past + 24, :], kv_cache.values[..., : past + 24, :])


REFUSED = {
    "values of other heads": ({"v": (3, 24, 16)}, "do not fit together"),
    "fewer keys than queries": ({"k": (2, 23, 16)}, "other keys than those of the text"),
    "an additive mask": ({"attention_mask": (1, 1, 24, 24)}, "a mask of its own"),
    "keys of another size": ({"k": (2, 24, 17)}, "do not fit together"),
    "heads that keys do not divide": ({"q": (5, 24, 16)}, "do not fit together"),
    "fewer rows than the call": ({"q": (6, 9, 16), "k": (2, 9, 16), "v": (2, 9, 16)}, "other rows"),
    "sinks of other heads": ({"s_aux": (5,)}, "5 sinks for 6 heads"),
    "no window": ({"sliding_window": 0}, "attends to 0 positions"),
    "a chunk of nothing": ({"sliding_window": Chunks(-4)}, "attends to -4 positions"),
    "an indexer": ({"indices": (1,)}, "an indexer that chooses keys"),
    "sinks by token": ({"sinks": (1,)}, "sinks that depend on the token"),
    "position biases": ({"position_bias": (1,)}, "position biases"),
}


@compiled
@pytest.mark.parametrize("what", REFUSED)
def test_a_layer_that_does_not_fit_is_refused_in_one_line(what):
    changes, said = REFUSED[what]
    rows = Rows(torch.float32)
    for name, value in changes.items():
        made = normal(*value) if isinstance(value, tuple) else value
        if name in ("q", "k", "v"):
            setattr(rows, name, made)
        else:
            rows.settings[name] = made
    part = SequenceRows(KVCache(), 0, np.arange(24), np.tri(24, dtype=np.uint8))
    with attention.attention_context(AttentionCall([part], 1)), pytest.raises(ValueError, match=said) as error:
        attention.attend(SimpleNamespace(layer_idx=0), *(x[None] for x in (rows.q, rows.k, rows.v)), **rows.settings)
    assert "\n" not in str(error.value)


def test_a_score_too_small_to_count_is_an_exact_zero():
    rows = Rows(torch.float32, past=1, nodes=1)
    rows.q[:], rows.k[:], rows.text[0] = 1.0, 50.0, -50.0
    assert torch.equal(rows.attend([], [0])[0], rows.v[:, 0].repeat_interleave(3, 0))


# The machinery


@compiled
def test_threads_do_not_change_a_bit():
    x, (weight, bias), rows = normal(40, 576), layer(576, 999, torch.float32), Rows(torch.float32, nodes=70)
    found = []
    for threads in (1, 2, 3, 1):
        native.load_kernels().saltus_threads(threads)
        found.append((linear(x, [weight], [bias])[0], rows.attend([], list(range(70)))))
    for out, attended in found:
        assert same(out, found[0][0])
        assert same(attended, found[0][1])


def work(seed: int, wrong: list, expected: torch.Tensor) -> None:
    x, (weight, bias) = normal(17, 200, seed=seed), layer(200, 300, torch.float32)
    wrong += [seed for _ in range(60) if not same(linear(x, [weight], [bias])[0], expected)]


@compiled
def test_threads_of_python_may_call_at_once():
    native.load_kernels().saltus_threads(3)
    weight, bias = layer(200, 300, torch.float32)
    wrong: list[int] = []
    threads = [
        threading.Thread(
            target=work, args=(seed, wrong, linear(normal(17, 200, seed=seed), [weight], [bias])[0].clone())
        )
        for seed in range(5)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@compiled
def test_a_thread_that_begins_during_a_call_has_as_many_threads_as_others():
    """torch gives a Python thread the number that it has when the thread first uses it, which is 1 during a call."""
    before, numbers = torch.get_num_threads(), []

    def use() -> None:
        torch.zeros(1)
        with native.kernel_threads_only():
            pass
        numbers.append(torch.get_num_threads())

    torch.set_num_threads(3)
    try:
        with native.kernel_threads_only():
            first = threading.Thread(target=use)
            first.start()
            first.join()
        for _ in range(2):
            later = threading.Thread(target=use)
            later.start()
            later.join()
        assert numbers == [3, 3, 3]
        torch.set_num_threads(1)
        use()
        assert numbers[-1] == 1, "this thread has chosen it"
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("files", "wanted"),
    [
        ({}, 8),
        ({"cpu.max": "max 100000"}, 8),
        ({"cpu.max": "250000 100000"}, 3),
        ({"slice/of/mine/cpu.max": "400000 100000", "slice/cpu.max": "150000 100000"}, 2),
        ({"cpu/cpu.cfs_quota_us": "50000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 1),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, 8),
        ({"cpu.max": "no number"}, 8),
    ],
)
def test_affinity_and_a_container_limit_the_threads_of_kernels(files, wanted, tmp_path, monkeypatch):
    for name, content in {"own": "2:cpu:/\n0::/slice/of/mine\n", **files}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    monkeypatch.setattr(processor, "CGROUPS", tmp_path)
    monkeypatch.setattr(processor, "OWN_CGROUPS", tmp_path / "own")
    monkeypatch.setattr(processor.os, "cpu_count", lambda: 64)
    monkeypatch.setattr(processor.os, "sched_getaffinity", lambda process: set(range(8)))
    processor.allowed_processors.cache_clear()
    assert processor.allowed_processors() == wanted
    processor.allowed_processors.cache_clear()


@pytest.mark.parametrize("flushes", [False, True])
def test_the_greatest_of_logits_that_are_zero_is_found(flushes):
    """Also by a thread that takes subnormal numbers for zeros."""
    logits = torch.full((2, 100), -1.0)
    logits[0, 41], logits[1] = 0.0, 0.0
    torch.set_flush_denormal(flushes)
    try:
        assert greedy_tokens(logits) == [41, 0]
    finally:
        torch.set_flush_denormal(False)


def child(x, weight, bias, answers) -> None:
    native.load_kernels().saltus_threads(2)
    answers.put(linear(x, [weight], [bias])[0].numpy())


@compiled
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.skipif(
    "asan" in os.environ.get("LD_PRELOAD", ""),
    reason="a fork copies the locks of AddressSanitizer's allocator as they are: if a thread has one, the child waits",
)
def test_a_forked_child_computes_the_same():
    """Even if another thread was in the middle of a product."""
    native.load_kernels().saltus_threads(3)
    x, (weight, bias) = normal(40, 576), layer(576, 200, torch.float32)
    mine = linear(x, [weight], [bias])[0]
    over = threading.Event()
    busy = threading.Thread(target=lambda: [linear(x, [weight], [bias]) for _ in iter(over.is_set, True)])
    busy.start()
    context = multiprocessing.get_context("fork")
    try:
        for _ in range(8):
            answers = context.SimpleQueue()
            process = context.Process(target=child, args=(x, weight, bias, answers))
            process.start()
            assert multiprocessing.connection.wait([answers._reader], 60), "the child gave no answer"
            assert same(torch.from_numpy(answers.get()), mine)
            process.join(60)
            assert process.exitcode == 0
    finally:
        process.kill()
        over.set()
        busy.join()


@pytest.mark.slow
@pytest.mark.timeout(1200)  # a hundred tests in one
def test_without_kernels_rows_round_alike_too():
    """This file's own tests and the networks', in a process that must do without."""
    chosen = "a_row_of or attention_is_right or curve or one_token or node_of_a_tree or a_prompt or counts_positions"
    # some of what Transformers' layers then do alike; what keeps a state needs kernels
    left_out = "Mistral or GPT2 or GPTNeoX or Cohere2 or Moe or Glm4 or Olmo2 or Ministral3 or Granite or Starcoder2"
    left_out += " or Gemma3n or Llama4 or " + " or ".join(name.split()[0] for name in RECURRENT)
    left_out += " or float32 and (one_token or node_of_a_tree or a_prompt)"
    files = [Path(__file__), Path(__file__).parents[1] / "models/test_network.py"]
    program = "import sys, pytest; sys.exit(pytest.main(sys.argv[1:]))"
    result = subprocess.run(
        [*forked_python(*FOR_COMMANDS), "-c", program, "-q", "-p", "no:cacheprovider", *map(str, files), "-k",
         f"({chosen}) and not ({left_out})"],
        env={**os.environ, "SALTUS_NATIVE": "0"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout[-3000:]


@pytest.fixture
def fresh_library(tmp_path, monkeypatch):
    """As if nothing had been compiled or loaded."""
    monkeypatch.setenv("SALTUS_CACHE", str(tmp_path))
    monkeypatch.setattr(processor, "COMPILER_FLAGS", [*processor.COMPILER_FLAGS, "-O0"])  # these are not for computing
    native.load_kernels.cache_clear()
    yield tmp_path
    native.load_kernels.cache_clear()


@pytest.fixture
def quick_compiler(tmp_path) -> Path:
    """A compiler that gives the library that there is already, for tests of what happens around it."""
    library, program = native.load_kernels(), tmp_path / "quick compiler"
    if library is None:
        pytest.skip("no compiled kernels")
    copy = f'case "$*" in *-shared*) exec cp {shlex.quote(library._name)} "$out";; *) : > "$out";; esac'
    program.write_text(
        f'#!/bin/sh\nprevious=\nfor each; do [ "$previous" = -o ] && out=$each; previous=$each; done\n{copy}\n'
    )
    program.chmod(0o755)
    return program


def test_no_compiler_is_a_warning_that_says_what_to_install(fresh_library, monkeypatch, caplog):
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(compiling, "find_spec", lambda name: None)
    with caplog.at_level(logging.WARNING, "saltus"):
        assert native.load_kernels() is None
        assert native.load_kernels() is None
    assert [record.getMessage() for record in caplog.records] == [
        "no compiled kernels; PyTorch computes instead, several times slower and with other rounding:"
        " no C compiler was found; install gcc or clang, or ziglang from PyPI"
    ]


def test_without_another_compiler_that_of_a_python_package_is_used(
    quick_compiler, fresh_library, monkeypatch, tmp_path, caplog
):
    quick = str(quick_compiler)
    package = tmp_path / "packages" / "ziglang"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    program = f"import os, sys\nassert sys.argv[1] == 'cc'\nos.environ['PATH'] = {os.environ['PATH']!r}\n"
    (package / "__main__.py").write_text(f"{program}os.execv({quick!r}, [{quick!r}, *sys.argv[2:]])\n")
    monkeypatch.setenv("PYTHONPATH", str(package.parent))
    monkeypatch.syspath_prepend(str(package.parent))
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CC", raising=False)
    with caplog.at_level(logging.WARNING, "saltus"):
        assert native.load_kernels() is not None
    assert len(caplog.records) == 1, "compiling"


def test_who_waits_for_another_that_compiles_says_so(monkeypatch, tmp_path, caplog):
    begun, may_end = threading.Event(), threading.Event()

    def compile_units(command, units, made):
        begun.set()
        assert may_end.wait(20)
        made.write_bytes(b"library")

    def said():
        return [record.getMessage().partition(";")[0].partition(" for this")[0] for record in caplog.records]

    monkeypatch.setattr(compiling, "_compile_units", compile_units)
    arguments = [["cc"]], {"a.c": b""}, tmp_path / "kernels.so"
    with caplog.at_level(logging.WARNING, "saltus"), ThreadPoolExecutor() as threads:
        first = threads.submit(compiling.compile_library, *arguments)
        assert begun.wait(20)
        second = threads.submit(compiling.compile_library, *arguments)
        while len(said()) < 2 and not second.done():
            time.sleep(0.01)
        may_end.set()
        assert (first.result(), second.result()) == (None, None)
        assert compiling.compile_library(*arguments) is None, "it is there"
    assert said() == ["compiling the kernels", "waiting while the kernels are compiled"]


def test_the_compiler_s_own_files_lie_beside_what_it_makes_since_tmp_may_be_full(tmp_path):
    show = ["sh", "-c", "echo error: $TMPDIR >&2; exit 1"]
    assert compiling._run_compiler(tmp_path, show) == f"error: {tmp_path}"


def test_a_compiler_that_fails_is_a_warning_of_one_line(fresh_library, monkeypatch, caplog):
    monkeypatch.setenv("CC", "false")
    with caplog.at_level(logging.WARNING, "saltus"):
        assert native.load_kernels() is None
    said, failed = (record.getMessage() for record in caplog.records)
    assert said.startswith("compiling the kernels for this processor, once")
    assert "the compiler failed" in failed
    assert not list(fresh_library.rglob("*.so"))


def test_a_compiler_older_than_the_processor_compiles_for_an_older_one(
    quick_compiler, fresh_library, monkeypatch, tmp_path, caplog
):
    compiler = tmp_path / "old compiler"
    refuses = f'case "$*" in *{processor.NATIVE}*) echo "error: no such instruction" >&2; exit 1;; esac'
    compiler.write_text(f'#!/bin/sh\n{refuses}\nexec {shlex.quote(str(quick_compiler))} "$@"\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", f"'{compiler}' -O0")
    with caplog.at_level(logging.WARNING, "saltus"):
        assert native.load_kernels() is not None
    assert len(caplog.records) == 1, "compiling"


@compiled
def test_the_sources_are_correct_for_newer_compilers_too():
    """gcc 14 refuses what older ones only warn of."""
    refused = [
        f"-Werror={name}" for name in ("incompatible-pointer-types", "int-conversion", "implicit-function-declaration")
    ]
    compiler = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))))
    units = Path(native.__file__).parent.glob("*.c")
    command = [compiler, *processor.COMPILER_FLAGS, "-fsyntax-only", *refused, *units]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_kernels_are_compiled_once(quick_compiler, fresh_library, monkeypatch):
    monkeypatch.setenv("CC", shlex.quote(str(quick_compiler)))
    assert native.load_kernels() is not None
    made = list(fresh_library.rglob("*.so"))
    assert len(made) == 1
    native.load_kernels.cache_clear()
    monkeypatch.setattr(native, "compile_library", lambda *_: pytest.fail("compiled again"))
    assert native.load_kernels() is not None


@pytest.fixture
def kept_file(tmp_path) -> Path:
    """A file that was kept for this user."""
    target = tmp_path / "code" / "kernels.so"
    assert make_private_folder(target.parent) is None
    with new_file_with_digest(target) as made:
        made.write_bytes(bytes(range(256)) * 40)
        made.chmod(0o700)
    return target


def test_a_damaged_or_planted_library_is_not_loaded(kept_file):
    assert is_own_file(kept_file)
    whole = kept_file.read_bytes()
    for content in (b"", whole[:1], whole[: len(whole) // 2], whole[:-1], whole[:5000] + bytes(len(whole) - 5000)):
        kept_file.write_bytes(content)
        assert not is_own_file(kept_file)
    kept_file.write_bytes(whole)
    assert is_own_file(kept_file)
    kept_file.chmod(0o722)
    assert not is_own_file(kept_file)
    kept_file.chmod(0o700)
    kept_file.with_suffix(".json").unlink()
    assert not is_own_file(kept_file), "planted by somebody who knows its name"


def test_a_folder_that_others_may_write_to_is_closed(kept_file, monkeypatch):
    kept_file.parent.chmod(0o777)
    assert make_private_folder(kept_file.parent) is None
    assert kept_file.parent.stat().st_mode & 0o777 == 0o700
    monkeypatch.setattr(cache_files, "_trusted_owners", lambda: {kept_file.stat().st_uid + 1})
    assert not is_own_file(kept_file)
    assert "belongs to another user; set SALTUS_CACHE" in make_private_folder(kept_file.parent)


def test_a_library_that_a_full_disk_cut_is_compiled_again(quick_compiler, fresh_library, monkeypatch):
    monkeypatch.setenv("CC", shlex.quote(str(quick_compiler)))
    assert native.load_kernels() is not None
    (made,) = fresh_library.rglob("*.so")
    cut = fresh_library / "cut"
    cut.write_bytes(made.read_bytes()[:1000])
    cut.replace(made)  # the loaded one stays as it is
    native.load_kernels.cache_clear()
    assert native.load_kernels() is not None
    assert is_own_file(made)


@compiled
@pytest.mark.parametrize("token", [300, -1])
def test_a_token_beyond_the_vocabulary_is_an_error_and_not_read(token):
    network = CausalNetwork(tiny_llama())
    assert network.native_decoder is not None
    with pytest.raises(IndexError, match="beyond the model's vocabulary of 300"):
        network.forward([ForwardInputs(continuation([1, 2, token], 1))], [network.new_kv_cache()])


def test_unlike_processors_have_unlike_names_for_their_kernels(monkeypatch):
    lines = {
        "x86": "vendor_id\t: AuthenticAMD\nflags\t\t: fpu avx512f\n",
        "neoverse-n1": "Features\t: fp asimd\nCPU implementer\t: 0x41\nCPU part\t: 0xd0c\n",
        "neoverse-v1": "Features\t: fp asimd sve i8mm\nCPU implementer\t: 0x41\nCPU part\t: 0xd40\n",
    }
    names = set()
    for text in lines.values():
        monkeypatch.setattr(processor, "open", lambda _, text=text: io.StringIO(text), raising=False)
        names.add(processor.processor_features())
    assert len(names) == len(lines)
