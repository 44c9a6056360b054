"""Teacher texts: whatever interrupts their collection, each text exists once, as its seed determines it."""

import gzip
import json
import os
import signal
import time
from multiprocessing import get_context
from pathlib import Path

import pytest
from test_cli import complaint, lines, saltus_

import saltus
from forked_python import forked_workers
from saltus.training.data import collection_workers
from saltus.training.data.collection_workers import _ShardWriter
from saltus.training.data.teacher_texts import (
    CollectionPlan,
    TokenizedPrompt,
    read_teacher_texts,
    text_seed,
    write_shard,
)

PROMPTS = ["the cat sat on the mat", "the dog", "a log and a mat", "sat", "the mat and the log", "on", "dog cat dog"]


@pytest.fixture(scope="module")
def folder(tiny_folder) -> str:
    return str(tiny_folder())


@pytest.fixture
def prompts_file(tmp_path) -> Path:
    return lines(tmp_path / "prompts.jsonl", *({"prompt": prompt} for prompt in PROMPTS))


def collect(*arguments: object, code: int = 0, **settings):
    return saltus_("collect", "text", *arguments, "-n", 12, code=code, **settings)


def shards(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(folder.glob("*.jsonl.gz"))}


def rows(folder: Path) -> list[dict]:
    return [json.loads(line) for data in shards(folder).values() for line in gzip.decompress(data).splitlines()]


