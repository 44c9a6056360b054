"""A benchmark counts what really happened, notices who cheats, and says how certain it is."""

import dataclasses
import json
import re
from html import unescape

import numpy as np
import pytest
from test_cli import saltus_

import saltus
from invented_run import invented_records, results_of
from saltus.cli.bench_results import remove_results
from saltus.cli.bench_systems import _variants, _varied
from saltus.cli.bench_tables import print_tables
from saltus.core.sampling import Sampling
from saltus.engine.prompts import Prompt
from saltus.evaluation.benchmarks.benchmark_run import Benchmark, open_records
from saltus.evaluation.benchmarks.graders import GRADERS
from saltus.evaluation.benchmarks.suites import Task
from saltus.evaluation.benchmarks.systems_under_test import MethodUnderTest, methods_under_test
from saltus.evaluation.reports import aggregation as results_
from saltus.evaluation.reports.aggregation import aggregate_records, few_tasks_note, list_skipped
from saltus.evaluation.reports.markdown import render_markdown
from saltus.evaluation.reports.page import render_page
from saltus.evaluation.reports.spec_bench import spec_bench_answers

TASKS = [
    Task("a", "cats", Prompt(("the cat sat on the mat and the cat sat on the",))),
    Task("b", "cats", Prompt(("the dog sat on the log", "and the cat?"))),
    Task("c", "dogs", Prompt(("the dog and the cat and the dog and the cat and",))),
]
WRITING = {"max_new_tokens": 24, "seed": 3, "sampling": Sampling(temperature=0.7), "ignore_eos": False}
METHODS = ["plain", "lookup", "jacobi"]


@pytest.fixture(scope="module")
def engine(tiny_folder) -> saltus.Engine:
    return saltus.load(str(tiny_folder()), "plain")


def bench(engine, systems=None, tasks=TASKS, **changes) -> Benchmark:
    settings = {name: value for name, value in changes.items() if name != "num_seeds"}
    systems = systems or methods_under_test(engine, METHODS)
    return Benchmark(engine, systems, tasks, WRITING | settings, num_seeds=changes.get("num_seeds", 1))


def measured(run: Benchmark) -> list[dict]:
    run.warm_up()
    return [record for number in range(len(run.tasks)) for record in run.measure_task(number)]


# What is counted


@pytest.mark.slow
def test_calls_and_tokens_agree_with_an_independent_count(engine, tiny_folder):
    told = aggregate_records(measured(bench(engine)))
    for name in METHODS:
        own = saltus.load(str(tiny_folder()), name)
        texts = []
        for task in TASKS:
            history: list[dict[str, str]] = []
            for turn in task.prompt.turns:
                history.append({"role": "user", "content": turn})
                own.decoder.prefix_tree.clear()
                texts.append(own.generate(history, max_new_tokens=24, seed=3, temperature=0.7))
                history.append({"role": "assistant", "content": texts[-1].text})
        assert told[name]["tokens"] == sum(len(text.tokens) for text in texts)
        assert told[name]["identical"] == told[name]["texts"] == 4
        assert told[name]["problems"] == []
        if name == "plain":  # what others ask depends on the times that the controller sees
            assert told[name]["calls"] == sum(len(text.calls) for text in texts) == told[name]["tokens"]
    assert list(told) == METHODS


@pytest.mark.slow
def test_records_hold_every_step(engine):
    for record in measured(bench(engine)):
        calls = record["calls"]
        assert sum(call["decided"] for call in calls) == record["new_tokens"] == len(record["tokens"])
        assert all(1 <= call["decided"] <= call["nodes"] + 1 for call in calls)
        assert calls[0]["read"] == record["prompt_tokens"]
        assert sum(call["seconds"] for call in calls) < record["seconds"]
        assert record["prefill_seconds"] == calls[0]["seconds"]


