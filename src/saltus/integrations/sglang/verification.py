"""Verify a draft tree in SGLang's layout by the rule `match`: one seed is one text, whatever was drafted."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int
from torch import Tensor

from saltus.core.canvas import Canvas, continuation
from saltus.core.distributions import TargetDistributions
from saltus.core.forward import ForwardInputs, ForwardOutputs
from saltus.core.noise import Noise
from saltus.core.rules import match
from saltus.core.sampling import MAX_BIAS, MAX_TEMPERATURE, Sampling
from saltus.core.tree import Tree

EVERY_TOKEN = 1 << 30  # SGLang's top_k without a limit
PADDING_TOKEN = 0  # of nodes that fill up a tree: drafts like others


@dataclass(frozen=True)
class PaddedTree:
    """A draft tree of a fixed number of nodes, of which node 0 is the last decided token."""

    tokens: Int[np.ndarray, "nodes"]
    parents: Int[np.ndarray, "nodes"]  # −1 of node 0

    @property
    def mask(self) -> Bool[np.ndarray, "nodes nodes"]:
        """True where the row's node attends to the column's: its ancestors and itself."""
        mask = np.eye(len(self.parents), dtype=bool)
        for node, parent in enumerate(self.parents.tolist()[1:], start=1):
            mask[node] |= mask[parent]
        return mask


def padded_tree(last_token: int, tree: Tree, num_nodes: int) -> PaddedTree:
    """The best nodes of a tree below the last decided token; the nodes that are left are drafts of PADDING_TOKEN."""
    kept = tree.prune(num_nodes - 1)
    missing = num_nodes - 1 - len(kept.tokens)
    tokens = [last_token, *kept.tokens, *[PADDING_TOKEN] * missing]
    parents = [-1, *(parent + 1 for parent in kept.parents), *[0] * missing]
    return PaddedTree(np.array(tokens, dtype=np.int64), np.array(parents, dtype=np.int64))


@dataclass(frozen=True)
class WrittenText:
    """A prompt and the tokens after it. Penalties of presence and frequency, and bans by length, count these alone."""

    prompt: Sequence[int]
    new: Sequence[int]

    def canvas(self, num_holes: int) -> Canvas:
        """The text, followed by holes."""
        return continuation(self.prompt, len(self.new) + num_holes).fill(np.array(self.new, dtype=np.int64))


def verify_tree(
    text: WrittenText, tree: PaddedTree, logits: Float[Tensor, "nodes vocab"], sampling: Sampling, noise: Noise
) -> tuple[list[int], list[int]]:
    """The accepted nodes, node 0 first, and the token that was decided after each of them.

    `text` ends with the token of node 0; `logits` are those of the nodes.
    """
    canvas = text.canvas(len(tree.tokens))
    inputs = ForwardInputs(canvas, tuple(tree.tokens[1:].tolist()), tuple((tree.parents[1:] - 1).tolist()))
    distributions = TargetDistributions(inputs, ForwardOutputs(logits), sampling, noise)
    tokens, node = match(inputs, distributions)
    return [0, *(ancestor + 1 for ancestor in inputs.path(node))], tokens.tolist()


def pick_next(text: WrittenText, logits: Float[Tensor, "vocab"], sampling: Sampling, noise: Noise) -> int:
    """The token after a text, without drafts."""
    last = np.array([*text.prompt, *text.new][-1:])
    return verify_tree(text, PaddedTree(last, np.array([-1])), logits[None], sampling, noise)[1][0]


def request_sampling(request: Any) -> Sampling:
    """The sampling parameters of a request of SGLang. It writes greedy decoding as top_k = 1.

    Numbers that SGLang lets pass and Saltus does not become the next ones that Saltus takes: an error here would end
    the server.
    """
    given, tokenizer = request.sampling_params, getattr(request, "tokenizer", None)
    ends = {
        getattr(tokenizer, "eos_token_id", None),
        *(given.stop_token_ids or ()),
        *(getattr(request, "eos_token_ids", None) or ()),
        *(getattr(tokenizer, "additional_stop_token_ids", None) or ()),
    }
    biases = {int(token): float(bias) for token, bias in (given.logit_bias or {}).items()}
    return Sampling(
        temperature=0.0 if given.top_k == 1 else min(given.temperature, MAX_TEMPERATURE),
        top_k=0 if given.top_k in (-1, 1) or given.top_k >= EVERY_TOKEN else given.top_k,
        top_p=given.top_p,
        min_p=given.min_p,
        repetition_penalty=min(max(given.repetition_penalty, 1e-6), 1e6),
        presence_penalty=given.presence_penalty,
        frequency_penalty=given.frequency_penalty,
        logit_bias=tuple(
            (token, min(bias, MAX_BIAS)) for token, bias in biases.items() if token >= 0 and not math.isnan(bias)
        ),
        min_new_tokens=given.min_new_tokens or 0,
        end_tokens=tuple(sorted(token for token in ends if token is not None and token >= 0)),
    )


def request_noise(request: Any) -> Noise:
    """The random numbers of a request: by its `sampling_seed`, or else by its id, which is new each time."""
    seed = request.sampling_params.sampling_seed
    if seed is None:
        seed = int.from_bytes(blake2b(str(request.rid).encode(), digest_size=7).digest(), "big")
    return Noise(seed % (1 << 63))
