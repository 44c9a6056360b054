"""Python code in a model's folder is never run, nor does anyone ask whether to run it."""

import builtins
import json
import shutil
from pathlib import Path

import pytest

import saltus
from saltus.evaluation.benchmarks.lm_eval_model import _tokenizer_with_bos_setting
from saltus.methods.assd.training.objectives import AnySubsetSettings, _load_model

CLASSES = {"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.Own", "AutoTokenizer": ["own.Own", None]}


@pytest.fixture
def folder(tiny_folder, tmp_path, monkeypatch) -> Path:
    """A model whose files name classes of a Python file that would leave a mark; questions fail."""
    made = tmp_path / "model"
    shutil.copytree(tiny_folder(), made)
    code = f"from pathlib import Path\nPath({str(tmp_path / 'mark')!r}).touch()\nclass Own: pass\n"
    (made / "own.py").write_text(code)
    (made / "custom_generate").mkdir()
    (made / "custom_generate" / "generate.py").write_text(code)
    for name in ("config.json", "tokenizer_config.json"):
        change(made / name, auto_map=CLASSES)

    def asked(*_):
        raise AssertionError("a question")

    monkeypatch.setattr(builtins, "input", asked)
    monkeypatch.setattr("signal.alarm", asked)  # Transformers sets it while it asks
    return made


def change(file: Path, **fields) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))


def test_code_in_the_folder_of_a_known_architecture_is_left_alone(folder, tiny_folder):
    engine, own = saltus.load(str(folder)), saltus.load(str(tiny_folder()))
    assert engine.generate("the cat", max_new_tokens=4).tokens == own.generate("the cat", max_new_tokens=4).tokens
    assert len(_tokenizer_with_bos_setting(engine.tokenizer, False)) == len(own.tokenizer)
    with pytest.raises(ValueError, match="causal model"):
        _load_model(folder, AnySubsetSettings())
    assert not (folder.parent / "mark").exists()


@pytest.mark.parametrize(
    ("name", "fields", "cure"),
    [
        ("config.json", {"model_type": "own", "architectures": ["Own"]}, "choose a model of an architecture"),
        ("tokenizer_config.json", {"tokenizer_class": "Own"}, "take auto_map out of tokenizer_config.json"),
    ],
)
def test_what_needs_code_of_its_folder_is_refused_in_one_line(folder, name, fields, cure):
    change(folder / name, **fields)
    with pytest.raises(ValueError, match="which saltus never runs") as error:
        saltus.load(str(folder))
    assert cure in str(error.value)
    assert "\n" not in str(error.value)
    assert not (folder.parent / "mark").exists()
