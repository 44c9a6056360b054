"""Files of the cache that are cut, zeroed or flipped are made again, with a line, and give the same text."""

import errno
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from test_gguf import Q, tiny, write

from saltus.cli.errors import BAD_INPUT, describe_error
from saltus.engine import calibration
from saltus.engine.tuned_settings import TunedSettings, find_tuned_settings
from saltus.kernels import native
from saltus.kernels.native import compiling
from saltus.loading import packing, sources
from saltus.loading.fetching import atomic_folder
from saltus.loading.load_model import load_model, load_tokenizer
from saltus.storage import cache_files
from saltus.storage.cache_files import (
    LEFT_AFTER,
    READ_AGAIN_AFTER,
    TEMPORARY,
    disk_errors,
    find_damage,
    has_digest,
    is_whole,
    new_file,
    new_file_with_digest,
    read_json,
    write_json,
    write_manifest,
)


def cut(share: float) -> Callable[[bytes], bytes]:
    return lambda whole: whole[: int(share * len(whole))]


def zeroed(whole: bytes) -> bytes:
    return whole[: len(whole) // 2] + bytes(len(whole) - len(whole) // 2)


def zeroed_end(whole: bytes) -> bytes:
    return whole[:-1000] + bytes(min(1000, len(whole)))


def flipped(whole: bytes) -> bytes:
    at = len(whole) // 3
    while not whole[at : at + 1].isalnum():  # white space of JSON means nothing
        at += 1
    return whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :]


DAMAGES = [cut(0), cut(0.01), cut(0.5), cut(0.99), zeroed, zeroed_end, flipped]


@pytest.fixture
def lines(caplog) -> Callable[[], list[str]]:
    """The lines that were logged since the last call."""
    caplog.set_level(logging.WARNING, "saltus")

    def lines() -> list[str]:
        found = [record.getMessage() for record in caplog.records]
        caplog.clear()
        return found

    return lines


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    """An empty cache; nothing waits for the disk."""
    native.load_kernels()  # from the cache that has them
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    monkeypatch.setenv("SALTUS_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def check_made_again(
    files: list[Path], make: Callable[[], object], same: Callable[[], object], lines, damages=DAMAGES
) -> None:
    """Damage each file in each way: `make` must log one line that names it, and restore what `same` gives."""
    expected = same()
    assert lines() == []
    for file in files:
        for damage in damages:
            whole = file.read_bytes()
            file.write_bytes(damage(whole))
            make()
            [line] = lines()
            assert f"{file.name} is damaged" in line
            assert "\n" not in line
            make()
            assert lines() == [], "it is whole again"
            assert same() == expected


# Every kind of file


@pytest.mark.parametrize("damage", DAMAGES)
def test_the_folder_of_a_gguf_file_is_made_again_with_the_same_bytes(cache, tmp_path, lines, damage):
    file = tmp_path / "tiny.gguf"
    write(tiny("llama, tied"), file, [Q.Q8_0], template="{{ messages[0]['content'] }}")

    def make() -> Path:
        return sources.resolve(str(file))

    def same() -> list[object]:
        folder = make()
        return sorted((each.name, each.read_bytes()) for each in folder.iterdir())

    folder = make()
    assert {"chat_template.jinja", "config.json", "source.json", "tokenizer.json"} <= {f.name for f in folder.iterdir()}
    check_made_again(sorted(folder.iterdir()), make, same, lines, [damage])
    assert load_tokenizer(folder).chat_template == "{{ messages[0]['content'] }}"


def test_packed_weights_are_made_again_with_the_same_blocks(cache, tmp_path, lines):
    (tmp_path / "model.safetensors").touch()
    weight = torch.linspace(-1, 1, 64 * 64).view(64, 64).bfloat16()

    def make() -> list[object]:
        model = torch.nn.Sequential(torch.nn.Linear(64, 64, bias=False))
        model[0].weight = torch.nn.Parameter(weight)
        model.get_output_embeddings = lambda: None
        packing.pack_model(model, "q8_0", tmp_path)
        return model[0].weight.rows.tolist()

    make()
    check_made_again(sorted((cache / "packed").iterdir()), make, make, lines)


def test_a_compiled_library_is_made_again(cache, lines):
    target = cache / "native" / "kernels.so"

    def make() -> None:
        if not has_digest(target):
            with new_file_with_digest(target) as made:
                made.write_bytes(b"library" * 500)

    make()
    check_made_again(sorted(target.parent.iterdir()), make, target.read_bytes, lines)


