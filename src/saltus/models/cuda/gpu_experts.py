"""Let Transformers' mixtures of experts multiply on a GPU by our kernels, in calls of fixed shapes."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from saltus.models.cuda.gpu_decoder import has_kernels
from saltus.models.packed_experts import expert_stacks, is_llama4

GPU_EXPERTS = "saltus_gpu"


def are_gpu_experts(module: Any) -> bool:
    """True for experts whose products our kernels can compute."""
    return not is_llama4(module) and bool(expert_stacks(module))


def gpu_experts_implementation(model: Any) -> str | None:
    """What a mixture on a GPU computes its experts by, so that no row depends on another; None: our kernels do not."""
    if not has_kernels() or not any(map(are_gpu_experts, model.modules())):
        return None
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(GPU_EXPERTS, gpu_experts_forward)
    return GPU_EXPERTS


def gpu_experts_forward(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """The weighted sum of the experts [rows, chosen] of each row; see `transformers.integrations.moe`."""
    from saltus.models.cuda.expert_kernels import SortedPairs, expert_product, sum_experts

    first = "gate_up_proj" if self.has_gate else "up_proj"
    pairs = SortedPairs.of(top_k_index, len(getattr(self, first)))

    def product(name: str, x: Tensor) -> Tensor:
        out, biases = (
            expert_product(x, getattr(self, name), pairs, self.is_transposed),
            getattr(self, f"{name}_bias", None),
        )
        return out if biases is None else out + biases[top_k_index.flatten()]

    inner = product(first, hidden_states.contiguous())
    outputs = product("down_proj", (self._apply_gate(inner) if self.has_gate else self.act_fn(inner)).contiguous())
    if self.has_post_expert_norm:
        outputs = self.post_expert_norm(outputs)
    return sum_experts(outputs, top_k_weights)
