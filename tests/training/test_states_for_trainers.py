"""Hidden states for other trainers: their files hold the target's own states, and an interruption changes none."""

import json
import shutil
from collections import namedtuple
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from test_cli import complaint, lines, saltus_

import saltus
from saltus.models.decoder_of import decoder_of
from saltus.training.data import states_for_trainers
from saltus.training.data.hidden_states import Sample
from saltus.training.data.state_formats import FORMATS
from saltus.training.data.state_formats.specforge import _file_name as specforge_file
from saltus.training.data.states_for_trainers import StateCollection, dflash_layers, eagle3_layers
from saltus.training.data.teacher_texts import read_texts, save_shard

HIDDEN, LAYERS = 32, 4
TEXTS = [("the cat sat on the mat", " and the dog"), ("a", " log"), ("the dog", " sat on the cat and on the mat")]
SPECFORGE_FILES = [f"rows_0-2000/data_{number}.ckpt" for number in range(len(TEXTS))]
SPECULATORS_FILES = [f"hidden_states/hs_{number}.safetensors" for number in range(len(TEXTS))]


@pytest.fixture(scope="module")
def folder(tiny_folder) -> str:
    return str(tiny_folder(num_hidden_layers=LAYERS))


@pytest.fixture
def texts(tmp_path) -> Path:
    return lines(tmp_path / "texts.jsonl", *({"prompt": a, "completion": b} for a, b in TEXTS))


def collect(texts: Path, to: str, folder: str, out: Path, *more: object, layers: str = "3,1"):
    return saltus_("collect", "states", "-f", texts, "--to", to, "-m", folder, "--layers", layers, "--out", out, *more)


def files(folder: Path) -> dict[str, bytes]:
    return {
        str(file.relative_to(folder)): file.read_bytes()
        for file in sorted(folder.rglob("*"))
        if file.is_file() and file.name != ".lock"
    }


