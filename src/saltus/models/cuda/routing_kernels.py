"""Choose the experts of each row and their weights, one program a row, as a description of a mixture says."""

# Triton's own types differ between its releases, and say of `range` in a kernel that nothing comes back.
# pyright: reportGeneralTypeIssues=false, reportCallIssue=false, reportArgumentType=false, reportOperatorIssue=false

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton.language as tl
from torch import Tensor

from saltus.models.cuda.launching import device_function, kernel, power_of_two
from saltus.models.cuda.linear_kernels import blocks_of, linear_parts
from saltus.models.decoder_description import Experts

PIECES = 3  # numbers of 16 bits whose sum is one of float32


@dataclass(frozen=True)
class RouterWeights:
    """The weights of a router as the kernels read them.

    A matrix in float32 is held in pieces of the model's dtype, whose sum it is; then logits are not rounded. (Float16
    has numbers of 2⁻²⁴ at least, and so its pieces a matrix to 2⁻²⁵.)
    """

    matrix: Tensor  # [pieces · experts, hidden]
    experts: int
    bias: Tensor | None = None  # [experts], as the other two
    selection_bias: Tensor | None = None
    expert_scale: Tensor | None = None

    @classmethod
    def of(cls, matrix: Tensor, dtype: torch.dtype, *vectors: Tensor | None) -> RouterWeights:
        """Of a matrix [experts, hidden] of a model in `dtype`, and the vectors in their order."""
        pieces, left = [matrix], matrix
        if matrix.dtype != dtype:
            pieces = []
            for _ in range(PIECES):
                pieces.append(left.to(dtype))
                left = left - pieces[-1].to(left.dtype)
        whole = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
        return cls(whole, len(matrix), *(None if each is None else each.flatten().contiguous() for each in vectors))


