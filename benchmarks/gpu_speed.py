"""The parts of gpu.py that measure time: calls against the floor, batches and methods against Transformers."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers import AutoTokenizer

from saltus.core.canvas import continuation
from saltus.core.forward import ForwardInputs
from saltus.engine.checkpoints import load_model
from saltus.methods import AUTO, available_methods
from saltus.models.memory_use import kv_bytes_per_token

SETTINGS = ((0.0, 0), (0.8, 1))  # temperature, seed
CALLS = ((1, 0), (1, 8), (1, 16), (1, 31), (4, 0), (4, 16), (16, 0), (16, 7), (16, 16))  # texts, nodes of each
Write = Callable[..., float]
"""Prompts, temperature and number of tokens → seconds until all texts are written."""


def floor(run: Any, share: float) -> None:
    """Measure what bounds a call from below: bytes and operations a second, by a copy and by a matrix product."""
    engine = run.engine("bfloat16")
    weights = sum(parameter.nbytes for parameter in engine.network.model.parameters())
    source = torch.randn((2**31 if run.cuda else 2**26) // 4, device=run.device)
    copy, size = torch.empty_like(source), 8192 if run.cuda else 512
    matrix = torch.randn(size, size, device=run.device, dtype=torch.bfloat16)

    def seconds(operation: Callable[[], Any]) -> float:
        found = []
        for _ in range(8):
            start = run.wait()
            operation()
            found.append(run.wait() - start)
        return statistics.median(found[2:])

    bandwidth = 2 * source.nbytes / seconds(lambda: copy.copy_(source))
    name = torch.cuda.get_device_name(run.device) if run.cuda else "cpu"
    run.note(
        "machine", name=name, torch=torch.__version__, transformers=transformers.__version__, weights=weights,
        bytes_per_second=bandwidth, operations_per_second=2 * size**3 / seconds(lambda: matrix @ matrix),
        random=run.args.random,
    )  # fmt: skip


def roofline_ms(run: Any, network: Any, texts: int, length: int, nodes: int) -> float:
    """No call is quicker than reading weights and caches once, and than the products of its rows with the weights."""
    machine = run.found["machine"][0]
    num_bytes = machine["weights"] + texts * length * kv_bytes_per_token(network)
    operations = machine["weights"] * texts * (1 + nodes)  # two for each weight, which has two bytes
    return 1000 * max(num_bytes / machine["bytes_per_second"], operations / machine["operations_per_second"])


def calls(run: Any, share: float) -> None:
    """Calls of several texts and trees, early and late in a text, and without graphs, against the roofline."""
    network, draws = run.engine("bfloat16").network, np.random.default_rng(0)
    runner, vocab = network.fixed_shape_runner, network.model.config.vocab_size
    jobs = [(length, texts, nodes, True) for length in (200, 1000, 3000, 8000) for texts, nodes in CALLS]
    jobs += [(200, texts, nodes, False) for texts, nodes in CALLS[::4]]
    for length, texts, nodes, captured in (
        jobs if run.cuda else [(40, texts, nodes, False) for texts, nodes in CALLS[:5]]
    ):
        if not run.left(share):
            return
        runner.use_cuda_graphs = captured
        canvases = [continuation(draws.integers(3, vocab, length), 200) for _ in range(texts)]
        batch = [ForwardInputs(canvas, tuple(range(5, 5 + nodes)), tuple(range(-1, nodes - 1))) for canvas in canvases]
        caches, seconds = [network.new_kv_cache() for _ in batch], []
        for _ in range(22 if run.cuda else 3):
            seconds.append(network.forward(batch, caches)[0].seconds)
        run.note(
            "calls", length=length, texts=texts, nodes=nodes, graph=captured,
            ms=1000 * statistics.median(seconds[2:]), roofline_ms=roofline_ms(run, network, texts, length, nodes),
        )  # fmt: skip
    runner.use_cuda_graphs = run.cuda


def method_names(engine: Any) -> list[str]:
    """Installed methods for causal models whose draft models come with the package, some pairs, and `auto`."""
    single = [name for name in available_methods() if name not in ("plain", "assd")]
    found = []
    for name in [*single, "jacobi+lookup", "ptp+lookup", "mtpc+lookup", AUTO]:
        try:
            engine.decoder.setup(name)
        except ValueError as error:
            print(f"{name} is left out: {error}")
        else:
            found.append(name)
    return found


def batches(run: Any, share: float) -> None:
    """Tokens a second of 1, 4 and 16 texts at once, greedy, prefill included, ours and Transformers' in turns."""
    engine = run.engine("bfloat16")
    writers = {"plain": ours(run, engine, "plain"), "lookup": ours(run, engine, "lookup")}
    writers["generate/sdpa"] = theirs(run, "sdpa")
    for size in (1, 4, 16) if run.cuda else (1, 2):
        prompts = (run.prompts * size)[:size]
        seconds: dict[str, list[float]] = {name: [] for name in writers}
        for round_ in range(4 if run.cuda else 2):  # the first one captures graphs and loads kernels
            for name, write in writers.items():
                if run.left(share):
                    spent = write(prompts, 0.0)
                    seconds[name] += [spent] if round_ else []
        for name, each in seconds.items():
            if each:
                rate = size * run.args.tokens / statistics.median(each)
                run.note("batches", method=name, texts=size, tokens_per_second=rate, rounds=len(each))


