"""What ASSD brings on texts with holes: calls, time and quality beside sequential decoding, and two wrong ways.

    python benchmarks/infilling.py --text tales.csv --out infilling [--model stories] [--judge smollm2-135m]

`--text` is a table (.csv) with columns document_id and text, a sentence a row, that the model was not trained on; five
sentences in a row are a story. Three tasks: the middle sentence is missing, the middle three are (holes that the model
ends itself), or 95 % of the tokens are, anywhere. Every text is filled by all ways in turn, forwards and backwards.
Under `match` all exact ways must fill the same, or the run ends; so quality is told once more for the rule `reject`,
where texts differ and only the law is the same (ASSD, Table 1). Perplexity is the judge's, entropy that of a text's
tokens, both with standard errors, ROUGE is F1 of what fills the holes.

The wrong ways: *one step* draws every hole from its own law in one call; *no residual* (the procedure of σ-GPT) draws
from the whole law after a rejection. Neither is a method of Saltus. *no cache* is plain decoding that reads all anew.
"""

import argparse
import csv
import json
import math
import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from rouge_score.rouge_scorer import RougeScorer

import saltus
from saltus.core import rules
from saltus.core.auxiliary_groups import with_groups
from saltus.core.canvas import HOLE, Canvas, infilling
from saltus.core.forward import Forward, Laws
from saltus.core.noise import Noise
from saltus.core.sampling import Sampling, pick
from saltus.evaluation.likelihood import score
from saltus.evaluation.machine import commit, machine
from saltus.holes import Layout, Template, laid_out
from saltus.writing import Text, write

PLAIN, NO_RESIDUAL = "plain", "no residual"
SENTENCE = 48  # tokens of a hole for each sentence that is missing, whatever its length
ROUGE = ("rouge1", "rouge2", "rougeL")


@dataclass(frozen=True)
class Task:
    """A text with holes, and what stood there."""

    layout: Layout
    missing: str


@dataclass
class Forgetful:
    """A network that keeps nothing between calls."""

    network: Any

    def memory(self) -> Any:
        return None

    def forward(self, asks: Sequence[Forward], memories: Sequence[Any]) -> list[Any]:
        return self.network.forward(asks, [self.network.memory() for _ in asks])


