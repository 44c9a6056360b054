"""Check and measure the CUDA path in one go of under ten minutes: equal bits, equal texts, speed, and the floor.

    python benchmarks/gpu.py --out gpu.json
    python benchmarks/gpu.py --random --model path/to/a/folder/with/config/and/tokenizer   # weights are made up
    python benchmarks/gpu.py --device cpu --minutes 2 --tokens 8 --take 2                  # a rehearsal

Bits and texts are compared here, alone and in a batch; times are measured by gpu_speed.py. Every part has a deadline,
results are written as they come, and a table ends it all. Exits with 1 if a row or a text differs, if no text was
compared, or if a part failed.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gpu_speed import SETTINGS, batches, calls, compiled, floor, method_names, methods, speed_lines
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import saltus
from saltus.core.canvas import Canvas, continuation
from saltus.core.forward import ForwardInputs
from saltus.loading.sources import resolve
from saltus.models.causal import CausalNetwork
from saltus.models.cuda.fixed_shape_calls import FixedShapeSettings

PROMPTS = (
    "Repeat the following sentence three times: The quick brown fox jumps over the lazy dog.",
    "Write a Python function that returns the n-th Fibonacci number, and explain each line.",
    "Tell me a short story about a lighthouse keeper and a whale.",
    "Correct the spelling: Their are many reasons why peple like too live in citys, and meny why they dont.",
    "A train leaves at 9:40 and arrives at 13:05. How long is the journey? Explain step by step.",
    "Translate into French: The library opens at nine, and the garden behind it at ten.",
    "Summarise: Bees tell each other by a dance where flowers are. The dance's angle says the direction, its length "
    "the distance. Other bees follow the dancer in the dark of the hive, and fly out to where she has been. What they "
    "bring home tells the hive whether the place is worth another dance.",
    "List ten animals that live in the sea, one a line, with a fact about each.",
    "Turn this into JSON: Anna, 34, Oslo; Ben, 27, Lima; Chiara, 41, Turin; Deng, 19, Xi'an.",
    "Rename the variable x to total: x = 0\nfor n in numbers:\n    x = x + n\n    print(x)\nprint(x / len(numbers))",
    "Who wrote Don Quixote, when, and what is it about?",
    "Write a formal letter that asks a landlord to repair a leaking window, then the same letter as a poem.",
)


class Run:
    """What is asked for, what was found, and how much time is left."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.started, self.found, self.device = args, time.perf_counter(), {}, torch.device(args.device)
        self.cuda = self.device.type == "cuda"
        self.folder = made_up(args.model) if args.random else str(resolve(args.model))
        self.prompts = list(PROMPTS)
        if args.prompts:
            self.prompts = [json.loads(line)["turns"][0] for line in args.prompts.read_text().splitlines()]
        self.prompts = self.prompts[: args.take]

    def left(self, share: float = 1.0) -> bool:
        """Is there time before this share of the whole is spent?"""
        return time.perf_counter() - self.started < share * 60 * self.args.minutes

    def note(self, part: str, **facts) -> None:
        self.found.setdefault(part, []).append(facts)
        print(f"{time.perf_counter() - self.started:6.1f} s  {part}: {facts}", flush=True)
        if self.args.out:
            self.args.out.write_text(json.dumps(self.found, indent=1, default=str))

    def fail(self, which: str, error: Exception) -> None:
        """To be called where the error was caught."""
        traceback.print_exc()
        self.note("failed", which=which, error=f"{type(error).__name__}: {error}")

    def engine(self, dtype: str, **settings) -> Any:
        """By fixed shapes on any device."""
        engine = saltus.load(self.folder, "plain", device=self.args.device, dtype=dtype, weights="bf16", **settings)
        if not self.cuda:
            small = FixedShapeSettings(rows_per_call=16, prefill_chunk=64, page_size=64)  # so a rehearsal is quick
            network = CausalNetwork(engine.network.model, fixed_shapes=True, fixed_shape_settings=small)
            engine = engine.copy_with(network=network)
        return engine

    def wait(self) -> float:
        if self.cuda:
            torch.cuda.synchronize(self.device)
        return time.perf_counter()


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--model", default="smollm2-135m")
    options.add_argument("--random", action="store_true", help="take configuration and tokenizer only")
    options.add_argument("--device", default="cuda")
    options.add_argument("--prompts", type=Path, help="JSON lines with turns (the first counts)")
    options.add_argument("--take", type=int, default=12, help="prompts")
    options.add_argument("--tokens", type=int, default=128, help="of each text")
    options.add_argument("--minutes", type=float, default=9.0)
    options.add_argument("--out", type=Path)
    run = Run(options.parse_args())
    parts = ((floor, 0.05), (bits, 0.25), (calls, 0.4), (batches, 0.6), (texts, 0.8), (methods, 0.93), (compiled, 1.0))
    for part, share in parts:
        try:
            part(run, share)
        except Exception as error:  # the other parts are worth having
            run.fail(part.__name__, error)
    print("\n".join(["", "=" * 100, *exactness_lines(run), *speed_lines(run)]))
    counted = run.found.get("texts", [])
    differs = any(row["same"] < row["texts"] for row in counted) or any(
        row["different"] for row in run.found.get("bits", [])
    )
    sys.exit(not counted or differs or "failed" in run.found)


