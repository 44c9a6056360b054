"""Let Transformers' mixtures of experts multiply by stacks that stay packed, of the experts that rows need."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from saltus.kernels.packed_weight import PackedWeight

PACKED_EXPERTS = "saltus_packed"


def experts_implementation(model: Any) -> str:
    """What a model of Transformers computes its experts by: as linear layers, one after the other."""
    for module in model.modules():
        if type(module).__name__ == "Llama4TextExperts" and isinstance(module.gate_up_proj, PackedWeight):
            _extend_llama4(type(module))
    experts = (module for module in model.modules() if hasattr(module, "is_transposed"))
    if not any(isinstance(stack, PackedWeight) for module in experts for stack in vars(module)["_parameters"].values()):
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
        outputs = _linear(self, "down_proj", expert, inner) * top_k_weights[rows, places, None]
        total.index_add_(0, rows, outputs.to(total.dtype))
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
            gate, up = F.linear(inputs[rows], _matrix(self.gate_up_proj, expert)).chunk(2, -1)
            outputs[expert, rows] = F.linear(up * self.act_fn(gate), _matrix(self.down_proj, expert))
    return outputs.view(-1, self.hidden_size)


def _matrix(stack: PackedWeight, expert: int) -> Tensor:
    """[out, in]"""
    return (stack.flipped() if stack.is_transposed else stack).matrix(expert)


def _linear(module: Any, name: str, expert: int, rows: Tensor) -> Tensor:
    stack, biases = getattr(module, name), getattr(module, f"{name}_bias", None)
    if isinstance(stack, PackedWeight):
        matrix = _matrix(stack, expert)
    else:
        matrix = stack[expert].T if module.is_transposed else stack[expert]
    return F.linear(rows, matrix, None if biases is None else biases[expert])
