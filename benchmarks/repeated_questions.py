"""How much faster does a server answer questions that it was asked before, slightly edited, with `--ngram-cache`?

    python benchmarks/repeated_questions.py --prompts spec_bench.jsonl --every 15

Two servers of Saltus take turns, one with `--ngram-cache 64MB`: each is asked all questions, and then each question
with an edit, and asked the edited questions once more. The texts of both must be the same. Tokens a second of one
client, prefill included, and for the edited questions by how much of the answer stayed (difflib's ratio of its words).
"""

from __future__ import annotations

import argparse
import difflib
import statistics
from contextlib import ExitStack

import httpx
from prompt_options import add_prompt_options, first_turns, in_turn
from serve_load import ask, own_server

EDITS = (lambda text: f"{text} Thank you.", lambda text: f"Hello. {text}", lambda text: text.replace(".", " .", 1))
SERVERS = {"with": ("--ngram-cache", "64MB"), "without": ()}


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_prompt_options(options)
    options.add_argument("--method", default="auto")
    options.add_argument("--max-new-tokens", type=int, default=128)
    options.add_argument("--temperature", type=float, default=0.0)
    args = options.parse_args()
    prompts = [one for one in first_turns(options, args) if isinstance(one, str)]
    edited = [EDITS[number % len(EDITS)](prompt) for number, prompt in enumerate(prompts)]
    settings = {"max_tokens": args.max_new_tokens, "temperature": args.temperature, "seed": 0}
    with ExitStack() as stack, httpx.Client(timeout=600) as http:
        urls = {
            name: stack.enter_context(own_server(args.method, args.model, 4, more)) for name, more in SERVERS.items()
        }
        for url in urls.values():
            ask(http, url, args.model, "Who are you?", settings)  # to warm up
        rates: dict[tuple[str, str], list[float]] = {}
        answers: dict[str, list[str]] = {}
        for asked, questions in (("first", prompts), ("edited", edited), ("again", edited)):
            for number, question in enumerate(questions):
                texts = set()
                for name, url in in_turn(urls.items(), number):
                    text, tokens, _, last = ask(http, url, args.model, question, settings)
                    texts.add(text)
                    rates.setdefault((name, asked), []).append(tokens / last)
                if len(texts) > 1:
                    raise SystemExit(f"the servers wrote different texts to {question[:60]!r}")
                answers.setdefault(asked, []).append(texts.pop())
    print(f"{len(prompts)} questions, {args.max_new_tokens} tokens each at most, medians")
    stayed = list(map(share_kept, answers["first"], answers["edited"]))
    everything = [0.0] * len(prompts)
    for asked, shares, least, below in (
        ("first", everything, 0.0, 2.0), ("edited", everything, 0.0, 2.0), ("again", everything, 0.0, 2.0),
        ("edited", stayed, 0.75, 2.0), ("edited", stayed, 0.4, 0.75), ("edited", stayed, 0.0, 0.4),
    ):  # fmt: skip
        kept = [number for number, share in enumerate(shares) if least <= share < below]
        if not kept:
            continue
        own = {name: [rates[name, asked][number] for number in kept] for name in SERVERS}
        ratio = statistics.median(a / b for a, b in zip(own["with"], own["without"], strict=True))
        medians = {name: statistics.median(values) for name, values in own.items()}
        part = "" if shares is everything else f", {least:.0%} to {min(below, 1):.0%} of the answer stayed"
        print(
            f"{asked}{part} ({len(kept)}): {medians['with']:.1f} tokens/s with, {medians['without']:.1f} without,"
            f" {ratio:.2f}x"
        )


def share_kept(first: str, second: str) -> float:
    """How alike two answers are, from 0 to 1."""
    return difflib.SequenceMatcher(None, first.split(), second.split(), autojunk=False).ratio()


if __name__ == "__main__":
    main()
