"""Find the likeliest tokens of rows of logits on their device, so that the host copies these and not the rows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from saltus.core.candidates import NUM_CANDIDATES, Candidates
from saltus.core.forward import ForwardInputs


def find_candidates(batch: Sequence[ForwardInputs], logits: Sequence[Tensor]) -> list[list[Candidates] | None]:
    """The likeliest tokens of the rows of texts that ask for them, [1 + draft tokens, vocab] each, by one copy.

    None for texts that do not ask, and for those without rows.
    """
    asking = [number for number, rows in enumerate(logits) if batch[number].candidate_temperature and len(rows)]
    found: list[list[Candidates] | None] = [None] * len(batch)
    if not asking:
        return found
    counts = [1 + batch[number].num_draft_tokens for number in asking]
    rows = torch.cat([logits[number][:count] for number, count in zip(asking, counts, strict=True)]).float()  # a copy
    best, tokens = rows.topk(min(NUM_CANDIDATES, rows.shape[1]))
    scores = rows.sub_(best[:, :1])
    temperatures = np.repeat([batch[number].candidate_temperature for number in asking], counts).astype(np.float32)
    if (temperatures != 1).any():
        scores = scores.div_(torch.from_numpy(temperatures).to(rows.device)[:, None])
    totals = scores.exp_().sum(-1, keepdim=True, dtype=torch.float64)
    host = torch.cat([tokens.double(), best.double(), totals], -1).cpu().numpy()
    likely, row = best.shape[1], 0
    for number, count in zip(asking, counts, strict=True):
        found[number] = [
            Candidates(one[:likely].astype(np.int64), one[likely:-1].astype(np.float32), float(one[-1]), rows.shape[1])
            for one in host[row : row + count]
        ]
        row += count
    return found
