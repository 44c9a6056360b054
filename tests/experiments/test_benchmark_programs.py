"""Programs in benchmarks/ and experiments/ run on tiny models, and write down what they measured."""

import json
import runpy
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from test_cli import lines, saltus_

import saltus
from jacobi_surface import SpeedupSurface
from saltus.methods.shared.adapter_files import save_adapter
from saltus.models.gated_lora import GatedLoraSettings, new_adapter
from tiny_models import byte_tokenizer, tiny_xlnet

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.external, pytest.mark.slow]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    def program(name: str, *arguments: object) -> None:
        monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
        monkeypatch.setattr(sys, "path", [*sys.path, str((ROOT / name).parent)])  # as if it were started
        runpy.run_path(str(ROOT / name), run_name="__main__")

    return program


def test_heads_are_measured_beside_plain_decoding_with_a_ceiling(run, tiny_folder, tiny_heads, tmp_path):
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "the cat sat on"}\n')
    run(
        "experiments/heads.py", "--model", tiny_folder(), "--prompts", tmp_path / "prompts.jsonl", "-n", 12,
        "--heads", tiny_heads(), "--rules", "match", "reject", "--temperatures", 1, "--out", tmp_path / "heads.json",
    )  # fmt: skip
    rows = json.loads((tmp_path / "heads.json").read_text())["rows"]
    assert [row["rule"] for row in rows] == ["", "match", "reject"]
    assert all(row["ceiling"] > 0 for row in rows[1:])


def test_a_server_of_llama_cpp_gets_the_context_that_the_prompts_need(run, tiny_folder, tmp_path):
    """`false` stands for the server: it ends at once, and the program names its command."""
    prompts = lines(tmp_path / "prompts.jsonl", {"prompt": "the cat sat"}, {"prompt": "a dog " * 900})
    tokens = saltus.load(str(tiny_folder()), "plain").encode("(9999.9) " + "a dog " * 900)
    assert len(tokens) > 2048
    slot = next(size for size in range(0, 10**5, 256) if size >= len(tokens) + 40)
    with pytest.raises(SystemExit, match=f"false .* -np 3 -c {3 * slot} "):
        run(
            "benchmarks/serve_load.py", "--prompts", prompts, "--model", tiny_folder(), "--servers", "",
            "--llama-server", shutil.which("false"), "--max-num-seqs", 3, "--max-new-tokens", 40,
        )  # fmt: skip


def test_heads_are_compared_on_the_same_held_out_windows(run, tiny_folder, tmp_path):
    folder = tiny_folder()
    texts = lines(tmp_path / "texts.jsonl", *({"prompt": f"the cat sat {number} times"} for number in range(8)))
    saltus_("collect", "text", "-f", texts, "-m", folder, "-n", 24, "--out", tmp_path / "teacher")
    for circuit in ("ff", "cp"):
        saltus_(
            "train", "mtpc", "-m", folder, "--teacher", tmp_path / "teacher", "--set", f"circuit={circuit}",
            "--steps", 2, "--set", "validation_fraction=0.5", "--set", "vocabulary=40",
            "--work", tmp_path / f"work-{circuit}", "--out", tmp_path / circuit,
        )  # fmt: skip
    run(
        "experiments/head_windows.py", "--model", folder, "--states", tmp_path / "work-cp/states", "--windows", 3,
        "--heads", tmp_path / "ff", tmp_path / "cp", tmp_path / "ff", "--out", tmp_path / "found.json",
    )  # fmt: skip
    rows = json.loads((tmp_path / "found.json").read_text())["rows"]
    assert [row["heads"] for row in rows] == ["ff"] * 2 + ["cp"] * 2 + ["ff"] * 2
    assert [row["texts"] for row in rows[:2]] == ["greedy", "sampled"]
    assert all(row["over_first"] == [1.0, 1.0, 1.0] for row in (*rows[:2], *rows[4:])), "the same heads, same windows"
    assert all(row["tokens_per_call"][0] >= 1 for row in rows)


