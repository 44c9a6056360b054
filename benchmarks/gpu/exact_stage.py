"""Count rows and texts that differ from those of plain decoding alone: by method, dtype, batch and temperature.

A row is the logits of one position: of the right tokens of a tree with wrong branches, or of a text in a batch, against
plain decoding of the text alone, bit for bit. A text is what a method writes in a batch, with trees as large as they
get. Shapes with random weights have rows only.
"""

from __future__ import annotations

import argparse
import itertools
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch

from gpu.loaded_models import is_shape, kept, load_engine, load_network, read_prompts, require_graphs, split_name
from gpu.part_results import Part
from gpu.table_lines import markdown_table
from saltus.core.canvas import Canvas, continuation
from saltus.core.forward import ForwardInputs
from saltus.engine.comparison import first_difference, logit_gap
from saltus.evaluation.profiling.call_timing import temporarily_replaced

METHODS = "plain,lookup,token_recycling+lookup,jacobi,jacobi+lookup,ptp,ptp+lookup,mtpc,mtpc+lookup,small_model,auto"
BORDERS = (40, 200, 500, 700, 1010, 1900)  # lengths of prompts: the rows behind them cross pages and blocks
ROWS_OF_TEXT = 20  # behind its prompt
TREE_NODES = 16
FEWEST_TEXTS = 8  # of a part, in several batches if they are small

REHEARSAL = {
    "models": "tiny,smollm2-135m", "dtypes": "bfloat16", "batches": "1,2", "temperatures": "0.7", "tokens": 2,
    "methods": "lookup", "longest": 60,
}  # fmt: skip


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(models="smollm2-135m,7B", methods=METHODS)
    parser.add_argument("--dtypes", default="bfloat16,float32", help="of rows and texts; shapes have the first only")
    parser.add_argument("--batches", default="1,2,7,32", help="texts at once")
    parser.add_argument("--temperatures", default="0,0.7")
    parser.add_argument("--tokens", type=int, default=64, help="of each text")
    parser.add_argument("--longest", type=int, default=2000, help="tokens of a prompt before rows that are compared")


def parts(args: argparse.Namespace) -> list[Part]:
    found = []
    for model in args.models:
        for dtype in args.dtypes if not is_shape(model) and "@" not in model else args.dtypes[:1]:
            for batch, nodes in itertools.product(args.batches, (0, TREE_NODES)):
                facts = {"count": "rows", "model": model, "dtype": dtype, "batch": batch, "nodes": nodes}
                found.append(Part(facts, partial(rows, args, model, dtype, batch, nodes)))
            if args.device.startswith("cuda"):
                facts = {"count": "rows", "model": model, "dtype": dtype, "batch": 1, "nodes": "0, no graphs"}
                found.append(Part(facts, partial(rows_without_graphs, args, model, dtype)))
            for way in itertools.product(args.temperatures, args.batches, args.methods) if not is_shape(model) else ():
                facts = {"count": "texts", "model": model, "dtype": dtype}
                facts |= zip(("temperature", "batch", "method"), way, strict=True)
                found.append(Part(facts, partial(texts, args, model, dtype, *way)))
    return found


@dataclass
class Reference:
    """Plain decoding of texts alone on one network, as far as it was asked for."""

    network: Any
    longest: int
    known: dict[int, tuple[np.ndarray, int, torch.Tensor]] = field(default_factory=dict)

    def text(self, number: int) -> tuple[np.ndarray, int, torch.Tensor]:
        """Tokens, the length of the prompt, and the logits after the prompt and each token behind it."""
        if number not in self.known:
            vocab, prompt = self.network.model.config.vocab_size, BORDERS[number % len(BORDERS)] + number
            prompt = min(prompt, self.longest)
            tokens = np.random.default_rng(number).integers(3, vocab, prompt + ROWS_OF_TEXT)
            self.known[number] = tokens, prompt, alone(self.network, tokens, prompt)
        return self.known[number]


def _reference(args: argparse.Namespace, model: str, dtype: str) -> Reference:
    return kept(("rows", model, dtype), lambda: Reference(load_network(args, model, dtype), args.longest))


def alone(network: Any, tokens: np.ndarray, prompt: int) -> torch.Tensor:
    """Logits after the prompt and after each token behind it, one token a call."""
    kv_cache, canvas, found = network.new_kv_cache(), continuation(tokens[:prompt], len(tokens) - prompt + 1), []
    for token in [*tokens[prompt:], None]:
        found.append(network.forward([ForwardInputs(canvas)], [kv_cache])[0].logits[0].cpu())
        canvas = canvas if token is None else canvas.fill(np.array([token]))
    return torch.stack(found)


