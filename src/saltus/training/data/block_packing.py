"""Pack the iterates of a text's blocks beside the text: one forward says what each row would alone (Jacobi Forcing).

The text comes first and reads itself. Behind it stands an iterate of every block, a row for each of its tokens, at the
position that this token has in the text. What these rows see of the blocks before theirs is the choice of a mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor

from saltus.training.data.window_packing import PackedBatch

NoiseSchedule = Literal["linear", "random", "reverse", "any"]
BlockMask = Literal["noisy", "window", "large", "clean"]


@dataclass(frozen=True)
class BlockNoise:
    """Which iterate each block takes, and what it sees of the blocks before it.

    linear: block i of a window of w blocks takes the iterate whose share of wrong tokens is nearest to (i mod w)/w
    (Eq. 7). reverse: (w − 1 − i mod w)/w. random: a uniform share. any: a random iterate, whatever its share, which
    with the clean mask is CLLM's (Eq. 5).

    noisy: the iterates of all blocks before (NC). window: the text of those in the block's own window of w, and the
    iterates of those before (NC-IC). large: the iterates of those in its own window, and the text of those before, as
    if a window were one large block; so decoding finds them. clean: the text.
    """

    schedule: NoiseSchedule = "linear"
    mask: BlockMask = "noisy"
    window: int = 8  # blocks

    def __post_init__(self) -> None:
        for name, given, known in (
            ("schedule", self.schedule, get_args(NoiseSchedule)),
            ("mask", self.mask, get_args(BlockMask)),
        ):
            if given not in known:
                raise ValueError(f"the noise's {name} is {given!r}, but must be one of {', '.join(known)}")
        if self.window < 1:
            raise ValueError(f"the noise's window is {self.window} blocks, but must be 1 or more")

    def choose_iterates(self, blocks: Sequence[Sequence[Sequence[int]]], generator: np.random.Generator) -> list[int]:
        """The chosen iterate of each block, of those of which the last is the text, end to end."""
        found: list[int] = []
        for number, iterates in enumerate(blocks):
            found += iterates[self._choose_iterate(number % self.window, iterates, generator)]
        return found

    def _choose_iterate(
        self, block_in_window: int, iterates: Sequence[Sequence[int]], generator: np.random.Generator
    ) -> int:
        if self.schedule == "any":
            return int(generator.integers(len(iterates)))
        share = {
            "linear": block_in_window,
            "reverse": self.window - 1 - block_in_window,
            "random": self.window * generator.random(),
        }
        text = np.array(iterates[-1])
        wrong = np.array([(np.array(iterate) != text).mean() for iterate in iterates])
        return int(np.abs(wrong - share[self.schedule] / self.window).argmin())


@dataclass(frozen=True, eq=False)
class PackedBlocks:
    """Texts and an iterate of each, in one forward. Token t of a completion is decided by the row before it."""

    packed: PackedBatch
    text_rows: Int[Tensor, "batch slots"]  # the row of each token of a completion, through the whole batch
    iterate_rows: Int[Tensor, "batch slots"]  # the row of its iterate's token
    token_ids: Int[Tensor, "batch slots"]  # of the completions
    has_next_token: Bool[Tensor, "batch slots"]  # has the text a token behind this one?
    sees_wrong_token: Bool[Tensor, "batch slots"]  # does the iterate's row see a token that is not the text's?

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
    """Rows of a text: prompt, completion, padding to the longest; then the iterate, a row for each of its tokens."""
    heads = torch.tensor([len(prompt) for prompt in prompts])
    sizes = torch.tensor([len(text) for text in completions])
    context, slots, batch = int((heads + sizes).max()), int(sizes.max()), len(prompts)
    texts, guesses = torch.zeros(batch, context, dtype=torch.long), torch.zeros(batch, slots, dtype=torch.long)
    for row, (prompt, text, guess) in enumerate(zip(prompts, completions, iterates, strict=True)):
        texts[row, : len(prompt) + len(text)] = torch.tensor([*prompt, *text])
        guesses[row, : len(guess)] = torch.tensor(guess)
    places = torch.arange(slots)
    own = heads[:, None] + places
    tokens = texts.gather(1, own.clamp_max(context - 1))
    number = places // block_size
    before, here = number[:, None] > number, number[:, None] == number
    apart = number[:, None] // noise.window != number // noise.window
    shown = {"noisy": before, "window": before & apart, "large": before & ~apart, "clean": before & False}
    iterate = shown[noise.mask]
    column = torch.arange(context) - heads[:, None]  # of the completion, below zero in the prompt
    inside = column.clamp(0, slots - 1)
    sees_text = (column < 0)[:, None] | ((before & ~iterate)[:, inside].transpose(0, 1) & (column >= 0)[:, None])
    sees_iterate = iterate | (here & (places[:, None] >= places))
    mask = torch.zeros(batch, context + slots, context + slots, dtype=torch.bool)
    mask[:, :context, :context] = torch.ones(context, context, dtype=torch.bool).tril()
    mask[:, context:, :context] = sees_text
    mask[:, context:, context:] = sees_iterate
    rows = torch.arange(batch)[:, None] * (context + slots)
    packed = PackedBatch(
        tokens=torch.cat([texts, guesses], 1),
        uniforms=torch.full((batch, context + slots), torch.nan, dtype=torch.float64),
        positions=torch.cat([torch.arange(context).expand(batch, -1), own], 1),
        mask=mask,
        context_length=context,
        num_windows=1,
        window_size=slots,
    )
    wrong = (guesses != tokens) & (places < sizes[:, None])
    return PackedBlocks(
        packed=packed,
        text_rows=rows + own.clamp_max(context - 1),
        iterate_rows=rows + context + places,
        token_ids=tokens,
        has_next_token=places + 1 < sizes[:, None],
        sees_wrong_token=(sees_iterate & wrong[:, None]).any(-1),
    )
