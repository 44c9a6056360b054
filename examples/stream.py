"""Print text as it is decoded: one chunk for each call of the model, often of several tokens."""

import argparse

import saltus

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--model", default="smollm2-135m", help="a short name, a folder, or a hub id")
parser.add_argument("--prompt", default="Write the numbers from 1 to 30.")
parser.add_argument("--max-new-tokens", type=int, default=64)
given = parser.parse_args()

engine = saltus.load(given.model, method="jacobi+lookup")
stream = engine.stream(given.prompt, max_new_tokens=given.max_new_tokens)
for chunk in stream:
    print(chunk.text, end="", flush=True)
print(f"\n{stream.generation.statistics.tokens_per_call:.2f} tokens a call")
