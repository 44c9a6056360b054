"""Let a draft model write in its target's vocabulary, where their embeddings were padded to different sizes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from saltus.core.canvas import Canvas
from saltus.core.forward import ForwardInputs, ForwardOutputs
from saltus.core.protocols import Network
from saltus.models.cpu.hybrid_kv_cache import StateSizes
from saltus.models.memory_use import kv_bytes_per_token, state_sizes

UNKNOWN_TOKEN = 0  # read in place of a token that the draft model has no embedding of; drafts then are guesses


@dataclass
class ResizedVocabulary:
    """A causal network that reads `num_embeddings` token ids, with the logits of a vocabulary of another size."""

    network: Any
    num_embeddings: int
    num_logits: int

    @property
    def model(self) -> Any:
        return self.network.model

    @property
    def state_sizes(self) -> StateSizes | None:
        return state_sizes(self.network)

    @property
    def kv_bytes_per_token(self) -> int:
        return kv_bytes_per_token(self.network)

    def new_kv_cache(self) -> Any:
        return self.network.new_kv_cache()

    def forward(self, batch: Sequence[ForwardInputs], kv_caches: Sequence[Any]) -> list[ForwardOutputs]:
        """The network's outputs; a token that it does not have gets no probability."""
        outputs = self.network.forward([self._readable(inputs) for inputs in batch], kv_caches)
        unknown = dict.fromkeys(("likeliest", "picked", "candidates"))
        return [replace(output, logits=self._resized(output.logits), **unknown) for output in outputs]

    def _readable(self, inputs: ForwardInputs) -> ForwardInputs:
        tokens = inputs.canvas.tokens
        if not (tokens >= self.num_embeddings).any():
            return inputs
        known = tokens.copy()
        known[tokens >= self.num_embeddings] = UNKNOWN_TOKEN
        canvas: Canvas = replace(inputs.canvas, tokens=known)
        return replace(inputs, canvas=canvas)

    def _resized(self, logits: Tensor) -> Tensor:
        missing = self.num_logits - logits.shape[-1]
        return F.pad(logits, (0, missing), value=-float("inf")) if missing > 0 else logits[:, : self.num_logits]


def with_vocabulary_of(target: Any, network: Any) -> Network:
    """A draft model's network, resized where the embeddings of the target have another number of rows."""
    rows = [embedding_rows(getattr(network_, "model", None)) for network_ in (target, network)]
    if rows[0] is None or rows[1] is None or rows[0] == rows[1]:
        return network
    return ResizedVocabulary(network, num_embeddings=rows[1], num_logits=rows[0])


def embedding_rows(model: Any) -> int | None:
    """How many token ids have an embedding; None for a model that does not say."""
    embeddings = getattr(model, "get_input_embeddings", lambda: None)()
    return None if embeddings is None else embeddings.weight.shape[0]