def test_call_costs_are_measured_again(cache, monkeypatch, lines):
    measured = {rows: 0.1 * rows for rows in calibration.CALIBRATION_ROWS}
    file = cache / "call_costs" / "tiny.json"
    monkeypatch.setattr(calibration, "_cache_file", lambda network: file)
    monkeypatch.setattr(
        calibration, "measure_call_seconds",
        lambda network, rows=calibration.CALIBRATION_ROWS, turns=3: {each: measured[each] for each in rows},
    )  # fmt: skip

    def make() -> dict[int, float]:
        return calibration.call_seconds(None)

    make()
    check_made_again([file], make, make, lines)
    for content in ('{"1": null}', "[]", "{}", '{"seconds": [[1, null]], "digest": 0}', "null"):
        file.write_text(content)
        assert make() == measured
        assert len(lines()) == 1


def test_tuned_settings_that_are_damaged_are_not_used_and_the_line_says_what_to_do(cache, lines):
    tuned = TunedSettings("jacobi", "tiny", "machine", options={"block_size": 5}, made={"calls": {10: 1.0, 9: 2.0}})
    for damage in DAMAGES:
        file = tuned.save()
        assert find_tuned_settings("jacobi", "tiny", "machine").options == {"block_size": 5}
        file.write_bytes(damage(file.read_bytes()))
        assert find_tuned_settings("jacobi", "tiny", "machine") is None
        [line] = lines()
        assert "run saltus tune again" in line


# Large files


@pytest.fixture
def large(tmp_path, monkeypatch) -> tuple[Path, Path, list[Path]]:
    """A manifest, a file that is taken for a large one, and the files whose digests were computed."""
    file, manifest, read = tmp_path / "model.gguf", tmp_path / "source.json", []
    file.write_bytes(bytes(range(256)) * 40)
    write_manifest(manifest, tmp_path)
    real = cache_files.sha256_of_file
    monkeypatch.setattr(cache_files, "sha256_of_file", lambda file: read.append(file) or real(file))
    monkeypatch.setattr(cache_files, "ALWAYS_READ", 1)
    monkeypatch.setattr(cache_files, "SETTLED_AFTER", -1.0)
    return manifest, file, read


def test_a_large_file_is_read_once_and_again_after_a_week(large, tmp_path, monkeypatch):
    manifest, file, read = large
    for _ in range(3):
        assert is_whole(manifest, tmp_path)
    assert read == [file]
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + READ_AGAIN_AFTER + 1)
    for _ in range(3):
        assert is_whole(manifest, tmp_path)
    assert read == [file, file]


def test_a_large_file_that_changed_a_moment_ago_is_read_again(large, tmp_path, monkeypatch):
    manifest, file, read = large
    monkeypatch.setattr(cache_files, "SETTLED_AFTER", 2.0)
    for _ in range(3):
        assert is_whole(manifest, tmp_path)
    assert read == [file] * 3, "another change may leave the same times"


@pytest.mark.parametrize("keep_time", [False, True])
def test_a_large_file_with_zeros_at_its_end_is_noticed_whatever_its_time_says(large, tmp_path, keep_time):
    manifest, file, _ = large
    assert find_damage(manifest, tmp_path) == []
    before = file.stat()
    while file.stat().st_ctime_ns == before.st_ctime_ns:  # until the clock of the file system ticks
        with file.open("rb+") as opened:
            opened.seek(-1000, os.SEEK_END)
            opened.write(bytes(1000))
        if keep_time:
            os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert find_damage(manifest, tmp_path) == [file]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_record_of_the_last_reads_is_no_harm(large, tmp_path, damage):
    manifest, file, read = large
    assert is_whole(manifest, tmp_path)
    checks = manifest.with_suffix(".checked")
    checks.write_bytes(damage(checks.read_bytes()))
    assert is_whole(manifest, tmp_path)
    assert is_whole(manifest, tmp_path)
    assert read == [file, file]


def test_a_cache_that_cannot_be_written_is_read_each_time(large, tmp_path, monkeypatch):
    manifest, file, read = large
    monkeypatch.setattr(cache_files, "write_json", full_disk)
    for _ in range(2):
        assert is_whole(manifest, tmp_path)
    assert read == [file, file]


# Writing


