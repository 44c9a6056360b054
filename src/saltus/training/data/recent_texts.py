"""Keep the latest texts of a server with the target's hidden states, as a corpus to train a drafter on."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from jaxtyping import Float, Int

from saltus.training.data.hidden_states import HiddenStateCorpus, ShardedRows


@dataclass(frozen=True, eq=False)
class RecentText:
    """The end of a prompt and its completion, with the target's state at each token but the last.

    Arrays of NumPy, which processes exchange by copies; the states are bfloat16 numbers, held as int16.
    """

    tokens: Int[np.ndarray, "tokens"]
    states: Int[np.ndarray, "tokens_before_the_last states"]
    prompt_length: int
    temperature: float

    @property
    def nbytes(self) -> int:
        return self.tokens.nbytes + self.states.nbytes


@dataclass
class RecentTexts:
    """The latest texts, at most `max_bytes` of them; the oldest go first."""

    max_bytes: int
    num_bytes: int = field(default=0, init=False)
    _texts: deque[RecentText] = field(default_factory=deque, init=False, repr=False)

    def __len__(self) -> int:
        return len(self._texts)

    def __iter__(self) -> Iterator[RecentText]:
        return iter(self._texts)

    def add(self, text: RecentText) -> None:
        """Keep a text, and drop the oldest ones while there are too many bytes."""
        self._texts.append(text)
        self.num_bytes += text.nbytes
        while self.num_bytes > self.max_bytes:
            self.take_oldest()

    def take_oldest(self) -> RecentText:
        """Remove the oldest text and return it."""
        text = self._texts.popleft()
        self.num_bytes -= text.nbytes
        return text


def corpus_of(
    texts: Sequence[RecentText], hidden_state_layers: tuple[int, ...], target_fingerprint: str
) -> HiddenStateCorpus:
    """The texts as a corpus without uniforms; states are not copied."""
    parts: list[Float[torch.Tensor, "_ width"]] = []
    for text in texts:
        states = torch.from_numpy(text.states).view(torch.bfloat16)
        parts += [states, states[-1:]]  # a placeholder for the last token, whose state is never used
    lengths = np.array([len(text.tokens) for text in texts], dtype=np.int64)
    prompts = np.array([text.prompt_length for text in texts], dtype=np.int64)
    temperatures = np.array([round(1000 * text.temperature) for text in texts], dtype=np.int64)
    known = tuple(float(thousandths) / 1000 for thousandths in np.unique(temperatures[temperatures > 0])) or (1.0,)
    return HiddenStateCorpus(
        torch.from_numpy(np.concatenate([text.tokens for text in texts])).long(),
        ShardedRows(parts),
        torch.full((1, 1, 1), torch.nan, dtype=torch.float64).expand(len(known), int(lengths.sum()), 2),
        np.column_stack([np.cumsum(lengths) - lengths, prompts, lengths, temperatures]),
        known, hidden_state_layers, target_fingerprint, "gumbel",
    )  # fmt: skip
