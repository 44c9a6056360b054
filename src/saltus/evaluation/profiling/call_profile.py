"""Split the time of a network call: embedding, attention, linear layers, unembedding, the rest.

torch.profiler is used on CUDA only: on CPU it does not see our kernels, which are no operators of PyTorch."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import wraps
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function
from transformers import AttentionInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from saltus.evaluation.profiling.call_timing import (
    PartTimer,
    WrapFunction,
    quartiles,
    synthetic_inputs,
    temporarily_replaced,
)
from saltus.kernels.native import structs
from saltus.models.cpu import attention
from saltus.models.cpu.native_decoder import NativeDecoder

EMBEDDING, ATTENTION, LINEAR, UNEMBEDDING, NORMS, REST = PARTS = (
    "embedding", "attention", "linear layers", "unembedding", "norms and rotary", "rest",
)  # fmt: skip
PARTS_OF_KERNEL = {
    "embedding": EMBEDDING, "attention": ATTENTION, "linear": LINEAR, "unembedding": UNEMBEDDING, "norms": NORMS,
}  # fmt: skip
LABEL_PREFIX = "saltus: "


def profile_call(
    network: Any,
    num_nodes: int,
    text_length: int,
    vocab_size: int,
    rounds: int = 7,
    synchronize: Callable[[], Any] = lambda: None,
) -> dict[str, Any]:
    """Milliseconds of a call by part, of the round whose whole is the median; `rest` is what no part accounts for.

    Fused kernels (norms, SiLU and sums of the native decoder) count as linear layers. `overhead` is how much the
    measurement slows the call. On CUDA the parts are kernel times without graphs, and the whole is a call with graphs:
    `rest` may then be negative.
    """
    kv_cache, inputs = network.new_kv_cache(), synthetic_inputs(num_nodes, text_length, vocab_size)

    def call() -> float:
        synchronize()
        started = time.perf_counter()
        network.forward([inputs], [kv_cache])
        synchronize()
        return time.perf_counter() - started

    cuda = network.model.device.type == "cuda"
    watched = _measure_by_profiler if cuda else _measure_by_timer
    call()  # reads the text
    call()
    watched(network, call)
    profiled, alone = [], []
    for _ in range(rounds):
        alone.append(call())
        profiled.append(watched(network, call))
    unprofiled = quartiles(alone)[1]
    whole, parts = sorted(profiled, key=lambda each: each[0])[(len(profiled) - 1) // 2]
    overhead = None if cuda else whole / unprofiled - 1
    whole = unprofiled if cuda else whole
    ms = {part: 1000 * parts.get(part, 0.0) for part in PARTS[:-1]}
    ms[REST] = 1000 * (whole - sum(parts.values()))
    return {
        "nodes": num_nodes, "length": text_length, "ms": 1000 * whole, "unprofiled_ms": 1000 * unprofiled,
        "overhead": overhead, "parts": ms,
    }  # fmt: skip


def _measure_by_timer(network: Any, call: Callable[[], float]) -> tuple[float, dict[str, float]]:
    decoder = network.native_decoder
    if isinstance(decoder, NativeDecoder):
        decoder.seconds = timed = structs.SecondsOfParts()
        try:
            whole = call()
        finally:
            decoder.seconds = None
        return whole, {part: getattr(timed, name) for name, part in PARTS_OF_KERNEL.items()}
    watch = PartTimer()
    with instrumented(network, watch.time_function):
        whole = call()
    return whole, watch.seconds


def _measure_by_profiler(network: Any, call: Callable[[], float]) -> tuple[float, dict[str, float]]:
    """Seconds of the kernels that each part launched (CUDA)."""
    fixed, activities = network.fixed_shape_runner, [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    with ExitStack() as stack:
        if fixed is not None:
            stack.enter_context(temporarily_replaced(fixed, "use_cuda_graphs", False))
        stack.enter_context(instrumented(network, _with_record_function))
        with profile(activities=activities) as profiled:
            whole = call()
    events = [event for event in profiled.key_averages() if event.key.startswith(LABEL_PREFIX)]
    seconds: dict[str, float] = {}
    for event in events:  # a label has an event of the processor and one of the device
        part = event.key.removeprefix(LABEL_PREFIX)
        seconds[part] = max(seconds.get(part, 0.0), event.device_time_total / 1e6)
    return whole, seconds


def _with_record_function(part: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def run(*args: Any, **settings: Any) -> Any:
        with record_function(LABEL_PREFIX + part):
            return function(*args, **settings)

    return run


@contextmanager
def instrumented(network: Any, wrap: WrapFunction) -> Iterator[None]:
    """Within the context, run every part of the calls of a network of modules through `wrap`."""
    with ExitStack() as stack:
        for context in _patch_modules(network.model, wrap):
            stack.enter_context(context)
        yield


def _patch_modules(model: Any, wrap: WrapFunction) -> Iterator[AbstractContextManager[None]]:
    out = model.get_output_embeddings()
    for module in model.modules():
        if (part := _part_of_module(module, out)) is not None:
            yield temporarily_replaced(module, "forward", wrap(part, module.forward))
    yield _patch_attention(wrap)


def _part_of_module(module: Any, output_embeddings: Any) -> str | None:
    """The part that a leaf module belongs to, by its name or weight; else the rest."""
    if module is output_embeddings:
        return UNEMBEDDING
    if any(True for _ in module.children()):
        return None
    name, weight = type(module).__name__.lower(), getattr(module, "weight", None)
    if isinstance(module, torch.nn.Embedding):
        return EMBEDDING
    if "norm" in name or "rotary" in name:
        return NORMS
    return LINEAR if weight is not None and weight.ndim == 2 else None


@contextmanager
def _patch_attention(wrap: WrapFunction) -> Iterator[None]:
    original = ALL_ATTENTION_FUNCTIONS[attention.ATTENTION_NAME]
    AttentionInterface.register(attention.ATTENTION_NAME, wrap(ATTENTION, original))
    try:
        yield
    finally:
        AttentionInterface.register(attention.ATTENTION_NAME, original)
