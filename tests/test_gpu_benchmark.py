"""The stages of benchmarks/gpu on a CUDA device that does not exist: they run, go on, and survive a part that fails."""

import json
import runpy
import signal
import sys
import time
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import saltus
from fake_cuda import fake_cuda
from saltus.engine.calibration import measure_call_seconds as measure
from saltus.models.cuda.packed_weight import GPUPackedWeight

ROOT = Path(__file__).parents[1]


@pytest.fixture(autouse=True)
def benchmarks(monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path, str(ROOT / "benchmarks")])


class Profile:
    """A profile of one kernel: torch's takes a minute for a call on this device."""

    def __init__(self, activities) -> None:
        pass

    def __enter__(self):
        return self

    def __exit__(self, *_) -> None:
        pass

    def key_averages(self) -> list:
        return [
            SimpleNamespace(key="aten::mm", count=9, self_device_time_total=9.0, device_type="DeviceType.CPU"),
            SimpleNamespace(key="product", count=2, self_device_time_total=3.0, device_type="DeviceType.CUDA"),
        ]


@pytest.fixture
def run(monkeypatch, tmp_path, tiny_folder, partners):
    """Run a stage for a tiny model on the device; its exit code, its results, and what it prints as tables."""
    pytest.importorskip("triton")
    monkeypatch.setattr("torch.profiler.profile", Profile)
    for owner in ("saltus.engine.calibration", "gpu.speed_stage"):  # a few calls, not some twenty
        monkeypatch.setattr(f"{owner}.measure_call_seconds", lambda network, *_, **__: measure(network, (1, 4), 1))
    monkeypatch.setattr("saltus.models.cuda.gpu_decoder_support.KERNEL_DTYPES", set())  # Triton's interpreter is slow
    drafts = [f"--option={name}.{key}={value}" for name in ("ptp", "mtpc") for key, value in partners[name].items()]
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("the cat sat on the mat and the cat\none two one two\n")  # those of the benchmark are long

    def command(*words: object) -> int:
        monkeypatch.setattr(sys, "argv", ["gpu", *map(str, words)])
        with pytest.raises(SystemExit) as end:
            runpy.run_path(str(ROOT / "benchmarks/gpu"), run_name="__main__")
        return int(end.value.code or 0)

    def stage(name: str, *options: object) -> tuple[int, list[dict], Path]:
        out = tmp_path / f"{name}.jsonl"
        drafted = drafts if name != "calls" else []
        code = command(name, *options, *drafted, "--prompts", prompts, "--part-seconds", 200, "--out", out)
        return code, results(out), out

    stage.command = command
    with fake_cuda(monkeypatch):
        yield stage


def results(out: Path) -> list[dict]:
    return [line["result"] for line in map(json.loads, out.read_text().splitlines()) if "result" in line]


@pytest.mark.slow
@pytest.mark.unchecked
def test_rows_and_texts_are_counted_and_a_difference_fails(run, monkeypatch, tiny_folder, capsys):
    from gpu import exact_stage

    monkeypatch.setattr(exact_stage, "FEWEST_TEXTS", 2)
    monkeypatch.setattr(exact_stage, "ROWS_OF_TEXT", 4)
    options = ["--models", f"{tiny_folder()},tiny", "--dtypes", "float32", "--batches", "2", "--temperatures", "0.7",
               "--tokens", 3, "--longest", 20]  # fmt: skip
    code, found, out = run("exactness", *options, "--methods", "ptp+lookup,mtpc,small_model")
    rows = [result for result in found if result["count"] == "rows"]
    assert code == 0
    assert [result["rows"] > 4 and result["different"] == 0 for result in rows] == [True] * 6
    texts = {result["method"]: (result["texts"], result["different"]) for result in found if result["count"] == "texts"}
    assert texts == dict.fromkeys(("ptp+lookup", "mtpc", "small_model"), (2, 0))
    monkeypatch.setattr(exact_stage, "first_difference", lambda *_: 1)
    code, found, out = run("exactness", *options, "--methods", "ptp+lookup,lookup")
    assert code == 1
    assert [(result["method"], result["different"]) for result in found[9:]] == [("lookup", 2)], "others were finished"
    assert run.command("table", out) == 0
    assert "| float32 | 0.7 | lookup | – | 2 of 2 |" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.unchecked
