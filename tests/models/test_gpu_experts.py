"""Mixtures of experts on a GPU: products of sorted pairs in Triton's interpreter, and whole models."""

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

from test_gpu_packed_weights import blocks
from test_gpu_packed_weights import packed as packed_weight

from saltus.kernels import native
from saltus.kernels.packed_weight import PackedWeight
from saltus.models.cuda.expert_kernels import SortedPairs, expert_product, sum_experts
from saltus.models.cuda.gpu_experts import gpu_experts_forward, llama4_experts_forward
from saltus.models.cuda.packed_planes import Q
from saltus.models.cuda.packed_weight import GPUPackedWeight, can_pack
from saltus.models.cuda.routing_kernels import RouterWeights, route
from saltus.models.decoder_description import Experts

CUDA = torch.cuda.is_available()
DEVICE, DTYPE, BOUND = ("cuda", torch.bfloat16, 0.01) if CUDA else ("cpu", torch.float32, 1e-6)
pytestmark = pytest.mark.slow


def drawn(*sizes: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(seed)).to(DEVICE, DTYPE)


def chosen(rows: int, count: int, experts: int, seed: int = 0) -> torch.Tensor:
    """Different experts of each row; some experts have most rows, some have none."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(rows, experts, generator=generator) * torch.linspace(1, 0.2, experts)
    scores[:, 1] = 0
    return scores.topk(count).indices.to(DEVICE)


@pytest.mark.parametrize(("rows", "count", "experts"), [(1, 1, 4), (5, 2, 4), (700, 3, 8)])
def test_pairs_are_sorted_by_expert(rows, count, experts):
    picks = chosen(rows, count, experts)
    pairs = SortedPairs.of(picks, experts)
    assert pairs.starts.tolist() == [int((picks < expert).sum()) for expert in range(experts + 1)]
    assert torch.equal(pairs.order.long(), picks.flatten().argsort(stable=True))


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("outputs", "inputs"), [(70, 48), (128, 192)])
def test_products_are_right_and_rows_do_not_depend_on_each_other(outputs, inputs, transposed):
    x, picks, stack = drawn(150, inputs), chosen(150, 2, 5), drawn(5, outputs, inputs, seed=1)
    given = stack.mT.contiguous() if transposed else stack
    biases = 10 * drawn(5, outputs, seed=3) if transposed else None
    whole = expert_product(x, given, SortedPairs.of(picks, 5), transposed, biases).unflatten(0, (150, 2))
    expected = torch.einsum("rk,rcnk->rcn", x.double(), stack[picks].double())
    expected += 0 if biases is None else biases[picks].double()
    assert (whole.double() - expected).norm() < BOUND * expected.norm()
    for rows in ([7], [3, 149, 20], range(100)):
        few = expert_product(x[rows], given, SortedPairs.of(picks[rows], 5), transposed, biases)
        assert torch.equal(few.unflatten(0, (-1, 2)), whole[rows])
    inner = whole.flatten(0, 1)
    back = drawn(5, 96, outputs, seed=2)
    of_pairs = expert_product(inner, back, SortedPairs.of(picks, 5))
    expected = torch.einsum("pk,pnk->pn", inner.double(), back[picks.flatten()].double())
    assert (of_pairs.double() - expected).norm() < BOUND * expected.norm()


@pytest.mark.skipif(native.load_kernels() is None, reason="packed weights need compiled kernels")
@pytest.mark.parametrize("format", [Q.Q4_K, Q.Q6_K, Q.Q8_0, Q.MXFP4], ids=lambda format: format.name)
def test_packed_stacks_give_the_products_of_their_matrices(format):
    packed = PackedWeight.from_blocks(blocks(format, 4 * 64, 256).unflatten(0, (4, 64)), format, "int8")
    assert can_pack(packed)
    assert not can_pack(packed.flipped())
    stack, x, picks = GPUPackedWeight.from_packed(packed, DEVICE), drawn(40, 256), chosen(40, 2, 4)
    assert stack.shape == (4, 64, 256)
    assert torch.equal(stack.dequantize().cpu(), packed.dequantize())
    biases = drawn(4, 64, seed=3)
    found = expert_product(x, stack, SortedPairs.of(picks, 4), biases=biases)
    assert torch.equal(expert_product(x[9:10], stack, SortedPairs.of(picks[9:10], 4), biases=biases), found[18:20])
    found -= biases[picks.flatten()]
    expected = expert_product(x, stack.dequantize().to(DTYPE), SortedPairs.of(picks, 4)).double()
    # float32 has more digits of a weight than the bfloat16 of `dequantize`
    assert (found.double() - expected).norm() < 4e-3 * expected.norm()


def test_stacks_of_8_bit_floats_are_made_of_matrices_and_give_their_products():
    halves = [[packed_weight(128, 64, 256, seed=2 * expert + half) for expert in range(4)] for half in range(2)]
    stack = torch.cat([torch.stack([weight for weight, _ in half]) for half in halves], 1)
    assert isinstance(stack, GPUPackedWeight)
    numbers = torch.cat([torch.stack([own for _, own in half]) for half in halves], 1)
    assert torch.equal(stack.dequantize().cpu(), numbers.to(torch.bfloat16))
    x, picks = drawn(40, 256), chosen(40, 2, 4)
    found = expert_product(x, stack, SortedPairs.of(picks, 4))
    expected = expert_product(x, numbers.to(DEVICE, DTYPE), SortedPairs.of(picks, 4)).double()
    assert (found.double() - expected).norm() < BOUND * expected.norm()
    assert torch.equal(expert_product(x[9:10], stack, SortedPairs.of(picks[9:10], 4)), found[18:20])


def test_stacks_of_outputs_that_fill_no_tile_are_not_packed():
    packed = PackedWeight.from_blocks(blocks(Q.Q4_0, 2 * 48, 64).unflatten(0, (2, 48)), Q.Q4_0, "int8")
    assert not can_pack(packed)


ROUTES = {
    "softmax": Experts("", "", 3),
    "normalised": Experts("", "", 3, is_normalized=True),
    "sigmoid": Experts("", "", 3, scoring="sigmoid", is_normalized=True, least_sum=0.5, scale=2.5),
    "a bias of logits": Experts("", "", 3, is_normalized=True),
    "a bias of choices": Experts("", "", 3, selection_bias="bias"),
    "scales": Experts("", "", 2, is_normalized=True, expert_scale="scale"),
    "groups": Experts("", "", 2, scoring="sigmoid", groups=3, top_groups=2, best_of_group=2, selection_bias="bias"),
    "groups by their best": Experts("", "", 1, groups=3, top_groups=1),
    "a matrix in float32": Experts("", "", 3),
}


def routed(logits: torch.Tensor, experts: Experts, selection_bias, scale) -> tuple[torch.Tensor, torch.Tensor]:
    """Experts and weights by the definition, of logits in float32."""
    scores = logits.sigmoid() if experts.scoring == "sigmoid" else logits.softmax(-1)
    choice = scores if selection_bias is None else scores + selection_bias
    grouped = choice.unflatten(-1, (experts.groups, -1))
    sums = grouped.sort(dim=-1, descending=True).values[..., : experts.best_of_group].sum(-1)
    best = sums.sort(dim=-1, descending=True, stable=True).indices[:, : experts.top_groups]
    stays = torch.zeros_like(sums, dtype=torch.bool).scatter(1, best, True)
    choice = grouped.where(stays[..., None], -torch.inf).flatten(1)
    picks = choice.sort(dim=-1, descending=True, stable=True).indices[:, : experts.top_k]
    weights = scores.gather(1, picks)
    if experts.is_normalized:
        weights = weights / (weights.sum(-1, keepdim=True) + experts.least_sum)
    weights = weights * experts.scale
    return picks, weights if scale is None else weights * scale[picks]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kind", ROUTES)
def test_rows_are_routed_by_the_definition(kind, dtype):
    experts = ROUTES[kind]
    x, matrix = drawn(16, 64).to(dtype), (drawn(6, 64, seed=1) / 4).to(dtype)
    matrix[4] = matrix[1]  # equal scores
    if kind == "a matrix in float32":
        matrix = matrix.float() + drawn(6, 64, seed=2).float() / 1000
    bias, selection, scale = (drawn(6, seed=3), drawn(6, seed=4), drawn(6, seed=5).abs())
    bias = bias if kind == "a bias of logits" else None
    selection = selection if experts.selection_bias else None
    scale = scale if experts.expert_scale else None
    slots = torch.tensor([300, 301, 302, 303, 0, 1, 304], device=DEVICE)  # two rows of padding, which go with row 0
    router = RouterWeights.of(matrix, dtype, bias, selection, scale)
    picks, weights = route(x, router, experts, len(slots), slots, 256)
    logits = x[[0, 1, 2, 3, 0, 0, 6]].double() @ matrix.double().T + (0 if bias is None else bias.double())
    logits = logits.to(matrix.dtype).float()  # of float32 they are not rounded
    expected = routed(logits, experts, selection, scale)
    assert torch.equal(picks, expected[0])
    torch.testing.assert_close(weights, expected[1])
    for row in (1, 6):
        alone = route(x[row : row + 1].expand(16, -1).contiguous(), router, experts, 1, slots[:1], 256)
        assert all(torch.equal(one[0], own[row]) for one, own in zip(alone, (picks, weights), strict=True))


def test_experts_are_summed_by_their_weights():
    outputs, weights = drawn(12, 1030), drawn(4, 3, seed=1)
    expected = (outputs.double().view(4, 3, -1) * weights.double()[..., None]).sum(1)
    assert (sum_experts(outputs, weights).double() - expected).norm() < BOUND * expected.norm()


def test_the_parts_of_a_shared_expert_are_added_times_the_sigmoid_of_a_gate():
    outputs, weights, shared, gate = drawn(12, 1030), drawn(4, 3), drawn(3, 4, 1030).float(), drawn(2, 4, 1).float()
    alone = sum_experts(outputs, weights, torch.float32).double()
    for given, factor in (((shared,), 1.0), ((shared, gate), gate.sum(0).double().sigmoid())):
        expected = alone + shared.sum(0).double() * factor
        found = sum_experts(outputs, weights, torch.float32, *given)
        assert (found.double() - expected).norm() < BOUND * expected.norm()


@pytest.mark.parametrize("packed", [False, True])
def test_the_experts_of_llama_4_multiply_the_rows_that_chose_them(packed):
    sizes = {"gate_up_proj": (64, 128), "down_proj": (64, 64)}  # [in, out]
    if packed and native.load_kernels() is None:
        pytest.skip("packed weights need compiled kernels")
    stacks, numbers = {}, {}
    for name, (inputs, outputs) in sizes.items():
        stacks[name] = numbers[name] = drawn(3, inputs, outputs, seed=inputs + outputs)
        if packed:
            weight = PackedWeight.from_blocks(
                blocks(Q.Q8_0, 3 * outputs, inputs).unflatten(0, (3, outputs)), Q.Q8_0, "int8"
            )
            stacks[name] = GPUPackedWeight.from_packed(weight, DEVICE)
            numbers[name] = stacks[name].dequantize().mT.to(DTYPE)
    experts = SimpleNamespace(**stacks, num_experts=3, act_fn=torch.tanh)
    x = drawn(3, 5, 64)
    x[0, 1:] = x[1] = x[2, 0] = 0  # the second expert has no rows
    gate, up = (x @ numbers["gate_up_proj"]).chunk(2, -1)
    expected = ((up * gate.tanh()) @ numbers["down_proj"]).flatten(0, 1).double()
    found = llama4_experts_forward(experts, x.flatten(0, 1))
    assert (found.double() - expected).norm() < (8e-3 if packed else BOUND) * expected.norm()
    assert not found[1:11].any()
    few = llama4_experts_forward(experts, x[:, 2:4].flatten(0, 1))
    assert torch.equal(few.view(3, 2, -1), found.view(3, 5, -1)[:, 2:4])


@pytest.mark.parametrize("kind", ["gated", "plain, with biases and a norm", "transposed"])
def test_experts_of_transformers_give_its_own_sums(kind):
    from transformers.integrations.moe import batched_mm_experts_forward

    gated, transposed = kind != "plain, with biases and a norm", kind == "transposed"
    sizes = {"gate_up_proj" if gated else "up_proj": (64 if gated else 32, 24), "down_proj": (24, 32)}
    stacks = {name: drawn(4, *reversed(size) if transposed else size, seed=3) for name, size in sizes.items()}
    biases = {f"{name}_bias": drawn(4, size[0], seed=4) for name, size in sizes.items()}
    experts = SimpleNamespace(
        **stacks, **({} if gated else biases), has_gate=gated, has_bias=not gated, has_post_expert_norm=not gated,
        is_transposed=transposed, num_experts=4, act_fn=torch.relu, post_expert_norm=lambda x: x / (1 + x.abs()),
        _apply_gate=lambda both: torch.tanh(both[..., :32]) * both[..., 32:], _is_expert_parallel=False,
    )  # fmt: skip
    x, picks, weights = drawn(9, 24), chosen(9, 2, 4), drawn(9, 2, seed=5)
    expected = batched_mm_experts_forward(experts, x, picks, weights).double()
    found = gpu_experts_forward(experts, x, picks, weights).double()
    assert (found - expected).norm() < 10 * BOUND * expected.norm()
