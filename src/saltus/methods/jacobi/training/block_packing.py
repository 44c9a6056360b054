"""Texts and iterates of their blocks in one forward: every row attends to what it would alone (Jacobi Forcing).

The rows of the text come first, with a causal mask. Then comes an iterate of every block, with one row for each token
at that token's position in the text. A setting selects which rows of earlier blocks these rows attend to.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor

from saltus.training.data.window_packing import PackedBatch, pack_rows

NoiseSchedule = Literal["linear", "random", "reverse", "any"]
BlockMask = Literal["noisy", "window", "large", "clean"]
NoiseMeasure = Literal["wrong", "divergence"]
CountedRows = Literal["attending", "block"]


@dataclass(frozen=True)
class BlockNoise:
    """The iterate of each block, and what its rows attend to in the blocks before it.

    Schedules. linear: block i, in a window of w blocks, takes the iterate whose fraction of wrong tokens is nearest to
    (i mod w)/w (Eq. 7). reverse: (w − 1 − i mod w)/w. random: a uniform fraction. any: a random iterate, whatever its
    fraction; with the clean mask this is CLLM's loss (Eq. 5).

    Masks. noisy: the iterates of all blocks before (NC). window: the text in the block's own window of w blocks, the
    iterates before that window (NC-IC). large: the iterates in its own window, the text before that window, as if a
    window were one large block; decoding has this case. clean: the text.

    Measures of an iterate's noise. wrong: the fraction of its tokens that are wrong. divergence: (n − f)/n, where f of
    the n tokens come before the first wrong one, as in the authors' code.

    Rows that the consistency loss counts. attending: those that attend to a wrong token. block: those from the first
    wrong token of their own block on, as in the authors' code.
    """

    schedule: NoiseSchedule = "linear"
    mask: BlockMask = "noisy"
    window: int = 8  # blocks
    measure: NoiseMeasure = "wrong"
    loss_rows: CountedRows = "attending"

    def __post_init__(self) -> None:
        for name, given, known in (
            ("schedule", self.schedule, get_args(NoiseSchedule)),
            ("mask", self.mask, get_args(BlockMask)),
            ("measure", self.measure, get_args(NoiseMeasure)),
            ("loss_rows", self.loss_rows, get_args(CountedRows)),
        ):
            if given not in known:
                raise ValueError(f"the noise's {name} is {given!r}, but must be one of {', '.join(known)}")
        if self.window < 1:
            raise ValueError(f"the noise's window is {self.window} blocks, but must be 1 or more")

    def choose_iterates(self, blocks: Sequence[Sequence[Sequence[int]]], generator: np.random.Generator) -> list[int]:
        """One iterate of each block, concatenated. The last iterate of a block is its text."""
        chosen: list[int] = []
        for number, iterates in enumerate(blocks):
            chosen += iterates[self._choose_iterate(number % self.window, iterates, generator)]
        return chosen

    def _choose_iterate(
        self, block_in_window: int, iterates: Sequence[Sequence[int]], generator: np.random.Generator
    ) -> int:
        if self.schedule == "any":
            return int(generator.integers(len(iterates)))
        target_fraction = {
            "linear": block_in_window,
            "reverse": self.window - 1 - block_in_window,
            "random": self.window * generator.random(),
        }
        text = np.array(iterates[-1])
        wrong = np.array([np.array(iterate) != text for iterate in iterates])
        if self.measure == "divergence":
            wrong = np.maximum.accumulate(wrong, axis=1)
        return int(np.abs(wrong.mean(1) - target_fraction[self.schedule] / self.window).argmin())


@dataclass(frozen=True, eq=False)
class PackedBlocks:
    """Texts and an iterate of each, in one forward. The row before token t of a completion predicts it."""

    packed: PackedBatch
    text_rows: Int[Tensor, "batch slots"]  # the row before each token of a completion, counted through the batch
    has_text_row: Bool[Tensor, "batch slots"]  # False after the end of a text, and at its first token without a prompt
    iterate_rows: Int[Tensor, "batch slots"]  # the row of the iterate's token
    token_ids: Int[Tensor, "batch slots"]  # of the completions
    has_next_token: Bool[Tensor, "batch slots"]  # False at the end of a text
    counted: Bool[Tensor, "batch slots"]  # iterate rows of the consistency loss; each attends to a wrong token

    def to(self, device: torch.device) -> PackedBlocks:
        moved = {name: part.to(device) for name, part in vars(self).items() if isinstance(part, Tensor)}
        return replace(self, packed=self.packed.to(device), **moved)


def pack_blocks(
    prompts: Sequence[Sequence[int]],
    completions: Sequence[Sequence[int]],
    iterates: Sequence[Sequence[int]],
    block_size: int,
    noise: BlockNoise,
) -> PackedBlocks:
    """The rows of a text: prompt, completion, padding to the longest text, then the iterate."""
    prompt_lengths = torch.tensor([len(prompt) for prompt in prompts])
    sizes = torch.tensor([len(text) for text in completions])
    context, slots, batch = int((prompt_lengths + sizes).max()), int(sizes.max()), len(prompts)
    texts, iterate_ids = torch.zeros(batch, context, dtype=torch.long), torch.zeros(batch, slots, dtype=torch.long)
    for row, (prompt, text, iterate) in enumerate(zip(prompts, completions, iterates, strict=True)):
        texts[row, : len(prompt) + len(text)] = torch.tensor([*prompt, *text])
        iterate_ids[row, : len(iterate)] = torch.tensor(iterate)
    places = torch.arange(slots)
    positions = prompt_lengths[:, None] + places
    tokens = texts.gather(1, positions.clamp_max(context - 1))
    block = places // block_size
    earlier_block, same_block = block[:, None] > block, block[:, None] == block
    other_window = block[:, None] // noise.window != block // noise.window
    iterate_blocks = {
        "noisy": earlier_block,
        "window": earlier_block & other_window,
        "large": earlier_block & ~other_window,
        "clean": earlier_block & False,
    }[noise.mask]
    column = torch.arange(context) - prompt_lengths[:, None]  # of the completion, below zero in the prompt
    inside = column.clamp(0, slots - 1)
    sees_text = (column < 0)[:, None] | (
        (earlier_block & ~iterate_blocks)[:, inside].transpose(0, 1) & (column >= 0)[:, None]
    )
    sees_iterate = iterate_blocks | (same_block & (places[:, None] >= places))
    mask = torch.zeros(batch, context + slots, context + slots, dtype=torch.bool)
    mask[:, :context, :context] = torch.ones(context, context, dtype=torch.bool).tril()
    mask[:, context:, :context] = sees_text
    mask[:, context:, context:] = sees_iterate
    rows = torch.arange(batch)[:, None] * (context + slots)
    packed = pack_rows(texts, mask, iterate_ids, positions, num_windows=1, window_size=slots)
    wrong = (iterate_ids != tokens) & (places < sizes[:, None])
    sees = same_block & (places[:, None] >= places) if noise.loss_rows == "block" else sees_iterate
    return PackedBlocks(
        packed=packed,
        text_rows=rows + (positions - 1).clamp(0, context - 1),
        has_text_row=(places < sizes[:, None]) & (positions > 0),
        iterate_rows=rows + context + places,
        token_ids=tokens,
        has_next_token=places + 1 < sizes[:, None],
        counted=(sees & wrong[:, None]).any(-1),
    )
