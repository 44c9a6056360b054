"""Products of packed weights by 8-bit activations: those of the definition, bit for bit, on every build."""

import ctypes

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES
from gguf import GGMLQuantizationType as Q
from gguf.quants import dequantize
from test_packed import random_blocks, same_bits

from reference_integer_products import E2M1, product, product_of
from saltus.kernels import native
from saltus.kernels.batch_invariant_ops import linear
from saltus.kernels.native import structs
from saltus.kernels.packed_blocks import PACKED_FORMATS
from saltus.kernels.packed_weight import PackedWeight, dequantize_blocks

pytestmark = pytest.mark.skipif(native.load_kernels() is None, reason="no compiled kernels")
INTEGER_FORMATS = [format for format in PACKED_FORMATS if format is not Q.F16]
each_format = pytest.mark.parametrize("format", INTEGER_FORMATS, ids=lambda format: format.name)
INTEGERS = {Q.Q4_0: (2, 18), Q.Q4_1: (4, 20), Q.Q5_0: (2, 22), Q.Q5_1: (4, 24), Q.Q8_0: (2, 34), Q.Q2_K: (16, 80),
            Q.Q3_K: (0, 96), Q.Q4_K: (16, 144), Q.Q5_K: (16, 176), Q.Q6_K: (0, 192), Q.IQ4_NL: (2, 18),
            Q.IQ4_XS: (8, 136), Q.MXFP4: (1, 17), Q.TQ1_0: (0, 52), Q.TQ2_0: (0, 64), Q.IQ1_S: (2, 34),
            Q.IQ1_M: (0, 48), Q.IQ2_XXS: (2, 66), Q.IQ2_XS: (2, 66), Q.IQ2_S: (2, 74), Q.IQ3_XXS: (2, 66),
            Q.IQ3_S: (2, 106)}  # fmt: skip


def rows_of(count: int, inputs: int) -> torch.Tensor:
    """Activations with outliers, and blocks of zeros."""
    x = np.random.default_rng(count).standard_t(3, (count, inputs))
    x[:, 32:64] = 0
    return torch.from_numpy(x).bfloat16()


def check(format: Q, outputs: int = 43, inputs: int = 1280, counts: tuple[int, ...] = (*range(1, 14), 50)) -> None:
    blocks = random_blocks(format, outputs, inputs)
    weight = PackedWeight.from_blocks(blocks, format, "int8")
    x = rows_of(max(counts), inputs)
    wanted = torch.from_numpy(product(x.float().numpy(), blocks.numpy(), format)).bfloat16()
    for count in counts:
        assert same_bits(linear(x[:count], [weight], [None])[0], wanted[:count]), count


@each_format
def test_products_are_those_of_the_definition(format):
    check(format)
    check(format, 16, 256, (1, 4, 6, 7))


