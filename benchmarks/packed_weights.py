"""Compare packed weights with the same weights expanded to bfloat16: calls by rows, and whole answers, in turns.

    python benchmarks/packed_weights.py --prompts spec_bench.jsonl --every 15

The texts must be the same. Exits with 1 if one differs.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time

import numpy as np
from prompt_options import add_prompt_options, first_turns, in_turn

import saltus
from saltus.core.canvas import continuation
from saltus.core.forward import ForwardInputs

WEIGHTS = ("bf16", "file")


def call_milliseconds(engine: saltus.Engine, rows: int, length: int, vocabulary: int) -> float:
    """One call of a chain of `rows` − 1 nodes after a text of `length` tokens, read before."""
    text = np.arange(length) * 7919 % vocabulary
    nodes = tuple(range(rows - 1))
    inputs = ForwardInputs(continuation(text, rows + 1), nodes, tuple(node - 1 for node in nodes))
    kv_cache = engine.network.new_kv_cache()
    engine.network.forward([ForwardInputs(continuation(text, rows + 1))], [kv_cache])
    started = time.perf_counter()
    engine.network.forward([inputs], [kv_cache])
    return 1000 * (time.perf_counter() - started)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_prompt_options(options)
    options.add_argument("--methods", default="plain,lookup")
    options.add_argument("--max-new-tokens", type=int, default=128)
    options.add_argument("--length", type=int, default=200, help="tokens before the timed calls")
    options.add_argument("--repeats", type=int, default=15)
    args = options.parse_args()
    prompts = first_turns(options, args)
    engines = {name: saltus.load(args.model, "plain", weights=name, tuned_settings=False) for name in WEIGHTS}
    vocabulary = len(engines["file"].tokenizer)
    print(f"ms a call after {args.length} tokens, medians of {args.repeats} in turns: bf16, packed, ratio")
    for rows in (1, 2, 4, 8, 16, 32, 64):
        times: dict[str, list[float]] = {name: [] for name in WEIGHTS}
        for number in range(args.repeats):
            for name, engine in in_turn(engines.items(), number):
                times[name].append(call_milliseconds(engine, rows, args.length, vocabulary))
        expanded, packed = (statistics.median(times[name]) for name in WEIGHTS)
        print(f"{rows:3} rows  {expanded:6.1f}  {packed:6.1f}  {expanded / packed:.2f}", flush=True)

    differing = 0
    print(f"tokens a second on {len(prompts)} prompts, prefill included, in turns: bf16, packed, ratio, same texts")
    for method in args.methods.split(","):
        seconds, tokens, same = dict.fromkeys(WEIGHTS, 0.0), 0, 0
        for number, prompt in enumerate([prompts[0], *prompts]):  # the first once more, to warm up
            texts = {}
            for name, engine in in_turn(engines.items(), number):
                engine.decoder.prefix_tree.clear()
                started = time.perf_counter()
                answer = engine.generate(prompt, method=method, max_new_tokens=args.max_new_tokens)
                seconds[name] += (time.perf_counter() - started) * (number > 0)
                texts[name] = answer.tokens
            expanded_text, packed_text = (texts[name] for name in WEIGHTS)
            tokens += len(expanded_text) * (number > 0)
            same += (expanded_text == packed_text) * (number > 0)
        expanded, packed = (tokens / seconds[name] for name in WEIGHTS)
        differing += len(prompts) - same
        print(
            f"{method:12}  {expanded:6.1f}  {packed:6.1f}  {packed / expanded:.2f}  {same} of {len(prompts)}",
            flush=True,
        )
    sys.exit(differing > 0)


if __name__ == "__main__":
    main()
