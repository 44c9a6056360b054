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

from saltus.networks.loading.drafter_files import model_fingerprint
from saltus.training.data.hidden_states import Sample, load_shards, write_shards
from saltus.training.data.packed_forward import pack_causal, packed_logits, prepare_model
from saltus.training.data.uniform_intervals import uniform_intervals

ROWS_PER_CHUNK = 64  # laws of a vocabulary in float64 at a time


@dataclass(frozen=True, eq=False)
class TextCorpus:
    """Texts end to end; 16 bytes for each token and temperature. See `training.lessons.Corpus`."""

    tokens: Int[Tensor, "tokens"]
    uniform_intervals: Float[Tensor, "temperatures tokens 2"]  # 0, 0 for tokens of a prompt
    text_table: np.ndarray  # [texts, 4]: start, prompt length, length, temperature × 1,000
    temperatures: tuple[float, ...]
    target_fingerprint: str  # fingerprint of the model whose edges they are


def collect_uniform_intervals(
    model: Any,
    samples: Sequence[Sample],
    folder: Path,
    temperatures: Sequence[float] = (0.7, 1.0),
    max_length: int = 1024,
) -> Iterator[int]:
    """Write shards of edges, of the first `slots` tokens of each text; yields how many texts are done.

    As `states.collect`, but without states, by any Hugging Face model on any device, for texts of any length.
    Errors: ValueError where the folder holds shards of another model, or of other temperatures or texts.
    """
    prepare_model(model)
    papers = {"target": model_fingerprint(model), "temperatures": list(temperatures), "slots": max_length}
    yield from write_shards(samples, folder, papers, lambda sample: _read_text(model, sample, temperatures, max_length))


def load_uniform_intervals(folder: Path) -> TextCorpus:
    """Errors: ValueError where there are none, or where a shard is damaged."""
    shards, texts, papers = load_shards(folder, ("target", "temperatures", "slots"))
    return TextCorpus(shards["tokens"].long(), shards["edges"], texts, tuple(papers["temperatures"]), papers["target"])


@torch.no_grad()
def _read_text(model: Any, sample: Sample, temperatures: Sequence[float], max_length: int) -> dict[str, Tensor]:
    """One text: the laws of its completion are those after the token before each."""
    tokens = torch.tensor([*sample.prompt, *sample.completion])[:max_length]
    first, found = len(sample.prompt), torch.zeros(len(temperatures), len(tokens), 2, dtype=torch.float64)
    if len(tokens) > first:
        own = tokens.to(model.device)
        logits = packed_logits(model, pack_causal(own[None]), torch.arange(first - 1, len(own) - 1, device=own.device))
        for place, temperature in enumerate(temperatures):
            for start in range(0, len(logits), ROWS_PER_CHUNK):
                rows = slice(start, start + ROWS_PER_CHUNK)
                here = uniform_intervals(logits[rows], own[first:][rows], temperature)
                found[place, first:][rows] = torch.stack([here.low, here.high], -1).cpu()
    texts = torch.tensor([[min(first, len(tokens)), len(tokens), round(1000 * sample.temperature)]])
    return {"tokens": tokens.to(torch.int32), "edges": found, "texts": texts}