def test_what_the_device_writes_is_judged_by_the_cpu(run, monkeypatch, tiny_folder, capsys):
    from gpu import agreement_stage

    monkeypatch.setattr(agreement_stage, "_dtype", lambda device: "float32")
    options = ["--models", tiny_folder(), "--tokens", 4, "--take", 2, "--tolerance", 0.01]
    code, found, _ = run("agreement", *options, "--methods", "plain,ptp")
    assert code == 0
    assert [(one["sampling"], one["method"], one["tokens"], one["different"]) for one in found] == [
        (sampling, method, 8, 0) for sampling in ("greedy", "sampled", "truncated") for method in ("plain", "ptp")
    ]
    assert all(one["tokens_per_call"] == one["tokens_per_call_cpu"] for one in found)
    generate = saltus.Engine.generate

    def broken(engine, prompts, **settings):  # a token that nothing speaks for
        written = generate(engine, prompts, **settings)
        return [replace(one, tokens=[*one.tokens[:-1], one.tokens[-1] ^ 1]) for one in written]

    monkeypatch.setattr(saltus.Engine, "generate", broken)
    code, found, _ = run("agreement", *options, "--methods", "plain,ptp,lookup")
    assert code == 1
    assert [(one["method"], one["different"]) for one in found[6:]] == [("lookup", 2)] * 3
    assert "| greedy | lookup | 2 of 8 | 75.0 % |" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.unchecked
def test_calls_are_timed_against_the_roofline(run, monkeypatch, capsys):
    monkeypatch.setattr("gpu.call_stage.ROUNDS", 2)
    code, found, _ = run(
        "calls", "--models", "tiny", "--rows", "1,4", "--contexts", "20", "--batches", "2", "--buffer-mb", 4,
        "--product", 64,
    )  # fmt: skip
    assert code == 0
    calls = [result for result in found if result["what"] == "call"]
    assert [(one["texts"], one["context"], one["rows"], one["graph"]) for one in calls] == [
        (1, 20, 1, True), (1, 20, 4, True),
        (2, 20, 1, True), (2, 20, 8, True), (2, 20, 17, True), (1, 20, 1, False), (1, 20, 4, False),
    ]  # fmt: skip
    assert all(one["ms"] > 0 and one["bytes"] > one["weight_bytes"] for one in calls)
    graph = next(result for result in found if result["what"] == "graph")
    assert 0 < graph["graph_ms"] < graph["ms"]
    told = capsys.readouterr().out
    assert "A copy moves" in told
    assert "tiny: 2 kernels, 3 µs" in told


@pytest.mark.slow
@pytest.mark.unchecked
def test_calls_of_packed_weights_are_timed(run, monkeypatch):
    monkeypatch.setattr("gpu.call_stage.ROUNDS", 2)
    expanded = cache(lambda weight: weight.dequantize())
    monkeypatch.setattr(  # as the kernels, which need bfloat16, that the interpreter lacks
        "saltus.models.cuda.packed_weight._linear",
        lambda x, weight, bias=None: torch.nn.functional.linear(x, expanded(weight), bias),
    )
    options = "--rows", "1", "--contexts", "20", "--batches", "2", "--buffer-mb", 4, "--product", 64
    code, found, _ = run("calls", "--models", "tiny,tiny@q4_1", *options)
    assert code == 0
    read = {one["model"]: one["weight_bytes"] for one in found if one["what"] == "call"}
    assert read["tiny@q4_1"] < 0.4 * read["tiny"]


