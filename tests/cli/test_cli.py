"""The command line: what it writes, what it counts, and how it ends when something is wrong."""

import dataclasses
import itertools
import json
import os
import pty
import re
import runpy
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console
from transformers import AutoModelForCausalLM
from typer.main import get_command
from typer.testing import CliRunner

import saltus
import saltus.engine.engine as engine_module
from forked_python import saltus_command
from saltus.cli import open_engine
from saltus.cli.app import app
from saltus.cli.coloured_text import CALL_COLOURS, VISIBLE_CONTROL_CHARACTERS, ColouredTextWriter
from saltus.cli.methods import describe_method
from saltus.cli.options import DEFAULT_COUPLING, DEFAULT_METHOD
from saltus.cli.report import comparison_line
from saltus.core.sampling import Sampling
from saltus.engine.comparison import first_difference
from saltus.kernels import native
from saltus.loading.progress import Stage
from saltus.loading.sources import ALL_SHORT_NAMES, DEFAULT_MODEL
from saltus.methods import AUTO, available_methods
from saltus.models.causal import CausalNetwork
from tiny_models import tiny_llama

PROMPT = "the cat sat on the mat and the cat sat on the log and the"
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
PROGRAM = [sys.executable, "-c", "from saltus.cli import main; main()"]
COMMANDS = get_command(app).commands


@pytest.fixture(scope="module")
def folder(tiny_folder) -> str:
    return str(tiny_folder())


@pytest.fixture(scope="module")
def engine(folder) -> saltus.Engine:
    return saltus.load(folder)


def saltus_(*arguments: object, code: int = 0, **settings):
    """Run a command in this process, and see its exit code."""
    result = CliRunner(env={"COLUMNS": "100"}).invoke(
        app, [str(each) for each in arguments], prog_name="saltus", **settings
    )
    assert result.exit_code == code, result.output
    return result


def complaint(*arguments: object, **settings) -> str:
    """What is said, in one line, of a command that ends with code 2."""
    said = saltus_(*arguments, code=2, **settings).stderr
    assert re.fullmatch(r"saltus: [^\n]+\n", said), said
    return said.strip()


def lines(file: Path, *records: object) -> Path:
    file.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return file


# What it says of itself


def test_the_version_is_the_library_s():
    assert saltus_("--version").stdout == f"saltus {saltus.__version__}\n"


def test_help_needs_neither_torch_nor_transformers():
    code = "import sys, saltus.cli.app; print({'torch', 'transformers', 'numpy'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


