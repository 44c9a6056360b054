"""Count texts equal to those of plain decoding, over methods, temperatures and kinds of arithmetic.

    python benchmarks/exactness.py --prompts spec_bench.jsonl --every 12 --drafter path/to/a/smaller/model

Plain decoding answers each prompt alone, with expanded weights where products are in bfloat16; every method answers all
prompts as a batch with a fixed number of draft tokens, so that trees are large and calls are shared. Kinds: `int8`, the
default for packed weights; `bf16`, packed weights multiplied in bfloat16; `float32`. Exits with 1 if any text differs.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

from prompt_options import add_prompt_options, first_turns

import saltus


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_prompt_options(options)
    options.add_argument("--drafter", help="a smaller model with the same vocabulary: small_model joins")
    options.add_argument("--methods", default="plain,lookup,token_recycling,jacobi,jacobi+lookup,ptp,ptp+lookup,mtpc")
    options.add_argument("--kinds", default="int8,bf16,float32")
    options.add_argument("--max-new-tokens", type=int, default=64)
    args = options.parse_args()
    prompts = first_turns(options, args)
    methods = args.methods.split(",")
    methods += ["small_model", "small_model+lookup"] if args.drafter else []
    drafter = {"small_model": {"model": args.drafter}} if args.drafter else {}
    differing = 0
    for kind in args.kinds.split(","):
        how: dict[str, Any] = {"dtype": "float32"} if kind == "float32" else {"dtype": "bfloat16", "arithmetic": kind}
        engine = saltus.load(args.model, method="plain", adaptive=False, max_draft_tokens=8, options=drafter, **how)
        baseline = (
            saltus.load(args.model, method="plain", weights="bf16", dtype="bfloat16") if kind == "bf16" else engine
        )
        for temperature in (0.0, 0.8):
            settings = {"max_new_tokens": args.max_new_tokens, "temperature": temperature, "seed": 1}
            alone = [baseline.generate(prompt, **settings).tokens for prompt in prompts]
            for method in methods:
                engine.decoder.prefix_tree.clear()
                written = engine.generate(prompts, method=method, **settings)
                same = sum(one.tokens == own for one, own in zip(written, alone, strict=True))
                differing += len(prompts) - same
                rate = sum(len(one.tokens) for one in written) / sum(one.statistics.calls for one in written)
                print(
                    f"{kind:9} T={temperature}  {method:20} {same}/{len(prompts)} same  {rate:.2f} tokens a call",
                    flush=True,
                )
    sys.exit(differing > 0)


if __name__ == "__main__":
    main()
