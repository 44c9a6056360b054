"""Choose the rotary angles by each text's own length, where a model has others for long texts.

LongRoPE models (Ding et al. 2024) have two sets of frequencies; dynamic NTK scaling (bloc97, emozilla 2023) stretches
them as a text grows. Transformers chooses by the longest position of a call, so that a text would depend on the drafts
and the other texts of its calls. Here a text's prompt and limit of new tokens decide, once for all of its positions.
Dynamic scaling has one set for all long texts, that of the longest one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

BORDER = "original_max_position_embeddings"  # the length, among the parameters of a LongRoPE embedding
FIXED = "fixed"  # the type of an embedding while its frequencies stay as they are


@dataclass(frozen=True)
class LongRope:
    """The rotary embeddings of a model that have other frequencies for long texts."""

    embeddings: Sequence[Any]
    longest_short_text: int
    stretched: dict[int, Any] = field(default_factory=dict)  # frequencies of long texts by dynamic scaling

    def is_long(self, length: int) -> bool:
        """Whether a text that may get so many tokens, its prompt included, has the angles of long texts."""
        return length > self.longest_short_text

    @contextmanager
    def angles(self, long: bool) -> Iterator[None]:
        """While open, all calls compute the angles of long texts, or all those of short ones."""
        with ExitStack() as stack:
            for place, embedding in enumerate(self.embeddings):
                stack.callback(setattr, embedding, "rope_type", embedding.rope_type)
                stack.callback(setattr, embedding, "inv_freq", embedding.inv_freq)
                of_long = self._stretched(place) if embedding.rope_type == "dynamic" else embedding.long_inv_freq
                inverse = of_long if long else embedding.original_inv_freq
                embedding.rope_type = FIXED  # so that Transformers leaves the frequencies as they are
                embedding.inv_freq = inverse.to(embedding.inv_freq.device)
            yield

    def _stretched(self, place: int) -> Any:
        if place not in self.stretched:
            from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

            embedding = self.embeddings[place]
            length = math.ceil(embedding.config.rope_parameters["factor"] * self.longest_short_text)
            make: Any = ROPE_INIT_FUNCTIONS["dynamic"]
            self.stretched[place] = make(embedding.config, embedding.inv_freq.device, seq_len=length)[0]
        return self.stretched[place]


def find_long_rope(model: Any) -> LongRope | None:
    """The embeddings of a model of Transformers with other frequencies for long texts, None if there are none.

    Errors: ValueError where only some kinds of layers have them.
    """
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        if isinstance(kinds, dict) and (scaled := {"longrope", "dynamic"} & set(kinds.values())):
            raise ValueError(f"the rotary embeddings of some of its layers are of the type {scaled.pop()}")
    modules = [module for module in model.modules() if getattr(module, "rope_type", None) in ("longrope", "dynamic")]
    if not modules:
        return None
    borders = []
    for embedding in modules:  # LongRoPE's keep `long_inv_freq`, the frequencies of long texts, once they were needed
        if embedding.rope_type == "dynamic":
            borders.append(embedding.original_max_seq_len)
            continue
        border = embedding.config.rope_parameters[BORDER]
        inverse = embedding.inv_freq
        embedding(torch.zeros(1, device=inverse.device), torch.tensor([[border]], device=inverse.device))
        borders.append(border)
    return LongRope(modules, min(borders))
