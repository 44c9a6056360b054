"""Add a decoding method: a frozen config whose drafter offers branches of draft tokens. The text cannot change."""

import argparse
from dataclasses import dataclass, field

import saltus
from saltus.core.tree import Branch
from saltus.methods import available_methods


@dataclass(frozen=True)
class Echo:
    """Draft the last `num_draft_tokens` tokens once more."""

    num_draft_tokens: int = 4
    draft_models: dict[str, str] = field(default_factory=dict, init=False)  # no draft models

    def drafter(self, noise, sampling, rule):
        def draft(canvas, last, max_depth):
            tokens = canvas.decided_prefix[-self.num_draft_tokens :][:max_depth].tolist()
            return [Branch(tokens, [0.5] * len(tokens), source="echo")]

        return draft


parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--model", default="smollm2-135m", help="a short name, a folder, or a hub id")
parser.add_argument("--max-new-tokens", type=int, default=32)
given = parser.parse_args()

available_methods()["echo"] = Echo  # a package registers it by an entry point of the group saltus.methods
engine = saltus.load(given.model, method="echo", options={"echo": {"num_draft_tokens": 2}})
prompt, settings = "Say tick tock ten times.", {"max_new_tokens": given.max_new_tokens}
answer = engine.generate(prompt, **settings)
print(answer.text)
assert answer.tokens == engine.generate(prompt, method="plain", **settings).tokens
counted = answer.statistics
print(f"{counted.calls} calls for {counted.tokens} tokens, by call: {counted.tokens_by_call}")
