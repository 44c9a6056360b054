"""Keep the likely tokens that a target last predicted after each token, and grow draft paths through them."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from saltus.core.candidates import Candidates
from saltus.core.distributions import Step
from saltus.core.tree import DraftNodes
from saltus.kernels import native
from saltus.kernels.native import structs
from saltus.methods.shared.draft_tree import MAX_GAP, Chooser, LikelyTokens, draft_nodes, grown_nodes, most_likely
from saltus.methods.shared.row_candidates import RowCandidates, grow_arrays, rows_likely_tokens, supports_chooser

MAX_TOKENS = 16384  # after which a table keeps candidates: 9 MB
FIRST_TOKENS = 256  # that a new table has room for
CONFIDENCE = 0.75  # a factor of probabilities, since the tokens before were others; measured on answers of a chat model
NO_ROW = -1
SAMPLE = 16  # one of so many unlikely tokens is looked at for the weight of all


class CandidateTable:
    """The candidates after each token, as the target's latest call that read the token predicted them.

    This is the adjacency matrix of Token Recycling (Luo et al. 2024, §3), with logits. Where the table is full, the row
    that was taken first is given to the next token.
    """

    def __init__(self, max_tokens: int = MAX_TOKENS) -> None:
        self.max_tokens = max_tokens
        self.candidates = RowCandidates(0)  # grows with the tokens
        self.rows = array("i")  # [vocab]: the row after each token, NO_ROW for none
        self.tokens: list[int] = []  # of the rows
        self.num_taken = 0  # rows that were given to tokens, one after another
        self.kernels: dict[torch.dtype, Callable[..., int] | None] = {}
        self.record_struct, self.path_struct = structs.NearGreatestRows(), structs.DraftPaths()

    def record(self, step: Step) -> None:
        """Replace the candidates after all tokens that the step's call read: the last decided one and the drafts.

        Of a token that was read several times the text's own path counts, else the last node.
        """
        inputs, prefix, logits = step.inputs, step.canvas.decided_prefix, step.outputs.logits
        if not self.rows:
            self.rows = array("i", [NO_ROW]) * logits.shape[-1]
        read = {token: node + 1 for node, token in enumerate(inputs.tokens[: inputs.num_draft_tokens])}
        if len(prefix):
            read[int(prefix[-1])] = 0
        read |= {inputs.tokens[node]: node + 1 for node in inputs.path(step.last_node)}
        places = {self._row_of(token): row for token, row in read.items() if token < len(self.rows)}
        if step.outputs.candidates is not None:
            for place, row in places.items():
                self.candidates[place] = _likely(step.outputs.candidates[row], inputs.candidate_temperature)
            return
        if (kernel := self._kernel(logits)) is None:
            for place, likely in zip(places, rows_likely_tokens(logits[list(places.values())]), strict=True):
                self.candidates[place] = likely
            return
        numbers = (structs.INTEGER * (2 * len(places)))(*places.values(), *places)
        struct, start = self.record_struct, ctypes.addressof(numbers)
        struct.from_rows, struct.into_rows = start, start + ctypes.sizeof(numbers) // 2
        struct.all.x, struct.all.rows = logits.data_ptr(), len(places)
        kernel(ctypes.byref(struct))

    def _kernel(self, logits: Tensor) -> Callable[..., int] | None:
        """The kernel for these logits; None where there is none."""
        if logits.dtype not in self.kernels:  # of a table all logits are on one device
            self.kernels[logits.dtype] = native.kernel("near_greatest_rows", logits.dtype, logits.device)
        return self.kernels[logits.dtype] if logits.is_contiguous() else None

    def _row_of(self, token: int) -> int:
        """The row after a token, a new one if it has none."""
        if self.rows[token] == NO_ROW:
            row = self.num_taken % self.max_tokens
            self.num_taken += 1
            if row < len(self.tokens):
                self.rows[self.tokens[row]] = NO_ROW
                self.tokens[row] = token
            else:
                self.tokens.append(token)
                if row == len(self.candidates):
                    self._grow(min(2 * row or FIRST_TOKENS, self.max_tokens))
            self.rows[token] = row
        return self.rows[token]

    def _grow(self, max_tokens: int) -> None:
        self.candidates = self.candidates.copied(max_tokens)
        near, paths = self.record_struct.all, self.path_struct
        self.candidates.point(near)
        near.size, near.sample = len(self.rows), SAMPLE
        paths.columns, paths.logits, paths.counts, paths.rests = near.columns, near.values, near.counts, near.rests
        paths.rows = self.rows.buffer_info()[0]

    def after(self, token: int) -> tuple[np.ndarray, np.ndarray, float]:
        """The candidates after a token: ids, logits, and the weight Σ exp of all other tokens; empty if unknown."""
        row = self.rows[token] if token < len(self.rows) else NO_ROW
        if row == NO_ROW:
            return np.empty(0, dtype=np.int64), np.empty(0, dtype=np.float32), 0.0
        likely = self.candidates[row]
        return likely.columns, likely.logits, likely.rest

    def paths(self, last: int, choose: Chooser, max_nodes: int, max_depth: int, source: str) -> list[DraftNodes]:
        """The likeliest paths after the token `last`, of at most `max_nodes` nodes, `max_depth` of them on a path."""
        if last >= len(self.rows) or self.rows[last] == NO_ROW:
            return []
        if supports_chooser(choose):
            self.path_struct.last_column = last
            grown = grow_arrays(choose, max_depth, self.path_struct, max_nodes, CONFIDENCE)
            if grown is not None:
                parents, tokens, chances = grown
                return [DraftNodes(tokens, parents, chances.astype(np.float64), source)] if len(tokens) else []
        nodes = grown_nodes(_PathPredictions(self, max_depth), [last], _confident(choose), max_nodes)
        return draft_nodes(nodes, source)


def _likely(candidates: Candidates, temperature: float) -> LikelyTokens:
    """Of what a GPU has found; the weight of all other tokens is known at the temperature 1."""
    order = np.argsort(candidates.tokens)
    tokens, gaps = candidates.tokens[order], candidates.logits[order] - candidates.logits.max()
    near = gaps > -MAX_GAP
    if not near.any():  # logits that are not numbers
        return LikelyTokens(tokens[near], gaps[near], 0.0)
    total = candidates.total if temperature == 1 else float(np.exp(gaps).sum(dtype=np.float64))
    return most_likely(tokens[near], gaps[near], total)


@dataclass(frozen=True, eq=False)
class _PathPredictions:
    """The candidates of each position of a path, which depend on the token before it alone."""

    table: CandidateTable
    num_positions: int
    grow: None = None

    def candidates(self, position: int, path: Sequence[int]) -> tuple[np.ndarray, np.ndarray, float]:
        return self.table.after(path[-1])


def _confident(choose: Chooser) -> Chooser:
    return lambda *given: [(token, CONFIDENCE * chance) for token, chance in choose(*given)]
