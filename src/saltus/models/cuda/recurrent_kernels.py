"""Layers that keep a state on a GPU: convolutions over tokens, the gated delta rule, Mamba, Mamba-2; gates of outputs.

A row's numbers follow from the tokens before it, whichever call computes them. What a row reads of an earlier token is
named by a *source*: a row of the call; the node of an earlier call, whose inputs were kept; or the inputs before the
call, which end a convolution's window. Recurrences run token after token, and one binary applies what was accepted,
reads the text, and follows each path of a tree.
"""

# Triton's own types differ between its releases, and say of `range` in a kernel that nothing comes back.
# pyright: reportGeneralTypeIssues=false, reportCallIssue=false, reportArgumentType=false

from __future__ import annotations

import triton.language as tl
from torch import Tensor

from saltus.models.cuda.launching import device_function, kernel, power_of_two, rounded_product
from saltus.models.cuda.recurrent_inputs import OF_NODES, Jobs
from saltus.models.cuda.row_kernels import summed_columns

CHANNELS = 256  # of a convolution, that a program computes
MAX_STATE = 4096  # numbers of a state, that a program keeps
MAX_SCANNED = 1024  # the same where each number has a decay of its own


@device_function
def _inputs_of(
    x, before, nodes, source, channel, inside, OF_NODES: tl.constexpr, SIZE: tl.constexpr, ROW: tl.constexpr,
    NODE: tl.constexpr,
):  # fmt: skip
    """The inputs of a convolution at a source, in float32."""
    source += 0 * channel  # a mask is a tile
    is_node, is_row = source >= OF_NODES, (source >= 0) & (source < OF_NODES)
    of_row = tl.load(x + source * ROW + channel, mask=inside & is_row, other=0.0).to(tl.float32)
    of_node = tl.load(nodes + (source - OF_NODES) * NODE + channel, mask=inside & is_node, other=0.0).to(tl.float32)
    earlier = tl.load(before + (-1 - source) * SIZE + channel, mask=inside & (source < 0), other=0.0).to(tl.float32)
    return tl.where(is_row, of_row, tl.where(is_node, of_node, earlier))


