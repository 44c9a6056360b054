"""Choose the rotary angles of LongRoPE models by each text's own length (Ding et al. 2024).

Such a model has two sets of frequencies, for texts up to a length and for longer ones. Transformers chooses by the
longest position of a call, so that a text would depend on the drafts and the other texts of its calls. Here a text's
prompt and limit of new tokens decide, once for all of its positions.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch

BORDER = "original_max_position_embeddings"  # the length, among the parameters of such an embedding


@dataclass(frozen=True)
class LongRope:
    """The rotary embeddings of a model that have two sets of frequencies."""

    embeddings: Sequence[Any]
    longest_short_text: int

    def is_long(self, length: int) -> bool:
        """Whether a text that may get so many tokens, its prompt included, has the angles of long texts."""
        return length > self.longest_short_text

    @contextmanager
    def angles(self, long: bool) -> Iterator[None]:
        """While open, all calls compute the angles of long texts, or all those of short ones."""
        with ExitStack() as stack:
            for embedding in self.embeddings:
                parameters = embedding.config.rope_parameters
                stack.callback(parameters.__setitem__, BORDER, parameters[BORDER])
                parameters[BORDER] = 0 if long else sys.maxsize
            yield


def find_long_rope(model: Any) -> LongRope | None:
    """The LongRoPE embeddings of a model of Transformers, None if there are none."""
    modules = [module for module in model.modules() if getattr(module, "rope_type", None) == "longrope"]
    if not modules:
        return None
    for embedding in modules:  # it keeps the frequencies of long texts once they were needed
        border = embedding.config.rope_parameters[BORDER]
        inverse = embedding.inv_freq
        embedding(torch.zeros(1, device=inverse.device), torch.tensor([[border]], device=inverse.device))
    return LongRope(modules, min(each.config.rope_parameters[BORDER] for each in modules))