def test_what_an_adapter_makes_of_uniforms_is_told_of_every_query(run, tiny_folder, tmp_path):
    """The first query too, which makes no draft, and where it starts from the last token."""
    folder = tiny_folder()
    texts = lines(tmp_path / "texts.jsonl", *({"prompt": f"the cat sat {number} times"} for number in range(6)))
    saltus_("collect", "text", "-f", texts, "-m", folder, "-n", 24, "--out", tmp_path / "teacher")
    model = saltus.load(str(folder), "plain", device="cpu").network.model
    adapter = new_adapter(model, GatedLoraSettings(4, 4.0, window=5, query_start="last-token"))
    save_adapter(adapter, tmp_path / "adapter", model, str(folder), {"form": "one-hot", "window": 5})
    run(
        "experiments/uniforms.py", "--model", folder, "--teacher", tmp_path / "teacher", "--adapter",
        tmp_path / "adapter", "--coupling", "token-order", "--out", tmp_path / "uniforms.json",
    )  # fmt: skip
    found = json.loads((tmp_path / "uniforms.json").read_text())
    own, other = found["the text's uniforms"], found["other uniforms"]
    assert len(own["by_query"]) == len(own["right"]) + 1 == 5
    assert own == other, "an untrained adapter reads none"
    assert found["the same, first query right"] == {"tokens": 0.0, "error": 0.0}


def test_a_model_that_cannot_end_a_hole_fills_stories_too(run, tmp_path):
    tiny_xlnet().save_pretrained(tmp_path)
    tokenizer = byte_tokenizer()
    tokenizer.bos_token = tokenizer.eos_token
    tokenizer.save_pretrained(tmp_path)
    sentences = "".join(f"one,Cat {i}.\n" for i in range(5))
    (tmp_path / "tales.csv").write_text("document_id,text\n" + sentences)
    run(
        "experiments/infilling.py", "--model", tmp_path, "--text", tmp_path / "tales.csv", "--texts", 1, "--long", 0,
        "--lengths", 2, "--judge", "none", "--out", tmp_path / "found",
    )  # fmt: skip
    table = json.loads((tmp_path / "found/infilling.json").read_text())["table"]
    plain = [row for row in table if row["way"] == "plain"]
    assert {row["task"] for row in plain} == {"1 of 5", "3 of 5", "95 %"}
    assert all(row["tokens"] == row["calls"] for row in plain)


def test_settings_of_jacobi_are_measured_and_drawn(run, tiny_folder, tmp_path):
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "the cat sat on"}\n')
    run(
        "experiments/jacobi_surface.py", "--model", tiny_folder(), "--prompts", tmp_path / "prompts.jsonl",
        "--max-new-tokens", 6, "--rounds", 1, "--texts", 1, "--out", tmp_path,
    )  # fmt: skip
    result = json.loads((tmp_path / "surface.json").read_text())
    assert result["complete"]
    assert result["chosen"]
    for name in ("jacobi_calls", "jacobi_surface"):
        assert (tmp_path / f"{name}.png").stat().st_size > 5000


def test_a_surface_finds_the_polynomial_that_it_is_given_and_smooths_noise():
    places = [(block, count) for block in (4, 8, 16, 32, 64) for count in (0, 1, 2, 4, 8)]

    def height(block: int, count: int) -> float:
        return 2 - 0.1 * (np.log2(block) - 4) ** 2 - 0.2 * (np.log2(1 + count) - 2) ** 2

    exact = SpeedupSurface.fit([(*place, height(*place)) for place in places])
    assert all(abs(exact.evaluate(*place) - height(*place)) < 1e-6 for place in places)
    noise = np.random.default_rng(0).normal(0, 0.05, len(places))
    noisy = SpeedupSurface.fit([(*place, height(*place) + own) for place, own in zip(places, noise, strict=True)])
    assert max(places, key=lambda place: noisy.evaluate(*place)) in [(16, 2), (16, 4), (16, 1), (8, 2), (32, 2)]
    assert SpeedupSurface.fit([(4, 0, 1.5)]).evaluate(4, 0) == 1.5


def test_the_control_of_drafts_is_simulated(run, capsys):
    run("benchmarks/draft_control.py", "--calls", 30, "--scenarios", "right calibration", "drafts seem dear")
    table = capsys.readouterr().out.splitlines()
    assert [row.split("|")[1].strip() for row in table[2:]] == ["right calibration", "drafts seem dear", "all"]


def test_perplexity_of_packed_weights_is_near_that_of_bfloat16(run, tiny_folder, tmp_path, capsys):
    (tmp_path / "text.txt").write_text("the cat sat on the mat and the dog sat on the log " * 4)
    run(
        "benchmarks/perplexity.py", tmp_path / "text.txt", "--tokens", 30, "--window", 16, "--formats", "q8_0",
        "--model", tiny_folder(dtype=torch.bfloat16, hidden_size=64, intermediate_size=64),
    )  # fmt: skip
    _, row = capsys.readouterr().out.splitlines()
    name, bf16, int8, ratio = row.split()
    assert name == "q8_0"
    assert float(int8) == pytest.approx(float(bf16), rel=0.05)
    assert ratio.endswith("%")
