"""Graded suites: are answers right as often with speculation as without?"""

from __future__ import annotations

from collections.abc import Iterator

from saltus.evaluation.audit.client import Request
from saltus.evaluation.audit.context import Audit, GradedSuite
from saltus.evaluation.audit.statistics import mcnemar, paired_difference
from saltus.evaluation.audit.verdicts import NOTE, SAME, Verdict
from saltus.evaluation.benchmarks.graders import main_score
from saltus.evaluation.benchmarks.suites import Task

TOKENS = 512


def run(audit: Audit) -> Iterator[Verdict]:
    """A line a suite: the paired difference, and McNemar's exact test of it."""
    for suite in audit.suites:
        yield _graded(audit, suite)


def _graded(audit: Audit, suite: GradedSuite) -> Verdict:
    tasks, grader = suite.tasks, suite.grader

    def request(task: Task) -> Request:
        raw = not audit.on.chat and task.raw is not None
        prompt = str(task.raw) if raw else task.prompt.turns[0]
        return Request(prompt, TOKENS, more={"stop": list(task.stop)} if raw and task.stop else {})

    right = []
    for side in audit.sides:
        replies = audit.answers(side, [request(task) for task in tasks], audit.settings.clients)
        scores = (grader.score(task.reference, reply.text) for task, reply in zip(tasks, replies, strict=True))
        right.append([main_score(score) >= 1 for score in scores])
    on, off = right
    only_off = sum(b and not a for a, b in zip(on, off, strict=True))
    only_on = sum(a and not b for a, b in zip(on, off, strict=True))
    difference = paired_difference(only_off, only_on, len(on))
    p_value = mcnemar(only_on, only_off)
    words = (
        f"{grader.metric_name} {sum(on)} of {len(on)} with speculation, {sum(off)} without: difference"
        f" {100 * difference.difference:+.1f} points [{100 * difference.low:+.1f}, {100 * difference.high:+.1f}],"
        f" p = {p_value:.2g}"
    )
    figures = {"right_with": sum(on), "right_without": sum(off), "only_with": only_on, "only_without": only_off}
    return Verdict(f"suite {suite.name}", SAME if only_on == only_off == 0 else NOTE, words, p_value, words, figures)
