"""What stands between the last hidden states of a model and its logits: a norm before them, and a scale after."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from saltus.models.architectures import describe_decoder
from saltus.models.decoder_of import decoder_of


@dataclass(frozen=True)
class LogitScaling:
    """What a model does to the products of its output layer: a scale, then a limit of ± `softcap` (0: none)."""

    scale: float = 1.0
    softcap: float = 0.0

    def __call__(self, products: Float[Tensor, "*rows vocab"]) -> Float[Tensor, "*rows vocab"]:
        logits = products if self.scale == 1 else products * self.scale
        return torch.tanh(logits / self.softcap) * self.softcap if self.softcap else logits


def logit_scaling(model: Any) -> LogitScaling:
    """That of a model; where no file describes its decoder, by the names that configurations have for it."""
    config, description = model.config.get_text_config(), describe_decoder(model)
    if description is not None:
        return LogitScaling(description.logit_scale, description.logit_softcap)
    named = [getattr(config, name, None) for name in ("logit_scale", "lm_head_multiplier")]
    scale = next((value for value in named if value), 1.0) / (getattr(config, "logits_scaling", None) or 1.0)
    return LogitScaling(scale, getattr(config, "final_logit_softcapping", None) or 0.0)


def norm_offset(model: Any) -> float:
    """What a model's norms add to their weights: 1 where these are centred around 0."""
    if getattr(model.config, "norm_add_unit_offset", False):  # of EvaByte's files
        return 1.0
    description = describe_decoder(model)
    return 0.0 if description is None else description.norm.offset


def last_norm_factors(model: Any) -> Float[Tensor, "hidden"] | None:
    """By which the last norm multiplies normalised states; None if a model's norm has none, or another place."""
    weight = getattr(getattr(decoder_of(model), "norm", None), "weight", None)
    return None if weight is None else weight.detach() + norm_offset(model)
