"""Keep the current window's keys and values of one text, and summaries of the windows before it (EVA attention)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from saltus.models.cpu.kv_cache import KVCache


@dataclass(frozen=True)
class ChunkSummaries:
    """How a chunk of tokens becomes one key and one value: trained vectors of every layer and head."""

    window: int  # tokens that attend to each other exactly; a multiple of `chunk`
    chunk: int  # tokens of a summary
    key_directions: Float[Tensor, "layers heads size"]  # float32; adaptive_mu_k in a checkpoint
    value_directions: Float[Tensor, "layers heads size"]  # float32; adaptive_phi

    @property
    def per_window(self) -> int:
        return self.window // self.chunk

    def slots_before(self, position: int) -> int:
        """Entries of a KV cache before the token at a position: summaries, then the tokens of its window."""
        return position // self.window * self.per_window + position % self.window

    def summarise(
        self, keys: Float[Tensor, "layers heads window size"], values: Float[Tensor, "layers heads window size"]
    ) -> tuple[Float[Tensor, "layers heads chunks size"], Float[Tensor, "layers heads chunks size"]]:
        """The summaries of a whole window, from its keys after rotation and its values.

        With weights over the tokens j of a chunk, k̄ = Σ softmax_j(μ·k_j) k_j and
        v̄ = Σ softmax_j((φ·k_j − ½ k_j·k_j)/√d) v_j (EVA, Zheng et al. 2023, with one random feature at its mean).
        Shapes are the same in every call, so that rounding is, too.
        """
        summaries = [self._summarise_layer(*layer) for layer in zip(keys, values, *self._directions, strict=True)]
        return torch.stack([key for key, _ in summaries]), torch.stack([value for _, value in summaries])

    @property
    def _directions(self) -> tuple[Tensor, Tensor]:
        return self.key_directions, self.value_directions

    def _summarise_layer(self, keys: Tensor, values: Tensor, mu: Tensor, phi: Tensor) -> tuple[Tensor, Tensor]:
        k, v = (x.float().contiguous().unflatten(1, (-1, self.chunk)) for x in (keys, values))
        mu, phi = mu[:, None, None], phi[:, None, None]
        key_weights = (mu * k).sum(-1).softmax(-1)
        value_weights = (((phi * k).sum(-1) - 0.5 * (k * k).sum(-1)) * k.shape[-1] ** -0.5).softmax(-1)
        key, value = (key_weights[..., None] * k).sum(-2), (value_weights[..., None] * v).sum(-2)
        return key.to(keys.dtype), value.to(values.dtype)


@dataclass
class EvaKVCache(KVCache):
    """Slots hold the summaries of `num_windows` whole windows, then the tokens after these windows.

    A token sees all slots before its own, so attention is as in any other cache. When a window is over its slots are
    replaced by its summaries. The keys of tokens are then gone: a text that differs there is read again from the
    window's first token.
    """

    num_windows: int = 0  # that are summarised
    window: int = 0  # tokens
    slots_per_window: int = 0  # summaries

    @property
    def num_text_slots(self) -> int:
        return len(self.tokens) - self.num_windows * (self.window - self.slots_per_window)

    def reuse_prefix(self, tokens: np.ndarray, num_recomputed: int = 1) -> int:
        count = super().reuse_prefix(tokens, num_recomputed)
        if count < self.num_windows * self.window:
            self.num_windows = count // self.window
            self.tokens = self.tokens[: self.num_windows * self.window]
        return len(self.tokens)

    def replace_window(self, summaries: ChunkSummaries) -> None:
        """Put the summaries of the window that is now over in the place of its tokens."""
        assert self.keys is not None and self.values is not None
        begin = self.num_windows * self.slots_per_window
        whole, kept = slice(begin, begin + self.window), slice(begin, begin + self.slots_per_window)
        keys, values = summaries.summarise(self.keys[:, :, whole], self.values[:, :, whole])
        self.keys[:, :, kept], self.values[:, :, kept] = keys, values
        self.num_windows += 1

    def fork(self, nodes: Sequence[int], tokens: np.ndarray, summaries: ChunkSummaries) -> EvaKVCache:
        """A cache for `tokens`: the text and a path of nodes of the pending tree, which ends the text's window."""
        assert self.keys is not None and self.values is not None
        begin, end = self.num_windows * self.slots_per_window, self.num_text_slots
        slots = [*range(begin, end), *(end + node for node in nodes)]
        assert len(slots) == self.window and len(tokens) == (self.num_windows + 1) * self.window
        window = summaries.summarise(self.keys[:, :, slots], self.values[:, :, slots])
        keys, values = (
            torch.cat([buffer[:, :, :begin], new], 2)
            for buffer, new in zip((self.keys, self.values), window, strict=True)
        )
        return EvaKVCache(tokens, keys, values, None, self.num_windows + 1, self.window, self.slots_per_window)
