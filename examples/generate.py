"""Generate one answer with two methods: the same text, in fewer calls."""

import argparse

import saltus

PROMPT = "Repeat this twice: The quick brown fox jumps over the lazy dog, and the lazy dog sleeps on."

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--model", default="smollm2-135m", help="a short name, a folder, or a hub id")
parser.add_argument("--prompt", default=PROMPT)
parser.add_argument("--max-new-tokens", type=int, default=64)
given = parser.parse_args()

engine = saltus.load(given.model, method="lookup")
settings = {"max_new_tokens": given.max_new_tokens, "temperature": 0.8, "seed": 0}
engine.generate("Hello.", max_new_tokens=8)  # what is done once is not timed
answer = engine.generate(given.prompt, **settings)
engine.decoder.prefix_tree.clear()  # both read the prompt
plain = engine.generate(given.prompt, method="plain", **settings)

print(answer.text)
assert answer.tokens == plain.tokens
for name, one in (("lookup", answer), ("plain", plain)):
    print(f"{name}: {one.statistics.calls} calls, {one.statistics.tokens_per_second:.0f} tokens a second")
