"""A linear layer that turns a hidden state and the token after it into the next hidden state; its network and files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from saltus.core.forward import ForwardInputs, ForwardOutputs
from saltus.loading.model_identity import model_fingerprint
from saltus.methods.shared.drafter_files import embeddings_of
from saltus.methods.shared.timed_outputs import timed_outputs

FILE = "linear_head.safetensors"


class LinearHeadModel(nn.Module):
    """h' = h + W [h; e(t)]: the state after token t, from the state before it. It drafts the given tokens only."""

    def __init__(self, tokens: Tensor, target: Any) -> None:
        super().__init__()
        embeddings, unembedding = embeddings_of(target)
        self.tokens = tokens  # ids, ascending
        self.shared = embeddings, unembedding[tokens].float()  # of the target: neither trained nor saved
        self.mix = nn.Linear(2 * embeddings.shape[1], embeddings.shape[1], bias=False, device=embeddings.device)
        nn.init.zeros_(self.mix.weight)

    @property
    def matrices(self) -> list[Tensor]:
        """What the optimizer muon trains."""
        return [self.mix.weight]

    def forward(self, states: Tensor, tokens: Tensor) -> Tensor:
        """[..., hidden] and [...] to [..., hidden]."""
        embedded = F.embedding(tokens.to(states.device), self.shared[0]).float()
        return states + self.mix(torch.cat([states, embedded], -1))

    def logits(self, states: Tensor) -> Tensor:
        """[..., hidden] to [..., drafted tokens]."""
        return states @ self.shared[1].T


def save(model: LinearHeadModel, folder: Path, target: Any) -> None:
    """Write the layer, with the identity of its target."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {"mix": model.mix.weight.detach().cpu(), "tokens": model.tokens}
    save_file(tensors, folder / FILE, metadata={"target": model_fingerprint(target)})


def load(folder: Path, target: Any, target_name: str) -> LinearHeadModel:
    """The layer of a folder. Errors: ValueError without one, for a damaged one, or for one of another target."""
    try:
        with safe_open(folder / FILE, "pt") as file:
            trained_for, mix, tokens = file.metadata()["target"], file.get_tensor("mix"), file.get_tensor("tokens")
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{folder} holds no linear head ({error}); train one") from None
    if trained_for != model_fingerprint(target):
        raise ValueError(f"{folder} was trained for another model than {target_name}; train it again")
    model = LinearHeadModel(tokens, target)
    model.mix.weight.data.copy_(mix)
    return model


@dataclass
class LinearHeadNetwork:
    """A forward pass with hidden states starts a chain; later ones, whose text has the drafts so far, continue it."""

    model: LinearHeadModel

    def new_kv_cache(self) -> dict[str, Tensor]:
        return {}

    @torch.inference_mode()
    def forward(self, batch: Sequence[ForwardInputs], kv_caches: Sequence[dict[str, Tensor]]) -> list[ForwardOutputs]:
        """Logits of the next token of each text."""
        return timed_outputs(lambda: self._outputs(batch, kv_caches), self.model.shared[0].device)

    def _outputs(self, batch: Sequence[ForwardInputs], kv_caches: Sequence[dict[str, Tensor]]) -> list[ForwardOutputs]:
        states = [
            (kv_cache["state"] if inputs.hidden_states is None else inputs.hidden_states[-1]).float()
            for inputs, kv_cache in zip(batch, kv_caches, strict=True)
        ]
        last = torch.tensor([int(inputs.canvas.decided_prefix[-1]) for inputs in batch])
        after = self.model(torch.stack(states), last)
        for kv_cache, state in zip(kv_caches, after, strict=True):
            kv_cache["state"] = state
        logits = self.model.logits(after)
        return [ForwardOutputs(row[None], num_rows=len(batch), token_ids=self.model.tokens) for row in logits]
