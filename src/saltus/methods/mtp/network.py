"""Run the modules of multi-token prediction over texts: decided tokens with the target's states, then drafts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
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

    def has_rows(self, module: int) -> bool:
        """True if a module has read a decided token."""
        return self.length > self.contexts[module].first_position


@dataclass(frozen=True)
class _NewRows:
    """Rows of one text for a module: tokens and the states before them."""

    tokens: np.ndarray
    states: Tensor
    kv_cache: ContextKVCache
    past_length: int


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
        reading = [pair for pair in pairs if pair[0].hidden_states is not None]
        drafting = [pair for pair in pairs if pair[0].hidden_states is None]
        logits = {id(cache): row for (_, cache), row in zip(reading, self._read(reading), strict=True)}
        logits |= {id(cache): row for (_, cache), row in zip(drafting, self._draft(drafting), strict=True)}
        read = {id(cache): 0 if inputs.hidden_states is None else len(inputs.hidden_states) for inputs, cache in pairs}
        rows = sum(count or 1 for count in read.values())
        by_text = [logits[id(cache)] for cache in kv_caches]
        candidates = [None] * len(batch) if self.device.type == "cpu" else find_candidates(batch, by_text)
        return [
            ForwardOutputs(
                row, context_tokens_read=read[id(cache)], num_rows=rows, token_ids=self.token_ids, candidates=found
            )
            for row, found, cache in zip(by_text, candidates, kv_caches, strict=True)
        ]

    def _read(self, texts: Sequence[tuple[ForwardInputs, MtpKVCache]]) -> list[Tensor]:
        """Read decided tokens by all modules; logits of the first one after each text."""
        logits, last, before = [], [], [cache.outputs for _, cache in texts]
        new = [self._context_rows(*text) for text in texts]
        ends = [cache.length - len(rows.tokens) for (_, cache), rows in zip(texts, new, strict=True)]
        for _, cache in texts:
            cache.num_drafts, cache.outputs = 0, []
        for number, module in enumerate(self.modules):
            if number:
                new = [
                    _after(rows, outputs, old[number - 1][:1] if old else None, end, cache.contexts[number])
                    for rows, outputs, old, end, (_, cache) in zip(new, last, before, ends, texts, strict=True)
                ]
            made, last = self._run(module, new)
            logits = logits or made
            for (_, cache), outputs in zip(texts, last, strict=True):
                cache.outputs.append(outputs[-1:])
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
        logits: dict[int, Tensor] = {}
        by_module: dict[int, list[tuple[MtpKVCache, _NewRows]]] = {}
        for inputs, cache in texts:
            decided, number = inputs.canvas.decided_prefix, cache.num_drafts + 1
            if len(decided) != cache.length + number or not cache.outputs:
                continue
            module = min(number, sum(map(cache.has_rows, range(len(self.modules)))) - 1)
            context, known = cache.contexts[module], len(cache.outputs[module]) - 1
            states = cache.outputs[module - 1 if module == number else module][known - number :]
            past = cache.length + known - context.first_position
            by_module.setdefault(module, []).append(
                (cache, _NewRows(decided[len(decided) - len(states) :], states, context, past))
            )
        for number, jobs in by_module.items():
            made, outputs = self._run(self.modules[number], [rows for _, rows in jobs])
            for (cache, _), row, last in zip(jobs, made, outputs, strict=True):
                logits[id(cache)] = row
                cache.outputs[number] = torch.cat([cache.outputs[number], last])
                cache.num_drafts += 1
        nothing = torch.empty(0, 0)
        return [logits.get(id(cache), nothing) for _, cache in texts]

    def _run(self, module: MtpModule, texts: Sequence[_NewRows]) -> tuple[list[Tensor], list[Tensor]]:
        """For each text the logits of its last row [1, vocab], and the outputs of all rows, or of the last ones."""
        given = [text for text in texts if len(text.tokens)]
        if not given:
            return [text.states[:0] for text in texts], [text.states[:0] for text in texts]
        inputs = module.inputs(
            torch.from_numpy(np.concatenate([text.tokens for text in given])),
            torch.cat([text.states for text in given]),
        ).split([len(text.tokens) for text in given])
        early = [self._early_outputs(module, text, rows) for text, rows in zip(given, inputs, strict=True)]
        rest = [
            ContextRows(rows[len(outputs) :], text.kv_cache, text.past_length + len(outputs), 1)
            for text, rows, outputs in zip(given, inputs, early, strict=True)
        ]
        ran = {
            id(text): (logits, torch.cat([outputs, last]))
            for text, outputs, (logits, last) in zip(given, early, module.layers.run_together(rest), strict=True)
        }
        both = [ran.get(id(text), (text.states[:0], text.states[:0])) for text in texts]
        return [logits for logits, _ in both], [outputs for _, outputs in both]

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


def _after(rows: _NewRows, outputs: Tensor, before: Tensor | None, end: int, kv_cache: ContextKVCache) -> _NewRows:
    """The rows of the next module: the same tokens with the outputs of this one at the rows before.

    `before` is its output at the last token before position `end`, from which on rows are new.
    """
    first = kv_cache.first_position
    if end >= first and before is not None:
        return replace(rows, states=torch.cat([before, outputs[:-1]]), kv_cache=kv_cache, past_length=end - first)
    return _NewRows(rows.tokens[1:], outputs[:-1], kv_cache, 0)
