"""Does the device write what the CPU would? Its tokens by the CPU's logits, its texts, and its tokens a call.

`exactness` compares calls of one device with each other, so a fault that all of them share does not show there. Here
each token that the device wrote must be the CPU's choice as well, or nearly: with the same noise, some other token may
be better by the CPU's logits by no more than --tolerance. Drafts that are worse on the device show in tokens a call.
"""

from __future__ import annotations

import argparse
import itertools
from functools import partial
from typing import Any

import numpy as np

from gpu.loaded_models import kept, load_engine, read_prompts
from gpu.part_results import Part
from gpu.table_lines import markdown_table
from saltus.core.canvas import continuation
from saltus.core.forward import ForwardInputs
from saltus.core.noise import Noise
from saltus.core.sampling import Sampling, token_distribution

SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 0.7},
    "truncated": {"temperature": 0.7, "top_k": 50, "top_p": 0.95},
}
SEED = 1
SHOWN = 300  # characters of the text that is kept to be read

REHEARSAL = {"methods": "plain", "samplings": "greedy,sampled", "tokens": 4, "take": 2}


def add_options(parser: argparse.ArgumentParser) -> None:
    methods = "plain,lookup,token_recycling,ptp,ptp+lookup,mtpc"
    parser.set_defaults(models="smollm2-135m,smollm2-135m@file", methods=methods)
    parser.add_argument("--samplings", default=",".join(SAMPLINGS), help="truncated: top-k 50 and top-p 0.95")
    parser.add_argument("--tokens", type=int, default=48, help="of each text")
    parser.add_argument("--take", type=int, default=8, help="texts")
    parser.add_argument("--tolerance", type=float, default=1.0, help="of logits, which bfloat16 rounds differently")


def parts(args: argparse.Namespace) -> list[Part]:
    found = []
    for model, sampling, method in itertools.product(args.models, args.samplings, args.methods):
        facts = {"model": model, "sampling": sampling, "method": method}
        found.append(Part(facts, partial(compare, args, model, sampling, method)))
    return found


def compare(args: argparse.Namespace, model: str, sampling: str, method: str) -> dict[str, Any]:
    """Let both devices write, and judge each token of the one by the other's logits."""
    engines = kept(("agreement", model), lambda: _load_both(args, model))
    settings = {**SAMPLINGS[sampling], "max_new_tokens": args.tokens, "seed": SEED}
    prompts = read_prompts(args.prompts, args.take)[: args.take]
    written = [engine.generate(prompts, method=method, **settings) for engine in engines]
    distribution = Sampling(**SAMPLINGS[sampling])
    gaps = np.concatenate([token_gaps(engines[1], one, distribution, args.tolerance) for one in written[0]])
    calls = [sum(one.statistics.tokens for one in side) / sum(one.statistics.calls for one in side) for side in written]
    return {
        "tokens": len(gaps), "different": int((gaps > args.tolerance).sum()), "worst_gap": float(gaps.max()),
        "choices": int((gaps <= 0).sum()), "tokens_per_call": calls[0], "tokens_per_call_cpu": calls[1],
        "text": written[0][0].text[:SHOWN],
    }  # fmt: skip


def _load_both(args: argparse.Namespace, model: str) -> tuple[Any, Any]:
    """The model on the device and on the CPU; whole trees, so that both draft alike whatever calls cost."""
    on_cpu = argparse.Namespace(**vars(args) | {"device": "cpu"})
    dtype = _dtype(args.device)
    exact = {"arithmetic": "bf16"} if "@" in model else {}  # packed weights are the very ones of a GPU then
    return load_engine(args, model, dtype, adaptive=False), load_engine(on_cpu, model, dtype, adaptive=False, **exact)


def _dtype(device: str) -> str:
    return "bfloat16" if device.startswith("cuda") else "float32"


def token_gaps(engine: Any, generation: Any, sampling: Sampling, tolerance: float) -> np.ndarray:
    """[tokens] by how much the engine's logits prefer another token than the one written; 0 where they do not.

    In units of logits: with temperature the winner has the greatest logit + temperature · Gumbel noise. Which tokens
    truncation keeps may differ by those within the tolerance of the least one that it keeps.
    """
    tokens = np.array(generation.tokens)
    canvas = continuation(engine.encode(generation.prompt), len(tokens))
    chain = ForwardInputs(canvas, tuple(tokens[:-1].tolist()), tuple(range(-1, len(tokens) - 2)))
    logits = engine.network.forward([chain], [engine.network.new_kv_cache()])[0].logits.float()
    gaps = []
    for row, token, position in zip(logits, tokens, canvas.open_positions, strict=True):
        values, rivals, left_out = row.numpy().astype(np.float64), np.arange(len(row)), 0.0
        if sampling.truncates and (kept_tokens := token_distribution(row, sampling).tokens) is not None:
            least = values[kept_tokens].min()
            rivals, left_out = kept_tokens[values[kept_tokens] >= least + tolerance], least - values[token]
        if not sampling.greedy:
            noise = Noise(SEED).of_tokens("text", position, len(values)).exponentials(np.arange(len(values)))
            values -= sampling.temperature * np.log(noise)
        gaps.append(max(values[rivals].max(initial=-np.inf) - values[token], left_out, 0.0))
    return np.array(gaps)


def tables(results: list[dict[str, Any]]) -> list[str]:
    """Tokens that the CPU would not have written, how many are its very choice, and tokens a call of both."""
    cells = [
        [
            result["model"], result["sampling"], result["method"], f"{result['different']} of {result['tokens']:,}",
            f"{100 * result['choices'] / result['tokens']:.1f} %", f"{result['worst_gap']:.2f}",
            f"{result['tokens_per_call']:.2f}", f"{result['tokens_per_call_cpu']:.2f}",
        ]
        for result in results
    ]  # fmt: skip
    heads = ["model", "sampling", "method", "tokens beyond the tolerance", "the CPU's choice", "greatest gap",
             "tokens a call", "on the CPU"]  # fmt: skip
    texts = [f"- {result['model']}, {result['sampling']}, {result['method']}: {result['text']!r}" for result in results]
    return [*markdown_table(heads, cells), "", *texts] if cells else []
