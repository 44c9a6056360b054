"""Check and measure the CUDA path in one go of under ten minutes: equal bits, equal texts, speed, and the floor.

    python benchmarks/gpu.py --out gpu.json
    python benchmarks/gpu.py --random --model path/to/a/folder/with/config/and/tokenizer   # weights are made up
    python benchmarks/gpu.py --device cpu --minutes 2 --tokens 12 --take 2                 # a rehearsal

Every part has a deadline, results are written as they come, and a table ends it all. Exits with 1 if a text differs,
if none was compared, or if a part failed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import saltus
from saltus.core.canvas import continuation
from saltus.core.forward import ForwardInputs
from saltus.methods import available_methods, make_methods
from saltus.networks.loading.checkpoints import load_model
from saltus.networks.loading.sources import resolve
from saltus.networks.models.causal import CausalNetwork

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
SETTINGS = ((0.0, 0), (0.8, 1))  # temperature, seed


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

    def engine(self, dtype: str, **settings) -> Any:
        """By fixed shapes on any device."""
        engine = saltus.load(self.folder, "plain", device=self.args.device, dtype=dtype, **settings)
        if not self.cuda:
            network = CausalNetwork(engine.network.model, fixed_shapes=True)
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
    for part, share in ((floor, 0.1), (bits, 0.25), (speed, 0.55), (texts, 0.85), (graphs, 0.92), (compiled, 1.0)):
        try:
            part(run, share)
        except Exception as error:  # the other parts are worth having
            traceback.print_exc()
            run.note("failed", which=part.__name__, error=f"{type(error).__name__}: {error}")
    print(table(run))
    counted = run.found.get("texts", [])
    sys.exit(not counted or any(row["same"] < row["texts"] for row in counted) or "failed" in run.found)


def made_up(source: str) -> str:
    """A folder with random weights for a configuration."""
    folder, where = tempfile.mkdtemp(), source if Path(source).is_dir() else str(resolve(source))
    AutoTokenizer.from_pretrained(where).save_pretrained(folder)
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(where, initializer_range=0.06))
    model.to(torch.bfloat16).save_pretrained(folder)
    return folder


def floor(run: Run, share: float) -> None:
    """No decoding call is quicker than reading the weights once: their bytes over the measured bandwidth."""
    engine = run.engine("bfloat16")
    weights = sum(parameter.nbytes for parameter in engine.network.model.parameters())
    source = torch.randn((2**31 if run.cuda else 2**26) // 4, device=run.device)
    copy, seconds = torch.empty_like(source), []
    for _ in range(8):
        start = run.wait()
        copy.copy_(source)
        seconds.append(run.wait() - start)
    bandwidth = 2 * source.nbytes / statistics.median(seconds[2:])
    name = torch.cuda.get_device_name(run.device) if run.cuda else "cpu"
    run.note(
        "machine", name=name, torch=torch.__version__, transformers=transformers.__version__, weights=weights,
        bytes_per_second=bandwidth, floor_ms=1000 * weights / bandwidth, random=run.args.random,
    )  # fmt: skip


def bits(run: Run, share: float) -> None:
    """Logits of right tokens among wrong branches against those of plain decoding, bit for bit; then with no graph."""
    for dtype in ("bfloat16", "float32"):
        network = run.engine(dtype).network
        vocab, tokens = network.model.config.vocab_size, np.arange(60)
        for prompt in (40, 500, 1010)[: None if run.cuda else 1]:  # texts that cross borders of extents
            if not run.left(share):
                return
            draws = np.random.default_rng(prompt)
            tokens, length = draws.integers(3, vocab, prompt + 48), prompt + 24
            plain = alone(network, tokens, prompt)
            rows = different = 0
            worst = 0.0
            kv_cache, canvas = network.new_kv_cache(), continuation(tokens[:prompt], 49)
            while len(canvas.decided_prefix) < length:
                inputs, trunk = scattered(canvas, tokens, draws, vocab)
                got = network.forward([inputs], [kv_cache])[0].logits[trunk].float().cpu()
                gaps = (got - plain[canvas.num_decided : canvas.num_decided + len(trunk)]).abs().amax(-1)
                rows, different, worst = (
                    rows + len(gaps), different + int((gaps > 0).sum()), max(worst, float(gaps.max()))
                )  # fmt: skip
                canvas = canvas.fill(tokens[len(canvas.decided_prefix) :][: int(draws.integers(1, len(trunk) + 1))])
            run.note("bits", dtype=dtype, prompt=prompt, rows=rows, different=different, worst_gap=worst)
        if run.cuda and network.fixed_shape_runner.use_cuda_graphs:
            network.fixed_shape_runner.use_cuda_graphs = False
            same = torch.equal(alone(network, tokens[:60], 40), alone_again(network, tokens[:60], 40))
            run.note("graph_bits", dtype=dtype, same_as_without=same)


def alone(network, tokens, prompt: int) -> torch.Tensor:
    """Logits after the prompt and after each token behind it, one token a call."""
    kv_cache, canvas, rows = network.new_kv_cache(), continuation(tokens[:prompt], len(tokens) - prompt + 1), []
    for token in [*tokens[prompt:], None]:
        rows.append(network.forward([ForwardInputs(canvas)], [kv_cache])[0].logits[0].float().cpu())
        canvas = canvas if token is None else canvas.fill(np.array([token]))
    return torch.stack(rows)


def alone_again(network, tokens, prompt: int) -> torch.Tensor:
    """The same from graphs."""
    network.fixed_shape_runner.use_cuda_graphs = True
    return alone(network, tokens, prompt)


def scattered(canvas, tokens, draws, vocab: int) -> tuple[ForwardInputs, list[int]]:
    """A tree of 16 nodes, some of which say what follows, and the rows of logits behind those."""
    nodes, parents, trunk, at = [], [], [-1], len(canvas.decided_prefix)
    while len(nodes) < 16:
        if draws.random() < 0.5:
            parents.append(trunk[-1])
            nodes.append(int(tokens[at + len(trunk) - 1]))
            trunk.append(len(nodes) - 1)
        else:
            parents.append(int(draws.integers(-1, len(nodes))) if nodes else -1)
            nodes.append(int(draws.integers(3, vocab)))
    return ForwardInputs(canvas, tuple(nodes), tuple(parents)), [node + 1 for node in trunk]


def names(engine) -> list[str]:
    """Installed methods for causal models that need no model of their own, and two together."""
    found = []
    for name in [*(name for name in available_methods() if name not in ("plain", "assd")), "jacobi+lookup"]:
        try:
            if not any(one.draft_models for one in make_methods(name, engine.decoder.options)):
                found.append(name)
        except ValueError as error:
            print(f"{name} is left out: {error}")
    return found


def texts(run: Run, share: float) -> None:
    """Texts of every method, trees as large as they get, against those of plain decoding."""
    jobs = [(dtype, *distribution) for distribution in SETTINGS for dtype in ("bfloat16", "float32")]
    for number, (dtype, temperature, seed) in enumerate(jobs):
        end = share - (len(jobs) - number - 1) * 0.06
        if not run.left(end):
            continue
        engine = run.engine(dtype, adaptive=False)
        settings = {"max_new_tokens": min(run.args.tokens, 64), "temperature": temperature, "seed": seed}
        count = {name: [0, 0, 0, 0] for name in names(engine)}  # same, texts, tokens, calls
        flips = []
        for prompt in run.prompts:
            if not run.left(end):
                break
            plain = engine.generate(prompt, **settings)
            for name, counted in count.items():
                if not run.left(end):
                    break
                made = engine.generate(prompt, method=name, **settings)
                counted[1:] = np.add(counted[1:], [1, len(made.tokens), made.statistics.calls]).tolist()
                if made.tokens == plain.tokens:
                    counted[0] += 1
                else:
                    flips.append({"method": name, "prompt": prompt[:40], **flip(engine, plain, made)})
        for name, (same, written, tokens, calls) in count.items():
            if written:
                run.note(
                    "texts", dtype=dtype, temperature=temperature, method=name, same=same, texts=written,
                    tokens_per_call=tokens / calls, flips=[each for each in flips if each["method"] == name],
                )  # fmt: skip


def flip(engine, plain, other) -> dict:
    """Where two texts part, and how far apart the two tokens' logits are under plain decoding."""
    at = next(i for i, (a, b) in enumerate(zip(plain.tokens, other.tokens, strict=False)) if a != b)
    canvas = continuation(engine.encode(plain.prompt), at + 1)
    row = alone(engine.network, np.array([*canvas.decided_prefix, *plain.tokens[:at]]), len(canvas.decided_prefix))[-1]
    return {"at": at, "gap": abs(float(row[plain.tokens[at]] - row[other.tokens[at]]))}


