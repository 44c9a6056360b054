"""Speed and acceptance: tokens a second of each side, and what `/metrics` says of drafts. Does the switch switch?"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence

from saltus.evaluation.audit.client import Reply, Request, Side, get_text
from saltus.evaluation.audit.context import Audit
from saltus.evaluation.audit.verdicts import FIGURE, FINDING, SAME, Verdict, not_checked

DRAFTED = ("spec_decode_num_draft_tokens", "draft_tokens", "tokens_drafted")
ACCEPTED = ("spec_decode_num_accepted_tokens", "accepted_tokens", "tokens_drafted_accepted")
GAUGES = {"sglang:spec_accept_length": "tokens a call", "sglang:spec_accept_rate": "accepted share"}


def run(audit: Audit) -> Iterator[Verdict]:
    """Tokens a second at one client and at many; drafts of each side."""
    requests = [Request(prompt, audit.settings.max_tokens) for prompt in audit.prompts]
    counts: list[tuple[int, int] | None] = []
    rates: dict[int, list[float]] = {1: [], audit.settings.clients: []}
    for side in audit.sides:
        before, replies = read_draft_counts(side), []
        for clients, found in rates.items():
            started = time.perf_counter()
            made = audit.answers(side, requests, clients)
            seconds = time.perf_counter() - started
            found.append(sum(reply.completion_tokens or 0 for reply in made) / seconds)
            replies += made
        counts.append(_drafts(before, read_draft_counts(side), replies))
    for clients, (on, off) in rates.items():
        ratio = f": {on / off:.2f} ×" if off else ""
        name = f"speed at {clients} client{'s' * (clients > 1)}"
        yield Verdict(name, FIGURE, f"{on:.1f} tokens/s with speculation, {off:.1f} without{ratio}")
    yield _acceptance(audit, counts[0])
    yield _switch(audit, counts)


def read_draft_counts(side: Side) -> tuple[int, int] | None:
    """Draft tokens and accepted ones since the start of the server, as far as `/metrics` has them."""
    text = get_text(side, "/metrics")
    if text is None:
        return None
    if text.lstrip().startswith("["):  # TensorRT-LLM: a list of iterations, which reading empties
        return _iteration_counts(text)
    totals: dict[str, float] = {}
    for line in text.splitlines():
        if line.startswith("#"):
            continue
        name, _, value = line.rpartition(" ")
        name = name.partition("{")[0].rpartition(":")[2].removesuffix("_total")
        if name in (*DRAFTED, *ACCEPTED):
            totals[name] = totals.get(name, 0.0) + float(value)
    found = [next((totals[name] for name in names if name in totals), None) for names in (DRAFTED, ACCEPTED)]
    return None if None in found else (int(found[0] or 0), int(found[1] or 0))


def _iteration_counts(text: str) -> tuple[int, int] | None:
    try:
        found = [one.get("specDecodingStats") or one.get("specDecStats") for one in json.loads(text)]
    except (ValueError, AttributeError):
        return None
    stats = [one for one in found if isinstance(one, dict)]
    if not stats:
        return None
    return sum(one.get("numDraftTokens", 0) for one in stats), sum(one.get("numAcceptedTokens", 0) for one in stats)


def _drafts(
    before: tuple[int, int] | None, after: tuple[int, int] | None, replies: Sequence[Reply]
) -> tuple[int, int] | None:
    """What was drafted meanwhile: from `/metrics`, or from the answers themselves (llama.cpp's timings)."""
    named = [reply.draft_counts for reply in replies if reply.draft_counts]
    if named:
        return sum(drafted for drafted, _ in named), sum(accepted for _, accepted in named)
    if before is None or after is None:
        return None
    return after[0] - before[0], after[1] - before[1]


def _acceptance(audit: Audit, counted: tuple[int, int] | None) -> Verdict:
    if counted is not None and counted[0]:
        drafted, accepted = counted
        return Verdict("acceptance", FIGURE, f"{accepted:,} of {drafted:,} draft tokens ({accepted / drafted:.0%})")
    for line in (get_text(audit.on, "/metrics") or "").splitlines():
        name, _, value = line.rpartition(" ")
        if (words := GAUGES.get(name.partition("{")[0])) is not None:
            return Verdict("acceptance", FIGURE, f"{words} {float(value):.2f}, as the server says")
    if counted is not None:
        return not_checked("acceptance", "nothing was drafted in these requests")
    return not_checked("acceptance", "neither /metrics nor answers name drafts")


def _switch(audit: Audit, counts: Sequence[tuple[int, int] | None]) -> Verdict:
    """A server may take an unknown field and ignore it: then both sides speculate, and nothing is compared."""
    name, (on, off) = "speculation is off where it should be", counts
    if on and on[0] and off is None and (audit.features.has("metrics") or audit.features.program == "llama.cpp"):
        off = 0, 0  # vLLM's metrics and llama.cpp's answers name drafts only where there are some
    if off is None or on is None:
        return not_checked(name, "the server does not say what it drafted; make sure that the sides differ")
    if off[0] > 0:
        return Verdict(name, FINDING, f"{off[0]:,} tokens were drafted without speculation: the switch does nothing")
    if on[0] == 0:
        return Verdict(name, FINDING, "nothing was drafted with speculation: both sides decode plainly")
    return Verdict(name, SAME, f"{on[0]:,} tokens were drafted with speculation, none without")
