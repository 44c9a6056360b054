"""What every published form keeps: plain's texts, alone and in a batch and in the server, and refusals in a line.

A new form needs an entry in EXAMPLES, which writes a folder as it is published, for a Llama of 6 layers, 32 numbers a
hidden state and 300 tokens.
"""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from reference_dflash import WINDOWS, block_drafter
from reference_eagle import published_head
from reference_gemma4_assistant import published_assistant
from safetensors.torch import load_file, save_file
from starlette.testclient import TestClient
from test_dflash import published_folder

import saltus
from saltus.engine.target_drafters import load_drafter_for_target
from saltus.methods.published import find_form, published_forms
from saltus.models.causal import CausalNetwork
from saltus.server.app import make_app
from saltus.server.served_request import Limits
from saltus.server.service import Service
from tiny_models import tiny_llama

EXAMPLES: dict[str, Callable[[Path], object]] = {
    "dflash": lambda folder: published_folder(folder, "flat"),
    "dflash2": lambda folder: block_drafter(folder, "dflash2", WINDOWS),
    "domino": lambda folder: block_drafter(folder, "domino"),
    "dspark": lambda folder: block_drafter(folder, "dspark"),
    "eagle3": lambda folder: published_head(folder),
    "gemma4_assistant": lambda folder: published_assistant(folder),
    "peagle": lambda folder: published_head(folder, "peagle"),
    "xpress": lambda folder: block_drafter(folder, "xpress"),
}
TEXTS = ["the cat", "a dog " * 30]


@pytest.fixture(params=published_forms())
def form(request) -> str:
    return request.param


@pytest.fixture
def folder(form, tmp_path) -> Path:
    EXAMPLES[form](tmp_path)
    return tmp_path


def load(folder: Path, target_name: str = "tiny"):
    return load_drafter_for_target(f"drafter:{folder}", CausalNetwork(tiny_llama(num_hidden_layers=6)), target_name)


def test_a_folder_is_of_one_form(form, folder):
    config = json.loads((folder / "config.json").read_text())
    assert [name for name, each in published_forms().items() if each.recognises(config)] == [form]
    assert find_form(folder) is published_forms()[form]


def served(engine: saltus.Engine) -> list[str]:
    body = {"prompt": TEXTS, "max_tokens": 16, "temperature": 1.0, "seed": 5, "ignore_eos": True}
    with TestClient(make_app(Service(engine, "tiny", Limits()))) as client:
        return [choice["text"] for choice in client.post("/v1/completions", json=body).json()["choices"]]


@pytest.fixture(scope="module")
def plain(tiny_folder) -> tuple[dict[float, list[list[int]]], list[str]]:
    """The tokens of plain decoding, by temperature, and what a server writes by it."""
    engine = saltus.load(str(tiny_folder(num_hidden_layers=6)), "plain")
    given = {"max_new_tokens": 16, "ignore_eos": True}
    tokens = {each: [one.tokens for one in engine.generate(TEXTS, temperature=each, **given)] for each in (0.0, 1.0)}
    return tokens, served(engine)


def test_texts_are_those_of_plain_decoding(tiny_folder, folder, plain):
    model, options = str(tiny_folder(num_hidden_layers=6)), {"ptp": {"model": str(folder)}}
    engine = saltus.load(model, "ptp+lookup", options=options, adaptive=False, max_draft_tokens=8)
    for temperature, tokens in plain[0].items():
        given = {"max_new_tokens": 16, "temperature": temperature, "ignore_eos": True}
        found = engine.generate(TEXTS, **given)
        assert [one.tokens for one in found] == tokens
        assert all(one.statistics.draft_calls for one in found)
        assert engine.generate(TEXTS[0], method="ptp", **given).tokens == tokens[0]
    assert served(engine) == plain[1]


def test_drafters_with_missing_unknown_or_other_weights_are_refused_in_a_line(folder):
    file = folder / "model.safetensors"
    weights = load_file(file)
    matrix = next(name for name in sorted(weights) if name.endswith("mlp.down_proj.weight"))
    cases = {
        f"lacks {matrix}": {name: weight for name, weight in weights.items() if name != matrix},
        "has an unknown weight layers.0.odd.weight": weights | {"layers.0.odd.weight": torch.zeros(2)},
        f"{matrix} is ": weights | {matrix: torch.zeros(3, 5)},
    }
    for said, changed in cases.items():
        save_file(changed, file)
        with pytest.raises(ValueError, match=said) as error:
            load(folder)
        assert "\n" not in str(error.value)
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ValueError, match="is damaged") as error:
        load(folder)
    assert "\n" not in str(error.value)


def test_a_drafter_of_another_size_is_refused_in_a_line(folder):
    target = CausalNetwork(tiny_llama(hidden_size=64, num_hidden_layers=6))
    with pytest.raises(ValueError, match="tiny has 64") as error:
        load_drafter_for_target(f"drafter:{folder}", target, "tiny")
    assert "\n" not in str(error.value)


VERIFIER = "Qwen/Qwen3-8B"


@pytest.mark.parametrize(
    "named", [{"speculators_config": {"verifier": {"name_or_path": VERIFIER}}}, {"target_model_name_or_path": VERIFIER}]
)
def test_a_drafter_that_names_another_target_says_so_in_a_line(form, folder, named, caplog):
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | named))
    for name in (VERIFIER, "tiny", "models/qwen3-8b-Q4_K_M.gguf"):
        load(folder, name)
    assert not caplog.messages
    load(folder, "meta-llama/Llama-3.1-8B-Instruct")
    (line,) = caplog.messages
    assert f"was trained for {VERIFIER}, not for meta-llama/Llama-3.1-8B-Instruct" in line


@pytest.mark.parametrize(
    "table",
    [{"speculators_config": None}, {"speculators_config": {"verifier": [1]}}, {"verifier": {"name_or_path": 3}}],
)
def test_a_target_that_is_no_name_draws_no_warning(tmp_path, table, caplog):
    EXAMPLES["eagle3"](tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | table))
    load(tmp_path, VERIFIER)
    assert not caplog.messages


def test_a_drafter_of_no_form_is_refused_in_a_line(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"speculators_model_type": "medusa"}))
    with pytest.raises(
        ValueError,
        match="no drafter that Saltus knows \\('medusa'\\); the forms are dflash, dflash2, domino, dspark, eagle3",
    ):
        load(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"speculators_model_type": "mtp"}))
    with pytest.raises(ValueError, match=r"holds heads for multi-token prediction, .*; give it as mtp\.model"):
        load(tmp_path)
