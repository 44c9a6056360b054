"""Programs in benchmarks/ run on tiny models, and write down what they measured."""

import json
import runpy
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from conftest import byte_tokenizer, tiny_xlnet

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
pytestmark = pytest.mark.slow


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    def program(name: str, *arguments: object) -> None:
        monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
        runpy.run_path(str(BENCHMARKS / name), run_name="__main__")

    return program


def test_heads_are_measured_beside_plain_decoding_with_a_ceiling(run, tiny_folder, tiny_heads, tmp_path):
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "the cat sat on"}\n')
    run(
        "heads.py", "--model", tiny_folder(), "--prompts", tmp_path / "prompts.jsonl", "-n", 12,
        "--heads", tiny_heads(), "--rules", "match", "reject", "--temperatures", 1, "--out", tmp_path / "heads.json",
    )  # fmt: skip
    rows = json.loads((tmp_path / "heads.json").read_text())["rows"]
    assert [row["rule"] for row in rows] == ["", "match", "reject"]
    assert all(row["ceiling"] > 0 for row in rows[1:])


def test_a_model_that_cannot_end_a_hole_fills_stories_too(run, tmp_path):
    tiny_xlnet().save_pretrained(tmp_path)
    tokenizer = byte_tokenizer()
    tokenizer.bos_token = tokenizer.eos_token
    tokenizer.save_pretrained(tmp_path)
    sentences = "".join(f"one,The cat number {i} sat.\n" for i in range(5))
    (tmp_path / "tales.csv").write_text("document_id,text\n" + sentences)
    run(
        "infilling.py", "--model", tmp_path, "--text", tmp_path / "tales.csv", "--texts", 1, "--long", 0,
        "--lengths", 2, "--judge", "none", "--out", tmp_path / "found",
    )  # fmt: skip
    table = json.loads((tmp_path / "found/infilling.json").read_text())["table"]
    plain = [row for row in table if row["way"] == "plain"]
    assert {row["task"] for row in plain} == {"1 of 5", "3 of 5", "95 %"}
    assert all(row["tokens"] == row["calls"] for row in plain)
