"""Let Transformers' mixtures of experts multiply by stacks that stay packed, of the experts that rows need."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from saltus.kernels.packed_weight import PackedWeight

PACKED_EXPERTS = "saltus_packed"


def expert_stacks(module: Any) -> list[str]:
    """The names of a module's stacks [experts, out, in] or [experts, in, out]; [] for a module without experts."""
    is_known = hasattr(module, "is_transposed") or is_llama4(module)
    return [name for name, weight in module.named_parameters(recurse=False) if is_known and weight.ndim == 3]


def has_transposed_stacks(module: Any) -> bool:
    """True for experts whose matrices are [in, out]; Llama 4's do not say it."""
    return getattr(module, "is_transposed", is_llama4(module))


def is_llama4(module: Any) -> bool:
    """True for Llama 4's experts, which have no implementations to choose from."""
    return type(module).__name__ == "Llama4TextExperts"


def has_forward_of_ours(module: Any) -> bool:
    """True for Llama 4's experts with a `forward` of `gpu_experts_implementation`, which computes what theirs does."""
    function = getattr(vars(module).get("forward"), "func", None)
    return is_llama4(module) and getattr(function, "__module__", "") == "saltus.models.cuda.gpu_experts"


def experts_implementation(model: Any) -> str:
    """What a model of Transformers computes its experts by: as linear layers, one after the other."""
    packed = [
        module for module in model.modules()
        if any(isinstance(getattr(module, name), PackedWeight) for name in expert_stacks(module))
    ]  # fmt: skip
    for module in packed:
        if is_llama4(module):
            _extend_llama4(type(module))
    if all(is_llama4(module) for module in packed):
        return "eager"
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(PACKED_EXPERTS, packed_experts_forward)
    return PACKED_EXPERTS


def packed_experts_forward(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """The sum of the chosen experts of each row, by their numbers; see `transformers.integrations.moe`."""
    total = torch.zeros_like(hidden_states)
    for expert in top_k_index.unique().tolist():
        rows, places = torch.where(top_k_index == expert)
        inner = _linear(self, "gate_up_proj" if self.has_gate else "up_proj", expert, hidden_states[rows])
        inner = self._apply_gate(inner) if self.has_gate else self.act_fn(inner)
        outputs = _linear(self, "down_proj", expert, inner)
        if getattr(self, "has_post_expert_norm", False):  # releases before it have no experts with one
            outputs = self.post_expert_norm(outputs)
        total.index_add_(0, rows, (outputs * top_k_weights[rows, places, None]).to(total.dtype))
    return total


@lru_cache
def _extend_llama4(experts: Any) -> None:
    """Let the class multiply by packed stacks; it has no other implementations that a model could choose."""
    forward = experts.forward
    experts.forward = lambda self, hidden_states: (
        _llama4_forward(self, hidden_states)
        if isinstance(self.gate_up_proj, PackedWeight)
        else forward(self, hidden_states)
    )


def _llama4_forward(self: Any, hidden_states: Tensor) -> Tensor:
    """Of each expert's inputs, expert after expert; those of rows that did not choose it are 0, as its outputs are."""
    outputs = torch.zeros_like(hidden_states).view(self.num_experts, -1, self.hidden_size)
    for expert, inputs in enumerate(hidden_states.view_as(outputs)):
        rows = inputs.any(-1)
        if rows.any():
            gate, up = _linear(self, "gate_up_proj", expert, inputs[rows]).chunk(2, -1)
            outputs[expert, rows] = _linear(self, "down_proj", expert, up * self.act_fn(gate))
    return outputs.view(-1, self.hidden_size)


def _linear(module: Any, name: str, expert: int, rows: Tensor) -> Tensor:
    stack, biases = getattr(module, name), getattr(module, f"{name}_bias", None)
    if isinstance(stack, PackedWeight):
        matrix = (stack.flipped() if stack.is_transposed else stack).matrix(expert)
    else:
        matrix = stack[expert].T if has_transposed_stacks(module) else stack[expert]
    return F.linear(rows, matrix, None if biases is None else biases[expert])