@pytest.mark.slow
def test_every_turn_reads_what_plain_decoding_answered_before(engine):
    records = [record for record in measured(bench(engine)) if record["task"] == "b"]
    assert [(record["turn"], record["system"]) for record in records] == [(t, m) for t in (0, 1) for m in METHODS]
    answer = next("".join(record["pieces"]) for record in records if record["system"] == "plain")
    messages = [("user", "the dog sat on the log"), ("assistant", answer), ("user", "and the cat?")]
    prompt = engine.encode([{"role": role, "content": content} for role, content in messages])
    assert {record["prompt_tokens"] for record in records if record["turn"] == 1} == {len(prompt)}


def test_each_prompt_is_answered_with_each_seed(engine):
    run = bench(engine, methods_under_test(engine, ["plain", "lookup"]), [TASKS[1]], num_seeds=2)
    records = run.measure_task(0)
    assert [(one["seed"], one["turn"]) for one in records if one["system"] == "plain"] == [
        (3, 0),
        (3, 1),
        (4, 0),
        (4, 1),
    ]
    first = {one["seed"]: one for one in records if one["system"] == "plain" and not one["turn"]}
    again = engine.generate(TASKS[1].prompt.turns[0], method="plain", max_new_tokens=24, seed=4, temperature=0.7)
    assert first[4]["tokens"] == again.tokens != first[3]["tokens"]
    told = aggregate_records(records)["lookup"]
    assert told["identical"] == told["texts"] == 4
    assert told["ci95"]["speedup"] is None  # the answers to one prompt are one task
    choices = spec_bench_answers(records, "lookup")[0]["choices"]
    assert [(choice["index"], len(choice["turns"])) for choice in choices] == [(0, 2), (1, 2)]
    page = render_page(results_of(invented_records()) | {"methods": aggregate_records(records)}, records)
    assert page.count('"prompt":') == 2  # the turns of the first seed


@pytest.mark.parametrize(("temperature", "compared"), [(0.0, 1), (0.7, None)])
def test_sampled_texts_of_rejection_sampling_are_not_compared(tiny_folder, temperature, compared):
    own = saltus.load(str(tiny_folder()), "plain", rule="reject")
    run = bench(
        own, methods_under_test(own, ["plain", "lookup"]), TASKS[:1], sampling=Sampling(temperature=temperature)
    )
    told = aggregate_records(run.measure_task(0))
    assert (told["plain"]["identical"], told["lookup"]["identical"]) == (1, compared)


def test_a_method_is_measured_with_several_options(engine):
    variants = _variants(
        ["plain", "lookup"], "plain+lookup", _varied(["lookup.max_ngram_size=2,4"], "plain+lookup"), ()
    )
    assert [each.name for each in variants] == [
        "plain", "lookup lookup.max_ngram_size=2", "lookup lookup.max_ngram_size=4",
    ]  # fmt: skip
    systems = methods_under_test(engine, variants)
    sizes = [system.engine.decoder.setup("lookup").methods[0].max_ngram_size for system in systems[1:]]
    assert sizes == [2, 4]
    records = bench(engine, systems, [TASKS[0]]).measure_task(0)
    assert [record["system"] for record in records] == [each.name for each in variants]
    assert aggregate_records(records)[variants[2].name]["identical"] == 1
    combined = _varied(["lookup.max_ngram_size=2,4", "jacobi.block_size=4,8"], "plain+jacobi+lookup")
    assert len(_variants(["jacobi+lookup"], "plain+jacobi+lookup", combined, ())) == 4


def test_another_side_begins_each_time(engine):
    began = []

    @dataclasses.dataclass
    class Listed(MethodUnderTest):
        def generate(self, question):
            began.append(self.name)
            return super().generate(question)

    systems = [
        Listed(system.name, system.engine, system.call_recorder) for system in methods_under_test(engine, METHODS)
    ]
    measured(bench(engine, systems, [TASKS[0], TASKS[2]]))
    assert began[3:] == ["plain", "lookup", "jacobi", "lookup", "jacobi", "plain"]