@kernel()
def _convolve(
    x, before, nodes, sources, weight, bias, out,
    OF_NODES: tl.constexpr, SIZE: tl.constexpr, ROW: tl.constexpr, NODE: tl.constexpr, WIDTH: tl.constexpr,
    BIASED: tl.constexpr, SILU: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out[row] = Σ_i weight[i] · the input WIDTH − 1 − i tokens before the row, perhaps through SiLU."""
    row, channel = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < SIZE
    dtype: tl.constexpr = out.dtype.element_ty
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    if BIASED:
        total = tl.load(bias + channel, mask=inside, other=0.0).to(tl.float32)
    for tap in tl.static_range(0, WIDTH):
        source = row
        if tap < WIDTH - 1:
            source = tl.load(sources + row * (WIDTH - 1) + tap)
        factor = tl.load(weight + tap * SIZE + channel, mask=inside, other=0.0).to(tl.float32)
        total += factor * _inputs_of(x, before, nodes, source, channel, inside, OF_NODES, SIZE, ROW, NODE)
    total = total.to(dtype)
    if SILU:
        wide = total.to(tl.float32)
        total = (wide / (1.0 + tl.exp(-wide))).to(dtype)
    tl.store(out + row * SIZE + channel, total, mask=inside)


@kernel()
def _keep_window(
    x, before, nodes, sources, slots,
    OF_NODES: tl.constexpr, SIZE: tl.constexpr, ROW: tl.constexpr, NODE: tl.constexpr, TAPS: tl.constexpr,
    PADDED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """before[slot] = the last inputs of a text, by their sources; all are read first."""
    text, channel = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    tap = tl.arange(0, PADDED)[:, None]
    used = (channel < SIZE)[None, :] & (tap < TAPS)
    source = tl.load(sources + text * TAPS + tap, mask=tap < TAPS, other=0)
    kept = _inputs_of(x, before, nodes, source, channel[None, :], used, OF_NODES, SIZE, ROW, NODE)
    tl.debug_barrier()  # other threads may read what this one writes to
    to = before + (tl.load(slots + text) * TAPS + tap) * SIZE + channel[None, :]
    tl.store(to, kept.to(before.dtype.element_ty), mask=used)


@device_function
def _softplus(x):
    """ln(1 + eˣ), x itself above 20 as in PyTorch; what rounding takes from 1 + eˣ is added again."""
    e = tl.exp(tl.minimum(x, 20.0))
    u = 1.0 + e
    return tl.where(x > 20.0, x, tl.log(u) + (e - (u - 1.0)) / u)


@kernel("table_width", "writes", "least", "most", "weight_scale")
def _recur(
    mixed, x, kept, kept_x, bias, rate, skip, states, slots, tables, counts, firsts, rows, out, table_width, writes,
    scale, epsilon, least, most, weight_scale, OF_NODES: tl.constexpr,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, KEYS: tl.constexpr, PADDED_KEYS: tl.constexpr, VALUES: tl.constexpr,
    QUERY: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr, SIZE: tl.constexpr, ROW: tl.constexpr,
    NODE: tl.constexpr, DELTA: tl.constexpr, CHANNELWISE: tl.constexpr, SCANNED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A job, a head, some columns of its state: change it by sources of a table, then by rows, which read it.

    S ← d·S + k ⊗ s·(v − (d·S)ᵀk), o = Sᵀq (the gated delta rule, DELTA), or S ← d·S + k ⊗ s·v, o = Sᵀq + D·v (Mamba-2).
    CHANNELWISE: each number of a key has a decay. SCANNED: each number of the state has one, and each column a step
    (Mamba); steps, k and q are beside each other, and do not go through the convolution.
    """
    job, head, column = tl.program_id(0), tl.program_id(1), tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    key_at, group = tl.arange(0, PADDED_KEYS), head // (HEADS // GROUPS)
    is_key, is_value = key_at < KEYS, column < VALUES
    inside = is_key[:, None] & is_value[None, :]
    before, num_rows, first = tl.load(counts + job), tl.load(rows + job), tl.load(firsts + job)
    place = ((tl.load(slots + job) * HEADS + head) * KEYS + key_at[:, None]) * VALUES + column[None, :]
    if num_rows + before > 0:
        state = tl.load(states + place, mask=inside, other=0.0)
        if SCANNED:
            own_rate = tl.load(rate + key_at[:, None] * VALUES + column[None, :], mask=inside, other=0.0)
        else:
            own_rate = tl.load(rate + head)
        step_at = head
        if CHANNELWISE:
            step_at = head * KEYS + key_at
        if SCANNED:
            step_at = column
        is_step = is_value if SCANNED else is_key
        one_step: tl.constexpr = not (CHANNELWISE or SCANNED)  # pyright: ignore[reportAssignmentType]
        own_bias = tl.load(bias + step_at) if one_step else tl.load(bias + step_at, mask=is_step, other=0.0)
        for number in tl.range(0, before + num_rows):
            source = first + number - before
            if number < before:
                source = tl.load(tables + job * table_width + number)
            is_kept = source >= OF_NODES
            if is_kept:
                given, numbers = kept_x + (source - OF_NODES) * SIZE, kept + (source - OF_NODES) * NODE + SIZE
            else:
                given, numbers = x + source * SIZE, mixed + source * ROW + (0 if SCANNED else SIZE)
            keys = numbers + VALUES if SCANNED else given + KEY + group * KEYS
            queries = numbers + VALUES + KEYS if SCANNED else given + QUERY + group * KEYS
            key = tl.load(keys + key_at, mask=is_key, other=0.0).to(tl.float32)
            query = tl.load(queries + key_at, mask=is_key, other=0.0).to(tl.float32)
            value = tl.load(given + VALUE + head * VALUES + column, mask=is_value, other=0.0).to(tl.float32)
            given_step = tl.load(numbers + step_at) if one_step else tl.load(numbers + step_at, mask=is_step, other=0.0)
            size = _softplus(given_step.to(tl.float32) + own_bias)
            size = tl.minimum(tl.maximum(size, least), most)
            decay = tl.exp((size[None, :] if SCANNED else size) * own_rate)
            if DELTA:
                key *= 1.0 / tl.sqrt(tl.sum(rounded_product(key, key), 0) + epsilon)
                query *= 1.0 / tl.sqrt(tl.sum(rounded_product(query, query), 0) + epsilon)
                steps: tl.constexpr = HEADS * KEYS if CHANNELWISE else HEADS  # pyright: ignore[reportAssignmentType]
                weight = weight_scale / (1.0 + tl.exp(-tl.load(numbers + steps + head).to(tl.float32)))
                if CHANNELWISE:
                    state *= decay[:, None]
                    change = (value - tl.sum(state * key[:, None], 0)) * weight
                    state += key[:, None] * change[None, :]
                else:
                    change = (value - tl.sum(state * key[:, None], 0) * decay) * weight
                    state = state * decay + key[:, None] * change[None, :]
            else:
                change = value * size
                state = state * decay + key[:, None] * change[None, :]
            read = tl.sum(state * (query * scale)[:, None], 0)
            if SCANNED:
                read += tl.load(skip + column, mask=is_value, other=0.0) * value
            elif not DELTA:
                read += tl.load(skip + head) * value
            to = out + (source * HEADS + head) * VALUES + column
            tl.store(to, read.to(out.dtype.element_ty), mask=is_value & (number + 0 * column >= before))
        tl.store(states + place, state, mask=inside & (writes + 0 * place > 0))


@kernel()
def _keep_nodes(
    x, nodes, places, SIZE: tl.constexpr, ROW: tl.constexpr, NODE: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """nodes[places[row]] = x[row], where there is a place."""
    row, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    place = tl.load(places + row) + 0 * at
    inside = (at < SIZE) & (place >= 0)
    tl.store(nodes + place * NODE + at, tl.load(x + row * ROW + at, mask=inside, other=0.0), mask=inside)


@kernel("epsilon", "gate_row", "gate_group")
def _gate_outputs(
    x, gate, weight, epsilon, gate_row, gate_group,
    SIZE: tl.constexpr, PADDED: tl.constexpr, GROUPS: tl.constexpr, WEIGHTS: tl.constexpr, FIRST: tl.constexpr,
    SILU: tl.constexpr,
):  # fmt: skip
    """A group of a row's numbers times SiLU of their gates, or their sigmoids.

    After a norm of the group, before it (FIRST) or without.
    """
    row, group, at = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, PADDED)
    inside = at < SIZE
    dtype: tl.constexpr = x.dtype.element_ty
    place = x + (row * GROUPS + group) * SIZE + at
    here = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    opened = tl.load(gate + row * gate_row + group * gate_group + at, mask=inside, other=0.0).to(tl.float32)
    opened = (opened if SILU else 1.0) / (1.0 + tl.exp(-opened))
    if FIRST:
        here *= opened
    if WEIGHTS > 0:
        factors = tl.load(weight + (group * SIZE + at) % WEIGHTS, mask=inside, other=0.0).to(tl.float32)
        here = (here * (1.0 / tl.sqrt(tl.sum(here * here, 0) / SIZE + epsilon))).to(dtype).to(tl.float32)
        here = (here * factors).to(dtype).to(tl.float32)
    else:
        opened = opened.to(dtype).to(tl.float32)
    if not FIRST:
        here *= opened
    tl.store(place, here.to(dtype), mask=inside)


@kernel("num_rows")
def _gate_heads(
    x, parts, bias, num_rows,
    HEADS: tl.constexpr, DIM: tl.constexpr, PADDED: tl.constexpr, WIDTH: tl.constexpr, PARTS: tl.constexpr,
    BIASED: tl.constexpr, GATES: tl.constexpr, SOFTPLUS: tl.constexpr,
):  # fmt: skip
    """A head of a row times the sigmoid or the softplus of its gate.

    In each part of the product so many GATES of all heads stand last, one of each or as many as outputs. 0: a head's
    gate stands after its query.
    """
    row, head, at = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, PADDED)
    inside = at < DIM
    dtype: tl.constexpr = x.dtype.element_ty
    if GATES == 0:
        place = (2 * head + 1) * DIM + at
    elif GATES == HEADS:
        place = WIDTH - GATES + head + 0 * at
    else:
        place = WIDTH - GATES + head * DIM + at
    gate = summed_columns(parts, bias, row, place, inside, num_rows, WIDTH, PARTS, BIASED, dtype)
    opened = _softplus(gate) if SOFTPLUS else 1.0 / (1.0 + tl.exp(-gate))
    opened = opened.to(dtype).to(tl.float32)
    to = x + (row * HEADS + head) * DIM + at
    tl.store(to, (tl.load(to, mask=inside, other=0.0).to(tl.float32) * opened).to(dtype), mask=inside)


