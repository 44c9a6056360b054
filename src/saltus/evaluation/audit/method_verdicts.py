"""Judge a method against plain decoding of the same model in Python, where every difference is a finding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from saltus.evaluation.audit.verdicts import FIGURE, FINDING, SAME, Verdict


def method_verdicts(result: Mapping[str, Any], prompts: Sequence[str]) -> list[Verdict]:
    """The verdicts on what `compare_with_plain` found."""
    flips, total = result["flips"], result["prompts"]
    examples = [
        f"prompt {flip['prompt']} ({_opening(prompts[int(flip['prompt'])])}), position {flip['position']},"
        f" logit gap {flip['logit_gap']:.4g}"
        for flip in flips
    ]
    same = f"same text in {result['identical']} of {total}"
    verdicts = [Verdict("texts", FINDING if flips else SAME, same, figures={"texts": total}, examples=examples)]
    if result["tokens_per_call"] is not None:
        verdicts.append(Verdict("tokens per call", FIGURE, f"{result['tokens_per_call']:.2f}"))
    if result["speedup"] is not None:
        verdicts.append(Verdict("speed-up", FIGURE, f"{result['speedup']:.2f} × (same run, prefill included)"))
    return verdicts


def _opening(prompt: str) -> str:
    return " ".join(prompt.split())[:50]
