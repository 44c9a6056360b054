"""Greedy texts of both sides: alone and at once, whole and streamed, with and without a shared prefix."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from saltus.evaluation.audit.client import Reply, Request, Token, curl_line
from saltus.evaluation.audit.context import Audit
from saltus.evaluation.audit.prompts import SHARED_PREFIX
from saltus.evaluation.audit.statistics import exchangeability_test
from saltus.evaluation.audit.text_comparison import (
    Comparison,
    References,
    differs_within,
    rounding_tolerance,
    token_differences,
)
from saltus.evaluation.audit.verdicts import NOTE, SAME, Verdict, not_checked

CONFIRMED_GROUPS = 3  # differences whose requests are sent anew
CONFIRMATIONS = 10  # times by each side: a lasting difference then has p = 4e-5, which Holm's correction of a run needs


@dataclass(frozen=True)
class Condition:
    """How requests are sent."""

    name: str
    at_once: bool = False
    stream: bool = False
    shared_prefix: bool = False


CONDITIONS = (
    Condition("alone"),
    Condition("alone, streamed", stream=True),
    Condition("at once", at_once=True),
    Condition("at once, streamed", at_once=True, stream=True),
    Condition("shared prefix", shared_prefix=True),
    Condition("shared prefix, at once, streamed", at_once=True, stream=True, shared_prefix=True),
)


def run(audit: Audit) -> Iterator[Verdict]:
    """One line for each condition; then each side against itself, streamed against whole, and at once against alone."""
    references = References(audit.off, audit.features.has("logprobs"))
    references.tolerance = measure_tolerance(audit)
    replies: dict[str, list[list[list[Reply]]]] = {}
    compared: list[Comparison] = []
    sent: dict[str, list[Request]] = {}
    for condition in CONDITIONS:
        if condition.stream and not audit.features.has("streams"):
            yield not_checked(f"texts {_name(condition, audit)}", audit.features.missing["streams"])
            continue
        requests = condition_requests(audit, condition)
        clients = audit.settings.clients if condition.at_once else 1
        made = audit.paired_answers(requests, audit.settings.repeats, clients)
        sent[condition.name], replies[condition.name] = requests, made
        comparison = Comparison(requests, [[*on, *off] for on, off in zip(*made, strict=True)], references)
        compared.append(comparison)
        yield _texts_verdict(audit, condition, comparison, references)
    yield _pooled_verdict(compared)
    for side_number, side in enumerate(audit.sides):
        for first, second in (("alone", "alone, streamed"), ("alone", "at once")):
            if second in replies:
                yield _same_side_verdict(
                    f"{second} against {first}, {side.name}", sent[first],
                    replies[first][side_number], replies[second][side_number], references,
                )  # fmt: skip
    yield from _repetition_verdict(audit, replies)


def condition_requests(audit: Audit, condition: Condition) -> list[Request]:
    """The requests of a condition."""
    prefix = SHARED_PREFIX if condition.shared_prefix else ""
    return [Request(prefix + prompt, audit.settings.max_tokens, stream=condition.stream) for prompt in audit.prompts]


def measure_tolerance(audit: Audit) -> float:
    """The gap that rounding may flip, from the noise of log-probabilities of the same tokens on both sides."""
    if not audit.features.has("logprobs"):
        return rounding_tolerance(())
    requests = [Request(prompt, audit.settings.max_tokens, logprobs=True) for prompt in audit.prompts[:4]]
    on, off, again = (audit.answers(side, requests) for side in (audit.on, audit.off, audit.off))
    noise = [
        value
        for one, other, third in zip(on, off, again, strict=True)
        for pair in ((one, other), (other, third))
        for value in token_differences(*map(_tokens, pair))
    ]
    return rounding_tolerance(noise)


def _tokens(reply: Reply) -> tuple[Token, ...]:
    return reply.tokens or ()


def _name(condition: Condition, audit: Audit) -> str:
    return condition.name.replace("at once", f"{audit.settings.clients} at once")


def _texts_verdict(audit: Audit, condition: Condition, comparison: Comparison, references: References) -> Verdict:
    name, total = f"texts {_name(condition, audit)}", len(comparison.groups)
    noise = [comparison.within(side) for side in (0, 1)]
    figures = {
        "texts": total, "parted": comparison.parted, "beyond_rounding": len(comparison.faults),
        "differ_from_themselves": {side.name: count for side, count in zip(audit.sides, noise, strict=True)},
        "near_tie_nats": references.tolerance if references.available else None,
    }  # fmt: skip
    if not comparison.parted:
        return Verdict(name, SAME, f"{total} of {total} texts are equal", comparison.p_value(), figures=figures)
    examples = comparison.examples(lambda number: f"prompt {number}")
    beyond, p_value = comparison.faults, comparison.p_value()
    if beyond:
        p_value = min(1.0, 2 * min(p_value, _confirm(audit, condition, comparison, references)))
    words = _noise_words(audit, noise, total)
    parted = f"{comparison.parted} of {total} texts differ between the sides"
    if not references.available:
        alarm = f"{parted}, more than repetition explains; without logprobs rounding and fault look alike; {words}"
        line = f"{parted}, not clearly more than noise; {words}"
    elif beyond:
        alarm = f"{parted}, {len(beyond)} of them where there was no near tie: not rounding; {words}"
        line = f"{parted}, not clearly more than noise; {words}"
    else:
        alarm, line = "", f"{parted}, each at a near tie (at most {references.tolerance:.2g} nats): rounding; {words}"
        p_value = 1.0
    repeat = [curl_line(side, comparison.example_request()) for side in audit.sides]
    return Verdict(name, NOTE, line, p_value, alarm or line, figures, examples, repeat)


def _pooled_verdict(compared: Sequence[Comparison]) -> Verdict:
    """All conditions in one test, which rare faults need."""
    groups = [group for comparison in compared for group in comparison.beyond_rounding]
    faults = sum(len(comparison.faults) for comparison in compared)
    own = [sum(differs_within(group, side) for group in groups) for side in (0, 1)]
    name, figures = "texts, all conditions", {"texts": len(groups), "beyond_rounding": faults}
    p_value = exchangeability_test(groups)
    if not faults:
        return Verdict(name, SAME, f"0 of {len(groups)} texts differ by more than rounding", p_value, "", figures)
    line = f"{faults} of {len(groups)} texts differ by more than rounding, not clearly more than noise"
    alarm = (
        f"{faults} of {len(groups)} texts differ by more than rounding; repeated by the same side,"
        f" {own[0]} differ with speculation and {own[1]} without"
    )
    return Verdict(name, NOTE, line, p_value, alarm, figures)


def _noise_words(audit: Audit, noise: Sequence[int], total: int) -> str:
    if not any(noise):
        return "each side repeats its texts"
    return "repeated, " + ", ".join(
        f"{count} of {total} differ {side.name}" for side, count in zip(audit.sides, noise, strict=True)
    )


def _confirm(audit: Audit, condition: Condition, comparison: Comparison, references: References) -> float:
    """The p-value of fresh answers to the requests whose texts differed, so that one lasting difference is enough."""
    chosen = [comparison.requests[number] for number, _ in comparison.faults[:CONFIRMED_GROUPS]]
    clients = audit.settings.clients if condition.at_once else 1
    made = audit.paired_answers(chosen, CONFIRMATIONS, clients)
    groups = [[*on, *off] for on, off in zip(*made, strict=True)]
    return exchangeability_test(Comparison(chosen, groups, references).beyond_rounding)


def _same_side_verdict(
    name: str, requests: Sequence[Request], first: list[list[Reply]], second: list[list[Reply]], references: References
) -> Verdict:
    """One side in two conditions that should not matter."""
    comparison = Comparison(requests, [[*one, *other] for one, other in zip(first, second, strict=True)], references)
    total, parted = len(comparison.groups), comparison.parted
    figures = {"texts": total, "parted": parted, "beyond_rounding": len(comparison.faults)}
    if not parted:
        return Verdict(name, SAME, f"{total} of {total} texts are equal", comparison.p_value(), figures=figures)
    how = "rounding" if references.available and not comparison.faults else "not clearly more than noise"
    line = f"{parted} of {total} texts differ: {how}"
    alarm = f"{parted} of {total} texts differ, more than repetition and rounding explain"
    examples = comparison.examples(lambda number: f"prompt {number}")
    return Verdict(name, NOTE, line, comparison.p_value(), alarm, figures, examples)


def _repetition_verdict(audit: Audit, replies: dict[str, list[list[list[Reply]]]]) -> Iterator[Verdict]:
    """How much of all this is noise."""
    counts = []
    for side in (0, 1):
        groups = [group for made in replies.values() for group in made[side]]
        counts.append((sum(len({reply.text for reply in group}) > 1 for group in groups), len(groups)))
    line = "; ".join(
        f"{side.name}: {odd} of {total} requests gave another text when repeated"
        for side, (odd, total) in zip(audit.sides, counts, strict=True)
    )
    status = NOTE if any(odd for odd, _ in counts) else SAME
    yield Verdict("each side against itself", status, line, figures={"requests": counts[0][1]})
