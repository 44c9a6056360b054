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


def found(logits: torch.Tensor, temperatures: list[float], positions: np.ndarray) -> torch.Tensor:
    keys = torch.from_numpy(NOISE.keys_of_tokens("text", positions).view(np.int64).copy())
    inputs = logits, keys, torch.tensor(temperatures, dtype=torch.float64)
    return pick_kernels.find_tokens(*(each.to(DEVICE) for each in inputs)).cpu()


def picked(logits: torch.Tensor, temperatures: list[float], positions: np.ndarray) -> list[int]:
    return found(logits, temperatures, positions)[2].long().tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_likeliest_token_is_the_first_of_equal_ones(dtype):
    logits = torch.randn(6, 3000, generator=torch.Generator().manual_seed(0)).to(dtype)
    logits[0, [5, 1500, 2999]] = 9.0
    logits[1, [2047, 2048]] = 9.0
    logits[2] = -1.0
    logits[3, 1700] = math.nan
    logits[4] = -math.inf
    tokens, greatest, _ = found(logits, [0.0, 1.0] * 3, np.arange(6))
    assert tokens.tolist()[:3] == [5, 2047, 0]
    assert tokens[5] == logits[5].argmax()
    assert greatest.isfinite().tolist() == [True, True, True, False, False, True]
    assert torch.equal(greatest[[0, 1, 2, 5]], logits[[0, 1, 2, 5]].max(-1).values.double())


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


def test_logits_of_rows_that_nobody_reads_are_not_read():
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(2))
    logits[1] = math.nan  # of which the greatest one would be ∞
    given = found(logits, [0.0, -1.0, 1.0], np.arange(3))
    assert given[:, 1].tolist() == [-1] * 3
    assert torch.equal(given[0, [0, 2]].long(), logits[[0, 2]].argmax(-1))
    assert given[2].tolist()[::2] == [-1, *picked(logits[2:], [1.0], np.arange(2, 3))]