def convolve(
    x: Tensor, before: Tensor, nodes: Tensor, sources: Tensor, weight: Tensor, bias: Tensor | None, silu: bool,
    out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """[rows, channels] of the first columns of x [rows, …], each over its last tokens: weight [width, channels].

    before [slots, width − 1, channels] and the first columns of nodes [nodes, …] are earlier inputs; sources
    [rows, width − 1]. `out` may have more rows.
    """
    (rows, _), (width, size) = x.shape, weight.shape
    out = x.new_empty(rows, size) if out is None else out
    _convolve[(rows, -(-size // CHANNELS))](
        x, before, nodes, sources, weight, weight if bias is None else bias, out, OF_NODES=OF_NODES,
        SIZE=size, ROW=x.stride(0), NODE=nodes.stride(0), WIDTH=width, BIASED=bias is not None, SILU=silu,
        BLOCK=CHANNELS, num_warps=4,
    )  # fmt: skip
    return out


def keep_window(x: Tensor, before: Tensor, nodes: Tensor, sources: Tensor, slots: Tensor) -> None:
    """Let before [slots, taps, channels] of each text's slot be its last inputs, by sources [texts, taps]."""
    _, taps, size = before.shape
    _keep_window[(len(slots), -(-size // CHANNELS))](
        x, before, nodes, sources, slots, OF_NODES=OF_NODES, SIZE=size, ROW=x.stride(0), NODE=nodes.stride(0),
        TAPS=taps, PADDED=power_of_two(taps), BLOCK=CHANNELS, num_warps=4,
    )  # fmt: skip


def recur(
    mixed: Tensor, x: Tensor, kept: Tensor, kept_x: Tensor, constants: tuple[Tensor, Tensor, Tensor | None],
    states: Tensor, jobs: Jobs, out: Tensor, places: tuple[int, int, int], groups: int, *,
    delta: bool, writes: bool, scale: float = 1.0, epsilon: float = 0.0, limits: tuple[float, float] | None = None,
    weight_scale: float = 1.0,
) -> None:  # fmt: skip
    """Run jobs over states [slots, heads, keys, values], float32; see `_recur`.

    x [rows, channels] has queries, keys and values at `places`; after as many columns mixed [rows, …] has steps
    [heads], or [heads · keys] channel-wise ones, with `delta` then weights. `kept` and `kept_x` are the same of nodes.
    `constants`: the bias of steps, [heads] the rate of decay, and what the value is multiplied by where outputs read
    it. out [rows, heads · values].

    Mamba's rates are [keys, values], and its biases and multipliers [values]. It has one head, x its values, and mixed
    [rows, …] steps [values], keys and queries; `kept` has them after as many columns as x has.
    """
    _, heads, keys, values = states.shape
    bias, rate, skip = constants
    padded, (least, most) = power_of_two(keys), limits or (0.0, float("inf"))
    is_scanned = rate.ndim == 2
    block = max(16, min(power_of_two(values), (MAX_SCANNED if is_scanned else MAX_STATE) // padded))
    query, key, value = places
    _recur[(len(jobs.slots), heads, -(-values // block))](
        mixed, x, kept, kept_x, bias, rate, rate if skip is None else skip, states, *jobs, out, jobs.tables.shape[1],
        int(writes), scale, epsilon, least, most, weight_scale, OF_NODES=OF_NODES,
        HEADS=heads, GROUPS=groups, KEYS=keys, PADDED_KEYS=padded, VALUES=values, QUERY=query, KEY=key, VALUE=value,
        SIZE=x.shape[1], ROW=mixed.stride(0), NODE=kept.stride(0), DELTA=delta,
        CHANNELWISE=delta and len(bias) > heads, SCANNED=is_scanned, BLOCK=block, num_warps=1 if is_scanned else 4,
    )  # fmt: skip


def keep_nodes(x: Tensor, nodes: Tensor, places: Tensor) -> None:
    """nodes[places[row]] = the first columns of x[row], of rows whose place is not negative."""
    size = nodes.shape[1]
    _keep_nodes[(len(x), -(-size // CHANNELS))](
        x, nodes, places, SIZE=size, ROW=x.stride(0), NODE=nodes.stride(0), BLOCK=CHANNELS, num_warps=4
    )


def gate_outputs(
    x: Tensor, gate: Tensor, weight: Tensor | None, epsilon: float, size: int, is_first: bool = False,
    silu: bool = True,
) -> None:  # fmt: skip
    """Multiply groups of `size` columns of x [rows, columns] by SiLU or sigmoids of gates [rows, columns].

    See `_gate_outputs`.

    The rows of gates may stand apart. Weights of the norm repeat where there are fewer than columns.
    """
    rows, columns = x.shape
    _gate_outputs[(rows, columns // size)](
        x, gate, x if weight is None else weight, epsilon, gate.stride(0), size,
        SIZE=size, PADDED=power_of_two(size), GROUPS=columns // size, WEIGHTS=0 if weight is None else len(weight),
        FIRST=is_first, SILU=silu, num_warps=4 if size > 256 else 1,
    )  # fmt: skip


def gate_heads(
    x: Tensor, parts: Tensor, bias: Tensor | None, gate_columns: int = 0, softplus: bool = False
) -> None:  # fmt: skip
    """Multiply x [rows, heads, dim] by the sigmoids, or the softplus, of gates in parts [parts, rows, width].

    They are the last `gate_columns`, one of each head or as many as x has; 0: one follows each query.
    """
    count, rows, width = parts.shape
    _, heads, dim = x.shape
    _gate_heads[(rows, heads)](
        x, parts, parts if bias is None else bias, rows, HEADS=heads, DIM=dim, PADDED=power_of_two(dim), WIDTH=width,
        PARTS=count, BIASED=bias is not None, GATES=gate_columns, SOFTPLUS=softplus, num_warps=1,
    )  # fmt: skip
