"""A benchmark gives both sides of a hole to models that read them, and counts and checks their calls as ever."""

import dataclasses
import json
import shutil
from types import SimpleNamespace

import pytest
from test_cli import complaint, lines, saltus_
from test_infill import BLANK, filler  # noqa: F401  a fixture
from transformers import AutoTokenizer

import saltus
from saltus.core.sampling import Sampling
from saltus.engine.fim import fim_prompt
from saltus.engine.scheduler import run_requests
from saltus.evaluation.benchmarks.benchmark_run import Benchmark
from saltus.evaluation.benchmarks.infill_requests import hole_request, infill_request
from saltus.evaluation.benchmarks.suites import load_tasks
from saltus.evaluation.benchmarks.systems_under_test import MethodUnderTest, methods_under_test
from tiny_models import byte_tokenizer, tiny_xlnet

LINE = {
    "task_id": "SingleLineInfilling/Own/0/L1",
    "prompt": "def cat(mat):\n    the = mat\n",
    "canonical_solution": "    sat = the\n",
    "suffix": "    return sat\n",
    "entry_point": "cat",
    "test": "def check(cat):\n    assert cat(1) == 1\n",
}
SPAN = LINE | {
    "task_id": "RandomSpanInfilling/Own/0/1",
    "prompt": "def cat(mat):\n    the = ",
    "canonical_solution": "mat\n    sat = ",
    "suffix": "the\n    return sat\n",
}
WRITING = {"max_new_tokens": 12, "seed": 1, "sampling": Sampling(temperature=0.8), "ignore_eos": False}


@pytest.fixture
def tasks(tmp_path):
    return load_tasks(f"infilling:{lines(tmp_path / 'rows.jsonl', LINE, SPAN)}")


def test_both_sides_of_a_hole_are_read_and_the_last_line_s_end_is_given(filler, tasks):  # noqa: F811
    engine = saltus.load(filler, "plain")
    line, span = (infill_request(engine, task, dict(WRITING)) for task in tasks)
    assert line.template is not None
    assert line.template.pieces == (LINE["prompt"], "\n" + LINE["suffix"])
    assert span.template is not None
    assert span.template.pieces == (SPAN["prompt"], SPAN["suffix"]), "a space before the hole stays"
    assert (line.template.hole_lengths, line.max_new_tokens) == ((None,), 12)
    assert engine.tokenizer.decode(line.prompt_tokens[:-1]) == "".join(line.template.pieces)


def test_of_a_long_text_the_lines_nearest_to_the_hole_are_read(filler, tasks):  # noqa: F811
    engine = saltus.load(filler, "plain")
    context = engine.target.context_length
    long = "".join(f"    line = {number}\n" for number in range(99))
    task = dataclasses.replace(tasks[0], raw=long, suffix="\n" + long)
    request = infill_request(engine, task, dict(WRITING))
    assert request.template is not None
    before, after = request.template.pieces
    assert long.endswith(before)
    assert ("\n" + long).startswith(after)
    assert context - 40 < len(request.prompt_tokens) + 12 <= context
    assert len(before) > 1.5 * len(after)
    short = infill_request(engine, dataclasses.replace(task, suffix="\n"), dict(WRITING))
    assert short.template is not None
    assert len(short.template.pieces[0]) > 1.3 * len(before), "what the right side leaves is used"


@pytest.mark.parametrize("settings", [{}, {"sampling": Sampling()}, {"max_new_tokens": 3}])
def test_every_method_fills_the_same_and_its_calls_are_verified(filler, tasks, settings):  # noqa: F811
    engine = saltus.load(filler, "plain")
    systems = methods_under_test(engine, ["plain", "assd", "lookup"])
    run = Benchmark(engine, systems, tasks, WRITING | settings)
    run.warm_up()
    for number, task in enumerate(tasks):
        records = run.measure_task(number)
        assert [record["problems"] for record in records] == [[], [], []]
        assert len({tuple(record["tokens"]) for record in records}) == 1
        expected = engine.infill_request(
            infill_request(engine, task, dict(WRITING | settings)).template, verbatim=True, seed=1,
            open_tokens=run.request_settings["max_new_tokens"],
            temperature=run.request_settings["sampling"].temperature,
        )  # fmt: skip
        for _ in run_requests(engine.decoder, [expected.request], "plain"):
            pass
        filling = expected.infilling().fillings[0]
        for record in records:
            assert "".join(record["pieces"]) == filling
            assert sum(call["decided"] for call in record["calls"]) == len(record["tokens"])
            assert len(record["pieces"]) == len(record["calls"])
            ended = BLANK in record["tokens"]
            assert (record["finish_reason"] == "stop") == ended
            assert record["tokens"].count(BLANK) == ended, "tokens after the end are forced, and not counted"


