"""Tokens that are picked on the GPU are those that the host would pick."""

import math

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from saltus.core.coupling import pick_token
from saltus.core.noise import Noise
from saltus.core.sampling import Sampling, token_distribution
from saltus.models.cuda import pick_kernels

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NOISE = Noise(5)
pytestmark = pytest.mark.slow


def picked(logits: torch.Tensor, temperatures: list[float], positions: np.ndarray) -> list[int]:
    keys = torch.from_numpy(NOISE.keys_of_tokens("text", positions).view(np.int64).copy())
    greatest = logits.max(-1).values.double()
    inputs = logits, greatest, keys, torch.tensor(temperatures, dtype=torch.float64)
    return pick_kernels.pick_tokens(*(each.to(DEVICE) for each in inputs)).cpu().long().tolist()


@pytest.mark.parametrize("vocab", [7, 1024, 3000, 70_000])  # one block; whole; with a rest; two spans of groups
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_picks_the_token_of_the_host(vocab, dtype):
    temperatures, positions = [0.7, 1.0, 0.0, 1.3, 20.0], np.arange(5) + 9
    logits = (3 * torch.randn(5, vocab, generator=torch.Generator().manual_seed(vocab))).to(dtype)
    expected = [
        pick_token(token_distribution(row, Sampling(temperature=t)), NOISE, "text", int(position)) if t else -1
        for row, t, position in zip(logits, temperatures, positions, strict=True)
    ]
    assert picked(logits, temperatures, positions) == expected


def test_the_host_decides_where_rounding_may_and_where_logits_are_not_finite():
    logits = torch.full((3, 50), -40.0)
    logits[0, 7] = math.nan
    logits[1, 7] = math.inf
    logits[2] = -math.inf
    assert picked(logits, [1.0] * 3, np.arange(3)) == [-1] * 3

    clear = torch.randn(64, 50, generator=torch.Generator().manual_seed(1))
    before = picked(clear, [1.0] * 64, np.arange(64))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pick_kernels, "CLEAR", 0.5)
        after = picked(clear, [1.0] * 64, np.arange(64))
    assert -1 not in before
    assert 0 < after.count(-1) < 64
    assert all(one in (-1, other) for one, other in zip(after, before, strict=True))
