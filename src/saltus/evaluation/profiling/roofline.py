"""The roofline of a call: what it must read and compute, against the machine's bandwidth and arithmetic."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from saltus.evaluation.profiling.call_timing import CallShape, Clock
from saltus.kernels import native
from saltus.kernels.batch_invariant_ops import linear
from saltus.loading.huge_pages import HugePages
from saltus.models.architectures import describe_decoder
from saltus.models.decoder_description import mixers_of
from saltus.models.memory_use import layer_sizes
from saltus.models.mixer_description import LatentAttention
from saltus.models.packed_experts import expert_stacks

KNEE_COST_RATIO = 1.25  # the measured knee: a call costs so many times a call of one node
SMALLEST_PRODUCT = 256  # rows, where torch's product is tried first
LONG_PRODUCT_SECONDS = 0.05  # a product of twice the rows takes eight times as long, or more


@dataclass(frozen=True)
class ResourceDemand:
    """Bytes and operations of a call. Rows are thought to choose their experts evenly and independently."""

    weight_bytes: int  # read once a call, but for experts that no row chooses; tied embeddings once
    row_bytes: int  # read for each row: its embedding, if it is not tied
    token_bytes: int  # keys and values of one token of a text
    row_flops: int  # of the products with weights, for each row
    pair_flops: int  # of attention, for each row and token that it sees
    expert_bytes: int = 0  # of `weight_bytes`
    chosen_share: float = 1.0  # of the experts, by a row

    def bytes_read(self, call_shape: CallShape) -> int:
        rows, texts = call_shape.batch * call_shape.nodes, call_shape.batch * call_shape.length * self.token_bytes
        unread = round(self.expert_bytes * (1 - self.chosen_share) ** rows)
        return self.weight_bytes - unread + texts + rows * self.row_bytes

    def flops(self, call_shape: CallShape) -> int:
        return call_shape.batch * call_shape.nodes * (self.row_flops + call_shape.length * self.pair_flops)


def count_demand(model: Any) -> ResourceDemand:
    """Counted from the parameters and the configuration of a causal model of Transformers."""
    config, out = model.config.get_text_config(), model.get_output_embeddings().weight
    tables = {table.weight for table in model.modules() if isinstance(table, nn.Embedding)}
    looked_up = {table for table in tables if table is not out}
    products = [weight for weight in model.parameters() if weight.ndim >= 2 and weight not in tables]
    stacks = [getattr(module, name) for module in model.modules() for name in expert_stacks(module)]
    chosen = getattr(config, "num_experts_per_tok", None)
    share = min(1.0, chosen / len(stacks[0])) if stacks and chosen else 1.0
    multiplied = sum(weight.numel() for weight in products) + (out.numel() if out in tables else 0)
    multiplied -= round((1 - share) * sum(stack.numel() for stack in stacks))
    kept, multiplied_by = _attention_numbers(model, config)
    size = out.element_size()
    return ResourceDemand(
        weight_bytes=sum(weight.nbytes for weight in model.parameters() if weight not in looked_up),
        row_bytes=sum(table.shape[1] * table.element_size() for table in looked_up),
        token_bytes=kept * size,
        row_flops=2 * multiplied,
        pair_flops=2 * multiplied_by,
        expert_bytes=sum(stack.nbytes for stack in stacks),
        chosen_share=share,
    )


def _attention_numbers(model: Any, config: Any) -> tuple[int, int]:
    """What all layers keep of a token, and products of a row with a token: by each head a key's and a value's."""
    description = describe_decoder(model)
    layers = [] if description is None else description.layers
    latent = [each for layer in layers for each, _ in mixers_of(layer) if isinstance(each, LatentAttention)]
    if latent:
        indexers = [each.indexer for each in latent if each.indexer is not None]
        kept = sum(each.latent_dim + each.rope_dim for each in latent if each.shares is None) + sum(
            each.dim for each in indexers
        )
        scored = sum(each.heads * each.dim for each in indexers)
        return kept, scored + sum(each.heads * (2 * each.latent_dim + each.rope_dim) for each in latent)
    sizes = layer_sizes(config)
    kept = 2 * sum(kv_heads * dim for kv_heads, dim in sizes)
    return kept, 2 * config.num_attention_heads * sum(dim for _, dim in sizes)


@dataclass(frozen=True)
class MachineSpeed:
    """Measured bandwidth and arithmetic of a machine, the best of several ways."""

    bytes_per_second: float
    flops_per_second: float
    measured: Mapping[str, float]  # by way of measurement, in the same units
    threads: int


def measure_machine_speed(
    dtype: torch.dtype,
    device: torch.device,
    megabytes: int | None = None,
    size: int | None = None,
    repeats: int = 5,
    clock: Clock = time.perf_counter,
    integers: bool = False,
) -> MachineSpeed:
    """Stream over buffers far larger than the caches, and multiply large matrices, with all of torch's threads.

    The peak is that of torch or of our own kernel, whichever is higher: the two differ. With `integers`
    products of 8-bit integers count, too: for models that multiply activations of 8 bits. Torch's products begin small,
    since it has no fast ones of some types on some processors: there a large one takes minutes.
    """
    here = device.type == "cpu"
    count = (megabytes or (512 if here else _buffer_megabytes(device))) * 2**20 // 4
    size = size or (2048 if here else 8192)
    source, target = torch.ones(count, device=device), torch.zeros(count, device=device)
    a, b = (torch.full((size, size), 0.5, dtype=dtype, device=device) for _ in range(2))

    def seconds(work: Callable[[], Any]) -> float:
        return min(_time_once(work, device, clock) for _ in range(repeats + 1))

    def product_rate(multiply: Callable[[torch.Tensor, torch.Tensor], Any], x: torch.Tensor, y: torch.Tensor) -> float:
        taken, best, rows = 0.0, 0.0, 0
        while rows < size and taken < LONG_PRODUCT_SECONDS:
            rows = min(max(2 * rows, SMALLEST_PRODUCT), size)
            taken = seconds(partial(multiply, x[:rows, :rows].contiguous(), y[:rows, :rows].contiguous()))
            best = max(best, 2 * rows**3 / taken)
        return best

    measured = {
        "sum_bytes_per_second": source.nbytes / seconds(source.sum),
        "copy_bytes_per_second": 2 * source.nbytes / seconds(lambda: target.copy_(source)),
        "product_flops_per_second": product_rate(torch.matmul, a, b),
    }
    if native.kernel("linear", dtype, device) is not None:
        flops = 2 * len(a[:128]) * size**2
        measured["kernel_flops_per_second"] = flops / seconds(lambda: _multiply_by_kernel(a[:128], b))
        weight = HugePages().zeros(source.nbytes).view(dtype).view(-1, size).fill_(1)  # as weights of models lie
        measured["kernel_bytes_per_second"] = weight.nbytes / seconds(lambda: _multiply_by_kernel(a[:1], weight))
    if integers and here:
        x, y = (torch.ones(size, size, dtype=torch.int8) for _ in range(2))
        measured["integer_product_flops_per_second"] = product_rate(torch._int_mm, x, y)
    best = [
        max(rate for name, rate in measured.items() if name.endswith(kind))
        for kind in ("_bytes_per_second", "_flops_per_second")
    ]
    return MachineSpeed(best[0], best[1], measured, torch.get_num_threads())


def _buffer_megabytes(device: torch.device) -> int:
    """Of one of two buffers on a GPU, in an eighth of its free memory; caches have 130 MB at most."""
    free, _ = torch.cuda.mem_get_info(device)
    return max(1, min(4096, free // 2**23))


def _multiply_by_kernel(rows: torch.Tensor, weight: torch.Tensor) -> None:
    with native.kernel_threads_only():
        linear(rows, [weight], [None])


def _time_once(work: Callable[[], Any], device: torch.device, clock: Clock) -> float:
    if device.type != "cuda":
        started = clock()
        work()
        return clock() - started
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    work()
    end.record()
    torch.cuda.synchronize(device)
    return begin.elapsed_time(end) / 1000


def lower_bound(demand: ResourceDemand, speed: MachineSpeed, call_shape: CallShape) -> dict[str, Any]:
    """The least milliseconds of a call, and what bounds it (Williams et al. 2009)."""
    kv_cache = 1000 * demand.bytes_read(call_shape) / speed.bytes_per_second
    compute = 1000 * demand.flops(call_shape) / speed.flops_per_second
    return {
        "bytes": demand.bytes_read(call_shape),
        "flops": demand.flops(call_shape),
        "memory_ms": kv_cache,
        "compute_ms": compute,
        "floor_ms": max(kv_cache, compute),
        "bound_by": "memory" if kv_cache >= compute else "compute",
    }


def predicted_knee(demand: ResourceDemand, speed: MachineSpeed, length: int) -> float:
    """The number of nodes from which on a call is compute-bound; it reads all experts then."""
    each = demand.flops(CallShape(1, length)) / speed.flops_per_second - demand.row_bytes / speed.bytes_per_second
    read = demand.weight_bytes + length * demand.token_bytes
    return read / speed.bytes_per_second / each if each > 0 else float("inf")


def measured_knee(nodes: Sequence[int], times: Sequence[float]) -> float | None:
    """The nodes at which a call costs KNEE_COST_RATIO times a call of one node, linear between measured ones.

    None if no call costs that much, or a call of one node was not measured.
    """
    points = sorted(zip(nodes, times, strict=True))
    if not points or points[0][0] != 1:
        return None
    dear = KNEE_COST_RATIO * points[0][1]
    for (n, t), (more, slower) in pairwise(points):
        if slower >= dear:
            return n + (more - n) * (dear - t) / (slower - t)
    return None
