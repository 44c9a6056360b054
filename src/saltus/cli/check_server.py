"""`saltus check --server`: does speculation change what a server's users get?"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from saltus.cli.options import SERVER_PANEL, ServerKey, in_panel

DEFAULT_PROMPTS, DEFAULT_TASKS = 12, 50
GRADED_SUITES = ("gsm8k", "humaneval", "mbpp", "math")

Server = Annotated[
    str | None,
    in_panel(
        SERVER_PANEL,
        "--server",
        metavar="URL",
        help="Check this server of OpenAI's protocol, which speculates; --model names one of several models.",
    ),
]
Against = Annotated[
    str | None,
    in_panel(SERVER_PANEL, "--against", metavar="URL", help="The same model without speculation, at another address."),
]
Off = Annotated[
    str | None,
    in_panel(
        SERVER_PANEL,
        "--off",
        metavar="JSON",
        help="Fields of a request that switch speculation off in the same server.",
    ),
]
OffHeader = Annotated[
    list[str] | None,
    in_panel(
        SERVER_PANEL,
        "--off-header",
        metavar="NAME: VALUE",
        help="A header that switches speculation off; may be repeated.",
    ),
]
Suites = Annotated[
    list[str] | None,
    in_panel(
        SERVER_PANEL,
        "--suite",
        metavar="NAME[:WHERE]",
        help="Grade answers, too: gsm8k, humaneval, mbpp or math, from a file or a data set; may be repeated.",
    ),
]
Tasks = Annotated[
    int, in_panel(SERVER_PANEL, "--tasks", metavar="N", min=1, help="Tasks of each suite, evenly spread.")
]
Only = Annotated[
    list[str] | None,
    in_panel(
        SERVER_PANEL,
        "--only",
        metavar="CHECK",
        help="Make this check alone: texts, seeds, logprobs, streams, limits, 'structured output' or speed; may be"
        " repeated.",
    ),
]
Clients = Annotated[int, in_panel(SERVER_PANEL, "--clients", metavar="N", min=2, help="Requests at once, under load.")]


@dataclass(frozen=True)
class ServerOptions:
    """The sides of a comparison of servers, and how much is asked."""

    server: Server = None
    against: Against = None
    off: Off = None
    off_header: OffHeader = None
    api_key: ServerKey = ""
    only: Only = None
    suite: Suites = None
    tasks: Tasks = DEFAULT_TASKS
    clients: Clients = 16


def check_server(
    options: ServerOptions, model: str, prompts: Path | None, limit: int | None, max_tokens: int, seed: int
) -> dict[str, Any]:
    """The report on a server. Errors: ValueError of one line."""
    from saltus.cli.answers import print_note
    from saltus.cli.progress import progress_meter
    from saltus.evaluation.audit.audit_run import describe_side, make_report, run_checks
    from saltus.evaluation.audit.context import Audit, AuditSettings
    from saltus.evaluation.audit.features import describe_features, find_features

    names = _check_names(options.only or (), bool(options.suite))
    suites = [_graded_suite(name, options.tasks) for name in options.suite or ()]
    on, off = _sides(options, model)
    inputs = _prompts(prompts, limit)
    print_note(_duration(off, len(inputs), max_tokens) if not options.only else f"only {', '.join(names)}")
    with progress_meter(len(names) + 1, "checking") as update:
        state = {"done": -1, "answers": 0, "name": "what the server understands"}

        def show() -> None:
            update(max(state["done"], 0), f"{state['name']}, {state['answers']} answers")

        def next_check(name: str) -> None:
            state.update(done=state["done"] + 1, name=name)
            show()

        def count_answer() -> None:
            state["answers"] += 1
            show()

        next_check("what the server understands")
        features = find_features(off)
        settings = AuditSettings(max_tokens=max_tokens, clients=options.clients, seed=seed)
        audit = Audit(on, off, features, inputs, settings, suites, count_answer)
        verdicts = run_checks(audit, names, next_check)
    servers = {off.name: describe_features(features)}
    if on.url != off.url:
        servers[on.name] = describe_features(find_features(on))
    return make_report(
        verdicts,
        {
            "sides": [describe_side(side) for side in (on, off)],
            "servers": servers,
            "settings": {
                "prompts": len(inputs), "max_tokens": max_tokens, "repeats": settings.repeats,
                "clients": settings.clients, "seed": seed,
            },
        },
    )  # fmt: skip


def _check_names(only: Sequence[str], graded: bool) -> list[str]:
    """The checks to make. Errors: ValueError for a name that there is not."""
    from saltus.evaluation.audit.checks import CHECKS

    names = [name for name in CHECKS if name != "graded suites"]
    if unknown := next((name for name in only if name not in names), None):
        raise ValueError(f"--only {unknown}: take {', '.join(names)}")
    chosen = {*(only or names), *(["graded suites"] if graded else [])}
    return [name for name in CHECKS if name in chosen]


def _duration(side: Any, prompts: int, max_tokens: int) -> str:
    """About how long the checks take, by the speed of one answer."""
    from saltus.evaluation.audit.audit_run import planned_tokens
    from saltus.evaluation.audit.features import measure_rate

    rate, tokens = measure_rate(side), 2 * planned_tokens(prompts, max_tokens)
    return (
        f"about {math.ceil(tokens / rate / 60)} min: {tokens:,} tokens, and one answer is written at {rate:.0f}"
        " tokens a second; shorter with --limit N, -n N or --only CHECK"
    )


def _sides(options: ServerOptions, model: str) -> tuple[Any, Any]:
    from saltus.evaluation.audit.client import Side, server_address
    from saltus.evaluation.audit.features import connect

    assert options.server is not None
    switches = [name for name in ("against", "off", "off_header") if getattr(options, name)]
    if not switches:
        raise ValueError(
            "there is nothing to compare the server with; give --against URL, the same model without speculation, or"
            """ what switches speculation off in a request, for Saltus --off '{"speculative": false}'"""
        )
    added = {"body": _switch_body(options.off), "headers": _headers(options.off_header or ())}
    other = server_address(options.against or options.server)
    on = connect(Side("with speculation", server_address(options.server), model, options.api_key))
    off = replace(on, name="without", url=other, **added)
    if options.against:
        off = connect(replace(off, model=model))
    if on.chat != off.chat:
        raise ValueError("one side has chat completions for its model and the other not; compare equal set-ups")
    return on, off


def _graded_suite(spec: str, tasks: int) -> Any:
    from saltus.evaluation.audit.context import GradedSuite
    from saltus.evaluation.benchmarks.suites import find_grader, load_tasks, suite_label

    if spec.partition(":")[0] not in GRADED_SUITES:
        raise ValueError(
            f"--suite {spec}: take one of {', '.join(GRADED_SUITES)}, also with a file, such as gsm8k:FILE"
        )
    loaded = load_tasks(spec, tasks)
    grader = find_grader(spec, loaded)
    assert grader is not None
    return GradedSuite(suite_label(spec), loaded, grader)


def _switch_body(off: str | None) -> dict[str, Any]:
    if off is None:
        return {}
    try:
        body = json.loads(off)
    except ValueError:
        body = None
    if not isinstance(body, dict):
        raise ValueError(f"""--off {off}: give a JSON object, such as '{{"speculative": false}}'""")
    return body


def _headers(given: Sequence[str]) -> dict[str, str]:
    headers = {}
    for header in given:
        name, colon, value = header.partition(":")
        if not (colon and name.strip()):
            raise ValueError(f"--off-header {header}: write NAME: VALUE")
        headers[name.strip()] = value.strip()
    return headers


def _prompts(file: Path | None, limit: int | None) -> list[str]:
    """One question of each prompt of the file, or of our own prompts."""
    if file is None:
        from saltus.evaluation.audit.prompts import default_prompts

        return default_prompts(limit or DEFAULT_PROMPTS)
    from saltus.cli.answers import print_note
    from saltus.engine.prompts import read_prompts

    prompts = read_prompts((), file, limit)
    if conversations := sum(len(prompt.messages) + len(prompt.turns) > 1 for prompt in prompts):
        print_note(f"{conversations} of {len(prompts)} prompts are conversations, of which one message each is asked")
    return [prompt.preview for prompt in prompts]
