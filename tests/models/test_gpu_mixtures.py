"""Described mixtures by our kernels for GPUs, which Triton's interpreter runs, give what Transformers' blocks give."""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("triton")

from test_gpu_packed_weights import blocks

from architectures import GEMMA4_EXPERTS, WITH_FLOAT32_ROUTERS, tiny
from saltus.kernels import native
from saltus.kernels.packed_weight import PackedWeight
from saltus.models.architectures import describe_decoder
from saltus.models.cpu.decoder_weights import Resolver
from saltus.models.cuda.described_experts import is_known_experts
from saltus.models.cuda.fixed_shape_attention import StaticInputs
from saltus.models.cuda.fixed_shape_calls import FixedShape
from saltus.models.cuda.gpu_experts import Mixture
from saltus.models.cuda.packed_planes import Q
from saltus.models.cuda.packed_weight import GPUPackedWeight
from saltus.models.decoder_description import Experts, experts_of
from saltus.models.decoder_of import decoder_of

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ROWS, HIDDEN, BOUND = 5, 64, 0.01  # of the error's norm over the output's
ROUTED = {"routed_scaling_factor": 2.5}
GROUPS = {**ROUTED, "n_routed_experts": 8, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 3}
EXACT = {"Mixtral", "Glm4Moe", "Dots1", "MiniMaxM2", "ExaoneMoe"}  # in the others Transformers rounds weights
BLOCKS: dict[str, dict[str, Any]] = {
    "Mixtral": {}, "Qwen3Moe": {}, "Qwen2Moe": {"moe_intermediate_size": 64}, "Olmoe": {}, "Glm4Moe": GROUPS,
    "GptOss": {"swiglu_limit": 1.0, "intermediate_size": 64}, "GraniteMoe": {}, "Dots1": ROUTED, "Ernie4_5_Moe": {},
    "HunYuanMoEV1": {}, "MiniMaxM2": {}, "ExaoneMoe": ROUTED, "Gemma4": GEMMA4_EXPERTS,
    "Llama4": {"num_experts_per_tok": 2, "interleave_moe_layer_step": 1}, "NemotronH with experts": {},
    "SolarOpen": GROUPS, "FlexOlmo": {}, "HYV3": {}, "Flint": {}, "Phimoe": {"num_local_experts": 8},
}  # fmt: skip

pytestmark = pytest.mark.slow


@cache
def block_of(name: str) -> tuple[Any, Experts, Callable[[Tensor], Tensor], Any]:
    """A tiny model without its output layer, the mixture of its last layer, its block, and its shared MLP if any."""
    model = tiny(name, hidden_size=HIDDEN, **BLOCKS[name]).to(DEVICE, torch.bfloat16)
    model.set_experts_implementation("batched_mm")  # adds experts in float32
    base, generator = decoder_of(model), torch.Generator().manual_seed(1)
    experts = experts_of(describe_decoder(model).layers[-1])
    assert experts is not None
    assert is_known_experts(experts, base)
    path = experts.experts.rpartition(".")[0]
    block: Any = base.get_submodule(path)
    for parameter, values in block.named_parameters():
        if "router.scale" in parameter or "per_expert_scale" in parameter:
            nn.init.uniform_(values, 0.5, 1.5, generator=generator)
        elif parameter.endswith(("bias", "bias_")):
            nn.init.normal_(values, std=0.3, generator=generator)
    if name in WITH_FLOAT32_ROUTERS:
        router = base.get_submodule(experts.router)
        router.weight.data = router.weight.float() * 1.001  # numbers that bfloat16 does not have
    names = ("shared_expert", "shared_experts", "shared_mlp")
    shared = next((getattr(block, each) for each in names if getattr(block, each, None) is not None), None)
    run = of_gemma4 if name == "Gemma4" else lambda block, x: block(x[None])
    return base, experts, lambda x: run(block, x), shared


def of_gemma4(layer: Any, x: Tensor) -> Tensor:
    """What the experts give; the router reads other rows than they do."""
    _, weights, picks = layer.router(other_input(x))
    return layer.experts(x, picks, weights)


def other_input(x: Tensor) -> Tensor:
    return 4 * x.flip(0)


@torch.inference_mode()
def run(base: Any, experts: Experts, shared: Any, x: Tensor, routed: Tensor | None = None) -> Tensor:
    """The sum of the mixture's parts for rows [rows, hidden]."""
    rows, wide = len(x), torch.full((16, HIDDEN), torch.nan, dtype=x.dtype, device=x.device)
    wide[:rows] = x
    own = SimpleNamespace(parts=lambda *_: shared(x).float()[None])
    mixture = Mixture.described(experts, Resolver(base), None if experts.shared is None else own)
    inputs = StaticInputs(FixedShape(rows, 1, 0, 0), 1, x.device)
    inputs.slots[:] = torch.arange(300, 300 + rows)
    if routed is not None:
        routed = torch.cat([routed, routed.new_zeros(16 - rows, HIDDEN)])
    parts = mixture.parts(wide, inputs, 256, routed)
    assert parts.shape == (1, rows, HIDDEN)
    assert parts.dtype == torch.float32
    return parts[0]


