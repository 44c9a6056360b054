"""What does a corpus of the code base bring to lookup while that code is edited?

    python benchmarks/ngram_corpus.py --repository ~/some-project --commits 40 [--prompts spec_bench.jsonl --every 15]

Replays an editor's trace: of each of the latest commits that change text files, the places that it changed are written
again, each with a few lines around it, as if a model wrote them. The corpus is the tree before the commit. Tokens a
call with and without it, of `lookup` on the tokens of the default model: once with the lines before the place as the
prompt, and once with the whole file before the edit in the prompt, too, as an agent has that has read it.

With `--prompts` the model itself answers questions with and without that corpus, in turns: what a corpus costs that
does not help. The texts must be the same.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from prompt_options import add_prompt_options, first_turns
from rich.progress import track

import saltus
from saltus.core.batch import SequenceState, run_batch
from saltus.core.canvas import continuation
from saltus.core.control.controller import Controller
from saltus.core.forward import ForwardInputs, ForwardOutputs
from saltus.core.noise import Noise
from saltus.core.rules import match
from saltus.core.sampling import Sampling
from saltus.core.speculate import speculate
from saltus.engine.corpus_files import load_corpus, texts_at
from saltus.methods.lookup import Lookup, LookupDrafter
from saltus.methods.shared.ngram_corpus import NgramCorpus

AROUND, BEFORE = 4, 30  # lines that are written around a change, and that stand before them
MAX_TOKENS = 1024  # of a place that is written
SUFFIXES = {".py", ".md", ".c", ".h", ".inc", ".toml", ".js", ".ts", ".go", ".rs", ".java", ".cpp", ".txt", ".json"}


@dataclass
class Recorded:
    """A network that writes a given text: its likeliest token after a node is the text's, where the path is."""

    text: np.ndarray
    vocabulary: int
    calls: int = field(default=0, init=False)

    def new_kv_cache(self) -> None:
        return None

    def forward(self, batch: Sequence[ForwardInputs], kv_caches: Sequence[Any]) -> list[ForwardOutputs]:
        outputs = []
        for inputs in batch:
            self.calls += 1
            start = len(inputs.canvas.decided_prefix)
            depths = np.array([0, *(depth + 1 for depth in inputs.depths)])
            logits = torch.zeros(len(depths), self.vocabulary)
            logits[range(len(depths)), self.text[np.minimum(start + depths, len(self.text) - 1)]] = 1.0
            outputs.append(ForwardOutputs(logits, num_rows=len(depths)))
        return outputs


def git(repository: Path, *arguments: str) -> str:
    command = ["git", "-C", str(repository), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True, errors="replace").stdout


def changed_places(repository: Path, commit: str) -> Iterator[tuple[str, str, str]]:
    """For each place that a commit changed: the file before it, the lines before the place, the lines written."""
    for name in git(repository, "diff", "--name-only", "--diff-filter=M", f"{commit}~", commit).splitlines():
        if Path(name).suffix not in SUFFIXES:
            continue
        old, new = (git(repository, "show", f"{at}:{name}") for at in (f"{commit}~", commit))
        lines = new.splitlines(keepends=True)
        for line in git(repository, "diff", f"-U{AROUND}", f"{commit}~", commit, "--", name).splitlines():
            if line.startswith("@@"):
                first, _, count = line.split("+")[1].split(" ")[0].partition(",")
                start, size = int(first) - 1, int(count or 1)
                yield old, "".join(lines[max(start - BEFORE, 0) : start]), "".join(lines[start : start + size])


