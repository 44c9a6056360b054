"""Evaluate trees on a model that fills holes anywhere: two streams of rows through the layers of one decoder.

Content rows are tokens; each sees the text that was given, which sees all of itself, and what was decided before it.
Query rows are the mask token at the position of a hole; they see the same and themselves, and say the law of that
hole (ASSD, §3). Keys and values are kept for content rows alone, in deciding order: what is decided later never
changes them, so that a call reads its new tokens and its queries, and nothing twice.

The decoder is a causal model's (rotary positions, told for each row), so its kernels and their equal rounding serve
here too; that it was trained for any subset, its configuration says.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from saltus.core.canvas import Canvas
from saltus.core.forward import ForwardInputs, ForwardOutputs
from saltus.drafting.pairwise_correction import PairwiseCorrection
from saltus.networks.kv_cache.kv_cache import KVCache
from saltus.networks.loading.model_folders import PAIRWISE_CORRECTION_FILE
from saltus.networks.models.causal import MAX_ROWS_PER_CALL, CausalNetwork, _Chunk
from saltus.networks.models.exact.attention import SequenceRows

ANY_SUBSET = "any_subset"  # in a model's configuration: {"mask": token, "blank": token that ends an open hole}


@dataclass
class OrderedKVCache(KVCache):
    """Keys and values of one text in deciding order, and where its tokens stand."""

    positions: np.ndarray = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    num_given: int = 0  # how many tokens saw all of each other

    def reuse_known_tokens(self, canvas: Canvas) -> int:
        """How many of the known tokens need not be read again; none, if the given ones are others."""
        known, before = canvas.known_positions, len(self.positions)
        count = self.reuse_prefix(canvas.tokens[known], num_recomputed=0)
        places = self.positions[: min(before, count)]
        if (
            self.num_given != len(canvas.given_positions)
            or len(places) < self.num_given
            or (places != known[: len(places)]).any()
        ):
            count = 0
        self.tokens, self.positions, self.num_given = self.tokens[:count], known, len(canvas.given_positions)
        return count


@dataclass
class AnySubsetNetwork(CausalNetwork):
    """An any-subset model behind Forward and Reply.

    Row 0 is for the first open hole, row i + 1 for the hole behind that of node i, given the text, the node's
    ancestors and itself. An auxiliary query is told no uniform; it is for the hole of its own depth, given the token
    that its group hangs from and what stands before that. On CUDA, calls round as their shapes have it.
    """

    any_subset = True
    pairwise_correction: PairwiseCorrection | None = None

    def __post_init__(self) -> None:
        self.free_shapes = self.free_shapes or self.model.device.type == "cuda"
        self.fixed_shapes = False
        conditioning = getattr(self.model.config, ANY_SUBSET)
        self.mask_token, self.blank_token = int(conditioning["mask"]), conditioning.get("blank")
        super().__post_init__()

    @property
    def max_rows_per_call(self) -> int:
        """A given text is read in one call, since all of it sees all of it."""
        return self.model.config.max_position_embeddings + MAX_ROWS_PER_CALL

    @staticmethod
    def context_tokens(canvas: Canvas) -> np.ndarray:
        return canvas.tokens[canvas.known_positions]

    def new_kv_cache(self) -> OrderedKVCache:
        return OrderedKVCache()

    def _check_queries_supported(self) -> None:
        """It always can."""

    def attach_adapter(self, adapter: Any) -> None:
        """Errors: ValueError: adapters are for causal models."""
        if adapter is not None:
            raise ValueError("adapters are for causal models, which this one is not; draft with assd")

    def add_hidden_state_layers(self, layers: Sequence[int]) -> None:
        """Errors: ValueError: states are those of causal models."""
        raise ValueError("drafters and heads read states of a causal model, which this one is not; draft with assd")

    def forward(self, batch: Sequence[ForwardInputs], kv_caches: Sequence[Any]) -> list[ForwardOutputs]:
        return [self._select_outputs(*one) for one in zip(batch, super().forward(batch, kv_caches), strict=True)]

    def _select_outputs(self, inputs: ForwardInputs, outputs: ForwardOutputs) -> ForwardOutputs:
        """Its rows as they were asked for; features are those of the rows, since drafts are not of what was read."""
        if not inputs.query_nodes and outputs.hidden_states is None:
            return replace(outputs, drafter_data=self.pairwise_correction)
        required, rows = required_distributions(inputs)
        states = outputs.hidden_states
        states = None if states is None else states[len(states) - len(required) :]
        if inputs.query_nodes:
            states = None if states is None else select_rows(states, rows)
            outputs = replace(outputs, logits=select_rows(outputs.logits, rows))
        return replace(outputs, hidden_states=states, drafter_data=self.pairwise_correction)

    def _reuse_kv_cache(self, kv_cache: Any, inputs: ForwardInputs) -> int:
        return kv_cache.reuse_known_tokens(inputs.canvas)

    def _chunks(self, sequence: int, inputs: ForwardInputs, kv_cache: KVCache, past_length: int) -> Iterator[_Chunk]:
        """New tokens, then the tokens of the tree, then the queries, all in one call."""
        canvas = inputs.canvas
        places = canvas.known_positions[past_length:]
        unread, drafts = len(places), inputs.num_draft_tokens
        queries, _ = required_distributions(inputs)
        contents = unread + drafts
        if contents + len(queries) > self.max_rows_per_call:
            raise ValueError(
                f"a call has {contents + len(queries)} rows, but {self.max_rows_per_call} fit; shorten the text"
            )
        visible = np.zeros((contents + len(queries),) * 2, dtype=np.uint8)
        given = max(len(canvas.given_positions) - past_length, 0)
        visible[:unread, :unread] = np.tri(unread, dtype=np.uint8)
        visible[:given, :given] = 1
        for node in range(drafts):
            row, parent = unread + node, inputs.parents[node]
            visible[row] = visible[unread + parent] if parent >= 0 else 0
            visible[row, :unread] = 1
            visible[row, row] = 1
        for number, (node, _) in enumerate(queries):
            row = contents + number
            visible[row, :contents] = visible[unread + node, :contents] if node >= 0 else 0
            visible[row, :unread] = 1
            visible[row, row] = 1
        open_ = canvas.open_positions
        nodes = open_[np.array(inputs.depths[:drafts], dtype=np.int64)]
        query_positions = open_[[place for _, place in queries]]
        tokens = [*canvas.tokens[places].tolist(), *inputs.tokens[:drafts], *[self.mask_token] * len(queries)]
        part = SequenceRows(kv_cache, past_length, np.concatenate([places, nodes, query_positions]), visible)
        yield _Chunk(sequence, tokens, part, len(queries), inputs.output_hidden_states)


LINK_TENSORS = ("left", "before", "right", "told")  # names in the file, in the order of the fields


def load_pairwise_correction(folder: Path, vocab_size: int, hidden_size: int) -> PairwiseCorrection | None:
    """Those of a model's folder. Errors: ValueError where they are damaged or fit other words or states."""
    if not (folder / PAIRWISE_CORRECTION_FILE).is_file():
        return None
    try:
        found = load_file(folder / PAIRWISE_CORRECTION_FILE)
        links = PairwiseCorrection(*(found[part].float().numpy() for part in LINK_TENSORS))
        (_, rank) = links.left.shape
    except (SafetensorError, KeyError, ValueError) as error:
        raise ValueError(
            f"{folder / PAIRWISE_CORRECTION_FILE} is damaged ({error}); delete it, or train the model again"
        ) from None
    if [part.shape for part in vars(links).values()] != [(vocab_size, rank)] * 3 + [(hidden_size, rank + 1)]:
        raise ValueError(
            f"{folder / PAIRWISE_CORRECTION_FILE} is of another model; delete it, or train the model again"
        )
    return links