def test_a_shape_in_8_bit_floats_keeps_embeddings_and_output_layer():
    from random_models import random_model

    model = random_model("tiny", "fp8")
    kinds = {name.split(".")[-2]: type(weight) for name, weight in model.named_parameters() if weight.ndim > 1}
    assert {name for name, kind in kinds.items() if kind is not GPUPackedWeight} == {"embed_tokens", "lm_head"}
    expanded = model.model.layers[0].mlp.up_proj.weight.dequantize()
    assert 0.015 < expanded.float().std() < 0.025


@pytest.mark.slow
@pytest.mark.unchecked
def test_methods_and_generate_take_turns_and_a_part_that_fails_is_tried_again(run, monkeypatch, tiny_folder, capsys):
    from gpu import speed_stage

    options = [
        "--model", tiny_folder(), "--shapes", "default,tiny", "--methods", "plain,lookup", "--temperatures", "0",
        "--tokens", 3, "--take", 2, "--batches", "2", "--baselines", "generate",
    ]  # fmt: skip
    take_turns = speed_stage.take_turns

    def failing(args, systems, shape, temperature, texts, number):
        if (shape, texts, number) == ("default", 1, 1):
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return take_turns(args, systems, shape, temperature, texts, number)

    monkeypatch.setattr(speed_stage, "BATCH_ROUNDS", 1)
    monkeypatch.setattr(speed_stage, "take_turns", failing)
    code, _, _ = run("speed", *options)
    told = capsys.readouterr().out
    assert code == 1
    assert "5 of 6 parts are finished" in told
    assert "FAILED what=speed shape=default temperature=0.0 texts=1 round=1: RuntimeError: CUDA error" in told
    monkeypatch.setattr(speed_stage, "take_turns", take_turns)
    code, found, _ = run("speed", *options)
    assert code == 0
    speeds = [result for result in found if result["what"] == "speed"]
    assert len(speeds) == 6
    assert (speeds[-1]["shape"], speeds[-1]["round"]) == ("default", 1)
    assert all(set(one["systems"]) == {"plain", "lookup", "generate"} for one in speeds)
    assert speeds[0]["systems"]["plain"]["calls"] == 3
    assert "| tiny | 0 | 2 | generate |" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.unchecked
def test_servers_take_turns_under_load(run, monkeypatch, tiny_folder, partners, capsys):
    import serve_load

    from tiny_server import serving

    @contextmanager
    def own_server(method, model, max_num_seqs, more=()):
        engine = saltus.load(model, method, device="cuda", options=partners, dtype="float32")
        with serving(engine, name=model) as (_, url):
            yield url

    monkeypatch.setattr(serve_load, "own_server", own_server)
    monkeypatch.setattr("gpu.server_stage.ROUNDS", 1)
    monkeypatch.setattr("gpu.server_stage.FEWEST_PROMPTS", 2)
    code, found, _ = run(
        "server", "--model", tiny_folder(), "--methods", "plain,ptp+lookup", "--clients", "1,2", "--tokens", 3
    )
    assert code == 0
    loads = [result for result in found if result["what"] == "load"]
    assert [(one["clients"], one["texts"], one["different"]) for one in loads] == [(1, 2, 0), (2, 4, 0)]
    assert "| 2 | ptp+lookup |" in capsys.readouterr().out


@pytest.fixture
def parts(tmp_path):
    """Run parts, each a name and what it does, on one file; the names that ran, and whether none is left."""
    from gpu.part_results import Part, ResultFile, run_parts

    def run_named(
        works: dict, needs: dict | None = None, minutes: float = 1.0, part_seconds: float = 30.0, set_up=dict
    ):
        ran: list[str] = []

        def work(name, does):
            def act():
                ran.append(name)
                return does()

            return act

        file = ResultFile(tmp_path / "parts.jsonl")
        file.begin("stage", {}, {"machine": {"gpu": None}})
        chosen = [Part({"name": name, "kind": name[0]}, work(name, does)) for name, does in works.items()]
        chosen += [Part({"name": name}, work(name, set_up), {"kind": kind}) for name, kind in (needs or {}).items()]
        return ran, run_parts(file, chosen, minutes, part_seconds), file

    return run_named


