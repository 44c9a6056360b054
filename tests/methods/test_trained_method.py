"""A trained method of another package, examples/linear_head: entry points bring its training and its drafter."""

import importlib
import re
from pathlib import Path
from typing import ClassVar

import pytest
import test_train
from test_cli import complaint, saltus_

import saltus
from saltus.methods import LoadsNetwork, available_methods, require_draft_models
from saltus.training.objectives import OBJECTIVES, _all_objectives

EXAMPLES = Path(__file__).parents[2] / "examples"
ENTRY_POINTS = """
[saltus.methods]
linear_head = linear_head.drafter:LinearHead

[saltus.objectives]
linear_head = linear_head.training.objectives:OBJECTIVES
"""
folder, teacher = test_train.folder, test_train.teacher  # fixtures


@pytest.fixture
def installed(tmp_path, monkeypatch) -> None:
    """The example as an installed package."""
    metadata = tmp_path / "site" / "linear_head-1.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: linear_head\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(ENTRY_POINTS)
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.syspath_prepend(metadata.parent)
    importlib.invalidate_caches()
    available_methods.cache_clear()
    for kind, objective in _all_objectives().items():
        monkeypatch.setitem(OBJECTIVES, kind, objective)
    yield
    available_methods.cache_clear()


@pytest.mark.slow
def test_a_method_of_another_package_is_trained_and_drafts(installed, folder, tiny_folder, teacher, tmp_path):
    given = ["train", "linear_head", "-m", folder, "--teacher", teacher, "--steps", 20]
    output = saltus_(*given, "--work", tmp_path / "work", "--out", tmp_path / "head").stderr
    assert "held-out tokens per call, of 4 drafts at most: greedy" in output
    saltus_(*given, "--from", tmp_path / "head", "--work", tmp_path / "further")
    options = {"linear_head": {"model": str(tmp_path / "head"), "min_probability": 0.0}}
    assert isinstance(available_methods()["linear_head"](model="x"), LoadsNetwork)
    for rule in ("match", "reject"):
        engine = saltus.load(str(folder), "linear_head", options=options, rule=rule, adaptive=False)
        settings = {"max_new_tokens": 24, "temperature": 0.0}
        found = engine.generate("the cat", **settings)
        assert found.tokens == engine.generate("the cat", method="plain", **settings).tokens
        assert found.statistics.draft_calls > 0
        assert max(call.num_draft_tokens for call in found.calls) == 4
    engine = saltus.load(str(folder), "linear_head+lookup", options=options)
    settings = {"max_new_tokens": 24, "temperature": 0.7}
    texts = [each.tokens for each in engine.generate(["the cat", "a dog"], **settings)]
    assert texts == [each.tokens for each in engine.generate(["the cat", "a dog"], method="plain", **settings)]
    given = ["generate", "-m", tiny_folder(1), "--method", "linear_head", "Who?"]
    said = complaint(*given, "--option", f"linear_head.model={tmp_path / 'head'}")
    assert "was trained for another model" in said
    assert "holds no linear head" in complaint(*given, "--option", f"linear_head.model={tmp_path}")
    cure = "needs a network that was trained for the model; give --option linear_head.model=FOLDER"
    assert complaint(*given) == f"saltus: linear_head {cure}"


def test_a_method_that_names_no_network_is_refused_without_an_option_that_it_lacks():
    class OwnLayers:
        draft_models: ClassVar = {"own_layers": ""}

        def drafter(self, noise, sampling, rule): ...

    with pytest.raises(ValueError, match=r"^own_layers: draft_models of OwnLayers .* must name each network"):
        require_draft_models([OwnLayers()])


def test_a_training_that_nobody_brings_is_refused(installed):
    assert "No such command 'quadratic_head'" in complaint("train", "quadratic_head")


def test_a_package_s_recipes_are_found_by_name(installed, monkeypatch):
    assert "linear-head   a linear layer on the default model" in saltus_("train", "linear_head", "--list").stdout
    missing = "train", "linear_head", "--teacher", "nowhere"
    assert "no teacher text in nowhere" in complaint(*missing), "the only recipe is the default"
    assert "unknown recipe 'other'; there are linear-head" in complaint(*missing, "-r", "other")
    monkeypatch.setattr("saltus.cli.recipes.recipes_of", lambda method: {})
    monkeypatch.setattr("saltus.cli.train.recipes_of", lambda method: {})
    assert "--recipe is missing; give a .toml file" in complaint(*missing)
    assert complaint(*missing, "-r", "x.toml") == "saltus: there is no recipe x.toml; check the path"
    assert "no recipes come with linear_head; give a .toml" in saltus_("train", "linear_head", "--list").stdout


def test_the_help_of_a_package_s_training_has_the_options_of_the_others_alone(installed):
    ours, other = (saltus_("train", name, "--help").stdout for name in ("ptp", "linear_head"))
    options = [set(re.findall(r"--[a-z-]+", text.partition("Options")[2])) for text in (ours, other)]
    assert options[0] == options[1]
    assert "<bool>" not in other
    assert "come with Saltus" not in other


@pytest.mark.parametrize("entry", ["linear_head.nowhere:LinearHead", "linear_head.drafter:Nothing"])
def test_a_package_that_cannot_be_loaded_is_named_and_left_out(entry, installed, tmp_path, caplog):
    file = tmp_path / "site" / "linear_head-1.0.dist-info" / "entry_points.txt"
    file.write_text(f"[saltus.methods]\nlinear_head = {entry}\n[saltus.objectives]\nlinear_head = {entry}\n")
    importlib.invalidate_caches()
    available_methods.cache_clear()
    assert "lookup" in available_methods()
    assert "drafter" in _all_objectives()
    assert {"linear_head"}.isdisjoint(available_methods())
    assert caplog.text.count("linear_head of the package linear_head is left out (") == 2
    assert "repair that package, or uninstall it" in caplog.text