def test_a_token_that_was_not_verified_is_a_problem(filler, tasks, monkeypatch):  # noqa: F811
    engine = saltus.load(filler, "plain")
    (system,) = methods_under_test(engine, ["plain"])
    request = infill_request(engine, tasks[0], dict(WRITING))
    pieces, found, calls = system.generate(request)
    assert not system.to_answer(request, (pieces, found, calls)).problems
    assert "never checked by the model" in system.to_answer(request, (pieces, found, calls[:2])).problems[0]
    wrong = dataclasses.replace(request, prompt_tokens=(7, *request.prompt_tokens[1:]))
    assert "another text" in system.to_answer(wrong, (pieces, found, calls)).problems[0]


@pytest.mark.slow
def test_a_model_that_cannot_end_a_hole_gets_the_reference_s_length(tasks, tmp_path):
    tiny_xlnet().save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    engine = saltus.load(str(tmp_path), "plain")
    run = Benchmark(engine, methods_under_test(engine, ["plain", "assd"]), tasks[:1], WRITING)
    run.warm_up()
    length = len(engine.tokenizer("    sat = the", add_special_tokens=False).input_ids)
    for record in run.measure_task(0):
        assert len(record["tokens"]) == length
        assert not record["problems"]


@pytest.mark.slow
def test_the_command_grades_fillings_and_refuses_baselines(filler, tmp_path, monkeypatch):  # noqa: F811
    asked = ["bench", "-m", filler, "--suite", f"infilling:{lines(tmp_path / 'rows.jsonl', LINE)}", "-n", 12]
    told = json.loads(saltus_(*asked, "--methods", "assd", "--json").stdout)
    assert (told["methods"]["assd"]["identical"], told["methods"]["plain"]["accuracy"]) == (1, 0.0)
    assert "fills holes here; leave out baselines and servers" in complaint(*asked, "--baselines", "transformers")
    own = MethodUnderTest.to_answer

    def right(self, request, output):
        return dataclasses.replace(own(self, request, output), pieces=["    sat = the"])

    monkeypatch.setattr(MethodUnderTest, "to_answer", right)
    assert json.loads(saltus_(*asked, "--methods", "assd", "--json").stdout)["methods"]["assd"]["accuracy"] == 1.0


@pytest.fixture
def coder(tiny_folder, tmp_path) -> str:
    """A causal model whose tokenizer has fill-in-the-middle tokens."""
    shutil.copytree(tiny_folder(vocab_size=320, max_position_embeddings=256), tmp_path / "coder")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "coder")
    tokens = ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|fim_pad|>"]
    tokenizer.add_special_tokens({"additional_special_tokens": tokens})
    tokenizer.save_pretrained(tmp_path / "coder")
    return str(tmp_path / "coder")


@pytest.mark.parametrize("settings", [{}, {"sampling": Sampling()}])
def test_a_model_with_fill_in_the_middle_tokens_reads_both_sides(coder, tasks, settings):
    engine = saltus.load(coder, "plain")
    run = Benchmark(engine, methods_under_test(engine, ["plain", "lookup", "jacobi"]), tasks, WRITING | settings)
    run.warm_up()
    for number, task in enumerate(tasks):
        records = run.measure_task(number)
        assert [record["problems"] for record in records] == [[], [], []]
        assert len({tuple(record["tokens"]) for record in records}) == 1
        sampling = run.request_settings["sampling"]
        expected = engine.generate(
            task.raw, suffix=task.suffix, raw=True, stop=task.stop, max_new_tokens=12, seed=1,
            temperature=sampling.temperature,
        )  # fmt: skip
        assert "".join(records[0]["pieces"]) == expected.text
        assert records[0]["tokens"] == expected.tokens
        prompt = fim_prompt(engine.tokenizer, "it", task.raw, task.suffix)
        assert records[0]["prompt_tokens"] == len(prompt.tokens)
    baseline = SimpleNamespace(name="transformers", kind="baseline", generate=print, to_answer=print)
    with pytest.raises(ValueError, match="fills holes here; leave out baselines"):
        Benchmark(engine, [baseline], tasks, WRITING)
    left = Benchmark(engine, methods_under_test(engine, ["plain"]), tasks, WRITING | settings, raw=True)
    assert left.measure_task(0)[0]["prompt_tokens"] == len(engine.encode(LINE["prompt"], raw=True))


def test_of_a_long_text_a_fill_in_the_middle_model_reads_the_nearest_lines(coder, tasks):
    engine = saltus.load(coder, "plain")
    long = "".join(f"    line = {number}\n" for number in range(99))
    request = hole_request(engine, dataclasses.replace(tasks[0], raw=long, suffix="\n" + long), dict(WRITING))
    assert isinstance(request.prompt, str)
    assert request.suffix is not None
    assert long.endswith(request.prompt)
    assert ("\n" + long).startswith(request.suffix)
    assert 200 < len(request.prompt_tokens) + request.max_new_tokens <= engine.target.context_length


@pytest.mark.slow
def test_a_causal_model_still_continues_the_left_side(tiny_folder, tasks):
    engine = saltus.load(str(tiny_folder()), "plain")
    run = Benchmark(engine, methods_under_test(engine, ["plain"]), tasks, WRITING)
    (record,) = run.measure_task(0)
    assert record["prompt_tokens"] == len(engine.encode(LINE["prompt"], raw=True))
