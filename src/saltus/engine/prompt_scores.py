"""Log-probabilities of the tokens of a prompt, computed while it is read piece by piece."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from saltus.core.canvas import continuation
from saltus.core.forward import ForwardInputs
from saltus.core.sampling import log_probabilities
from saltus.models.protocols import TargetNetwork

SCORED_ROWS = 64  # tokens that are scored in a call: each needs its logits


@dataclass
class PromptScores:
    """The log-probability of each token of a prompt but the first, given the tokens before it: of the raw logits."""

    tokens: Sequence[int]
    top: int = 0  # how many of the likeliest tokens to list for each position
    log_probabilities: list[float] = field(default_factory=list, init=False)
    top_log_probabilities: list[list[tuple[int, float]]] = field(default_factory=list, init=False)

    @property
    def num_unscored(self) -> int:
        """Tokens that have no log-probability yet. The first one never gets one."""
        return max(len(self.tokens) - 1 - len(self.log_probabilities), 0)

    def score_chunk(self, network: TargetNetwork, kv_cache: Any, text_length: int) -> None:
        """Score the next tokens by one call: a chain of them is a draft tree, whose logits a call returns.

        `text_length` is the longest that the text may get, by which LongRoPE chooses its angles.
        """
        limit = SCORED_ROWS if network.max_draft_tokens is None else min(SCORED_ROWS, network.max_draft_tokens + 1)
        begin = len(self.log_probabilities) + 1
        piece = self.tokens[begin : begin + limit]
        chain = tuple(piece[:-1])  # nothing follows the last one
        inputs = ForwardInputs(
            continuation(self.tokens[:begin], text_length - begin),
            chain,
            tuple(range(-1, len(chain) - 1)),
            reads_logits=True,
        )
        (outputs,) = network.forward([inputs], [kv_cache])
        for row, token in zip(outputs.logits, piece, strict=True):
            own, likeliest = log_probabilities(row, token, self.top)
            self.log_probabilities.append(own)
            if self.top:
                self.top_log_probabilities.append(likeliest)