def test_answers_are_graded_by_the_task_s_own_reference(engine):
    task = Task("1", "math", Prompt(("what?",)), reference={"answer": "#### 123456"})
    run = Benchmark(engine, methods_under_test(engine, ["plain"]), [task], WRITING, grader=GRADERS["gsm8k"])
    (record,) = run.measure_task(0)
    assert record["score"] == {"correct": False}
    record["score"] = {"correct": True}
    told = aggregate_records([record])["plain"]
    assert (told["accuracy"], told["accuracy_of"]) == (1.0, "exact answer")


def test_a_task_with_a_turn_that_is_too_long_is_skipped_for_all_systems(tiny_folder, tmp_path):
    engine = saltus.load(str(tiny_folder()), "plain")
    engine.limit_context(100)
    long = Task("long", "cats", Prompt(("the cat sat on the mat " * 20,)))
    grows = Task("grows", "dogs", Prompt(("the dog sat on the log", "and the cat? " * 20)))
    run = bench(engine, methods_under_test(engine, ["plain", "lookup"]), [long, grows, TASKS[0]])
    records = open_records(tmp_path, plan(systems=["plain", "lookup"]), run.tasks, NOW)
    run.warm_up()
    for number in range(3):
        records.append(run.measure_task(number))
    again = open_records(tmp_path, plan(systems=["plain", "lookup"]), run.tasks, NOW)
    assert again.records == records.records
    assert again.num_finished_tasks == 3
    assert [record["task"] for record in again.answers] == ["a", "a"]
    first, second = list_skipped(again.skipped)
    assert re.match(r"task long: the prompt has \d+ tokens, but .* reads at most 100; shorten it", first)
    assert re.match(r"task grows, turn 1: the prompt has \d+ tokens", second)


# Who cheats


