"""Decode several prompts at once; each text is what it would be alone."""

import argparse

import saltus

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--model", default="smollm2-135m", help="a short name, a folder, or a hub id")
parser.add_argument("--max-new-tokens", type=int, default=32)
given = parser.parse_args()

engine = saltus.load(given.model, method="lookup", batch_size=8)
prompts = [
    "Name a colour.",
    "Repeat after me: one two three one two three.",
    [{"role": "user", "content": "Is water wet?"}],  # the messages of a conversation
]
answers = engine.generate(prompts, max_new_tokens=given.max_new_tokens)
for answer in answers:
    print(f"{answer.finish_reason}: {answer.text!r}")
assert answers[0].tokens == engine.generate(prompts[0], max_new_tokens=given.max_new_tokens).tokens
