"""How much faster are answers that follow a schema, or call a tool, when what the grammar forces is drafted?

    python benchmarks/structured.py --prompts spec_bench.jsonl --every 15 --out structured.json

Each prompt is answered under each schema, and by a required call of one of two tools: by plain decoding, by `auto`
without drafts of forced tokens, and with them, in turns. Prefill included; every text must be the same on all sides.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import saltus
from saltus.core import speculate
from saltus.core.constraint import constrained_branches
from saltus.engine.chat.tool_calls import tool_grammar
from saltus.engine.grammar import Grammar
from saltus.evaluation.reports.environment import git_commit, machine_info

TEXT = {"type": "string", "maxLength": 80}
SCHEMAS = {
    "summary": {
        "title": TEXT, "summary": {"type": "string", "maxLength": 160}, "language": {"enum": ["en", "de", "zh"]},
    },
    "ticket": {
        "category": {"enum": ["question", "task", "opinion"]},
        "priority": {"type": "integer", "minimum": 1, "maximum": 5},
        "keywords": {"type": "array", "items": {"type": "string", "maxLength": 20}, "minItems": 1, "maxItems": 4},
        "needs_reply": {"type": "boolean"},
    },
    "person": {
        "first_name": {"type": "string", "maxLength": 20}, "last_name": {"type": "string", "maxLength": 20},
        "date_of_birth": {"type": "string", "pattern": "^[0-9]{4}-[0-9]{2}-[0-9]{2}$"}, "occupation": TEXT,
    },
}  # fmt: skip
TOOLS = [
    {"type": "function", "function": {"name": name, "description": about, "parameters": parameters}}
    for name, about, parameters in (
        ("search_documents", "Search the documents of the user.", {"query": TEXT, "max_results": {"type": "integer"}}),
        (
            "send_message",
            "Write to a person.",
            {"name": TEXT, "message": TEXT, "urgent": {"type": "boolean"}},
        ),
    )
    for parameters in [{"type": "object", "properties": parameters, "required": [*parameters]}]
]
SIDES = ("plain", "unforced", "forced")


@contextmanager
def without_forced_tokens() -> Iterator[None]:
    """Branches are cut where the grammar forbids them, and no more."""

    def cut(branches, constraint, text):
        return [one for one in constrained_branches(branches, constraint, text) if one.source != "grammar"]

    speculate.constrained_branches = cut
    try:
        yield
    finally:
        speculate.constrained_branches = constrained_branches


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=Path, required=True, help="JSON lines with turns, of which the first counts")
    parser.add_argument("--every", type=int, default=15, help="use every N-th prompt")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--tokens", type=int, default=120, help="of an answer, at most")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    engine = saltus.load(options.model)
    lines = options.prompts.read_text().splitlines()[:: options.every]
    prompts = [json.loads(line)["turns"][0] for line in lines]
    kinds = {name: ({"type": "object", "properties": fields, "required": [*fields], "additionalProperties": False})
             for name, fields in SCHEMAS.items()}  # fmt: skip
    grammars = {name: Grammar.json_schema(schema) for name, schema in kinds.items()}
    grammars["call"] = tool_grammar(TOOLS, "required", False, engine.tokenizer)
    rows, different = [], 0
    for number, prompt in enumerate(prompts):
        for kind, grammar in grammars.items():
            asked = f"{prompt}\n\nAnswer in JSON: {', '.join(SCHEMAS[kind])}." if kind in SCHEMAS else prompt
            settings = {
                "grammar": grammar, "tools": TOOLS if kind == "call" else (), "max_new_tokens": options.tokens,
                "temperature": options.temperature, "seed": number,
            }  # fmt: skip
            messages, found = [{"role": "user", "content": asked}], {}
            first = (number + len(rows)) % len(SIDES)
            for side in (*SIDES[first:], *SIDES[:first]):
                engine.decoder.prefix_tree.clear()
                started = time.perf_counter()
                if side == "unforced":
                    with without_forced_tokens():
                        answer = engine.generate(messages, **settings)
                else:
                    answer = engine.generate(messages, method="plain" if side == "plain" else None, **settings)
                seconds = time.perf_counter() - started
                found[side] = answer.tokens
                rows.append({"prompt": number, "kind": kind, "side": side, "seconds": seconds,
                             "prefill": answer.statistics.prefill_seconds, "tokens": len(answer.tokens),
                             "calls": answer.statistics.calls})  # fmt: skip
            different += len({tuple(tokens) for tokens in found.values()}) > 1
    print(f"{'kind':10} {'tokens/call':>12} {'against plain':>14} {'unforced':>9} {'without prefill':>16}")
    for kind in (*grammars, "all"):
        own = {side: [row for row in rows if row["side"] == side and kind in (row["kind"], "all")] for side in SIDES}
        whole, later = (
            {side: [row["seconds"] - prefill * row["prefill"] for row in own[side]] for side in SIDES}
            for prefill in (0, 1)
        )
        ratio = {
            name: statistics.median(a / b for a, b in zip(times[side], times["forced"], strict=True))
            for name, times, side in (
                ("plain", whole, "plain"), ("unforced", whole, "unforced"), ("later", later, "unforced"),
            )
        }  # fmt: skip
        per_call = sum(row["tokens"] for row in own["forced"]) / sum(row["calls"] for row in own["forced"])
        print(f"{kind:10} {per_call:12.2f} {ratio['plain']:13.2f}x {ratio['unforced']:8.2f}x {ratio['later']:15.2f}x")
    print(f"texts that differ: {different} of {len(rows) // len(SIDES)}")
    about = {"command": sys.argv, "commit": git_commit(), "machine": machine_info(), "different": different}
    options.out.write_text(json.dumps({**about, "rows": rows}, indent=1))
    print(f"written: {options.out}")


if __name__ == "__main__":
    main()
