"""What a step costs: the clock, the floor, the parts, and the command that shows them."""

import itertools
import json
import re
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import typer
from typer.testing import CliRunner

import saltus
from architectures import tiny
from saltus.cli.app import Commands
from saltus.cli.bench_step import parse_numbers, step
from saltus.core.canvas import continuation
from saltus.core.forward import ForwardOutputs
from saltus.core.protocols import UsesHiddenStates
from saltus.evaluation.profiling import call_profile, roofline, step_profile
from saltus.evaluation.profiling import call_timing as steps
from saltus.evaluation.profiling.call_timing import CallGrid, CallShape, CallTimings, PartTimer, temporarily_replaced
from saltus.evaluation.profiling.roofline import MachineSpeed, ResourceDemand
from saltus.evaluation.reports import environment
from saltus.evaluation.reports.command_line import command_line
from saltus.kernels.native import structs
from saltus.methods.shared.hidden_state_drafter import HiddenStateDrafter
from saltus.models.causal import CausalNetwork
from tiny_models import tiny_llama

app = typer.Typer(cls=Commands)
app.callback()(lambda: None)
app.command()(step)
TINY = ("--nodes", "1,3,8", "--lengths", "16,32", "--batches", "1,2", "--rounds", "2")


class Clock:
    """A clock that moves when it is told to."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


class Planted:
    """A network whose calls take known seconds; the first of each kind is slow, as first calls are."""

    def __init__(
        self, clock: Clock, seconds=lambda batch, turn: float(sum(len(inputs.tokens) + 1 for inputs in batch))
    ):
        self.clock, self.seconds, self.turns, self.order = clock, seconds, {}, []

    def new_kv_cache(self):
        return SimpleNamespace(tokens=np.empty(0, dtype=np.int64))

    def forward(self, batch, kv_caches):
        assert len(batch) == len(kv_caches)
        cell = CallShape(len(batch[0].tokens) + 1, len(batch[0].canvas.decided_prefix), len(batch))
        fresh = not len(kv_caches[0].tokens)
        turn = self.turns[cell, fresh] = self.turns.get((cell, fresh), -1) + 1
        for inputs, kv_cache in zip(batch, kv_caches, strict=True):
            kv_cache.tokens = inputs.canvas.decided_prefix
        self.order.append((cell, fresh))
        self.clock.now += 1000.0 if turn == 0 else self.seconds(batch, turn) + (50.0 if fresh else 0.0)
        return [ForwardOutputs(torch.zeros(1, 1)) for _ in batch]


def measured(grid: CallGrid, **settings) -> tuple[CallTimings, Planted, int]:
    clock, timings = Clock(), CallTimings()
    network = Planted(clock, **settings)
    calls = sum(1 for _ in steps.measure_calls(network, grid, 100, timings, clock))
    return timings, network, calls


@pytest.fixture(scope="module")
def folder(tiny_folder) -> str:
    return str(tiny_folder())


def bench(*arguments: object, code: int = 0):
    done = CliRunner(env={"COLUMNS": "100"}).invoke(app, ["step", *map(str, arguments)], prog_name="bench")
    assert done.exit_code == code, done.output
    return done


# The clock


def test_the_grid_has_every_cell_and_each_costs_what_it_costs():
    grid = CallGrid((1, 2, 8), (16, 32, 64), (1, 2, 4), rounds=3)
    timings, _, _ = measured(grid)
    alone = {CallShape(n, length, 1) for n in (1, 2, 8) for length in (16, 32, 64)}
    assert set(timings.call_seconds) == alone | {CallShape(n, 32, batch) for n in (1, 2, 8) for batch in (1, 2, 4)}
    for cell, seconds in timings.call_seconds.items():
        assert seconds == [cell.nodes * cell.batch] * 3, cell


def test_a_warm_up_does_not_count_be_it_of_a_call_or_of_a_prefill():
    timings, _, _ = measured(CallGrid((1, 2), (16, 32), (1, 2), rounds=1))
    assert max(seconds for column in timings.call_seconds.values() for seconds in column) == 4
    assert timings.prefill_seconds == {16: [51.0], 32: [51.0]}


def test_progress_knows_how_many_calls_there_will_be():
    for grid in (CallGrid((1, 2), (16, 32), (1, 2), rounds=1), CallGrid((4,), (8,), (3,), rounds=5)):
        assert measured(grid)[2] == grid.num_calls


def test_rounds_go_forwards_and_backwards_so_that_drift_hurts_all_alike():
    grid = CallGrid((1, 2, 4), (16,), (1,), rounds=4)
    timings, _, _ = measured(grid, seconds=lambda batch, turn: 100.0)
    clock, drifting = Clock(), CallTimings()
    network = Planted(clock, lambda batch, turn: 1.0 + 0.01 * len(network.order))
    list(steps.measure_calls(network, grid, 100, drifting, clock))
    means = [sum(seconds) / 4 for seconds in drifting.call_seconds.values()]
    assert max(means) - min(means) < 1e-9
    assert all(seconds == [100.0] * 4 for seconds in timings.call_seconds.values())


def test_an_outlier_moves_neither_median_nor_quartiles():
    timings, _, _ = measured(
        CallGrid((1,), (16,), (1,), rounds=5), seconds=lambda batch, turn: 900.0 if turn == 3 else 2.0
    )
    summed = steps.time_statistics(timings.call_seconds[CallShape(1, 16)])
    assert summed == {"ms": 2000, "low": 2000, "high": 2000, "rounds": 5}
    assert steps.time_statistics([0.004]) == {"ms": 4, "low": 4, "high": 4, "rounds": 1}
    assert steps.time_statistics([0.001, 0.002, 0.003, 0.004, 0.1]) == pytest.approx(
        {"ms": 3, "low": 2, "high": 4, "rounds": 5}
    )


def test_what_was_measured_stays_where_measuring_ends_early():
    clock, timings = Clock(), CallTimings()
    running = steps.measure_calls(Planted(clock), CallGrid((1, 2), (16,), (1,), rounds=9), 100, timings, clock)
    for _ in range(7):
        next(running)
    running.close()
    assert timings.call_seconds == {CallShape(2, 16): [2.0], CallShape(1, 16): [1.0]}
    assert timings.prefill_seconds == {16: [51.0]}


def test_a_call_has_its_nodes_on_paths_that_are_not_too_deep():
    one = steps.synthetic_inputs(64, 32, 300)
    assert (len(one.tokens), len(one.canvas.decided_prefix), max(one.depths)) == (63, 32, steps.PATH_LENGTH - 1)
    assert set(one.tokens) <= set(range(300))
    assert not np.array_equal(
        one.canvas.decided_prefix, steps.synthetic_inputs(64, 32, 300, sequence=1).canvas.decided_prefix
    )


# The floor


@pytest.mark.parametrize("tied", [True, False])
def test_the_floor_counts_tied_embeddings_once(tied):
    model = tiny_llama(tie_word_embeddings=tied).to(torch.bfloat16)
    vocabulary, hidden, inner, layers, kv = 300, 32, 48, 2, 2 * 8
    matrices = layers * (2 * hidden * hidden + 2 * hidden * kv + 3 * hidden * inner)
    norms = (2 * layers + 1) * hidden
    needs = roofline.count_demand(model)
    assert needs.weight_bytes == 2 * (matrices + norms + vocabulary * hidden)
    assert needs.row_bytes == (0 if tied else 2 * hidden)
    assert needs.row_flops == 2 * (matrices + vocabulary * hidden)
    assert needs.token_bytes == 2 * 2 * layers * kv
    assert needs.pair_flops == 4 * layers * hidden


def test_of_experts_a_call_reads_those_that_its_rows_choose():
    model = tiny("Qwen3Moe")  # 2 of 4 experts, in one of two layers
    stacks = sum(weight.numel() for name, weight in model.named_parameters() if ".experts." in name)
    needs = roofline.count_demand(model)
    whole = sum(weight.nbytes for weight in model.parameters() if weight is not model.model.embed_tokens.weight)
    assert needs.weight_bytes == whole
    at = CallShape(1, 0), CallShape(2, 0), CallShape(1, 0, 2), CallShape(64, 0)
    unread = [
        needs.weight_bytes + shape.nodes * shape.batch * needs.row_bytes - needs.bytes_read(shape) for shape in at
    ]
    assert unread == pytest.approx([4 * stacks / 2, 4 * stacks / 4, 4 * stacks / 4, 0], abs=1)
    dense = sum(w.numel() for w in model.parameters() if w.ndim == 2 and w is not model.model.embed_tokens.weight)
    assert needs.row_flops == 2 * (dense + stacks / 2)


@pytest.mark.parametrize("name", ["Llama", "DeepseekV3"])  # which keeps latent vectors
def test_bytes_of_a_token_are_those_of_the_memory(name):
    network = CausalNetwork(tiny(name))
    kv_cache = network.new_kv_cache()
    network.forward([steps.synthetic_inputs(1, 16, 96)], [kv_cache])
    assert kv_cache.keys is not None
    assert kv_cache.values is not None
    held = sum(buffer[:, :, 0].nbytes for buffer in (kv_cache.keys, kv_cache.values))
    assert roofline.count_demand(network.model).token_bytes == held
    assert steps.kv_cache_growth(network, 96, 512) == {"slots_over_decided_tokens": 0}


def test_the_floor_is_what_takes_longer_and_bends_at_the_knee():
    needs = ResourceDemand(weight_bytes=1000, row_bytes=0, token_bytes=10, row_flops=40, pair_flops=1)
    can = MachineSpeed(100.0, 50.0, {}, 1)  # behind 20 tokens: 12 s of reading, 1.2 s of computing a node
    assert roofline.predicted_knee(needs, can, 20) == pytest.approx(10)
    few, many = (roofline.lower_bound(needs, can, CallShape(n, 20)) for n in (9, 11))
    assert (few["bound_by"], few["floor_ms"]) == ("memory", pytest.approx(12_000))
    assert (many["bound_by"], many["floor_ms"]) == ("compute", pytest.approx(13_200))
    both = roofline.lower_bound(needs, can, CallShape(4, 20, 3))
    assert (both["bytes"], both["flops"]) == (1000 + 3 * 200, 12 * 60)


def test_the_measured_knee_is_where_a_call_costs_a_quarter_more():
    assert roofline.measured_knee([1, 2, 4, 8], [10.0, 10.0, 11.0, 15.0]) == pytest.approx(4 + 4 * 1.5 / 4)
    assert roofline.measured_knee([1, 2], [10.0, 12.0]) is None
    assert roofline.measured_knee([2, 4], [10.0, 20.0]) is None


def test_the_machine_s_speed_is_the_best_of_several_by_the_clock():
    ticks = iter(range(0, 100_000))

    def clock() -> float:
        return float(next(ticks))  # everything takes a second

    can = roofline.measure_machine_speed(
        torch.float32, torch.device("cpu"), megabytes=2, size=128, repeats=1, clock=clock
    )
    assert can.bytes_per_second == 2 * 2 * 2**20  # of a copy: read and written
    assert can.flops_per_second == 2 * 128**3
    speed = roofline.measure_machine_speed(torch.bfloat16, torch.device("cpu"), 2, 128, 1, clock, integers=True)
    assert speed.measured["integer_product_flops_per_second"] == 2 * 128**3


def test_a_result_names_a_command_that_runs(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["/site-packages/saltus/__main__.py", "bench", "-t", "0.5"])
    assert command_line() == "saltus bench -t 0.5"
    monkeypatch.setattr(sys, "argv", ["/usr/bin/saltus", "bench"])
    assert command_line() == "saltus bench"


@pytest.mark.parametrize(("seconds", "sizes"), [(0.04, [256, 512, 1024]), (0.06, [256])])
def test_a_product_that_torch_has_no_fast_code_for_is_not_tried_at_full_size(seconds, sizes):
    times, tried = itertools.count(0.0, seconds), []
    with temporarily_replaced(torch, "matmul", lambda x, y: tried.append(len(x))):
        roofline.measure_machine_speed(torch.float32, torch.device("cpu"), 2, 1024, 0, lambda: next(times))
    assert tried == sizes


# The parts


def test_parts_within_parts_count_once():
    clock = Clock()
    watch = PartTimer(clock)

    def spend(seconds: float) -> None:
        clock.now += seconds

    inner = watch.time_function("inner", lambda: spend(3))

    def work() -> None:
        spend(1)
        inner()
        spend(2)

    watch.time_function("outer", work)()
    spend(100)
    inner()
    assert watch.seconds == {"outer": 3, "inner": 6}


def test_what_is_replaced_comes_back_even_after_an_error():
    class Owner:
        name = 1

    one = Owner()

    def fail() -> None:
        with temporarily_replaced(one, "name", 2), temporarily_replaced(Owner, "name", 3):
            assert (one.name, Owner.name) == (2, 3)
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert (vars(one), Owner.name) == ({}, 1)


@pytest.mark.parametrize("free", [False, True])
@pytest.mark.parametrize("native_decoder", [True, False])
def test_the_parts_of_a_call_add_up_and_none_is_missing(native_decoder, free):
    network = CausalNetwork(tiny_llama(), batch_invariant=not free)
    if not native_decoder:
        network.native_decoder = None
    one = steps.synthetic_inputs(8, 64, 300)
    before = network.forward([one], [network.new_kv_cache()])[0].logits
    found = call_profile.profile_call(network, 8, 64, 300, rounds=3)
    assert tuple(found["parts"]) == call_profile.PARTS
    assert sum(found["parts"].values()) == pytest.approx(found["ms"])
    assert all(value > 0 for value in found["parts"].values()), found
    assert found["overhead"] == pytest.approx(found["ms"] / found["unprofiled_ms"] - 1)
    assert torch.equal(network.forward([one], [network.new_kv_cache()])[0].logits, before)


def test_watching_leaves_nothing_behind_and_changes_no_logits():
    network = CausalNetwork(tiny_llama())
    network.native_decoder = None
    one, seen = steps.synthetic_inputs(4, 16, 300), []

    def wrap(part, function):
        return lambda *args, **settings: (seen.append(part), function(*args, **settings))[1]

    plain = network.forward([one], [network.new_kv_cache()])[0].logits
    with call_profile.instrumented(network, wrap):
        assert torch.equal(network.forward([one], [network.new_kv_cache()])[0].logits, plain)
    assert set(seen) == set(call_profile.PARTS[:-1])
    seen.clear()
    network.forward([one], [network.new_kv_cache()])
    assert not seen
    assert all("forward" not in vars(module) for module in network.model.modules())


def test_the_kernels_time_their_parts_only_while_somebody_asks():
    network = CausalNetwork(tiny_llama())
    one = steps.synthetic_inputs(4, 16, 300)
    plain = network.forward([one], [network.new_kv_cache()])[0].logits
    network.native_decoder.seconds = found = structs.SecondsOfParts()
    assert torch.equal(network.forward([one], [network.new_kv_cache()])[0].logits, plain)
    times = [getattr(found, name) for name in call_profile.PARTS_OF_KERNEL]
    assert min(times) > 0
    network.native_decoder.seconds = None
    network.forward([one], [network.new_kv_cache()])
    assert times == [getattr(found, name) for name in call_profile.PARTS_OF_KERNEL]


def test_a_drafter_is_timed_without_losing_what_the_loop_asks_it_for():
    timer = PartTimer(map(float, range(100)).__next__)
    drafter = step_profile._timed_drafter(timer, HiddenStateDrafter(3, lambda canvas, states, length: iter(())))
    assert isinstance(drafter, UsesHiddenStates)
    assert drafter.output_hidden_states
    assert drafter(continuation([1], 4), None, 2) == ()
    assert timer.seconds == {step_profile.DRAFTING: 1}
    assert step_profile._timed_drafter(timer, lambda canvas, last, max_depth: max_depth)(None, None, 2) == 2
    assert timer.seconds == {step_profile.DRAFTING: 2}


def test_the_parts_of_a_step_add_up_at_any_temperature(folder):
    engine = saltus.load(folder)
    for temperature in (0.0, 0.8):
        found = step_profile.profile_step(engine, temperature=temperature, max_new_tokens=12, rounds=1)
        assert sum(found["parts"].values()) == pytest.approx(found["ms"])
        assert all(value > 0 for value in found["parts"].values()), found
        assert found["steps"] >= 1
    assert "forward" not in vars(engine.network)


@pytest.mark.gpu
def test_on_a_gpu_the_profiler_finds_the_parts():
    network = CausalNetwork(tiny_llama().cuda())
    found = call_profile.profile_call(network, 8, 64, 300, rounds=2, synchronize=torch.cuda.synchronize)
    assert sum(found["parts"].values()) == pytest.approx(found["ms"])
    assert all(found["parts"][part] > 0 for part in call_profile.PARTS[:-1]), found


# The command


@pytest.mark.slow
@pytest.mark.usefixtures("small_buffers", "no_pdf")
def test_the_command_writes_what_it_shows(folder, tmp_path):
    shown = bench("--model", folder, *TINY, "--out", tmp_path / "new").stdout
    found = json.loads((tmp_path / "new" / "step.json").read_text())
    cells = {(row["nodes"], row["length"], row["batch"]) for row in found["calls"]}
    assert cells == {(n, length, 1) for n in (1, 3, 8) for length in (16, 32)} | {(n, 16, 2) for n in (1, 3, 8)}
    assert found["complete"]
    assert all(row["efficiency"] == pytest.approx(row["floor_ms"] / row["ms"]) for row in found["calls"])
    assert [row["length"] for row in found["prefill"]] == [16, 32]
    assert [part["nodes"] for part in found["parts"]] == [1, 3, 8]
    assert found["machine"] == environment.machine_info()
    assert found["model"]["dtype"] == "float32"
    for said in ("reading it", "floor", "knee", "linear layers", "sampling", "GB/s"):
        assert said in shown
    names = ("step_calls", "step_roofline", "step_parts")
    for name in names:
        assert (tmp_path / "new" / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        assert "</svg>" in (tmp_path / "new" / f"{name}.svg").read_text()


@pytest.mark.slow
@pytest.mark.usefixtures("small_buffers", "no_pdf")
def test_ctrl_c_keeps_what_was_measured(folder, tmp_path, monkeypatch):
    own, calls = CausalNetwork.forward, []

    def interrupted(self, batch, kv_caches):
        calls.append(len(batch))
        if len(calls) > 40:
            raise KeyboardInterrupt
        return own(self, batch, kv_caches)

    monkeypatch.setattr(CausalNetwork, "forward", interrupted)
    bench("--model", folder, *TINY[:-1], 9, "--out", tmp_path, code=130)
    found = json.loads((tmp_path / "step.json").read_text())
    assert not found["complete"]
    assert found["calls"]
    assert found["parts"] == []


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (("--nodes", "0,4"), "nodes has 0, but each must lie in 1…512"),
        (("--nodes", "513"), "nodes has 513, but each must lie in 1…512"),
        (("--nodes", ""), "--nodes is empty"),
        (("--lengths", "16,x"), "--lengths is '16,x', but must be whole numbers"),
        (("--lengths", "0"), "lengths has 0, but each must be 1 or more"),
        (("--lengths", "500"), "a text of 500 tokens.*reads 512; give shorter lengths"),
        (("--batches", ","), "--batches is empty"),
        (("--rounds", "0"), "rounds is 0, but must be 1 or more"),
        (("--dtype", "int3"), "dtype is 'int3', but must be one of"),
        (("--out", __file__), "is a file; give a folder"),
    ],
)
def test_bad_input_is_refused_in_a_line(folder, given, said):
    complaint = bench("--model", folder, *given, code=2).stderr
    assert re.fullmatch(f"saltus: [^\n]*{said}[^\n]*\n", complaint), complaint


def test_usual_lengths_are_those_that_fit():
    assert steps.default_lengths(None) == steps.DEFAULT_LENGTHS
    assert steps.default_lengths(512) == (128, 256)
    assert steps.default_lengths(40) == (20,)
    assert parse_numbers("--nodes", "4, 1,") == (4, 1)


def test_a_commit_is_told_by_its_name_and_whether_files_were_changed():
    told = environment.git_commit()
    assert told is None or re.fullmatch(r"[0-9a-f]{7,40}\+?", told)
