"""What a request limits: stop strings and `max_tokens`; and what an answer says of it: counts and finish_reason."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from saltus.evaluation.audit.client import Reply, Request, Side, curl_line
from saltus.evaluation.audit.context import Audit
from saltus.evaluation.audit.verdicts import FINDING, SAME, Verdict, not_checked

LIMITS = (1, 2, 7, 16, 17)
REASONS = {"stop", "length", "tool_calls", "function_call", "content_filter"}


def run(audit: Audit) -> Iterator[Verdict]:
    """Stop strings, limits and counts, a line a side; then counts across sides."""
    counted: list[Sequence[Reply]] = []
    requests = [Request(prompt, limit) for prompt in audit.prompts for limit in LIMITS]
    for side in audit.sides:
        yield _stop_strings(audit, side)
        replies = audit.answers(side, requests, audit.settings.clients)
        yield _limits(side, requests, replies)
        counted.append(replies)
        yield _token_counts(audit, side)
    yield _counts_across(audit, requests, *counted)


def _stop_strings(audit: Audit, side: Side) -> Verdict:
    """Strings out of the middle of a side's own answers, so that they occur; some cross the border of words."""
    requests = [Request(prompt, audit.settings.max_tokens) for prompt in audit.prompts]
    streams, chosen = audit.features.has("streams"), []
    for number, (request, reply) in enumerate(
        zip(requests, audit.answers(side, requests, audit.settings.clients), strict=True)
    ):
        middle = len(reply.text) // 2
        stop = reply.text[middle : middle + 5 - number % 3].strip()
        if len(stop) >= 2:
            chosen.append((replace(request, stream=streams and number % 2 > 0, more={"stop": [stop]}), reply))
    name = f"stop strings {side.name}"
    if not chosen:
        return not_checked(name, "the texts are too short to stop")
    found = []
    stopped = audit.answers(side, [request for request, _ in chosen], audit.settings.clients)
    for (request, before), reply in zip(chosen, stopped, strict=True):
        stop = request.more["stop"][0]
        if stop in reply.text:
            found.append((request, f"{stop!r} is in the answer that it should end"))
        elif reply.finish_reason != "stop" and before.text.startswith(reply.text):
            found.append((request, f"finish_reason is {reply.finish_reason!r} after the stop string {stop!r}"))
    good = f"{len(chosen)} of {len(chosen)} answers end before their stop string"
    return _verdict(name, good, len(chosen), found, [side])


def _limits(side: Side, requests: Sequence[Request], replies: Sequence[Reply]) -> Verdict:
    found = []
    for request, reply in zip(requests, replies, strict=True):
        count = reply.completion_tokens
        if reply.finish_reason not in REASONS:
            found.append((request, f"finish_reason is {reply.finish_reason!r}"))
        if count is None:
            continue
        if count > request.max_tokens:
            found.append((request, f"{count} tokens for max_tokens {request.max_tokens}"))
        elif reply.finish_reason == "length" and count != request.max_tokens:
            found.append((request, f"finish_reason is length after {count} of {request.max_tokens} tokens"))
        prompt, total = reply.usage.get("prompt_tokens"), reply.usage.get("total_tokens")
        if prompt is not None and total is not None and prompt + count != total:
            found.append((request, f"total_tokens is {total}, not {prompt} + {count}"))
    name = f"max_tokens and usage {side.name}"
    return _verdict(name, f"{len(requests)} of {len(requests)} answers keep their limit", len(requests), found, [side])


def _token_counts(audit: Audit, side: Side) -> Verdict:
    """The count of `usage` against the tokens that have log-probabilities; the end token may be among them or not."""
    name = f"usage counts the tokens {side.name}"
    if not audit.features.has("logprobs"):
        return not_checked(name, f"logprobs: {audit.features.missing['logprobs']}")
    requests = [Request(prompt, limit, logprobs=True) for prompt in audit.prompts[:4] for limit in (5, 16)]
    found = []
    for request, reply in zip(requests, audit.answers(side, requests), strict=True):
        if reply.tokens is None or reply.completion_tokens is None:
            continue
        slack = 1 if reply.finish_reason == "stop" else 0
        if abs(len(reply.tokens) - reply.completion_tokens) > slack:
            words = f"completion_tokens is {reply.completion_tokens}, but logprobs have {len(reply.tokens)}"
            found.append((request, words))
        if reply.finish_reason == "stop" and len(reply.tokens) == request.max_tokens:
            found.append((request, f"finish_reason is stop at the limit of {request.max_tokens} tokens"))
    if len([words for _, words in found if words.startswith("finish")]) < len(requests) / 2:
        found = [one for one in found if not one[1].startswith("finish")]  # a text may end just there
    good = f"{len(requests)} of {len(requests)} answers have as many tokens as usage says"
    return _verdict(name, good, len(requests), found, [side])


def _counts_across(
    audit: Audit, requests: Sequence[Request], with_drafts: Sequence[Reply], without: Sequence[Reply]
) -> Verdict:
    """Equal texts of both sides must have equal counts and ends."""
    found, equal = [], 0
    for request, on, off in zip(requests, with_drafts, without, strict=True):
        if on.text != off.text:
            continue
        equal += 1
        for field in ("prompt_tokens", "completion_tokens"):
            if on.usage.get(field) != off.usage.get(field):
                words = f"{on.usage.get(field)} with speculation, {off.usage.get(field)} without"
                found.append((request, f"{field} of one text is {words}"))
        if on.finish_reason != off.finish_reason:
            words = f"{on.finish_reason} with speculation, {off.finish_reason} without"
            found.append((request, f"finish_reason of one text is {words}"))
    if not equal:
        return not_checked("counts of both sides", "no text is the same on both sides")
    good = f"equal texts ({equal}) have equal counts and ends"
    return _verdict("counts of both sides", good, equal, found, audit.sides)


def _verdict(name: str, good: str, total: int, found: Sequence[tuple[Request, str]], sides: Sequence[Side]) -> Verdict:
    if not found:
        return Verdict(name, SAME, good)
    words = [words for _, words in found]
    repeat = [curl_line(side, found[0][0]) for side in sides]
    faults = f"{len(found)} fault{'s' * (len(found) != 1)} in {total} answer{'s' * (total != 1)}: {words[0]}"
    return Verdict(name, FINDING, faults, examples=words[1:4], repeat=repeat)
