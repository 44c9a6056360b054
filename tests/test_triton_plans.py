"""What Triton's interpreter does by plans are its own numbers, bit for bit."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

import triton.language as tl
from triton.runtime import interpreter

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled")
MEMORY = np.linspace(-3, 3, 64, dtype=np.float32)


class Forwarding:
    """A builder that is not the interpreter's own: nothing is noted, and no plan is followed."""

    def __getattr__(self, name: str) -> Any:
        return getattr(interpreter.interpreter_builder, name)


def tile(numbers: np.ndarray, kind: tl.dtype) -> tl.tensor:
    shape = [] if numbers.shape == (1,) else list(numbers.shape)
    return tl.tensor(interpreter.TensorHandle(numbers, kind), tl.block_type(kind, shape) if shape else kind)


def arguments(seed: int) -> dict[str, tl.tensor]:
    draws = np.random.default_rng(seed)
    return {
        "row": tile(draws.normal(size=8).astype(np.float32), tl.float32),
        "other": tile(draws.normal(size=8).astype(np.float32), tl.float32),
        "matrix": tile(draws.normal(size=(4, 8)).astype(np.float32), tl.float32),
        "half": tile(draws.normal(size=8).astype(np.float16), tl.float16),
        "number": tile(draws.integers(1, 7, 1).astype(np.int32), tl.int32),
        "places": tile(draws.integers(0, 9, 8).astype(np.int32), tl.int32),
        "memory": tile(np.array([MEMORY.ctypes.data], np.uint64), tl.pointer_type(tl.float32)),
    }


CASES: dict[str, Callable[..., tl.tensor]] = {
    "a tile twice": lambda row, **_: row * row,
    "two tiles": lambda row, other, **_: row * other,  # after one of their type, given twice
    "a row of a matrix": lambda row, matrix, **_: matrix - row[None, :],
    "an outer product": lambda row, places, **_: row[:, None] / places[None, :].to(tl.float32),
    "constants": lambda row, **_: 1.0 / (2 + row) * 0.0 - row * -0.0,
    "a scalar": lambda row, number, **_: row + number,
    "half precision": lambda row, half, **_: (half * 3 + half).to(tl.float32) + row,
    "rounding": lambda row, **_: (row.to(tl.bfloat16) * row.to(tl.bfloat16)).to(tl.float32),
    "integers": lambda number, places, **_: (places // number) * 5 + places % number - (places >> 1),
    "masks": lambda row, other, places, **_: tl.where((row < other) & (places > 2) | (row > 1.0), row, -1.0),
    "a mask as numbers": lambda row, other, **_: (row < other).to(tl.int32) + 1,
    "functions": lambda row, **_: tl.exp(tl.minimum(row, 0.5)) + tl.sqrt(tl.abs(row)),
    "a sum": lambda matrix, **_: tl.sum(matrix * matrix, 1),
    "a product": lambda matrix, **_: tl.dot(matrix, tl.trans(matrix)),
    "memory": lambda memory, places, **_: tl.load(memory + places),
    "masked memory": lambda memory, places, **_: tl.load(memory + places * 3, mask=places < 5, other=7.0),
    "a number of memory": lambda memory, number, **_: tl.load(memory + number) + number,
    "whole tiles": lambda row, **_: tl.full((8,), 2.5, tl.float32) + tl.arange(0, 8) + row,
}  # fmt: skip


def computed(function: Callable[..., tl.tensor], given: dict[str, tl.tensor], planned: bool) -> tuple[Any, ...]:
    builder, interpreter.interpreter_semantic.builder = (
        interpreter.interpreter_semantic.builder,
        interpreter.interpreter_builder if planned else Forwarding(),
    )
    try:
        out = function(**given)
    finally:
        interpreter.interpreter_semantic.builder = builder
    held = out.handle.data
    return out.type.name, out.handle.dtype.name, held.dtype, held.shape, held.tobytes()


@pytest.fixture(autouse=True)
def language() -> None:
    interpreter._patch_lang(tile)


def test_plans_compute_what_the_interpreter_computes():
    for name, function in CASES.items():
        for seed in range(3):  # the first call is noted
            given = arguments(seed)
            assert computed(function, given, planned=True) == computed(function, given, planned=False), name


def test_what_is_stored_is_what_the_interpreter_stores():
    def store(planned: bool, seed: int) -> np.ndarray:
        memory, given = np.zeros(16, np.float32), arguments(seed)
        at = tile(np.array([memory.ctypes.data], np.uint64), tl.pointer_type(tl.float32)) + tl.arange(0, 8)

        def stored(row: tl.tensor, places: tl.tensor, **_: tl.tensor) -> tl.tensor:
            tl.store(at, row, mask=places > 3)
            tl.store(at + 8, places)
            return row

        computed(stored, given, planned)
        return memory

    for seed in range(3):
        assert np.array_equal(store(True, seed), store(False, seed))
        assert store(True, seed).any()
