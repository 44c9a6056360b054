"""Tuning: it measures what it says, chooses the best of it, and what it saves is what engines use."""

import json
import logging
import sys

import numpy as np
import pytest
import torch
from test_cli import complaint, lines, saltus_

import saltus
from saltus.cli.report import write_result
from saltus.cli.tune import _show
from saltus.engine import tuned_settings
from saltus.engine.tuned_settings import TunedSettings, machine_name
from saltus.evaluation.profiling.jacobi_tuning import PLAIN, JacobiSearch, affordable_draft_tokens
from saltus.evaluation.reports import step_plots
from saltus.loading.model_identity import model_fingerprint

CPU = torch.device("cpu")


@pytest.fixture
def folder(tiny_folder, tmp_path, monkeypatch) -> str:
    """A tiny model; profiles are kept in a room of the test's own."""
    monkeypatch.setattr(tuned_settings, "cache_folder", lambda: tmp_path / "cache")
    return str(tiny_folder())


def test_a_call_may_cost_so_many_times_one_of_one_node():
    nodes, times = (1, 2, 4, 8, 16, 32), (10.0, 11.0, 12.0, 16.0, 21.0, 40.0)
    assert affordable_draft_tokens(nodes, times, 2.0) == 7, "beside the last decided token"
    assert affordable_draft_tokens(nodes, times, 2.1) == 15
    assert affordable_draft_tokens(nodes, times, 1.0) == 3, "the least that is worth a search"


def ticking(search: JacobiSearch, seconds) -> JacobiSearch:
    """With a clock by which a setting takes what `seconds` says."""
    now, last = [0.0], [None]

    def clock() -> float:
        now[0] += seconds(last[0]) if last[0] is not None else 0
        return now[0]

    write = search._generate

    def noted(engine, setting, text):
        last[0] = setting
        return write(engine, setting, text)

    search._generate, search.clock = noted, clock
    return search


@pytest.mark.slow
def test_the_quickest_setting_is_chosen_whatever_the_order(folder):
    engine = saltus.load(folder, "jacobi", max_draft_tokens=32)
    search = JacobiSearch(engine, ["the cat sat", "a dog"], 16, {"max_new_tokens": 6}, rounds=2)

    def seconds(setting) -> float:
        if PLAIN in setting:
            return 1.0
        away = (np.log2(setting["block_size"]) - 3) ** 2 + 0.1 * (np.log2(1 + setting.get("candidates", 4)) - 1) ** 2
        others = {"max_blocks": (2, 3), "spawn_ratio": (0.85, 0.5), "ngram_size": (4, 3)}  # the default, and the best
        return 0.5 + 0.1 * away + 0.02 * sum(abs(setting.get(name, at) - best) for name, (at, best) in others.items())

    ticking(search, seconds)
    assert sum(1 for _ in search.run()) == search.num_texts
    assert search.best == {
        "block_size": 8, "candidates": 1, "ngram_size": 3, "max_blocks": 3, "spawn_ratio": 0.5,
    }  # fmt: skip
    assert {row["speedup"] for row in search.rows if PLAIN in row} == {1}
    assert search.speedup == pytest.approx(2)
    assert all(row["tokens_per_call"] >= 1 for row in search.rows)
    assert {row.get("block_size") for row in search.rows} == {None, 4, 8, 16}, "larger blocks do not fit"


@pytest.mark.slow
def test_the_length_of_n_grams_is_not_searched_where_none_is_offered(folder):
    search = JacobiSearch(saltus.load(folder, "jacobi"), ["the cat sat"], 4, {"max_new_tokens": 2}, rounds=1)
    ticking(search, lambda setting: 1.0 + setting.get("candidates", 0))
    assert 0 < sum(1 for _ in search.run()) < search.num_texts
    assert search.best["candidates"] == 0
    assert not any("ngram_size" in row for row in search.rows)


def test_an_adapter_s_rows_count(folder):
    engine = saltus.load(folder, "jacobi")
    assert JacobiSearch(engine, ["the cat"], 16, {}, fixed_options={"model": "adapter"}).values["block_size"] == [4, 8]


