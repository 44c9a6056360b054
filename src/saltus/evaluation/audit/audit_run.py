"""Run all checks on two sides, and judge them together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import saltus
from saltus.evaluation.audit.checks import CHECKS
from saltus.evaluation.audit.client import Side
from saltus.evaluation.audit.context import Audit
from saltus.evaluation.audit.verdicts import FINDING, NOT_CHECKED, NOTE, SAME, Verdict, judge
from saltus.evaluation.reports.command_line import command_line


def run_checks(
    audit: Audit, names: Sequence[str] = tuple(CHECKS), on_check: Callable[[str], Any] = lambda name: None
) -> list[Verdict]:
    """The verdicts of the named checks, judged together. Errors: EndpointError if a server goes away."""
    verdicts: list[Verdict] = []
    for name in names:
        on_check(name)
        verdicts += CHECKS[name](audit)
    return judge(verdicts)


def planned_tokens(prompts: int, max_tokens: int) -> int:
    """About how many tokens one side writes, without graded suites.

    Whole answers to each prompt, the short ones of `limits`, and 3,500 tokens of samples, structured output and probes.
    """
    whole = 12 + 4 + 2 + 3 + 2 + 2  # texts, seeds, logprobs, streams, stop strings, speed
    return prompts * (whole * max_tokens + 43) + 3500


def make_report(verdicts: Sequence[Verdict], facts: Mapping[str, Any]) -> dict[str, Any]:
    """What `--json` prints and pages show: a summary, the verdicts, and `facts` about the run."""
    findings = [verdict for verdict in verdicts if verdict.status == FINDING]
    return {
        "summary": summarize(verdicts),
        "findings": len(findings),
        "verdicts": [verdict.as_json() for verdict in verdicts],
        "command": command_line(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "saltus": saltus.__version__,
        **facts,
    }


def summarize(verdicts: Sequence[Verdict]) -> str:
    """The run in one sentence; measurements are no checks."""
    counted = Counter(verdict.status for verdict in verdicts)
    checked = counted[SAME] + counted[NOTE] + counted[FINDING]
    lacking = f"; {counted[NOT_CHECKED]} could not be checked" if counted[NOT_CHECKED] else ""
    if counted[FINDING]:
        return f"{counted[FINDING]} of {checked} checks found something{lacking}."
    alike = checked - counted[NOTE]
    explained = f"; in {counted[NOTE]}, one that repetition or rounding may explain" if counted[NOTE] else ""
    return f"No difference in {alike} check{'s' * (alike != 1)}{explained}{lacking}."


def describe_side(side: Side) -> dict[str, Any]:
    """A side for the report, without keys."""
    return {
        "name": side.name, "url": side.url, "model": side.model, "body": dict(side.body),
        "headers": sorted(side.headers), "route": "chat completions" if side.chat else "completions",
    }  # fmt: skip