@pytest.mark.slow
def test_the_package_is_a_command_of_python():
    done = subprocess.run([sys.executable, "-m", "saltus", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"saltus {saltus.__version__}\n"


def test_saltus_alone_shows_its_commands():
    assert all(name in saltus_().stdout for name in ("generate", "chat", "check", "bench", "pull", "methods", "demo"))


@pytest.mark.parametrize("command", ["chat", "bench", "bench step", "lm-eval"])
def test_every_command_s_help_has_its_short_name(command):
    assert saltus_(*command.split(), "-h").stdout == saltus_(*command.split(), "--help").stdout


def test_a_command_that_needs_arguments_shows_its_help_where_there_are_none():
    shown = saltus_("lm-eval")
    assert ("Usage: saltus lm-eval" in shown.stdout, shown.stderr) == (True, "")


def test_a_check_that_could_not_be_written_does_not_begin(monkeypatch):
    monkeypatch.setattr("saltus.engine.load.load", lambda *_, **__: pytest.fail("the model was loaded"))
    assert "is a file; give a folder" in complaint("check", "--out", __file__)


@pytest.mark.parametrize("command", ["train", "collect", "collect text", "train ptp", "bench", "methods"])
def test_the_examples_of_a_help_stand_apart_from_its_text(command):
    examples = saltus_(*command.split(), "--help").stdout.partition("Examples")[2]
    assert re.search(r"^ {5}saltus ", examples, re.M)


def commands(command: Any, name: str = "saltus") -> Iterator[tuple[str, Any]]:
    """A command and those inside it, with their names."""
    yield name, command
    for inner, each in getattr(command, "commands", {}).items():
        yield from commands(each, f"{name} {inner}")


def test_help_has_no_line_that_a_terminal_of_80_columns_breaks_again():
    for name, command in commands(get_command(app)):
        for paragraph in (command.help or "").split("\n\n")[1:]:  # the first is filled
            written = re.sub(r"\[/?(bold|dim|i)\]", "", paragraph).splitlines()
            assert len(written) == 1 or all(len(line) <= 78 or line.startswith("    ") for line in written), name


def test_help_in_80_columns_cuts_off_no_name_of_an_option():
    runner = CliRunner(env={"COLUMNS": "80"})
    for name, _ in commands(get_command(app)):
        assert not re.findall(r"--[a-z-]+…", runner.invoke(app, [*name.split()[1:], "--help"]).stdout), name


@pytest.mark.slow
def test_a_lone_surrogate_is_a_line_that_names_it(folder):
    said = complaint("generate", "-m", folder, os.fsdecode(b"a \xed\xa0\x80"))
    assert "lone surrogate (U+DCED) at character 3" in said


def test_the_default_coupling_of_the_options_is_that_of_the_library():
    assert Sampling().coupling == DEFAULT_COUPLING


@pytest.mark.parametrize("coupling", ["probability", "token-order", "gumbel"])
def test_under_each_coupling_methods_write_the_same_text_and_couplings_different_ones(coupling, folder):
    def answer(*arguments: object) -> list[int]:
        given = "generate", PROMPT, "-m", folder, "-t", 1, "-n", 24, "--ignore-eos", "--json", *arguments
        return json.loads(saltus_(*given).stdout)["tokens"]

    own = answer("--coupling", coupling, "--method", "plain")
    assert answer("--coupling", coupling, "--method", "jacobi+lookup") == own
    assert answer("--coupling", "gumbel" if coupling == "probability" else "probability", "--method", "plain") != own


@pytest.mark.unchecked
def test_an_unknown_coupling_is_refused_before_loading(tmp_path):
    file = lines(tmp_path / "prompts.jsonl", {"prompt": "a"})
    for command in ("generate x", "bench", f"collect text -f {file} --out {tmp_path / 'out'}"):
        assert "coupling is 'maximal', but must be one of probability, token-order, gumbel" in complaint(
            *command.split(), "--coupling", "maximal"
        )


@pytest.mark.parametrize("name", COMMANDS)
def test_the_examples_in_the_help_use_options_that_exist(name):
    examples = re.findall(r"saltus ([a-z][\w-]*)(.*)", COMMANDS[name].help or "")
    assert examples
    for command, rest in examples:
        if COMMANDS[command].context_settings.get("ignore_unknown_options"):
            continue  # its options are another program's
        inner = getattr(COMMANDS[command], "commands", {}).get(next(iter(rest.split()), ""))
        parameters = (inner or COMMANDS[command]).params
        known = {option for one in parameters for option in (*one.opts, *one.secondary_opts)}
        assert set(re.findall(r"(?<=\s)--?[a-z][a-z-]*", rest)) <= known | {"--help"}


def test_the_short_names_are_those_that_can_be_pulled():
    said = saltus_("pull", "--help").stdout
    assert all(name in said for name in ALL_SHORT_NAMES)
    assert DEFAULT_MODEL in ALL_SHORT_NAMES
    assert DEFAULT_METHOD == AUTO


def test_methods_lists_every_option_with_its_default_and_comment():
    told = {each["method"]: each for each in map(json.loads, saltus_("methods", "--json").stdout.splitlines())}
    assert list(told) == list(available_methods())
    for name, config in available_methods().items():
        expected = {field.name: getattr(config(), field.name) for field in dataclasses.fields(config) if field.init}
        assert {option["name"]: option["default"] for option in told[name]["options"]} == expected
        assert told[name]["about"] == " ".join(config.__doc__.split("\n\n")[0].split())
    short = saltus_("methods").stdout
    assert all(name in short for name in ("auto", *told))
    assert "--method jacobi+lookup" not in saltus_("methods", "auto").stdout.partition("Join")[0]
    assert "The default" in saltus_("methods", "auto").stdout
    assert {"jacobi", "lookup"} <= set(saltus_("methods", "jacobi+lookup").stdout.split())
    table = saltus_("methods", *told).stdout
    assert all(f"{option['name']}={option['default']}" in table for each in told.values() for option in each["options"])


@dataclasses.dataclass(frozen=True)
class Example:
    """Guess
    by heart. And more.

    Not this."""

    length: int = 4  # tokens, at most
    share: float | None = None
    draft_models: dict[str, str] = dataclasses.field(default_factory=dict, init=False)  # none


def test_an_option_is_told_with_its_type_default_and_comment():
    length = {"name": "length", "type": "int", "default": 4, "about": "tokens, at most"}
    share = {"name": "share", "type": "float | None", "default": None, "about": ""}
    told = {"method": "example", "about": "Guess by heart. And more.", "options": [length, share]}
    assert describe_method("example", Example) == told


def test_pull_prints_the_folder(folder):
    assert saltus_("pull", folder).stdout == f"{Path(folder).resolve()}\n"


# generate


def test_generate_writes_the_answer_to_stdout_and_what_it_cost_to_stderr(engine, folder):
    answer = engine.generate(PROMPT, max_new_tokens=30)
    result = saltus_("generate", PROMPT, "-m", folder, "-n", 30)
    assert result.stdout == answer.text + "\n"
    assert f"{len(answer.tokens)} tokens in {answer.statistics.calls} calls" in result.stderr


def test_json_is_one_object_a_prompt_with_exactly_these_keys(engine, folder):
    result = saltus_("generate", PROMPT, "a", "-m", folder, "-n", 30, "--method", "jacobi+lookup", "--json")
    told = [json.loads(line) for line in result.stdout.splitlines()]
    keys = "prompt text tokens finish_reason method calls tokens_per_call seconds tokens_per_second prefill_seconds"
    assert [list(each) for each in told] == [[*keys.split(), "tokens_by_call"]] * 2
    for each, prompt in zip(told, [PROMPT, "a"], strict=True):
        answer = engine.generate(prompt, max_new_tokens=30)
        assert (each["prompt"], each["text"], each["tokens"]) == (prompt, answer.text, answer.tokens)
        assert (each["finish_reason"], each["method"]) == (answer.finish_reason, "jacobi+lookup")
        assert sum(each["tokens_by_call"]) == len(each["tokens"])
        assert each["calls"] == len(each["tokens_by_call"])
        assert each["tokens_per_call"] == len(each["tokens"]) / each["calls"]
        assert each["tokens_per_second"] == len(each["tokens"]) / each["seconds"]
        assert 0 < each["prefill_seconds"] <= each["seconds"]


def test_the_settings_reach_the_engine(engine, folder):
    settings = {"temperature": 0.9, "top_p": 0.95, "top_k": 40, "min_p": 0.01, "repetition_penalty": 1.1, "seed": 5}
    answer = engine.generate(PROMPT, max_new_tokens=20, stop=["zq", "x"], ignore_eos=True, raw=True, **settings)
    options = [part for name, value in settings.items() for part in (f"--{name.replace('_', '-')}", value)]
    options += ["--stop", "zq", "--stop", "x", "--ignore-eos", "--raw", "-n", 20, "-m", folder]
    assert saltus_("generate", PROMPT, *options).stdout == answer.text + "\n"
    assert engine.generate(PROMPT, max_new_tokens=20).text != answer.text


def test_method_options_reach_the_method(folder, tmp_path, monkeypatch):
    made = {}
    drafter = tmp_path / "a=b"
    drafter.symlink_to(folder)
    monkeypatch.setattr("saltus.engine.load.load", lambda model, method, **settings: made.update(settings) or exit(0))
    assigned = [
        "lookup.max_ngram_size=7",
        "jacobi.spawn_ratio=0.5",
        "jacobi.sliding=yes",
        f"small_model.model={drafter}",
    ]
    options = [part for each in assigned for part in ("--option", each)]
    saltus_("generate", "a", "-m", folder, "--method", "jacobi+lookup+small_model", "--max-draft-tokens", 9, *options)
    expected = {
        "lookup": {"max_ngram_size": 7},
        "jacobi": {"spawn_ratio": 0.5, "sliding": True},
        "small_model": {"model": str(drafter)},
    }
    assert made["options"] == expected
    assert made["max_draft_tokens"] == 9


def test_the_prompt_may_come_from_stdin(engine, folder):
    answer = engine.generate("Grüße\n", max_new_tokens=10, raw=True)
    result = saltus_("generate", "-", "--raw", "-n", 10, "-m", folder, input="Grüße\n")
    assert result.stdout == answer.text + "\n"


def test_a_system_message_goes_before_the_prompt(engine, folder):
    messages = [{"role": "system", "content": "the dog"}, {"role": "user", "content": "the cat"}]
    answer = engine.generate(messages, max_new_tokens=10)
    assert answer.text != engine.generate("the cat", max_new_tokens=10).text
    assert saltus_("generate", "the cat", "--system", "the dog", "-n", 10, "-m", folder).stdout == answer.text + "\n"


def test_prompt_files_hold_prompts_messages_and_turns(engine, folder, tmp_path):
    messages = [{"role": "user", "content": "the dog"}, {"role": "assistant", "content": "sat"}]
    messages += [{"role": "user", "content": "on the"}]
    file = lines(tmp_path / "all.jsonl", {"prompt": "the cat"}, {"messages": messages}, {"turns": ["the", "log"]})
    result = saltus_("generate", "--prompts", file, "-n", 12, "-m", folder, "--json")
    told = [json.loads(line) for line in result.stdout.splitlines()]
    first = engine.generate("the", max_new_tokens=12)
    talk = [("user", "the"), ("assistant", first.text), ("user", "log")]
    inputs = ["the cat", messages, "the", [{"role": role, "content": content} for role, content in talk]]
    assert [each["tokens"] for each in told] == [engine.generate(each, max_new_tokens=12).tokens for each in inputs]
    assert [each["prompt"] for each in told] == ["the cat", messages, "the", "log"]
    assert saltus_("generate", "-f", file, "--limit", 1, "-n", 12, "-m", folder, "--json").stdout.count("\n") == 1


def test_several_answers_are_parted_by_an_empty_line(engine, folder):
    one, two = (engine.generate(prompt, max_new_tokens=8).text for prompt in ("the", "cat"))
    assert saltus_("generate", "the", "cat", "-n", 8, "-m", folder).stdout == f"{one}\n\n{two}\n"


def test_compare_closes_with_plain_decoding_in_the_same_run(folder):
    said = saltus_("generate", PROMPT, "-m", folder, "-n", 40, "--ignore-eos", "--compare").stderr
    assert re.search(r"lookup: 40 tokens in \d+ calls, .* plain in this run: 40 calls, .* same text, token for", said)


def test_the_closing_line_says_where_a_text_differs(engine):
    one, other = (engine.generate("the", max_new_tokens=12, temperature=2.0, seed=seed) for seed in (0, 3))
    at = next(i for i, (a, b) in enumerate(zip(one.tokens, other.tokens, strict=False)) if a != b)
    assert f"differs from token {at} on" in comparison_line(one, other, "lookup")
    assert "same text" in comparison_line(one, one, "lookup")
    assert first_difference([1, 2], [1, 2, 3]) == 2


def test_speeds_of_runs_that_were_repeated_are_medians():
    def run(speed: float) -> SimpleNamespace:
        return SimpleNamespace(
            tokens=[1, 2], statistics=SimpleNamespace(tokens=2, calls=1, tokens_per_call=2.0, tokens_per_second=speed)
        )

    line = comparison_line(run(90), run(50), "lookup", [(run(10), run(40)), (run(60), run(20))])
    assert "60.0 tokens/s; plain in this run: 1 call, 40.0 tokens/s (×1.50, medians of 3 runs in turns)" in line


@pytest.mark.parametrize(("patience", "repeated"), [(0.0, False), (1000.0, True)], ids=["long", "short"])
def test_the_demo_repeats_short_runs(folder, monkeypatch, patience, repeated):
    monkeypatch.setattr("saltus.cli.demo.REPEAT_SECONDS", patience)
    said = saltus_("demo", PROMPT, "-m", folder, "-n", 12, "--method", "lookup").stdout
    assert "same text, token for token" in said
    assert ("medians of 5 runs in turns" in " ".join(said.split())) == repeated


# Colours


@pytest.mark.slow
def test_each_call_has_its_colour_and_without_them_the_text_is_the_same(engine, folder, monkeypatch):
    costs = "saltus.core.control.call_cost.CallCost.seconds_for"
    monkeypatch.setattr(costs, lambda costs, rows: 1.0)  # so that all drafts are checked
    monkeypatch.setattr("saltus.core.control.controller.best_size", lambda *_: None)
    answer = engine.generate(PROMPT, max_new_tokens=80, ignore_eos=True)
    inputs = ["generate", PROMPT, "-m", folder, "-n", 80, "--ignore-eos"]
    shown, plain = (saltus_(*inputs, switch).stdout for switch in ("--colour", "--no-colour"))
    assert plain == answer.text + "\n"
    assert ESCAPES.sub("", shown) == plain.translate(VISIBLE_CONTROL_CHARACTERS)
    runs = re.findall(r"\x1b\[(1;)?(\d\d)m", shown)
    assert len(runs) >= answer.statistics.calls / 2  # bytes that are no character are shown later
    assert len({colour for _, colour in runs}) == len(CALL_COLOURS)
    assert max(answer.statistics.tokens_by_call) > 1
    assert {bool(bold) for bold, _ in runs} == {True, False}


def test_no_color_of_the_environment_is_heeded_and_overruled(folder):
    told = {"env": {"NO_COLOR": "1", "FORCE_COLOR": "1"}}
    assert "\x1b[3" not in saltus_("generate", PROMPT, "-m", folder, "-n", 9, **told).stdout
    assert "\x1b[3" in saltus_("generate", PROMPT, "-m", folder, "-n", 9, "--colour", **told).stdout


class Screen:
    """As much of a terminal as the painter needs."""

    def __init__(self) -> None:
        self.rows: list[str] = [""]

    def write(self, text: str) -> None:
        for part in re.findall(r"\x1b\[\d*[A-Za-z]|\x1b\[[\d;]*m|[^\x1b]", text):
            if part == "\n":
                self.rows.append("")
            elif part.endswith("D") and len(part) > 2:
                self.rows[-1] = self.rows[-1][: -int(part[2:-1])]  # nothing but erasing follows
            elif len(part) == 1:
                self.rows[-1] += part

    def flush(self) -> None:
        pass


def painted(pieces: list[str], width: int) -> list[str]:
    screen = Screen()
    console = Console(file=screen, force_terminal=True, soft_wrap=True, width=200, color_system="standard")  # pyright: ignore
    painter = ColouredTextWriter(console, True, width)
    for call, piece in enumerate(pieces):
        painter.write(piece, call, 1)
    painter.finish_line()
    return screen.rows


def test_lines_break_between_words_wherever_the_calls_cut_the_text():
    text = "A kangaroo leaps, and not one token changes.\n\n  def leap(position):\n      return position + 9  # metres"
    whole = painted([text], 20)
    assert all(len(row) <= 20 for row in whole)
    assert whole[3:5] == ["", "  def "]
    assert " ".join(whole).split() == text.split()
    for size in (1, 2, 3, 5, 7):
        assert painted([text[i : i + size] for i in range(0, len(text), size)], 20) == whole


def test_a_word_longer_than_a_line_is_kept_whole():
    assert "".join(painted(["ab ", "x" * 30, " c"], 10)).replace(" ", "") == "ab" + "x" * 30 + "c"


def test_a_text_cannot_steer_the_terminal():
    assert painted(["a\x1b[31mb\x07\x9b"], 40)[0] == "a␛[31mb␇�"


# check


def test_check_finds_no_flip_where_texts_are_equal(folder, tmp_path):
    file = lines(tmp_path / "three.jsonl", {"prompt": PROMPT}, {"turns": ["the dog", "the log"]}, {"prompt": "a"})
    inputs = ["check", "-m", folder, "-f", file, "--limit", 2, "-n", 16, "--method", "jacobi+lookup", "--json"]
    told = json.loads(saltus_(*inputs, "-t", 0.8, "--seed", 2).stdout)
    assert [verdict["check"] for verdict in told["verdicts"]] == ["texts", "tokens per call", "speed-up"]
    assert (told["findings"], told["method"]) == (0, "jacobi+lookup")
    assert (told["prompts"], told["identical"], told["flips"]) == (2, 2, [])
    assert 1 <= told["tokens_per_call"] <= 16
    assert told["speedup"] > 0


def test_check_has_prompts_of_its_own(folder):
    told = json.loads(saltus_("check", "-m", folder, "-n", 4, "--json").stdout)
    assert told["prompts"] == told["identical"] > 2


def test_check_says_where_no_draft_was_verified_and_how_to_verify_them(folder):
    given = ["check", "-m", folder, "-n", 8, "--limit", 1, "--json", "--method", "jacobi"]
    without, with_drafts = (
        json.loads(saltus_(*given, *more).stdout) for more in (("--max-draft-tokens", 0), ("--no-adaptive",))
    )
    assert without["draft_tokens_verified"] == 0
    assert "no call verified a draft token, so this shows nothing: take --no-adaptive" in str(without["verdicts"])
    assert with_drafts["draft_tokens_verified"] > 8, "each call but the last few carries a whole block"
    assert "shows nothing" not in str(with_drafts["verdicts"])


@pytest.fixture
def flipping(monkeypatch) -> Callable[[str, int], None]:
    """Let another method than plain write another token: in which turn's prompt, and where."""

    def plant(word: str, at: int) -> None:
        generate = saltus.Engine.generate

        def spoilt(self, prompt, **settings):
            answer = generate(self, prompt, **settings)
            last = prompt if isinstance(prompt, str) else prompt[-1]["content"]
            if settings["method"] != "plain" and last == word and len(answer.tokens) > at:
                answer.tokens[at] = (answer.tokens[at] + 1) % 300
            return answer

        monkeypatch.setattr(saltus.Engine, "generate", spoilt)

    return plant


def test_a_flip_is_told_with_its_position_and_logit_gap_and_ends_with_code_1(engine, folder, tmp_path, flipping):
    plain = engine.generate("the log", max_new_tokens=12, ignore_eos=False)
    flipping("the log", 9)
    file = lines(tmp_path / "two.jsonl", {"prompt": "the cat"}, {"prompt": "the log"})
    inputs = ["check", "-m", folder, "-f", file, "-n", 12]
    told = json.loads(saltus_(*inputs, "--json", code=1).stdout)
    (flip,) = told["flips"]
    assert (told["prompts"], told["identical"], flip["prompt"], flip["position"]) == (2, 1, 1, 9)
    model = AutoModelForCausalLM.from_pretrained(folder)
    read = torch.tensor([engine.encode("the log") + plain.tokens[:9]])
    logits = model(read).logits[0, -1].detach()
    gap = float(logits[plain.tokens[9]] - logits[(plain.tokens[9] + 1) % 300])
    assert flip["logit_gap"] == pytest.approx(gap, abs=1e-4)
    assert gap > 0.01
    table = saltus_(*inputs, code=1).stdout
    assert "1 of 2" in table
    assert "the log" in table


def test_a_flip_in_a_later_turn_counts_the_tokens_of_the_turns_before(engine, folder, tmp_path, flipping):
    before = len(engine.generate("the cat", max_new_tokens=12).tokens)
    flipping("log", 3)
    file = lines(tmp_path / "turns.jsonl", {"turns": ["the cat", "log", "mat"]})
    (flip,) = json.loads(saltus_("check", "-m", folder, "-f", file, "-n", 12, "--json", code=1).stdout)["flips"]
    assert flip["position"] == before + 3


def test_without_batch_invariance_the_model_is_loaded_without_equal_rounding(folder, monkeypatch):
    inputs = {}
    monkeypatch.setattr("saltus.engine.load.load", lambda *_, **settings: inputs.update(settings) or exit(0))
    saltus_("check", "-m", folder, "--no-batch-invariant")
    assert inputs["exact"] is False
    saltus_("check", "-m", folder)
    assert inputs["exact"] is True


# chat


def test_a_conversation_remembers_what_was_said(folder):
    engine = saltus.load(folder)
    first = engine.generate([{"role": "user", "content": "the cat"}], max_new_tokens=9)
    talk = [("user", "the cat"), ("assistant", first.text), ("user", "the log")]
    second = engine.generate([{"role": role, "content": said} for role, said in talk], max_new_tokens=9)
    afresh = engine.generate("the log", max_new_tokens=9)
    assert second.text != afresh.text
    result = saltus_("chat", "-m", folder, "-n", 9, input="the cat\n\nthe log\n/reset\nthe log\n/exit\nthe dog\n")
    assert result.stdout == f"{first.text}\n{second.text}\n{afresh.text}\n"
    assert result.stderr.count("tokens/s") == 3


def test_commands_change_a_conversation_and_say_so(folder):
    said = saltus_(
        "chat", "-m", folder, input="/method jacobi\n/methd\n/method lokup\n/seed 7\n/seed x\n/help\n"
    ).stderr
    for each in ("is jacobi.", "did you mean /method?", "did you mean lookup", "is 7.", "not 'x'", "/reset"):
        assert each in said


def test_options_of_sampling_that_greedy_decoding_does_not_read_are_named(folder):
    greedy = saltus_("generate", "-m", folder, "-n", 3, "--seed", 5, "--top-p", 0.5, "the cat").stderr
    assert "without effect at temperature 0, which is greedy: --top-p, --seed; sample by" in greedy
    for options in (["--seed", 0], ["--seed", 5, "-t", 0.8]):
        assert "without effect" not in saltus_("generate", "-m", folder, "-n", 3, *options, "the cat").stderr


def test_a_seed_typed_in_a_conversation_changes_what_is_sampled(engine, folder):
    inputs = {"max_new_tokens": 9, "temperature": 0.9}
    texts = [engine.generate([{"role": "user", "content": "the cat"}], seed=seed, **inputs).text for seed in (0, 4)]
    result = saltus_("chat", "-m", folder, "-n", 9, "-t", 0.9, input="the cat\n/reset\n/seed 4\nthe cat\n")
    assert result.stdout == f"{texts[0]}\n{texts[1]}\n"
    assert texts[0] != texts[1]


def test_a_message_that_cannot_be_read_leaves_the_conversation_as_it_was(engine, folder):
    second = engine.generate([{"role": "user", "content": "the cat"}], max_new_tokens=9)
    result = saltus_("chat", "-m", folder, "-n", 9, input="x" * 2000 + "\nthe cat\n")
    assert "shorten it" in result.stderr
    assert result.stdout == second.text + "\n"


# demo


def test_the_demo_shows_question_answer_and_one_closing_line(engine, folder):
    answer = engine.generate("the cat", max_new_tokens=20)
    said = saltus_("demo", "the cat", "-m", folder, "-n", 20).stdout
    assert "\x1b" not in said
    assert said.index("the cat") < said.index(answer.text.split()[0])
    assert re.search(r"lookup: \d+ tokens in \d+ calls?, .* plain .* same text", " ".join(said.split()))


@pytest.mark.model
def test_the_demo_leaps_with_the_default_model(model_folder):
    shown = saltus_("demo", "--colour").stdout
    said = " ".join(ESCAPES.sub("", shown).split())
    calls, a_call = re.search(r"tokens in (\d+) calls, ([\d.]+) a call", said).groups()
    assert int(calls) > 20
    assert float(a_call) > 1.1, "fewer where the machine makes drafts dear"
    assert said.endswith("same text, token for token")


# Bad input


@pytest.mark.parametrize(
    ("arguments", "cure"),
    [
        ([], "give one in quotes"),
        ([""], "is empty"),
        (["  \n"], "is empty"),
        (["a", "--prompts", "b.jsonl"], "give one or the other"),
        (["a", "--limit", "1"], "--limit is for the prompts of a file"),
        (["a", "--method", "lookup+lookup"], "give each method once"),
        (["--prompts", "nowhere.jsonl"], "there is no file nowhere.jsonl"),
        (["--prompts", "."], "is a folder"),
        (["a", "--method", "lokup"], "did you mean lookup"),
        (["a", "--method", "lookup+"], "there are"),
        (["a", "--option", "lookup.max_ngram_siz=5"], "did you mean lookup.max_ngram_size?"),
        (["a", "--option", "jacobi.block_size=5"], "the method is auto"),
        (["a", "--option", "assd.num_draft_token=5"], "did you mean assd.num_draft_tokens?"),
        (["a", "--option", "lookup.max_ngram_size=five"], "'five' is not a whole number"),
        (["a", "--option", "max_ngram_size=5"], "write METHOD.FIELD=VALUE"),
        (["a", "--option", "lookup.max_ngram_size=0"], "must be 1 or more"),
        (["a", "--temperature", "-1"], "must be 0 (greedy) or a positive number"),
        (["a", "--temperature", "nan"], "temperature is nan"),
        (["a", "--top-p", "1.5"], "must lie in [0, 1]"),
        (["a", "--seed", "-3"], "must be 0 or more"),
        (["a", "--rule", "guess"], "must be one of match, reject"),
        (["a", "--max-new-tokens", "0"], "--max-new-tokens"),
        (["a", "--max-new-tokens", "many"], "integer"),
        (["a", "--methd", "lookup"], "--method"),
        (["a", "-m", "smollm2-135"], "did you mean smollm2-135m"),
        (["a", "-m", "./nowhere"], "there is no folder"),
        (["a", "-m", "."], "config.json is missing"),
        (["a", "--json", "--compare"], "saltus check --json"),
        (["a", "--raw", "--system", "b"], "leave out"),
    ],
)
def test_bad_input_is_one_line_with_the_cure_before_a_model_is_loaded(arguments, cure, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("saltus.engine.load.load", lambda *_, **__: pytest.fail("the model was loaded"))
    assert cure in complaint("generate", *arguments)


@pytest.mark.parametrize(
    ("line", "cure"),
    [
        ('{"prompt": "a"', "this is not JSON"),
        ("[1, 2]", "no JSON object"),
        ("{}", "but has only nothing"),
        ('{"question": "a", "id": 3}', "only question, id"),
        ('{"prompt": "a", "turns": ["b"]}', "prompt and turns"),
        ('{"prompt": 3}', "must be a text"),
        ('{"prompt": " "}', "not empty"),
        ('{"turns": []}', "list of texts"),
        ('{"turns": ["a", ""]}', "list of texts"),
        ('{"messages": [{"role": "user"}]}', '"content"'),
        ('{"messages": "a"}', "list of objects"),
    ],
)
@pytest.mark.parametrize("command", ["generate", "check"])
def test_an_error_in_a_prompt_file_names_the_file_and_the_line(command, line, cure, tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "fine"}\n\n' + line + "\n", encoding="utf-8")
    said = complaint(command, "--prompts", file)
    assert said.startswith(f"saltus: {file}, line 3: ")
    assert cure in said


def test_prompt_files_are_utf_8_and_hold_something(tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_bytes(b'{"prompt": "fine"}\n{"prompt": "\xff"}\n')
    assert "line 2: this is not UTF-8" in complaint("generate", "-f", file)
    file.write_text("\n")
    assert "holds no prompts" in complaint("generate", "-f", file)
    assert "stdin is not UTF-8" in complaint("generate", "-", input=b"\xff\xfe")


def test_settings_that_only_a_model_can_refuse_are_one_line_too(folder, tiny_folder, tmp_path):
    assert "must be one of auto, float32" in complaint("generate", "a", "-m", folder, "--dtype", "float8")
    assert "must be one of auto, cpu, cuda" in complaint("generate", "a", "-m", folder, "--device", "tpu")
    assert "must lie in 0…384" in complaint("generate", "a", "-m", folder, "--max-draft-tokens", 999)
    assert "shorten it" in complaint("generate", "x" * 2000, "-m", folder)
    assert "small_model needs a draft model; give --draft-model" in complaint(
        "generate", "a", "--method", "small_model"
    )
    assert "small_model.model=NAME" in complaint("bench", "--methods", "lookup,small_model")
    other = tiny_folder(words="quite other words than those of the first one")
    drafting = ["--rule", "reject", "--method", "small_model", "--option", f"small_model.model={other}"]
    assert "another vocabulary" in complaint("generate", "a", "-m", folder, *drafting)


def test_a_model_that_gives_nan_is_one_line(folder, tmp_path):
    broken = tmp_path / "broken"
    model = tiny_llama()
    model.lm_head.weight.data[:] = float("nan")
    model.save_pretrained(broken)
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (broken / file).write_bytes((Path(folder) / file).read_bytes())
    assert "weights that are NaN or infinite" in complaint("generate", "a", "-m", broken)


def test_what_was_written_before_an_error_stays(engine, folder, tmp_path):
    answer = engine.generate("the cat", max_new_tokens=8)
    file = lines(tmp_path / "prompts.jsonl", {"prompt": "the cat"}, {"prompt": "x" * 2000})
    result = saltus_("generate", "-f", file, "-m", folder, "-n", 8, code=2)
    assert result.stdout.startswith(answer.text + "\n")
    assert "shorten it" in result.stderr
    result = saltus_("generate", "-f", file, "-m", folder, "-n", 8, "--json", code=2)
    assert json.loads(result.stdout)["tokens"] == answer.tokens


def test_a_wrong_command_line_is_one_line():
    assert "did you mean 'generate'" in complaint("generte").lower()
    assert "no such option" in complaint("--frobnicate").lower()
    assert "see `saltus pull --help`" in complaint("pull", "--frobnicate")


def test_a_fault_of_ours_is_one_line_and_a_traceback_only_where_it_is_asked_for(folder, monkeypatch):
    def fail(*_, **__):
        raise AssertionError("two and two\nare five")

    monkeypatch.setattr("saltus.engine.load.load", fail)
    said = saltus_("generate", "a", "-m", folder, code=70).stderr
    assert said.startswith("saltus: AssertionError: two and two are five (a fault of saltus")
    assert said.count("\n") == 1
    assert "Traceback" in saltus_("generate", "a", "-m", folder, code=70, env={"SALTUS_DEBUG": "1"}).stderr


OUT_OF_MEMORY = [
    MemoryError(),
    torch.OutOfMemoryError("CUDA out of memory. Tried …"),
    RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported …"),
    RuntimeError("[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: …"),
]


@pytest.mark.parametrize("error", OUT_OF_MEMORY)
def test_too_little_memory_is_told_with_a_cure(error, folder, monkeypatch):
    def fail(*_, **__):
        raise error

    monkeypatch.setattr("saltus.engine.load.load", fail)
    assert "take a smaller model" in complaint("generate", "a", "-m", folder)


# Interruptions


def interrupt_after(count: int, monkeypatch) -> None:
    new_tokens = engine_module._new_tokens

    def interrupted(request, rounds):
        yield from itertools.islice(new_tokens(request, rounds), count)
        raise KeyboardInterrupt

    monkeypatch.setattr(engine_module, "_new_tokens", interrupted)


def test_ctrl_c_keeps_the_tokens_in_json_too(folder, monkeypatch):
    interrupt_after(3, monkeypatch)
    result = saltus_("generate", PROMPT, "-m", folder, "--json", "--method", "plain", code=130)
    told = json.loads(result.stdout)
    assert (len(told["tokens"]), told["finish_reason"]) == (3, None)
    assert result.stderr == "saltus: interrupted\n"


def test_options_of_all_that_auto_may_choose_are_accepted(folder):
    for option in ("assd.draft=bigram", "lookup.max_ngram_size=4", "ptp.num_draft_tokens=4"):
        saltus_("generate", PROMPT, "-m", folder, "-n", 2, "--option", option)


@pytest.mark.parametrize("settings", [["generate", PROMPT], ["generate", PROMPT, "--json"], ["chat"]])
def test_ctrl_c_while_the_prompt_is_read_ends_with_130(folder, monkeypatch, settings):
    def interrupted(self, batch, kv_caches):
        if len(batch[0].canvas.tokens) > 40:  # not the call that checks the model
            raise KeyboardInterrupt
        return forward(self, batch, kv_caches)

    forward = CausalNetwork.forward
    monkeypatch.setattr(CausalNetwork, "forward", interrupted)
    result = saltus_(*settings, "-m", folder, "--method", "plain", code=130, input="the cat\n")
    assert result.stderr.endswith("saltus: interrupted\n")
    assert "Traceback" not in result.stderr


@pytest.mark.slow
def test_ctrl_c_in_a_stream_ends_with_130_and_what_was_written_stays(engine, tiny_folder):
    endless = str(tiny_folder(max_position_embeddings=60000))
    inputs = [*saltus_command(), "generate", PROMPT, "-m", endless, "--ignore-eos", "-n", "50000", "--method", "plain"]
    # without a buffer, in which communicate would leave what was read beyond these bytes
    with subprocess.Popen(inputs, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0) as running:
        begun = running.stdout.read(20)
        running.send_signal(signal.SIGINT)
        rest, said = running.communicate(timeout=60)
    assert running.returncode == 130
    assert said == b"saltus: interrupted\n"
    written = (begun + rest).decode()
    assert written.endswith("\n")
    whole = engine.generate(PROMPT, max_new_tokens=400, ignore_eos=True).text
    known = min(len(written) - 1, len(whole))
    assert written[:known] == whole[:known]


@pytest.mark.slow
@pytest.mark.parametrize("command", ["generate", "methods"])
def test_a_reader_who_leaves_is_no_error(command, tiny_folder):
    endless = str(tiny_folder(max_position_embeddings=60000))
    inputs = [*saltus_command(), "generate", PROMPT, "-m", endless, "--ignore-eos", "-n", "50000"]
    inputs = inputs if command == "generate" else [*PROGRAM, "methods"]
    with subprocess.Popen(inputs, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as running:
        if command == "generate":
            running.stdout.read(10)
        running.stdout.close()
        assert running.stderr.read() == b""
        assert running.wait(timeout=60) == 141


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_a_full_disk_is_one_line():
    with open("/dev/full", "w") as full:
        done = subprocess.run([*PROGRAM, "--version"], stdout=full, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (2, "saltus: the disk that the output goes to is full; free some space\n")


def test_a_terminal_that_says_it_has_no_columns_gets_the_usual_lines():
    done = subprocess.run(
        [*PROGRAM, "--help"], capture_output=True, text=True, check=True, env={**os.environ, "COLUMNS": "0"}
    )
    assert "saltus demo" in done.stdout


@pytest.mark.parametrize(("closed", "arguments", "code"), [
    ("<&- >&- 2>&-", "--version", 0),
    (">&- 2>&-", "no-such-command", 2),
    ("<&-", "generate -", 2),
])  # fmt: skip
def test_streams_that_are_closed_are_the_null_device(closed, arguments, code):
    python = f"exec {sys.executable} -c 'from saltus.cli import main; main()'"
    done = subprocess.run(["sh", "-c", f"{python} {arguments} {closed}"], capture_output=True, text=True)
    assert done.returncode == code, done.stderr
    assert ("the prompt is empty" in done.stderr) == (arguments == "generate -")


class Terminal:
    """A command in a terminal of its own."""

    def __init__(self, *arguments: str) -> None:
        here, there = pty.openpty()
        self.here, self.seen, self.past = here, b"", 0
        environment = {**os.environ, "TERM": "xterm", "COLUMNS": "90"}
        self.running = subprocess.Popen(
            [*PROGRAM, *arguments], stdin=there, stdout=there, stderr=there, env=environment, start_new_session=True,
            preexec_fn=_own_terminal,
        )  # fmt: skip
        os.close(there)

    def type(self, text: str) -> None:
        os.write(self.here, text.encode())

    def until(self, pattern: str, seconds: float = 60, again: str = "") -> str:
        """What is seen until a pattern comes; it is not looked at again.

        `again` is typed every few seconds: a signal that comes just before Python waits for input is seen late.
        """
        end = time.monotonic() + seconds
        while True:
            shown = ESCAPES.sub("", self.seen.decode(errors="replace"))
            if found := re.search(pattern, shown[self.past :]):
                begin, self.past = self.past, self.past + found.end()
                return shown[begin : self.past]
            ready, _, _ = select.select([self.here], [], [], 3)
            if ready:
                self.seen += os.read(self.here, 4096)
            else:
                self.type(again)
            assert time.monotonic() < end, shown[self.past :]


def _own_terminal() -> None:
    import fcntl
    import termios

    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


@pytest.mark.slow
def test_ctrl_c_stops_an_answer_and_ctrl_d_leaves_the_conversation(tiny_folder):
    endless = str(tiny_folder(max_position_embeddings=60000))
    terminal = Terminal("chat", "-m", endless, "-n", "50000", "--method", "plain", "--temperature", "1")
    terminal.until("› ")
    terminal.type("the cat\r")
    terminal.until(r"the cat\r\n[\s\S]{40}")
    terminal.type("\x03")
    assert "interrupted" in terminal.until("a call[^›]*› ")
    terminal.type("\x03")
    terminal.until("Ctrl-D or /exit leaves[^›]*› ", again="\x03")
    terminal.type("\x04")
    assert terminal.running.wait(timeout=60) == 0


def test_a_draft_model_is_an_option(folder, tiny_folder):
    draft = str(tiny_folder(seed=1))
    plain = json.loads(saltus_("generate", PROMPT, "-m", folder, "-n", 12, "--method", "plain", "--json").stdout)
    fields = "--num-draft-tokens", 2, "--option", "small_model.max_prompt=99"
    told = json.loads(
        saltus_("generate", PROMPT, "-m", folder, "-n", 12, "--draft-model", draft, *fields, "--json").stdout
    )
    assert (told["method"], told["tokens"]) == ("small_model+lookup", plain["tokens"])
    assert "take small_model+lookup" in complaint(
        "generate", "x", "-m", folder, "--method", "lookup", "--draft-model", draft
    )


def test_a_text_follows_a_grammar(folder, tmp_path):
    schema, lark = tmp_path / "schema.json", tmp_path / "grammar.lark"
    schema.write_text(
        json.dumps(
            {
                "type": "object",
                "properties": {"a": {"enum": ["the", "cat"]}},
                "required": ["a"],
                "additionalProperties": False,
            }
        )
    )
    lark.write_text('start: "the" | "cat"')

    def write(*options: object):
        given = ["generate", "the", "-m", folder, "--raw", "--max-new-tokens", "60", *map(str, options)]
        return CliRunner(env={"COLUMNS": "100"}).invoke(app, given)

    assert json.loads(write("--json-schema", schema).stdout)["a"] in ("the", "cat")
    assert write("--regex", "(ab){3}").stdout.strip() == "ababab"
    assert write("--grammar", lark).stdout.strip() in ("the", "cat")
    for options, says in (
        (["--regex", "a", "--grammar", lark], "contradict"),
        (["--json-schema", tmp_path / "none.json"], "there is no file"),
        (["--regex", "("], "grammar"),
    ):
        found = write(*options)
        assert found.exit_code != 0
        assert says in found.output + str(found.exception)


@pytest.mark.parametrize(
    ("option", "text", "says"),
    [
        ("--regex", "(", "its regular expression is not valid (unclosed group)"),
        ("--json-schema", '{"type": "nonsense"}', "JSON schema cannot be used"),
        ("--json-schema", '{"type": "object"', "the JSON schema is not JSON (line 1: "),
        ("--grammar", "start: what", 'unknown name: "what"'),
    ],
)
def test_a_grammar_that_no_model_can_follow_is_refused_before_a_model_is_loaded(option, text, says, tmp_path):
    given = tmp_path / "given"
    given.write_text(text)
    assert says in complaint("generate", "x", "-m", "nowhere", option, text if option == "--regex" else given)


def test_a_character_that_does_not_exist_is_named(folder):
    with pytest.raises(ValueError, match=r"U\+D800\) at character 5"):
        saltus.load(folder, "plain").generate("the \ud800")


def test_kernels_are_compiled_while_a_model_is_downloaded_and_not_without(monkeypatch):
    started, shown = [], []
    monkeypatch.setattr(open_engine.subprocess, "Popen", lambda command, **_: started.append(command))
    report = open_engine._compiling_meanwhile(shown.append)
    stages = [Stage("asking the hub"), Stage("downloading", 0, 9), Stage("downloading", 9, 9)]
    for stage, processes in zip(stages, (0, 1, 1), strict=True):
        report(stage)
        assert len(started) == processes
    assert shown == stages
    assert runpy.run_module(started[0][-1])["load_kernels"] is native.load_kernels
