"""What a benchmark compares: methods, each with its options, baselines and running servers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any


@dataclass(frozen=True)
class ComparedMethods:
    """The methods of a benchmark, as its command line names them."""

    names: list[str]  # plain first
    spec: str  # one of all methods that the names may stand for
    option: list[str]  # assignments METHOD.FIELD=VALUE of all of them
    opened_with: list[str]  # these, and the first value of each varied option
    variants: list[Any]  # a MethodVariant for each combination of the varied options


def read_methods(methods: str, option: Sequence[str], vary: Sequence[str], draft_model: str | None) -> ComparedMethods:
    """The methods with their options. Errors: ValueError of one line."""
    names = _method_names(methods)
    assigned = _with_draft_model(option, vary, draft_model)
    spec = _joined(names, [*assigned, *vary])
    varied = _varied(vary, spec)
    opened_with = [*assigned, *(assignments[0] for assignments in varied.values())]
    return ComparedMethods(names, spec, assigned, opened_with, _variants(names, spec, varied, assigned))


def validate_systems(
    compared: ComparedMethods, baselines: str | None, assistant: str | None, rule: str, **settings: Any
) -> None:
    """Raise ValueError for wrong settings, before anything long begins."""
    from saltus.cli.open_engine import parse_method_options, validate_settings
    from saltus.methods import make_methods

    for name in compared.names:
        make_methods(name)
    options = parse_method_options(compared.opened_with, compared.spec, named_by="--methods")
    validate_settings(compared.spec, options, rule, **settings)
    from saltus.evaluation.benchmarks.baselines import check_baselines

    check_baselines(_baselines(baselines, assistant), assistant)


def open_compared(compared: ComparedMethods, **settings: Any) -> Any:
    """The engine, with what all methods but `auto` draft with: that is chosen when it is measured."""
    from saltus.cli.open_engine import open_engine, parse_method_options
    from saltus.methods import AUTO, WITH_DRAFT_MODEL

    loaded_now = [name for name in compared.names if name != AUTO]
    loaded_now += [WITH_DRAFT_MODEL] * (WITH_DRAFT_MODEL in compared.spec.split("+"))
    options = parse_method_options(compared.opened_with, compared.spec)
    return open_engine(method=_joined(loaded_now), options=options, **settings)


def systems_under_test(
    engine: Any, variants: Sequence[Any], baselines: str | None, assistant: str | None, endpoints: Sequence[str]
) -> list[Any]:
    """All systems, plain decoding first."""
    from saltus.evaluation.benchmarks.baselines import baselines_under_test, servers_under_test
    from saltus.evaluation.benchmarks.llama_cpp_baseline import reads_gguf
    from saltus.evaluation.benchmarks.systems_under_test import methods_under_test

    chosen = _baselines(baselines, assistant, baselines != "all" or reads_gguf(engine))
    return [
        *methods_under_test(engine, variants),
        *baselines_under_test(chosen, engine, assistant),
        *servers_under_test(endpoints, engine),
    ]


def _method_names(methods: str) -> list[str]:
    """The names, each once, plain first."""
    given = [name.strip() for name in methods.split(",") if name.strip()]
    return list(dict.fromkeys(["plain", *given]))


def _with_draft_model(option: Sequence[str], vary: Sequence[str], draft_model: str | None) -> list[str]:
    """The assignments of --option with that of --draft-model. Errors: ValueError if others name a draft model, too."""
    if draft_model is None:
        return list(option)
    named = f"small_model.model={draft_model}"
    for given, assignments in (("--option", option), ("--vary", vary)):
        for other in assignments:
            if other.startswith("small_model.model=") and other != named:
                raise ValueError(f"--draft-model is {draft_model}, but {given} says {other}; give one of them")
    return list(dict.fromkeys([*option, named]))


def _varied(vary: Sequence[str], spec: str) -> dict[str, list[str]]:
    """The assignments METHOD.FIELD=VALUE of each varied option, by METHOD.FIELD. Errors: ValueError of one line."""
    from saltus.cli.open_engine import parse_method_options

    varied: dict[str, list[str]] = {}
    for each in vary:
        place, _, values = each.partition("=")
        if not values:
            raise ValueError(f"--vary {each}: write METHOD.FIELD=VALUE,VALUE, such as lookup.max_ngram_size=3,5")
        varied.setdefault(place, []).extend(f"{place}={value}" for value in values.split(","))
    for assignments in varied.values():
        for assignment in assignments:
            parse_method_options([assignment], spec, "--vary", "--methods")
    return varied


def _variants(names: Sequence[str], spec: str, varied: Mapping[str, Sequence[str]], option: Sequence[str]) -> list[Any]:
    """Each method, once for each combination of the varied options that it has. Errors: ValueError of one line."""
    from saltus.cli.open_engine import parse_method_options
    from saltus.evaluation.benchmarks.systems_under_test import MethodVariant
    from saltus.methods import make_methods

    variants = []
    for name in names:
        parts = _joined([name], [*option, *(values[0] for values in varied.values())]).split("+")
        own = [values for place, values in varied.items() if place.partition(".")[0] in parts]
        for chosen in product(*own):
            options = parse_method_options([*option, *chosen], spec, named_by="--methods")
            make_methods(name, options)
            variants.append(MethodVariant(" ".join((name, *chosen)), name, options))
    return variants


def _joined(names: Sequence[str], assignments: Sequence[str] = ()) -> str:
    """One spec of all methods that the names may stand for where these options are given."""
    from saltus.cli.open_engine import name_draft_model
    from saltus.methods import method_names

    drafts = name_draft_model(assignments)
    return "+".join(dict.fromkeys(part for name in names for part in method_names(name, drafts)))


def _baselines(baselines: str | None, assistant: str | None, is_gguf: bool = True) -> list[str]:
    """The names that were given; `all`: those that are installed, and read files of the model's kind."""
    from saltus.evaluation.benchmarks.baselines import BASELINES
    from saltus.evaluation.benchmarks.llama_cpp_baseline import LLAMA_CPP, llama_cpp_is_installed

    if baselines == "all":
        lacking = {"transformers-assistant": not assistant, LLAMA_CPP: not (is_gguf and llama_cpp_is_installed())}
        return [name for name in BASELINES if not lacking.get(name)]
    return [name.strip() for name in (baselines or "").split(",") if name.strip()]
