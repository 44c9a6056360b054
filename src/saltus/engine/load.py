"""Load a model with what decodes it: the way in for Python and for the command line."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from saltus import methods
from saltus.core.value_types import typed_value, with_checked_types
from saltus.engine.chat.chat_template import read_chat_template
from saltus.engine.checkpoints import Checkpoint, has_same_vocabulary, load_checkpoint, require_same_vocabulary
from saltus.engine.corpus_files import load_corpus
from saltus.engine.decoder import (
    MAX_DRAFT_TOKENS,
    Decoder,
    LoadedDraftNetwork,
    check_max_draft_tokens,
    check_rule,
    default_max_draft_tokens,
)
from saltus.engine.engine import Engine
from saltus.engine.heterogeneous_vocabularies import VocabularyTranslation
from saltus.engine.method_options import with_draft_model
from saltus.engine.sample_texts import load_ngram_model
from saltus.engine.tuned_settings import TunedSettings, find_tuned_settings, machine_name
from saltus.loading.model_identity import model_fingerprint
from saltus.loading.progress import ProgressCallback, no_progress
from saltus.loading.sources import DEFAULT_MODEL
from saltus.models.protocols import TargetNetwork
from saltus.models.resized_vocabulary import with_vocabulary_of

log = logging.getLogger("saltus")


@with_checked_types
def load(
    model: str | Path = DEFAULT_MODEL,
    method: str | None = None,
    *,
    draft_model: str | None = None,
    num_draft_tokens: int | None = None,
    device: str = "auto",
    dtype: str = "auto",
    rule: str = "match",
    options: Mapping[str, Mapping[str, Any]] | None = None,
    max_draft_tokens: int | None = None,
    adaptive: bool = True,
    exact: bool = True,
    batch_size: int = 16,
    weights: str = "file",
    arithmetic: str = "auto",
    chat_template: str | None = None,
    ngram_corpus: Sequence[str | Path] = (),
    progress: ProgressCallback | None = None,
    tuned_settings: bool = True,
) -> Engine:
    """Load a model and decode it with a method. Errors: ValueError of one line (SourceError if it cannot be found).

    Args:
        model: a short name, a local folder, a GGUF file, a hub id (`owner/name`), or a GGUF file on a hub
            (`owner/name:file.gguf`).
        method: how to draft. "auto", the default, takes what drafts best with the model without settings: see
            docs/methods.md. Several joined by + draft together.
        draft_model: a smaller model, which drafts ("auto" is then "small_model+lookup"); best one of the same
            vocabulary.
        num_draft_tokens: how many tokens it drafts for a call, at most.
        device: "auto", "cpu", "cuda" or "cuda:1".
        dtype: "auto" (the checkpoint's own), "float32", "bfloat16" or "float16".
        rule: how drafts are verified: "match" (the text does not depend on the method) or "reject" (rejection
            sampling: the same distribution, other tokens).
        options: fields of methods, such as {"lookup": {"max_ngram_size": 5}}.
        max_draft_tokens: draft tokens that a call may verify, at most 384; by default 31, 16 where their number is not
            chosen (without `adaptive`, or by the rule "reject"), or num_draft_tokens if that is more.
        adaptive: choose by measured costs and acceptance how many draft tokens pay.
        exact: False uses attention whose rounding depends on the shapes of calls; texts may then differ by method.
        batch_size: texts decoded at once.
        weights: "file" keeps them as the checkpoint stores them, packed ones too; "bf16" expands packed ones; "q8_0",
            "q5_1", "q5_0", "q4_1" and "q4_0" pack those of a Hugging Face model, which makes another model of it.
        arithmetic: how packed weights are multiplied on the CPU: "int8" (with "auto"), their integers by activations of
            8 bits, fast, and the same on every processor; "bf16", in bfloat16. The text depends on it.
        chat_template: how messages become a text, in place of the model's own: "vicuna", "chatml", "llama-2",
            "alpaca", or a Jinja file.
        ngram_corpus: files and folders of texts, such as a code base, that `lookup` also copies from.
        progress: called while files are downloaded, and while a corpus is read.
        tuned_settings: use the settings that `saltus tune` saved for jacobi, if no options of jacobi are given.
    """
    model = str(typed_value(model, str | Path, "model"))  # these two are mostly given by position
    method = typed_value(method, str | None, "method")
    method, options = with_draft_model(method, options or {}, draft_model, num_draft_tokens)
    check_rule(rule)
    if max_draft_tokens is not None:
        check_max_draft_tokens(max_draft_tokens)
    if batch_size < 1:
        raise ValueError(f"batch_size is {batch_size}, but must be 1 or more")
    methods.require_draft_models(methods.make_methods(method, options))  # before anything is loaded
    template = None if chat_template is None else read_chat_template(chat_template)
    nodes = max_draft_tokens
    if nodes is None:
        nodes = max(default_max_draft_tokens(adaptive, rule), num_draft_tokens or 0)

    @lru_cache
    def checkpoint(name: str) -> Checkpoint:
        return load_checkpoint(
            name, device, dtype, exact, progress, nodes, weights if name == model else "file", arithmetic
        )

    target = checkpoint(model)
    if template is not None:
        target.tokenizer.chat_template = template

    def load_draft_model(name: str, any_vocabulary: bool) -> LoadedDraftNetwork:
        drafter = checkpoint(name)
        if any_vocabulary and not has_same_vocabulary(target, drafter) and not drafter.network.any_subset:
            translation = VocabularyTranslation(
                drafter.tokenizer, target.tokenizer, target.num_token_ids, drafter.context_length
            )
            return LoadedDraftNetwork(drafter.network, None, translation)
        require_same_vocabulary(target, drafter)
        return LoadedDraftNetwork(with_vocabulary_of(target.network, drafter.network), drafter.context_length)

    tuned = _find_tuned_settings(model, target.network, options, max_draft_tokens) if tuned_settings else None
    decoder = Decoder(target.network, target.name, load_draft_model, options, rule, nodes, adaptive, batch_size, tuned)
    decoder.load_ngram_model = lru_cache(partial(load_ngram_model, target.tokenizer, target.num_token_ids))
    if ngram_corpus:
        decoder.corpus = load_corpus(ngram_corpus, target.tokenizer, target.num_token_ids, progress or no_progress)
    engine = Engine(target, decoder.chosen_method(method), decoder)
    if method == methods.AUTO:
        _report_choice(engine)
    return engine


def _report_choice(engine: Engine) -> None:
    """Log the decoder's note on what `auto` is, and a line where options are given of methods that it is not."""
    explained: set[str] = set()
    if engine.decoder.auto_note:
        is_surprise = bool(engine.decoder.options.get("ptp"))  # else `lookup` is as good
        log.log(logging.WARNING if is_surprise else logging.INFO, "%s", engine.decoder.auto_note)
        explained = {"ptp"}
    given = {name for name, fields in engine.decoder.options.items() if fields}
    if unused := sorted(given - explained - {*engine.method.split("+")}):
        log.warning(
            "auto is %s here: the options of %s have no effect on it; name the method to use them",
            engine.method, " and ".join(unused),
        )  # fmt: skip


def _find_tuned_settings(
    model: str, network: TargetNetwork, options: Mapping[str, Mapping[str, Any]], max_draft_tokens: int | None
) -> TunedSettings | None:
    """What `saltus tune` found for jacobi, unless options of jacobi are given (its adapter may be).

    Where call shapes are fixed, its `max_draft_tokens` is cut to theirs, since a text depends on them.
    """
    given = options.get("jacobi", {})
    if set(given) - {"model"}:
        return None
    machine = machine_name(network.model.device)
    tuned = find_tuned_settings("jacobi", model, machine, given.get("model", ""))
    if tuned is None or tuned.fingerprint != model_fingerprint(network.model):
        return None
    limit = MAX_DRAFT_TOKENS if network.max_draft_tokens is None else network.max_draft_tokens
    if max_draft_tokens is None:
        max_draft_tokens = min(tuned.max_draft_tokens, limit)
    return replace(tuned, max_draft_tokens=max_draft_tokens)