def save_pairwise_correction(correction: PairwiseCorrection, folder: Path) -> None:
    """In bfloat16, beside the model's weights."""
    parts = {
        name: torch.from_numpy(part).bfloat16()
        for name, part in zip(LINK_TENSORS, vars(correction).values(), strict=True)
    }
    save_file(parts, folder / PAIRWISE_CORRECTION_FILE)


def select_rows(table: Float[Tensor, "rows size"], rows: Sequence[int]) -> Float[Tensor, "places size"]:
    """Some rows, some of them twice; on the CPU without torch, whose threads would wake for it."""
    if table.device.type != "cpu":
        return table[rows]
    bits = table.view(torch.int16 if table.element_size() == 2 else torch.int32).numpy()
    return torch.from_numpy(bits[rows]).view(table.dtype)


def required_distributions(inputs: ForwardInputs) -> tuple[list[tuple[int, int]], list[int]]:
    """Which laws are wanted, (token node that is seen last, number of the open hole), and which of them each row is.

    A group's first query is for the hole that its node's own row is for, so there it is the same.
    """
    found: dict[tuple[int, int], int] = {}
    rows = [found.setdefault((-1, 0), 0)]
    seen: list[int] = []
    for node, parent in enumerate(inputs.parents):
        auxiliary = inputs.has_own_position(node)
        seen.append((seen[parent] if parent >= 0 else -1) if auxiliary else node)
        key = seen[node], inputs.depths[node] + (not auxiliary)
        rows.append(found.setdefault(key, len(found)))
    return list(found), rows
