"""Load a model with a method for a command; bad settings are refused before anything is downloaded or loaded."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import typing
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

from saltus.cli.options import DEFAULT_METHOD, MethodOptions, ModelOptions, SamplingOptions
from saltus.engine.target_drafters import is_drafter_spec
from saltus.loading.progress import ProgressCallback, Stage, no_progress, terminal_progress
from saltus.loading.sources import resolve

READ_WHEN_SAMPLING = ("top_p", "top_k", "min_p", "coupling", "seed")


def open_with_options(
    models: ModelOptions, methods: MethodOptions, sampling: SamplingOptions, **settings: Any
) -> tuple[Any, dict[str, Any]]:
    """The engine that a command's options describe, and its sampling settings. Errors: ValueError."""
    from saltus.cli.answers import print_note
    from saltus.engine.method_options import with_draft_model

    options = parse_method_options(
        methods.option or (), methods.method or DEFAULT_METHOD, draft_model=methods.draft_model
    )
    method, options = with_draft_model(methods.method, options, methods.draft_model, methods.num_draft_tokens)
    chosen = dataclasses.asdict(sampling)
    validate_settings(method, options, methods.rule, chat_template=models.chat_template, **chosen)
    loading = {
        **dataclasses.asdict(models), "rule": methods.rule, "max_draft_tokens": methods.max_draft_tokens,
        "ngram_corpus": methods.ngram_corpus or (), **settings
    }  # fmt: skip
    engine = open_engine(method=method, options=options, **loading)
    if engine.method != "plain" and (setup := engine.decoder.setup(engine.method)).chooses_sizes:
        setup.time_calls()  # now, not while the first text is written
    if methods.ngram_corpus and "lookup" not in engine.method.split("+"):
        raise ValueError(f"--ngram-corpus is for lookup, but the method is {engine.method}; take --method lookup")
    unread = [name for name in READ_WHEN_SAMPLING if chosen[name] != getattr(SamplingOptions, name)]
    if unread and not sampling.temperature:
        names = ", ".join("--" + name.replace("_", "-") for name in unread)
        print_note(f"without effect at temperature 0, which is greedy: {names}; sample by a temperature such as -t 0.8")
    return engine, chosen


def open_engine(
    model: str, method: str, options: Mapping[str, Mapping[str, Any]] | None = None, **settings: Any
) -> Any:
    """`saltus.load`, on a terminal with progress bars."""
    from saltus.cli.answers import print_note
    from saltus.methods import LoadsNetwork, make_methods

    draft_models = [
        where
        for made in make_methods(method, options or {})
        for where in made.draft_models.values()
        if not (is_drafter_spec(where) or isinstance(made, LoadsNetwork))
    ]
    with terminal_progress() as show:
        for name in (model, *draft_models):
            resolve(name, progress=_compiling_meanwhile(show))
    live = sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
    note = _temporary_note(f"loading {model}") if live else nullcontext()
    with note, terminal_progress() if settings.get("ngram_corpus") else nullcontext(no_progress) as show:
        _silence_transformers()
        from saltus.engine.load import load

        engine = load(model, method, options=options, progress=show, **settings)
    if (weights := settings.get("weights", "file")) not in ("file", "bf16"):
        print_note(f"weights packed as {weights}: another model than {model}, with other texts")
    return engine


def _compiling_meanwhile(show: ProgressCallback) -> ProgressCallback:
    """The same progress. With a download begins a process that compiles the kernels, which takes as long."""
    started: list[Any] = []

    def report(stage: Stage) -> None:
        if stage.total and not started:
            command = [sys.executable, "-m", "saltus.kernels.native"]
            nothing = subprocess.DEVNULL
            started.append(subprocess.Popen(command, stdin=nothing, stdout=nothing, stderr=nothing))
        show(stage)

    return report