def inputs_of(experts: Experts) -> tuple[Tensor, Tensor | None]:
    x = torch.randn(ROWS, HIDDEN, generator=torch.Generator().manual_seed(2)).to(DEVICE, torch.bfloat16)
    return x, other_input(x) if experts.router_norm else None


@pytest.mark.parametrize("name", BLOCKS)
def test_a_described_mixture_gives_what_the_block_gives_and_rows_do_not_depend_on_each_other(name):
    base, experts, block, shared = block_of(name)
    x, routed = inputs_of(experts)
    found = run(base, experts, shared, x, routed)
    with torch.inference_mode():
        wanted: Any = block(x)
    wanted = (wanted[0] if isinstance(wanted, tuple) else wanted).view(ROWS, HIDDEN).float()
    assert ((found.bfloat16() - wanted).norm(dim=-1) / wanted.norm(dim=-1)).max() < BOUND
    assert name not in EXACT or (found.bfloat16() == wanted).float().mean() > 0.97
    for row in (0, 3):
        other = None if routed is None else routed[row : row + 1]
        assert torch.equal(run(base, experts, shared, x[row : row + 1], other)[0], found[row])


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("Qwen2Moe", {"shared_gate": None}),
        ("Qwen2Moe", {"is_normalized": True}),
        ("Olmoe", {"top_k": 1}),
        ("Glm4Moe", {"scoring": "softmax"}),
        ("Glm4Moe", {"groups": 1, "top_groups": 1}),
        ("Glm4Moe", {"top_groups": 3}),
        ("Glm4Moe", {"best_of_group": 1}),
        ("Glm4Moe", {"selection_bias": None}),
        ("Glm4Moe", {"least_sum": 0.5}),
        ("Glm4Moe", {"shared": None}),
        ("ExaoneMoe", {"scale": 1.0}),
        ("GptOss", {"gate_up_interleaved": False}),
        ("GptOss", {"limit": 2.0}),
        ("GptOss", {"alpha": 1.0}),
        ("GptOss", {"activation": "silu"}),
        ("Gemma4", {"activation": "silu"}),
        ("Gemma4", {"router_norm": None}),
        ("Gemma4", {"router_scale": None}),
        ("Gemma4", {"router_factor": 1.0}),
        ("Gemma4", {"expert_scale": None}),
        ("Llama4", {"scales_inputs": False}),
        ("NemotronH with experts", {"activation": "silu"}),
        ("Phimoe", {"margin": 3.0}),
        ("Phimoe", {"scoring": "softmax"}),
    ],
)
def test_another_description_gives_something_else(name, changes):
    base, experts, _, shared = block_of(name)
    x, routed = inputs_of(experts)
    found, other = (run(base, each, shared, x, routed) for each in (experts, replace(experts, **changes)))
    assert ((found - other).norm(dim=-1) / found.norm(dim=-1)).max() > 4 * BOUND


@pytest.mark.parametrize("path", ["router", "experts"])
@torch.inference_mode()
def test_biases_are_added(path):
    base, experts, _, _ = block_of("GptOss")
    base, (x, _) = deepcopy(base), inputs_of(experts)
    found = run(base, experts, None, x)
    for name, values in base.get_submodule(getattr(experts, path)).named_parameters():
        if name.endswith("bias"):
            values.zero_()
    assert (run(base, experts, None, x) - found).norm() > 4 * BOUND * found.norm()


@pytest.mark.skipif(native.load_kernels() is None, reason="packed weights need compiled kernels")
@pytest.mark.parametrize("name", ["GptOss", "Qwen2Moe"])  # stacks that would be transposed, with biases, and others
@torch.inference_mode()
def test_packed_stacks_give_what_their_numbers_give(name):
    base, experts, *_ = block_of(name)
    base, experts = deepcopy(base).float(), replace(experts, shared=None, shared_gate=None)
    module: Any = base.get_submodule(experts.experts)
    x = inputs_of(experts)[0].float()
    packed, found = {}, []
    for stack in ("gate_up_proj", "down_proj"):
        count, outputs, inputs = (getattr(module, stack).mT if experts.is_transposed else getattr(module, stack)).shape
        weight = PackedWeight.from_blocks(
            blocks(Q.Q8_0, count * outputs, inputs).unflatten(0, (count, outputs)), Q.Q8_0, "int8"
        )
        packed[stack] = GPUPackedWeight.from_packed(weight, DEVICE)
        numbers = packed[stack].dequantize().float()
        module._parameters[stack] = (numbers.mT if experts.is_transposed else numbers).contiguous()
    found.append(run(base, experts, None, x))
    module._parameters.update(packed)
    found.append(run(base, experts, None, x))
    assert (found[1] - found[0]).norm() < 8e-3 * found[0].norm()
    assert torch.equal(run(base, experts, None, x[3:4])[0], found[1][3])


@pytest.mark.parametrize(
    "changes",
    [
        {"activation": "gelu"},
        {"activation": "clamped_swiglu", "has_gate": False},
        {"has_gate": False},
        {"groups": 3},
        {"top_groups": 5},
        {"best_of_group": 3},
        {"top_k": 5},
    ],
)
def test_mixtures_that_the_kernels_do_not_know_are_left_to_others(changes):
    base, experts, *_ = block_of("Glm4Moe")
    assert not is_known_experts(replace(experts, **changes), base)