@device_function
def _logits(
    parts, source, at, inside, num_rows, EXPERTS: tl.constexpr, PARTS: tl.constexpr, PIECES: tl.constexpr
):  # fmt: skip
    """A row's sums of all parts and pieces, in their order."""
    width: tl.constexpr = PIECES * EXPERTS
    logit = tl.load(parts + source * width + at, mask=inside, other=0.0)
    for number in tl.static_range(1, PARTS * PIECES):
        row = (number // PIECES) * num_rows + source
        logit += tl.load(parts + row * width + number % PIECES * EXPERTS + at, mask=inside, other=0.0)
    return logit


@device_function
def _of_best_groups(
    choice, at, SIZE: tl.constexpr, GROUPS: tl.constexpr, SLOTS: tl.constexpr, TOP: tl.constexpr, BEST: tl.constexpr
):  # fmt: skip
    """The choices within the TOP groups of SIZE experts whose BEST ones have the greatest sums; −∞ elsewhere."""
    group, slot = at // SIZE, tl.arange(0, SLOTS)
    sums = tl.full((SLOTS,), float("-inf"), dtype=tl.float32)
    for each in tl.static_range(GROUPS):
        members = tl.where(group == each, choice, float("-inf"))
        total = tl.max(members, 0)
        for _ in tl.static_range(1, BEST):
            members = tl.where(at == tl.argmax(members, 0), float("-inf"), members)
            total += tl.max(members, 0)
        sums = tl.where(slot == each, total, sums)
    stays = at < 0
    for _ in tl.static_range(TOP):
        best = tl.argmax(sums, 0)
        stays = stays | (group == best)
        sums = tl.where(slot == best, float("-inf"), sums)
    return tl.where(stays, choice, float("-inf"))


@device_function
def _share_of_near(logit, left, margin):
    """The softmax of the greatest logit that is left over those that are near it, as `Experts` says of sparse_mixer."""
    most = tl.max(left, 0)
    far = (most - logit) / tl.maximum(tl.abs(logit), most) > margin
    return 1.0 / tl.sum(tl.where(far | (left == float("-inf")), 0.0, tl.exp(logit - most)), 0)


@kernel("num_rows", "first_slot", "least_sum", "scale", "margin")
def _route(
    parts, bias, selection_bias, expert_scale, kv_slots, picks, weights, num_rows, first_slot, least_sum, scale, margin,
    EXPERTS: tl.constexpr, PADDED: tl.constexpr, PARTS: tl.constexpr, PIECES: tl.constexpr, TOP_K: tl.constexpr,
    SLOTS: tl.constexpr, SCORING: tl.constexpr, NORMALIZED: tl.constexpr, BIASED: tl.constexpr,
    SELECTED_BY_BIAS: tl.constexpr, SCALED: tl.constexpr, GROUPS: tl.constexpr, GROUP_SLOTS: tl.constexpr,
    TOP_GROUPS: tl.constexpr, BEST_OF_GROUP: tl.constexpr, BFLOAT16: tl.constexpr, FLOAT16: tl.constexpr,
):  # fmt: skip
    """The experts of one row and their weights; see `route`."""
    row, at, slot = tl.program_id(0).to(tl.int64), tl.arange(0, PADDED), tl.arange(0, SLOTS)
    source, inside = tl.where(tl.load(kv_slots + row) < first_slot, 0, row), at < EXPERTS
    logit = _logits(parts, source, at, inside, num_rows, EXPERTS, PARTS, PIECES)
    if BIASED:
        logit += tl.load(bias + at, mask=inside, other=0.0).to(tl.float32)
    if BFLOAT16:
        logit = logit.to(tl.bfloat16).to(tl.float32)
    if FLOAT16:
        logit = logit.to(tl.float16).to(tl.float32)
    logit = tl.where(inside, logit, float("-inf"))
    if SCORING == "sigmoid":
        scores = 1.0 / (1.0 + tl.exp(-logit))
    else:
        exponentials = tl.exp(logit - tl.max(logit, 0))
        scores = exponentials / tl.sum(exponentials, 0)
    left = logit  # in the order of scores, and fewer of them are equal
    if SELECTED_BY_BIAS:
        left = scores + tl.load(selection_bias + at, mask=inside, other=float("-inf")).to(tl.float32)
    elif GROUPS > 1:
        left = tl.where(inside, scores, float("-inf"))
    if GROUPS > 1:
        left = _of_best_groups(left, at, EXPERTS // GROUPS, GROUPS, GROUP_SLOTS, TOP_GROUPS, BEST_OF_GROUP)
    chosen, values = tl.zeros((SLOTS,), dtype=tl.int32), tl.zeros((SLOTS,), dtype=tl.float32)
    for each in tl.static_range(TOP_K):
        best = tl.argmax(left, 0)
        if SCORING == "sparse_mixer":
            value = _share_of_near(logit, left, margin)
        else:
            value = tl.sum(tl.where(at == best, scores, 0.0), 0)
        chosen, values = tl.where(slot == each, best, chosen), tl.where(slot == each, value, values)
        left = tl.where(at == best, float("-inf"), left)
    if NORMALIZED:
        values = values / (tl.sum(values, 0) + least_sum)
    values = values * scale
    if SCALED:
        values = values * tl.load(expert_scale + chosen).to(tl.float32)
    tl.store(picks + row * TOP_K + slot, chosen, mask=slot < TOP_K)
    tl.store(weights + row * TOP_K + slot, values, mask=slot < TOP_K)


def route(
    x: Tensor, router: RouterWeights, experts: Experts, rows: int, kv_slots: Tensor, first_slot: int
) -> tuple[Tensor, Tensor]:
    """The experts [rows, top_k] of each row of x [padded rows, hidden], the best first, and their weights in float32.

    Of equal ones the first is taken. Logits are rounded to the dtype of x, but for a matrix in pieces. Padding, whose
    slots are before `first_slot`, goes where row 0 goes, so that no expert is read for it alone.
    """
    pieces, count, shape = len(router.matrix) // router.experts, router.experts, (rows, experts.top_k)
    parts = linear_parts(x, [router.matrix], blocks_of(router.matrix), rows)
    picks, weights = parts.new_empty(shape, dtype=torch.int64), parts.new_empty(shape)
    bias, selection, scale = router.bias, router.selection_bias, router.expert_scale
    vectors = (parts if each is None else each for each in (bias, selection, scale))  # pointers that are not read
    _route[(rows,)](
        parts, *vectors, kv_slots, picks, weights, rows, first_slot, experts.least_sum, experts.scale,
        experts.margin,
        EXPERTS=count, PADDED=power_of_two(count), PARTS=len(parts), PIECES=pieces, TOP_K=experts.top_k,
        SLOTS=power_of_two(experts.top_k), SCORING=experts.scoring, NORMALIZED=experts.is_normalized,
        BIASED=bias is not None, SELECTED_BY_BIAS=selection is not None, SCALED=scale is not None,
        GROUPS=experts.groups, GROUP_SLOTS=power_of_two(experts.groups), TOP_GROUPS=experts.top_groups,
        BEST_OF_GROUP=experts.best_of_group, BFLOAT16=pieces == 1 and x.dtype == torch.bfloat16,
        FLOAT16=pieces == 1 and x.dtype == torch.float16, num_warps=1,
    )  # fmt: skip
    return picks, weights