def test_a_profile_is_what_engines_use_unless_told_otherwise(folder):
    engine = saltus.load(folder, "jacobi")
    assert engine.decoder.tuned_settings is None
    own = model_fingerprint(engine.network.model)
    TunedSettings("jacobi", folder, machine_name(CPU), "", own, {"block_size": 5, "candidates": 1}, 7).save()
    tuned = saltus.load(folder, "lookup")
    for spec, block, max_draft_tokens in (("jacobi", 5, 7), ("jacobi+lookup", 5, 7)):
        ensemble = tuned.decoder.setup(spec)
        assert (ensemble.methods[0].block_size, ensemble.methods[0].candidates, ensemble.max_draft_tokens) == (
            block,
            1,
            max_draft_tokens,
        )
    assert tuned.decoder.setup("lookup").max_draft_tokens == 31, "others keep theirs"
    assert saltus.load(folder, "jacobi", max_draft_tokens=9).decoder.setup("jacobi").max_draft_tokens == 9
    assert (
        saltus.load(folder, "jacobi", options={"jacobi": {"block_size": 3}})
        .decoder.setup("jacobi")
        .methods[0]
        .block_size
        == 3
    )
    assert saltus.load(folder, "jacobi", tuned_settings=False).decoder.tuned_settings is None
    how = {"max_new_tokens": 20, "temperature": 0.7, "method": "jacobi"}
    assert tuned.generate("the cat", **how).tokens == engine.generate("the cat", **how).tokens


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is CUDA")
def test_a_missing_device_is_named_before_a_profile_is_looked_for(folder):
    with pytest.raises(ValueError, match="no CUDA device"):
        saltus.load(folder, "jacobi", device="cuda")


def test_a_profile_of_other_weights_or_a_damaged_one_is_not_used(folder, caplog):
    path = TunedSettings("jacobi", folder, machine_name(CPU), "", "another", {"block_size": 5}, 7).save()
    assert saltus.load(folder, "jacobi").decoder.tuned_settings is None
    path.write_text("{")
    with caplog.at_level(logging.WARNING):
        assert saltus.load(folder, "jacobi").decoder.tuned_settings is None
    assert "run saltus tune again" in caplog.text


@pytest.mark.slow
def test_the_command_measures_saves_and_is_used(folder, tmp_path):
    inputs = lines(
        tmp_path / "prompts.jsonl", {"prompt": "the cat"}, {"messages": [{"role": "user", "content": "dog"}]}
    )
    common = ["tune", "-m", folder, "-f", inputs, "-n", 6, "--rounds", 1, "--texts", 1]
    said = saltus_(*common)
    assert "chosen: block" in said.stdout
    assert "saved: " in said.stderr
    tuned = saltus.load(folder, "jacobi").decoder.tuned_settings
    assert tuned is not None
    result = json.loads(saltus_(*common, "--no-save", "--json").stdout)
    assert {"command", "commit", "machine", "settings", "call_seconds"} <= set(result)
    assert result["max_draft_tokens"] >= 3
    assert set(result["chosen"]) <= {"block_size", "candidates", "ngram_size", "max_blocks", "spawn_ratio"}
    assert result["speedup"] in [row["speedup"] for row in result["settings"]]
    assert saltus.load(folder, "jacobi").decoder.tuned_settings == tuned, "nothing was saved"
    assert "--max-cost-ratio" in complaint(*common, "--max-cost-ratio", 0.5)
    assert "temperature is -1" in complaint(*common, "-t", -1)


@pytest.mark.parametrize(("speedup", "is_slower"), [(0.9, True), (1.1, False)])
def test_settings_that_are_no_faster_than_plain_decoding_are_said_to_be(speedup, is_slower, capsys):
    rows = [{"plain": 1, "tokens_per_second": 100.0, "speedup": 1.0, "tokens_per_call": 1.0}]
    rows += [{"candidates": 4, "tokens_per_second": 100 * speedup, "speedup": speedup, "tokens_per_call": 1.2}]
    _show({"max_draft_tokens": 7, "settings": rows, "chosen": {"candidates": 4}, "speedup": speedup})
    said = capsys.readouterr().out
    assert "…" not in said, "eighty columns are enough for the heads"
    assert ("plain decoding is as fast; take --method lookup or auto here" in said) is is_slower


def test_a_result_is_written_without_matplotlib_and_a_note_says_how_to_have_figures(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    write_result(tmp_path / "step.json", {"complete": True}, step_plots.write_figures)
    assert json.loads((tmp_path / "step.json").read_text()) == {"complete": True}
    assert 'step.json; for figures: pip install ".[bench]" in the clone' in capsys.readouterr().err