def speed(run: Run, share: float) -> None:
    """Seconds of whole texts, prefill included, ours and Transformers' in turns; all write the same count of tokens."""
    engine = run.engine("bfloat16")
    writers = {name: ours(run, engine, name) for name in ["plain", *names(engine)]}
    for attention in ("sdpa", "eager"):
        writers[f"generate/{attention}"] = theirs(run, attention)
    for name, write in list(writers.items()):  # graphs, kernels, what calls cost
        if not run.left(share * 0.6):
            del writers[name]
        else:
            write(run.prompts[0], 0.0, 8)
            write(run.prompts[-1], 0.8, 8)
    if run.cuda:
        torch.cuda.reset_peak_memory_stats(run.device)
    for temperature, _ in SETTINGS:
        seconds = {name: [] for name in writers}
        for number, prompt in enumerate(run.prompts):
            if not run.left(share * (0.7 if temperature == 0 else 1)):
                break
            for name in list(writers)[:: 1 if number % 2 else -1]:
                if name.startswith("generate") and (temperature or number >= 4):
                    continue  # slow, and steady
                seconds[name].append(writers[name](prompt, temperature))
        for name, each in seconds.items():
            if each:
                ratio = statistics.median(p / s for p, s in zip(seconds["plain"], each, strict=False))
                rate = run.args.tokens * len(each) / sum(each)
                run.note(
                    "speed", method=name, temperature=temperature, texts=len(each), tokens_per_second=rate,
                    ms_per_token=1000 / rate, against_plain=ratio,
                )  # fmt: skip
    if run.cuda:
        run.note("memory", peak_bytes=torch.cuda.max_memory_allocated(run.device))


