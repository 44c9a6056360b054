"""A call beside a step of llama.cpp, of one GGUF file: random weights in the true shapes of models that people run.

    python benchmarks/beside_llama_cpp.py --llama-cpp ~/llama.cpp 8B:6 30B-A3B:2 --out results.json

`--llama-cpp` is a folder of its sources with `build/bin` in it. 8B:6 is the shape with its first 6 layers. llama.cpp's
own scripts convert and quantise the file (`pip install sentencepiece`). Then, in turns: milliseconds of a token and
tokens a second of a prompt of 512 tokens by `llama-bench` (its defaults, as many threads as ours), and of our calls.
Both decode after 200 tokens of text and pick no token: nothing is sampled, and no draft is made.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from random_models import SHAPE_NAMES, SHAPES, random_model

import saltus
from saltus.engine.checkpoints import load_checkpoint
from saltus.evaluation.profiling.call_timing import synthetic_inputs

CONTEXT, PROMPT, ROWS = 200, 512, (1, 2, 4, 8)


class LlamaCpp:
    """The programs in a folder of llama.cpp's sources."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.programs = folder, folder / "build" / "bin"
        path = os.pathsep.join(filter(None, (str(folder / "gguf-py"), os.environ.get("PYTHONPATH"))))
        self.environment = {**os.environ, "LD_LIBRARY_PATH": str(self.programs), "PYTHONPATH": path}

    def run(self, *command: Any) -> str:
        """What a command prints; if it fails, this ends with the end of what it complained about."""
        done = subprocess.run([str(each) for each in command], env=self.environment, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{command[0]} failed: {done.stderr[-2000:]}")
        return done.stdout

    def gguf_file(self, name: str, layers: int | None, kind: str, folder: Path) -> Path:
        """A file of a shape with random weights, quantised to this kind."""
        checkpoint, whole, packed = folder / "checkpoint", folder / "whole.gguf", folder / f"{kind}.gguf"
        model = random_model(name, distinct_rows=None, layers=layers)
        model.save_pretrained(checkpoint)
        del model
        tokenizer = saltus.load("smollm2-135m").tokenizer
        tokenizer.add_tokens(["[gMASK]", "<sop>", "<|user|>", "<|observation|>"])  # the script looks GLM's up
        tokenizer.save_pretrained(checkpoint)
        script = self.folder / "convert_hf_to_gguf.py"
        without_heads = ["--no-mtp"] if "hybrid" in name else []  # other scripts do not know it
        self.run(sys.executable, script, checkpoint, "--outfile", whole, "--outtype", "bf16", *without_heads)
        for path in checkpoint.iterdir():
            path.unlink()
        self.run(self.programs / "llama-quantize", whole, packed, kind)
        whole.unlink()
        return packed

    def speeds(self, file: Path, threads: int) -> dict[str, float]:
        """Milliseconds of a token after CONTEXT tokens, and tokens a second of a prompt of PROMPT tokens."""
        common = (self.programs / "llama-bench", "-m", file, "-t", threads, "-r", 2, "-o", "json")
        decoding = json.loads(self.run(*common, "-p", 0, "-n", 24, "-d", CONTEXT))[0]["avg_ts"]
        return {
            "token_ms": 1000 / decoding,
            "prompt": json.loads(self.run(*common, "-p", PROMPT, "-n", 0))[0]["avg_ts"],
        }


class OurCalls:
    """Calls of the network of a GGUF file."""

    def __init__(self, file: Path) -> None:
        self.network = load_checkpoint(str(file)).network
        self.texts = {}
        for rows in ROWS:
            inputs, kv_cache = synthetic_inputs(rows, CONTEXT, 1000), self.network.new_kv_cache()
            self.network.forward([inputs], [kv_cache])  # reads the text
            self.texts[rows] = inputs, kv_cache

    def milliseconds(self, rows: int) -> float:
        """Of a call of so many rows after CONTEXT tokens."""
        inputs, kv_cache = self.texts[rows]
        return 1000 * self._seconds(inputs, kv_cache)

    def prompt_speed(self) -> float:
        """Tokens a second of a prompt of PROMPT tokens."""
        return PROMPT / self._seconds(synthetic_inputs(1, PROMPT - 1, 1000), self.network.new_kv_cache())

    def _seconds(self, inputs: Any, kv_cache: Any) -> float:
        started = time.perf_counter()
        self.network.forward([inputs], [kv_cache])
        return time.perf_counter() - started


def measure(llama_cpp: LlamaCpp, name: str, layers: int | None, kind: str, rounds: int) -> dict[str, Any]:
    """A shape's medians."""
    threads = torch.get_num_threads()
    with tempfile.TemporaryDirectory() as folder:
        file = llama_cpp.gguf_file(name, layers, kind, Path(folder))
        ours, theirs, found = OurCalls(file), [], {rows: [] for rows in ROWS}
        prompts = []
        for _ in range(rounds):
            theirs.append(llama_cpp.speeds(file, threads))
            for _ in range(10):
                ours.milliseconds(1)  # the processor has idled
            for _ in range(8):
                for rows in ROWS:
                    ours.milliseconds(rows)  # another of the same size went before it
                    found[rows].append(ours.milliseconds(rows))
            prompts.append(ours.prompt_speed())
        size = file.stat().st_size
    return {
        "shape": name, "layers": layers, "kind": kind, "threads": threads, "bytes": size,
        "their_token_ms": statistics.median(each["token_ms"] for each in theirs),
        "their_prompt": statistics.median(each["prompt"] for each in theirs),
        "call_ms": {rows: statistics.median(each) for rows, each in found.items()},
        "prompt": statistics.median(prompts),
        "rounds": {"theirs": theirs, "call_ms": found, "prompt": prompts},
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shapes", nargs="+", metavar="SHAPE[:LAYERS]", help=SHAPE_NAMES)
    parser.add_argument("--llama-cpp", type=Path, required=True, metavar="FOLDER", help="its sources, built")
    parser.add_argument("--kind", default="Q4_K_M", help="of weights, as llama-quantize calls it")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, help="everything that was measured, as JSON")
    options = parser.parse_args()
    wanted = [(name, int(layers) if layers else None) for name, _, layers in (s.partition(":") for s in options.shapes)]
    if unknown := {name for name, _ in wanted} - set(SHAPES):
        parser.error(f"{sorted(unknown)[0]} is none of {', '.join(SHAPES)}")
    llama_cpp, rows = LlamaCpp(options.llama_cpp.resolve()), []
    columns = ("model", "layers", "GB", "llama.cpp, ms", "1 row, ms", "ratio", "2 rows", "4 rows", "8 rows")
    print("|", " | ".join(columns), "| prompt, tokens/s: llama.cpp | ours | ratio |")
    print("|---" * (len(columns) + 3) + "|")
    for name, layers in wanted:
        rows.append(row := measure(llama_cpp, name, layers, options.kind, options.rounds))
        one, theirs = row["call_ms"][1], row["their_token_ms"]
        more = " | ".join(f"{row['call_ms'][count] / one:.2f} ×" for count in ROWS[1:])
        prompts = f"{row['their_prompt']:.0f} | {row['prompt']:.0f} | {row['prompt'] / row['their_prompt']:.2f} ×"
        calls = f"{theirs:.1f} | {one:.1f} | {theirs / one:.2f} × | {more}"
        print(f"| {name} | {layers or 'all'} | {row['bytes'] / 1e9:.2f} | {calls} | {prompts} |", flush=True)
        if options.out:
            options.out.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
