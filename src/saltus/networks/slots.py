"""Read a text's slots by a few layers: each holds what the target knew before a token, and is read but once."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from saltus.networks import attention
from saltus.networks.attention import Call, Part
from saltus.networks.lean import Lean, supports
from saltus.networks.linear import Exact
from saltus.networks.memory import Memory

ROWS = 256  # of one pass


@dataclass
class SlotMemory:
    """What layers have read of one text: slots for the decided tokens from `start` on."""

    start: int = 0
    read: np.ndarray = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    inner: Memory = field(default_factory=Memory)

    def recall(self, decided: np.ndarray, begin: int) -> int:
        """Up to where the decided tokens need not be read again, if slots from `begin` on are brought; one always is.

        Where slots are missing between those, all is forgotten, and memory starts there.
        """
        known = self.read[: max(len(decided) - self.start, 0)]
        differs = np.flatnonzero(known != decided[self.start : self.start + len(known)])
        shared = self.start + (int(differs[0]) if len(differs) else len(known))
        past = min(shared, len(decided) - 1)
        if past < begin:
            self.start, self.inner, past = begin, Memory(), begin
        return past

    @property
    def keys(self) -> Tensor | None:
        return self.inner.keys

    @property
    def values(self) -> Tensor | None:
        return self.inner.values


def tapped(
    features: Float[Tensor, "*slots given"], taps: Sequence[int], wanted: Sequence[int | None]
) -> Float[Tensor, "*slots wanted"]:
    """The states after so many layers each (None: the last), of features that hold those of `taps`, then the last."""
    places = [len(taps) if tap is None else list(taps).index(tap) for tap in wanted]
    if len(places) > len(taps):
        return features
    return features.unflatten(-1, (len(taps) + 1, -1))[..., places, :].flatten(-2)


class SlotReader:
    """The layers of a causal model over inputs of our own: by kernels where there are some, else by Transformers."""

    def __init__(self, model: Any) -> None:
        self.model, self.device = model, model.device
        model.set_attn_implementation(attention.NAME)
        self.lean = Lean(model, ROWS) if supports(model) else None

    def __call__(
        self, inputs: Float[Tensor, "rows hidden"], memory: SlotMemory, filled: int, wanted: int, say: bool = True
    ) -> Float[Tensor, "wanted _"]:
        """Read rows behind the `filled` that memory holds; of the last `wanted` the logits or, not to `say`, states.

        All rows but the last `wanted` may go in pieces.
        """
        while len(inputs) > ROWS:
            count = min(ROWS, len(inputs) - wanted)
            self._pass(inputs[:count], memory, filled, 1, say)
            inputs, filled = inputs[count:], filled + count
        return self._pass(inputs, memory, filled, wanted, say)

    def _pass(self, inputs: Tensor, memory: SlotMemory, filled: int, wanted: int, say: bool) -> Tensor:
        positions = np.arange(filled, filled + len(inputs))
        part = Part(memory.inner, filled, positions, np.tri(len(inputs), dtype=np.uint8))
        call = Call([part], self.model.config.num_hidden_layers)
        if self.lean is not None:
            keep = torch.arange(len(inputs) - wanted, len(inputs), device=self.device)
            logits, states = self.lean(inputs, torch.from_numpy(positions), call, keep, say=say)
            return logits if say else states
        places = torch.from_numpy(positions[None]).to(self.device)
        with attention.during(call), Exact() if self.device.type == "cpu" else nullcontext():
            asked = {"inputs_embeds": inputs[None], "position_ids": places, "use_cache": False}
            if say:
                return self.model(**asked, logits_to_keep=wanted).logits[0]
            return self.model.model(**asked).last_hidden_state[0, -wanted:]