def ours(run: Run, engine, method: str):
    def write(prompt: str, temperature: float, tokens: int = run.args.tokens) -> float:
        engine.decoder.prefix_cache.clear()
        start, settings = run.wait(), {"temperature": temperature, "seed": 1, "ignore_eos": True}
        made = engine.generate(prompt, method=method, max_new_tokens=tokens, **settings)
        assert len(made.tokens) == tokens
        return run.wait() - start

    return write


def theirs(run: Run, attention: str, **more):
    model: Any = load_model(run.folder, Path(run.folder), torch.bfloat16, weights="bf16")
    model.set_attn_implementation(attention)
    model, tokenizer = model.to(run.device).eval(), AutoTokenizer.from_pretrained(run.folder)

    def write(prompt: str, temperature: float, tokens: int = run.args.tokens) -> float:
        start, distribution = run.wait(), {"do_sample": temperature > 0}
        distribution |= {"temperature": temperature, "top_k": 0} if temperature else {}
        given = tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], add_generation_prompt=True, return_tensors="pt", return_dict=True
        ).to(run.device)
        limits = {"max_new_tokens": tokens, "min_new_tokens": tokens}
        model.generate(**given, **limits, **distribution, **more)
        return run.wait() - start

    return write


def graphs(run: Run, share: float) -> None:
    """A decoding call by graph and without, early and late in a text, against the floor."""
    network = run.engine("bfloat16").network
    draws = np.random.default_rng(0)
    for length in (64, 600, 2000)[: None if run.cuda else 1]:
        for captured in (True, False) if run.cuda else (False,):
            if not run.left(share):
                return
            network.fixed_shape_runner.use_cuda_graphs = captured
            canvas = continuation(draws.integers(3, network.model.config.vocab_size, length), 200)
            kv_cache, seconds = network.new_kv_cache(), []
            for nodes in [0, 16] * (20 if run.cuda else 3):
                inputs = ForwardInputs(canvas, tuple(range(5, 5 + nodes)), tuple(range(-1, nodes - 1)))
                seconds.append(network.forward([inputs], [kv_cache])[0].seconds)
            one, many = (1000 * statistics.median(seconds[start::2][1:]) for start in (0, 1))
            run.note("calls", length=length, graph=captured, ms_of_1_row=one, ms_of_17_rows=many)


