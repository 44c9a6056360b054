"""Find the token of each row on the GPU, the likeliest and with Gumbel noise: the host gets three numbers of a row.

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


@kernel(anywhere=("temperatures",))
def _greatest(logits, temperatures, tops, places, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    """The greatest logit of a row among BLOCK neighbours, ∞ if one is not a number, and the first token that has it."""
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if tl.load(temperatures + row) >= 0:
        token = block * BLOCK + tl.arange(0, BLOCK)
        logit = tl.load(logits + row * VOCAB + token, mask=token < VOCAB, other=-float("inf")).to(tl.float32)
        logit = tl.where(logit == logit, logit, float("inf"))
        at = row * tl.num_programs(1) + block
        tl.store(tops + at, tl.max(logit, 0))
        tl.store(places + at, block * BLOCK + tl.argmax(logit, 0))


@kernel(anywhere=("temperatures", "tokens"))
def _race(
    logits, tops, keys, temperatures, values, tokens,
    VOCAB: tl.constexpr, BLOCKS: tl.constexpr, PADDED: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr,
    COUNTER: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr, THIRD: tl.constexpr,
):  # fmt: skip
    """The two best values of a row among BLOCK neighbours, each of another group, and the token of the first."""
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    temperature = tl.load(temperatures + row).to(tl.float32)
    if temperature > 0:
        lane = tl.arange(0, BLOCK)
        token = block * BLOCK + lane
        logit = tl.load(logits + row * VOCAB + token, mask=token < VOCAB, other=-float("inf")).to(tl.float32)
        other = tl.arange(0, PADDED)
        top = tl.max(tl.load(tops + row * BLOCKS + other, mask=other < BLOCKS, other=-float("inf")), 0)
        top = tl.div_rn(top, temperature)
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


@kernel("num_rows", anywhere=("temperatures", "tokens"))
def _best(
    tops, places, temperatures, values, tokens, out, num_rows,
    BLOCKS: tl.constexpr, PADDED: tl.constexpr, CLEAR: tl.constexpr,
):  # fmt: skip
    """The likeliest token of a row, its logit, and the picked one: −1 without one, or where rounding may decide."""
    row, block = tl.program_id(0).to(tl.int64), tl.arange(0, PADDED)
    temperature = tl.load(temperatures + row)
    if temperature < 0:
        for number in range(3):
            tl.store(out + number * num_rows + row, -1.0)
    else:
        at, inside = row * BLOCKS + block, block < BLOCKS
        picked = tl.full((), -1.0, tl.float64)
        of_blocks = tl.load(tops + at, mask=inside, other=-float("inf"))
        top, likeliest = tl.max(of_blocks, 0), tl.argmax(of_blocks, 0)
        if temperature > 0:
            first = tl.load(values + 2 * at, mask=inside, other=0.0)
            second = tl.load(values + 2 * at + 1, mask=inside, other=0.0)
            best, place = tl.max(first, 0), tl.argmax(first, 0)
            next_best = tl.max(tl.where(block == place, second, first), 0)
            clear = (next_best < best * CLEAR) & (top < float("inf")) & (top > -float("inf"))
            picked = tl.where(clear, tl.load(tokens + row * BLOCKS + place).to(tl.float64), picked)
        tl.store(out + row, tl.load(places + row * BLOCKS + likeliest).to(tl.float64))
        tl.store(out + num_rows + row, top)
        tl.store(out + 2 * num_rows + row, picked)


def find_tokens(logits: Tensor, keys: Tensor, temperatures: Tensor) -> Tensor:
    """[3, rows] of logits [rows, vocab], float64: the first likeliest token, its logit, and the picked token.

    A row picks by its keys [rows, 2] (`Noise.token_keys`) and temperature [rows], float64; −1 where that is 0, and
    where the host must decide. The greatest logit is ∞ where one is not a number. Of rows with a negative temperature
    nobody reads what is found: all is −1.
    """
    rows, vocab = logits.shape
    blocks = -(-vocab // GROUP_STRIDE)
    values = logits.new_empty(rows, blocks, 2, dtype=torch.float64)
    tops = logits.new_empty(rows, blocks, dtype=torch.float32)
    places, tokens = logits.new_empty(2, rows, blocks, dtype=torch.int32)
    out, sizes = values.new_empty(3, rows), {"BLOCKS": blocks, "PADDED": power_of_two(blocks)}
    first, second, third = FACTORS
    _greatest[(rows, blocks)](logits, temperatures, tops, places, VOCAB=vocab, BLOCK=GROUP_STRIDE, num_warps=4)
    _race[(rows, blocks)](
        logits, tops, keys, temperatures, values, tokens, VOCAB=vocab, **sizes, BLOCK=GROUP_STRIDE, GROUP=GROUP_SIZE,
        COUNTER=GROUP_COUNTER, FIRST=first, SECOND=second, THIRD=third, num_warps=4,
    )  # fmt: skip
    _best[(rows,)](tops, places, temperatures, values, tokens, out, rows, **sizes, CLEAR=CLEAR, num_warps=1)
    return out
