"""Read the prompts of a server's texts piece by piece, and keep what was read for texts that begin alike."""

from __future__ import annotations

import logging

import numpy as np

from saltus.core.canvas import continuation
from saltus.core.forward import TARGET, ForwardInputs
from saltus.engine.engine import Engine
from saltus.engine.prefix_cache import supports_prefix_cache
from saltus.engine.prefix_tree import PrefixTree
from saltus.engine.prompt_scores import PromptScores
from saltus.server.errors import is_out_of_memory
from saltus.server.jobs import Job

log = logging.getLogger("saltus.server")

PIECE_TOKENS = 256  # of a prompt that are read between two calls of the running texts


class PromptReader:
    """Reads prompts on the engine's thread. Without a tree of prefixes a text's first call reads its whole prompt."""

    def __init__(self, engine: Engine, max_tree_bytes: int) -> None:
        self.engine = engine
        self.tree = PrefixTree(max_tree_bytes) if supports_prefix_cache(engine.network) else None

    def needs_call(self, job: Job) -> bool:
        """True if a call should read a piece of the prompt; False if the text's first call can read what is left."""
        if job.prompt_scores is not None and job.prompt_scores.num_unscored:
            return True
        return self.tree is not None and job.unread > PIECE_TOKENS

    def read_piece(self, job: Job) -> None:
        """Read the next tokens of a prompt into the job's cache; the last of them are left to its first call."""
        assert job.sequence is not None
        if job.prompt_scores is not None and job.prompt_scores.num_unscored:
            self._score_piece(job, job.prompt_scores)
            return
        if self.tree is None:  # then pieces of a prompt may round otherwise than the whole: one call reads it
            job.unread = 0
            return
        prompt, kv_caches = job.request.request.prompt, job.sequence.kv_caches
        if TARGET not in kv_caches:  # only now: what runs beside it may have read a part
            setup = self.engine.decoder.setup(job.method)
            known = prompt[: -1 - setup.num_unread_states(job.request.request)]
            kv_caches |= self.tree.take(known, setup.networks)
            kv_caches.setdefault(TARGET, self.engine.network.new_kv_cache())
            job.cached_tokens = len(kv_caches[TARGET].tokens)
            job.unread -= job.cached_tokens
        if job.unread <= PIECE_TOKENS:
            job.unread = 0
            return
        end = len(prompt) - job.unread + PIECE_TOKENS
        self.engine.network.forward([ForwardInputs(continuation(prompt[:end], 1))], [kv_caches[TARGET]])
        job.unread = len(prompt) - end

    def _score_piece(self, job: Job, scores: PromptScores) -> None:
        """Read and score the next tokens of a prompt; what the tree of prefixes has of it is of no use."""
        assert job.sequence is not None
        kv_caches, prompt = job.sequence.kv_caches, job.request.request.prompt
        kv_cache = kv_caches.setdefault(TARGET, self.engine.network.new_kv_cache())
        scores.score_piece(self.engine.network, kv_cache)
        if scores.num_unscored:
            return
        job.unread = 0
        if self.tree is None:
            del kv_caches[TARGET]  # the text is that of a prompt that one call reads
        else:  # the last tokens are left to the first call, as ever
            unread = self.engine.decoder.setup(job.method).num_unread_states(job.request.request)
            kv_cache.reuse_prefix(np.asarray(prompt[: max(len(prompt) - unread, 1)], dtype=np.int64))

    def keep(self, job: Job) -> None:
        """Copy what a text has read into the tree of prefixes; a tree that cannot take it is emptied."""
        if self.tree is None or job.sequence is None:
            return
        try:
            self.tree.put(job.request.request.prompt, job.sequence.kv_caches)
        except Exception as error:
            if not is_out_of_memory(error):
                log.exception("the tree of prefixes has failed and is empty now")
            self.tree.clear()
