"""Measure what a call costs by rows and context, against the roofline of this machine.

The roofline is the time to read weights and caches once at the bandwidth of a copy, or that of the call's products at
the speed of a large one, both measured in the same run. Besides: calls without CUDA graphs, how much of a call is the
graph, and its kernels. Random weights are drawn on the device.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch

from gpu.loaded_models import kept, load_network, require_graphs, wait
from gpu.part_results import Part
from gpu.table_lines import markdown_table
from saltus.evaluation.profiling.call_timing import CallShape, synthetic_inputs, temporarily_replaced, time_statistics
from saltus.evaluation.profiling.roofline import count_demand, measure_machine_speed

ROUNDS = 20
BATCH_ROWS = (1, 8, 17)  # of each text, where several share a call
KERNELS_SHOWN = 12

REHEARSAL = {"models": "tiny", "rows": "1,4", "contexts": "40", "batches": "2", "buffer_mb": 16, "product": 128}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(models="smollm2-135m,7B")
    parser.add_argument("--rows", default="1,4,8,16,32", help="of one text: its last token and draft tokens")
    parser.add_argument("--contexts", default="200,1000,3000,8000", help="tokens before them")
    parser.add_argument("--batches", default="16", help="texts at once, at the first context")
    parser.add_argument("--buffer-mb", type=int, help="of the copy that measures bandwidth")
    parser.add_argument("--product", type=int, help="rows and columns of the product that measures arithmetic")


def parts(args: argparse.Namespace) -> list[Part]:
    found = [Part({"what": "machine"}, partial(machine, args))]
    for model in args.models:
        first = {"what": "call", "model": model, "graph": True}
        grid = [(context, rows, 1) for context in args.contexts for rows in args.rows]
        grid += [(args.contexts[0], rows, texts) for texts in args.batches for rows in BATCH_ROWS]
        for context, rows, texts in grid:
            facts = first | {"texts": texts, "context": context, "rows": rows}
            found.append(Part(facts, partial(time_call, args, model, CallShape(rows, context, texts))))
        if args.device.startswith("cuda"):
            for rows in dict.fromkeys((args.rows[0], args.rows[-1])):
                facts = first | {"graph": False, "texts": 1, "context": args.contexts[0], "rows": rows}
                job = partial(time_call, args, model, CallShape(rows, args.contexts[0]), graph=False)
                found.append(Part(facts, job))
            found.append(Part({"what": "graph", "model": model}, partial(time_graph, args, model)))
        found.append(Part({"what": "kernels", "model": model}, partial(kernels, args, model)))
    return found


def machine(args: argparse.Namespace) -> dict[str, Any]:
    """Bytes a second of a copy and operations a second of a product in bfloat16."""
    speed = measure_machine_speed(torch.bfloat16, torch.device(args.device), args.buffer_mb, args.product)
    bandwidth = speed.measured["copy_bytes_per_second"]
    return dataclasses.asdict(dataclasses.replace(speed, bytes_per_second=bandwidth, measured=dict(speed.measured)))


def _network(args: argparse.Namespace, model: str) -> Any:
    return kept(("calls", model), lambda: load_network(args, model))


def time_call(args: argparse.Namespace, model: str, shape: CallShape, graph: bool = True) -> dict[str, Any]:
    """Milliseconds from the inputs of `forward` to its outputs on the host, and what the call reads and computes."""
    network = _network(args, model)
    vocab, runner = network.model.config.vocab_size, network.fixed_shape_runner
    if not graph:
        require_graphs(runner)
    batch = [synthetic_inputs(shape.nodes, shape.length, vocab, text) for text in range(shape.batch)]
    kv_caches = [network.new_kv_cache() for _ in batch]
    with nullcontext() if graph else temporarily_replaced(runner, "use_cuda_graphs", False):
        prefill = network.forward(batch, kv_caches)[0].seconds
        for _ in range(2):  # captures a graph
            network.forward(batch, kv_caches)
        if graph and args.device.startswith("cuda"):
            require_graphs(runner)
        seconds = [network.forward(batch, kv_caches)[0].seconds for _ in range(ROUNDS)]
    demand = count_demand(network.model)
    return {
        **time_statistics(seconds), "first_ms": 1000 * prefill, "path": network.compute_path,
        "bytes": demand.bytes_read(shape), "flops": demand.flops(shape), "weight_bytes": demand.weight_bytes,
    }  # fmt: skip


def _call_of_nine_rows(args: argparse.Namespace, network: Any) -> Callable[[], float]:
    """A call after the first context, whose graph is captured; it returns its seconds."""
    inputs = [synthetic_inputs(9, args.contexts[0], network.model.config.vocab_size)]
    kv_caches = [network.new_kv_cache()]
    for _ in range(3):
        network.forward(inputs, kv_caches)
    return lambda: network.forward(inputs, kv_caches)[0].seconds


def time_graph(args: argparse.Namespace, model: str) -> dict[str, Any]:
    """A call of nine rows: its milliseconds, those of its graph, and the rest, which is the host's."""
    network, replays = _network(args, model), []
    runner, call = network.fixed_shape_runner, _call_of_nine_rows(args, network)
    require_graphs(runner)
    timed = {key: (_Timed(graph, replays), out) for key, (graph, out) in runner.pool.graphs.items()}
    with temporarily_replaced(runner.pool, "graphs", timed):
        calls = [call() for _ in range(ROUNDS)]
    whole, graph = 1000 * statistics.median(calls), statistics.median(replays)
    return {"ms": whole, "graph_ms": graph, "host_ms": whole - graph}


