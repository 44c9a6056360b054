"""Products of each head's numbers by a matrix of its own: right, and of a row alone."""

import pytest
import torch
import torch.nn.functional as F
from test_kernels import DTYPES, normal, run, same
from torch import Tensor

from saltus.kernels import native
from saltus.kernels.native import structs
from saltus.kernels.packed_blocks import Q, quantized_blocks
from saltus.kernels.packed_weight import PackedWeight

__all__ = ["run"]
pytestmark = pytest.mark.skipif(native.load_kernels() is None, reason="no compiled kernels")
HEADS, INPUTS, TAIL = 3, 21, 8


def multiply(run, x: Tensor, weight: Tensor, tail: int) -> Tensor:
    """[rows, heads, outs + tail] of x [rows, heads, inputs + tail] by strides, and matrices [heads, outs, inputs]."""
    heads, outs, inputs = weight.shape
    if isinstance(weight, PackedWeight):
        laid, format, step = weight.rows, weight.kernel_format, weight.matrix_bytes
    else:
        panels, format, step = -(-outs // structs.PANEL), 0, 0
        laid = weight.new_full((heads, panels, inputs, structs.PANEL), float("nan"))  # what lies beyond is never stored
        for out in range(outs):
            laid[:, out // structs.PANEL, :, out % structs.PANEL] = weight[:, out]
    out = x.new_full((len(x), heads, outs + tail), float("nan"))
    run("per_head", structs.PerHead(
        x=x.data_ptr(), weight=laid.data_ptr(), out=out.data_ptr(), format=format, weight_step=step, rows=len(x),
        heads=heads, inputs=inputs, outs=outs, tail=tail, x_row=x.stride(0), x_head=x.stride(1), out_row=out.stride(0),
        out_head=out.stride(1),
    ))  # fmt: skip
    return out


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("outs", "tail"), [(5, 0), (64, TAIL), (131, TAIL)])
def test_each_head_has_its_own_matrix_and_a_row_does_not_see_others(run, dtype, outs, tail):
    wide = normal(13, HEADS, INPUTS + tail + 3).to(dtype)
    x, weight = wide[..., : INPUTS + tail], normal(HEADS, outs, INPUTS, seed=1).to(dtype)
    found = multiply(run, x, weight, tail)
    expected = torch.einsum("rhk,hnk->rhn", x[..., :INPUTS].double(), weight.double())
    bound = {torch.float32: 1e-6, torch.bfloat16: 4e-3, torch.float16: 5e-4}[dtype]
    assert (found[..., :outs].double() - expected).abs().max() < bound * expected.abs().max()
    assert torch.equal(found[..., outs:], x[..., INPUTS:])
    for rows in (slice(0, 1), slice(3, 7), slice(8, 13)):
        assert same(multiply(run, x[rows], weight, tail), found[rows])


@pytest.mark.parametrize("dtype", [torch.bfloat16])
@pytest.mark.parametrize("format", [Q.Q8_0, Q.Q4_1])
@pytest.mark.parametrize(("outs", "tail"), [(5, 0), (64, TAIL), (131, TAIL)])
def test_packed_matrices_of_heads_give_the_bits_of_the_product_of_each(run, dtype, format, outs, tail):
    inputs = 96
    x = normal(37, HEADS, inputs + tail + 3).to(dtype)[..., : inputs + tail]
    blocks = quantized_blocks(normal(HEADS, outs, inputs, seed=1), format)
    weight = PackedWeight.from_blocks(blocks, format, "int8")
    found = multiply(run, x, weight, tail)
    for head in range(HEADS):
        assert same(found[:, head, :outs], F.linear(x[:, head, :inputs].contiguous(), weight[head]))
    assert torch.equal(found[..., outs:], x[..., inputs:])
    for rows in (slice(0, 1), slice(3, 7), slice(8, 28)):
        assert same(multiply(run, x[rows], weight, tail), found[rows])
