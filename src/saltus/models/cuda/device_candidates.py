"""Find the likeliest tokens of rows of logits on their device, so that the host copies these and not the rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from saltus.core.candidates import NUM_CANDIDATES, Candidates
from saltus.core.forward import ForwardInputs
from saltus.models.cuda.host_copies import to_device, to_host


@dataclass(frozen=True)
class FoundCandidates:
    """The likeliest tokens of rows, on the device, and whose rows these are."""

    texts: list[int]  # numbers in the batch
    counts: list[int]  # rows of each
    table: Float[Tensor, "rows numbers"]  # float64: tokens, their logits, and `Candidates.total`
    vocab: int

    @classmethod
    def of(cls, batch: Sequence[ForwardInputs], logits: Sequence[Tensor]) -> FoundCandidates | None:
        """Of the texts that ask for them, whose rows are [1 + draft tokens or more, vocab]; None if none does."""
        texts = [number for number, rows in enumerate(logits) if batch[number].candidate_temperature and len(rows)]
        if not texts:
            return None
        counts = [1 + batch[number].num_draft_tokens for number in texts]
        rows = torch.cat(
            [logits[number][:count] for number, count in zip(texts, counts, strict=True)]
        ).float()  # a copy
        best, tokens = rows.topk(min(NUM_CANDIDATES, rows.shape[1]))
        scores = rows.sub_(best[:, :1])
        temperatures = np.repeat([batch[number].candidate_temperature for number in texts], counts).astype(np.float32)
        if (temperatures != 1).any():
            scores = scores.div_(to_device(temperatures, rows.device)[:, None])
        totals = scores.exp_().sum(-1, keepdim=True, dtype=torch.float64)
        return cls(texts, counts, torch.cat([tokens.double(), best.double(), totals], -1), rows.shape[1])

    def read(self, table: Float[Tensor, "rows numbers"], num_texts: int) -> list[list[Candidates] | None]:
        """Those of each text of a batch, given `table` in the memory of the host; None for texts that do not ask."""
        found: list[list[Candidates] | None] = [None] * num_texts
        likely, row, host = table.shape[1] // 2, 0, table.numpy()
        for number, count in zip(self.texts, self.counts, strict=True):
            found[number] = [
                Candidates(one[:likely].astype(np.int64), one[likely:-1].astype(np.float32), float(one[-1]), self.vocab)
                for one in host[row : row + count]
            ]
            row += count
        return found


def find_candidates(batch: Sequence[ForwardInputs], logits: Sequence[Tensor]) -> list[list[Candidates] | None]:
    """The likeliest tokens of the rows of texts that ask for them, by one copy; see `FoundCandidates`."""
    found = FoundCandidates.of(batch, logits)
    return [None] * len(batch) if found is None else found.read(to_host(found.table)[0], len(batch))
