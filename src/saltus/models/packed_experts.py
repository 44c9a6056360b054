"""Let Transformers' mixtures of experts multiply by stacks that stay packed, of the experts that rows need."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from saltus.kernels.packed_weight import PackedWeight

PACKED_EXPERTS = "saltus_packed"


def experts_implementation(model: Any) -> str:
    """What a model of Transformers computes its experts by: as linear layers, one after the other."""
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


def _linear(module: Any, name: str, expert: int, rows: Tensor) -> Tensor:
    stack, biases = getattr(module, name), getattr(module, f"{name}_bias", None)
    if isinstance(stack, PackedWeight):
        matrix = (stack.flipped() if stack.is_transposed else stack).matrix(expert)  # [out, in]
    else:
        matrix = stack[expert].T if module.is_transposed else stack[expert]
    return F.linear(rows, matrix, None if biases is None else biases[expert])