def made_up(source: str) -> str:
    """A folder with random weights for a configuration."""
    folder, where = tempfile.mkdtemp(), source if Path(source).is_dir() else str(resolve(source))
    AutoTokenizer.from_pretrained(where, trust_remote_code=False).save_pretrained(folder)
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(where, initializer_range=0.06, trust_remote_code=False)
    model: Any = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    model.to(torch.bfloat16).save_pretrained(folder)
    return folder


def bits(run: Run, share: float) -> None:
    """Logits of right tokens among wrong branches against those of plain decoding of the text alone, bit for bit: each
    text alone, and all in one batch that they leave one by one. Then without graphs.
    """
    for dtype in ("bfloat16", "float32"):
        network = run.engine(dtype).network
        vocab, known, draws = network.model.config.vocab_size, [], np.random.default_rng(0)
        for prompt in (40, 200, 500, 700, 1010, 1900) if run.cuda else (20, 33):  # borders of pages and blocks
            if not run.left(share):
                return
            tokens = draws.integers(3, vocab, prompt + 20 + 4 * len(known))
            known.append((tokens, prompt, alone(network, tokens, prompt)))
            compare(run, network, dtype, known[-1:], f"alone, from {prompt}", share)
        compare(run, network, dtype, known, f"batch of {len(known)}", share)
        if run.cuda and network.fixed_shape_runner.use_cuda_graphs:
            network.fixed_shape_runner.use_cuda_graphs = False
            tokens, prompt, plain = known[0]
            found = (alone(network, tokens, prompt) - plain).abs().amax(-1)
            note_bits(run, dtype, "without graphs", [found])


def compare(run: Run, network, dtype: str, texts, where: str, share: float) -> None:
    """Decode texts together, each (tokens, length of the prompt, logits of plain decoding), by trees of 16 nodes."""
    draws, gaps, running = np.random.default_rng(1), [], []
    for tokens, prompt, plain in texts:
        canvas = continuation(tokens[:prompt], len(tokens) - prompt + 1)
        running.append((tokens, plain, network.new_kv_cache(), canvas))
    while running and run.left(share):
        asked = [scattered(canvas, tokens, draws, len(plain[0])) for tokens, plain, _, canvas in running]
        outputs = network.forward([inputs for inputs, _ in asked], [kv_cache for _, _, kv_cache, _ in running])
        after = []
        for (tokens, plain, kv_cache, canvas), (_, trunk), one in zip(running, asked, outputs, strict=True):
            expected = plain[canvas.num_decided : canvas.num_decided + len(trunk)]
            gaps.append((one.logits[trunk].float().cpu() - expected).abs().amax(-1))
            kept = int(draws.integers(1, len(trunk) + 1))
            kept = tokens[len(canvas.decided_prefix) :][:kept]
            if len(kept) and len(canvas.decided_prefix) + len(kept) < len(tokens):
                after.append((tokens, plain, kv_cache, canvas.fill(kept)))
        running = after
    note_bits(run, dtype, where, gaps)


def note_bits(run: Run, dtype: str, where: str, gaps: list[torch.Tensor]) -> None:
    """Each gap is the greatest difference of a row's logits."""
    if gaps:
        found = torch.cat(gaps)
        different = int((found > 0).sum())
        run.note(
            "bits", dtype=dtype, where=where, rows=len(found), different=different, worst_gap=float(found.max())
        )  # fmt: skip


