"""Draft a window that a network draws at once, for the rule `reject`."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace

from saltus.core.forward import NO_TOKEN, ForwardInputs, ForwardOutputs, NodeKind
from saltus.core.noise import Noise
from saltus.core.picking import Distribution
from saltus.core.sampling import Sampling
from saltus.core.tree import Branch


@dataclass(frozen=True)
class DrawnWindow:
    """Tokens that a network drew from its joint distribution of a window, one for each uniform that it was given."""

    tokens: Sequence[int]
    distributions: Sequence[Distribution]  # of each token given the tokens before it: what the rule compares


@dataclass(frozen=True)
class WindowOutputs(ForwardOutputs):
    """The outputs of a draft call that drew a window."""

    window: DrawnWindow | None = None


def can_draw_window(sampling: Sampling) -> bool:
    """True if the settings are a temperature and no more; a truncated mixture is not a mixture of truncated parts."""
    return not sampling.greedy and not sampling.truncates and sampling.token_independent


def draft_drawn_window(
    inputs: ForwardInputs, num_draft_tokens: int, min_probability: float, noise: Noise, sampling: Sampling, source: str
) -> Generator[ForwardInputs, ForwardOutputs, Sequence[Branch]]:
    """A branch of up to `num_draft_tokens` tokens from one call; it ends where the product of their peaks is too small.

    The call has a uniform query for each position, and its outputs are `WindowOutputs`.
    """
    canvas = inputs.canvas
    uniforms = noise.uniforms(f"{source}/{canvas.num_decided}", canvas.open_positions[:num_draft_tokens])
    outputs = yield replace(
        inputs,
        tokens=(NO_TOKEN,) * num_draft_tokens,
        parents=tuple(range(-1, num_draft_tokens - 1)),
        kinds=(NodeKind.UNIFORM_QUERY,) * num_draft_tokens,
        uniforms=tuple(uniforms.tolist()),
        temperature=sampling.temperature,
    )
    assert isinstance(outputs, WindowOutputs)
    window = outputs.window
    assert window is not None
    peaks: list[float] = []
    value = 1.0
    for distribution in window.distributions:
        if not value >= min_probability:  # NaN ends the branch, too
            break
        peaks.append(distribution.peak)  # must not depend on the token
        value *= peaks[-1]
    if value != value:
        peaks.pop()
    count = len(peaks)
    return [Branch(window.tokens[:count], peaks, source, window.distributions[:count])]