def calls_to_write(engine: saltus.Engine, prompt: str, text: str, corpus: NgramCorpus | None, nodes: int) -> np.ndarray:
    """(tokens, calls) of writing a text after a prompt."""
    before, after = (np.array(engine.tokenizer(part, add_special_tokens=False).input_ids) for part in (prompt, text))
    after = after[:MAX_TOKENS]
    network = Recorded(np.concatenate([before, after]), len(engine.tokenizer))
    drafter = Lookup().drafter(Noise(0), Sampling(), match)
    assert isinstance(drafter, LookupDrafter)
    drafter.corpus = corpus
    controller = Controller(nodes, adaptive=False)
    canvas = continuation(before, len(after))
    written: list[int] = []
    writing = speculate(
        canvas, Noise(0), Sampling(), [drafter], lambda step: written.extend(step.tokens), match, controller
    )  # fmt: skip
    for _ in run_batch([SequenceState(writing)], {"target": network}):
        pass
    if written != after.tolist():
        raise SystemExit("the replay wrote another text than the recorded one")
    return np.array([len(after), network.calls])


def replay(engine: saltus.Engine, repository: Path, commits: int, nodes: int) -> None:
    log = git(repository, "log", "--no-merges", "--diff-filter=M", "--format=%h", f"-{commits}").split()
    found: dict[tuple[str, bool], list[np.ndarray]] = {}
    places = 0
    for commit in track(log, "commits"):
        with tempfile.TemporaryDirectory() as folder:
            archive = subprocess.run(
                ["git", "-C", str(repository), "archive", f"{commit}~"], check=True, capture_output=True
            )
            subprocess.run(["tar", "-x", "-C", folder], input=archive.stdout, check=True)
            texts = list(texts_at(Path(folder)))
            corpus = NgramCorpus.of_texts(engine.tokenizer(texts, add_special_tokens=False, verbose=False).input_ids)
        for old, before, text in changed_places(repository, commit):
            places += 1
            for name, prompt in (("lines before", before), ("file in prompt", f"{old}\n\n{before}")):
                for known in (None, corpus):
                    found.setdefault((name, known is not None), []).append(
                        calls_to_write(engine, prompt, text, known, nodes)
                    )
    print(f"{len(log)} commits, {places} places, trees of {nodes} nodes; tokens a call")
    for name in ("lines before", "file in prompt"):
        without, within = (np.sum(found[name, known], axis=0) for known in (False, True))
        ratio = (within[0] / within[1]) / (without[0] / without[1])
        print(f"{name}: without {without[0] / without[1]:.2f}, with {within[0] / within[1]:.2f}, ratio {ratio:.2f}")


def answer(engine: saltus.Engine, corpus: NgramCorpus, prompts: Sequence[Any], tokens: int) -> None:
    """Tokens a second of answers with and without a corpus, in turns."""
    engines = {False: engine, True: engine.copy_with(corpus=corpus)}
    seconds: dict[bool, list[float]] = {False: [], True: []}
    engine.generate("Who are you?", max_new_tokens=8)
    for number, prompt in enumerate(track(prompts, "prompts")):
        texts = set()
        for known in (False, True) if number % 2 else (True, False):
            engines[known].decoder.prefix_tree.clear()
            began = time.perf_counter()
            texts.add(engines[known].generate(prompt, max_new_tokens=tokens).text)
            seconds[known].append(time.perf_counter() - began)
        if len(texts) > 1:
            raise SystemExit(f"the corpus changed the text of {prompt!r}")
    ratios = [without / within for without, within in zip(seconds[False], seconds[True], strict=True)]
    print(f"{len(prompts)} prompts: with the corpus {statistics.median(ratios):.3f} x as fast (median)")


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--repository", type=Path, required=True)
    options.add_argument("--commits", type=int, default=40)
    options.add_argument("--nodes", type=int, default=16)
    options.add_argument("--max-new-tokens", type=int, default=64)
    options.add_argument("--method", default="auto")
    add_prompt_options(options, required=False)
    args = options.parse_args()
    engine = saltus.load(args.model, args.method)
    replay(engine, args.repository, args.commits, args.nodes)
    if args.prompts:
        prompts = first_turns(options, args)
        answer(engine, load_corpus([args.repository], engine.tokenizer), prompts, args.max_new_tokens)


if __name__ == "__main__":
    main()