@contextmanager
def _temporary_note(line: str) -> Iterator[None]:
    """A line on the terminal that is removed when the work is done."""
    print(f"\x1b[2m{line} …\x1b[0m\r", end="", file=sys.stderr, flush=True)  # what is logged meanwhile overwrites it
    try:
        yield
    finally:
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def validate_settings(
    method: str,
    options: Mapping[str, Mapping[str, Any]] | None = None,
    rule: str = "match",
    chat_template: str | None = None,
    **sampling: Any,
) -> None:
    """Raise ValueError for wrong settings, before a model is downloaded or loaded."""
    from saltus.core.noise import Noise
    from saltus.core.sampling import Sampling
    from saltus.engine.chat.chat_template import read_chat_template
    from saltus.engine.decoder import check_rule
    from saltus.methods import make_methods, require_draft_models

    require_draft_models(make_methods(method, options or {}))
    check_rule(rule)
    if chat_template is not None:
        read_chat_template(chat_template)
    Noise(sampling.pop("seed", 0))
    Sampling(**sampling)


def parse_method_options(
    assignments: Sequence[str],
    method: str,
    given_by: str = "--option",
    named_by: str = "--method",
    draft_model: str | None = None,
) -> dict[str, dict[str, Any]]:
    """Fields by method from `method.field=value`, each value in the type of its field.

    `draft_model` is the one that another option names. Errors: ValueError of one line, which names the options of the
    command line that give the fields and the method.
    """
    from saltus.core.value_types import hints_of
    from saltus.methods import AUTO, WITH_DRAFT_MODEL, available_methods, check_option, make_methods, method_names

    if assignments:
        make_methods(method)
    known = method_names(method, bool(draft_model) or name_draft_model(assignments))
    options: dict[str, dict[str, Any]] = {}
    for assignment in assignments:
        target, equals, value = assignment.partition("=")
        shown = f"{given_by} {assignment}"
        name, dot, key = target.partition(".")
        if not (equals and dot and name and key):
            raise ValueError(f"{shown}: write METHOD.FIELD=VALUE, such as lookup.max_ngram_size=5")
        if name == WITH_DRAFT_MODEL and name not in known and set(method_names(AUTO)) <= set(known):
            raise ValueError(f"{shown}: auto drafts so only with a draft model; add --option {name}.model=MODEL")
        if name not in known:
            raise ValueError(f"{shown}: the method is {method}, not {name}; name it with {named_by}")
        try:
            check_option(name, key)
        except ValueError as error:
            raise ValueError(f"{shown}: {error}") from error
        options.setdefault(name, {})[key] = _convert(value, hints_of(available_methods()[name])[key], shown)
    return options


def name_draft_model(assignments: Sequence[str]) -> bool:
    """Whether options give the draft model with which `auto` drafts."""
    from saltus.methods import WITH_DRAFT_MODEL

    begin = f"{WITH_DRAFT_MODEL}.model="
    return any(each.startswith(begin) and each != begin for each in assignments)


def _convert(value: str, hint: Any, shown: str) -> Any:
    """A value as it is written on a command line, where the option is `shown`."""
    from saltus.core.value_types import alternatives, described

    if typing.get_origin(hint) is typing.Literal:
        choices = typing.get_args(hint)
        if value in choices:
            return value
        raise ValueError(f"{shown}: {value!r} is none of {', '.join(choices)}")
    kinds = alternatives(hint)
    if type(None) in kinds and value.lower() == "none":
        return None
    for kind in (bool, int, float, str):
        if kind not in kinds:
            continue
        if kind is not bool:
            try:
                return kind(value)
            except ValueError:
                continue
        if (word := value.lower()) in _BOOLEANS:
            return _BOOLEANS[word]
    raise ValueError(f"{shown}: {value!r} is not {described(hint)}")


_BOOLEANS = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}


def _silence_transformers() -> None:
    """Show only errors of Transformers while it loads."""
    if not os.environ.get("SALTUS_DEBUG"):
        from transformers.utils import logging

        logging.set_verbosity_error()
        logging.disable_progress_bar()