def windows(file: Path, count: int) -> list[list[str]]:
    """Five sentences in a row, evenly spread over the documents."""
    told: dict[str, list[str]] = {}
    with file.open(newline="", encoding="utf-8") as source:
        for row in csv.DictReader(source):
            told.setdefault(row["document_id"], []).append(" ".join(row["text"].split()))
    found = [rows[i : i + 5] for rows in told.values() for i in range(0, len(rows) - 4, 5)]
    count = min(count, len(found))
    return [found[i * len(found) // count] for i in range(count)]


def sentences(story: Sequence[str], missing: slice, engine: saltus.Engine) -> Task:
    gone = " ".join(story[missing])
    template = Template((" ".join(story[: missing.start]) + " ", " " + " ".join(story[missing.stop :])), (None,))
    return Task(laid_out(template, engine.tokenizer, most=SENTENCE * (missing.stop - missing.start)), gone)


def anywhere(story: Sequence[str], seed: int, engine: saltus.Engine) -> Task:
    words = engine.tokenizer
    tokens = np.array([words.bos_token_id, *words(" ".join(story)).input_ids, words.eos_token_id])
    holes = np.random.default_rng(seed).permutation(np.arange(1, len(tokens) - 1))[: round(0.95 * (len(tokens) - 2))]
    missing = decoded(tokens[np.sort(holes)].tolist(), words)
    tokens[holes] = HOLE
    return Task(Layout(infilling(tokens), (), ("",)), missing)


def filled(engine: saltus.Engine, method: str, canvas: Canvas, seed: int, law: Sampling) -> Text:
    wrong = mock.patch("saltus.methods.assd.reject", no_residual)  # drafts as under reject, decided by another rule
    job = Text(canvas.tokens[canvas.given].tolist(), len(canvas.order), seed, law, holes=canvas)
    with wrong if engine.rule == NO_RESIDUAL else nullcontext():
        for _ in write(engine._ensemble(method), [job], 1):
            pass
    return job


def one_step(engine: saltus.Engine, canvas: Canvas, seed: int, law: Sampling) -> list[int]:
    """Every hole for itself."""
    network, count = engine.network, len(canvas.order)
    asked = with_groups(Forward(canvas), [(-1, [math.nan] * count)], law.temperature)
    laws = Laws(asked, network.forward([asked], [network.memory()])[0], law, Noise(seed))
    uniforms = Noise(seed).at("text", canvas.order).tolist()
    return [pick(u, laws[query]) for u, query in zip(uniforms, asked.group(-1), strict=True)]


def no_residual(asked: Forward, laws: Laws) -> tuple[np.ndarray, int]:
    tokens, node = rules.reject(asked, laws)
    tokens[-1] = laws.pick(node)
    return tokens, node


def decoded(tokens: Sequence[int], words: Any) -> str:
    return words.decode(list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False)


class Judge:
    """What a causal model thinks of whole texts."""

    def __init__(self, name: str) -> None:
        self.engine = saltus.load(name, PLAIN, profile=False)

    def nats(self, text: str) -> float:
        """Of a token, on average."""
        tokens = self.engine.tokenizer(text, add_special_tokens=False).input_ids
        found = score(self.engine.network, [(tokens[:1], tokens[1:])])[0]
        return -found.log_likelihood / max(len(tokens) - 1, 1)


def entropy(tokens: Sequence[int]) -> float:
    """Of a text's tokens, bits."""
    counts = np.array(list(Counter(tokens).values()), dtype=np.float64)
    shares = counts / counts.sum()
    return float(-(shares * np.log2(shares)).sum())


def mean(values: Sequence[float]) -> str:
    """With its standard error."""
    error = np.std(values, ddof=1) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return f"{np.mean(values):.3f} ± {error:.3f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="stories")
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--judge", default="smollm2-135m", help="a causal model; none leaves perplexity out")
    parser.add_argument("--texts", type=int, default=30)
    parser.add_argument("--lengths", type=int, nargs="+", default=[5, 15], help="holes drafted, at most")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    engine = saltus.load(given.model, PLAIN, profile=False)
    judge = None if given.judge == "none" else Judge(given.judge)
    special = tuple(sorted(token for token, kind in engine.tokenizer.added_tokens_decoder.items() if kind.special))
    stories = windows(given.text, given.texts)
    tasks = {
        "1 of 5": [sentences(story, slice(2, 3), engine) for story in stories],
        "3 of 5": [sentences(story, slice(1, 4), engine) for story in stories],
        "95 %": [anywhere(story, seed, engine) for seed, story in enumerate(stories)],
    }
    rules.RULES[NO_RESIDUAL] = no_residual
    ways: dict[str, saltus.Engine] = {PLAIN: engine, "no cache": replace(engine, ensembles={})}
    for length in given.lengths:
        for name, options in (
            (f"Algorithm 1, k = {length}", {"length": length, "two_calls": True}),
            (f"one call, k = {length}", {"length": length}),
            (f"Algorithm 2 (bigram), k = {length}", {"length": length, "draft": "bigram"}),
        ):
            own = replace(engine, options={"assd": options}, budget=length, adaptive=False, ensembles={})
            ways[name] = own
    table: list[dict[str, Any]] = []
    scorer = RougeScorer(list(ROUGE), use_stemmer=True)
    for task, texts in tasks.items():
        law = Sampling(
            given.temperature,
            banned=tuple(token for token in special if task == "95 %" or token != engine.network.blank),
        )
        for rule in ("match", "reject"):
            found: dict[str, list[dict[str, Any]]] = {}
            engines = {name: replace(way, rule=rule, ensembles={}) for name, way in ways.items()}
            engines["no cache"]._ensemble(PLAIN).networks = {"target": Forgetful(engine.network)}
            if rule == "reject":
                del engines["no cache"]
                last = f"one call, k = {given.lengths[-1]}"
                engines[NO_RESIDUAL] = replace(ways[last], rule=NO_RESIDUAL, ensembles={})
            for name in engines:  # warm-up
                filled(engines[name], PLAIN if name in (PLAIN, "no cache") else "assd", texts[0].layout.canvas, 0, law)
            for seed, one in enumerate(texts):
                canvas, said = one.layout.canvas, None
                for name in list(engines) if seed % 2 == 0 else list(engines)[::-1]:
                    method = PLAIN if name in (PLAIN, "no cache") else "assd"
                    began = time.perf_counter()
                    job = filled(engines[name], method, canvas, seed, law)
                    taken = time.perf_counter() - began
                    said = job.tokens if said is None else said
                    if rule == "match" and job.tokens != said:
                        sys.exit(f"{name} filled text {seed} of {task} with other tokens than another way")
                    found.setdefault(name, []).append(
                        {"tokens": job.tokens, "calls": job.asked["target"], "seconds": taken}
                    )
                if rule == "reject":
                    found.setdefault("one step", []).append(
                        {"tokens": one_step(engine, canvas, seed, law), "calls": 1, "seconds": 0.0}
                    )
            for name, rows in found.items():
                tokens, calls = sum(len(row["tokens"]) for row in rows), sum(row["calls"] for row in rows)
                plain = found[PLAIN]
                ratios = [a["seconds"] / b["seconds"] for a, b in zip(plain, rows, strict=True) if b["seconds"]]
                told = {
                    "task": task, "rule": rule, "way": name, "texts": len(rows), "tokens": tokens, "calls": calls,
                    "tokens_per_call": round(tokens / calls, 3), "seconds": round(sum(r["seconds"] for r in rows), 2),
                    "speedup": round(float(np.median(ratios)), 3) if ratios else None,
                }  # fmt: skip
                if name == PLAIN or rule == "reject":
                    told |= quality(engine, judge, scorer, texts, rows)
                table.append(told)
                print(json.dumps(told), flush=True)
    given.out.mkdir(parents=True, exist_ok=True)
    papers = {"machine": machine(), "commit": commit(), "command": sys.argv}
    (given.out / "infilling.json").write_text(json.dumps({"table": table, **papers}, indent=1) + "\n")


def quality(
    engine: saltus.Engine, judge: Judge | None, scorer: RougeScorer, tasks: Sequence[Task], rows: Sequence[dict]
) -> dict[str, str]:
    """Of the texts that a way filled."""
    nats, entropies, rouges = [], [], []
    for task, row in zip(tasks, rows, strict=True):
        canvas = task.layout.canvas
        tokens = canvas.fill(np.array(row["tokens"], dtype=np.int64)).tokens.tolist()
        with torch.inference_mode():
            nats += [judge.nats(decoded(tokens, engine.tokenizer))] if judge else []
        entropies.append(entropy([token for token in tokens if token not in engine.tokenizer.added_tokens_decoder]))
        found = scorer.score(task.missing, decoded(row["tokens"], engine.tokenizer))
        rouges.append([found[name].fmeasure for name in ROUGE])
    told = {"nats": mean(nats)} if judge else {}
    told["entropy"] = mean(entropies)
    return told | {name: mean([row[i] for row in rouges]) for i, name in enumerate(ROUGE)}


if __name__ == "__main__":
    main()
