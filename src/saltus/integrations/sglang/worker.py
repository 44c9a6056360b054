"""The worker of the algorithm SALTUS: SGLang's n-gram worker, with our drafts and our verification."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from saltus.integrations.drafted_texts import DraftedText, Drafting, DraftRequest, ngram_model_of
from saltus.integrations.sglang.verification import (
    PaddedTree,
    WrittenText,
    padded_tree,
    pick_next,
    request_noise,
    request_sampling,
    verify_tree,
)
from saltus.methods import make_methods

log = logging.getLogger("saltus")


def saltus_worker(ngram_worker: type[Any], context: Any) -> type[Any]:
    """SGLang's NGRAMWorker with our drafts and tokens. `context` is its runtime_context: settings as SGLang resolved
    them, where `server_args` has only what was typed.

    What it inherits is the layout of a verification call, the KV cache and the results. It must run without overlap:
    then a request's tokens are complete when its drafts are made.
    """

    class SaltusWorker(ngram_worker):
        """Drafts by lookup, verifies by `match`, and picks first tokens by the same random numbers."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            if self.enable_overlap:
                raise ValueError("the algorithm SALTUS runs without overlap; add --disable-overlap-schedule")
            _, backend = context.attention_backends()  # of prompts, and of decoding
            if self.topk > 1 and self.page_size > 1 and backend != "flashinfer":
                raise ValueError(
                    "draft trees need pages of one token; add --page-size 1 or --attention-backend flashinfer"
                )
            if context.get_parallel().attn_dp_size > 1:
                raise ValueError("the algorithm SALTUS has no data-parallel attention; leave out --attn-dp-size")
            if getattr(self.server_args, "speculative_ngram_external_corpus_path", None):
                log.warning("--speculative-ngram-external-corpus-path is not read by the algorithm SALTUS")
            made, given = make_methods("lookup"), self.server_args
            vocabulary = getattr(getattr(self.model_runner, "model_config", None), "vocab_size", None)
            ngram_model = ngram_model_of(
                made, getattr(given, "tokenizer_path", None), vocabulary, revision=getattr(given, "revision", None),
                trust_remote_code=getattr(given, "trust_remote_code", False),
            )  # fmt: skip
            self.drafting = Drafting(made, ngram_model=ngram_model, num_token_ids=vocabulary)
            self.trees: list[PaddedTree] = []  # of the batch that is verified
            self.requests: Sequence[Any] = ()  # of the current batch
            self.sglang_sample = self.model_runner.sample
            self.model_runner.sample = self._first_tokens

        def forward_batch_generation(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
            self.requests = batch.reqs
            return super().forward_batch_generation(batch, *args, **kwargs)

        def _prepare_for_speculative_decoding(self, batch: Any) -> None:
            super()._prepare_for_speculative_decoding(batch)
            if batch.forward_mode.is_target_verify():
                batch.spec_info.saltus_worker = self  # where `sample_by_match` finds it

        def _prepare_draft_tokens(self, batch: Any) -> tuple[np.ndarray, np.ndarray]:
            """The tokens [batch · nodes] and masks [batch · nodes · nodes] of the draft trees."""
            draft_requests = []
            for request in batch.reqs:
                tokens = np.array([*request.origin_input_ids_unpadded, *request.output_ids], dtype=np.int64)
                draft_requests.append(DraftRequest(self._text(request), tokens, self.draft_token_num - 1))
            drafted = zip(draft_requests, self.drafting.trees(draft_requests), strict=True)
            self.trees = [
                padded_tree(int(draft_request.tokens[-1]), tree, self.draft_token_num)
                for draft_request, tree in drafted
            ]
            tokens = np.concatenate([tree.tokens for tree in self.trees])
            return tokens, np.concatenate([tree.mask.ravel() for tree in self.trees])

        def _update_ngram_corpus(self, batch: Any) -> None:
            """Nothing: our drafters read the requests' tokens."""

        def accept(self, requests: Sequence[Any], logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            """Tokens by node [batch · nodes], accepted lengths [batch] and nodes [batch, nodes], −1 behind their end.

            `logits` are [batch · nodes, vocab]; nodes are counted over the whole batch.
            """
            nodes = self.draft_token_num
            predicted = torch.zeros(len(requests) * nodes, dtype=torch.int32)
            lengths = torch.zeros(len(requests), dtype=torch.int32)
            accepted = torch.full((len(requests), nodes), -1, dtype=torch.int32)
            for row, (request, tree) in enumerate(zip(requests, self.trees, strict=True)):
                text, text_logits = self._text(request), logits[row * nodes : (row + 1) * nodes]
                path, tokens = verify_tree(_written(request), tree, text_logits, text.sampling, text.noise)
                lengths[row] = len(path)
                accepted[row, : len(path)] = torch.tensor(path, dtype=torch.int32) + row * nodes
                predicted[accepted[row, : len(path)].long()] = torch.tensor(tokens, dtype=torch.int32)
            return predicted.to(logits.device), lengths.to(logits.device), accepted.to(logits.device)

        def _first_tokens(self, logits_output: Any, forward_batch: Any) -> Tensor:
            """In place of the model runner's `sample`: the tokens after prompts, by the text's own random numbers.

            Where log-probabilities are asked for, SGLang computes them for a token that it samples itself.
            """
            logits, info = logits_output.next_token_logits, forward_batch.sampling_info
            if forward_batch.return_logprob:
                logits = logits.clone()  # sampling changes them
                self.sglang_sample(logits_output, forward_batch)
            if getattr(info, "grammars", None):
                info.update_regex_vocab_mask()
                if info.grammar_mask is not None:
                    info.grammar_mask.apply(logits)
                    info.grammar_mask = None
            picked = []
            for request, row in zip(self.requests, logits, strict=True):
                text = self._text(request)
                picked.append(pick_next(_written(request), row, text.sampling, text.noise))
            return torch.tensor(picked, dtype=torch.int32, device=logits.device)

        def _text(self, request: Any) -> DraftedText:
            """Kept by the request itself: clients may use an id twice."""
            text: DraftedText | None = getattr(request, "saltus_text", None)
            if text is None:
                text = self.drafting.new_text(request_noise(request), request_sampling(request))
                request.saltus_text = text
            return text

    return SaltusWorker


def sample_by_match(original: Callable[..., Any]) -> Callable[..., Any]:
    """`eagle_sample` of SGLang, which verifies the batches of a SaltusWorker by `match`, and others as before."""

    def sample(verify_input: Any, batch: Any, logits_output: Any, grammar_mask: Any = None, **settings: Any) -> Any:
        worker = getattr(verify_input, "saltus_worker", None)
        if worker is None or batch.forward_mode.is_idle():
            return original(verify_input, batch, logits_output, grammar_mask, **settings)
        if grammar_mask is not None:
            grammar_mask.apply(logits_output.next_token_logits)
        return worker.accept(batch.reqs, logits_output.next_token_logits)

    return sample


def _written(request: Any) -> WrittenText:
    return WrittenText(request.origin_input_ids_unpadded, request.output_ids)