def rows(args: argparse.Namespace, model: str, dtype: str, batch: int, nodes: int) -> dict[str, Any]:
    """Decode texts by trees, in batches that they leave one by one, each along its own tokens."""
    reference, draws, counted = _reference(args, model, dtype), np.random.default_rng(batch), []
    network = reference.network
    for start in range(0, max(batch, FEWEST_TEXTS) // batch * batch, batch):
        running = []
        for number in range(start, start + batch):
            tokens, prompt, plain = reference.text(number)
            canvas = continuation(tokens[:prompt], len(tokens) - prompt + 1)
            running.append((tokens, plain, network.new_kv_cache(), canvas))
        while running:
            asked = [scattered(canvas, tokens, draws, len(plain[0]), nodes) for tokens, plain, _, canvas in running]
            outputs = network.forward([inputs for inputs, _ in asked], [kv_cache for _, _, kv_cache, _ in running])
            after = []
            for (tokens, plain, kv_cache, canvas), (_, trunk), one in zip(running, asked, outputs, strict=True):
                expected = plain[canvas.num_decided : canvas.num_decided + len(trunk)]
                counted.append(differences(one.logits[trunk].cpu(), expected))
                filled = tokens[len(canvas.decided_prefix) :][: int(draws.integers(1, len(trunk) + 1))]
                if len(filled) and len(canvas.decided_prefix) + len(filled) < len(tokens):
                    after.append((tokens, plain, kv_cache, canvas.fill(filled)))
            running = after
    return total(counted)


def rows_without_graphs(args: argparse.Namespace, model: str, dtype: str) -> dict[str, Any]:
    """Plain decoding by calls that are launched kernel by kernel, against replayed graphs."""
    reference = _reference(args, model, dtype)
    tokens, prompt, plain = reference.text(0)
    runner = reference.network.fixed_shape_runner
    require_graphs(runner)
    with temporarily_replaced(runner, "use_cuda_graphs", False):
        return total([differences(alone(reference.network, tokens, prompt), plain)])


def differences(found: torch.Tensor, expected: torch.Tensor) -> tuple[int, int, float]:
    """Rows, those that differ in any bit (a NaN differs from all), and the greatest gap of two logits."""
    gaps = (found.float() - expected.float()).abs().amax(-1)
    return len(found), int((found != expected).any(-1).sum()), float(gaps.max())


def total(counted: list[tuple[int, int, float]]) -> dict[str, Any]:
    numbers, different, gaps = zip(*counted, strict=True)
    return {"rows": sum(numbers), "different": sum(different), "worst_gap": max(gaps)}


def scattered(canvas: Canvas, tokens: Any, draws: Any, vocab: int, nodes: int) -> tuple[ForwardInputs, list[int]]:
    """A tree, some of whose nodes say what follows, and the rows of logits behind those."""
    drafts, parents, trunk, at = [], [], [-1], len(canvas.decided_prefix)
    while len(drafts) < nodes:
        if draws.random() < 0.5 and at + len(trunk) <= len(tokens):
            parents.append(trunk[-1])
            drafts.append(int(tokens[at + len(trunk) - 1]))
            trunk.append(len(drafts) - 1)
        else:
            parents.append(int(draws.integers(-1, len(drafts))) if drafts else -1)
            drafts.append(int(draws.integers(3, vocab)))
    return ForwardInputs(canvas, tuple(drafts), tuple(parents)), [node + 1 for node in trunk]


@dataclass
class PlainTexts:
    """An engine, and the texts that plain decoding writes alone, as far as they were asked for."""

    engine: Any
    prompts: list[Any]
    written: dict[tuple[float, int], Any] = field(default_factory=dict)

    def write(self, prompts: Any, method: str, temperature: float, tokens: int) -> Any:
        self.engine.decoder.prefix_tree.clear()
        settings = {"max_new_tokens": tokens, "temperature": temperature, "seed": 1}
        return self.engine.generate(prompts, method=method, **settings)

    def alone(self, number: int, temperature: float, tokens: int) -> Any:
        if (temperature, number) not in self.written:
            plain = self.write(self.prompts[number], "plain", temperature, tokens)
            self.written[temperature, number] = plain
        return self.written[temperature, number]


def texts(
    args: argparse.Namespace, model: str, dtype: str, temperature: float, batch: int, method: str
) -> dict[str, Any]:
    """What a method writes in batches, with whole trees, against plain decoding of each text alone."""

    def load() -> PlainTexts:
        options = args.option
        if not any(option.startswith("small_model.model=") for option in options):  # the model drafts for itself
            options = [*options, f"small_model.model={split_name(model)[0]}"]
        given = argparse.Namespace(**vars(args) | {"option": options})
        engine = load_engine(given, model, dtype, adaptive=False, batch_size=max(args.batches))
        return PlainTexts(engine, read_prompts(args.prompts, max(*args.batches, FEWEST_TEXTS)))

    plain = kept(("texts", model, dtype), load)
    found, count = [], max(batch, FEWEST_TEXTS) // batch * batch
    for start in range(0, count, batch):
        expected = [plain.alone(number, temperature, args.tokens) for number in range(start, start + batch)]
        made = plain.write(plain.prompts[start : start + batch], method, temperature, args.tokens)
        found += zip(expected, made, strict=True)
    flips = []
    for one, other in found:
        at = first_difference(one.tokens, other.tokens)
        if at is not None:
            both = at < min(len(one.tokens), len(other.tokens))
            gap = logit_gap(plain.engine, one, other, at, args.tokens) if both else None
            flips.append({"prompt": str(one.prompt)[:40], "at": at, "gap": gap})
    calls = sum(other.statistics.calls for _, other in found)
    return {
        "texts": len(found), "different": len(flips), "tokens": sum(len(other.tokens) for _, other in found),
        "calls": calls, "flips": flips,
    }  # fmt: skip


def tables(results: list[dict[str, Any]]) -> list[str]:
    """Rows by kind and texts by method, each as "different of all", by the number of texts at once."""
    found, batches = [], sorted({result["batch"] for result in results})
    heads = ["alone" if batch == 1 else f"{batch} at once" for batch in batches]
    for count, names in (("rows", ("model", "dtype", "nodes")), ("texts", ("model", "dtype", "temperature", "method"))):
        cells: dict[tuple[Any, ...], dict[int, str]] = {}
        for result in results:
            if result["count"] == count:
                key = tuple(result[name] for name in names)
                cells.setdefault(key, {})[result["batch"]] = f"{result['different']} of {result[count]:,}"
        if cells:
            found += ["", f"{count.title()} that differ:", ""]
            lines = [[*key, *(row.get(batch, "–") for batch in batches)] for key, row in cells.items()]
            found += markdown_table([*names, *heads], lines)
    return found
