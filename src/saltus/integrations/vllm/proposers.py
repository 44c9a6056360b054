"""Propose draft tokens inside vLLM: `speculative_config={"method": "custom_class", "model": "saltus.vllm.Lookup"}`."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from torch import Tensor

from saltus.core.control.drafting_switch import DraftingSwitch
from saltus.core.protocols import Network
from saltus.engine.target_drafters import load_drafter_for_target
from saltus.integrations.drafted_texts import DraftedText, Drafting, DraftRequest, ngram_model_of
from saltus.integrations.step_cost import StepCost
from saltus.integrations.vllm.chains import best_chain, lengths_that_pay
from saltus.integrations.vllm.target import HiddenStateReader, VllmTarget
from saltus.methods import LoadsNetwork, make_methods

log = logging.getLogger("saltus")

OPTIONS = "saltus"  # the key of our options in vLLM's additional_config


class Proposer:
    """A custom proposer of vLLM, for methods like `ptp+lookup`.

    vLLM passes neither request ids nor which texts have gone, and moves texts between rows of its batch. So texts are
    recognised by their tokens.
    """

    def __init__(self, vllm_config: Any, methods: str) -> None:
        speculative = vllm_config.speculative_config
        self.num_draft_tokens = int(speculative.num_speculative_tokens)
        self.max_length = int(vllm_config.model_config.max_model_len)
        self.max_texts = 2 * int(vllm_config.scheduler_config.max_num_seqs)
        self.config = getattr(vllm_config.model_config, "hf_text_config", None)
        options = (getattr(vllm_config, "additional_config", None) or {}).get(OPTIONS, {})
        made = make_methods(methods, options)
        model = vllm_config.model_config
        vocabulary = None if self.config is None else self.config.vocab_size
        ngram_model = ngram_model_of(
            made, getattr(model, "tokenizer", None), vocabulary, revision=getattr(model, "tokenizer_revision", None),
            trust_remote_code=getattr(model, "trust_remote_code", False),
        )  # fmt: skip
        self.drafting = Drafting(made, ngram_model=ngram_model, num_token_ids=vocabulary)
        self.step_cost = StepCost()
        self.reader: HiddenStateReader | None = None
        self.texts: list[DraftedText] = []  # the most recently used last
        self.slots: list[DraftedText | None] = []  # the text of each row in the last step, None if it decided nothing
        self.rows = 0  # of the step that is under way; 0 if its time is not known
        self.ended = 0.0  # when the last call of `propose` ended
        self.has_warned = False
        self.switch = DraftingSwitch()  # of draft networks

    def load_model(self, model: Any) -> None:
        """Load the drafters for vLLM's model. Errors: ValueError where there is none for it."""
        specs = [(method, *pair) for method in self.drafting.methods for pair in method.draft_models.items()]
        if not specs:
            return
        target, target_name = VllmTarget(model, self.config), "the model of vLLM"
        networks: dict[str, Network] = {}
        for method, name, spec in specs:
            if isinstance(method, LoadsNetwork):
                networks[name] = method.load_network(target, target_name)
            elif (network := load_drafter_for_target(spec, target, target_name, name)) is not None:
                networks[name] = network
        self.drafting.networks = networks
        self.reader = HiddenStateReader(model, target.hidden_state_layers, query_starts)

    def propose(
        self,
        sampled_token_ids: Sequence[Sequence[int]],
        num_tokens_no_spec: np.ndarray,
        token_ids_cpu: np.ndarray,
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        """Draft tokens for each text of the batch; none for those in the middle of their prompt."""
        began, before = time.perf_counter(), self.slots
        running = [index for index, sampled in enumerate(sampled_token_ids) if len(sampled)]
        tokens = [token_ids_cpu[index, : int(num_tokens_no_spec[index])].astype(np.int64) for index in running]
        texts = self._find_texts(running, tokens, len(sampled_token_ids))
        if self.rows and [id(text) for text in before] == [id(text) for text in self.slots]:
            decided = sum(len(now) - len(text.tokens) for text, now in zip(texts, tokens, strict=True))
            self._record_step(began - self.ended, len(texts), decided)
        use_networks = self.reader is not None and self.switch.should_draft()
        step = None if self.reader is None else self.reader.take()
        requests = [
            self._request(text, now, None if step is None else step.of_text(index, now))
            for index, text, now in zip(running, texts, tokens, strict=True)
        ]
        chains = [best_chain(tree) for tree in self.drafting.trees(requests, use_networks)]
        lengths = lengths_that_pay(chains, self.step_cost.seconds_for)
        drafts: list[list[int]] = [[] for _ in sampled_token_ids]
        for index, text, chain, length in zip(running, texts, chains, lengths, strict=True):
            text.offered = chain
            drafts[index] = list(chain.tokens[:length])
        self.rows = len(texts) + sum(lengths) if len(texts) == len(sampled_token_ids) else 0
        self.ended = time.perf_counter()
        return drafts

    def _find_texts(self, running: Sequence[int], tokens: Sequence[np.ndarray], size: int) -> list[DraftedText]:
        """The text of each running row: the one that was there before, another that it continues, or a new one."""
        free = {id(text): text for text in self.texts}
        assigned = []
        for index, now in zip(running, tokens, strict=True):
            same_row = self.slots[index : index + 1]
            candidates = (*same_row, *reversed(free.values()))
            text = next(
                (candidate for candidate in candidates if id(candidate) in free and self._continues(now, candidate)),
                None,
            )
            free.pop(id(text), None)
            assigned.append(text or self.drafting.new_text())
        self.texts = [*free.values(), *assigned][-self.max_texts :]
        self.slots = [None] * size
        for index, text in zip(running, assigned, strict=True):
            self.slots[index] = text
        return assigned

    def _continues(self, tokens: np.ndarray, text: DraftedText | None) -> bool:
        """True if these tokens are the text after one more step."""
        known = 0 if text is None else len(text.tokens)
        if text is None or not known < len(tokens) <= known + self.num_draft_tokens + 1:
            return False
        return bool(tokens[known - 1] == text.tokens[-1]) and np.array_equal(tokens[:known], text.tokens)

    def _request(self, text: DraftedText, tokens: np.ndarray, states: Tensor | None) -> DraftRequest:
        if self.reader is not None and states is None and not self.has_warned:
            self.has_warned = True
            log.warning(
                "vLLM gave no hidden states for a text, so its drafts come from lookup alone; with a GPU use"
                " enforce_eager or piecewise CUDA graphs"
            )
        max_depth = min(self.num_draft_tokens, self.max_length - len(tokens) - 1)
        return DraftRequest(text, tokens, max(max_depth, 0), states)

    def _record_step(self, seconds: float, num_texts: int, num_decided: int) -> None:
        """Record the step that the last call of `propose` has begun, and whether draft networks paid for it."""
        self.step_cost.record(self.rows, seconds)
        if self.reader is not None:
            spent = seconds + self.drafting.network_seconds
            throughput = self.switch.with_drafts if self.drafting.network_seconds else self.switch.without_drafts
            throughput.record(float(num_decided), num_texts * spent / self.step_cost.seconds_for(num_texts))


def query_starts() -> np.ndarray | None:
    """The first row of each text in vLLM's current step, and the end of the last; None in a trial run."""
    from vllm.forward_context import get_forward_context  # pyright: ignore[reportMissingImports]

    metadata = get_forward_context().attn_metadata
    by_layer = metadata.values() if isinstance(metadata, Mapping) else (metadata,)
    found = (getattr(one, "query_start_loc", None) for one in by_layer)
    starts = next((one for one in found if one is not None), None)  # layers that keep a state do not say it
    return None if starts is None else starts.cpu().numpy().copy()


Lookup = partial(Proposer, methods="lookup")
"""Copies what followed the last tokens before, in prompt and text."""
Ptp = partial(Proposer, methods="ptp+lookup")
"""A trained drafter that reads the model's hidden states, and lookup."""
Mtpc = partial(Proposer, methods="mtpc+lookup")
"""Trained multi-token heads, and lookup."""
