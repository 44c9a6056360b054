"""How often do drafts agree with the text under each coupling? Tokens a call of methods, on the same prompts and seeds.

    python experiments/coupling.py --prompts prompts.jsonl --limit 8 --out coupling.json

A call verifies the whole tree (no controller), so the numbers do not depend on the machine's speed. Every text is
checked to be that of plain decoding. Texts differ from coupling to coupling: the spread over prompts is given. As draft
model (small_model) serves the target itself without some of its layers, since no smaller model with its vocabulary
comes with the package. ASSD fills the holes of short stories with the model `stories`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import saltus
from saltus.engine.prompts import read_prompts_file
from saltus.evaluation.reports.environment import git_commit, machine_info

COUPLINGS = ("probability", "token-order", "gumbel")
STORIES = (
    "Once upon a time there was a [[24]]. He lived in [[16]].",
    "Tom was sad because [[24]]. Then Tom was happy.",
    "The little girl [[32]] and went home.",
    "One day a dog found [[24]]. The dog [[16]].",
)


def without_layers(engine: saltus.Engine, left_out: Sequence[int], folder: Path) -> str:
    """Save the target without some of its layers; returns the folder."""
    from torch import nn

    model = engine.model
    kept = [layer for number, layer in enumerate(model.model.layers) if number not in left_out]
    model.model.layers = nn.ModuleList(kept)
    model.config.num_hidden_layers = len(kept)
    if getattr(model.config, "layer_types", None):
        model.config.layer_types = model.config.layer_types[: len(kept)]
    model.save_pretrained(folder)
    engine.tokenizer.save_pretrained(folder)
    return str(folder)


def continuations(
    engine: saltus.Engine, prompts: Sequence[Any], method: str, settings: dict[str, Any], plain: dict[str, list[int]]
) -> list[Any]:
    """A text for each prompt; the seed is the prompt's number. `plain` keeps the texts of plain decoding.

    Errors: SystemExit if such a text is another.
    """
    found = []
    for seed, prompt in enumerate(prompts):
        given = {**settings, "seed": seed}
        key = json.dumps([prompt, given])
        if key not in plain:
            plain[key] = engine.generate(prompt, method="plain", **given).tokens
        found.append(engine.generate(prompt, method=method, **given))
        if found[-1].tokens != plain[key]:
            raise SystemExit(f"{method} wrote another text than plain decoding for {prompt!r:.80}")
    return found


def fillings(engine: saltus.Engine, settings: dict[str, Any]) -> list[Any]:
    """The stories, each with four seeds. Errors: SystemExit if plain decoding fills them otherwise."""
    found = []
    for story in STORIES:
        for seed in range(4):
            text = engine.infill(story, seed=seed, **settings)
            if text.tokens != engine.infill(story, seed=seed, method="plain", **settings).tokens:
                raise SystemExit(f"assd filled a story otherwise than plain decoding: {story!r}")
            found.append(text)
    return found


def summary(texts: Sequence[Any]) -> dict[str, float]:
    """Tokens a call over all texts, and the standard error over texts."""
    per_text = [text.statistics.tokens / text.statistics.calls for text in texts]
    calls = sum(text.statistics.calls for text in texts)
    return {
        "tokens_per_call": sum(text.statistics.tokens for text in texts) / calls,
        "standard_error": statistics.stdev(per_text) / len(per_text) ** 0.5,
    }


def measure(arguments: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """A row for each method, temperature and coupling."""
    tasks = read_prompts_file(arguments.prompts)
    count = min(arguments.limit, len(tasks))
    chosen = [tasks[number * len(tasks) // count] for number in range(count)]
    prompts = [one.turns[0] if one.turns else list(one.messages) for one in chosen]
    whole = {"adaptive": False, "max_draft_tokens": arguments.max_draft_tokens, "tuned_settings": False}
    draft_model = without_layers(
        saltus.load(arguments.model, weights="bf16", **whole), arguments.without_layers, folder
    )
    engine = saltus.load(arguments.model, "plain", **whole, options={"small_model": {"model": draft_model}})
    stories = saltus.load("stories", "assd", **whole)
    rows: list[dict[str, Any]] = []
    plain: dict[str, list[int]] = {}
    for method in arguments.methods:
        for temperature in arguments.temperatures:
            for coupling in arguments.couplings:
                settings = {"temperature": temperature, "coupling": coupling}
                texts = (
                    fillings(stories, settings)
                    if method == "assd"
                    else continuations(
                        engine, prompts, method, {**settings, "max_new_tokens": arguments.max_new_tokens}, plain
                    )
                )
                rows.append({"method": method, **settings, **summary(texts)})
                print(json.dumps(rows[-1]), flush=True)
    return rows


def table(rows: Sequence[dict[str, Any]], couplings: Sequence[str]) -> str:
    """Markdown: a row for each method and temperature, a column for each coupling."""
    lines = [f"| method | T | {' | '.join(couplings)} |", "|---|" + "---:|" * (1 + len(couplings))]
    found = {(row["method"], row["temperature"], row["coupling"]): row for row in rows}
    for method, temperature in dict.fromkeys((row["method"], row["temperature"]) for row in rows):
        cells = [found[method, temperature, one] for one in couplings]
        shown = [f"{cell['tokens_per_call']:.2f} ± {cell['standard_error']:.2f}" for cell in cells]
        lines.append(f"| `{method}` | {temperature:g} | {' | '.join(shown)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--limit", type=int, default=8, help="prompts, evenly spread over the file")
    parser.add_argument("--methods", nargs="+", default=["small_model", "mtpc", "ptp", "jacobi", "assd"])
    parser.add_argument("--couplings", nargs="+", default=list(COUPLINGS))
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.7, 1.0])
    parser.add_argument("--without-layers", type=int, nargs="+", default=[20], help="left out of the draft model")
    parser.add_argument("--max-draft-tokens", type=int, default=16)
    parser.add_argument("--max-new-tokens", type=int, default=48)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = measure(arguments, Path(folder))
    print(table(rows, arguments.couplings))
    if arguments.out:
        made = {"commit": git_commit(), "machine": machine_info(), "arguments": vars(arguments), "rows": rows}
        arguments.out.write_text(json.dumps(made, indent=1, default=str) + "\n")


if __name__ == "__main__":
    main()
