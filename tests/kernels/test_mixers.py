"""Convolutions and recurrences: those of Transformers, and of one token after the other in any call and tree."""

import ctypes
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from test_kernels import DTYPES, each_dtype, normal, run, same
from torch import Tensor
from transformers.models.falcon_h1.modeling_falcon_h1 import FalconH1RMSNormGated, mamba2_chunk_scan
from transformers.models.kimi_linear.modeling_kimi_linear import recurrent_kimi_delta_attention
from transformers.models.mamba2.modeling_mamba2 import MambaRMSNormGated
from transformers.models.qwen3_5.modeling_qwen3_5 import (
    Qwen3_5RMSNormGated,
    causal_conv1d_fn,
    torch_recurrent_gated_delta_rule,
)

from architectures import random_tree
from saltus.core.canvas import continuation
from saltus.core.forward import ForwardInputs
from saltus.kernels import native
from saltus.kernels.native import structs
from saltus.models.cpu.hybrid_kv_cache import HybridKVCache, StateSizes

__all__ = ["run"]
pytestmark = pytest.mark.skipif(native.load_kernels() is None, reason="no compiled kernels")


def padded(bytes: int) -> int:
    return -(-bytes // 64) * 64


@dataclass
class Mixer:
    """A layer by itself: a kernel, and the inputs of rows by name."""

    kernel: str
    inputs: dict[str, int]  # sizes
    out: int
    sizes: StateSizes
    constants: dict[str, Any]
    tensors: dict[str, Tensor]  # that the struct points to
    dtype: torch.dtype
    struct: type = field(init=False)

    def __post_init__(self) -> None:
        self.struct = {"convolve": structs.Convolution, "recur": structs.Recurrence}[self.kernel]

    def new_cache(self, **given) -> HybridKVCache:
        return HybridKVCache(sizes=self.sizes, **given)

    def rows(self, count: int, seed: int = 0) -> dict[str, Tensor]:
        """Random inputs; they stand in wider rows, as those of a fused product do."""
        made = {}
        for number, (name, size) in enumerate(self.inputs.items()):
            made[name] = normal(count, size + 5, seed=seed * 100 + number).to(self.dtype)[:, 3 : 3 + size]
        return made

    def call(self, cache: HybridKVCache, rows: dict[str, Tensor], decided: int, parents=(), is_last=True) -> Tensor:
        """What rows of a text give: decided ones after what the cache has read, then nodes."""
        tensors = rows | self.tensors
        out = torch.zeros(decided + len(parents), self.out, dtype=self.dtype)
        call = cache.begin_call(0, cache.num_read + len(cache.accepted), decided, parents, is_last)
        strides = {f"{name}_row": x.stride(0) for name, x in rows.items()}
        pointers = {name: x.data_ptr() for name, x in tensors.items()}
        struct = self.struct(**self.constants, **strides, **pointers, out=out.data_ptr(), text=call.address)
        kernel = native.kernel(self.kernel, self.dtype, torch.device("cpu"))
        if kernel is None:
            pytest.skip(f"no compiled kernels for {self.dtype}")
        assert kernel(ctypes.byref(struct)) == 0
        call.end()
        return out


def convolution(dtype, channels=75, width=4, bias=True, silu=True, gated=False) -> Mixer:
    names = ("x", "before", "after") if gated else ("x",)
    inputs: dict[str, int] = dict.fromkeys(names, channels)
    tensors = {"weight": normal(width, channels, seed=1).to(dtype)}
    if bias:
        tensors["bias"] = normal(channels, seed=2).to(dtype)
    size = channels * dtype.itemsize
    sizes = StateSizes(padded((width - 1) * size), padded(size))
    return Mixer(
        "convolve", inputs, channels, sizes, {"channels": channels, "width": width, "silu": silu}, tensors, dtype
    )


def recurrence(
    dtype, delta=True, heads=6, groups=2, key_dim=18, value_dim=70, limits=(0.0, float("inf")), channelwise=False,
    least_decay=0.0,
) -> Mixer:  # fmt: skip
    steps = heads * key_dim if channelwise else heads
    inputs = {"query": groups * key_dim, "key": groups * key_dim, "value": heads * value_dim, "step": steps}
    inputs |= {"weight": heads} if delta else {}
    tensors = {"bias": normal(steps, seed=1), "rate": -normal(heads, seed=2).exp()}
    tensors |= {} if delta else {"skip": normal(heads, seed=3)}
    state = heads * padded(value_dim * 2) // 2 * (-(-key_dim // 4) * 4) * 4
    numbers = groups * key_dim + heads * (value_dim + (1 if delta else 0)) + steps
    constants = {
        "heads": heads, "groups": groups, "key_dim": key_dim, "value_dim": value_dim, "least": limits[0],
        "most": limits[1], "scale": key_dim**-0.5 if delta else 1.0, "epsilon": 1e-6, "steps": steps,
        "weight_scale": 1.0, "least_decay": least_decay,
    }  # fmt: skip
    sizes = StateSizes(padded(state), padded(numbers * dtype.itemsize))
    return Mixer("recur", inputs, heads * value_dim, sizes, constants, tensors, dtype)


def mamba(dtype: torch.dtype, channels: int = 70, state: int = 10) -> Mixer:
    """A step for each channel, and a decay for each number of its state."""
    columns, keys = structs.STATE_COLUMNS, -(-state // 4) * 4
    blocks = -(-channels // columns)
    inputs = {"query": state, "key": state, "value": channels, "step": channels}
    tensors = {
        "bias": normal(channels, seed=1), "rate": -normal(blocks, keys, columns, seed=2).exp(),
        "skip": normal(blocks * columns, seed=3),
    }  # fmt: skip
    constants = {
        "heads": 1, "groups": 1, "key_dim": state, "value_dim": channels, "least": 0.0, "most": float("inf"),
        "scale": 1.0, "epsilon": 0.0, "steps": channels, "weight_scale": 1.0,
    }  # fmt: skip
    sizes = StateSizes(padded(4 * tensors["rate"].numel()), padded((state + 2 * channels) * dtype.itemsize))
    return Mixer("recur", inputs, channels, sizes, constants, tensors, dtype)


def expected_convolution(mixer: Mixer, x: dict[str, Tensor]) -> Tensor:
    inputs = x["x"].float() * x["before"].float() if "before" in x else x["x"].float()
    bias = mixer.tensors["bias"].float() if "bias" in mixer.tensors else None
    activation = "silu" if mixer.constants["silu"] else None
    out = causal_conv1d_fn(inputs.T[None], mixer.tensors["weight"].float().T, bias, activation=activation)[0].T
    return out * x["after"].float() if "after" in x else out


def expected_scan(mixer: Mixer, x: dict[str, Tensor]) -> Tensor:
    """Each row's change of the states [channels, numbers], one row after the other (Gu & Dao 2024, algorithm 2)."""
    channels, count = mixer.constants["value_dim"], mixer.constants["key_dim"]
    rates = mixer.tensors["rate"].transpose(1, 2).flatten(0, 1)[:channels, :count]
    states, out = torch.zeros(channels, count), []
    steps = F.softplus(x["step"].float() + mixer.tensors["bias"])
    for query, key, value, step in zip(x["query"].float(), x["key"].float(), x["value"].float(), steps, strict=True):
        states = (step[:, None] * rates).exp() * states + (step * value)[:, None] * key
        out.append(states @ query + mixer.tensors["skip"][:channels] * value)
    return torch.stack(out)


def expected_recurrence(mixer: Mixer, x: dict[str, Tensor]) -> Tensor:
    at, rows = mixer.constants, len(x["step"])
    if at["heads"] == 1:
        return expected_scan(mixer, x)
    query, key = (x[name].float().view(1, rows, at["groups"], -1) for name in ("query", "key"))
    value, bias = x["value"].float().view(1, rows, at["heads"], -1), mixer.tensors["bias"]
    weights = x["weight"].float().sigmoid()[None] if "weight" in x else None
    if at["steps"] > at["heads"]:
        given, rate = (x["step"].float() + bias).view(1, rows, at["heads"], -1), mixer.tensors["rate"][:, None]
        decay = rate * F.softplus(given)
        if at["least_decay"]:  # as Ling 3 has them, in its own dtype
            decay = (at["least_decay"] * torch.sigmoid(-rate * given)).to(x["step"].dtype)
        out, _ = recurrent_kimi_delta_attention(
            query, key, value, decay, weights, None, False, use_qk_l2norm_in_kernel=True
        )
    elif weights is not None:
        decay = mixer.tensors["rate"] * F.softplus(x["step"].float() + bias)
        out, _ = torch_recurrent_gated_delta_rule(query, key, value, decay[None], weights, use_qk_l2norm_in_kernel=True)
    else:
        out = mamba2_chunk_scan(
            value, x["step"].float()[None], mixer.tensors["rate"], key, query, 16, D=mixer.tensors["skip"],
            dt_bias=bias, dt_softplus=True, dt_limit=(at["least"], at["most"]),
        )  # fmt: skip
    return out.reshape(rows, -1)


MIXERS = {
    "convolution": convolution,
    "narrow convolution": lambda dtype: convolution(dtype, 130, 3, bias=False, silu=False, gated=True),
    "wide convolution": lambda dtype: convolution(dtype, 70, 7, bias=False, silu=False, gated=True),
    "delta rule": recurrence,
    "delta rule of whole blocks": lambda dtype: recurrence(dtype, heads=2, groups=2, key_dim=64, value_dim=64),
    "delta rule of channel-wise decays": lambda dtype: recurrence(dtype, heads=3, groups=3, channelwise=True),
    "delta rule of bounded decays": lambda dtype: recurrence(
        dtype, heads=3, groups=3, channelwise=True, least_decay=-5.0
    ),
    "scan": lambda dtype: recurrence(dtype, delta=False, limits=(0.3, 1.5)),
    "scan with steps of channels": mamba,
}
each_mixer = pytest.mark.parametrize("name", MIXERS)


@each_dtype
@each_mixer
def test_a_mixer_is_that_of_transformers(name, dtype):
    mixer = MIXERS[name](dtype)
    x = mixer.rows(40)
    out = mixer.call(mixer.new_cache(), x, 40)
    expected = (expected_convolution if mixer.kernel == "convolve" else expected_recurrence)(mixer, x)
    error = (out.float() - expected).abs().max() / expected.abs().max()
    assert error < {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}[dtype]


@each_dtype
@each_mixer
def test_rows_in_any_split_and_tree_are_those_of_one_token_after_the_other(name, dtype):
    mixer = MIXERS[name](dtype)
    x, count = mixer.rows(60), 60
    cache, alone = mixer.new_cache(), []
    for row in range(count):
        alone.append(mixer.call(cache, {key: value[row : row + 1] for key, value in x.items()}, 1))
    expected = torch.cat(alone)
    last = cache.states.clone()
    rng = np.random.default_rng(1)
    for _ in range(6):
        cuts = [0, *sorted(rng.choice(np.arange(1, count), 4, replace=False).tolist()), count]
        cache = mixer.new_cache()
        for begin, end in pairwise(cuts):
            out = mixer.call(cache, {key: value[begin:end] for key, value in x.items()}, end - begin)
            assert same(out, expected[begin:end])
        assert torch.equal(cache.states, last)
    # trees: in each call some of a path's rows are decided, others are nodes among those of wrong branches
    for seed in range(8):
        rng = np.random.default_rng(seed)
        cache, at = mixer.new_cache(), 0
        while at < count:
            decided = int(rng.integers(1, 4))
            decided = min(decided, count - at)
            parents = random_tree(int(rng.integers(0, 14)), int(rng.integers(1000)))[1]
            path, node = [], -1  # a path down the tree that carries the text's next rows
            while (children := [c for c in range(len(parents)) if parents[c] == node]) and len(
                path
            ) < count - at - decided:
                node = int(rng.choice(children))
                path.append(node)
            wrong = mixer.rows(len(parents), seed=seed + 7)
            rows = {key: torch.cat([value[at : at + decided], wrong[key]]).clone() for key, value in x.items()}
            for number, node in enumerate(path):
                for key, value in x.items():
                    rows[key][decided + node] = value[at + decided + number]
            out = mixer.call(cache, rows, decided, parents)
            assert same(out[:decided], expected[at : at + decided])
            for number, node in enumerate(path):
                assert same(out[decided + node], expected[at + decided + number])
            kept = path[: int(rng.integers(0, len(path) + 1))]
            cache.accepted, at = kept, at + decided + len(kept)
        if not cache.accepted:
            assert torch.equal(cache.states, last)


@pytest.mark.slow
@each_mixer
def test_every_build_of_the_kernels_gives_the_same_bits(name, instruction_set):
    del instruction_set
    mixer, parents = MIXERS[name](torch.float32), random_tree(12)[1]
    out = mixer.call(mixer.new_cache(), mixer.rows(30), 18, parents)
    _bits.setdefault(name, out)
    assert same(out, _bits[name])


_bits: dict[str, Tensor] = {}


@each_mixer
def test_numbers_of_other_texts_and_threads_change_nothing(name):
    mixer, x = MIXERS[name](torch.bfloat16), MIXERS[name](torch.bfloat16).rows(200)
    with native.kernel_threads_only():
        out = mixer.call(mixer.new_cache(), x, 200)
    library = native.load_kernels()
    assert library is not None
    library.saltus_threads(structs.INTEGER(1))
    assert same(mixer.call(mixer.new_cache(), x, 200), out)


@each_mixer
def test_a_snapshot_is_continued_as_the_text_itself(name):
    mixer = MIXERS[name](torch.float32)
    x, cache = mixer.rows(1100), mixer.new_cache()
    whole = mixer.call(cache, x, 1100)
    assert sorted(cache.snapshots) == [1024, 1084, 1099]
    for position, states in cache.snapshots.items():
        other = mixer.new_cache(snapshots={position: states.clone()}, num_read=position)
        out = mixer.call(other, {key: value[position:] for key, value in x.items()}, 1100 - position)
        assert same(out, whole[position:])
        assert torch.equal(other.states, cache.states)
        assert torch.equal(other.snapshots[position], states), "a snapshot is never written to"


# Norms with gates

NORMS = {
    "delta rule's": (Qwen3_5RMSNormGated(24, 1e-5), 24, 24, False),
    "Mamba-2's": (MambaRMSNormGated(72, 36, 1e-5), 36, 72, True),
    "Falcon-H1's, norm first": (FalconH1RMSNormGated(72, 1e-5, 3, True), 24, 72, False),
    "Falcon-H1's, gate first": (FalconH1RMSNormGated(72, 1e-5, 3, False), 24, 72, True),
    "a gate alone": (None, 72, 0, False),
    "a gate of each head": (None, 24, 0, False),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NORMS)
def test_a_norm_with_a_gate_is_that_of_transformers(name, dtype, run):
    module, group, weights, gate_first = NORMS[name]
    x, gate, weight = normal(5, 72).to(dtype), normal(5, 80, seed=1).to(dtype)[:, 4:76], None
    one_gate = name == "a gate of each head"
    if one_gate:
        expected = (x.float().view(5, 3, 24) * F.silu(gate[:, :3].float())[..., None]).view(5, 72)
    elif module is None:
        expected = x.float() * F.silu(gate.float())
    else:
        with torch.no_grad():
            module.weight.copy_(1 + normal(weights, seed=2) / 8)
            weight = module.weight.to(dtype)
            shape = (5, 3, 24) if weights == 24 else (1, 5, 72)
            expected = module(x.float().reshape(shape), gate.float().reshape(shape)).reshape(5, 72)
    struct = structs.GatedNorm(
        x=x.data_ptr(), gate=gate.data_ptr(), gate_row=gate.stride(0), rows=5, size=72, group=group, weights=weights,
        gate_group=1 if one_gate else group, weight=None if weight is None else weight.data_ptr(),
        gate_first=gate_first, one_gate=one_gate, epsilon=1e-5,
    )  # fmt: skip
    run("gated_norm", struct)
    bound = {torch.float32: 1e-5, torch.bfloat16: 4e-2, torch.float16: 4e-3}[dtype]
    assert (x.float() - expected).abs().max() < bound * expected.abs().max()


# What a text keeps


SIZES = StateSizes(64, 64)


def read(cache: HybridKVCache, tokens: list[int], tree: ForwardInputs | None = None) -> int:
    """Read a text into a cache whose states are of no kernel: they are the sum of the tokens."""
    array = np.array(tokens, dtype=np.int64)
    past = cache.reuse_prefix(array)
    applied = sum(tokens[cache.num_read : past])
    call = cache.begin_call(0, past, len(tokens) - past, () if tree is None else tree.parents, True)
    value = int(cache.states[:8].view(torch.int64)) + applied
    for position in range(past, len(tokens) + 1):
        if position > past:
            value += tokens[position - 1]
        if position in call.new_snapshots:
            call.new_snapshots[position][:8].view(torch.int64).fill_(value)
    cache.states[:8].view(torch.int64).fill_(value)
    call.end()
    cache.tokens, cache.pending_tree = array, tree
    assert int(cache.states[:8].view(torch.int64)) == sum(tokens)
    return past


@pytest.mark.parametrize(
    ("kept", "added", "read_already"),
    [(1300, [], 1299), (1300, [7, 8], 1300), (1295, [7], 1284), (1030, [7], 1024), (900, [7], 0)],
    ids=["the prompt again", "a longer text", "the prompt's end differs", "its middle", "its beginning"],
)
def test_a_text_that_differs_goes_back_to_the_newest_snapshot_before(kept, added, read_already):
    cache, prompt = HybridKVCache(sizes=SIZES), list(range(1, 1301))
    assert read(cache, prompt) == 0
    assert read(cache, [*prompt[:kept], *added]) == read_already


def test_accepted_nodes_are_read_and_others_are_not():
    cache = HybridKVCache(sizes=SIZES)
    tree = ForwardInputs(continuation([1, 2, 3], 8), (4, 5, 6, 7), (-1, -1, 1, 2))
    read(cache, [1, 2, 3], tree)
    assert read(cache, [1, 2, 3, 5, 6, 9]) == 5
    read(cache, [1, 2, 3, 5, 6, 9], ForwardInputs(continuation([1, 2, 3, 5, 6, 9], 8), (4,), (-1,)))
    assert read(cache, [1, 2, 3, 5, 6, 9, 3, 3]) == 6
    read(cache, [1, 2, 3, 5, 6, 9, 3, 3], tree)
    assert cache.reuse_prefix(np.array([1, 2, 3, 5, 6, 9, 3, 3, 5, 6, 7, 1])) == 11
    assert read(cache, [1, 2, 3, 5, 6, 9, 3, 3, 5, 8]) == 9, "of the accepted nodes the first alone"


def test_after_a_call_that_failed_states_are_of_the_last_snapshot():
    cache = HybridKVCache(sizes=SIZES)
    prompt = list(range(1, 101))
    read(cache, prompt)
    assert cache.reuse_prefix(np.array([*prompt, 5])) == 100
    cache.begin_call(0, 100, 1, (), True)
    cache.states.fill_(99)  # some layers have read the token, others not
    assert read(cache, [*prompt, 5]) == 99


def test_a_draft_models_texts_go_back_to_where_its_drafts_began():
    cache, text = HybridKVCache(sizes=SIZES), list(range(1, 401))
    read(cache, text)
    for step in range(20):
        for draft in range(5):
            read(cache, [*text, *range(1000 + step, 1001 + step + draft)])
        text = [*text, 1000 + step, 1001 + step, 5]
        assert len(text) - read(cache, text) <= 9


def test_snapshots_and_memory_are_bounded():
    cache, length = HybridKVCache(sizes=SIZES), 40_000
    tokens = list(range(1, length + 1))
    for end in range(500, length + 1, 500):
        read(cache, tokens[:end])
    assert len(cache.snapshots) <= 10
    assert cache.num_bytes <= SIZES.of_text(length)
    assert max(np.diff([0, *cache.snapshots, length])) <= length / 4
    assert SIZES.of_text(100) < SIZES.of_text(3000) < SIZES.of_text(9000) == SIZES.of_text(10**6)
