"""Texts with the uniform intervals of their tokens, by any causal model: the data of an adapter's training."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from saltus.core.picking import Coupling
from saltus.loading.model_identity import layers_digest, model_fingerprint
from saltus.training.data.hidden_states import Sample, load_shards, truncation_metadata, write_shards
from saltus.training.data.packed_forward import pack_causal, packed_logits, prepare_model
from saltus.training.data.uniform_intervals import ROWS_PER_CHUNK, Truncation, uniform_intervals
from saltus.training.loop.processes import ONE_PROCESS, Processes


@dataclass(frozen=True, eq=False)
class TextCorpus:
    """Concatenated texts; 16 bytes for each token and temperature. It implements `window_dataset.Corpus`."""

    tokens: Int[Tensor, "tokens"]
    uniform_intervals: Float[Tensor, "temperatures tokens 2"]  # 0, 0 for tokens of a prompt
    text_table: np.ndarray  # [texts, 4]: start, prompt length, length, temperature × 1,000
    temperatures: tuple[float, ...]
    target_fingerprint: str
    coupling: Coupling = "probability"  # of the intervals


def collect_uniform_intervals(
    model: Any,
    samples: Sequence[Sample],
    folder: Path,
    temperatures: Sequence[float] = (0.7, 1.0),
    max_length: int = 1024,
    coupling: Coupling = "probability",
    truncation: Truncation | None = None,
    processes: Processes = ONE_PROCESS,
    sharded: bool = False,
) -> Iterator[int]:
    """Write shards with the intervals of the first `max_length` tokens of each text; yields how many texts are done.

    Like `collect_hidden_states`, but without states, by any Hugging Face model on any device, which may be `sharded`.
    Errors: ValueError where the folder holds shards of another model, or of other temperatures or texts.
    """
    prepare_model(model)
    metadata = {"target": model_fingerprint(model), "temperatures": list(temperatures), "max_length": max_length}
    metadata |= {"layers": layers_digest(model), "coupling": coupling} | truncation_metadata(truncation)
    yield from write_shards(
        samples,
        folder,
        metadata,
        lambda sample: _read_text(model, sample, temperatures, max_length, coupling, truncation),
        processes,
        sharded,
    )


def load_uniform_intervals(folder: Path, num_texts: int | None = None) -> TextCorpus:
    """Those of the first texts. Errors: ValueError where the folder holds no shards, or a damaged one."""
    shards, texts, metadata = load_shards(
        folder, ("target", "temperatures", "max_length", "coupling", "top_k", "top_p"), num_texts
    )
    return TextCorpus(
        shards["tokens"].long(), shards["intervals"], texts, tuple(metadata["temperatures"]), metadata["target"],
        metadata["coupling"],
    )  # fmt: skip


@torch.no_grad()
def _read_text(
    model: Any,
    sample: Sample,
    temperatures: Sequence[float],
    max_length: int,
    coupling: Coupling,
    truncation: Truncation | None,
) -> dict[str, Tensor]:
    """One text. The row before each token of its completion predicts it."""
    tokens = torch.tensor([*sample.prompt, *sample.completion])[:max_length]
    first, intervals = len(sample.prompt), torch.zeros(len(temperatures), len(tokens), 2, dtype=torch.float64)
    if len(tokens) > first:
        moved = tokens.to(model.device)
        logits = packed_logits(
            model, pack_causal(moved[None]), torch.arange(first - 1, len(moved) - 1, device=moved.device)
        )
        for index, temperature in enumerate(temperatures):
            for start in range(0, len(logits), ROWS_PER_CHUNK):
                rows = slice(start, start + ROWS_PER_CHUNK)
                part = uniform_intervals(logits[rows], moved[first:][rows], temperature, coupling, truncation)
                intervals[index, first:][rows] = torch.stack([part.low, part.high], -1).cpu()
    texts = torch.tensor([[min(first, len(tokens)), len(tokens), round(1000 * sample.temperature)]])
    return {"tokens": tokens.to(torch.int32), "intervals": intervals, "texts": texts}