class _Timed:
    """A graph whose replays are timed on the device."""

    def __init__(self, graph: Any, milliseconds: list[float]) -> None:
        self.graph, self.milliseconds = graph, milliseconds

    def replay(self) -> None:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        self.graph.replay()
        end.record()
        end.synchronize()
        self.milliseconds.append(begin.elapsed_time(end))


def kernels(args: argparse.Namespace, model: str) -> dict[str, Any]:
    """The kernels of such a call, by time."""
    from torch.profiler import ProfilerActivity, profile

    call, cuda = _call_of_nine_rows(args, _network(args, model)), args.device.startswith("cuda")
    with profile(activities=[ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * cuda]) as profiled:
        call()
        wait(args.device)
    spent = "self_device_time_total" if cuda else "self_cpu_time_total"
    events = [event for event in profiled.key_averages() if getattr(event, spent) > 0]
    if cuda:  # what launches kernels counts their time, too
        events = [event for event in events if str(event.device_type).endswith("CUDA")]
    events.sort(key=lambda event: -getattr(event, spent))
    shown = [(event.key[:80], event.count, round(getattr(event, spent), 1)) for event in events[:KERNELS_SHOWN]]
    return {
        "launched": sum(event.count for event in events), "us": sum(getattr(event, spent) for event in events),
        "longest": shown,
    }  # fmt: skip


def tables(results: list[dict[str, Any]]) -> list[str]:
    """Milliseconds by rows, one row for each context, as time and times the roofline; then graphs and kernels."""
    measured = next((result for result in results if result["what"] == "machine"), None)
    if measured is None:
        return ["The machine was not measured: run the stage again with the same file."]
    bandwidth, speed = measured["bytes_per_second"], measured["flops_per_second"]
    found = [f"A copy moves {bandwidth / 1e12:.2f} TB/s, a product runs at {speed / 1e12:.0f} TFLOP/s."]
    calls = [result for result in results if result["what"] == "call"]
    for model in dict.fromkeys(result["model"] for result in calls):
        ours = [result for result in calls if result["model"] == model]
        rows = sorted({result["rows"] for result in ours})
        cells: dict[tuple[Any, ...], dict[int, str]] = {}
        for result in ours:
            least = 1000 * max(result["bytes"] / bandwidth, result["flops"] / speed)
            key = result["texts"], result["context"], "yes" if result["graph"] else "no"
            cells.setdefault(key, {})[result["rows"]] = f"{result['ms']:.2f} ({result['ms'] / least:.1f})"
        weights = ours[0]["weight_bytes"]
        paths = ", ".join(dict.fromkeys(result["path"] for result in ours))
        found += [
            "", f"{model}, computed by {paths}, {weights / 1e6:,.0f} MB of weights, which take"
            f" {1000 * weights / bandwidth:.3f} ms to read; ms a call (times the roofline):", "",
        ]  # fmt: skip
        lines = [[*key, *(row.get(count, "–") for count in rows)] for key, row in cells.items()]
        found += markdown_table(["texts", "context", "graph", *(f"{count} rows" for count in rows)], lines)
    for result in results:
        if result["what"] == "graph":
            found += [
                "", f"{result['model']}: a call of 9 rows takes {result['ms']:.2f} ms, its graph"
                f" {result['graph_ms']:.2f} ms, the host {result['host_ms']:.2f} ms.",
            ]  # fmt: skip
        if result["what"] == "kernels":
            found += ["", f"{result['model']}: {result['launched']} kernels, {result['us']:.0f} µs; the longest:", ""]
            found += markdown_table(["kernel", "count", "µs"], result["longest"])
    return found
