"""Packed weights: the numbers of a GGUF file's blocks, in products and row by row, bit for bit as if expanded."""

import gguf
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from gguf import GGML_QUANT_SIZES
from gguf import GGMLQuantizationType as Q
from torch.nn import Parameter

from gguf_blocks import PLACES, put_scales
from saltus.kernels import native
from saltus.kernels.batch_invariant_ops import linear
from saltus.kernels.model_weights import describe_weights
from saltus.kernels.native import processor
from saltus.kernels.packed_blocks import PACKED_FORMATS, packed_bytes
from saltus.kernels.packed_weight import PackedWeight, dequantize_blocks, kernel_arguments

needs_kernels = pytest.mark.skipif(native.load_kernels() is None, reason="no compiled kernels")
each_format = pytest.mark.parametrize("format", PACKED_FORMATS, ids=lambda format: format.name)


def random_blocks(format: Q, rows: int, columns: int) -> torch.Tensor:
    """Any bytes, with scales that are finite: some subnormal, some zero, some negative; of MXFP4, of any usual size."""
    weights, size = GGML_QUANT_SIZES[format]
    random = np.random.default_rng(int(format))
    blocks = random.integers(0, 256, (rows * columns // weights, size), dtype=np.uint8)
    if format is Q.MXFP4:
        blocks[:, 0] = random.integers(100, 130, len(blocks))
        blocks[::7] = 0
    for at in PLACES[format]:
        scales = random.normal(0, 0.01, len(blocks)).astype(np.float16)
        scales[::7], scales[1::7] = -0.0, 6e-8
        put_scales(blocks, format, at, scales)
    return torch.from_numpy(blocks.reshape(rows, -1))


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and torch.equal(a.view(torch.int16), b.view(torch.int16))


def check_expansion(format: Q, columns: int) -> None:
    blocks = random_blocks(format, 37, columns)
    own = torch.from_numpy(np.array(gguf.quants.dequantize(blocks.numpy(), format))).bfloat16()
    assert same_bits(dequantize_blocks(blocks, format), own)
    rows = torch.tensor([[36, 0], [5, 5]])
    assert same_bits(PackedWeight.from_blocks(blocks, format).dequantize(rows), own[rows])


def check_products(format: Q, outputs: int) -> None:
    weight = PackedWeight.from_blocks(random_blocks(format, outputs, 768), format)
    plain, bias = weight.dequantize(), torch.randn(outputs).bfloat16()
    for rows in (1, 2, 3, 5, 6, 7, 8, 13, 16, 33, 64):
        x = torch.randn(rows, 768).bfloat16()
        together = linear(x, [weight, plain, weight], [None, bias, bias])
        apart = linear(x, [plain, plain, plain], [None, bias, bias])
        assert all(same_bits(a, b) for a, b in zip(together, apart, strict=True)), rows


def check_eight_bit_floats() -> None:
    """All of them, times scales of either sign and of many sizes."""
    random = np.random.default_rng(0)
    codes = random.integers(0, 256, (43, 768), dtype=np.uint8)
    codes[:, :256] = np.arange(256)
    codes[codes & 127 == 127] = 0  # no numbers
    floats = torch.from_numpy(codes).view(torch.float8_e4m3fn)
    scales = torch.from_numpy(random.normal(0, 1, (43, 6)) * 10.0 ** random.integers(-12, 2, (43, 6))).float()
    weight = PackedWeight.from_eight_bit_floats(floats, scales)
    plain = (floats.float() * scales.repeat_interleave(128, 1)).bfloat16()
    assert same_bits(weight.dequantize(), plain)
    assert same_bits(weight.dequantize(torch.tensor([42, 0])), plain[[42, 0]])
    for rows in (1, 2, 5, 7, 16, 33):
        x = torch.randn(rows, 768).bfloat16()
        assert same_bits(*(linear(x, [each], [None])[0] for each in (weight, plain))), rows


@needs_kernels
def test_eight_bit_floats_times_their_scales_are_rounded_once():
    check_eight_bit_floats()


@needs_kernels
@each_format
@pytest.mark.parametrize("columns", [256, 768, 2304])
def test_blocks_expand_to_the_numbers_of_ggufs_own_dequantiser(format, columns):
    check_expansion(format, columns)


@needs_kernels
@each_format
@pytest.mark.parametrize("outputs", [64, 43])
def test_products_are_those_of_the_expanded_weights(format, outputs):
    check_products(format, outputs)


@each_format
def test_without_kernels_the_numbers_are_the_same(format, monkeypatch):
    blocks = random_blocks(format, 5, 256)
    found = dequantize_blocks(blocks, format)
    monkeypatch.setattr(native, "load_kernels", lambda: None)
    assert same_bits(dequantize_blocks(blocks, format), found)


@needs_kernels
def test_a_packed_weight_behaves_as_the_matrix_that_it_stands_for():
    weight = PackedWeight.from_blocks(random_blocks(Q.Q4_1, 40, 64), Q.Q4_1)
    parameter, plain = Parameter(weight, requires_grad=False), weight.dequantize()
    assert (parameter.shape, parameter.dtype, parameter.ndim, len(parameter)) == ((40, 64), torch.bfloat16, 2, 40)
    assert parameter.nbytes == 40 * 2 * 20, "two blocks of 20 bytes a row"
    tokens = torch.tensor([[3, 39], [0, 3]])
    assert same_bits(F.embedding(tokens, parameter), plain[tokens])
    assert same_bits(parameter[tokens[0]], plain[tokens[0]])
    assert same_bits(parameter[5:7], plain[5:7])
    assert same_bits(parameter.detach().float().bfloat16(), plain)
    x = torch.randn(3, 64).bfloat16()
    assert same_bits(F.linear(x, parameter), linear(x, [plain], [None])[0])
    assert torch.equal(x @ parameter.T, x @ plain.T)
    assert F.linear(x[:0], parameter).shape == (0, 40), "what no kernel computes is computed by torch"
    assert same_bits(parameter[torch.tensor([-1, 2])], plain[[-1, 2]])
    for row in (40, -41):
        with pytest.raises(IndexError, match="a row of 40"):
            parameter[torch.tensor([row])]
    for change in (weight.mul_, weight.copy_, weight.add_):
        with pytest.raises(TypeError, match="packed weights cannot be changed in place"):
            change(torch.zeros(40, 64))


@needs_kernels
@each_format
@pytest.mark.parametrize("arithmetic", ["bf16", "int8"])
def test_the_matrices_of_a_stack_follow_one_another(format, arithmetic):
    """Also where their outputs do not fill the last group of interleaved ones."""
    for outputs in (32, 43):
        blocks = random_blocks(format, 3 * outputs, 256).view(3, outputs, -1)
        stack = PackedWeight.from_blocks(blocks, format, arithmetic)
        parameter, x = Parameter(stack, requires_grad=False), torch.randn(2, 256).bfloat16()
        assert parameter.shape == (3, outputs, 256)
        assert stack.nbytes == 3 * stack.matrix_bytes
        assert same_bits(parameter.float().bfloat16(), dequantize_blocks(blocks, format))
        for number in (0, 2, -1):
            alone = PackedWeight.from_blocks(blocks[number], format, arithmetic)
            matrix = parameter[number]
            assert isinstance(matrix, PackedWeight)
            assert matrix.rows.data_ptr() == stack.rows.data_ptr() + number % 3 * stack.matrix_bytes
            assert same_bits(matrix.dequantize(), alone.dequantize())
            assert same_bits(F.linear(x, matrix), F.linear(x, alone))
    with pytest.raises(IndexError):
        parameter[3]


@needs_kernels
@pytest.mark.parametrize("format", [Q.Q4_0, Q.Q6_K, Q.MXFP4], ids=lambda format: format.name)
@pytest.mark.parametrize("arithmetic", ["bf16", "int8"])
def test_stacks_and_concatenated_outputs_stay_packed(format, arithmetic):
    blocks = random_blocks(format, 4 * 32, 256).view(4, 32, -1)
    one, two, three, four = (PackedWeight.from_blocks(each, format, arithmetic) for each in blocks)
    stacks = [torch.stack([one, two]), torch.stack([three, four])]
    for made, of in (
        (stacks[0], blocks[:2]), (torch.cat(stacks, dim=1), torch.cat([blocks[:2], blocks[2:]], 1)),
        (torch.cat([one, two]), blocks[:2].flatten(0, 1)),
    ):  # fmt: skip
        expected = PackedWeight.from_blocks(of.contiguous(), format, arithmetic)
        assert isinstance(made, PackedWeight)
        assert made.shape == expected.shape
        assert torch.equal(made.rows, expected.rows)
    whole = torch.cat([dequantize_blocks(each, format) for each in blocks[:2]], 1)
    assert same_bits(torch.cat([one, two], dim=1), whole), "expanded, since rows end elsewhere"


@needs_kernels
def test_a_flipped_stack_is_the_transposed_matrices_of_the_same_blocks():
    stack = PackedWeight.from_blocks(random_blocks(Q.MXFP4, 3 * 32, 64).view(3, 32, -1), Q.MXFP4, "int8")
    flipped, plain = stack.flipped(), stack.dequantize()
    assert flipped.shape == (3, 64, 32)
    assert same_bits(flipped.float().bfloat16(), plain.mT)
    assert torch.equal(flipped[1] + 0, plain[1].T)
    assert torch.equal(flipped.flipped().rows, stack.rows)
    with pytest.raises(AssertionError, match="kernels read"):
        kernel_arguments(flipped)


@needs_kernels
def test_views_of_a_packed_weight_are_had_in_inference_mode():
    stack = PackedWeight.from_blocks(random_blocks(Q.Q8_0, 3 * 32, 64).view(3, 32, -1), Q.Q8_0, "int8")
    plain = stack.dequantize()
    with torch.inference_mode():
        assert isinstance(stack[1], PackedWeight)
        assert torch.equal(stack.transpose(1, 2) + 0, plain.mT)
        assert torch.equal(stack[:, :5] + 0, plain[:, :5])
        assert torch.equal(stack.detach() + 0, plain)


@needs_kernels
@each_format
@pytest.mark.parametrize("arithmetic", ["bf16", "int8"])
def test_rows_begin_where_the_bytes_of_those_before_them_end(format, arithmetic):
    blocks = random_blocks(format, 48, 512)
    weight = PackedWeight.from_blocks(blocks, format, arithmetic)
    at = packed_bytes(weight.kernel_format, 16, 512)
    later = PackedWeight.from_blocks(blocks[16:], format, arithmetic)
    assert torch.equal(weight.rows.flatten()[at:], later.rows.flatten())
    assert packed_bytes(weight.kernel_format, 48, 512) == weight.matrix_bytes == weight.nbytes


@needs_kernels
def test_gradients_pass_through_a_packed_weight():
    weight = PackedWeight.from_blocks(random_blocks(Q.Q8_0, 40, 64), Q.Q8_0)
    found = []
    for one in (weight, weight.dequantize()):
        x = torch.linspace(-1, 1, 128).view(2, 64).bfloat16().requires_grad_()
        F.linear(x, Parameter(one, requires_grad=False)).sum().backward()
        found.append(x.grad)
    assert torch.equal(*found)


@needs_kernels
def test_what_a_model_is_stored_in_is_named_by_size():
    model = torch.nn.ModuleList([torch.nn.Linear(64, 40).bfloat16(), torch.nn.Linear(64, 99)])
    model[0].weight = Parameter(PackedWeight.from_blocks(random_blocks(Q.Q4_1, 40, 64), Q.Q4_1), requires_grad=False)
    assert describe_weights(model) == "float32, Q4_1"


@needs_kernels
def test_the_matrix_unit_is_used_where_it_may_be_and_can_be_turned_off(monkeypatch):
    """With and without it the sums differ in their order: by the rounding of float32, which bfloat16 mostly hides."""
    x, weight = torch.randn(40, 576).bfloat16(), PackedWeight.from_blocks(random_blocks(Q.Q4_1, 960, 576), Q.Q4_1)
    usual = linear(x, [weight], [None])[0]
    monkeypatch.setenv("SALTUS_AMX", "0")
    native.load_kernels.cache_clear()
    try:
        without = linear(x, [weight], [None])[0]
    finally:
        native.load_kernels.cache_clear()
        monkeypatch.delenv("SALTUS_AMX")
    assert torch.allclose(usual.float(), without.float(), rtol=0.01, atol=0.01 * float(without.float().std()))
    assert torch.equal(usual, without) != processor.request_amx(processor.processor_features())


@pytest.mark.slow
@needs_kernels
@pytest.mark.usefixtures("instruction_set")
def test_kernels_of_other_processors_expand_to_the_same_numbers():
    for format in PACKED_FORMATS:
        check_expansion(format, 768)
        check_products(format, 43)
    check_eight_bit_floats()


@pytest.mark.parametrize("size", [1.0, 1e-15, 1e-19])  # the last has products and sums that are subnormal numbers
def test_a_row_alone_and_among_others_gives_the_same_bits(size):
    weight = (torch.randn(43, 100) * size).bfloat16()
    rows = (torch.randn(40, 100) * size).bfloat16()
    alone = torch.cat([linear(row[None], [weight], [None])[0] for row in rows])
    for count in (2, 3, 7, 40):
        assert same_bits(linear(rows[:count], [weight], [None])[0], alone[:count])