def check_greatest_integers(format: Q) -> None:
    """Of weights and of activations, of equal and of other signs, which sums of 16 bits have to hold."""
    blocks = random_blocks(format, 35, 256).view(35, -1, GGML_QUANT_SIZES[format][1])
    first, last = INTEGERS[format]
    blocks[:, :, first:last] = torch.tensor([0, 0xFF, 0x77, 0x7F, 0x80], dtype=torch.uint8).repeat(7)[:, None, None]
    signs = [
        torch.tensor(pattern).repeat(256 // len(pattern)) for pattern in ([1.0], [-1.0], [1.0, -1], [1.0, 1, -1, -1])
    ]
    x, blocks = torch.stack([*signs, *signs[:3]]).bfloat16(), blocks.view(35, -1)
    wanted = torch.from_numpy(product(x.float().numpy(), blocks.numpy(), format)).bfloat16()
    for count in (1, 4, 5, 6, 7):
        assert same_bits(
            linear(x[:count], [PackedWeight.from_blocks(blocks, format, "int8")], [None])[0], wanted[:count]
        ), count


@each_format
def test_products_of_the_greatest_integers_do_not_overflow(format):
    check_greatest_integers(format)


@each_format
def test_the_numbers_of_interleaved_weights_are_those_of_the_file(format):
    blocks = random_blocks(format, 37, 768)
    weight = PackedWeight.from_blocks(blocks, format, "int8")
    assert weight.shape == (37, 768)
    wanted = dequantize_blocks(blocks, format)
    assert same_bits(weight.dequantize(), wanted)
    rows = torch.tensor([[36, 0], [5, 5]])
    assert same_bits(weight.dequantize(rows), wanted[rows])


def check_exponents_of_mxfp4() -> None:
    blocks = random_blocks(Q.MXFP4, 32, 512).view(512, 17)
    blocks[:, 0] = torch.arange(512) % 256
    with np.errstate(over="ignore"):
        wanted = torch.from_numpy(dequantize(blocks.numpy(), Q.MXFP4)).bfloat16().view(32, 512)
    wanted *= wanted.abs() >= 2.0**-126  # as everywhere in the kernels, subnormal results are zeros
    blocks = blocks.view(32, -1)
    for arithmetic in ("int8", "bf16"):
        assert same_bits(PackedWeight.from_blocks(blocks, Q.MXFP4, arithmetic).dequantize(), wanted)
    low = torch.cat([blocks[:8], blocks[16:24]])  # exponents below 128, subnormal scales among them
    x = rows_of(5, 512)
    for size in (1.0, 2.0**100):
        rows = (x.float() * size).bfloat16()
        found = linear(rows, [PackedWeight.from_blocks(low, Q.MXFP4, "int8")], [None])[0]
        assert same_bits(found, torch.from_numpy(product(rows.float().numpy(), low.numpy(), Q.MXFP4)).bfloat16())


def test_scales_of_mxfp4_are_powers_of_two_from_the_least_to_the_greatest():
    check_exponents_of_mxfp4()


def check_nvfp4(counts: tuple[int, ...]) -> None:
    """8-bit floats of every value are scales, and the greatest integers meet the greatest activations."""
    random = np.random.default_rng(0)
    codes, bits = (random.integers(0, end, shape, np.uint8) for end, shape in ((16, (43, 768)), (127, (43, 48))))
    codes[:3], bits[:3], of_all = 7, np.arange(144).reshape(3, 48) % 127, torch.tensor([0.0123])
    scales = torch.from_numpy(bits).view(torch.float8_e4m3fn)
    arguments = torch.from_numpy(codes), scales, of_all
    numbers = E2M1[codes].reshape(43, 48, 16)
    own = (scales.float() * (of_all * 0.5)).numpy()
    expanded = torch.from_numpy((numbers * own[..., None]).reshape(43, 768)).bfloat16()
    for arithmetic in ("bf16", "int8"):
        assert same_bits(PackedWeight.from_four_bit_floats(*arguments, arithmetic).dequantize(), expanded)
    x = rows_of(max(counts), 768)
    x[0] = 1
    wanted = torch.from_numpy(product_of(x.float().numpy(), numbers, own, None, 16)).bfloat16()
    for count in counts:
        found = linear(x[:count], [PackedWeight.from_four_bit_floats(*arguments, "int8")], [None])[0]
        assert same_bits(found, wanted[:count]), count


def test_8_bit_floats_are_scales_of_nvfp4():
    check_nvfp4((1, 4, 6, 7, 13, 50))


def test_weights_of_both_arithmetics_share_a_call():
    x, bias = rows_of(3, 256), torch.randn(43).bfloat16()
    blocks = random_blocks(Q.Q4_K, 43, 256)
    integers, numbers = PackedWeight.from_blocks(blocks, Q.Q4_K, "int8"), PackedWeight.from_blocks(blocks, Q.Q4_K)
    together = linear(x, [integers, numbers, integers], [None, bias, bias])
    for out, weight, b in zip(together, (integers, numbers, integers), (None, bias, bias), strict=True):
        assert same_bits(out, linear(x, [weight], [b])[0])


def test_a_bias_is_added_to_a_sum_before_it_is_rounded():
    """Of whole groups of outputs, and of the last ones."""
    x, bias, blocks = rows_of(3, 256), torch.randn(43).bfloat16(), random_blocks(Q.Q8_0, 43, 256)
    found = linear(x, [PackedWeight.from_blocks(blocks, Q.Q8_0, "int8")], [bias])[0]
    sums = torch.from_numpy(product(x.float().numpy(), blocks.numpy(), Q.Q8_0))
    assert same_bits(found, (sums + bias.float()).bfloat16())


@pytest.mark.parametrize("format", [Q.Q4_0, Q.Q4_1, Q.Q2_K], ids=lambda format: format.name)
@pytest.mark.parametrize("size", [1e-40, 1.5e-38, 3.6e-37, 4e-37])
def test_inputs_too_small_to_have_an_inverse_are_zeros(format, size):
    blocks, x = random_blocks(format, 32, 256), rows_of(3, 256)
    x[1, 32:64] = torch.linspace(-size, size, 32).bfloat16()
    x[2] = size
    found = linear(x, [PackedWeight.from_blocks(blocks, format, "int8")], [None])[0]
    wanted = torch.from_numpy(product(x.float().numpy(), blocks.numpy(), format)).bfloat16()
    assert same_bits(found, wanted * (wanted.abs() >= 2.0**-126))
    assert size > 3.7e-37 or not found[2].any()


def test_what_is_not_finite_stays_so_and_in_its_row():
    weight, x = PackedWeight.from_blocks(random_blocks(Q.Q4_1, 32, 64), Q.Q4_1, "int8"), rows_of(5, 64)
    whole = linear(x, [weight], [None])[0]
    x[1, 3], x[3, 40] = float("nan"), float("inf")
    out = linear(x, [weight], [None])[0]
    assert not out[[1, 3]].isfinite().any()
    assert same_bits(out[[0, 2, 4]], whole[[0, 2, 4]])


@pytest.mark.slow
@pytest.mark.usefixtures("instruction_set")
def test_kernels_of_other_processors_give_the_same_bits():
    """By tiles of rows of every height, also several together, and of an odd number of blocks that share scales."""
    for format in INTEGER_FORMATS:
        check(format, counts=(*range(1, 51), 75))
        if GGML_QUANT_SIZES[format][0] == 32:
            check(format, 16, 800, (5, 16, 17))
        check_greatest_integers(format)
    check_exponents_of_mxfp4()
    check_nvfp4((*range(1, 14), 50))


def test_norms_gates_and_sums_around_a_product_are_those_of_bfloat16():
    """The sum may be written over what is added, as in a residual stream."""
    weight = PackedWeight.from_blocks(random_blocks(Q.Q4_1, 64, 64), Q.Q4_1, "int8")
    x, gate, add = rows_of(9, 64), rows_of(10, 64)[:9].clone(), rows_of(11, 64)[:9].clone()
    norm = torch.linspace(0.5, 1.5, 64).bfloat16()
    kernel = native.kernel("linear", torch.bfloat16, torch.device("cpu"))
    assert kernel is not None

    def run(**given: torch.Tensor) -> torch.Tensor:
        out = given.get("add", torch.empty(9, 64, dtype=torch.bfloat16))
        struct = structs.Linear(x=x.data_ptr(), rows=9, inputs=64, count=1, epsilon=1e-5)
        struct.weight[0], struct.format[0] = weight.rows.data_ptr(), weight.kernel_format
        struct.out[0], struct.outs[0] = out.data_ptr(), 64
        for name, tensor in given.items():
            setattr(struct, name, tensor.data_ptr())
        assert kernel(ctypes.byref(struct)) == 0
        return out

    plain = linear(x, [weight], [None])[0]
    assert same_bits(run(add=add.clone()), plain + add)
    normed = torch.empty_like(x)
    struct = structs.Norm(x=x.data_ptr(), weight=norm.data_ptr(), out=normed.data_ptr(), rows=9, size=64, epsilon=1e-5)
    norm_kernel = native.kernel("norm", torch.bfloat16, torch.device("cpu"))
    assert norm_kernel is not None
    assert norm_kernel(ctypes.byref(struct)) == 0
    assert same_bits(run(norm=norm), linear(normed, [weight], [None])[0])
    gated = torch.nn.functional.silu(gate) * x
    assert (run(gate=gate) - linear(gated, [weight], [None])[0]).float().norm() < 0.02 * plain.float().norm()
