"""Packed weights for GPUs: the numbers of the CPU's, and products by our kernels in Triton's interpreter."""

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from gguf import GGML_QUANT_SIZES
from gguf.quants import dequantize

from gguf_blocks import PLACES, put_scales
from saltus.kernels import native
from saltus.kernels.packed_weight import PackedWeight
from saltus.loading.quantised_numbers import FourBitFloats
from saltus.models.cuda import linear_kernels
from saltus.models.cuda.packed_planes import LAYOUTS, Q
from saltus.models.cuda.packed_weight import GPUPackedWeight, can_pack, joined_packed

CUDA = torch.cuda.is_available()
DEVICE, DTYPE, BOUND = ("cuda", torch.bfloat16, 0.01) if CUDA else ("cpu", torch.float32, 1e-6)
pytestmark = [
    pytest.mark.slow, pytest.mark.skipif(native.load_kernels() is None, reason="packed weights need compiled kernels")
]  # fmt: skip


def blocks(format: Q, outputs: int, inputs: int, seed: int = 0) -> torch.Tensor:
    """Blocks whose bytes are random, with scales that are numbers."""
    generator = torch.Generator().manual_seed(seed)
    weights, size = GGML_QUANT_SIZES[format]
    made = torch.randint(0, 256, (outputs, inputs // weights, size), dtype=torch.uint8, generator=generator)
    for start in PLACES[format]:
        scales = torch.randn(made.shape[:2], generator=generator) * 0.01
        put_scales(made.flatten(0, 1).numpy(), format, start, scales.flatten().numpy())
    if format is Q.MXFP4:
        made[:, :, 0] = made[:, :, 0] % 20 + 110
    return made.flatten(1)


def floats8(span: int, outputs: int, inputs: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """All numbers of E4M3, in a random order, and scales [outputs, spans] of either sign."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 256, (outputs, inputs), dtype=torch.uint8, generator=generator)
    codes[codes & 127 == 127] = 0  # no numbers
    return codes.view(torch.float8_e4m3fn), torch.randn(outputs, -(-inputs // span), generator=generator) * 0.01


def cpu_weight(format: Q, outputs: int, inputs: int, seed: int = 0) -> tuple[PackedWeight, torch.Tensor]:
    """A weight in a format, and its numbers in float32."""
    if format is Q.NVFP4:
        generator = torch.Generator().manual_seed(seed)
        codes, bits = (
            torch.randint(0, end, (outputs, inputs // per), dtype=torch.uint8, generator=generator)
            for end, per in ((16, 1), (127, 16))
        )
        four = FourBitFloats(codes, bits.view(torch.float8_e4m3fn), torch.tensor([0.00123]))
        return four.pack("int8"), four.expand()
    made = blocks(format, outputs, inputs, seed)
    return PackedWeight.from_blocks(made, format, "int8"), torch.from_numpy(np.array(dequantize(made.numpy(), format)))


def packed(format: Q | int, outputs: int, inputs: int, seed: int = 0) -> tuple[GPUPackedWeight, torch.Tensor]:
    """A weight in a format, or of 8-bit floats with a scale for so many inputs, and its numbers in float32."""
    if not isinstance(format, Q):
        floats, scales = floats8(format, outputs, inputs, seed)
        numbers = floats.float() * scales.repeat_interleave(format, 1)[:, :inputs]
        return GPUPackedWeight.from_packed(GPUPackedWeight.from_floats(floats, scales, format), DEVICE), numbers
    weight, numbers = cpu_weight(format, outputs, inputs, seed)
    return GPUPackedWeight.from_packed(weight, DEVICE), numbers


@pytest.mark.parametrize("format", LAYOUTS, ids=lambda format: format.name)
@pytest.mark.parametrize(("outputs", "inputs"), [(48, 768), (100, 320)])  # outputs that fill no tile; a cut plane
def test_numbers_are_those_of_the_cpus_weight(format, outputs, inputs):
    if inputs % (256 if format is Q.NVFP4 else GGML_QUANT_SIZES[format][0]):
        pytest.skip("rows are whole blocks")
    weight, _ = cpu_weight(format, outputs, inputs)
    assert torch.equal(GPUPackedWeight.from_packed(weight, DEVICE).dequantize().cpu(), weight.dequantize())


@pytest.mark.parametrize("span", [64, 128, 320])  # inputs of a scale; 128: the last one has fewer
def test_8_bit_floats_times_scales_are_rounded_once(span):
    weight, numbers = packed(span, 100, 320)
    assert torch.equal(weight.dequantize().cpu(), numbers.to(torch.bfloat16))
    scales = -(-320 // span) * 4
    assert weight.nbytes == 128 * (320 + scales)


@pytest.mark.parametrize("format", [*LAYOUTS, 64, 192, 512], ids=lambda format: getattr(format, "name", format))
def test_a_product_is_right_and_its_rows_do_not_depend_on_their_number(format):
    weight, numbers = packed(format, 100, 512)
    x = torch.randn(128, 512, generator=torch.Generator().manual_seed(1)).to(DEVICE, DTYPE)
    blocks = linear_kernels.blocks_of(weight)._replace(parts=3)  # of 8 steps
    whole = linear_kernels.linear_parts(x, [weight], blocks, 40)
    expected = x[:40].double().cpu() @ numbers.double().T
    assert ((whole.double().sum(0).cpu() - expected).norm() / expected.norm()) < BOUND
    for rows in (1, 17):
        assert torch.equal(linear_kernels.linear_parts(x, [weight], blocks, rows), whole[:, :rows])


@pytest.mark.gpu
@pytest.mark.parametrize("format", [*LAYOUTS, 128], ids=lambda format: getattr(format, "name", format))
def test_large_products_are_those_of_expanded_weights_every_time(format):
    """What is written too early to memory or registers that a product reads shows in large ones only."""
    weight, _ = packed(format, 4096, 4096)
    x = torch.randn(256, 4096, generator=torch.Generator().manual_seed(1)).to(DEVICE, DTYPE)
    expected = linear_kernels.product(x, weight.dequantize(), 256).float()
    first = linear_kernels.product(x, weight, 256)
    assert (first.float() - expected).norm() < 1e-3 * expected.norm()
    for rows in (256, 128, 64, 16):
        for _ in range(20):
            assert torch.equal(linear_kernels.product(x[:rows], weight, rows), first[:rows])


def test_weights_of_several_formats_share_a_product():
    several = [packed(Q.Q4_K, 64, 256, 0), packed(Q.Q4_K, 128, 256, 1), packed(Q.Q6_K, 64, 256, 2)]
    several += [packed(128, 64, 256, 3), packed(128, 64, 256, 4)]
    dense = torch.randn(32, 256, generator=torch.Generator().manual_seed(3))
    numbers = torch.cat([*(each for _, each in several), dense])
    weights = joined_packed([*(weight for weight, _ in several), dense.to(DEVICE, DTYPE)])
    assert [len(weight) for weight in weights] == [192, 64, 128, 32]
    x = torch.randn(16, 256, generator=torch.Generator().manual_seed(4)).to(DEVICE, DTYPE)
    bias = torch.randn(len(numbers), generator=torch.Generator().manual_seed(5)).to(DEVICE, DTYPE)
    parts = linear_kernels.linear_parts(x, weights, linear_kernels.blocks_of(*weights), 16, bias)
    expected = x.double().cpu() @ numbers.double().T + bias.double().cpu()
    assert ((parts.double().sum(0).cpu() - expected).norm() / expected.norm()) < BOUND
    for weight, own in [*several[:2], *several[3:]]:  # views of joined ones
        assert torch.equal(weight.dequantize().cpu(), own.to(torch.bfloat16))
        found = linear_kernels.product(x, weight, 16).double().cpu()
        assert (found - x.double().cpu() @ own.double().T).norm() < BOUND * expected.norm()


def test_gate_and_up_of_packed_weights_are_activated_as_dense_ones_are():
    (gate, gates), (up, ups) = packed(Q.Q8_0, 64, 128, 0), packed(Q.Q8_0, 64, 128, 1)
    x = torch.randn(16, 128, generator=torch.Generator().manual_seed(2)).to(DEVICE, DTYPE)
    out, expected = x.new_empty(16, 64), x.new_empty(16, 64)
    blocks, bias = linear_kernels.blocks_of(gate, parts=False), torch.linspace(-1, 1, 128, device=DEVICE, dtype=DTYPE)
    linear_kernels.gate_and_up(x, joined_packed([gate, up]), out, blocks, 16, bias=bias)
    dense = [each.to(DEVICE, DTYPE) for each in (gates, ups)]
    linear_kernels.gate_and_up(x, dense, expected, blocks, 16, bias=bias)
    assert (out.float() - expected.float()).norm() < BOUND * expected.float().norm()


def test_other_operations_expand_it():
    weight, numbers = packed(Q.Q4_0, 70, 64)
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(1)).to(DEVICE, torch.bfloat16)
    expanded = numbers.to(torch.bfloat16).to(DEVICE)
    assert weight.shape == (70, 64)
    assert weight.dtype == torch.bfloat16
    assert weight.nbytes < 128 * 64
    assert torch.equal(weight @ x.T, expanded @ x.T)
    assert torch.equal(weight.float(), expanded.float())
    if not CUDA:  # in float32 a linear layer is one of them
        assert torch.equal(torch.nn.functional.linear(x.float(), weight.float()), x.float() @ expanded.float().T)


def test_gradients_pass_through_it():
    weight, numbers = packed(Q.Q4_0, 70, 64)
    expanded, grads = numbers.to(torch.bfloat16).to(DEVICE), []
    for each in (weight, expanded):
        x = torch.ones(3, 64, dtype=torch.bfloat16, device=DEVICE, requires_grad=True)
        torch.nn.functional.linear(x, each).float().pow(2).sum().backward()
        grads.append(x.grad)
    assert torch.equal(*grads)


def test_what_the_kernels_do_not_read_is_not_packed():
    assert not can_pack(PackedWeight.from_blocks(blocks(Q.Q4_0, 16, 96), Q.Q4_0, "int8"))  # half a step
    assert not can_pack(PackedWeight.from_blocks(blocks(Q.Q4_0, 16, 64), Q.Q4_0, "bf16"))
    stack = blocks(Q.Q4_0, 32, 64).unflatten(0, (2, 16))
    assert not can_pack(PackedWeight.from_blocks(stack, Q.Q4_0, "int8"))
