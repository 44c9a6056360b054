"""Run heads on a GPU as one CUDA graph for each number of texts; their outputs are copied to the host at once."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from saltus.methods.mtpc.heads import HeadModel, HeadOutputs
from saltus.models.cuda.cuda_graphs import GraphCapture
from saltus.models.cuda.fixed_shape_calls import size_class
from saltus.models.cuda.host_copies import to_host


class GraphedHeads:
    """Heads whose weights are not changed any more."""

    def __init__(self, model: HeadModel, use_cuda_graphs: bool = True) -> None:
        self.model, self.use_cuda_graphs = model, use_cuda_graphs
        self.capture = GraphCapture(model.tokens.device)
        self.inputs: dict[int, tuple[Tensor, Tensor]] = {}  # by the size of a batch, at addresses that never change
        self.graphs: dict[int, tuple[Any, HeadOutputs]] = {}

    @torch.inference_mode()
    def __call__(self, states: Float[Tensor, "texts hidden"], tokens: Int[Tensor, "texts"]) -> HeadOutputs:
        """See `HeadModel.draft_outputs`; in the memory of the host."""
        size = size_class(len(states))
        if size not in self.inputs:
            self.inputs[size] = states.new_zeros(size, states.shape[1]), self.model.tokens.new_zeros(size)
        for place, given in zip(self.inputs[size], (states, tokens), strict=True):
            place[: len(given)].copy_(given, non_blocking=True)
        outputs = self._run(size)
        texts = (each[: len(states)] for each in (outputs.initial, outputs.transitions, outputs.logits))
        codes = None if outputs.codes is None else outputs.codes[: len(states)]
        initial, transitions, logits, *rest = to_host(*texts, *([] if codes is None else [codes]))
        return HeadOutputs(initial, transitions, logits, *rest)

    def _run(self, size: int) -> HeadOutputs:
        """The outputs for the inputs of this size; the next run overwrites them."""
        inputs = self.inputs[size]
        if self.use_cuda_graphs and size not in self.graphs:
            captured = self.capture.capture_or_warn(lambda: self.model.draft_outputs(*inputs), self.graphs)
            self.use_cuda_graphs = captured is not None
            self.graphs |= {} if captured is None else {size: captured}
        if not self.use_cuda_graphs:
            return self.model.draft_outputs(*inputs)
        graph, outputs = self.graphs[size]
        graph.replay()
        return outputs
