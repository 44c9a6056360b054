"""Turn the logits of a verification call into the target's distributions, and record the decoding step."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from saltus.core.candidates import truncated_distribution
from saltus.core.canvas import Canvas
from saltus.core.constraint import Constraint, restricted
from saltus.core.coupling import draft_tokens, gumbel_max_token, pick_token
from saltus.core.forward import ForwardInputs, ForwardOutputs
from saltus.core.noise import Noise
from saltus.core.picking import Distribution, one_hot
from saltus.core.sampling import Sampling, changed_scores, float_row, greedy_tokens, token_distribution


@dataclass
class TargetDistributions:
    """The distributions after the decided tokens (−1) and after each node of one pass, computed on first use.

    Of the target; drafting token by token uses it for the draft model, too.
    """

    inputs: ForwardInputs
    outputs: ForwardOutputs
    sampling: Sampling
    noise: Noise
    constraint: Constraint | None = None  # of a continuation
    _distributions: dict[int, Distribution] = field(default_factory=dict)
    _picks: dict[int, int] = field(default_factory=dict)

    def __getitem__(self, node: int) -> Distribution:
        if node not in self._distributions:
            self._distributions[node] = self._compute(node)
        return self._distributions[node]

    def _compute(self, node: int) -> Distribution:
        canvas, inputs, sampling = self.inputs.canvas, self.inputs, self.sampling
        index = canvas.num_decided + self.depth(node)
        if sampling.hole_end_tokens and node >= 0 and sampling.num_padding_after(index - 1, inputs.tokens[node]):
            return one_hot(inputs.tokens[node])
        if self.outputs.candidates is not None and self.constraint is None and sampling.needs_candidates:
            found = truncated_distribution(self.outputs.candidates[node + 1], sampling)
            if found is not None:
                return found
        return self._from_logits(self._allowed_logits(node), self._context(node), index)

    def _context(self, node: int) -> np.ndarray | None:
        """The text up to `node`, if the sampling reads it."""
        if not self.sampling.uses_context:
            return None
        canvas, path = self.inputs.canvas, np.array(self.inputs.path_tokens(node), dtype=np.int64)
        return np.concatenate([canvas.tokens[canvas.known_positions], path])

    def _allowed_logits(self, node: int) -> Tensor:
        """The logits after `node`, −∞ for tokens that the constraint forbids."""
        inputs, row = self.inputs, self.outputs.logits[node + 1]
        if self.constraint is None or node >= inputs.num_draft_tokens:  # queries draft, and have no text to check
            return row
        text = [*inputs.canvas.new_tokens.tolist(), *inputs.path_tokens(node)]
        return restricted(row, self.constraint.allowed(text))

    def _from_logits(self, row: Tensor, context: np.ndarray | None, index: int) -> Distribution:
        if self.outputs.token_ids is None:
            return token_distribution(row, self.sampling, context, index)
        ids = self.outputs.token_ids.cpu().numpy()
        if self.sampling.token_independent:
            distribution = token_distribution(row, self.sampling)
            return replace(distribution, tokens=ids if distribution.tokens is None else ids[distribution.tokens])
        whole = np.full(1 + int(max(ids[-1], -1 if context is None else context.max())), -np.inf, np.float32)
        whole[ids] = float_row(row)
        return token_distribution(torch.from_numpy(whole), self.sampling, context, index)

    def ends_hole(self, tokens: Sequence[int]) -> bool:
        """True if the last of `tokens`, decided by this call, ends its hole: the tokens after it are padding."""
        return bool(self.sampling.hole_end_tokens and self.num_padding_after(tokens))

    def num_padding_after(self, tokens: Sequence[int] | np.ndarray) -> int:
        """How many tokens after the last of `tokens` pad its hole, because it ends it."""
        return self.sampling.num_padding_after(self.inputs.canvas.num_decided + len(tokens) - 1, int(tokens[-1]))

    def depth(self, node: int) -> int:
        """How many tokens lie between the decided ones and the position that this node's distribution is for."""
        return self.inputs.depths[node] + (not self.inputs.has_own_position(node)) if node >= 0 else 0

    def position(self, node: int) -> int:
        """The position that this node's distribution is for."""
        return int(self.inputs.canvas.open_positions[self.depth(node)])

    def pick(self, node: int) -> int:
        """The text's own token after `node`, picked by the random numbers of its position."""
        if node not in self._picks:
            if self.sampling.plain_argmax and self.constraint is None and node < self.inputs.num_draft_tokens:
                likeliest, ids = self.outputs.likeliest, self.outputs.token_ids
                token = -1 if likeliest is None else int(likeliest[node + 1])
                if token < 0:
                    (token,) = greedy_tokens(self.outputs.logits[node + 1 : node + 2])
                self._picks[node] = token if ids is None else int(ids[token])
            elif (token := self._gumbel_max_token(node)) is not None:
                self._picks[node] = token
            else:
                self._picks[node] = pick_token(self[node], self.noise, "text", self.position(node))
        return self._picks[node]

    def _gumbel_max_token(self, node: int) -> int | None:
        """The text's own token after `node` where a kernel can find it among the logits."""
        sampling, row = self.sampling, self.outputs.logits[node + 1]
        if not sampling.is_gumbel_max or self.outputs.token_ids is not None:
            return None
        if self.constraint is None and sampling.token_independent:
            if self.outputs.picked is not None and (token := int(self.outputs.picked[node + 1])) >= 0:
                return token
        else:
            index = self.inputs.canvas.num_decided + self.depth(node)
            if sampling.hole_end_tokens or (scores := changed_scores(
                self._allowed_logits(node), sampling, self._context(node), index
            )) is None:  # fmt: skip
                return None
            row = torch.from_numpy(scores)
        return gumbel_max_token(row, sampling.temperature, self.noise, "text", self.position(node))

    def draft(self, node: int) -> tuple[int, float]:
        """The token of `pick`, with an estimate of the probability that it is the target's, too."""
        if self.sampling.plain_argmax:
            return self.pick(node), 1.0
        return draft_tokens(self[node], self.noise, "text", self.position(node))[0]


@dataclass(frozen=True)
class Step:
    """The record of one verification call: streaming, statistics and drafters read it."""

    canvas: Canvas  # before the step
    inputs: ForwardInputs
    outputs: ForwardOutputs
    distributions: TargetDistributions
    # decided by the step: accepted draft tokens, the verifier's own token, padding of a hole that ended
    tokens: np.ndarray
    last_node: int  # the last accepted node, −1 if none was
    num_padding_tokens: int = 0  # tokens at the end that pad a hole that ended


DecodeGenerator = Generator[ForwardInputs, ForwardOutputs, None]
"""Decodes one text: yields the inputs of each forward pass and is sent its outputs."""
