"""What do drafts bring inside vLLM? Its plain decoding, its own drafters, ours, and our own engine, in turns.

    python benchmarks/vllm.py --model FOLDER --prompts spec_bench.jsonl --count 40 --out vllm.json
    python benchmarks/vllm.py --model FOLDER --prompts spec_bench.jsonl --drafter DFLASH --draft-tokens 7 --out two.json

To be run by a Python that has vLLM and Saltus. Every system is a process of its own that waits for its turn, and all of
them answer a prompt before the next one begins, in an order that rotates. Decoding is greedy, one text at a time, and
the prompt is read in the time that is counted, without a prefix cache. *Tokens a call* is vLLM's mean acceptance length
over all calls: also those without drafts. Speeds are medians over prompts, and speed-ups medians of each prompt's
ratio to plain decoding in vLLM. vLLM's texts may differ from each other: its kernels round differently for different
numbers of rows, so texts that are those of its plain decoding are counted.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path[:] = [folder for folder in sys.path if Path(folder or ".").resolve() != Path(__file__).resolve().parent]
"""Without this file's folder, or `import vllm` would import this file."""

OURS = "saltus.vllm."
SYSTEMS: dict[str, dict[str, Any] | None] = {
    "vllm": None,
    "vllm ngram": {"method": "ngram", "prompt_lookup_min": 2, "prompt_lookup_max": 5},
    "vllm suffix": {"method": "suffix"},
    "vllm + saltus lookup": {"method": "custom_class", "model": f"{OURS}Lookup"},
    "vllm + saltus ptp": {"method": "custom_class", "model": f"{OURS}Ptp"},
    "vllm + saltus mtpc": {"method": "custom_class", "model": f"{OURS}Mtpc"},
    "saltus plain": {"method": "plain"},
    "saltus auto": {"method": "auto"},
}
DRAFTER_SYSTEMS: dict[str, dict[str, Any] | None] = {
    "vllm dflash": {"method": "dflash"},
    "saltus dflash chains": {"method": "ptp", "top_k": 1, "adaptive": False},
    "saltus dflash+lookup": {"method": "ptp+lookup"},
}
"""With --drafter, which all of them use; chains have `--draft-tokens` tokens, as vLLM's have."""
ANSWER = "ANSWER "  # begins the lines of a worker that are no log


def vllm_decoder(arguments: argparse.Namespace, speculative: dict[str, Any] | None):
    from vllm import LLM, SamplingParams

    drafts = speculative and {**speculative, "num_speculative_tokens": arguments.draft_tokens}
    if drafts and drafts["method"] == "dflash":
        drafts["model"] = str(arguments.drafter)
    engine = LLM(
        arguments.model, dtype=arguments.dtype, max_model_len=arguments.max_length, max_num_seqs=4,
        gpu_memory_utilization=0.3, enforce_eager=arguments.eager, enable_prefix_caching=False, disable_log_stats=False,
        speculative_config=drafts,
    )  # fmt: skip

    def accepted() -> int:
        return sum(int(one.value) for one in engine.get_metrics() if one.name.endswith("num_accepted_tokens"))

    def decode(messages: list[dict[str, str]], tokens: int) -> dict[str, Any]:
        before, began = accepted(), time.perf_counter()
        found = engine.chat(messages, SamplingParams(temperature=0, max_tokens=tokens), use_tqdm=False)
        seconds, ids = time.perf_counter() - began, list(found[0].outputs[0].token_ids)
        return {"tokens": ids, "seconds": seconds, "calls": max(len(ids) - (accepted() - before), 1)}

    return decode


def saltus_decoder(arguments: argparse.Namespace, method: str, top_k: int | None = None, adaptive: bool = True):
    import saltus

    options: dict[str, dict[str, Any]] = {}
    if method.startswith("ptp"):
        options["ptp"] = {"model": str(arguments.drafter), **({} if top_k is None else {"top_k": top_k})}
    max_draft_tokens = None if adaptive else arguments.draft_tokens
    engine = saltus.load(arguments.model, method, options=options, adaptive=adaptive, max_draft_tokens=max_draft_tokens)

    def decode(messages: list[dict[str, str]], tokens: int) -> dict[str, Any]:
        engine.decoder.prefix_tree.clear()
        began = time.perf_counter()
        found = engine.generate(messages, max_new_tokens=tokens)
        seconds = time.perf_counter() - began
        return {"tokens": list(found.tokens), "seconds": seconds, "calls": found.statistics.calls}

    return decode


def work(arguments: argparse.Namespace) -> None:
    """Answer the messages that come as lines, one line each."""
    name = arguments.worker
    settings = {**SYSTEMS, **DRAFTER_SYSTEMS}[name]
    decode = (
        vllm_decoder(arguments, settings) if name.startswith("vllm") else saltus_decoder(arguments, **settings or {})
    )
    decode([{"role": "user", "content": "Count from one to twenty, and then once more."}], 48)
    print(ANSWER + "{}", flush=True)
    for line in sys.stdin:
        print(ANSWER + json.dumps(decode(json.loads(line), arguments.tokens)), flush=True)


