"""What ASSD brings on texts with holes: calls, time and quality beside sequential decoding, and two wrong ways.

    python experiments/infilling.py --text tales.csv --out infilling [--model stories] [--judge smollm2-135m]

`--text` is a table (.csv) with columns document_id and text, a sentence a row, that the model was not trained on; five
sentences in a row are a story. Four tasks: the middle sentence is missing, the middle three are (holes that the model
ends itself), or 95 % of the tokens are, anywhere; and so in `--long` texts of 512 tokens, the paper's task. Every text
is filled by all ways in turn, forwards and backwards.
Under `match` all exact ways must fill the same, or the run ends; so quality is told once more for the rule `reject`,
where texts differ and only the law is the same (ASSD, Table 1). Perplexity is the judge's, entropy that of a text's
tokens, both with standard errors, ROUGE is F1 of what fills the holes. With `--own` the model itself says its nats of
a hole's tokens, those included that follow from a blank and have none: a sharper test. That takes time of its own.

The wrong ways: *one step* draws every hole from its own law in one call; *no residual* (the procedure of σ-GPT) draws
from the whole law after a rejection. Neither is a method of Saltus. *no cache* is plain decoding that reads all anew;
*without correction* drafts do not know the tokens to their left. A causal model (`--causal`), for whole sentences,
continues the left side by as many sentences as are missing.
"""

import argparse
import csv
import json
import math
import re
import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from rouge_score.rouge_scorer import RougeScorer

import saltus
from saltus.core import rules
from saltus.core.canvas import HOLE, Canvas, infilling
from saltus.core.distributions import TargetDistributions
from saltus.core.forward import ForwardInputs
from saltus.core.noise import Noise
from saltus.core.picking import sample
from saltus.core.sampling import Sampling
from saltus.engine.infill_template import InfillLayout, InfillTemplate, tokenize_template
from saltus.engine.request import Request
from saltus.engine.scheduler import run_requests
from saltus.evaluation.benchmarks.loglikelihood import score_continuations
from saltus.evaluation.reports.environment import git_commit, machine_info
from saltus.methods.shared.query_chains import with_query_chains

PLAIN, NO_RESIDUAL = "plain", "no residual"
SENTENCE = 48  # tokens of a hole for each sentence that is missing, whatever its length
LONG = 512
ROUGE = ("rouge1", "rouge2", "rougeL")
LEFT_TO_RIGHT = "left to right"
WITHOUT_CORRECTION = "one call without correction"
BY_DEFAULT = "assd by default"
SENTENCE_END = re.compile(r"[.!?][\"'”’]*(?=\s|$)")


@dataclass(frozen=True)
class Task:
    """A text with holes, and what stood there; where sentences are missing, those before them and how many."""

    layout: InfillLayout
    missing: str
    before: str = ""
    sentences: int = 0


@dataclass
class Forgetful:
    """A network that keeps nothing between calls."""

    network: Any

    def new_kv_cache(self) -> Any:
        return None

    def forward(self, batch: Sequence[ForwardInputs], kv_caches: Sequence[Any]) -> list[Any]:
        return self.network.forward(batch, [self.network.new_kv_cache() for _ in batch])


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
    blind = engine.network.blank_token is None  # it cannot end a hole, and is told the length of the original
    length = len(engine.tokenizer(gone, add_special_tokens=False).input_ids) if blind else None
    before, after = " ".join(story[: missing.start]) + " ", " " + " ".join(story[missing.stop :])
    template = InfillTemplate((before, after), (length,))
    count = missing.stop - missing.start
    return Task(
        tokenize_template(template, engine.tokenizer, max_open_tokens=SENTENCE * count),
        gone,
        " ".join(story[: missing.start]),
        count,
    )


def long_texts(file: Path, count: int) -> list[list[str]]:
    """The beginnings of so many documents."""
    told: dict[str, list[str]] = {}
    with file.open(newline="", encoding="utf-8") as source:
        for row in csv.DictReader(source):
            told.setdefault(row["document_id"], []).append(" ".join(row["text"].split()))
    return sorted(told.values(), key=lambda rows: -sum(map(len, rows)))[:count]


def anywhere(story: Sequence[str], seed: int, engine: saltus.Engine, most: int | None = None) -> Task:
    """Of the story, or of its first `most` tokens, 95 % are missing."""
    words = engine.tokenizer
    told = words(" ".join(story), add_special_tokens=False).input_ids
    tokens = np.array([words.bos_token_id, *told, words.eos_token_id])[:most]
    holes = np.random.default_rng(seed).permutation(np.arange(1, len(tokens) - 1))[: round(0.95 * (len(tokens) - 2))]
    missing = decoded(tokens[np.sort(holes)].tolist(), words)
    tokens[holes] = HOLE
    return Task(InfillLayout(infilling(tokens), (), ("",)), missing)