def compiled(run: Run, share: float) -> None:
    """Transformers' own fast way: a static cache and torch.compile. It takes long to warm up."""
    if not run.cuda or not run.left(share - 0.07):
        return
    write = theirs(run, "sdpa", cache_implementation="static")
    write(run.prompts[0], 0.0)
    seconds = []
    for prompt in run.prompts:
        if run.left(share):
            seconds.append(write(prompt, 0.0))
    if seconds[1:]:  # the first may compile still
        run.note("speed", method="generate/static+compile", temperature=0.0, texts=len(seconds) - 1,
                 tokens_per_second=run.args.tokens / statistics.median(seconds[1:]),
                 ms_per_token=1000 * statistics.median(seconds[1:]) / run.args.tokens, against_plain=None)  # fmt: skip


def table(run: Run) -> str:
    lines, found = ["", "=" * 100], run.found
    for one in found.get("machine", []):
        lines.append(
            f"{one['name']}, torch {one['torch']}, transformers {one['transformers']}"
            f"{', RANDOM WEIGHTS' * one['random']}: {one['weights'] / 1e6:.0f} MB of weights"
            f" at {one['bytes_per_second'] / 1e12:.2f} TB/s: floor "
            f"{one['floor_ms']:.3f} ms a call"
        )
    for one in found.get("bits", []):
        lines.append(
            f"bits   {one['dtype']:9} from {one['prompt']:5}: {one['different']} of {one['rows']} rows differ,"
            f" worst gap {one['worst_gap']:.3g}"
        )
    for one in found.get("texts", []):
        gaps = ", ".join(f"{each['gap']:.3g}" for each in one["flips"][:5])
        lines.append(
            f"texts  {one['dtype']:9} T={one['temperature']:<4} {one['method']:20} {one['same']}/{one['texts']} same,"
            f" {one['tokens_per_call']:.2f} tokens a call{'  gaps ' + gaps if gaps else ''}"
        )
    for one in found.get("calls", []):
        how = "graph" if one["graph"] else "no graph"
        lines.append(
            f"calls  {how:8} at {one['length']:5}: {one['ms_of_1_row']:.3f} ms plain,"
            f" {one['ms_of_17_rows']:.3f} ms with 16 nodes"
        )
    floor_ms = found["machine"][0]["floor_ms"] if "machine" in found else float("nan")
    for one in found.get("speed", []):
        against = "" if one["against_plain"] is None else f", {one['against_plain']:.2f} × plain"
        lines.append(
            f"speed  T={one['temperature']:<4} {one['method']:24} {one['tokens_per_second']:8.1f} tokens/s"
            f" {one['ms_per_token']:7.3f} ms a token ({one['ms_per_token'] / floor_ms:.1f} × floor){against}"
        )
    lines += [f"peak memory {one['peak_bytes'] / 1e9:.2f} GB" for one in found.get("memory", [])]
    lines += [f"FAILED {one['which']}: {one['error']}" for one in found.get("failed", [])]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