class Worker:
    """The process of one system."""

    def __init__(self, name: str, arguments: argparse.Namespace) -> None:
        settings = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
        environment = settings | os.environ
        libiomp = Path(sys.prefix, "lib", "libiomp5.so")  # of intel-openmp: vLLM's drafts are slow without it
        if name.startswith("vllm") and libiomp.exists():
            environment["LD_PRELOAD"] = str(libiomp)
        self.log = Path(f"{arguments.out}.{name.replace(' ', '_')}.log").open("w")  # noqa: SIM115 (the process writes it)
        command = [sys.executable, __file__, "--worker", name, *sys.argv[1:]]
        self.process = subprocess.Popen(
            command, env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log
        )
        self.answer()

    def answer(self) -> dict[str, Any]:
        """What the process answers next. Errors: SystemExit if it has ended."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(ANSWER):
                return json.loads(line.removeprefix(ANSWER))
            self.log.write(line)
        raise SystemExit(f"a system ended; its log is {self.log.name}")

    def decode(self, messages: list[dict[str, str]]) -> dict[str, Any]:
        assert self.process.stdin is not None
        print(json.dumps(messages), file=self.process.stdin, flush=True)
        return self.answer()


def summary(answers: dict[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """A row for each system."""
    plain, rows = answers.get("vllm"), []
    for name, found in answers.items():
        speeds = [len(one["tokens"]) / one["seconds"] for one in found]
        row = {
            "system": name,
            "tokens_per_call": round(sum(len(one["tokens"]) for one in found) / sum(one["calls"] for one in found), 3),
            "tokens_per_second": round(statistics.median(speeds), 2),
        }
        if plain is not None:
            own = [len(one["tokens"]) / one["seconds"] for one in plain]
            row["speed_up"] = round(statistics.median(a / b for a, b in zip(speeds, own, strict=True)), 3)
            row["same_texts"] = sum(a["tokens"] == b["tokens"] for a, b in zip(found, plain, strict=True))
        rows.append(row)
    return rows


def chosen_prompts(file: Path, count: int) -> list[list[dict[str, str]]]:
    """The first turns of `count` questions, evenly over the file."""
    questions = [json.loads(line)["turns"][0] for line in file.read_text(encoding="utf-8").splitlines()]
    count = min(count, len(questions))
    return [[{"role": "user", "content": questions[i * len(questions) // count]}] for i in range(count)]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", required=True, help="a folder that both vLLM and Saltus load")
    parser.add_argument("--prompts", type=Path, required=True, help="questions in Spec-Bench's form")
    parser.add_argument("--count", type=int, default=40, help="questions, evenly over the file")
    parser.add_argument("--tokens", type=int, default=128, help="of an answer, at most")
    parser.add_argument("--draft-tokens", type=int, default=8, help="vLLM's num_speculative_tokens")
    parser.add_argument("--max-length", type=int, default=4096, help="of prompt and answer")
    parser.add_argument("--dtype", default="bfloat16", help="of vLLM; Saltus takes that of the folder")
    parser.add_argument("--eager", action="store_true", help="vLLM without torch.compile")
    parser.add_argument("--systems", nargs="+", choices=[*SYSTEMS, *DRAFTER_SYSTEMS])
    parser.add_argument("--drafter", type=Path, help="of DFlash's shape, by saltus export --to speculators")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        return work(arguments)
    systems = arguments.systems or [*SYSTEMS, *(DRAFTER_SYSTEMS if arguments.drafter else ())]
    if not arguments.drafter and set(systems) & set(DRAFTER_SYSTEMS):
        parser.error("give the drafter of these systems by --drafter")
    workers = {name: Worker(name, arguments) for name in systems}
    answers: dict[str, list[dict[str, Any]]] = {name: [] for name in workers}
    names = list(workers)
    for number, messages in enumerate(chosen_prompts(arguments.prompts, arguments.count)):
        turn = number % len(names)
        for name in (*names[turn:], *names[:turn]):
            answers[name].append(workers[name].decode(messages))
        print(f"{number + 1} prompts", file=sys.stderr, flush=True)
    for worker in workers.values():
        worker.process.kill()
    rows = summary(answers)
    settings = {name: str(value) for name, value in vars(arguments).items() if name != "worker"}
    arguments.out.write_text(json.dumps({"settings": settings, "rows": rows, "answers": answers}))
    print("| " + " | ".join(rows[0]) + " |\n|" + "---|" * len(rows[0]))
    for row in rows:
        print("| " + " | ".join(map(str, row.values())) + " |")


if __name__ == "__main__":
    main()
