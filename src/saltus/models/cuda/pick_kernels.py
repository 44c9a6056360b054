"""Pick the token of each row with Gumbel noise on the GPU: one number a row is copied to the host, not its logits.

The numbers of tokens are those of core/noise.py, and the arithmetic is that of `core.coupling.pick_token`: scores in
float32, weights and exponentials in float64. Where two tokens are so close that rounding may decide, none is picked.
"""

# Triton's own types differ between its releases, and say of `range` in a kernel that nothing comes back.
# pyright: reportGeneralTypeIssues=false, reportCallIssue=false, reportArgumentType=false, reportOperatorIssue=false

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from saltus.core.noise import FACTORS, GROUP_COUNTER, GROUP_SIZE, GROUP_STRIDE
from saltus.models.cuda.launching import device_function, kernel, power_of_two

CLEAR = 1 - 1e-9  # of the best value: a second one above it may be the better one


@device_function
def _hash(counter, first_key, second_key, FIRST: tl.constexpr, SECOND: tl.constexpr, THIRD: tl.constexpr):
    """SplitMix64 of counters, as core/noise.py has it; all uint64."""
    x = counter * tl.full((1,), FIRST, tl.uint64) + first_key
    x = (x ^ (x >> 30)) * tl.full((1,), SECOND, tl.uint64) + second_key
    x = (x ^ (x >> 27)) * tl.full((1,), THIRD, tl.uint64)
    return x ^ (x >> 31)


@device_function
def _exponential(word):
    """−log(1 − U) in float64 for U of the upper 52 bits; 1 − U has no rounding."""
    return -tl.log(1.0 - ((word >> 12).to(tl.float64) + 0.5) * 2.220446049250313e-16)


@kernel()
def _race(
    logits, greatest, keys, temperatures, values, tokens,
    VOCAB: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr, COUNTER: tl.constexpr,
    FIRST: tl.constexpr, SECOND: tl.constexpr, THIRD: tl.constexpr,
):  # fmt: skip
    """The two best values of a row among BLOCK neighbours, each of another group, and the token of the first."""
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    temperature = tl.load(temperatures + row).to(tl.float32)
    if temperature > 0:
        lane = tl.arange(0, BLOCK)
        token = block * BLOCK + lane
        logit = tl.load(logits + row * VOCAB + token, mask=token < VOCAB, other=-float("inf")).to(tl.float32)
        top = tl.div_rn(tl.load(greatest + row).to(tl.float32), temperature)
        weight = tl.exp((tl.div_rn(logit, temperature) - top).to(tl.float64))
        first_key, second_key = tl.load(keys + 2 * row).to(tl.uint64), tl.load(keys + 2 * row + 1).to(tl.uint64)
        counter = (block // GROUP * BLOCK + lane).to(tl.uint64) + COUNTER
        word = _hash(counter, first_key, second_key, FIRST, SECOND, THIRD)
        least = _exponential(word) / GROUP
        own = least + _exponential(_hash(token.to(tl.uint64), first_key, second_key, FIRST, SECOND, THIRD))
        value = weight / tl.where((word % GROUP).to(tl.int32) == block % GROUP, least, own)
        value = tl.where(value == value, value, 0.0)  # of broken logits, which `_best` leaves to the host
        best, place = tl.max(value, 0), tl.argmax(value, 0)
        at = row * tl.num_programs(1) + block
        tl.store(values + 2 * at, best)
        tl.store(values + 2 * at + 1, tl.max(tl.where(lane == place, 0.0, value), 0))
        tl.store(tokens + at, block * BLOCK + place)


@kernel()
def _best(
    greatest, temperatures, values, tokens, out,
    BLOCKS: tl.constexpr, PADDED: tl.constexpr, CLEAR: tl.constexpr,
):  # fmt: skip
    """The token of a row; −1 where there is none, or where rounding may decide."""
    row, block = tl.program_id(0).to(tl.int64), tl.arange(0, PADDED)
    picked = tl.full((), -1.0, tl.float64)
    if tl.load(temperatures + row) > 0:
        at, inside = row * BLOCKS + block, block < BLOCKS
        first = tl.load(values + 2 * at, mask=inside, other=0.0)
        second = tl.load(values + 2 * at + 1, mask=inside, other=0.0)
        best, place = tl.max(first, 0), tl.argmax(first, 0)
        next_best = tl.max(tl.where(block == place, second, first), 0)
        top = tl.load(greatest + row)
        clear = (next_best < best * CLEAR) & (top < float("inf")) & (top > -float("inf"))
        picked = tl.where(clear, tl.load(tokens + row * BLOCKS + place).to(tl.float64), picked)
    tl.store(out + row, picked)


def pick_tokens(logits: Tensor, greatest: Tensor, keys: Tensor, temperatures: Tensor) -> Tensor:
    """The tokens [rows], float64, that rows of logits [rows, vocab] pick by their keys [rows, 2] (`Noise.token_keys`).

    `greatest` [rows] is the greatest logit of each; temperatures [rows], both float64. −1 where the temperature is 0,
    and where the host must decide.
    """
    rows, vocab = logits.shape
    blocks = -(-vocab // GROUP_STRIDE)
    values = logits.new_empty(rows, blocks, 2, dtype=torch.float64)
    tokens = logits.new_empty(rows, blocks, dtype=torch.int32)
    out = values.new_empty(rows)
    first, second, third = FACTORS
    _race[(rows, blocks)](
        logits, greatest, keys, temperatures, values, tokens,
        VOCAB=vocab, BLOCK=GROUP_STRIDE, GROUP=GROUP_SIZE, COUNTER=GROUP_COUNTER,
        FIRST=first, SECOND=second, THIRD=third, num_warps=4,
    )  # fmt: skip
    _best[(rows,)](
        greatest, temperatures, values, tokens, out,
        BLOCKS=blocks, PADDED=power_of_two(blocks), CLEAR=CLEAR, num_warps=1,
    )  # fmt: skip
    return out
