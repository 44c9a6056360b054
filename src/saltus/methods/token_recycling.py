"""Draft by token recycling: continue the text by what the target predicted when it last read each token."""

from __future__ import annotations

from dataclasses import dataclass, field

from saltus.core.canvas import Canvas
from saltus.core.distributions import Step
from saltus.core.noise import Noise
from saltus.core.protocols import Drafter, DraftResult
from saltus.core.rules import Rule, reject
from saltus.core.sampling import Sampling
from saltus.methods.shared.candidate_table import CandidateTable
from saltus.methods.shared.draft_tree import Chooser, Likeliest, SharedNoise

SOURCE = "token_recycling"
FEW_NODES = 8  # offered however few were verified
LIMITS = {"top_k": (1, 16), "num_draft_tokens": (1, 64), "max_depth": (1, 64)}


@dataclass(frozen=True)
class TokenRecycling:
    """Token Recycling (Luo et al. 2024): a tree of the tokens that the target's earlier calls predicted.

    Each call predicts a token after every token that it reads, drafts that are rejected too; these predictions are
    kept, for each token those of the latest call that read it, and a tree is grown from one to the next. Without
    training and without a draft model. The paper's tree has one shape for all texts; here the likeliest nodes are
    offered, at a temperature those that the text's own random numbers favour.
    """

    top_k: int = 8  # tokens that are offered after each token
    num_draft_tokens: int = 31  # of a tree, at most
    max_depth: int = 12  # draft tokens of a path, at most
    draft_models: dict[str, str] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        for name, (least, most) in LIMITS.items():
            if not least <= getattr(self, name) <= most:
                raise ValueError(
                    f"token_recycling: {name} is {getattr(self, name)}, but must be between {least} and {most}"
                )

    def drafter(self, noise: Noise, sampling: Sampling, rule: Rule) -> Drafter:
        return TokenRecyclingDrafter(self, noise, sampling, rule)


@dataclass
class TokenRecyclingDrafter:
    """Drafts one text."""

    options: TokenRecycling
    noise: Noise
    sampling: Sampling
    rule: Rule
    learned: CandidateTable = field(default_factory=CandidateTable)
    uses_candidates: bool = field(default=True, init=False)

    def __call__(self, canvas: Canvas, last: Step | None, max_depth: int) -> DraftResult:
        """A generator without forward passes: to record and to draft takes a while, so it can be switched off."""
        yield from ()
        if last is not None:
            self.learned.record(last)
        if not len(canvas.decided_prefix):
            return ()
        options, sampling = self.options, self.sampling
        choose: Chooser = Likeliest(options.top_k)
        if self.rule is not reject and not sampling.greedy:
            choose = SharedNoise(options.top_k, sampling, self.noise, canvas.open_positions)
        depth, most = min(max_depth, options.max_depth), options.num_draft_tokens
        if last is not None:  # many more than what pays would take time for nothing
            most = min(most, FEW_NODES + 2 * last.inputs.num_draft_tokens)
        return self.learned.paths(int(canvas.decided_prefix[-1]), choose, most, depth, SOURCE)
