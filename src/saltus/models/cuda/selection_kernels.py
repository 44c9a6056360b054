"""What Mamba selects of its channels: a vector that steps are made of, B and C; each may have a norm."""

# Triton's own types differ between its releases, and say of `range` in a kernel that nothing comes back.
# pyright: reportGeneralTypeIssues=false, reportCallIssue=false, reportArgumentType=false

from __future__ import annotations

import triton.language as tl
from torch import Tensor

from saltus.models.cuda.launching import kernel, power_of_two
from saltus.models.cuda.row_kernels import summed_columns


@kernel("num_rows", "epsilon")
def _select(
    parts, weight, low, out, num_rows, epsilon,
    RANK: tl.constexpr, STATE: tl.constexpr, LOW: tl.constexpr, STEP: tl.constexpr, PADDED: tl.constexpr,
    PARTS: tl.constexpr, NORMED: tl.constexpr,
):  # fmt: skip
    """A part of a row's sums, perhaps through its RMSNorm: RANK columns to `low`, or B or C to the end of `out`.

    A row of `low` has LOW numbers, of which the others are 0, and a row of `out` STEP numbers.
    """
    row, which, at = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, PADDED)
    width: tl.constexpr = RANK + 2 * STATE
    dtype: tl.constexpr = out.dtype.element_ty
    begin = tl.where(which == 0, 0, RANK + (which - 1) * STATE)
    size = tl.where(which == 0, RANK, STATE)
    inside = at < size
    x = summed_columns(parts, parts, row, begin + at, inside, num_rows, width, PARTS, False, dtype)
    if NORMED:
        x = (x * tl.rsqrt(tl.sum(x * x, 0) / size + epsilon)).to(dtype).to(tl.float32)
        x *= tl.load(weight + begin + at, mask=inside, other=0.0)
    if which == 0:
        tl.store(low + row * LOW + at, x.to(dtype), mask=at < LOW)
    else:
        tl.store(out + row * STEP + STEP - width + begin + at, x.to(dtype), mask=inside)


def select(parts: Tensor, norm: Tensor | None, epsilon: float, rank: int, low: Tensor, out: Tensor) -> None:
    """From parts [parts, rows, rank + 2 · state] of a product: low [.., at least rank] and the end of out [rows, ..].

    The norms' weights [rank + 2 · state] are in float32. What `low` has more is 0.
    """
    count, rows, width = parts.shape
    state, size = (width - rank) // 2, low.shape[1]
    padded = power_of_two(max(size, state))
    _select[(rows, 3)](
        parts, parts if norm is None else norm, low, out, rows, epsilon, RANK=rank, STATE=state, LOW=size,
        STEP=out.shape[1], PADDED=padded, PARTS=count, NORMED=norm is not None, num_warps=1 if padded <= 256 else 4,
    )  # fmt: skip