@dataclasses.dataclass
class Early(MethodUnderTest):
    """Stops half-way, and so is done sooner."""

    def generate(self, question):
        return super().generate(dataclasses.replace(question, max_new_tokens=question.max_new_tokens // 2))


@dataclasses.dataclass
class Unverified(MethodUnderTest):
    """Asks the model for half of the text, and gives out a guess for the rest: even a right one is no decoding."""

    def generate(self, question):
        half = dataclasses.replace(question, max_new_tokens=question.max_new_tokens // 2)
        pieces, _, calls = super().generate(half)
        _, whole, _ = super().generate(question)
        return pieces, whole, calls


@dataclasses.dataclass
class Warm(MethodUnderTest):
    """Has read the prompt before the clock starts."""

    def generate(self, question):
        super().generate(question)
        self.call_recorder.calls[:] = []
        stream = self.engine.stream(
            question.prompt,
            method=self.name,
            max_new_tokens=question.max_new_tokens,
            seed=question.seed,
            temperature=0.7,
        )
        pieces = [chunk.text for chunk in stream]
        return pieces, stream.generation, list(self.call_recorder.calls)


@dataclasses.dataclass
class Remembering(MethodUnderTest):
    """Gives out what it wrote before."""

    def generate(self, question):
        pieces, generation, _ = super().generate(question)
        return pieces, generation, []


@pytest.mark.parametrize(
    ("cheat", "said"),
    [
        (Early, "ended after 12 of 24 tokens"),
        (Unverified, "never checked by the model"),
        (Warm, "tokens were read"),
        (Remembering, "24 tokens came without a call"),
    ],
)
def test_a_cheat_is_caught(engine, cheat, said):
    systems = methods_under_test(engine, ["plain", "lookup"])
    honest = MethodUnderTest("lookup", systems[1].engine, systems[1].call_recorder)
    planted = cheat("lookup", systems[1].engine, systems[1].call_recorder)
    for system, caught in ((honest, False), (planted, True)):
        told = aggregate_records(
            measured(bench(engine, [systems[0], system], [TASKS[0]], ignore_eos=cheat is not Warm))
        )
        assert any(said in problem for problem in told["lookup"]["problems"]) is caught
        assert told["plain"]["problems"] == []


@pytest.mark.slow
def test_a_text_that_is_not_plain_s_is_not_counted_as_the_same(engine):
    records = measured(bench(engine))
    next(record for record in records if record["system"] == "jacobi")["tokens"][-1] ^= 1
    assert aggregate_records(records)["jacobi"]["identical"] == 3


def test_what_a_method_learns_of_a_text_another_does_not_draft(engine):
    names = ["token_recycling", "token_recycling+lookup"]
    systems = methods_under_test(engine, names)
    request = bench(engine, systems)._new_request(TASKS[0].prompt.turns[0], False, (), WRITING)
    calls = [len(system.generate(request)[2]) for system in systems]
    alone = methods_under_test(engine, names[1:])[0]
    assert calls[1] == len(alone.generate(request)[2])


# How certain it is


def invented(speedup: float, tasks: int = 40, seed: int = 0, noise: float = 0.2) -> list[dict]:
    """Records of two sides whose true ratio is known."""
    random, found = np.random.default_rng(seed), []
    for task in range(tasks):
        tokens = int(random.integers(20, 100))
        for system, pace in (("plain", 1.0), ("fast", speedup)):
            calls = [{"decided": 1, "nodes": 0, "seconds": 0.01, "read": 1}] * tokens
            seconds = tokens * 0.01 / pace * random.lognormal(0, noise)
            found.append(
                {
                    "task": str(task), "category": "xy"[task % 2], "turn": 0, "system": system, "kind": "method",
                    "prompt_tokens": 5, "tokens": list(range(tokens)), "new_tokens": tokens, "pieces": ["a"] * tokens,
                    "finish_reason": "length", "seconds": seconds, "prefill_seconds": 0.0, "draft_calls": 0,
                    "calls": calls, "problems": [], "score": None, "accuracy_of": None, "other_rng": False,
                }
            )  # fmt: skip
    return found


def test_a_known_ratio_is_found():
    told = aggregate_records(invented(1.5, noise=0.0))["fast"]
    assert told["speedup"] == pytest.approx(1.5)
    assert told["decode_speedup"] == pytest.approx(1.5)
    assert told["ci95"]["speedup"] == pytest.approx([1.5, 1.5])
    assert told["ms_per_call"] * (told["calls"] - told["texts"]) == pytest.approx(1000 * told["seconds"])
    speed = 1000 * told["decode_tokens_per_call"] / told["ms_per_call"]  # as the figure of calls draws it
    assert speed == pytest.approx(told["decode_tokens_per_second"])
    assert told["by_category"]["x"]["speedup"] == pytest.approx(1.5)
    assert told["by_category"]["x"]["texts"] + told["by_category"]["y"]["texts"] == told["texts"] == 40


def test_two_methods_are_compared_on_the_same_tasks():
    records = invented(1.2)
    noise = {record["task"]: record["seconds"] for record in records if record["system"] == "fast"}
    records += [
        record | {"system": "twice", "seconds": noise[record["task"]] / 2}
        for record in records
        if record["system"] == "plain"
    ]
    told = aggregate_records(records)
    pair = told["twice"]["speedup_over"]["fast"]
    assert pair["ratio"] == pytest.approx(2)
    assert pair["ci95"] == pytest.approx([2, 2])  # although each alone is uncertain
    assert told["fast"]["ci95"]["speedup"][1] - told["fast"]["ci95"]["speedup"][0] > 0.05
    assert told["fast"]["speedup_over"]["twice"]["ratio"] == pytest.approx(1 / 2)
    assert told["fast"]["speedup_over"]["plain"]["ratio"] == told["fast"]["speedup"]
    assert told["fast"]["tokens_per_call_over"]["twice"] == {"ratio": 1.0, "ci95": [1.0, 1.0]}
    run = results_of(invented_records()) | {"methods": told}
    for row in ("| `twice` | 2.00 × [2.00, 2.00] |  |", "| `twice` | 1.00 × [1.00, 1.00] |  |"):
        assert row in render_markdown(run)


def test_the_markdown_has_acceptance_by_position():
    run = results_of(invented_records(systems={"plain": 0.0, "lookup": 0.5}))
    shares = run["methods"]["lookup"]["acceptance_by_position"]
    assert f"| `lookup` | {' | '.join(f'{share:.2f}' for share in shares)} |" in render_markdown(run)


@pytest.mark.slow
def test_intervals_hold_the_truth_as_often_as_they_say(monkeypatch):
    monkeypatch.setattr(results_, "RESAMPLES", 400)
    results_._resample_counts.cache_clear()
    held = 0
    for seed in range(200):
        low, high = aggregate_records(invented(1.5, seed=seed))["fast"]["ci95"]["speedup"]
        held += low <= 1.5 <= high
    results_._resample_counts.cache_clear()
    assert 178 <= held <= 199  # 95 % of 200 is 190; a bootstrap of 40 tasks holds a little less


def test_one_task_has_no_interval():
    told = aggregate_records(invented(1.5, tasks=3))["fast"]
    assert told["ci95"]["speedup"][0] < told["ci95"]["speedup"][1]
    assert told["by_category"]["y"]["ci95"]["speedup"] is None  # of one task
    assert told["by_category"]["y"]["speedup"] > 1


@pytest.mark.parametrize("tasks", [1, 4, 10])
def test_intervals_of_few_tasks_are_marked_in_every_report(tasks, capsys):
    records = invented(1.5, tasks=tasks)
    notes = [few_tasks_note(tasks)] if tasks < 10 else []
    run = results_of(invented_records()) | {"methods": aggregate_records(records), "notes": notes}
    print_tables(run)
    shown = " ".join(capsys.readouterr().out.split())
    for report in (shown, render_markdown(run), unescape(render_page(run, records))):
        assert ("too narrow; measure 10 or more" in report) == (tasks == 4)
        assert ("Only 1 task: there are no intervals" in report) == (tasks == 1)
    page = unescape(render_page(run, records))
    assert ("Intervals of fewer than 10 tasks are too narrow: x, y." in page) == (tasks > 1)
    assert ("95 % intervals of 10 tasks" in page) == (tasks == 10)


def test_acceptance_by_position_counts_calls_that_checked_drafts():
    (record,) = [r for r in invented(1.0, tasks=1) if r["system"] == "plain"]
    shapes = [(1, 0), (3, 4), (1, 4), (2, 1), (1, 0)]
    record["calls"] = [{"decided": d, "nodes": n, "seconds": 0.01, "read": 1} for d, n in shapes]
    assert aggregate_records([record])["plain"]["acceptance_by_position"] == pytest.approx([2 / 3, 1 / 3])


def test_a_side_that_does_not_tell_its_calls_has_none():
    records = invented(2.0)
    for record in records:
        if record["system"] == "fast":
            record |= {"calls": None, "kind": "baseline"}
    told = aggregate_records(records)["fast"]
    assert told["speedup"] > 1.5
    assert told["calls"] is told["tokens_per_call"] is told["ms_per_call"] is told["acceptance_by_position"] is None
    assert told["ci95"]["tokens_per_call"] is None
    assert told["identical"] == 40  # by its characters


# What is kept


def plan(**changes) -> dict:
    return {"systems": METHODS, "max_new_tokens": 24} | changes


NOW = {"commit": "abc", "date": "today"}


@pytest.mark.slow
def test_an_interrupted_run_goes_on_without_gaps_or_doubles(engine, tmp_path):
    run = bench(engine)
    first = open_records(tmp_path, plan(), TASKS, NOW)
    first.append(run.measure_task(0))
    first.append(run.measure_task(1))
    file = tmp_path / "records.jsonl"
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join(lines[:-1]) + lines[-1][:40])  # cut in the middle of the second task's last record
    second = open_records(tmp_path, plan(), TASKS, NOW)
    assert second.num_finished_tasks == 1
    for number in range(second.num_finished_tasks, len(TASKS)):
        second.append(run.measure_task(number))
    third = open_records(tmp_path, plan(), TASKS, NOW)
    keys = [(record["task"], record["turn"], record["system"]) for record in third.records]
    assert len(set(keys)) == len(keys) == 4 * 3
    assert third.num_finished_tasks == 3


def test_a_task_of_several_seeds_is_done_when_all_are(tmp_path):
    row = {"task": "a", "turn": 0}
    open_records(tmp_path, plan(seeds=2), TASKS, NOW).append([row | {"seed": 3, "system": name} for name in METHODS])
    assert open_records(tmp_path, plan(seeds=2), TASKS, NOW).num_finished_tasks == 0


def test_a_folder_keeps_one_run_only(tmp_path):
    open_records(tmp_path, plan(), TASKS, NOW)
    with pytest.raises(ValueError, match=r"another run \(max_new_tokens: 24, now 32\); give another --out, or --fresh"):
        open_records(tmp_path, plan(max_new_tokens=32), TASKS, NOW)
    assert open_records(tmp_path, plan(max_new_tokens=32), TASKS, NOW, fresh=True).records == []


@pytest.mark.slow
def test_a_run_keeps_when_and_at_which_commit_it_was_measured(engine, tmp_path):
    run, later = bench(engine), {"commit": "def", "date": "tomorrow"}
    notebook = open_records(tmp_path, plan(), TASKS, NOW)
    for number in range(2):
        notebook.append(run.measure_task(number))
    with pytest.raises(ValueError, match="begun at commit abc, and this is def"):
        open_records(tmp_path, plan(), TASKS, later)
    with pytest.raises(ValueError, match="begun with a number of cores of None, and this is 2"):
        open_records(tmp_path, plan(), TASKS, {**NOW, "machine": {"cores": 2}})
    with pytest.raises(ValueError, match="begun with a number of threads of None, and this is 1"):
        open_records(tmp_path, plan(), TASKS, {**NOW, "machine": {"threads": 1}})
    for name in ("torch", "transformers", "saltus"):
        with pytest.raises(ValueError, match=f"begun with {name} None, and this is 7"):
            open_records(tmp_path, plan(), TASKS, {**NOW, "machine": {name: "7.0"}})
    notebook.append(run.measure_task(2))
    assert open_records(tmp_path, plan(), TASKS, later).run_info == NOW


def test_out_must_be_a_folder(tmp_path):
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(ValueError, match="is a file; give a folder"):
        open_records(file, plan(), TASKS, NOW)


# The command


@pytest.fixture
def asked(tiny_folder, tmp_path) -> list[object]:
    file = tmp_path / "prompts.jsonl"
    rows = [{"prompt": f"the cat sat on the mat {'and the dog ' * n}", "reference": "the cat"} for n in range(3)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return ["bench", "-m", str(tiny_folder()), "--suite", f"prompts:{file}", "--methods", "lookup", "-n", 12]


@pytest.mark.slow
@pytest.mark.usefixtures("no_pdf")
def test_bench_writes_all_that_it_promises(asked, tmp_path):
    out = tmp_path / "out"
    shown = saltus_(*asked, "--out", out, "--baselines", "transformers").stdout
    assert all(name in shown for name in ("plain", "lookup", "transformers", "3 of 3", "ROUGE-L"))
    names = {path.name for path in out.iterdir()}
    assert {
        "results.json",
        "records.jsonl",
        "page.html",
        "results.md",
        "speed-up.png",
        "speed-up.svg",
        "calls.svg",
    } <= names
    told = json.loads((out / "results.json").read_text())
    assert list(told["methods"]) == ["plain", "lookup", "transformers"]
    assert told["methods"]["transformers"]["identical"] == 3
    assert {"command", "date", "commit", "machine", "model", "suite", "settings"} <= set(told)
    records = [json.loads(line) for line in (out / "records.jsonl").read_text().splitlines()]
    assert told["methods"] == json.loads(json.dumps(aggregate_records(records)))
    assert told["notes"] == [few_tasks_note(3)]
    assert "Only 3 tasks" in shown


@pytest.mark.slow
@pytest.mark.usefixtures("no_figures")
def test_bench_says_everywhere_which_tasks_it_skipped(tiny_folder, tmp_path):
    file, out = tmp_path / "long.jsonl", tmp_path / "out"
    rows = [{"prompt": "the cat sat on the mat " * (200 if long else 1)} for long in (False, True, False)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = ["bench", "-m", tiny_folder(), "--suite", f"prompts:{file}", "--methods", "lookup", "-n", 6]
    shown = saltus_(*command, "--out", out).stdout
    assert "2 tasks" in shown
    assert "1 task skipped for all systems:\ntask 1: the prompt has" in shown
    told = json.loads((out / "results.json").read_text())
    assert told["suite"]["tasks"] == told["methods"]["plain"]["texts"] == 2
    (said,) = told["skipped"]
    assert f"- {said}" in (out / "results.md").read_text()
    assert said in unescape((out / "page.html").read_text())
    assert "3 of 3 tasks were measured before" in saltus_(*command, "--out", out).stderr
    file.write_text(json.dumps(rows[1]))
    assert (
        "no task fits into the context of all systems; of the first, the prompt has" in saltus_(*command, code=2).stderr
    )


@pytest.mark.slow
@pytest.mark.usefixtures("no_figures")
def test_bench_again_measures_nothing_twice(asked, tmp_path):
    out = tmp_path / "out"
    saltus_(*asked, "--out", out)
    before = (out / "records.jsonl").read_bytes()
    assert "3 of 3 tasks were measured before" in saltus_(*asked, "--out", out).stderr
    assert (out / "records.jsonl").read_bytes() == before
    for name in ("notes.png", "speed-up.svg"):
        (out / name).write_bytes(b"")
    saltus_(*asked, "--out", out, "--fresh", "--methods", "plain")
    assert (out / "records.jsonl").read_bytes() != before
    assert (out / "notes.png").exists()
    assert not (out / "speed-up.svg").exists()


def test_fresh_removes_the_files_of_the_run_before_and_no_others(tmp_path):
    ours = ["results.md", "results.json", "page.html", *(f"text.{kind}" for kind in ("svg", "pdf", "png"))]
    ours.append("model_answer/endpoint-a-b.jsonl")
    others = ["notes.png", "model_answer/vicuna.jsonl"]
    (tmp_path / "model_answer").mkdir()
    for name in (*ours, *others):
        (tmp_path / name).write_text('{"methods": {"plain": {}, "endpoint:a/b": {}}}')
    remove_results(tmp_path)
    assert [name for name in (*ours, *others) if (tmp_path / name).exists()] == others
    (tmp_path / "results.json").write_text("damaged")
    remove_results(tmp_path)
    assert not (tmp_path / "results.json").exists()


@pytest.mark.slow
@pytest.mark.usefixtures("no_figures")
def test_ctrl_c_keeps_what_was_measured_wherever_it_is_written(asked, tmp_path, monkeypatch):
    out = tmp_path / "a" / "b"
    measure = Benchmark.measure_task

    def interrupted(self, number):
        if number == 2:
            raise KeyboardInterrupt
        return measure(self, number)

    monkeypatch.setattr(Benchmark, "measure_task", interrupted)
    told = saltus_(*asked, "--out", out, code=130)
    assert "interrupted after 2 of 3 tasks; the same command goes on from there" in told.stderr
    assert json.loads((out / "results.json").read_text())["suite"]["tasks"] == 2
    monkeypatch.undo()
    saltus_(*asked, "--out", out)
    assert json.loads((out / "results.json").read_text())["suite"]["tasks"] == 3


@pytest.mark.slow
def test_bench_ends_with_1_where_a_method_s_text_is_another(asked, monkeypatch):
    account = MethodUnderTest.to_answer

    def planted(self, question, made):
        written = account(self, question, made)
        return written if self.name == "plain" else dataclasses.replace(written, tokens=[*written.tokens[:-1], 7])

    monkeypatch.setattr(MethodUnderTest, "to_answer", planted)
    assert "0 of 3" in saltus_(*asked, code=1).stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--methods", "lokup"], "did you mean lookup"),
        (["--suite", "humanevil"], "did you mean humaneval"),
        (["--suite", "prompts"], "prompts:FILE"),
        (["--suite", "gsm8k:nowhere.jsonl"], "nowhere.jsonl does not exist"),
        (["--baselines", "vllm"], "servers by --endpoint"),
        (["--baselines", "transformers-assistant"], "--assistant MODEL"),
        (["-t", "-1"], "temperature"),
        (["--vary", "lookup.max_ngram_size"], "write METHOD.FIELD=VALUE,VALUE"),
        (["--methods", "lookup", "--vary", "lookup.max_ngram_size=2,x"], "--vary lookup.max_ngram_size=x"),
        (["--methods", "lookup", "--option", "ptp.model=a"], "name it with --methods"),
        (["--methods", "lookup", "--option", "small_model.model=a"], "name it with --methods"),
        (["--draft-model", "a", "--option", "small_model.model=b"], "but --option says small_model.model=b; give one"),
        (["--draft-model", "a", "--vary", "small_model.model=b,c"], "but --vary says small_model.model=b,c; give one"),
        (["--out", __file__], "is a file; give a folder"),
        (["--out", "/proc/nowhere"], "cannot be made"),
        (["--methods", "auto", "--option", "small_model.max_prompt=9"], "add --option small_model.model=MODEL"),
    ],
)
def test_bad_input_is_told_in_a_line_before_a_model_is_loaded(arguments, said, monkeypatch):
    monkeypatch.setattr("saltus.cli.open_engine.open_engine", lambda *a, **k: pytest.fail("a model was loaded"))
    told = saltus_("bench", *arguments, code=2).stderr
    assert said in told
    assert len(told.splitlines()) == 1


def test_a_server_that_is_not_there_is_told(asked):
    told = saltus_(*asked, "--endpoint", "http://127.0.0.1:9", code=2).stderr
    assert "127.0.0.1:9/v1/models does not answer" in told


def test_the_quick_suite_comes_with_the_package(tiny_folder):
    told = json.loads(saltus_("bench", "-m", tiny_folder(), "--limit", 2, "-n", 4, "--methods", "", "--json").stdout)
    assert told["suite"] == {"name": "quick", "tasks": 2, "turns": 2}


def test_the_default_method_can_be_measured_with_a_draft_model(tiny_folder):
    given = "--limit", 1, "-n", 4, "--methods", "auto", "--draft-model", str(tiny_folder()), "--json"
    assert "auto is small_model+lookup here" in saltus_("bench", "-m", tiny_folder(), *given).stderr


def test_the_default_method_can_be_measured_with_options_of_what_it_stands_for(tiny_folder):
    given = "--limit", 1, "-n", 4, "--methods", "auto,lookup", "--option", "lookup.max_ngram_size=5", "--json"
    ran = saltus_("bench", "-m", tiny_folder(), *given)
    assert "auto is lookup here" in ran.stderr
    assert set(json.loads(ran.stdout)["methods"]) == {"plain", "auto", "lookup"}


@pytest.mark.slow
@pytest.mark.usefixtures("no_figures")
def test_a_damaged_record_is_named_with_its_line(asked, tmp_path):
    common = [*asked, "--limit", 2, "--out", tmp_path / "out"]
    saltus_(*common)
    file = tmp_path / "out" / "records.jsonl"
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(lines[0] + b'{"task": "bro\x01ken"}\n' + b"".join(lines[2:]))
    assert "records.jsonl, line 2 is damaged; delete" in saltus_(*common, code=2).stderr
    file.write_bytes(b"".join(lines))
    (file.parent / "plan.json").write_text("[]")
    assert "plan.json is damaged; give another --out" in saltus_(*common, code=2).stderr
