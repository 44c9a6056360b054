"""Draft from a joint law of the next tokens: a probabilistic circuit, which heads read from the target's last state."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass

from saltus.core.canvas import Canvas
from saltus.core.decode import Drafter
from saltus.core.forward import Forward, Reply
from saltus.core.listening import Listening
from saltus.core.noise import Noise
from saltus.core.rules import Rule
from saltus.core.sampling import Sampling
from saltus.core.token_by_token import token_by_token
from saltus.core.tree import Branch


@dataclass(frozen=True)
class Mtpc:
    """Multi-token prediction with probabilistic circuits (MtPC, Grivas et al. 2025): one call of the target a step.

    The call that verifies leaves the state before the token that it decided itself. That token is kept, and the
    circuit is conditioned on it: unlike the paper's shortcut, which drops it, this leaves the law as it is. Drafts
    are read off token by token, each conditioned on those before it: with the text's own uniforms under `match`,
    and from laws that the rule is told under `reject`.
    """

    model: str = "auto"  # a folder of `saltus train mtpc`; auto is the heads that are shipped for the target
    length: int = 16  # tokens drafted, at most; never more than the heads' window
    least: float = 0.1  # stop where all drafts are right with a chance below this, by the heads' own account

    def __post_init__(self) -> None:
        if self.length < 1:
            raise ValueError(f"mtpc: length is {self.length}, but must be 1 or more")
        if not 0 <= self.least < 1:
            raise ValueError(f"mtpc: least is {self.least}, but must lie in [0, 1)")

    @property
    def models(self) -> dict[str, str]:
        return {"mtpc": f"heads:{self.model}"}

    def drafter(self, noise: Noise, sampling: Sampling, rule: Rule) -> Drafter:
        return WindowReader(noise, sampling, rule, self.length, self.least)


@dataclass
class WindowReader(Listening):
    """Drafts of one text by a network of heads: it is shown states, and then the drafts, one by one."""

    least: float

    def offer(self, canvas: Canvas, length: int) -> Generator[Forward, Reply, Sequence[Branch]]:
        asked = Forward(canvas, to="mtpc", hidden=self.unheard())
        return token_by_token(asked, length, self.least, self.noise, self.sampling, self.rule, "mtpc")
