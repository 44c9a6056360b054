"""What do heads bring? Tokens a call and a second, several heads and plain decoding in turns on the same prompts.

    python experiments/heads.py --prompts prompts.jsonl --heads ff cp btree --out heads.json

Every draft goes as far as the heads' window, so that circuits are compared and not the controller's choices; with
--adaptive it chooses. A step is a call and what comes *besides*, which is drafting above all. *Ceiling* is what a step
of all drafts would bring a second if each were right. Under `match` texts are checked to be those of plain decoding.
The prompt is read in the time that is counted; texts' seeds count from 0. Folders whose names differ in an ending such
as -s1 are the same heads trained with other seeds: the table that is printed in the end gives their mean and spread.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import saltus
from saltus.engine.prompts import read_prompts
from saltus.evaluation.reports.environment import git_commit, machine_info


def counted(engine: saltus.Engine, prompt: Any, expected: Sequence[int] | None, settings: dict[str, Any]) -> Any:
    """A text. Errors: SystemExit where it is not the expected one, under the rule `match`."""
    found = engine.generate(prompt, **settings)
    if expected is not None and engine.decoder.rule == "match" and found.tokens != expected:
        raise SystemExit(f"{engine.method} wrote another text than plain decoding for {prompt!r:.80}")
    return found


def summary(texts: Sequence[Any], window: int | None) -> dict[str, Any]:
    """Of one kind of heads at one temperature; `window` None: plain decoding."""
    calls = [call for text in texts for call in text.calls[1:]]  # the first reads the prompt
    tokens, seconds = sum(len(text.tokens) for text in texts), sum(text.statistics.seconds for text in texts)
    every = sum(text.statistics.calls for text in texts)
    drafting = (seconds - sum(call.seconds for text in texts for call in text.calls)) / every
    found = {
        "tokens_per_call": round(tokens / every, 3),
        "tokens_per_second": round(tokens / seconds, 2),
        "ms_per_call": round(1000 * statistics.median(call.seconds for call in calls), 2),
        "ms_besides": round(1000 * drafting, 2),
    }
    full = [call.seconds for call in calls if call.num_draft_tokens == window]
    if full:
        found["ceiling"] = round(((window or 0) + 1) / (statistics.median(full) + drafting), 1)
    return found


COLUMNS = ("tokens_per_call", "ms_per_call", "ms_besides", "tokens_per_second", "speed_up", "ceiling")


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Markdown: a row for each kind of heads, the mean over seeds and the standard deviation."""
    kinds: dict[tuple, list[dict[str, Any]]] = {}
    for row in rows:
        kinds.setdefault((row["temperature"], row["rule"], re.sub(r"-s\d+$", "", row["heads"])), []).append(row)
    names = ("temperature", "rule", "heads", "seeds", *(name.replace("_", " ") for name in COLUMNS))
    lines = ["| " + " | ".join(names) + " |", "|---" * len(names) + "|"]
    for key, found in kinds.items():
        cells = [f"{key[0]:g}", key[1], key[2], str(len(found))]
        for name in COLUMNS:
            values = [row[name] for row in found if name in row]
            spread = f" ± {statistics.stdev(values):.2f}" if len(values) > 1 else ""
            cells.append(f"{statistics.mean(values):.2f}{spread}" if values else "")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--limit", type=int, help="prompts")
    parser.add_argument("--heads", type=Path, nargs="+", required=True, help="folders of saltus train mtpc")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.7])
    parser.add_argument("--rules", nargs="+", default=["match"], help="match, reject")
    parser.add_argument("--min-probability", type=float, default=0.0, help="mtpc.min_probability")
    parser.add_argument("--adaptive", action="store_true")
    parser.add_argument("-n", "--max-new-tokens", type=int, default=96)
    parser.add_argument("--out", type=Path)
    chosen = parser.parse_args()
    plain = saltus.load(chosen.model, "plain")
    engines = {}
    for rule in chosen.rules:
        for folder in chosen.heads:
            options = {"mtpc": {"model": str(folder), "min_probability": chosen.min_probability, "top_k": 1}}  # a chain
            made = plain.copy_with(rule=rule, options=options, adaptive=chosen.adaptive)  # one model in memory
            engines[rule, folder.name] = replace(made, method="mtpc")
    prompts = [inputs.preview for inputs in read_prompts([], chosen.prompts, chosen.limit)]
    rows = []
    for temperature in chosen.temperatures:
        texts: dict[Any, list[Any]] = {("", "plain"): [], **{key: [] for key in engines}}
        for number, prompt in enumerate(prompts):
            given = {"max_new_tokens": chosen.max_new_tokens, "temperature": temperature, "seed": number}
            texts["", "plain"].append(counted(plain, prompt, None, given))
            for key, engine in engines.items():
                texts[key].append(counted(engine, prompt, texts["", "plain"][-1].tokens, given))
            print(f"\r{number + 1} of {len(prompts)} prompts at temperature {temperature:g}", end="", flush=True)
        print()
        base = summary(texts["", "plain"], None)["tokens_per_second"]
        for (rule, name), found in texts.items():
            window = max((call.num_draft_tokens for text in found for call in text.calls), default=0) or None
            row = {"temperature": temperature, "rule": rule, "heads": name, **summary(found, window)}
            rows.append(row | {"speed_up": round(row["tokens_per_second"] / base, 3)})
            print(json.dumps(rows[-1]), flush=True)
    print(table(rows))
    if chosen.out:
        told = {"machine": machine_info(), "commit": git_commit(), "prompts": len(prompts), "rows": rows}
        chosen.out.write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    main()