@pytest.mark.slow
def test_texts_are_those_that_the_engine_writes(folder, prompts_file, tmp_path):
    collect("-f", prompts_file, "-m", folder, "--out", tmp_path / "teacher", "--texts-per-file", 5)
    engine, found = saltus.load(folder), rows(tmp_path / "teacher")
    assert [(row["source"], row["temperature"]) for row in found] == [("prompts", 0.0), ("prompts", 0.7)] * len(PROMPTS)
    for number, row in enumerate(found):
        prompt, seed = PROMPTS[number // 2], text_seed(0, number // 2)
        answer = engine.generate(prompt, max_new_tokens=12, temperature=row["temperature"], seed=seed)
        assert row["completion"] == answer.tokens
        assert row["prompt"] == engine.encode(prompt)
    assert [sample.completion for sample in read_teacher_texts(tmp_path / "teacher")] == [
        row["completion"] for row in found
    ]


@pytest.mark.slow
def test_neither_batches_nor_processes_change_a_text(folder, prompts_file, tmp_path, monkeypatch):
    monkeypatch.setattr(collection_workers, "get_context", lambda method: forked_workers())
    collect("-f", prompts_file, "-m", folder, "--out", tmp_path / "one", "--texts-per-file", 4, "--batch-size", 1)
    collect("-f", prompts_file, "-m", folder, "--out", tmp_path / "two", "--texts-per-file", 4, "--processes", 2)
    assert len(shards(tmp_path / "one")) == 4
    assert shards(tmp_path / "one") == shards(tmp_path / "two")


def test_a_process_that_ends_before_it_reads_is_a_line(folder, prompts_file, tmp_path, monkeypatch):
    monkeypatch.setattr(collection_workers, "get_context", lambda method: get_context("fork"))
    monkeypatch.setattr(collection_workers, "_worker", lambda parent, *_: os._exit(not parent.poll(60)))
    command = "collect", "text", "-f", prompts_file, "-m", folder, "--out", tmp_path / "teacher", "--processes", 2
    said = complaint(*command, "-n", 12, "--texts-per-file", 4)
    assert "a process that wrote texts was killed; take fewer --processes" in said


def test_more_prompts_go_on_where_fewer_ended(folder, prompts_file, tmp_path):
    options = "-f", prompts_file, "-m", folder, "--texts-per-file", 4
    collect(*options, "--out", tmp_path / "whole")
    for limit in (3, 4):  # a file that is not full, and one that is
        collect(*options, "--out", tmp_path / f"{limit}", "--limit", limit)
        collect(*options, "--out", tmp_path / f"{limit}")
        assert shards(tmp_path / f"{limit}") == shards(tmp_path / "whole")
        assert (tmp_path / f"{limit}/collect.json").read_text() == (tmp_path / "whole/collect.json").read_text()


def test_prompts_are_messages_or_lines_with_a_source(folder, tmp_path):
    file = lines(
        tmp_path / "prompts.jsonl",
        {"messages": [{"role": "user", "content": "the cat"}], "source": "talk"},
        {"turns": ["the dog"], "category": "pets"},
    )
    collect("-f", file, "-m", folder, "--out", tmp_path / "json", "-t", 0)
    assert [row["source"] for row in rows(tmp_path / "json")] == ["talk", "pets"]
    (tmp_path / "prompts.txt").write_text("the cat\n\nthe dog\n", encoding="utf-8")
    collect("-f", tmp_path / "prompts.txt", "-m", folder, "--out", tmp_path / "text", "-t", 0)
    assert [row["prompt"] for row in rows(tmp_path / "text")] == [row["prompt"] for row in rows(tmp_path / "json")]


@pytest.fixture
def iterates_of_one_process(folder, prompts_file, tmp_path) -> list:
    """A command that collects iterates; what one process has written by it is in the folder `one`."""
    command = ["collect", "jacobi", "-f", prompts_file, "-m", folder, "-n", 20, "-b", 6, "--texts-per-file", 4]
    saltus_(*command, "--out", tmp_path / "one", "--batch-size", 1)
    assert len(shards(tmp_path / "one")) == 4
    return command


@pytest.mark.slow
def test_neither_batches_nor_processes_change_an_iterate(iterates_of_one_process, tmp_path, monkeypatch):
    monkeypatch.setattr(collection_workers, "get_context", lambda method: forked_workers())
    saltus_(*iterates_of_one_process, "--out", tmp_path / "two", "--processes", 2)
    assert shards(tmp_path / "one") == shards(tmp_path / "two")


@pytest.mark.external
@pytest.mark.slow
def test_ray_does_not_change_an_iterate(iterates_of_one_process, tmp_path):
    """With two workers on this machine."""
    pytest.importorskip("ray")
    (tmp_path / "ray").mkdir()
    for name in ("00000.jsonl.gz", "collect.json"):  # it goes on with what is there
        (tmp_path / "ray" / name).write_bytes((tmp_path / "one" / name).read_bytes())
    saltus_(*iterates_of_one_process, "--out", tmp_path / "ray", "--processes", 2, "--ray", "local")
    assert shards(tmp_path / "one") == shards(tmp_path / "ray")


def test_a_ray_worker_returns_its_error_in_one_line(folder, tmp_path):
    """Ray does not keep the type of an error, so a worker returns its text."""
    loading = {"model": folder, "method": "plain"}
    worker = _ShardWriter(CollectionPlan([TokenizedPrompt("a", (3,))]), tmp_path, loading, 1, None)
    assert worker({"shard": [0]})["error"] == [""]
    assert worker({"shard": [7]})["error"] == ["IndexError: list index out of range"]
    lost = _ShardWriter(CollectionPlan([]), tmp_path, {**loading, "model": str(tmp_path / "none")}, 1, None)
    assert "none" in lost({"shard": [0]})["error"][0]


@pytest.mark.unchecked
@pytest.mark.slow
@pytest.mark.parametrize(("kind", "processes"), [("text", 2), ("jacobi", 1)])
def test_a_run_killed_at_any_moment_leaves_no_gap_and_no_duplicate(kind, processes, folder, tmp_path, monkeypatch):
    prompts_file = lines(
        tmp_path / "prompts.jsonl", *({"prompt": f"{prompt} {i}"} for i in range(4) for prompt in PROMPTS)
    )
    command = ["collect", kind, "-f", prompts_file, "-m", folder, "-n", 40, "--texts-per-file", 3]
    saltus_(*command, "--out", tmp_path / "whole")
    monkeypatch.setattr(collection_workers, "get_context", lambda method: forked_workers())
    killed = tmp_path / "killed"
    kills = 0
    for files in (1, 9) if processes == 1 else (5,):
        run = get_context("fork").Process(target=saltus_, args=(*command, "--out", killed, "--processes", processes))
        run.start()
        while len(shards(killed)) < files and run.is_alive():
            time.sleep(0.005)
        run.kill()
        run.join()
        kills += run.exitcode == -signal.SIGKILL
        assert shards(killed).items() <= shards(tmp_path / "whole").items()
    assert kills == (2 if processes == 1 else 1)
    there = {name: os.stat(killed / name).st_mtime_ns for name in shards(killed)}
    assert 5 <= len(there) < 28
    saltus_(*command, "--out", killed, "--processes", processes)
    assert shards(killed) == shards(tmp_path / "whole")
    assert there.items() <= {name: os.stat(killed / name).st_mtime_ns for name in there}.items(), "none is written anew"


@pytest.mark.slow
def test_a_folder_is_continued_with_the_same_settings_only(folder, tiny_folder, prompts_file, tmp_path):
    out = "--out", tmp_path / "teacher"
    collect("-f", prompts_file, "-m", folder, *out, "--coupling", "probability")
    said = collect("-f", prompts_file, "-m", folder, *out, "--coupling", "probability").stderr
    assert "all there before" in said
    assert said.rstrip().endswith(f"saltus train ptp --model {folder} --teacher {tmp_path / 'teacher'}")

    def refused(*arguments: object) -> str:
        given = arguments if "--coupling" in arguments else (*arguments, "--coupling", "probability")
        return complaint("collect", "text", *out, *given)

    assert "begun with seed 0, not 1" in refused("-f", prompts_file, "-m", folder, "-n", 12, "--seed", 1)
    assert "max-new-tokens 12, not 13" in refused("-f", prompts_file, "-m", folder, "-n", 13)
    assert "coupling probability, not token-order" in refused(
        "-f", prompts_file, "-m", folder, "-n", 12, "--coupling", "token-order"
    )
    metadata = tmp_path / "teacher" / "collect.json"
    metadata.write_text(json.dumps({**json.loads(metadata.read_text()), "coupling": "gumbel"}))
    assert "coupling gumbel, not probability" in refused(
        "-f", prompts_file, "-m", folder, "-n", 12, "--coupling", "probability"
    )
    metadata.write_text(json.dumps({**json.loads(metadata.read_text()), "coupling": "probability"}))
    assert "temperatures [0.0, 0.7], not [0.5]" in refused("-f", prompts_file, "-m", folder, "-n", 12, "-t", 0.5)
    assert "other prompts" in refused("-f", prompts_file, "-m", folder, "-n", 12, "--limit", 2)
    assert "another model" in refused("-f", prompts_file, "-m", tiny_folder(1), "-n", 12)


def test_a_damaged_file_is_one_line_with_its_name(folder, prompts_file, tmp_path):
    out = tmp_path / "teacher"
    collect("-f", prompts_file, "-m", folder, "--out", out, "--texts-per-file", 5)
    file = out / "00001.jsonl.gz"
    whole = file.read_bytes()
    file.write_bytes(whole[:-20])
    again = ["collect", "text", "-f", prompts_file, "-m", folder, "--out", out, "--texts-per-file", 5, "-n", 12]
    assert f"{file} is damaged" in complaint(*again)
    with pytest.raises(ValueError, match="is damaged"):
        read_teacher_texts(out)
    file.write_bytes(gzip.compress(b"".join(gzip.decompress(whole).splitlines(True)[1:])))
    assert "texts are missing" in complaint(*again)
    file.unlink()
    with pytest.raises(ValueError, match="lacks 1 of 3 shards"):
        read_teacher_texts(out)
    saltus_(*again)
    assert file.read_bytes() == whole


def test_two_runs_do_not_work_in_one_folder(folder, prompts_file, tmp_path):
    from saltus.training.loop.checkpoint import lock_folder

    with lock_folder(tmp_path / "teacher"):
        assert "another process" in complaint(
            "collect", "text", "-f", prompts_file, "-m", folder, "--out", tmp_path / "teacher"
        )


def test_ctrl_c_reports_what_is_written_and_how_to_continue(folder, prompts_file, tmp_path, monkeypatch):
    def interrupted(engine, plan, number, *rest):
        if number == 2:
            raise KeyboardInterrupt
        return write_shard(engine, plan, number, *rest)

    monkeypatch.setattr("saltus.training.data.collection_workers.write_shard", interrupted)
    output = collect(
        "-f", prompts_file, "-m", folder, "--out", tmp_path / "teacher", "--texts-per-file", 4, code=130
    ).stderr
    assert output == "saltus: interrupted; 2 of 4 files are written, the same command writes the others\n"


def test_bad_prompts_and_settings_are_refused_before_loading(folder, prompts_file, tmp_path, monkeypatch):
    out = "--out", tmp_path / "teacher"
    long = lines(tmp_path / "long.jsonl", {"prompt": "x" * 600})
    assert "reads 512" in complaint("collect", "text", "-f", long, *out, "-m", folder)
    monkeypatch.setattr("saltus.engine.load.load", lambda *_, **__: pytest.fail("the model was loaded"))
    turns = lines(tmp_path / "turns.jsonl", {"prompt": "a"}, {"turns": ["a", "b"]})
    assert "prompt 1 of" in complaint("collect", "text", "-f", turns, *out)
    assert "there is no file" in complaint("collect", "text", "-f", tmp_path / "nowhere", *out)
    assert "temperature is -1" in complaint("collect", "text", "-f", prompts_file, *out, "-t", -1)
    assert "--prompts" in complaint("collect", "text", *out)
    assert "a model of --endpoint" in complaint("collect", "text", "-f", prompts_file, *out, "--served-model", "any")


def test_the_commands_of_the_group_are_shown(folder):
    assert "Let a model answer prompts" in saltus_("collect").stdout
    assert "--processes" in saltus_("collect", "text", "--help").stdout


def test_every_prompt_has_a_seed_of_its_own():
    assert len({text_seed(seed, number) for seed in range(10) for number in range(100)}) == 1000
    plan = CollectionPlan([TokenizedPrompt("", (1,))] * 5, (0.0, 1.0), texts_per_shard=4)
    assert plan.texts_of_shard(1) == [(2, 0.0), (2, 1.0), (3, 0.0), (3, 1.0)]
    assert [text for number in range(len(plan.shard_names)) for text in plan.texts_of_shard(number)] == [
        (question, temperature) for question in range(5) for temperature in (0.0, 1.0)
    ]
