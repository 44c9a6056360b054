"""The byte-level recipe: bytes are tokens, training goes on where it was, and heads of bytes draft for the model."""

import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from test_cli import saltus_

import saltus
from saltus.loading.byte_tokenizers import byte_letters

sys.path.insert(0, str(Path(__file__).parents[2] / "experiments"))
import bytes_target

TEXT = "Ünïcode läuft, the cat sat on the mat.\n"
MUCH = "".join(f"{TEXT}So {number} cats sat.\n" for number in range(300))


def test_a_byte_is_the_token_64_places_behind_it():
    made = bytes_target.byte_tokenizer()
    every = bytes(range(256))
    assert made.encode(TEXT) == [64 + byte for byte in TEXT.encode()]
    assert made.decode([64 + byte for byte in TEXT.encode()]) == TEXT
    assert len({*byte_letters()}) == 256
    assert made.decode([64 + byte for byte in every[:128]]) == every[:128].decode()
    assert (len(made), made.bos_token_id, made.eos_token_id) == (320, 1, 2)


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """A model that knows two lines."""
    room = tmp_path_factory.mktemp("bytes")
    (room / "text").write_text(MUCH, encoding="utf-8")
    return run(room, "--steps", 40)


def run(room: Path, *more: object) -> Path:
    small = (
        "--hidden",
        32,
        "--layers",
        1,
        "--length",
        48,
        "--batch",
        4,
        "--every",
        10,
        "--prompts",
        12,
        "--rate",
        0.01,
    )
    given = ("--text", room / "text", "--work", room / "work", "--out", room / "model", *small, *more)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["bytes_target.py", *map(str, given)])
        bytes_target.main()
    return room


def test_it_learns_its_text_and_writes_it(trained):
    written = saltus.load(str(trained / "model"), "lookup").generate(TEXT, max_new_tokens=20, raw=True)
    assert len(written.tokens) == 20
    assert min(written.tokens) >= 64
    state = torch.load(trained / "work" / "checkpoint.pt", weights_only=True)
    bits = [each["bits"] for each in state["evaluations"]]
    assert len(bits) == 4
    assert bits[-1] < bits[0] - 1
    assert bits[-1] < 4
    assert all((trained / "work" / name).read_text() for name in ("prompts.jsonl", "held_out.jsonl"))


def test_a_run_goes_on_to_the_same_weights(trained, tmp_path, monkeypatch):
    (tmp_path / "text").write_text(MUCH, encoding="utf-8")
    loss = bytes_target.ByteTask.loss

    def killed(course, step):
        if step == 25:
            raise KeyboardInterrupt
        return loss(course, step)

    monkeypatch.setattr(bytes_target.ByteTask, "loss", killed)
    with pytest.raises(SystemExit, match="the same command goes on"):
        run(tmp_path, "--steps", 40)
    monkeypatch.undo()
    run(tmp_path, "--steps", 40)
    one, other = (torch.load(room / "work" / "checkpoint.pt", weights_only=True) for room in (trained, tmp_path))
    assert all(torch.equal(weight, other["module"][name]) for name, weight in one["module"].items())


def test_too_short_a_text_is_refused_in_a_line(tmp_path):
    (tmp_path / "text").write_text(TEXT, encoding="utf-8")
    with pytest.raises(SystemExit, match="too few to hold some out; take a longer text"):
        run(tmp_path)


@pytest.mark.slow
def test_heads_of_bytes_are_trained_and_draft(trained, tmp_path):
    teacher, model = tmp_path / "teacher", trained / "model"
    saltus_("collect", "text", "-f", trained / "work" / "prompts.jsonl", "-m", model, "-n", 24, "--out", teacher)
    small = [switch for change in ("rank=3", "batch_size=3", "windows_per_text=6") for switch in ("--set", change)]
    work = ("--work", tmp_path / "work", "--out", tmp_path / "heads")
    said = saltus_(
        "train", "mtpc", "-r", "bytes-heads", "-m", model, "--teacher", teacher, *work, "--steps", 20, *small
    )
    assert re.search(r"greedy [1-9]", said.stderr)
    options = {"mtpc": {"model": str(tmp_path / "heads"), "min_probability": 0.0}}
    engine = saltus.load(str(model), "mtpc", options=options, adaptive=False)
    for temperature in (0.0, 0.7):
        given = {"max_new_tokens": 40, "temperature": temperature, "raw": True}
        found = engine.generate(TEXT, **given)
        assert found.tokens == engine.generate(TEXT, method="plain", **given).tokens
        assert np.mean([step.num_draft_tokens for step in found.calls]) > 3