def full_disk(*_: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_file_is_whole_or_not_there(tmp_path, monkeypatch):
    file = tmp_path / "made" / "file"
    writing = new_file(file)
    writing.__enter__().write_text("half")
    assert not writing.__exit__(KeyboardInterrupt, KeyboardInterrupt(), None)
    assert list(file.parent.iterdir()) == []
    with new_file(file) as made:
        made.write_text("whole")
        assert not file.exists()
    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(OSError, match="No space"), new_file(file) as made:
        made.write_text("other")
    assert file.read_text() == "whole"
    assert list(file.parent.iterdir()) == [file]


def test_what_killed_processes_left_is_removed_after_an_hour(tmp_path):
    def leave(name: str, age: float) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        (folder / "kernels.c").touch()
        for part in (folder / "kernels.c", folder):
            os.utime(part, (time.time() - age,) * 2)
        return folder

    old, young, other = leave(f"{TEMPORARY}a", LEFT_AFTER + 60), leave(f"{TEMPORARY}b", 60), leave("c", 1e6)
    growing = leave(f"{TEMPORARY}d", LEFT_AFTER + 60)
    (growing / "kernels.c").touch()
    lock = tmp_path / ".lock"
    lock.touch()
    os.utime(lock, (0, 0))
    write_json(tmp_path / "file.json", {})
    assert not old.exists()
    assert all(each.exists() for each in (young, other, growing, lock))


@pytest.mark.parametrize(
    "make", [lambda folder: has_digest(folder / "x"), lambda folder: atomic_folder(folder / "x").__enter__()]
)
def test_readers_and_writers_remove_them(tmp_path, make):
    old = tmp_path / f"{TEMPORARY}old"
    old.touch()
    os.utime(old, (0, 0))
    make(tmp_path)
    assert not old.exists()


def test_what_was_written_is_read_whatever_its_keys(tmp_path):
    write_json(tmp_path / "file.json", {"numbers": {10: (1, 2.5), 9: None}})
    assert read_json(tmp_path / "file.json") == {"numbers": {"10": [1, 2.5], "9": None}}


# A full disk


def check_full_disk(make: Callable[[], object]) -> None:
    with pytest.raises(ValueError, match=r"ran full while writing .*free some space, .*SALTUS_CACHE") as caught:
        make()
    line, code = describe_error(caught.value)
    assert code == BAD_INPUT
    assert "\n" not in line


def test_a_full_disk_is_one_line_with_the_cure_whoever_writes(cache, tmp_path, monkeypatch):
    tiny("llama, tied").save_pretrained(tmp_path / "model")
    write(tiny("llama, tied"), tmp_path / "tiny.gguf", [Q.Q8_0])
    monkeypatch.setattr(os, "fsync", full_disk)
    check_full_disk(lambda: sources.resolve(str(tmp_path / "tiny.gguf")))
    check_full_disk(lambda: load_model("tiny", tmp_path / "model", weights="q8_0"))
    check_full_disk(TunedSettings("jacobi", "tiny", "machine").save)
    assert [file for file in cache.rglob("*") if file.is_file() and file.suffix != ".lock"] == []


def test_libraries_in_rust_that_meet_a_full_disk_are_one_line_too(cache):
    def save() -> None:
        with disk_errors(cache, "weights"):
            raise SafetensorError("I/O error: No space left on device (os error 28)")

    check_full_disk(save)


def test_call_costs_on_a_full_disk_are_measured_and_used(cache, monkeypatch, lines):
    measured = dict.fromkeys(calibration.CALIBRATION_ROWS, 0.1)
    monkeypatch.setattr(calibration, "_cache_file", lambda network: cache / "call_costs" / "tiny.json")
    monkeypatch.setattr(calibration, "measure_call_seconds", lambda network: measured)
    monkeypatch.setattr(os, "fsync", full_disk)
    assert calibration.call_seconds(None) == measured
    assert lines() == []


def test_a_library_on_a_full_disk_is_a_warning_with_the_cure(cache, monkeypatch, lines):
    monkeypatch.setattr(os, "fsync", full_disk)
    monkeypatch.setattr(compiling.subprocess, "run", lambda command, **_: _compiled(command))
    native.load_kernels.cache_clear()
    assert native.load_kernels() is None
    native.load_kernels.cache_clear()
    first, line = lines()
    assert first.startswith("compiling the kernels")
    assert "free some space, or name a folder on another disk with SALTUS_CACHE" in line


def _compiled(command: list[object]) -> object:
    """As if a compiler had written the library."""
    Path(str(command[command.index("-o") + 1])).write_bytes(b"library")
    return type("Result", (), {"returncode": 0})