def alone(network, tokens, prompt: int) -> torch.Tensor:
    """Logits after the prompt and after each token behind it, one token a call."""
    kv_cache, canvas, rows = network.new_kv_cache(), continuation(tokens[:prompt], len(tokens) - prompt + 1), []
    for token in [*tokens[prompt:], None]:
        rows.append(network.forward([ForwardInputs(canvas)], [kv_cache])[0].logits[0].float().cpu())
        canvas = canvas if token is None else canvas.fill(np.array([token]))
    return torch.stack(rows)


def scattered(canvas: Canvas, tokens, draws, vocab: int) -> tuple[ForwardInputs, list[int]]:
    """A tree of 16 nodes, some of which say what follows, and the rows of logits behind those."""
    nodes, parents, trunk, at = [], [], [-1], len(canvas.decided_prefix)
    while len(nodes) < 16:
        if draws.random() < 0.5 and at + len(trunk) <= len(tokens):
            parents.append(trunk[-1])
            nodes.append(int(tokens[at + len(trunk) - 1]))
            trunk.append(len(nodes) - 1)
        else:
            parents.append(int(draws.integers(-1, len(nodes))) if nodes else -1)
            nodes.append(int(draws.integers(3, vocab)))
    return ForwardInputs(canvas, tuple(nodes), tuple(parents)), [node + 1 for node in trunk]


def texts(run: Run, share: float) -> None:
    """Texts of every method in batches, trees as large as they get, against those of plain decoding alone."""
    jobs = [(dtype, *distribution) for distribution in SETTINGS for dtype in ("bfloat16", "float32")]
    for number, (dtype, temperature, seed) in enumerate(jobs):
        end = share - (len(jobs) - number - 1) * 0.05
        if not run.left(end):
            continue
        engine = run.engine(dtype, adaptive=False)
        settings = {"max_new_tokens": min(run.args.tokens, 64), "temperature": temperature, "seed": seed}
        found = {name: {"same": 0, "texts": 0, "tokens": 0, "calls": 0, "flips": []} for name in method_names(engine)}
        for start in range(0, len(run.prompts), 4):
            batch = run.prompts[start : start + 4]
            plain = [engine.generate(prompt, **settings) for prompt in batch if run.left(end)]
            for name, counted in found.items():
                if len(plain) < len(batch) or not run.left(end):
                    break
                try:
                    written = engine.generate(batch, method=name, **settings)
                except Exception as error:  # the other methods are worth having
                    run.fail(f"texts by {name}", error)
                    continue
                for one, made in zip(plain, written, strict=True):
                    counted["texts"] += 1
                    counted["tokens"] += len(made.tokens)
                    counted["calls"] += made.statistics.calls
                    if made.tokens == one.tokens:
                        counted["same"] += 1
                    else:
                        counted["flips"].append({"prompt": one.prompt[:40], **flip(engine, one, made)})
        for name, counted in found.items():
            if counted["texts"]:
                run.note("texts", dtype=dtype, temperature=temperature, method=name, **counted)


def flip(engine, plain, other) -> dict:
    """Where two texts part, and how far apart the two tokens' logits are under plain decoding."""
    at = next(i for i, (a, b) in enumerate(zip(plain.tokens, other.tokens, strict=False)) if a != b)
    canvas = continuation(engine.encode(plain.prompt), at + 1)
    row = alone(engine.network, np.array([*canvas.decided_prefix, *plain.tokens[:at]]), len(canvas.decided_prefix))[-1]
    return {"at": at, "gap": abs(float(row[plain.tokens[at]] - row[other.tokens[at]]))}


def exactness_lines(run: Run) -> list[str]:
    lines = [
        f"bits   {one['dtype']:9} {one['where']:16} {one['different']} of {one['rows']} rows differ,"
        f" worst gap {one['worst_gap']:.3g}"
        for one in run.found.get("bits", [])
    ]
    for one in run.found.get("texts", []):
        gaps = ", ".join(f"{each['gap']:.3g}" for each in one["flips"][:5])
        lines.append(
            f"texts  {one['dtype']:9} T={one['temperature']:<4} {one['method']:20} {one['same']}/{one['texts']} same,"
            f" {one['tokens'] / one['calls']:.2f} tokens a call{'  gaps ' + gaps if gaps else ''}"
        )
    return lines + [f"FAILED {one['which']}: {one['error']}" for one in run.found.get("failed", [])]


if __name__ == "__main__":
    main()
