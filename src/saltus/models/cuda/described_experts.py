"""Say which described mixtures of experts our kernels for GPUs compute."""

from __future__ import annotations

from typing import Any

from saltus.models.decoder_description import Experts

GATED = {"silu", "gelu_tanh", "relu_squared", "clamped_swiglu"}  # activations of experts, that `activate` computes
UNGATED = GATED - {"clamped_swiglu"}


def is_known_experts(experts: Experts, base: Any) -> bool:
    """True for a mixture that `Mixture` computes, but for its shared MLP, which is not looked at.

    `base` is the model without its output layer.
    """
    router, module, gate = base.get_submodule(experts.router), base.get_submodule(experts.experts), experts.shared_gate
    first = "gate_up_proj" if experts.has_gate else "up_proj"
    return (
        not experts.biases_logits
        and experts.output_scale == 1
        and not experts.zero_experts
        and experts.latent is None
        and (experts.limit == 0 or experts.activation == "clamped_swiglu")
        and experts.activation in (GATED if experts.has_gate else UNGATED)
        and hasattr(module, first)
        and _can_choose(experts, len(router.weight))
        and (gate is None or (gate.stop is None and base.get_submodule(gate.path).bias is None))
    )


def _can_choose(experts: Experts, count: int) -> bool:
    """True if there are enough of `count` experts in the groups that are left."""
    members, left = divmod(count, experts.groups)
    return (
        left == 0
        and 0 < experts.best_of_group <= members
        and 0 < experts.top_groups <= experts.groups
        and 0 < experts.top_k <= members * experts.top_groups
    )
