"""Count tokens a second of methods and of Transformers' generate, prefill included, in turns, prompt by prompt.

`default` is the default model (`--model`). At another shape each call of it is followed by the same call of a model of
that shape with random weights, as in benchmarks/larger_model.py: texts and drafts are the small model's, a call costs
what both cost. Transformers' `generate` runs the random model alone. "generate" launches its kernels one by one,
"generate compiled" has a static cache and torch.compile, which takes a minute or more: at the first shape alone. All
write as many tokens.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from larger_model import add_price
from random_models import random_model

from gpu.loaded_models import kept, load_engine, load_network, read_prompts, wait
from gpu.part_results import Part
from gpu.table_lines import markdown_table
from saltus.core.control.call_cost import CallCost
from saltus.engine.calibration import measure_call_seconds
from saltus.loading.load_model import load_model, silence_transformers
from saltus.loading.sources import resolve

OWN_SHAPE = "default"
COMPILED = "generate compiled"
GENERATE = {"generate": {}, COMPILED: {"cache_implementation": "static"}}
COMPILE_SECONDS = 150
BATCH_ROUNDS = 3

REHEARSAL = {
    "shapes": f"{OWN_SHAPE},tiny", "methods": "plain,lookup", "take": 2, "tokens": 4, "batches": "2",
    "temperatures": "0",
}  # fmt: skip

Write = Callable[[list[Any], float], dict[str, Any]]
"""Prompts and temperature → the seconds until all texts are written, and perhaps the calls that they took."""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(methods="plain,lookup,token_recycling+lookup,ptp+lookup,auto")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--shapes", default="default,1.7B,7B,8B", help="whose calls are paid for")
    parser.add_argument("--baselines", default=",".join(GENERATE), help="ways of Transformers' generate")
    parser.add_argument("--temperatures", default="0,0.7", help="baselines run at the first only")
    parser.add_argument("--tokens", type=int, default=128, help="of each text")
    parser.add_argument("--take", type=int, default=6, help="prompts")
    parser.add_argument("--batches", default="16", help="texts at once, greedy, besides one")


def parts(args: argparse.Namespace) -> list[Part]:
    found = []
    for shape in args.shapes:
        baselines = [one for one in args.baselines if one != COMPILED or shape == args.shapes[0]]
        systems = [*args.methods, *baselines]
        for system in systems:
            facts, job = {"what": "set up", "shape": shape, "system": system}, partial(set_up, args, shape, system)
            least = COMPILE_SECONDS if system == COMPILED else 0
            found.append(Part(facts, job, prepares={"what": "speed", "shape": shape}, least_seconds=least))
        rounds = [(temperature, 1, number) for temperature in args.temperatures for number in range(args.take)]
        rounds += [(0.0, texts, number) for texts in args.batches for number in range(BATCH_ROUNDS)]
        for temperature, texts, number in rounds:
            chosen = args.methods if temperature else systems
            if texts > 1:  # it would be compiled again for each batch
                chosen = [system for system in chosen if system != COMPILED]
            facts = {"what": "speed", "shape": shape, "temperature": temperature, "texts": texts, "round": number}
            found.append(Part(facts, partial(take_turns, args, chosen, shape, temperature, texts, number)))
    return found


def set_up(args: argparse.Namespace, shape: str, system: str) -> dict[str, Any]:
    """Load a system and let it write its longest prompt: graphs are captured, kernels compiled, calls timed."""
    ready = _systems(shape)
    write = generate_writer(args, shape, GENERATE[system]) if system in GENERATE else method_writer(args, shape, system)
    prompts = sorted(_prompts(args), key=lambda prompt: -len(_engine(args, shape).encode(prompt)))
    write(prompts[:1], 0.0)
    ready[system] = write
    return {}


def _systems(shape: str) -> dict[str, Any]:
    """What is loaded for a shape, by name; the last shape's is dropped."""
    return kept(("speed", shape), dict)


def _prompts(args: argparse.Namespace) -> list[Any]:
    return read_prompts(args.prompts, max(args.take, *args.batches))


def _engine(args: argparse.Namespace, shape: str) -> Any:
    """The engine of all methods at a shape, which pays for the larger model's calls."""
    ready = _systems(shape)
    if "engine" not in ready:
        engine = load_engine(args, args.model, batch_size=max(1, *args.batches))
        if shape != OWN_SHAPE:
            add_price(engine.network, load_network(args, shape))
        engine.decoder.call_cost = CallCost(measure_call_seconds(engine.network))
        ready["engine"] = engine
    return ready["engine"]


