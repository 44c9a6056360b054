"""Scale queries by their positions where a model of Transformers counts the rows of a call instead.

Layers of Llama 4 without rotary embeddings multiply queries by 1 + a · log(1 + ⌊(position + 1) / s⌋) (Nakanishi 2025),
but take a row's place in the call for its position. In our calls rows of several texts and branches lie side by side.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakSet

import torch
from jaxtyping import Float, Int
from torch import Tensor

_prepared: WeakSet[torch.nn.Module] = WeakSet()


def leave_out_tuning(model: torch.nn.Module, when: Callable[[], bool]) -> None:
    """Let attention layers with temperature tuning leave it out in calls in which `when()` is true."""

    def choose(module: Any, inputs: Any) -> None:
        module.attn_temperature_tuning = module.config.attn_temperature_tuning and not when()

    for module in model.modules():
        if hasattr(module, "attn_temperature_tuning") and module not in _prepared:
            module.register_forward_pre_hook(choose)
            _prepared.add(module)


def is_own_hook(hook: Any) -> bool:
    """True for a hook of `leave_out_tuning`, which does nothing outside our calls."""
    return getattr(hook, "__qualname__", "").startswith(leave_out_tuning.__qualname__)


def is_tuned(module: Any) -> bool:
    """True for an attention layer whose queries are scaled by their positions."""
    config = getattr(module, "config", None)
    return bool(getattr(config, "attn_temperature_tuning", False)) and not getattr(module, "use_rope", True)


def tuned_queries(
    module: Any, query: Float[Tensor, "batch heads rows dim"], positions: Int[Tensor, "batch rows"]
) -> Float[Tensor, "batch heads rows dim"]:
    """The layer's queries, scaled by their positions and rounded to their dtype."""
    steps = torch.floor((positions.float() + 1.0) / module.floor_scale)
    scales = torch.log1p(steps) * module.attn_scale + 1.0
    return (query * scales[:, None, :, None]).to(query.dtype)
