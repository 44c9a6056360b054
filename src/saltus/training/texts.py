"""Read texts with any causal model once, and keep the edges of their tokens: all that an adapter's training needs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from saltus.networks.trained_files import fingerprint
from saltus.training.edges import edges
from saltus.training.packed_model import causal, prepared, said
from saltus.training.states import Sample, load_shards, write_shards

ROWS = 64  # laws of a vocabulary in float64 at a time


@dataclass(frozen=True, eq=False)
class Texts:
    """Texts end to end; 16 bytes for each token and temperature. See `training.lessons.Corpus`."""

    tokens: Int[Tensor, "tokens"]
    edges: Float[Tensor, "temperatures tokens 2"]  # 0, 0 for tokens of a prompt
    texts: np.ndarray  # [texts, 4]: start, prompt length, length, temperature × 1,000
    temperatures: tuple[float, ...]
    target: str  # fingerprint of the model whose edges they are


def collect_edges(
    model: Any, samples: Sequence[Sample], folder: Path, temperatures: Sequence[float] = (0.7, 1.0), slots: int = 1024
) -> Iterator[int]:
    """Write shards of edges, of the first `slots` tokens of each text; yields how many texts are done.

    As `states.collect`, but without states, by any Hugging Face model on any device, for texts of any length.
    Errors: ValueError where the folder holds shards of another model, or of other temperatures or texts.
    """
    prepared(model)
    papers = {"target": fingerprint(model), "temperatures": list(temperatures), "slots": slots}
    yield from write_shards(samples, folder, papers, lambda sample: _read(model, sample, temperatures, slots))


def load_edges(folder: Path) -> Texts:
    """Errors: ValueError where there are none, or where a shard is damaged."""
    shards, texts, papers = load_shards(folder, ("target", "temperatures", "slots"))
    return Texts(shards["tokens"].long(), shards["edges"], texts, tuple(papers["temperatures"]), papers["target"])


@torch.no_grad()
def _read(model: Any, sample: Sample, temperatures: Sequence[float], slots: int) -> dict[str, Tensor]:
    """One text: the laws of its completion are those after the token before each."""
    tokens = torch.tensor([*sample.prompt, *sample.completion])[:slots]
    first, found = len(sample.prompt), torch.zeros(len(temperatures), len(tokens), 2, dtype=torch.float64)
    if len(tokens) > first:
        own = tokens.to(model.device)
        logits = said(model, causal(own[None]), torch.arange(first - 1, len(own) - 1, device=own.device))
        for place, temperature in enumerate(temperatures):
            for start in range(0, len(logits), ROWS):
                rows = slice(start, start + ROWS)
                here = edges(logits[rows], own[first:][rows], temperature)
                found[place, first:][rows] = torch.stack([here.low, here.high], -1).cpu()
    texts = torch.tensor([[min(first, len(tokens)), len(tokens), round(1000 * sample.temperature)]])
    return {"tokens": tokens.to(torch.int32), "edges": found, "texts": texts}