@torch.inference_mode()
def own_states(folder: str, tokens: list[int]) -> dict[str, torch.Tensor]:
    """By Transformers alone: after layers 3 and 1, before the last norm, and after it."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder)
    before: list[torch.Tensor] = []
    decoder_of(model).norm.register_forward_pre_hook(lambda _, inputs: before.append(inputs[0]))
    states = model(torch.tensor([tokens]), output_hidden_states=True, use_cache=False).hidden_states
    return {"layers": torch.stack([states[3][0], states[1][0]], 1), "before": before[0][0], "after": states[-1][0]}


def is_close(found: torch.Tensor, right: torch.Tensor) -> bool:
    """To the rounding of bfloat16."""
    assert found.dtype == torch.bfloat16
    assert found.shape == right.shape
    return bool((found.float() - right).abs().max() <= 2**-8 * right.abs().max() + 1e-4)


def test_specforge_reads_a_file_a_text_whose_states_are_the_targets_own(folder, texts, tmp_path):
    said = collect(texts, "specforge", folder, tmp_path / "out").stderr
    assert "3 texts" in said
    assert "layers 3, 1 (its layer ids, which count from 0: 2, 0)" in said
    assert sorted(files(tmp_path / "out")) == [*SPECFORGE_FILES, "states.json"]
    engine = saltus.load(folder)
    for (prompt, text), name in zip(TEXTS, SPECFORGE_FILES, strict=True):
        features = torch.load(tmp_path / "out" / name, weights_only=True)
        given = engine.encode(prompt)
        tokens = [*given, *engine.tokenizer.encode(text, add_special_tokens=False), engine.tokenizer.eos_token_id]
        assert features["input_ids"].tolist() == tokens
        assert features["loss_mask"].tolist() == [0] * len(given) + [1] * (len(tokens) - len(given))
        assert features["input_ids"].dtype == features["loss_mask"].dtype == torch.int64
        own = own_states(folder, tokens)
        assert is_close(features["aux_hidden_state"], own["layers"].flatten(1)[None])
        assert is_close(features["hidden_state"], own["after"][None])
        assert features["hidden_states"].data_ptr() == features["aux_hidden_state"].data_ptr()
        assert features["target_last_hidden_states"].data_ptr() == features["hidden_state"].data_ptr()
        size = (tmp_path / "out" / name).stat().st_size
        assert size < len(tokens) * 3 * HIDDEN * 2 + 4096, "states are stored once"


def test_speculators_reads_a_data_set_and_a_file_a_text_whose_states_are_the_targets_own(folder, texts, tmp_path):
    """The last states are those before the last norm, which its trainers apply."""
    pytest.importorskip("pyarrow")
    assert "(--target-layer-ids 3 1)" in collect(texts, "speculators", folder, tmp_path / "out").stderr
    data_set = ["data-00000-of-00001.arrow", "dataset_info.json", "state.json", "states.json", "token_freq.pt"]
    assert sorted(files(tmp_path / "out")) == sorted([*data_set, *SPECULATORS_FILES])
    counts: dict[int, int] = {}
    rows = rows_of(tmp_path / "out")
    for row, name in zip(rows, SPECULATORS_FILES, strict=True):
        tensors = load_file(tmp_path / "out" / name)
        tokens = tensors["token_ids"].tolist()
        assert tokens == row["input_ids"]
        assert len(tokens) == row["seq_len"] == len(row["loss_mask"])
        own = own_states(folder, tokens)
        assert is_close(tensors["hidden_states"][:, :2], own["layers"])
        assert is_close(tensors["hidden_states"][:, 2], own["before"])
        for token, counted in zip(tokens, row["loss_mask"], strict=True):
            counts[token] = counts.get(token, 0) + counted
    assert torch.load(tmp_path / "out" / "token_freq.pt", weights_only=True) == {t: n for t, n in counts.items() if n}


def rows_of(folder: Path) -> list[dict]:
    import pyarrow

    (data,) = json.loads((folder / "state.json").read_text())["_data_files"]
    return pyarrow.ipc.open_stream(folder / data["filename"]).read_all().to_pylist()


def test_datasets_loads_the_data_set_as_tensors(folder, texts, tmp_path):
    datasets = pytest.importorskip("datasets")
    collect(texts, "speculators", folder, tmp_path / "out")
    loaded = datasets.load_from_disk(str(tmp_path / "out"))
    assert len(loaded) == len(TEXTS)
    tokens = load_file(tmp_path / "out" / SPECULATORS_FILES[0])["token_ids"]
    assert torch.equal(loaded[0]["input_ids"], tokens)
    assert int(loaded[0]["seq_len"]) == len(tokens)


@pytest.mark.parametrize("to", FORMATS)
def test_after_an_interruption_the_same_command_writes_the_same_bytes(to, folder, texts, tmp_path, monkeypatch):
    collect(texts, to, folder, tmp_path / "whole")
    write, written = states_for_trainers.write_atomically, []

    def interrupted(path, content):
        if FORMATS[to].file_name(1) in str(path):
            raise KeyboardInterrupt
        write(path, content)
        written.append(path)

    monkeypatch.setattr(states_for_trainers, "write_atomically", interrupted)
    stopped = saltus_(
        "collect", "states", "-f", texts, "--to", to, "-m", folder, "--layers", "3,1", "--out", tmp_path / "out",
        code=130,
    )  # fmt: skip
    assert "1 of 3 files are written, the same command writes the others" in stopped.stderr
    monkeypatch.undo()
    first = tmp_path / "out" / FORMATS[to].file_name(0)
    time = first.stat().st_mtime_ns
    collect(texts, to, folder, tmp_path / "out")
    assert files(tmp_path / "out") == files(tmp_path / "whole")
    assert first.stat().st_mtime_ns == time


def test_a_limit_can_be_raised_and_lengths_be_cut(folder, texts, tmp_path):
    collect(texts, "specforge", folder, tmp_path / "out", "--limit", 1, "--max-length", 30)
    assert sorted(files(tmp_path / "out")) == [SPECFORGE_FILES[0], "states.json"]
    collect(texts, "specforge", folder, tmp_path / "out", "--max-length", 30)
    lengths = [len(torch.load(tmp_path / "out" / name)["input_ids"]) for name in SPECFORGE_FILES]
    assert max(lengths) <= 30


def test_texts_of_a_collection_are_read_and_those_of_another_model_refused(folder, tiny_folder, tmp_path):
    prompts = lines(tmp_path / "prompts.jsonl", *({"prompt": prompt} for prompt, _ in TEXTS))
    saltus_("collect", "text", "-f", prompts, "-m", folder, "-t", 1, "-n", 9, "--out", tmp_path / "teacher")
    (shard,) = (tmp_path / "teacher").glob("*.jsonl.gz")
    kept = [text for text in read_texts(shard) if len(text.completion) > 1]
    assert kept
    collect(tmp_path / "teacher", "specforge", folder, tmp_path / "out")
    for number, text in enumerate(kept):
        features = torch.load(tmp_path / "out" / specforge_file(number))
        assert features["input_ids"].tolist() == [*text.prompt, *text.completion]
    again = ["collect", "states", "--to", "specforge", "-m", tiny_folder(), "--layers", 1, "--out", tmp_path / "other"]
    assert "were written by" in complaint(*again, "-f", tmp_path / "teacher")
    save_shard(tmp_path / "a.jsonl.gz", [{"prompt": [3], "completion": [5, 10**6], "temperature": 1}])
    assert "has tokens that" in complaint(*again, "-f", tmp_path / "a.jsonl.gz")


def test_refusals_are_a_line_with_the_cure(folder, texts, tmp_path, monkeypatch):
    command = ["collect", "states", "-f", texts, "-m", folder, "--out", tmp_path / "out"]
    assert "--to other: there are speculators, specforge" in complaint(*command, "--to", "other")
    specforge = [*command, "--to", "specforge"]
    assert "has 4 layers, and the chosen ones are 2, 2, 1; give --layers" in complaint(*specforge)
    assert "--layers some: give eagle3 or dflash" in complaint(*specforge, "--layers", "some")
    assert "different numbers from 1 to 3" in complaint(*specforge, "--layers", 4)
    monkeypatch.setattr("saltus.training.data.state_formats.speculators.find_spec", lambda name: None)
    assert complaint(*command, "--to", "speculators", "--layers", 1).endswith("pip install pyarrow")
    few = lines(tmp_path / "few.jsonl", {"prompt": "the cat", "completion": "a"})
    assert "no text with 2 tokens" in complaint(*specforge, "--layers", 1, "--max-length", 2, "-f", few)
    space = namedtuple("space", "free")
    monkeypatch.setattr(shutil, "disk_usage", lambda place: space(9999))
    assert "has 0.0 MB left" in complaint(*specforge, "--layers", 1)


def test_a_folder_of_other_states_is_refused(folder, tiny_folder, texts, tmp_path):
    collect(texts, "specforge", folder, tmp_path / "out", "--limit", 1)
    command = ["collect", "states", "--to", "specforge", "--out", tmp_path / "out"]
    same = [*command, "-m", folder, "--layers", "3,1"]
    assert "with layers [3, 1], not [2]" in complaint(*command, "-f", texts, "-m", folder, "--layers", 2)
    other_model = str(tiny_folder(seed=1, num_hidden_layers=LAYERS))
    assert "with fingerprint" in complaint(*command, "-f", texts, "-m", other_model, "--layers", "3,1")
    others = lines(tmp_path / "others.jsonl", {"prompt": "on the log", "completion": " sat a cat"})
    assert "data_0.ckpt holds states of another text" in complaint(*same, "-f", others)
    (tmp_path / "out" / SPECFORGE_FILES[0]).write_bytes(b"PK")
    assert "data_0.ckpt is damaged" in complaint(*same, "-f", texts)


def test_states_that_are_not_finite_are_refused(folder):
    network = saltus.load(folder).network
    plan = StateCollection([Sample([3, 4], [5, 6], 1.0)], "specforge", (1,))
    network.add_hidden_state_layers((1,))
    states_for_trainers.read_states(network, plan, plan.texts[0])
    with torch.no_grad():
        network.model.get_input_embeddings().weight[4] = torch.inf
    with pytest.raises(ValueError, match="not finite"):
        states_for_trainers.read_states(network, plan, plan.texts[0])


def test_the_choices_of_layers_are_the_published_ones():
    """Of EAGLE-3 for Llama 3.1 8B, and of DFlash for Qwen3 8B, whose ids count from 0: 1, 9, 17, 25, 33."""
    assert eagle3_layers(32) == (2, 16, 29)
    assert dflash_layers(36) == (2, 10, 18, 26, 34)
    assert specforge_file(2000) == "rows_2000-4000/data_2000.ckpt"
