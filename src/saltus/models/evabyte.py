"""Evaluate trees on EvaByte: exact attention within a window of bytes, summaries of chunks for the windows before it.

A call of rows never crosses the end of a window: before the first token of a window is read, the KV cache replaces the
keys and values of the window before it by their summaries. These depend on every token of that window, so the part of
a tree that lies behind the end of a window is evaluated by a call for each node that begins it, on a copy of the
KV cache. A row rounds the same way in every such call.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch

from saltus.core.canvas import continuation
from saltus.core.forward import ForwardInputs, ForwardOutputs
from saltus.kernels import native
from saltus.models.causal import CausalNetwork
from saltus.models.cpu.chunked_prefill import Chunk, prefill_and_tree_chunks
from saltus.models.cpu.eva_kv_cache import EvaKVCache
from saltus.models.cpu.kv_cache import KVCache
from saltus.models.cpu.native_decoder import NativeDecoder
from saltus.models.cpu.torch_decoder import TorchDecoder

log = logging.getLogger("saltus")


@dataclass
class EvaByteNetwork(CausalNetwork):
    """An EvaByteDecoder as a target network, without adapters. On CUDA rounding depends on the shapes of calls."""

    def __post_init__(self) -> None:
        if self.model.device.type == "cuda" and self.batch_invariant:
            log.warning("EvaByte on CUDA: rounding depends on the shapes of calls, and texts may differ by that")
            self.batch_invariant = False
        self.fixed_shapes = False
        self.summaries = self.model.chunk_summaries()
        super().__post_init__()
        if self.native_decoder is None:
            self.native_decoder = TorchDecoder(self.model)

    @property
    def compute_path(self) -> Literal["native", "torch"]:
        """See TargetNetwork."""
        return "native" if isinstance(self.native_decoder, NativeDecoder) else "torch"

    def new_kv_cache(self) -> EvaKVCache:
        return EvaKVCache(window=self.summaries.window, slots_per_window=self.summaries.per_window)

    def attach_adapter(self, adapter: Any) -> None:
        """Errors: ValueError, unless there is no adapter."""
        if adapter is not None:
            raise ValueError("EvaByte carries no adapters yet; draft with lookup, jacobi without a model, or heads")

    def _check_queries_supported(self) -> None:
        raise ValueError("EvaByte carries no adapters yet, so it evaluates no query nodes; draft with another method")

    @torch.inference_mode()
    def forward(self, batch: Sequence[ForwardInputs], kv_caches: Sequence[Any]) -> list[ForwardOutputs]:
        if any(inputs.query_nodes for inputs in batch):
            self._check_queries_supported()
        inside = [self._nodes_in_window(inputs) for inputs in batch]
        trees = [
            _subtree(inputs, nodes) if len(nodes) < len(inputs.tokens) else inputs
            for inputs, nodes in zip(batch, inside, strict=True)
        ]
        all_outputs = super().forward(trees, kv_caches)
        return [
            outputs if tree is inputs else self._add_later_windows(inputs, nodes, outputs, kv_cache)
            for inputs, nodes, tree, outputs, kv_cache in zip(batch, inside, trees, all_outputs, kv_caches, strict=True)
        ]

    def _forward_prepared(self, inputs: ForwardInputs, kv_cache: Any) -> None:
        """No call is prepared for texts of several windows."""

    def _nodes_in_window(self, inputs: ForwardInputs) -> list[int]:
        """The nodes in the window of the last decided token."""
        length = len(inputs.canvas.decided_prefix)
        window_left = -length % self.summaries.window
        return [node for node, depth in enumerate(inputs.depths) if depth < window_left]

    def _add_later_windows(
        self, inputs: ForwardInputs, inside: Sequence[int], outputs: ForwardOutputs, kv_cache: EvaKVCache
    ) -> ForwardOutputs:
        """The outputs of the whole tree, given those of the nodes in the first window."""
        calls, forks, roots = [], [], []
        place = {node: slot for slot, node in enumerate(inside)}
        for node, parent in enumerate(inputs.parents):
            if node in place or (parent >= 0 and parent not in place):
                continue
            tokens = np.concatenate([inputs.canvas.decided_prefix, inputs.path_tokens(node)])
            with native.kernel_threads_only() if self.batch_invariant else contextlib.nullcontext():
                slots = [place[node_on_path] for node_on_path in inputs.path(parent)]
                forks.append(kv_cache.fork(slots, tokens[:-1], self.summaries))
            roots.append(_descendants(inputs, node))
            below = _subtree(inputs, roots[-1][1:])
            calls.append(replace(below, canvas=continuation(tokens, 1)))
        rows = [[-1, *inside], *roots]
        parts = [outputs, *self.forward(calls, forks)]
        return _merged(parts, rows, len(inputs.tokens), outputs.context_tokens_read)

    def _chunks(self, sequence: int, inputs: ForwardInputs, kv_cache: KVCache, past_length: int) -> Iterator[Chunk]:
        for chunk in prefill_and_tree_chunks(sequence, inputs, kv_cache, past_length, self.summaries.window):
            slots = self.summaries.slots_before(int(chunk.rows.positions[0]))
            yield replace(chunk, rows=replace(chunk.rows, past_length=slots))

    def _run_model(self, chunks: Sequence[Chunk]) -> tuple[torch.Tensor, torch.Tensor]:
        for chunk in chunks:
            kv_cache, first = chunk.rows.kv_cache, int(chunk.rows.positions[0])
            assert isinstance(kv_cache, EvaKVCache)
            if kv_cache.num_windows < first // self.summaries.window:
                kv_cache.replace_window(self.summaries)
        return super()._run_model(chunks)


def _descendants(inputs: ForwardInputs, root: int) -> list[int]:
    """A node and all nodes below it, in order."""
    descendants = {root}
    for node in range(root + 1, len(inputs.tokens)):
        if inputs.parents[node] in descendants:
            descendants.add(node)
    return sorted(descendants)


def _subtree(inputs: ForwardInputs, nodes: Sequence[int]) -> ForwardInputs:
    """The same inputs with these nodes alone; a node whose parent is none of them follows the decided tokens."""
    place = {node: number for number, node in enumerate(nodes)}
    parents = tuple(place.get(inputs.parents[node], -1) for node in nodes)
    tokens = tuple(inputs.tokens[node] for node in nodes)
    return replace(inputs, tokens=tokens, parents=parents, draft_distributions=None, kinds=())


def _merged(parts: Sequence[ForwardOutputs], rows: Sequence[Sequence[int]], nodes: int, context: int) -> ForwardOutputs:
    """One output of several: `rows` are the nodes that the logits of each part are of; −1 is the decided text."""
    first, states = parts[0], None
    logits = first.logits.new_empty(1 + nodes, first.logits.shape[-1])
    for part, part_rows in zip(parts, rows, strict=True):
        logits[[1 + node for node in part_rows]] = part.logits
    if first.hidden_states is not None:
        states = first.hidden_states.new_empty(context + nodes, first.hidden_states.shape[-1])
        states[:context] = first.hidden_states[:context]
        for part, part_rows in zip(parts, rows, strict=True):
            assert part.hidden_states is not None
            part_nodes = [node for node in part_rows if node >= 0]
            first_row = len(part.hidden_states) - len(part_nodes)
            states[[context + node for node in part_nodes]] = part.hidden_states[first_row:]
    return replace(
        first, logits=logits, hidden_states=states, seconds=sum(part.seconds for part in parts),
        num_rows=sum(part.num_rows for part in parts),
    )  # fmt: skip
