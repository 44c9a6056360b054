"""Tuning: it measures what it says, chooses the best of it, and what it saves is what engines use."""

import json
import logging
import sys

import numpy as np
import pytest
import torch

import saltus
from saltus.cli.report import write_result
from saltus.engine import tuned_settings
from saltus.engine.tuned_settings import TunedSettings, machine_name
from saltus.evaluation.profiling.jacobi_tuning import PLAIN, JacobiSearch, SpeedupSurface, affordable_draft_tokens
from saltus.evaluation.reports import step_plots
from saltus.loading.model_identity import model_fingerprint
from test_cli import complaint, lines, saltus_

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


def ticking(search: JacobiSearch, seconds) -> JacobiSearch:
    """With a clock by which a setting takes what `seconds` says."""
    now, last = [0.0], [None]

    def clock() -> float:
        now[0] += seconds(last[0])
        return now[0]

    write = search._generate

    def noted(setting, text, warm_up=False):
        last[0] = setting
        return write(setting, text, warm_up)

    search._generate, search.clock = noted, clock
    return search


@pytest.mark.slow
def test_the_quickest_setting_is_chosen_whatever_the_order(folder):
    engine = saltus.load(folder, "jacobi", max_draft_tokens=32)
    search = JacobiSearch(engine, ["the cat sat", "a dog"], 16, {"max_new_tokens": 6}, rounds=2)

    def seconds(setting) -> float:
        if PLAIN in setting:
            return 1.0
        away = (np.log2(setting["block_size"]) - 3) ** 2 + 0.1 * (np.log2(1 + setting["candidates"]) - 1) ** 2
        others = {"max_blocks": (2, 3), "spawn_ratio": (0.85, 0.5), "ngram_size": (4, 3)}  # the default, and the best
        return 0.5 + 0.1 * away + 0.02 * sum(abs(setting.get(name, at) - best) for name, (at, best) in others.items())

    ticking(search, seconds)
    assert sum(1 for _ in search.run()) == search.num_texts
    assert search.best_setting() == {
        "block_size": 8,
        "candidates": 1,
        "ngram_size": 3,
        "max_blocks": 3,
        "spawn_ratio": 0.5,
    }
    assert [row["speedup"] for row in search.table_rows() if PLAIN in row] == [1]
    assert all(row["tokens_per_call"] >= 1 for row in search.table_rows())
    assert {row.get("block_size") for row in search.table_rows()} == {None, 4, 8, 16}, (
        "blocks beyond the max_draft_tokens are not tried"
    )


@pytest.mark.slow
def test_the_length_of_n_grams_is_not_searched_where_none_is_offered(folder):
    search = JacobiSearch(saltus.load(folder, "jacobi"), ["the cat sat"], 4, {"max_new_tokens": 2}, rounds=1)
    ticking(search, lambda setting: 1.0 + setting.get("candidates", 0))
    assert sum(1 for _ in search.run()) == search.num_texts
    assert search.best_setting()["candidates"] == 0
    assert not any("ngram_size" in row for row in search.table_rows())


def test_an_adapter_s_rows_count_and_what_is_flat_is_chosen_as_measured(folder):
    engine = saltus.load(folder, "jacobi")
    guided = JacobiSearch(engine, ["the cat"], 16, {}, fixed_options={"model": "adapter"})
    assert {one["block_size"] for one in guided.grid} == {4, 8}
    search = JacobiSearch(engine, ["the cat"], 4, {})
    for number, one in enumerate([{PLAIN: True}, *search.grid]):
        key = tuple(one.items())
        search.seconds[key], search.tokens[key] = {0: [0.9 if number == 3 else 1.0]}, {0: (10, 9)}
    assert SpeedupSurface.fit(search.speedup_points()).degree == 0
    assert search.best(search.grid) == search.grid[2]


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
def test_the_command_measures_draws_saves_and_is_used(folder, tmp_path, monkeypatch):
    inputs = lines(
        tmp_path / "prompts.jsonl", {"prompt": "the cat"}, {"messages": [{"role": "user", "content": "dog"}]}
    )
    common = ["tune", "-m", folder, "-f", inputs, "-n", 6, "--rounds", 1, "--texts", 1]
    said = saltus_(*common, "--out", tmp_path / "out")
    assert "chosen: block" in said.stdout
    assert "saved: " in said.stderr
    result = json.loads((tmp_path / "out" / "tune.json").read_text())
    assert result["max_draft_tokens"] >= 3
    assert result["complete"]
    assert {"command", "commit", "machine", "settings", "calls"} <= set(result)
    for name in ("tune_calls", "tune_surface"):
        assert (tmp_path / "out" / f"{name}.png").stat().st_size > 5000
    tuned = saltus.load(folder, "jacobi").decoder.tuned_settings
    assert tuned is not None
    assert (tuned.options, tuned.max_draft_tokens) == (result["chosen"], result["max_draft_tokens"])
    assert tuned.made["speedup"] in [row["speedup"] for row in result["settings"] if "max_blocks" in row]
    assert json.loads(saltus_(*common, "--no-save", "--json").stdout)["chosen"]
    assert "--max-cost-ratio" in complaint(*common, "--max-cost-ratio", 0.5)
    assert "temperature is -1" in complaint(*common, "-t", -1)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    said = saltus_(*common, "--out", tmp_path / "bare").stderr
    assert "saved: " in said
    assert f'written: {tmp_path / "bare" / "tune.json"}; for figures: pip install "saltus[bench]"' in said


def test_a_result_is_written_without_matplotlib_and_a_note_says_how_to_have_figures(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    write_result(tmp_path / "step.json", {"complete": True}, step_plots.write_figures)
    assert json.loads((tmp_path / "step.json").read_text()) == {"complete": True}
    assert 'step.json; for figures: pip install "saltus[bench]"' in capsys.readouterr().err
