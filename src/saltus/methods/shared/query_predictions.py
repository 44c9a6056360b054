"""Turn the last hidden states of a drafter's queries into predictions: likely tokens, their correction, paths."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from saltus.kernels.batch_invariant_ops import linear
from saltus.methods.shared.draft_tree import LikelyTokens, PositionPredictions
from saltus.methods.shared.hidden_state_correction import TokenCorrectionModel, rms_normalized
from saltus.methods.shared.logit_correction import NonlinearCorrection
from saltus.methods.shared.row_candidates import PathKernel, RowCandidates, path_kernel, rows_likely_tokens


class QueryPredictor:
    """The predictions of a drafter, a DraftModel or a DFlashModel, whose weights are not changed any more."""

    def __init__(self, model: Any) -> None:
        self.model, self.device = model, model.tokens.device
        self.token_ids = model.tokens.cpu().numpy()
        self.correction = None if model.correction is None else self._numpy_correction(model.correction)
        self.path_kernel = self._path_kernel()

    def __call__(self, logits: Tensor, hidden_states: Tensor) -> PositionPredictions:
        """The predictions of queries, given their logits over the drafted tokens and their last hidden states."""
        return self.of_likely_tokens(rows_likely_tokens(logits), self._position_inputs(hidden_states))

    def of_texts(self, texts: Sequence[tuple[Tensor, Tensor]]) -> list[PositionPredictions]:
        """Those of several texts, each with such logits and states; what a GPU finds is copied for all at once."""
        if self.device.type == "cpu":
            return [self(*text) for text in texts]
        logits, states = (torch.cat(each) for each in zip(*texts, strict=True))
        likely, inputs = rows_likely_tokens(logits), self._position_inputs(states)
        counts = [len(own) for own, _ in texts]
        rows = [slice(end - count, end) for end, count in zip(accumulate(counts), counts, strict=True)]
        return [self.of_likely_tokens(likely[own], inputs[own]) for own in rows]

    def _position_inputs(self, hidden_states: Tensor) -> np.ndarray:
        inputs = np.empty((0, 0)) if self.correction is None else self.correction.position_inputs(hidden_states)
        return np.ascontiguousarray(inputs, dtype=np.float32)

    def of_likely_tokens(self, likely: Sequence[LikelyTokens], inputs: np.ndarray) -> PositionPredictions:
        """The same, given the likely tokens and the correction's inputs (float32) of each query."""
        grow = None
        if self.path_kernel is not None and isinstance(likely, RowCandidates):
            grow = partial(self.path_kernel, likely, inputs)
        return PositionPredictions(
            likely, self.token_ids, self.correction, inputs, self.model.shape.reads_uniforms, grow
        )

    def _numpy_correction(self, module: TokenCorrectionModel) -> NonlinearCorrection:
        weights = [module.left, module.second_left, module.output]
        left, second_left, output = (layer.weight.detach().cpu().float().numpy() for layer in weights)
        unembedding = self.model.lm_head.weight.detach().cpu().float().numpy()

        embeddings = self.model.embeddings[0].cpu()  # also of a drafter on a GPU: drafts are put together here

        def embed(token: int) -> np.ndarray:
            row = nn.functional.embedding(torch.tensor([token]), embeddings)
            return rms_normalized(row.float())[0].cpu().numpy()

        project = partial(rows_linear, module.state)
        return NonlinearCorrection(left, second_left, project, unembedding @ output, embed)

    @torch.inference_mode()
    def _path_kernel(self) -> PathKernel | None:
        tables, module = [], self.model.correction
        if self.correction is not None and module is not None:
            embedded = rms_normalized(nn.functional.embedding(self.model.tokens, self.model.embeddings[0]))
            embedded = embedded.to(module.left.weight.dtype)
            left, second_left = (rows_linear(layer, embedded) for layer in (module.left, module.second_left))
            tables = [torch.from_numpy(self.correction.right), left, second_left]
        return path_kernel(self.token_ids, self.correction, [table.cpu() for table in tables])


def rows_linear(layer: nn.Linear, x: Tensor) -> Tensor:
    """A linear layer; on the CPU no row depends on the others."""
    return linear(x, [layer.weight], [layer.bias])[0] if x.device.type == "cpu" else layer(x)
