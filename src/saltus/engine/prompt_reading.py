"""Read the prompts of texts chunk by chunk, and keep what was read for texts that begin alike."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import numpy as np

from saltus.core.canvas import continuation
from saltus.core.forward import TARGET, ForwardInputs
from saltus.core.out_of_memory import is_out_of_memory
from saltus.engine.prefix_tree import PrefixTree
from saltus.engine.prompt_scores import PromptScores
from saltus.engine.scheduled_request import ScheduledRequest
from saltus.models.cpu.hybrid_kv_cache import HybridKVCache
from saltus.models.protocols import TargetNetwork

log = logging.getLogger("saltus")

COPIED_CHUNKS = 4  # of a prompt that are copied in the time of one that is read; a copy takes far less time


@dataclass(eq=False)
class PromptReader:
    """Reads prompts in chunks of so many tokens; without a number a text's first call reads what the tree has not.

    Without a prefix tree a text's first call reads its whole prompt, since chunks may round otherwise than the whole.
    """

    target: TargetNetwork
    tree: PrefixTree | None
    prefill_chunk_tokens: int | None

    def needs_call(self, scheduled: ScheduledRequest) -> bool:
        """True if a call should read a chunk of the prompt; False if the text's first call can read what is left."""
        if scheduled.prompt_scores is not None and scheduled.prompt_scores.num_unscored:
            return True
        if self.tree is None or self.prefill_chunk_tokens is None:
            return False
        unread = scheduled.num_unread_tokens
        if not scheduled.request.max_new_tokens:  # there is no first call: the prompt is read for texts to come
            return unread > 1 + _num_unread_states(scheduled)
        return unread > self.prefill_chunk_tokens and unread > 1 + _num_unread_states(scheduled)

    def read_chunk(self, scheduled: ScheduledRequest) -> None:
        """Read the next tokens of a prompt into the text's cache; the last of them are left to its first call."""
        assert scheduled.sequence is not None
        assert scheduled.setup is not None
        if scheduled.prompt_scores is not None and scheduled.prompt_scores.num_unscored:
            self._score_chunk(scheduled, scheduled.prompt_scores)
            return
        if self.tree is None:
            scheduled.num_unread_tokens = 0
            return
        prompt, kv_caches = scheduled.request.prompt, scheduled.sequence.kv_caches
        known = prompt[: -1 - _num_unread_states(scheduled)] if scheduled.reuses_prefix else ()
        most = None if self.prefill_chunk_tokens is None else COPIED_CHUNKS * self.prefill_chunk_tokens
        before = 0
        if TARGET not in kv_caches:  # only now: what runs beside it may have read a part
            kv_caches |= self.tree.take(known, scheduled.setup.networks, most)
            kv_caches.setdefault(TARGET, self.target.new_kv_cache())
        elif most is not None:
            before = len(kv_caches[TARGET].tokens)
            self.tree.extend(known, kv_caches, most)
        found = len(kv_caches[TARGET].tokens) - before
        scheduled.cached_tokens += found
        scheduled.num_unread_tokens -= found
        if found and found == most:
            return  # more may be known
        if not self.needs_call(scheduled):
            scheduled.num_unread_tokens = 0
            return
        assert self.prefill_chunk_tokens is not None
        end = len(prompt) - scheduled.num_unread_tokens + self.prefill_chunk_tokens
        end = min(end, len(prompt) - 1 - _num_unread_states(scheduled))
        self.target.forward([ForwardInputs(continuation(prompt[:end], 1))], [kv_caches[TARGET]])
        scheduled.num_unread_tokens = len(prompt) - end
        if not isinstance(kv_caches[TARGET], HybridKVCache):  # which has snapshots at the end of each chunk
            self.keep(scheduled)  # other texts would wait for a copy of the whole prompt at its end

    def _score_chunk(self, scheduled: ScheduledRequest, scores: PromptScores) -> None:
        """Read and score the next tokens of a prompt; what the tree of prefixes has of it is of no use."""
        assert scheduled.sequence is not None
        assert scheduled.setup is not None
        kv_caches, prompt = scheduled.sequence.kv_caches, scheduled.request.prompt
        kv_cache = kv_caches.setdefault(TARGET, self.target.new_kv_cache())
        scores.score_chunk(self.target, kv_cache, scheduled.num_tokens)
        if scores.num_unscored:
            return
        scheduled.num_unread_tokens = 0
        if self.tree is None:
            del kv_caches[TARGET]  # the text is that of a prompt that one call reads
        else:  # the last tokens are left to the first call, as ever
            unread = _num_unread_states(scheduled)
            kv_cache.reuse_prefix(np.asarray(prompt[: max(len(prompt) - unread, 1)], dtype=np.int64))

    def keep(self, scheduled: ScheduledRequest, ended: bool = False) -> None:
        """Copy what a text has read into the prefix tree; a tree that cannot take it is emptied.

        The caches of a text that has `ended` are the tree's, if it cannot copy them.
        """
        if self.tree is None or scheduled.sequence is None:
            return
        try:
            self.tree.put(scheduled.request.prompt, scheduled.sequence.kv_caches, ended)
        except Exception as error:
            if not is_out_of_memory(error):
                log.exception("the prefix tree has failed and is empty now")
            self.tree.clear()


def _num_unread_states(scheduled: ScheduledRequest) -> int:
    """Tokens at the end of a prompt whose hidden states drafters will read; none while draft models are off."""
    assert scheduled.setup is not None
    assert scheduled.controller is not None
    most = scheduled.setup.num_unread_states(scheduled.request)
    return most if most and scheduled.controller.needs_hidden_states(most) else 0
