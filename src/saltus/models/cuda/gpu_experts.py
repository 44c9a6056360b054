"""Mixtures of experts on a GPU by our kernels: those of Transformers' layers, and those of our own decoder."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from saltus.models.cuda.fixed_shape_attention import StaticInputs
from saltus.models.cuda.kernel_support import has_kernels
from saltus.models.packed_experts import expert_stacks, is_llama4

GPU_EXPERTS = "saltus_gpu"


def are_gpu_experts(module: Any) -> bool:
    """True for experts whose products our kernels can compute."""
    return bool(expert_stacks(module))


def gpu_experts_implementation(model: Any) -> str | None:
    """What a mixture on a GPU computes its experts by, so that no row depends on another; None: our kernels do not.

    Llama 4's experts have no implementations to choose from, and on a GPU get ours here.
    """
    if not has_kernels() or not any(map(are_gpu_experts, model.modules())):
        return None
    for module in filter(is_llama4, model.modules()):
        if module.gate_up_proj.device.type == "cuda":
            module.forward = partial(llama4_experts_forward, module)
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(GPU_EXPERTS, gpu_experts_forward)
    return GPU_EXPERTS


def gpu_experts_forward(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """The weighted sum of the experts [rows, chosen] of each row; see `transformers.integrations.moe`."""
    from saltus.models.cuda.expert_kernels import SortedPairs, expert_product, sum_experts

    first = "gate_up_proj" if self.has_gate else "up_proj"
    pairs = SortedPairs.of(top_k_index, len(getattr(self, first)))

    def product(name: str, x: Tensor) -> Tensor:
        out = expert_product(x, getattr(self, name), pairs, self.is_transposed)
        biases = getattr(self, f"{name}_bias", None)
        return out if biases is None else out + biases[top_k_index.flatten()]

    inner = product(first, hidden_states.contiguous())
    outputs = product("down_proj", (self._apply_gate(inner) if self.has_gate else self.act_fn(inner)).contiguous())
    if getattr(self, "has_post_expert_norm", False):  # releases before it have no experts with one
        outputs = self.post_expert_norm(outputs)
    return sum_experts(outputs, top_k_weights)


def llama4_experts_forward(self: Any, hidden_states: Tensor) -> Tensor:
    """Of inputs [experts · rows, hidden], expert after expert; what a row did not choose is 0, as its output is."""
    from saltus.models.cuda.expert_kernels import SortedPairs, expert_product

    experts, rows = self.num_experts, len(hidden_states) // self.num_experts
    chosen = hidden_states.any(-1)
    expert = torch.arange(experts, device=chosen.device)[:, None].expand(-1, rows).flatten()
    pairs = SortedPairs.of(torch.where(chosen, expert, experts)[:, None], experts, rows)
    both = expert_product(hidden_states.contiguous(), self.gate_up_proj, pairs, is_transposed=True)
    gate, up = both.chunk(2, -1)
    outputs = expert_product((up * self.act_fn(gate)).contiguous(), self.down_proj, pairs, is_transposed=True)
    return torch.where(chosen[:, None], outputs, 0)


@dataclass(frozen=True)
class Mixture:
    """The weights of a mixture as Mixtral and Qwen3 have it, in place of an MLP."""

    router: Tensor  # [experts, hidden]
    gate_and_up: Tensor  # [experts, 2 · inner, hidden]
    down: Tensor  # [experts, hidden, inner]
    top_k: int
    is_normalized: bool  # the chosen experts' weights add up to 1

    @staticmethod
    def is_of(mlp: Any) -> bool:
        """True for a block of Transformers that has experts."""
        return hasattr(mlp, "experts")

    @classmethod
    def of(cls, block: Any) -> Mixture:
        """That of a block of MixtralForCausalLM or Qwen3MoeForCausalLM."""
        gate, experts = block.gate, block.experts
        router, first, last = (each.detach() for each in (gate.weight, experts.gate_up_proj, experts.down_proj))
        return cls(router, first, last, gate.top_k, getattr(gate, "norm_topk_prob", True))

    def parts(self, x: Tensor, inputs: StaticInputs, first_slot: int) -> Tensor:
        """[1, rows, hidden], float32, of x [padded rows, hidden]: the sum of each row's experts.

        Rows whose slots are before `first_slot` are padding.
        """
        from saltus.models.cuda.expert_kernels import SortedPairs, expert_product, route, sum_experts
        from saltus.models.cuda.linear_kernels import activate, blocks_of, linear_parts

        rows = inputs.shape.num_rows
        logits = linear_parts(x, [self.router], blocks_of(self.router), rows)
        picks, weights = route(logits, x.dtype, self.top_k, self.is_normalized, inputs.slots, first_slot)
        pairs = SortedPairs.of(picks, len(self.router))
        both = expert_product(x[:rows], self.gate_and_up, pairs)
        active = both.new_empty(len(both), self.down.shape[2])
        activate(both, active)
        return sum_experts(expert_product(active, self.down, pairs), weights, torch.float32)[None]
