"""Define what a check says: one verdict a line, and when a statistical one becomes a finding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from saltus.evaluation.audit.statistics import holm

SAME, NOTE, FIGURE, NOT_CHECKED, FINDING = "ok", "note", "figure", "not checked", "finding"
FALSE_ALARM_RATE = 0.005  # of a whole run, by chance alone


@dataclass(frozen=True)
class Verdict:
    """One line of the report; it becomes a finding, in the words of `alarm`, if its p-value excludes noise."""

    check: str
    status: str
    line: str
    p_value: float | None = None
    alarm: str = ""
    figures: Mapping[str, Any] = field(default_factory=dict)
    examples: Sequence[str] = ()
    repeat: Sequence[str] = ()  # commands that send an example's request again

    def as_json(self) -> dict[str, Any]:
        """The fields that a report shows."""
        return {name: value for name, value in asdict(self).items() if name != "alarm"}


def not_checked(check: str, reason: str) -> Verdict:
    """A check that this server does not allow."""
    return Verdict(check, NOT_CHECKED, reason)


def judge(verdicts: Sequence[Verdict]) -> list[Verdict]:
    """Turn into findings the verdicts whose p-values survive Holm's correction over all of the run."""
    tested = [index for index, verdict in enumerate(verdicts) if verdict.p_value is not None]
    rejected = holm([verdicts[index].p_value or 0.0 for index in tested], FALSE_ALARM_RATE)
    judged = list(verdicts)
    for index, is_finding in zip(tested, rejected, strict=True):
        if is_finding:
            verdict = verdicts[index]
            judged[index] = replace(verdict, status=FINDING, line=verdict.alarm)
    return judged


def method_verdicts(result: Mapping[str, Any], prompts: Sequence[str]) -> list[Verdict]:
    """The verdicts on what `compare_with_plain` found of a method in Python, where every difference is a finding."""
    flips, total = result["flips"], result["prompts"]
    openings = [" ".join(prompt.split())[:50] for prompt in prompts]
    examples = [
        f"prompt {flip['prompt']} ({openings[int(flip['prompt'])]}), position {flip['position']},"
        f" logit gap {flip['logit_gap']:.4g}"
        for flip in flips
    ]
    same = f"same text in {result['identical']} of {total}"
    if not (flips or result["draft_tokens_verified"]):
        same += "; no call verified a draft token, so this shows nothing: take --no-adaptive, or longer texts"
    verdicts = [Verdict("texts", FINDING if flips else SAME, same, figures={"texts": total}, examples=examples)]
    if result["tokens_per_call"] is not None:
        verdicts.append(Verdict("tokens per call", FIGURE, f"{result['tokens_per_call']:.2f}"))
    if result["speedup"] is not None:
        verdicts.append(Verdict("speed-up", FIGURE, f"{result['speedup']:.2f} × (same run, prefill included)"))
    return verdicts