def fail():
    raise ValueError("wrong")


def test_a_part_that_fails_is_written_down_and_comes_last_in_the_next_run(parts):
    ran, complete, file = parts({"a": fail, "b": dict, "c": dict})
    assert (ran, complete) == (["a", "b", "c"], False)
    assert file.failures() == {"name=a kind=a": "ValueError: wrong"}
    ran, complete, file = parts({"a": dict, "b": fail, "c": fail, "d": dict})
    assert (ran, complete) == (["d", "a"], True)
    assert list(file.finished()) == ["name=b kind=b", "name=c kind=c", "name=d kind=d", "name=a kind=a"]
    assert not file.failures()


def test_a_part_that_overruns_ends_though_its_code_catches_exceptions(parts, monkeypatch):
    def hangs():
        try:
            time.sleep(60)
        except Exception:
            time.sleep(60)

    monkeypatch.setattr("gpu.part_results.LIMIT_SHARE", 0)
    before = signal.getsignal(signal.SIGUSR1)
    ran, complete, file = parts({"a": hangs, "b": dict}, part_seconds=0.2)
    assert (ran, complete) == (["a", "b"], False)
    assert "Overran: took more than 0.2 s" in file.failures()["name=a kind=a"]
    assert signal.getsignal(signal.SIGUSR1) == before


class Again(Exception):
    """The process began anew."""


def again(minutes: float):
    assert 0.9 < minutes <= 1
    raise Again


def test_the_process_begins_anew_when_the_device_is_lost_and_leaves_out_what_it_does_not_survive(parts, monkeypatch):
    lost = []
    monkeypatch.setattr("gpu.part_results.restart", again)
    monkeypatch.setattr("gpu.part_results.device_answers", lambda: not lost)

    def loses():
        lost.append(True)
        fail()

    works = {"a": loses, "b": dict, "c": dict}
    with pytest.raises(Again):
        parts(works)
    lost.clear()
    assert parts(works)[0] == ["b", "c", "a"], "nothing is left to begin anew for"
    lost.clear()
    ran, complete, file = parts(works)
    assert (ran, complete, list(file.failures())) == ([], False, ["name=a kind=a"])


def test_set_up_that_the_device_does_not_survive_is_left_out(parts, monkeypatch):
    monkeypatch.setattr("gpu.part_results.restart", again)
    monkeypatch.setattr("gpu.part_results.device_answers", lambda: False)
    for _ in range(2):
        with pytest.raises(Again):
            parts({"a": dict}, {"set up": "a"}, set_up=fail)
    ran, complete, _ = parts({"a": dict}, {"set up": "a"}, set_up=fail)
    assert (ran, complete) == (["a"], True)


def test_what_parts_need_is_set_up_before_them_and_only_for_them(parts):
    ran, _, _ = parts({"a1": dict, "a2": fail, "b1": dict}, {"set up a": "a", "set up b": "b"})
    assert ran == ["set up a", "a1", "a2", "set up b", "b1"]
    ran, complete, _ = parts({"a1": fail, "a2": dict, "b1": fail}, {"set up a": "a", "set up b": "b"})
    assert (ran, complete) == (["set up a", "a2"], True)


def test_a_killed_run_keeps_its_lines_and_the_part_that_ended_the_process_comes_last(parts, tmp_path):
    parts({"a": dict})
    path = tmp_path / "parts.jsonl"
    path.write_text(path.read_text() + '{"part": "name=b kind=b", "start": 1.0}\n{"part": "name=c ki')
    ran, complete, _ = parts({"a": fail, "b": dict, "c": dict})
    assert (ran, complete) == (["c", "b"], True)
    assert all(json.loads(line) for line in path.read_text().splitlines())


