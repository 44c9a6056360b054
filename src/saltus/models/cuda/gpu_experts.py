"""Mixtures of experts on a GPU by our kernels: those of Transformers' layers, and those of our own decoder."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from saltus.models.cpu.decoder_weights import Resolver
from saltus.models.cuda.fixed_shape_attention import StaticInputs
from saltus.models.cuda.kernel_support import has_kernels
from saltus.models.cuda.layer_weights import norm_of
from saltus.models.cuda.packed_weight import GPUPackedWeight
from saltus.models.decoder_description import Experts
from saltus.models.packed_experts import expert_stacks, is_llama4

GPU_EXPERTS = "saltus_gpu"


def are_gpu_experts(module: Any) -> bool:
    """True for experts whose products our kernels can compute."""
    return bool(expert_stacks(module))


def gpu_experts_implementation(model: Any) -> str | None:
    """What a mixture on a GPU computes its experts by, so that no row depends on another; None: our kernels do not.

    Llama 4's experts have no implementations to choose from, and on a GPU get ours here.
    """
    experts = next(filter(are_gpu_experts, model.modules()), None)
    if experts is None or not has_kernels(next(experts.parameters()).device):
        return None
    for module in filter(is_llama4, model.modules()):
        if module.gate_up_proj.device.type == "cuda":
            module.forward = partial(llama4_experts_forward, module)
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(GPU_EXPERTS, gpu_experts_forward)
    return GPU_EXPERTS


def gpu_experts_forward(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """The weighted sum of the experts [rows, chosen] of each row; see `transformers.integrations.moe`."""
    from saltus.models.cuda.launching import launching_on

    with launching_on(hidden_states.device):
        return _summed_experts(self, hidden_states, top_k_index, top_k_weights)


def _summed_experts(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    from saltus.models.cuda.expert_kernels import SortedPairs, expert_product, sum_experts

    first = "gate_up_proj" if self.has_gate else "up_proj"
    pairs = SortedPairs.of(top_k_index, len(getattr(self, first)))

    def product(name: str, x: Tensor) -> Tensor:
        biases = getattr(self, f"{name}_bias", None)
        return expert_product(x, getattr(self, name), pairs, self.is_transposed, biases)

    inner = product(first, hidden_states.contiguous())
    outputs = product("down_proj", (self._apply_gate(inner) if self.has_gate else self.act_fn(inner)).contiguous())
    if getattr(self, "has_post_expert_norm", False):  # releases before it have no experts with one
        outputs = self.post_expert_norm(outputs)
    return sum_experts(outputs, top_k_weights)


def llama4_experts_forward(self: Any, hidden_states: Tensor) -> Tensor:
    """Of inputs [experts · rows, hidden], expert after expert; what a row did not choose is 0, as its output is."""
    from saltus.models.cuda.launching import launching_on

    with launching_on(hidden_states.device):
        return _chosen_experts(self, hidden_states)


def _chosen_experts(self: Any, hidden_states: Tensor) -> Tensor:
    from saltus.models.cuda.expert_kernels import SortedPairs, expert_product

    experts, rows = self.num_experts, len(hidden_states) // self.num_experts
    chosen = hidden_states.any(-1)
    expert = torch.arange(experts, device=chosen.device)[:, None].expand(-1, rows).flatten()
    pairs = SortedPairs.of(torch.where(chosen, expert, experts)[:, None], experts, rows)
    both = expert_product(hidden_states.contiguous(), self.gate_up_proj, pairs, is_transposed=True)
    gate, up = both.chunk(2, -1)
    outputs = expert_product((up * self.act_fn(gate)).contiguous(), self.down_proj, pairs, is_transposed=True)
    return torch.where(chosen[:, None], outputs, 0)


class ExpertStack(NamedTuple):
    """A matrix of each expert, [experts, outputs, inputs] or [experts, inputs, outputs], and their biases."""

    weights: Tensor
    is_transposed: bool
    biases: Tensor | None  # [experts, outputs]

    @classmethod
    def of(cls, module: Any, name: str, is_transposed: bool) -> ExpertStack:
        """That of a module of Transformers; packed ones are never transposed."""
        weights, biases = getattr(module, name).detach(), getattr(module, f"{name}_bias", None)
        is_transposed &= not isinstance(weights, GPUPackedWeight)
        return cls(weights, is_transposed, None if biases is None else biases.detach())

    @property
    def inputs(self) -> int:
        return self.weights.shape[1 if self.is_transposed else 2]

    def product(self, x: Tensor, pairs: Any) -> Tensor:
        """[pairs, outputs] of x [rows or pairs, inputs] and SortedPairs."""
        from saltus.models.cuda.expert_kernels import expert_product

        return expert_product(x, self.weights, pairs, self.is_transposed, self.biases)


@dataclass(frozen=True)
class Mixture:
    """The weights of a described mixture, in place of an MLP."""

    description: Experts
    router: Any  # RouterWeights
    first: ExpertStack  # gate and up
    down: ExpertStack
    router_norm: Any = None
    router_scale: Tensor | None = None  # [hidden]
    shared: Any = None  # an MLP, which has `parts` as Mixture has
    shared_gate: Tensor | None = None  # [1, hidden]

    @classmethod
    def described(cls, experts: Experts, weights: Resolver, shared: Any = None) -> Mixture:
        """Of a description which `is_known_experts` knows; `shared` computes the MLP that it has beside experts."""
        from saltus.models.cuda.routing_kernels import RouterWeights

        assert (shared is None) == (experts.shared is None)
        router, module = weights.module(experts.router), weights.module(experts.experts)
        bias, gate = getattr(router, "bias", None), experts.shared_gate
        first, down = (
            ExpertStack.of(module, name, experts.is_transposed)
            for name in ("gate_up_proj" if experts.has_gate else "up_proj", "down_proj")
        )
        selection_bias, expert_scale, router_scale = (
            None if path is None else weights.tensor(path)
            for path in (experts.selection_bias, experts.expert_scale, experts.router_scale)
        )
        vectors = None if bias is None else bias.detach(), selection_bias, expert_scale
        dtype = next(weights.base.parameters()).dtype
        return cls(
            experts, RouterWeights.of(router.weight.detach(), dtype, *vectors), first, down,
            norm_of(experts.router_norm, weights), router_scale, shared,
            None if gate is None else weights.module(gate.path).weight.detach(),
        )  # fmt: skip

    def parts(self, x: Tensor, inputs: StaticInputs, first_slot: int, router_input: Tensor | None = None) -> Tensor:
        """[1, rows, hidden], float32, of x [padded rows, hidden]: the sum of each row's experts, and the shared one.

        The router reads `router_input` [padded rows, hidden], without it x. Rows whose slots are before `first_slot`
        are padding.
        """
        from saltus.models.cuda.expert_kernels import SortedPairs, sum_experts
        from saltus.models.cuda.linear_kernels import activate, blocks_of, linear_parts
        from saltus.models.cuda.routing_kernels import route

        described, rows = self.description, inputs.shape.num_rows
        routed = self._routed(x if router_input is None else router_input, rows)
        picks, weights = route(routed, self.router, described, rows, inputs.slots, first_slot)
        pairs, read = SortedPairs.of(picks, self.router.experts), x[:rows]
        if described.scales_inputs:
            read = (read[:, None] * weights[..., None].to(x.dtype)).flatten(0, 1)
            weights = torch.ones_like(weights)
        both = self.first.product(read, pairs)
        active = both.new_empty(len(both), self.down.inputs)
        gates = described.gate_up_interleaved, described.limit, described.alpha
        activate(both, active, described.activation, *gates)
        outputs, shared, gate = self.down.product(active, pairs), None, None
        if self.shared is not None:
            shared = self.shared.parts(x, inputs, first_slot)
        if self.shared_gate is not None:
            gate = linear_parts(x, [self.shared_gate], blocks_of(self.shared_gate), rows)
        return sum_experts(outputs, weights, torch.float32, shared, gate)[None]

    def _routed(self, x: Tensor, rows: int) -> Tensor:
        """What the router's matrix multiplies, rounded after each step."""
        from saltus.models.cuda.row_kernels import add_and_norm

        routed = x
        if self.router_norm is not None:
            routed = torch.empty_like(x)
            add_and_norm(None, x, self.router_norm, routed, rows)
        if self.router_scale is not None:
            routed = routed * self.router_scale
        return routed if self.description.router_factor == 1 else routed * self.description.router_factor