def method_writer(args: argparse.Namespace, shape: str, method: str) -> Write:
    engine = _engine(args, shape)

    def write(prompts: list[Any], temperature: float) -> dict[str, Any]:
        engine.decoder.prefix_tree.clear()
        settings = {"temperature": temperature, "seed": 1, "ignore_eos": True, "max_new_tokens": args.tokens}
        started = wait(args.device)
        made = engine.generate(prompts, method=method, **settings)
        seconds = wait(args.device) - started
        assert all(len(one.tokens) == args.tokens for one in made), "a text is shorter than the others"
        return {"seconds": seconds, "calls": sum(one.statistics.calls for one in made)}

    return write


def generate_writer(args: argparse.Namespace, shape: str, how: dict[str, Any]) -> Write:
    engine, ready = _engine(args, shape), _systems(shape)
    if "generate model" not in ready:
        with silence_transformers():
            if shape == OWN_SHAPE:
                model: Any = load_model(args.model, resolve(args.model), torch.bfloat16, weights="bf16").to(args.device)
            else:
                model = random_model(shape, device=args.device)
        model.set_attn_implementation("sdpa")
        ready["generate model"] = model.eval()
    model = ready["generate model"]

    def write(prompts: list[Any], temperature: float) -> dict[str, Any]:
        started = wait(args.device)
        tokens = [engine.encode(prompt) for prompt in prompts]
        width = max(map(len, tokens))
        ids = torch.tensor([[0] * (width - len(text)) + text for text in tokens], device=args.device)
        read = torch.tensor([[0] * (width - len(text)) + [1] * len(text) for text in tokens], device=args.device)
        sampling = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}
        limits = {"max_new_tokens": args.tokens, "min_new_tokens": args.tokens, "pad_token_id": 0}
        with silence_transformers():
            out = model.generate(ids, attention_mask=read, **limits, **sampling, **how)
        seconds = wait(args.device) - started
        assert out.shape[1] == width + args.tokens, "a text is shorter than the others"
        return {"seconds": seconds}

    return write


def take_turns(
    args: argparse.Namespace, systems: list[str], shape: str, temperature: float, texts: int, number: int
) -> dict[str, Any]:
    """Let all systems that are ready write the same prompts; which one begins changes from round to round."""
    ready, prompts = _systems(shape), _prompts(args)
    prompts = [prompts[(number + text) % len(prompts)] for text in range(texts)]
    chosen = [system for system in systems if system in ready]
    if not chosen:
        raise ValueError(f"no system is ready at {shape}")
    if texts > 1 and number == 0:  # graphs of more rows
        for system in chosen:
            ready[system](prompts, temperature)
    first = number % len(chosen)
    measured: dict[str, Any] = {}
    for system in [*chosen[first:], *chosen[:first]]:
        measured[system] = ready[system](prompts, temperature)
    return {"tokens": texts * args.tokens, "systems": measured}


def tables(results: list[dict[str, Any]]) -> list[str]:
    """Medians over rounds: tokens a second, times plain decoding, tokens of a text by call."""
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for result in results:
        if result["what"] == "speed":
            key = result["shape"], result["temperature"], result["texts"]
            groups.setdefault(key, []).append(result)
    cells = []
    for (shape, temperature, texts), rounds in groups.items():
        for system in dict.fromkeys(system for result in rounds for system in result["systems"]):
            own = [result for result in rounds if system in result["systems"]]
            rate = statistics.median(result["tokens"] / result["systems"][system]["seconds"] for result in own)
            ratios = [
                result["systems"]["plain"]["seconds"] / result["systems"][system]["seconds"]
                for result in own
                if "plain" in result["systems"]
            ]
            counted = [result for result in own if "calls" in result["systems"][system]]
            calls = sum(result["systems"][system]["calls"] for result in counted)
            written = sum(result["tokens"] for result in counted)
            cells.append([
                shape, f"{temperature:g}", texts, system, f"{rate:,.1f}",
                f"{statistics.median(ratios):.2f}" if ratios else "–", f"{written / calls:.2f}" if calls else "–",
                len(own),
            ])  # fmt: skip
    heads = ["model", "T", "texts", "method", "tokens/s", "times plain", "tokens a call", "rounds"]
    return markdown_table(heads, cells) if cells else []