def filled(
    engine: saltus.Engine,
    method: str,
    canvas: Canvas,
    seed: int,
    distribution: Sampling,
    correct: bool = True,
    own: bool = False,
) -> Request:
    wrong = mock.patch(
        "saltus.methods.assd.drafter.reject", no_residual
    )  # drafts as under reject, decided by another rule
    job = Request(
        canvas.tokens[canvas.given_positions].tolist(),
        len(canvas.order),
        seed,
        distribution,
        logprobs=own,
        canvas=canvas,
    )
    without = mock.patch.object(engine.network, "pairwise_correction", None)
    with wrong if engine.decoder.rule == NO_RESIDUAL else nullcontext(), nullcontext() if correct else without:
        for _ in run_requests(engine.decoder, [job], method, batch_size=1):
            pass
    return job


def continued(engine: saltus.Engine, task: Task, seed: int, temperature: float) -> str:
    """What a causal model writes after the left side: as many sentences as are missing."""
    max_new_tokens = SENTENCE * task.sentences
    text = engine.generate(
        task.before, max_new_tokens=max_new_tokens, temperature=temperature, seed=seed, raw=True
    ).text
    ends = [found.end() for found in SENTENCE_END.finditer(text)]
    return text[: ends[task.sentences - 1]] if len(ends) >= task.sentences else text


def one_step(engine: saltus.Engine, canvas: Canvas, seed: int, distribution: Sampling) -> list[int]:
    """Every hole for itself."""
    network, count = engine.network, len(canvas.order)
    inputs = with_query_chains(ForwardInputs(canvas), [(-1, [math.nan] * count)], distribution.temperature)
    distributions = TargetDistributions(
        inputs, network.forward([inputs], [network.new_kv_cache()])[0], distribution, Noise(seed)
    )
    uniforms = Noise(seed).uniforms("text", canvas.order).tolist()
    tokens = [sample(u, distributions[query]) for u, query in zip(uniforms, inputs.query_chain(-1), strict=True)]
    end = next((i for i, token in enumerate(tokens) if distribution.num_padding_after(i, token)), count)
    return tokens[:end] + [engine.network.blank_token] * (count - end)


def no_residual(inputs: ForwardInputs, distributions: TargetDistributions) -> tuple[np.ndarray, int]:
    tokens, node = rules.reject(inputs, distributions)
    tokens[-1] = distributions.pick(node)
    return tokens, node


def decoded(tokens: Sequence[int], words: Any) -> str:
    return words.decode(list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False)


