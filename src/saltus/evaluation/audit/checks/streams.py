"""The form of streams: UTF-8, one text whole or in pieces, an end, and nothing after it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from saltus.evaluation.audit.client import REPLACEMENT, Reply, Request, Side, curl_line
from saltus.evaluation.audit.context import Audit
from saltus.evaluation.audit.verdicts import FINDING, SAME, Verdict, not_checked

CHARACTER_PROMPTS = (
    "Repeat this line three times: 🦘🐋 日本 naïve café, Ærøskøbing",
    "Write the names of five animals, each with its emoji.",
    "Translate into Japanese and Greek: The old lighthouse stands by the sea.",
    "Répétez trois fois : « Où est passé l'été ? »",
)


def run(audit: Audit) -> Iterator[Verdict]:
    """One line a side."""
    if not audit.features.has("streams"):
        yield not_checked("streams", audit.features.missing["streams"])
        return
    requests = [
        Request(prompt, audit.settings.max_tokens, stream=True) for prompt in (*CHARACTER_PROMPTS, *audit.prompts)
    ]
    whole = [Request(request.prompt, request.max_tokens) for request in requests]
    for side in audit.sides:
        streamed = [
            reply for clients in (1, audit.settings.clients) for reply in audit.answers(side, requests, clients)
        ]
        plain = audit.answers(side, whole, audit.settings.clients)
        found = [
            (requests[n % len(requests)], n >= len(requests), fault)
            for n, r in enumerate(streamed)
            for fault in _faults(r)
        ]
        if _broken(streamed) and not _broken(plain):
            words = f"{_broken(streamed)} streams bring half characters (U+FFFD), whole answers none"
            found.append((requests[0], False, words))
        yield _verdict(side, audit.settings.clients, len(streamed), found)


def _verdict(side: Side, clients: int, total: int, found: list[tuple[Request, bool, str]]) -> Verdict:
    """`found`: requests, whether they were sent beside others, and their faults."""
    name = f"streams {side.name}"
    if not found:
        return Verdict(name, SAME, f"{total} streams are UTF-8, and end once")
    words = "; ".join(f"{number} of {total}: {fault}" for fault, number in Counter(f for _, _, f in found).items())
    if all(at_once for _, at_once, _ in found):
        words += f" (only with {clients} requests at once)"
    examples = [f"{' '.join(request.prompt.split())[:40]}: {fault}" for request, _, fault in found[:3]]
    return Verdict(name, FINDING, words, examples=examples, repeat=[curl_line(side, found[0][0])])


def _faults(reply: Reply) -> Iterator[str]:
    yield from reply.form_faults
    if reply.finish_reason is None:
        yield "a stream has no finish_reason"


def _broken(replies: list[Reply]) -> int:
    """Answers with half characters, but for one at the very end, which a limit may cut."""
    return sum(REPLACEMENT in reply.text.rstrip(REPLACEMENT) for reply in replies)
