"""Train a drafter of your own kind, and draft with it: the folder linear_head is a method with network and training."""

import argparse
import tempfile
from dataclasses import replace
from pathlib import Path

from linear_head.drafter import LinearHead
from linear_head.training.objectives import OBJECTIVES as OWN_OBJECTIVES

import saltus
from saltus.methods import available_methods
from saltus.training.data.hidden_states import Sample
from saltus.training.loop.training_loop import print_progress
from saltus.training.objectives import OBJECTIVES
from saltus.training.recipe import find_recipe, read_recipe
from saltus.training.run import TrainingRun

QUESTIONS = [f"Name three {kind} and say a sentence about each." for kind in (
    "animals", "rivers", "cities", "planets", "tools", "colours", "sports", "trees", "birds", "dishes", "inventions",
    "writers", "games", "metals", "fruits", "mountains", "languages", "instruments", "insects", "machines",
)]  # fmt: skip

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--model", default="smollm2-135m", help="a short name, a folder, or a hub id")
parser.add_argument("--max-new-tokens", type=int, default=96)
given = parser.parse_args()

# a package registers both by entry points of the groups saltus.methods and saltus.objectives
available_methods()["linear_head"] = LinearHead
OBJECTIVES.update(OWN_OBJECTIVES)

engine, settings = saltus.load(given.model, "plain"), {"max_new_tokens": given.max_new_tokens}
answers = engine.generate(QUESTIONS, **settings)  # in place of `saltus collect text`
samples = [Sample(engine.encode(one.prompt), one.tokens, 0.0) for one in answers]
recipe = replace(read_recipe(find_recipe("linear-head")), model=given.model)
with tempfile.TemporaryDirectory() as work:  # in place of `saltus train linear_head`
    run = TrainingRun(recipe, samples, engine.network, given.model, Path(work))
    for _ in run.collect():
        pass
    task = run.make_task()
    results = run.train(task, print_progress, lambda step, loss: None)
    run.save(task, Path(work, "head"), "linear_head", results, {})
    engine = saltus.load(given.model, "linear_head", options={"linear_head": {"model": str(Path(work, "head"))}})
    question = "Name three flowers and say a sentence about each."
    answer = engine.generate(question, **settings)
print(answer.text)
assert answer.tokens == engine.generate(question, method="plain", **settings).tokens
print(f"{answer.statistics.calls} calls for {answer.statistics.tokens} tokens")
