"""Measure methods at the price of a larger model, while texts and drafts stay those of a small one.

    python benchmarks/larger_model.py --prompts spec_bench.jsonl --every 48 --methods lookup,ptp,ptp+lookup

Each call of the small model is followed by the same call of a model of a larger shape with random weights, whose
outputs are not used. So a call costs what the larger one costs, and the small one's on top; acceptance is the small
model's, whose drafter is cheap beside the larger model, as trained drafters are.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import time
from typing import Any

from prompt_options import add_prompt_options, first_turns, in_turn
from random_models import SHAPE_NAMES, SHAPES, random_model

import saltus
from saltus.core.control.call_cost import CallCost
from saltus.engine.calibration import measure_call_seconds
from saltus.loading.huge_pages import place_in_huge_pages
from saltus.models.causal import CausalNetwork


def add_price(network: Any, larger: CausalNetwork) -> None:
    """Let each call of a network be followed by the same call of the larger one."""
    forward, new_kv_cache = network.forward, network.new_kv_cache

    def new_pair() -> Any:
        kv_cache = new_kv_cache()
        kv_cache.of_larger = larger.new_kv_cache()
        return kv_cache

    def forward_both(batch: Any, kv_caches: Any) -> Any:
        started = time.perf_counter()
        outputs = forward(batch, kv_caches)
        plain = [dataclasses.replace(inputs, output_hidden_states=False) for inputs in batch]
        larger.forward(plain, [kv_cache.of_larger for kv_cache in kv_caches])
        seconds = time.perf_counter() - started
        return [dataclasses.replace(one, seconds=seconds) for one in outputs]

    network.forward, network.new_kv_cache = forward_both, new_pair


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_prompt_options(options)
    options.add_argument("--shape", choices=SHAPES, default="1.7B", help=SHAPE_NAMES)
    options.add_argument("--weights", choices=("bf16", "q4_1", "q8_0"), default="bf16", help="of the larger model")
    options.add_argument("--methods", default="lookup,ptp,ptp+lookup")
    options.add_argument("--temperature", type=float, default=0.0)
    options.add_argument("--max-new-tokens", type=int, default=64)
    options.add_argument(
        "--max-draft-tokens", type=int, metavar="N", help="verify N draft tokens a call, whether it pays or not"
    )
    args = options.parse_args()
    prompts = first_turns(options, args)
    tree = {} if args.max_draft_tokens is None else {"max_draft_tokens": args.max_draft_tokens, "adaptive": False}
    engine = saltus.load(args.model, "plain", tuned_settings=False, **tree)
    larger = random_model(args.shape, args.weights)
    place_in_huge_pages(larger)  # as `saltus.load` does
    add_price(engine.network, CausalNetwork(larger))
    engine.decoder.call_cost = CallCost(measure_call_seconds(engine.network))
    costs = engine.decoder.call_cost.seconds.items()
    print("ms a call by rows:", ", ".join(f"{rows}: {1000 * seconds:.0f}" for rows, seconds in costs))
    methods = ["plain", *args.methods.split(",")]
    seconds: dict[str, list[float]] = {method: [] for method in methods}
    decoding: dict[str, list[float]] = {method: [] for method in methods}
    calls, tokens, same = dict.fromkeys(methods, 0), 0, dict.fromkeys(methods, 0)
    for number, prompt in enumerate([prompts[0], *prompts]):  # the first once more, to warm up
        texts: dict[str, list[int]] = {}
        for method in in_turn(methods, number):
            engine.decoder.prefix_tree.clear()
            started = time.perf_counter()
            answer = engine.generate(
                prompt, method=method, max_new_tokens=args.max_new_tokens, temperature=args.temperature
            )
            spent = time.perf_counter() - started
            texts[method] = answer.tokens
            if number:
                seconds[method].append(spent)
                decoding[method].append(spent - answer.statistics.prefill_seconds)
                calls[method] += answer.statistics.calls
        for method in methods if number else ():
            same[method] += texts[method] == texts["plain"]
        tokens += len(texts["plain"]) * (number > 0)
    print(f"{len(prompts)} prompts, {tokens} tokens; speed-up over plain: median by prompt, in all, without prefill")
    for method in methods:
        ratios = [one / other for one, other in zip(seconds["plain"], seconds[method], strict=True)]
        print(
            f"{method:16} {tokens / sum(seconds[method]):6.1f} tokens/s  {statistics.median(ratios):.2f} × "
            f" {sum(seconds['plain']) / sum(seconds[method]):.2f} × "
            f" {sum(decoding['plain']) / sum(decoding[method]):.2f} ×  {tokens / calls[method]:.2f} tokens a call "
            f" {same[method]} of {len(prompts)} texts the same",
            flush=True,
        )


if __name__ == "__main__":
    main()
