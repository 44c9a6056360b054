"""Plain decoding without drafts: one token a call. Every other method must give the same text."""

from __future__ import annotations

from dataclasses import dataclass, field

from saltus.core.noise import Noise
from saltus.core.rules import Rule
from saltus.core.sampling import Sampling


@dataclass(frozen=True)
class Plain:
    """Plain decoding. It has no options."""

    draft_models: dict[str, str] = field(default_factory=dict, init=False, repr=False)

    def drafter(self, noise: Noise, sampling: Sampling, rule: Rule) -> None:
        return None