def methods(run: Any, share: float) -> None:
    """Seconds of single texts, prefill included, ours and Transformers' in turns; all write as many tokens."""
    engine = run.engine("bfloat16")
    writers = {name: ours(run, engine, name) for name in ["plain", *method_names(engine)]}
    for attention in ("sdpa", "eager"):
        writers[f"generate/{attention}"] = theirs(run, attention)
    for name, write in list(writers.items()):  # graphs, kernels, what calls cost
        if not run.left(share * 0.9):
            del writers[name]
            continue
        try:
            write(run.prompts[:1], 0.0, 8)
            write(run.prompts[-1:], 0.8, 8)
        except Exception as error:  # the other methods are worth having
            run.fail(f"speed of {name}", error)
            del writers[name]
    if run.cuda:
        torch.cuda.reset_peak_memory_stats(run.device)
    for temperature, _ in SETTINGS:
        seconds: dict[str, list[float]] = {name: [] for name in writers}
        for number, prompt in enumerate(run.prompts):
            if not run.left(share * (0.95 if temperature == 0 else 1)):
                break
            for name in list(writers)[:: 1 if number % 2 else -1]:
                if name.startswith("generate") and (temperature or number >= 4):
                    continue  # slow, and steady
                seconds[name].append(writers[name]([prompt], temperature))
        for name, each in seconds.items():
            if each:
                ratio = statistics.median(p / s for p, s in zip(seconds["plain"], each, strict=False))
                note_speed(run, name, temperature, each, ratio)
    if run.cuda:
        run.note("memory", peak_bytes=torch.cuda.max_memory_allocated(run.device))


def compiled(run: Any, share: float) -> None:
    """Transformers' own fast way: a static cache and torch.compile. It takes long to warm up."""
    if not run.cuda or not run.left(share - 0.07):
        return
    write, seconds = theirs(run, "sdpa", cache_implementation="static"), []
    write(run.prompts[:1], 0.0)
    for prompt in run.prompts:
        if run.left(share):
            seconds.append(write([prompt], 0.0))
    if seconds[1:]:  # the first may compile still
        note_speed(run, "generate/static+compile", 0.0, seconds[1:], None)


def note_speed(run: Any, method: str, temperature: float, seconds: Sequence[float], ratio: float | None) -> None:
    rate = run.args.tokens * len(seconds) / sum(seconds)
    run.note(
        "methods", method=method, temperature=temperature, texts=len(seconds), tokens_per_second=rate,
        ms_per_token=1000 / rate, against_plain=ratio,
    )  # fmt: skip


def ours(run: Any, engine: Any, method: str) -> Write:
    def write(prompts: list[str], temperature: float, tokens: int = run.args.tokens) -> float:
        engine.decoder.prefix_tree.clear()
        start, settings = run.wait(), {"temperature": temperature, "seed": 1, "ignore_eos": True}
        made = engine.generate(prompts, method=method, max_new_tokens=tokens, **settings)
        assert all(len(one.tokens) == tokens for one in made)
        return run.wait() - start

    return write


def theirs(run: Any, attention: str, **more: Any) -> Write:
    model: Any = load_model(run.folder, Path(run.folder), torch.bfloat16, weights="bf16")
    model.set_attn_implementation(attention)
    model = model.to(run.device).eval()
    tokenizer = AutoTokenizer.from_pretrained(run.folder, padding_side="left", trust_remote_code=False)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token

    def write(prompts: list[str], temperature: float, tokens: int = run.args.tokens) -> float:
        start, distribution = run.wait(), {"do_sample": temperature > 0}
        distribution |= {"temperature": temperature, "top_k": 0} if temperature else {}
        given = tokenizer.apply_chat_template(
            [[{"role": "user", "content": prompt}] for prompt in prompts],
            add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True,
        ).to(run.device)  # fmt: skip
        limits = {"max_new_tokens": tokens, "min_new_tokens": tokens}
        model.generate(**given, **limits, **distribution, **more)
        return run.wait() - start

    return write


def speed_lines(run: Any) -> list[str]:
    """The lines of the last table."""
    lines, found = [], run.found
    for one in found.get("machine", []):
        lines.append(
            f"{one['name']}, torch {one['torch']}, transformers {one['transformers']}"
            f"{', RANDOM WEIGHTS' * one['random']}: {one['weights'] / 1e6:.0f} MB of weights"
            f" at {one['bytes_per_second'] / 1e12:.2f} TB/s, {one['operations_per_second'] / 1e12:.1f} Tflop/s"
        )
    for one in found.get("calls", []):
        lines.append(
            f"calls  {'graph' if one['graph'] else 'no graph':8} at {one['length']:5}: {one['texts']:2} texts of"
            f" {one['nodes']:2} nodes {one['ms']:8.3f} ms, {one['ms'] / one['roofline_ms']:6.1f} × roofline"
        )
    for one in found.get("batches", []):
        lines.append(f"batch  {one['texts']:2} texts {one['method']:24} {one['tokens_per_second']:8.1f} tokens/s")
    for one in found.get("methods", []):
        against = "" if one["against_plain"] is None else f", {one['against_plain']:.2f} × plain"
        lines.append(
            f"speed  T={one['temperature']:<4} {one['method']:24} {one['tokens_per_second']:8.1f} tokens/s"
            f" {one['ms_per_token']:7.3f} ms a token{against}"
        )
    return lines + [f"peak memory {one['peak_bytes'] / 1e9:.2f} GB" for one in found.get("memory", [])]