class Judge:
    """What a causal model thinks of whole texts."""

    def __init__(self, name: str) -> None:
        self.engine = saltus.load(name, PLAIN, tuned_settings=False)

    def nats(self, text: str) -> float:
        """Of a token, on average."""
        tokens = self.engine.tokenizer(text, add_special_tokens=False).input_ids
        found = score_continuations(self.engine.network, [(tokens[:1], tokens[1:])])[0]
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
    parser.add_argument("--causal", help="a causal model, to compare sentences with")
    parser.add_argument("--texts", type=int, default=30)
    parser.add_argument("--long", type=int, default=4, help="texts of 512 tokens")
    parser.add_argument("--lengths", type=int, nargs="+", default=[5, 15], help="holes drafted, at most")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--by-default", action="store_true", help="only plain and assd as by saltus infill")
    parser.add_argument("--own", action="store_true", help="the model's own nats of what it fills in, and no times")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    engine = saltus.load(given.model, PLAIN, tuned_settings=False)
    judge = None if given.judge == "none" else Judge(given.judge)
    special = tuple(sorted(token for token, kind in engine.tokenizer.added_tokens_decoder.items() if kind.special))
    stories = windows(given.text, given.texts)
    tasks = {
        "1 of 5": [sentences(story, slice(2, 3), engine) for story in stories],
        "3 of 5": [sentences(story, slice(1, 4), engine) for story in stories],
        "95 %": [anywhere(story, seed, engine) for seed, story in enumerate(stories)],
        "512 tokens": [
            anywhere(rows, seed, engine, LONG) for seed, rows in enumerate(long_texts(given.text, given.long))
        ],
    }
    causal = saltus.load(given.causal, PLAIN, tuned_settings=False) if given.causal else None
    rules.RULES[NO_RESIDUAL] = no_residual
    ways: dict[str, saltus.Engine] = {PLAIN: engine}
    if given.by_default:
        ways[BY_DEFAULT] = engine.copy_with()
    else:
        ways["no cache"] = engine.copy_with()
    for length in () if given.by_default else given.lengths:
        for name, options in (
            (f"Algorithm 1, k = {length}", {"num_draft_tokens": length, "two_calls": True}),
            (f"one call, k = {length}", {"num_draft_tokens": length}),
            (f"{WITHOUT_CORRECTION}, k = {length}", {"num_draft_tokens": length}),
            (f"Algorithm 2 (bigram), k = {length}", {"num_draft_tokens": length, "draft": "bigram"}),
        ):
            own = engine.copy_with(options={"assd": options}, max_draft_tokens=length, adaptive=False)
            ways[name] = own
    table: list[dict[str, Any]] = []
    scorer = RougeScorer(list(ROUGE), use_stemmer=True)
    for task, texts in tasks.items():
        if not texts:
            continue
        blank = engine.network.blank_token if texts[0].sentences else None
        distribution = Sampling(
            given.temperature,
            banned=tuple(token for token in special if token != blank),
            hole_end_tokens=() if blank is None else ((blank, 0, len(texts[0].layout.canvas.order) - 1),),
        )
        for rule in ("match",) if given.by_default else ("match", "reject"):
            found: dict[str, list[dict[str, Any]]] = {}
            engines = {name: way.copy_with(rule=rule) for name, way in ways.items()}
            if "no cache" in engines:
                engines["no cache"].decoder.setup(PLAIN).networks = {"target": Forgetful(engine.network)}
            if rule == "reject":
                del engines["no cache"]
                last = f"one call, k = {given.lengths[-1]}"
                engines[NO_RESIDUAL] = ways[last].copy_with(rule=NO_RESIDUAL)
            for name in engines:  # warm-up
                filled(
                    engines[name],
                    PLAIN if name in (PLAIN, "no cache") else "assd",
                    texts[0].layout.canvas,
                    0,
                    distribution,
                )
            for seed, one in enumerate(texts):
                canvas, said = one.layout.canvas, None
                for name in list(engines) if seed % 2 == 0 else list(engines)[::-1]:
                    method = PLAIN if name in (PLAIN, "no cache") else "assd"
                    began = time.perf_counter()
                    correct = not name.startswith(WITHOUT_CORRECTION)
                    job = filled(engines[name], method, canvas, seed, distribution, correct, given.own)
                    taken = time.perf_counter() - began
                    said = job.tokens if said is None else said
                    if rule == "match" and job.tokens != said:
                        sys.exit(f"{name} filled text {seed} of {task} with other tokens than another way")
                    found.setdefault(name, []).append(
                        {
                            "tokens": job.tokens,
                            "said": sum(len(call.tokens) - call.num_padding_tokens for call in job.calls),
                            "calls": job.calls_by_network["target"],
                            "seconds": 0.0 if given.own else taken,
                            "own": -float(np.mean(job.log_probabilities)) if given.own else 0.0,
                        }
                    )
                if rule == "reject":
                    found.setdefault("one step", []).append(
                        {"tokens": one_step(engine, canvas, seed, distribution), "said": 0, "calls": 1, "seconds": 0.0}
                    )
            for name, rows in found.items():
                tokens, calls = (sum(row[key] for row in rows) for key in ("said", "calls"))
                plain = found[PLAIN]
                ratios = [  # of the time for a token, since under reject holes end where they will
                    a["seconds"] / a["said"] * b["said"] / b["seconds"]
                    for a, b in zip(plain, rows, strict=True)
                    if b["seconds"]
                ]
                told = {
                    "task": task, "rule": rule, "way": name, "texts": len(rows), "tokens": tokens, "calls": calls,
                    "tokens_per_call": round(tokens / calls, 3), "seconds": round(sum(r["seconds"] for r in rows), 2),
                    "speedup": round(float(np.median(ratios)), 3) if ratios else None,
                }  # fmt: skip
                if given.own and name != "one step":
                    told["own_nats"] = mean([row["own"] for row in rows])
                if name == PLAIN or rule == "reject":
                    told |= quality(engine, judge, scorer, texts, rows)
                table.append(told)
                print(json.dumps(told), flush=True)
        if causal is not None and texts[0].sentences:
            said = [continued(causal, one, seed, given.temperature) for seed, one in enumerate(texts)]
            table.append({"task": task, "way": LEFT_TO_RIGHT, "texts": len(texts), **rouge(scorer, texts, said)})
            print(json.dumps(table[-1]), flush=True)
    given.out.mkdir(parents=True, exist_ok=True)
    papers = {"machine": machine_info(), "commit": git_commit(), "command": sys.argv}
    (given.out / "infilling.json").write_text(json.dumps({"table": table, **papers}, indent=1) + "\n")


def quality(
    engine: saltus.Engine, judge: Judge | None, scorer: RougeScorer, tasks: Sequence[Task], rows: Sequence[dict]
) -> dict[str, str]:
    """Of the texts that a way filled."""
    nats, entropies = [], []
    for task, row in zip(tasks, rows, strict=True):
        canvas = task.layout.canvas
        tokens = canvas.fill(np.array(row["tokens"], dtype=np.int64)).tokens.tolist()
        with torch.inference_mode():
            nats += [judge.nats(decoded(tokens, engine.tokenizer))] if judge else []
        entropies.append(entropy([token for token in tokens if token not in engine.tokenizer.added_tokens_decoder]))
    told = {"nats": mean(nats)} if judge else {}
    told["entropy"] = mean(entropies)
    return told | rouge(scorer, tasks, [decoded(row["tokens"], engine.tokenizer) for row in rows])


def rouge(scorer: RougeScorer, tasks: Sequence[Task], said: Sequence[str]) -> dict[str, str]:
    """Of what fills the holes."""
    found = [scorer.score(task.missing, text) for task, text in zip(tasks, said, strict=True)]
    return {name: mean([one[name].fmeasure for one in found]) for name in ROUGE}


if __name__ == "__main__":
    main()
