"""Collect the hidden states of a decoder of Transformers while it runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch


class HiddenStateCapture:
    """While open, collects the states after chosen layers of a decoder, and its last states."""

    def __init__(self, decoder: torch.nn.Module, layers: Sequence[int], active_stream: int | None) -> None:
        self.decoder, self.layers, self.active_stream = decoder, layers, active_stream
        self.hidden_states: list[torch.Tensor] = []

    def __enter__(self) -> Callable[[], torch.Tensor]:
        layers = _decoder_layers(self.decoder) if self.layers else ()
        self.hooks = [layers[layer - 1].register_forward_hook(self._record) for layer in self.layers]
        self.hooks.append(self.decoder.register_forward_hook(self._record))
        return lambda: torch.cat(self.hidden_states, -1)[0] if self.layers else self.hidden_states[0][0]

    def _record(self, module: Any, inputs: Any, out: Any) -> None:
        out = getattr(out, "last_hidden_state", out)
        out = out[0] if isinstance(out, tuple) else out
        has_streams = self.active_stream is not None and out.ndim == 4  # [streams, batch, rows, hidden]
        self.hidden_states.append(out[self.active_stream] if has_streams else out)

    def __exit__(self, *_) -> None:
        for hook in self.hooks:
            hook.remove()


def _decoder_layers(decoder: torch.nn.Module) -> torch.nn.ModuleList:
    """The layers of a decoder: its longest list of modules."""
    lists = [module for module in decoder.children() if isinstance(module, torch.nn.ModuleList)]
    return max(lists, key=len)
