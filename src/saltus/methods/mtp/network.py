"""Run the modules of multi-token prediction over texts: decided tokens with the target's states, then drafts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from saltus.core.forward import ForwardInputs, ForwardOutputs
from saltus.methods.mtp.module import MtpModule
from saltus.methods.shared.context_rows import MAX_ROWS_PER_CALL, ContextKVCache, ContextRows, unread_states
from saltus.methods.shared.timed_outputs import running_on, timed_outputs
from saltus.models.cuda.device_candidates import find_candidates

UNREAD_STATES = 1024  # hidden states that are read at once
LAST_STATES = (None,)  # of the target


@dataclass
class MtpKVCache:
    """Keys and values of one text on each module: of its decided tokens, then of the drafts since.

    A row of module k holds a token and the output of module k − 1 at the row before, so that each module begins one
    token later than the one before it.
    """

    contexts: list[ContextKVCache]
    num_drafts: int = 0  # since the last decided token
    outputs: list[Tensor] = field(default_factory=list)  # of each module from the last decided token's row on

    @property
    def length(self) -> int:
        """Decided tokens up to the last row."""
        return self.contexts[0].first_position + len(self.contexts[0].tokens)

    @property
    def num_begun(self) -> int:
        """Modules that have read a decided token: the first ones."""
        return sum(self.length > context.first_position for context in self.contexts)


@dataclass(frozen=True)
class _NewRows:
    """Rows of one text for a module: tokens and the states before them."""

    tokens: np.ndarray
    states: Tensor
    kv_cache: ContextKVCache
    past_length: int

    @property
    def position(self) -> int:
        """Of the first row."""
        return self.kv_cache.first_position + self.past_length


@dataclass
class MtpNetwork:
    """Heads of a target as a draft network: inputs carry hidden states of the target, or one draft more than before.

    The first draft comes from the first module, the second from the second; the last one goes on with its own outputs.
    """

    modules: Sequence[MtpModule]
    target: Any  # the network whose hidden states it reads
    max_unread: int = UNREAD_STATES

    def __post_init__(self) -> None:
        self.device = self.modules[0].layers.device
        tokens = self.modules[0].tokens
        self.token_ids = None if tokens is None else tokens.cpu()
        self.kv_bytes_per_token = sum(map(_kv_bytes_per_token, self.modules))

    def new_kv_cache(self) -> MtpKVCache:
        return MtpKVCache([module.layers.new_kv_cache() for module in self.modules])

    @torch.inference_mode()
    def forward(self, batch: Sequence[ForwardInputs], kv_caches: Sequence[MtpKVCache]) -> list[ForwardOutputs]:
        """Logits for the token after each text."""
        return timed_outputs(lambda: self._forward(batch, kv_caches), self.device)

    def _forward(self, batch: Sequence[ForwardInputs], kv_caches: Sequence[MtpKVCache]) -> list[ForwardOutputs]:
        pairs = list(zip(batch, kv_caches, strict=True))
        of_reading = iter(self._read([pair for pair in pairs if pair[0].hidden_states is not None]))
        of_drafting = iter(self._draft([pair for pair in pairs if pair[0].hidden_states is None]))
        logits = [next(of_drafting if inputs.hidden_states is None else of_reading) for inputs in batch]
        num_read = [0 if inputs.hidden_states is None else len(inputs.hidden_states) for inputs in batch]
        num_rows = sum(count or 1 for count in num_read)
        candidates = [None] * len(batch) if self.device.type == "cpu" else find_candidates(batch, logits)
        return [
            ForwardOutputs(
                row, context_tokens_read=count, num_rows=num_rows, token_ids=self.token_ids, candidates=found
            )
            for row, found, count in zip(logits, candidates, num_read, strict=True)
        ]

    def _read(self, texts: Sequence[tuple[ForwardInputs, MtpKVCache]]) -> list[Tensor]:
        """Read decided tokens by all modules, one after another; logits of the first one after each text."""
        caches = [cache for _, cache in texts]
        rows = [self._context_rows(*text) for text in texts]
        before = [cache.outputs for cache in caches]
        for cache in caches:
            cache.num_drafts, cache.outputs = 0, []
        logits: list[Tensor] = []
        for number, module in enumerate(self.modules):
            made = self._run(module, rows)
            logits = logits or [row for row, _ in made]
            for cache, (_, outputs) in zip(caches, made, strict=True):
                cache.outputs.append(outputs[-1:])
            if number + 1 < len(self.modules):
                rows = [
                    _for_next_module(each, outputs, old[number][:1] if old else None, cache.contexts[number + 1])
                    for each, (_, outputs), old, cache in zip(rows, made, before, caches, strict=True)
                ]
        return logits

    def _context_rows(self, inputs: ForwardInputs, cache: MtpKVCache) -> _NewRows:
        """The rows of the first module; where those of the others do not follow what they have, all start anew."""
        context, decided = cache.contexts[0], inputs.canvas.decided_prefix
        end, start = cache.length, context.first_position
        states = unread_states(inputs, context, self.target, LAST_STATES)
        first = len(decided) - len(states)
        if len(self.modules) > 1 and (first != end or context.first_position != start or not cache.outputs):
            cache.contexts = [module.layers.new_kv_cache(first + number) for number, module in enumerate(self.modules)]
            cache.outputs, context = [], cache.contexts[0]
        context.tokens = decided[context.first_position :].copy()
        return _NewRows(decided[first:], states, context, first - context.first_position)

    def _draft(self, texts: Sequence[tuple[ForwardInputs, MtpKVCache]]) -> list[Tensor]:
        """Read one more draft of each text; logits after it, none where the drafts before it were not read."""
        logits = [torch.empty(0, 0)] * len(texts)
        by_module: dict[int, list[tuple[int, _NewRows]]] = {}  # with the text's place
        for place, (inputs, cache) in enumerate(texts):
            if len(inputs.canvas.decided_prefix) == cache.length + cache.num_drafts + 1 and cache.outputs:
                module = min(cache.num_drafts + 1, cache.num_begun - 1)
                by_module.setdefault(module, []).append((place, _draft_rows(inputs, cache, module)))
        for module, rows in by_module.items():
            made = self._run(self.modules[module], [each for _, each in rows])
            for (place, _), (row, outputs) in zip(rows, made, strict=True):
                cache, logits[place] = texts[place][1], row
                cache.outputs[module] = torch.cat([cache.outputs[module], outputs])
                cache.num_drafts += 1
        return logits

    def _run(self, module: MtpModule, texts: Sequence[_NewRows]) -> list[tuple[Tensor, Tensor]]:
        """For each text the logits of its last row [1, vocab], and the outputs of all rows, or of the last ones.

        Both are empty for a text without rows.
        """
        given = [text for text in texts if len(text.tokens)]
        made = iter(self._run_rows(module, given) if given else ())
        return [next(made) if len(text.tokens) else (text.states[:0], text.states[:0]) for text in texts]

    def _run_rows(self, module: MtpModule, texts: Sequence[_NewRows]) -> list[tuple[Tensor, Tensor]]:
        inputs = module.inputs(
            torch.from_numpy(np.concatenate([text.tokens for text in texts])),
            torch.cat([text.states for text in texts]),
        ).split([len(text.tokens) for text in texts])
        early = [self._early_outputs(module, text, rows) for text, rows in zip(texts, inputs, strict=True)]
        rest = [
            ContextRows(rows[len(outputs) :], text.kv_cache, text.past_length + len(outputs), 1)
            for text, rows, outputs in zip(texts, inputs, early, strict=True)
        ]
        return [
            (logits, torch.cat([outputs, last]))
            for outputs, (logits, last) in zip(early, module.layers.run_together(rest), strict=True)
        ]

    def _early_outputs(self, module: MtpModule, text: _NewRows, inputs: Tensor) -> Tensor:
        """The outputs of all rows but the last, where a later module reads them; else of none."""
        if len(self.modules) == 1:
            return inputs[:0]
        done, outputs = 0, []
        for rows in inputs[:-1].split(MAX_ROWS_PER_CALL - 1):
            if len(rows):
                past = text.past_length + done
                outputs.append(module.layers(rows, text.kv_cache, past, len(rows), output_logits=False)[1])
                done += len(rows)
        return torch.cat([inputs[:0], *outputs])


@torch.inference_mode()
def _kv_bytes_per_token(module: MtpModule) -> int:
    """As measured: keys and values may be of several sizes."""
    model, context = module.model, module.layers.new_kv_cache()
    row = torch.zeros(1, model.config.hidden_size, dtype=model.dtype, device=model.device)
    with running_on(model.device):
        module.layers(row, context, 0, 1)
    return context.kv_cache.bytes_per_token


def _for_next_module(rows: _NewRows, outputs: Tensor, before: Tensor | None, kv_cache: ContextKVCache) -> _NewRows:
    """The rows of the next module: the same tokens with the outputs of this one at the rows before.

    `before` is its output at the row before the first one; None where the next module has no row of that token yet.
    """
    past = rows.position - kv_cache.first_position
    if past < 0:  # each module begins one token later than the one before it
        return _NewRows(rows.tokens[1:], outputs[:-1], kv_cache, 0)
    assert before is not None
    return _NewRows(rows.tokens, torch.cat([before, outputs[:-1]]), kv_cache, past)


def _draft_rows(inputs: ForwardInputs, cache: MtpKVCache, module: int) -> _NewRows:
    """The rows of the drafts that a module has not read yet, up to the latest.

    It begins with the outputs of the module before it, and goes on with its own.
    """
    number, num_read = cache.num_drafts + 1, len(cache.outputs[module]) - 1
    source = module - 1 if module == number else module
    states = cache.outputs[source][num_read - number :]
    decided, context = inputs.canvas.decided_prefix, cache.contexts[module]
    past = cache.length + num_read - context.first_position
    return _NewRows(decided[len(decided) - len(states) :], states, context, past)
