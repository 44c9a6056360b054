"""vLLM's model as the target of drafters: its embeddings, and the hidden states of its latest step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn


class VllmTarget:
    """What a drafter or heads need of the model that vLLM runs. It computes nothing itself."""

    batch_invariant = False
    any_subset = False
    accepts_drafters = True
    adapter = None
    compute_path: Literal["torch"] = "torch"
    max_draft_tokens = None

    def __init__(self, model: Any, config: Any) -> None:
        """`model` is vLLM's module, `config` the configuration of the Transformers model.

        Errors: ValueError where its embeddings are not whole.
        """
        self.model = _described_model(model, config)
        self.hidden_state_layers: tuple[int, ...] = ()

    def attach_adapter(self, adapter: Any) -> None:
        """Refused: vLLM's layers run without it."""
        raise ValueError("inside vLLM saltus drafts by drafters and heads, not by adapters; train one without LoRA")

    def add_hidden_state_layers(self, layers: Sequence[int]) -> None:
        """States after so many layers are wanted, too."""
        self.hidden_state_layers = tuple(sorted({*self.hidden_state_layers, *layers}))

    def layers_of(self, hidden_states: Any) -> tuple[int, ...]:
        """All of them: they are added before the first call."""
        return self.hidden_state_layers

    def new_kv_cache(self) -> Any:
        raise AssertionError("vLLM holds the KV cache of its model")

    def forward(self, batch: Any, kv_caches: Any) -> Any:
        raise AssertionError("vLLM runs its model")


def _described_model(model: Any, config: Any) -> Any:
    """The Transformers model of vLLM's model: with its embeddings, and all other weights empty ("meta")."""
    from transformers import AutoModelForCausalLM  # seconds to import

    with torch.device("meta"):
        described = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    language_model = model.get_language_model() if hasattr(model, "get_language_model") else model
    decoder = getattr(language_model, "model", language_model)  # some give the decoder itself
    embeddings, head = getattr(decoder, "embed_tokens", None), getattr(language_model, "lm_head", None)
    if embeddings is None:
        raise ValueError(
            f"drafters find no embed_tokens in {type(model).__name__} of vLLM; use saltus.vllm.Lookup, which needs none"
        )
    _share_weight(described.get_input_embeddings(), embeddings, "input embeddings")
    if config.tie_word_embeddings:
        described.get_output_embeddings().weight = described.get_input_embeddings().weight
    else:
        head = getattr(model, "lm_head", None) if head is None else head
        _share_weight(described.get_output_embeddings(), head, "output embeddings")
    return described


def _share_weight(place: Any, module: Any, name: str) -> None:
    """Put the weight of vLLM's module, which may have further rows, into the described model."""
    (vocab, hidden), module_weight = place.weight.shape, getattr(module, "weight", None)
    if module_weight is None or module_weight.shape[0] < vocab or module_weight.shape[1:] != (hidden,):
        raise ValueError(
            f"drafters read all {name} of the model, and this process of vLLM has a part of them;"
            " use tensor_parallel_size=1 and pipeline_parallel_size=1, or saltus.vllm.Lookup"
        )
    place.weight = nn.Parameter(module_weight[:vocab].detach(), requires_grad=False)


def is_capturing() -> bool:
    """True while a CUDA graph is recorded."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


@dataclass(frozen=True)
class StepStates:
    """The rows of one forward pass: all texts of the batch, one after the other."""

    token_ids: np.ndarray
    positions: np.ndarray
    states: Tensor  # after each of the wanted layers, then the last ones, concatenated
    starts: np.ndarray  # the first row of each text, and the end of the last

    def of_text(self, index: int, tokens: np.ndarray) -> Tensor | None:
        """The states before the last tokens of the index-th text, in order; None if these rows are of other tokens.

        Rows of rejected drafts come last, and are left out.
        """
        if index + 1 >= len(self.starts):
            return None
        begin, end = int(self.starts[index]), int(self.starts[index + 1])
        positions = self.positions[begin:end]
        count = int(np.searchsorted(positions, len(tokens) - 1))
        known = positions[:count]
        if not count or known[-1] != len(tokens) - 2 or known[-1] - known[0] != count - 1:
            return None
        if not np.array_equal(self.token_ids[begin : begin + count], tokens[known]):
            return None
        return self.states[begin : begin + count]


class HiddenStateReader:
    """Keeps what the model returns in a step: its last hidden states, and those after some layers.

    It stands in the place of the model's `forward`, so it sees nothing of steps that a whole CUDA graph replays.
    """

    def __init__(self, model: Any, layers: Sequence[int], query_starts: Callable[[], np.ndarray | None]) -> None:
        """`query_starts` gives the rows where the texts of the current step begin, None if they are not known."""
        self.latest: StepStates | None = None
        if layers:
            if not hasattr(model, "set_aux_hidden_state_layers"):
                raise ValueError(
                    f"{type(model).__name__} of vLLM does not return hidden states of layers {list(layers)}; use"
                    " saltus.vllm.Lookup"
                )
            model.set_aux_hidden_state_layers(tuple(layers))
        forward = model.forward

        def forward_and_keep(*args: Any, **kwargs: Any) -> Any:
            out = forward(*args, **kwargs)
            last, auxiliary = out if isinstance(out, tuple) else (out, [])
            if is_capturing():  # nothing may be copied to the CPU then
                self.latest = None
                return last
            self._keep(args, kwargs, last, auxiliary, query_starts())
            return last

        model.forward = forward_and_keep

    def _keep(self, args: Any, kwargs: Any, last: Any, auxiliary: Sequence[Tensor], starts: np.ndarray | None) -> None:
        given = dict(zip(("input_ids", "positions"), args, strict=False)) | kwargs
        token_ids, positions = given.get("input_ids"), given.get("positions")
        self.latest = None
        if starts is None or token_ids is None or positions is None:
            return
        if positions.dim() == 2:  # of models that read images, in three dimensions: one for text
            if not bool((positions == positions[0]).all()):
                return
            positions = positions[0]
        states = torch.cat([*auxiliary, last], -1) if auxiliary else last
        self.latest = StepStates(token_ids.cpu().numpy().copy(), positions.cpu().numpy().copy(), states, starts)

    def take(self) -> StepStates | None:
        """What was kept of the latest step, once."""
        taken, self.latest = self.latest, None
        return taken
