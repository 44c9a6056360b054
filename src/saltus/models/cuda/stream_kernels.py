"""What is computed of the streams of a token's hidden states around layers (AltUp), and of sparse gates: row by row."""

# Triton's own types differ between its releases, and say of `range` in a kernel that nothing comes back.
# pyright: reportGeneralTypeIssues=false, reportCallIssue=false, reportArgumentType=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton.language as tl
from torch import Tensor

from saltus.models.cuda.launching import device_function, kernel, power_of_two, rounded_product
from saltus.models.cuda.row_kernels import normed_row

LEAST_SQUARE = 1e-5  # mean square of a projection by which it is scaled, at least


@device_function
def _modalities(
    x, norm, router, epsilon, at, inside,
    SIZE: tl.constexpr, COUNT: tl.constexpr, SLOTS: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """What the router says of a row x, tanh(router · norm(x)), [SLOTS]; 0 after the first COUNT."""
    factors, slot = tl.load(norm + at, mask=inside, other=0.0), tl.arange(0, SLOTS)
    normed = normed_row(x, factors, epsilon, inside, SIZE, True, False, dtype).to(dtype).to(tl.float32)
    found = tl.zeros((SLOTS,), dtype=tl.float32)
    for each in tl.static_range(COUNT):
        routed = tl.sum(normed * tl.load(router + each * SIZE + at, mask=inside, other=0.0), 0)
        found = tl.where(slot == each, routed, found)
    found = found.to(dtype).to(tl.float32)
    return (1.0 - 2.0 / (tl.exp(2.0 * found) + 1.0)).to(dtype).to(tl.float32)


@device_function
def _coefficient(weights, modalities, COUNT: tl.constexpr, SLOTS: tl.constexpr, dtype: tl.constexpr):
    """The product of COUNT weights and modalities, rounded."""
    slot = tl.arange(0, SLOTS)
    own = tl.load(weights + slot, mask=slot < COUNT, other=0.0)
    return tl.sum(rounded_product(own, modalities), 0).to(dtype).to(tl.float32)


@kernel("step", "epsilon")
def _predict(
    streams, predicted, hidden, norm, router, weights, step, epsilon,
    SIZE: tl.constexpr, PADDED: tl.constexpr, COUNT: tl.constexpr, SLOTS: tl.constexpr, ACTIVE: tl.constexpr,
):  # fmt: skip
    """Stream i of a row becomes x_i + Σ_j P_ij x_j, and `hidden` the active one; `step` numbers lie between streams."""
    row, at = tl.program_id(0).to(tl.int64), tl.arange(0, PADDED)
    inside = at < SIZE
    dtype: tl.constexpr = hidden.dtype.element_ty
    here = row * SIZE + at
    active = tl.load(streams + ACTIVE * step + here, mask=inside, other=0.0).to(tl.float32)
    modalities = _modalities(active, norm, router, epsilon, at, inside, SIZE, COUNT, SLOTS, dtype)
    for i in tl.static_range(COUNT):
        total = tl.zeros((PADDED,), dtype=tl.float32)
        for j in tl.static_range(COUNT):
            other = tl.load(streams + j * step + here, mask=inside, other=0.0).to(tl.float32)
            total += other * _coefficient(weights + (i * COUNT + j) * COUNT, modalities, COUNT, SLOTS, dtype)
        own = tl.load(streams + i * step + here, mask=inside, other=0.0).to(tl.float32)
        made = (total.to(dtype).to(tl.float32) + own).to(dtype)
        tl.store(predicted + i * step + here, made, mask=inside)
        if i == ACTIVE:
            tl.store(hidden + here, made, mask=inside)


@kernel("step", "epsilon")
def _correct(
    predicted, streams, hidden, norm, router, weights, output_scale, out, step, epsilon,
    SIZE: tl.constexpr, PADDED: tl.constexpr, COUNT: tl.constexpr, SLOTS: tl.constexpr, ACTIVE: tl.constexpr,
    SCALED: tl.constexpr,
):  # fmt: skip
    """Stream i of a row becomes p_i + (1 + (C r)_i) (y − p), with y in `hidden`; `out` is the active one, scaled."""
    row, at = tl.program_id(0).to(tl.int64), tl.arange(0, PADDED)
    inside = at < SIZE
    dtype: tl.constexpr = hidden.dtype.element_ty
    here = row * SIZE + at
    y = tl.load(hidden + here, mask=inside, other=0.0).to(tl.float32)
    modalities = _modalities(y, norm, router, epsilon, at, inside, SIZE, COUNT, SLOTS, dtype)
    change = y - tl.load(predicted + ACTIVE * step + here, mask=inside, other=0.0).to(tl.float32)
    change = change.to(dtype).to(tl.float32)
    for i in tl.static_range(COUNT):
        factor = _coefficient(weights + i * COUNT, modalities, COUNT, SLOTS, dtype) + 1.0
        own = tl.load(predicted + i * step + here, mask=inside, other=0.0).to(tl.float32)
        made = (rounded_product(change, factor.to(dtype).to(tl.float32)).to(dtype).to(tl.float32) + own).to(dtype)
        tl.store(streams + i * step + here, made, mask=inside)
        if i == ACTIVE:
            if SCALED:
                scale = tl.load(output_scale + at, mask=inside, other=0.0).to(tl.float32)
                made = (made.to(tl.float32) * scale).to(dtype)
            tl.store(out + here, made, mask=inside)


@kernel("least")
def _match(x, like, least, SIZE: tl.constexpr, PADDED: tl.constexpr):
    """A row of x is scaled to the root mean square of one of `like`; its own mean square counts as `least` at least."""
    row, at = tl.program_id(0).to(tl.int64), tl.arange(0, PADDED)
    inside = at < SIZE
    dtype: tl.constexpr = x.dtype.element_ty
    own = tl.load(x + row * SIZE + at, mask=inside, other=0.0).to(tl.float32)
    other = tl.load(like + row * SIZE + at, mask=inside, other=0.0).to(tl.float32)
    wanted = tl.sqrt((tl.sum(other * other, 0) / SIZE).to(dtype).to(tl.float32)).to(dtype).to(tl.float32)
    square = tl.maximum((tl.sum(own * own, 0) / SIZE).to(dtype).to(tl.float32), least)
    root = tl.sqrt(square).to(dtype).to(tl.float32)
    made = (own * wanted).to(dtype).to(tl.float32) / root
    tl.store(x + row * SIZE + at, made.to(dtype), mask=inside)


@kernel("step")
def _average(x, out, step, SIZE: tl.constexpr, PADDED: tl.constexpr, COUNT: tl.constexpr):
    """The mean of COUNT rows, `step` numbers apart."""
    row, at = tl.program_id(0).to(tl.int64), tl.arange(0, PADDED)
    inside = at < SIZE
    total = tl.load(x + row * SIZE + at, mask=inside, other=0.0).to(tl.float32)
    for each in tl.static_range(1, COUNT):
        total += tl.load(x + each * step + row * SIZE + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * SIZE + at, (total / COUNT).to(out.dtype.element_ty), mask=inside)


@kernel("deviations")
def _cut_off(x, deviations, WIDTH: tl.constexpr, SIZE: tl.constexpr, PADDED: tl.constexpr):
    """The first SIZE numbers of a row, less mean + deviations · standard deviation, or 0."""
    row, at = tl.program_id(0).to(tl.int64), tl.arange(0, PADDED)
    inside = at < SIZE
    dtype: tl.constexpr = x.dtype.element_ty
    own = tl.load(x + row * WIDTH + at, mask=inside, other=0.0).to(tl.float32)
    mean = tl.sum(own, 0) / SIZE
    apart = tl.where(inside, own - mean, 0.0)
    deviation = tl.sqrt(tl.sum(apart * apart, 0) / SIZE).to(dtype).to(tl.float32)
    cutoff = mean.to(dtype).to(tl.float32) + (deviation * deviations).to(dtype).to(tl.float32)
    left = own - cutoff.to(dtype).to(tl.float32)
    tl.store(x + row * WIDTH + at, tl.where(left > 0, left, 0.0).to(dtype), mask=inside)


def predict(
    streams: Tensor,
    predicted: Tensor,
    hidden: Tensor,
    weights: Sequence[Tensor],
    epsilon: float,
    active: int,
    rows: int,
) -> None:
    """Predict streams [count, padded rows, size], and `hidden` [padded rows, size], the active one.

    `weights`, in float32, are a norm's [size], a router's [count, size] and those of streams [count, count, count].
    """
    count, _, size = streams.shape
    _predict[(rows,)](
        streams, predicted, hidden, *weights, streams.stride(0), epsilon, SIZE=size, PADDED=power_of_two(size),
        COUNT=count, SLOTS=power_of_two(count), ACTIVE=active, num_warps=8,
    )  # fmt: skip


def correct(
    predicted: Tensor, streams: Tensor, hidden: Tensor, weights: Sequence[Tensor], output_scale: Tensor | None,
    out: Tensor, epsilon: float, active: int, rows: int,
) -> None:  # fmt: skip
    """Correct predictions by what a layer made in `hidden`; `out` is the active stream, times `output_scale` [size].

    `weights`: as those of `predict`, the last ones [count, count].
    """
    count, _, size = streams.shape
    _correct[(rows,)](
        predicted, streams, hidden, *weights, hidden if output_scale is None else output_scale, out, streams.stride(0),
        epsilon, SIZE=size, PADDED=power_of_two(size), COUNT=count, SLOTS=power_of_two(count), ACTIVE=active,
        SCALED=output_scale is not None, num_warps=8,
    )  # fmt: skip


def match_magnitude(x: Tensor, like: Tensor, rows: int) -> None:
    """Scale rows of x [.., size] to the root mean square of those of `like`."""
    size, least = x.shape[1], float(torch.tensor(LEAST_SQUARE, dtype=x.dtype))
    _match[(rows,)](x, like, least, SIZE=size, PADDED=power_of_two(size), num_warps=4)


def average(x: Tensor, out: Tensor, rows: int) -> None:
    """Rows of out [.., size], the mean of those of x [count, .., size]."""
    size = out.shape[1]
    _average[(rows,)](x, out, x.stride(0), SIZE=size, PADDED=power_of_two(size), COUNT=len(x), num_warps=4)


def cut_off(x: Tensor, size: int, deviations: float) -> None:
    """Keep of the first `size` columns of x [rows, width] what lies above mean + deviations · standard deviation."""
    rounded = float(torch.tensor(deviations, dtype=x.dtype))
    _cut_off[(len(x),)](x, rounded, WIDTH=x.shape[1], SIZE=size, PADDED=power_of_two(size), num_warps=8)