def test_a_file_of_another_stage_is_refused(parts, tmp_path):
    from gpu.part_results import ResultFile

    parts({"a": dict})
    file = ResultFile(tmp_path / "parts.jsonl")
    with pytest.raises(ValueError, match="is of another stage, stage not other; give another --out"):
        file.begin("other", {}, {"machine": {"gpu": None}})
    with pytest.raises(ValueError, match="is of another GPU"):
        file.begin("stage", {}, {"machine": {"gpu": "H100"}})


def test_generate_is_compiled_at_the_first_shape_alone_and_has_time_for_it(monkeypatch, tmp_path):
    from gpu import part_results, speed_stage

    limits: dict[str, float] = {}
    monkeypatch.setattr(part_results, "run_part", lambda file, part, limit: limits.setdefault(part.name, limit))
    args = SimpleNamespace(
        shapes=["7B", "default"], methods=["plain"], baselines=["generate", "generate compiled"], temperatures=[0.0],
        batches=[2], take=1,
    )  # fmt: skip
    file = part_results.ResultFile(tmp_path / "speed.jsonl")
    file.append({})
    part_results.run_parts(file, speed_stage.parts(args), minutes=3, part_seconds=60)
    assert [limit for name, limit in limits.items() if name.endswith("generate compiled")] == [150]
    assert limits["what=set up shape=7B system=generate compiled"] == 150
    assert limits["what=set up shape=7B system=generate"] == 60


def test_a_visit_goes_on_after_parts_that_fail_hang_or_do_not_start(tmp_path, capsys):
    from gpu.visit import VisitPart, run_visit

    def part(name: str, share: float, *command: str) -> VisitPart:
        return VisitPart(name, share, command, f"what {name} wrote")

    hangs = "import subprocess, sys; subprocess.Popen(['sleep', '60']); print('waits', flush=True); sys.stdin.close()\n"
    hangs += "import signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN); time.sleep(60)"
    parts = [
        part("wrong", 8, sys.executable, "-c", "print('nearly'); raise SystemExit(3)"),
        part("missing", 1, str(tmp_path / "nothing")),
        part("hanging", 1, sys.executable, "-c", hangs),
        part("killed", 9, sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"),
        part("good", 9, sys.executable, "-c", "import os; print('path', os.environ['PYTHONPATH'].split(':')[0])"),
    ]
    started = time.monotonic()
    assert run_visit(parts, tmp_path / "visit", minutes=1 / 2) == 1
    assert time.monotonic() - started < 20
    found = json.loads((tmp_path / "visit/visit.json").read_text())["parts"]
    assert [each["ended"].partition(":")[0] for each in found] == [
        "exit code 3", "did not start", "took too long", "SIGKILL", "well",
    ]  # fmt: skip
    assert [each["said"] for each in found] == ["nearly", "", "waits", "", f"path {ROOT / 'src'}"]
    assert "nearly" in (tmp_path / "visit/visit.log").read_text()
    assert "read what good wrote" in capsys.readouterr().out
    assert run_visit(parts[-1:], tmp_path / "visit", minutes=1) == 0
    assert run_visit(parts[-1:], tmp_path / "visit", minutes=0) == 1


def test_a_visit_has_the_stages_with_options_that_they_know(tmp_path):
    from gpu import stages, visit

    args = visit.make_parser().parse_args(["--out", str(tmp_path)])
    parts = visit.parts_of_visit(args)
    known = [stages.make_parser().parse_args([*part.command[2:], "--minutes", "1"]) for part in parts if part.is_stage]
    for each in known:
        stages.split_lists(each)
        assert stages.STAGES[each.stage].parts(each)
    assert len({each.out for each in known}) == 5, "the larger run of exactness goes on in the file of the small one"
    without = visit.make_parser().parse_args(["--out", str(tmp_path), "--no-model", "--rehearse"])
    assert [part.name for part in visit.parts_of_visit(without)] == ["environment", "tests", "calls", "more-exactness"]
    assert "--rehearse" in visit.parts_of_visit(without)[2].command
