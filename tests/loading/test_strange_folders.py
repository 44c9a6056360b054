"""Folders of models and drafters from anybody: what cannot be is refused in a line, before memory is taken for it."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from reference_eagle import published_head
from safetensors.torch import load_file, save_file
from test_dflash import published_folder
from transformers import LlamaForCausalLM

import saltus
from architectures import tiny
from reference_evabyte import write_folder
from saltus.engine.target_drafters import load_drafter_for_target
from saltus.loading.load_model import load_model
from saltus.models.causal import CausalNetwork


def changed(file: Path, **changes) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


@pytest.fixture
def folder(tiny_folder, tmp_path) -> Path:
    return shutil.copytree(tiny_folder(), tmp_path / "model")


@pytest.fixture(scope="module")
def target(tiny_folder) -> CausalNetwork:
    return CausalNetwork(LlamaForCausalLM.from_pretrained(tiny_folder(num_hidden_layers=6)))


def refused(said: str):
    return pytest.raises(ValueError, match=rf"^[^\n]*{re.escape(said)}[^\n]*$")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_hidden_layers": 1 << 40}, "says 1,099,511,627,776 layers, which its weights cannot be"),
        ({"num_hidden_layers": 65_536}, "says 65,536 layers"), ({"vocab_size": 1 << 30}, "weights, but its files have"),
        ({"text_config": {"num_layers": 1 << 30}}, "says 1,073,741,824 layers"),
        ({"hidden_size": 1 << 16, "intermediate_size": 1 << 20}, "weights, but its files have"),
    ],
)  # fmt: skip
def test_a_configuration_of_more_than_the_files_hold_is_refused(changes, said, folder):
    changed(folder / "config.json", **changes)
    with refused(said):
        load_model("tiny", folder)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"quantization": {"group_size": 64, "bits": 4}}, "weights quantised by MLX, which do not load here"),
        ({"quantization_config": {"quant_method": "vptq"}}, "weights quantised by VPTQ, which do not load"),
        ({"quantization_config": {"quant_method": "quip", "bits": 4}}, "weights quantised by QUIP, which do not load"),
    ],
)
def test_weights_that_other_programs_quantised_are_called_so(settings, said, folder):
    weights = load_file(folder / "model.safetensors")
    packed = {name: tensor for name, tensor in weights.items() if "proj" not in name}
    packed |= {name.replace("weight", "qweight"): tensor for name, tensor in weights.items() if "proj" in name}
    save_file(packed, folder / "model.safetensors", {"format": "pt"})
    changed(folder / "config.json", **settings)
    with refused(said):
        saltus.load(str(folder), "plain")


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "config.json"])
def test_a_pointer_of_git_lfs_is_called_so(folder, name):
    (folder / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:12\nsize 5\n")
    with refused(f"{name} is a pointer of git-lfs, not the file itself; run git lfs pull"):
        saltus.load(str(folder), "plain")


@pytest.mark.parametrize("content", ["", "{", "[]", "<html>"])
def test_end_tokens_that_cannot_be_read_are_not_dropped(folder, content):
    (folder / "generation_config.json").write_text(content)
    with refused("generation_config.json is no JSON object"):
        saltus.load(str(folder))


@pytest.mark.parametrize("name", ["model-q8_0.gguf", "MODEL.GGUF"])
def test_the_gguf_files_of_a_folder_are_named(tmp_path, name):
    (tmp_path / name).write_bytes(b"GGUF")
    with refused(f"holds GGUF files; name the file, such as {tmp_path / name}"):
        saltus.load(str(tmp_path))


@pytest.mark.parametrize("kind", ["Llama", "Qwen2"])
def test_a_folder_without_tokenizer_files_is_called_so(tmp_path, kind):
    tiny(kind).save_pretrained(tmp_path)
    with refused("has no tokenizer that loads (there are no files of one, such as tokenizer.json)"):
        saltus.load(str(tmp_path), "plain")


def test_pickled_weights_are_counted_by_their_bytes(folder):
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    load_model("tiny", folder)
    changed(folder / "config.json", num_hidden_layers=65_536)
    with refused("says 65,536 layers"):
        load_model("tiny", folder)


@pytest.mark.parametrize(
    ("index", "said"),
    [
        ({"weight_map": {"a": "../../model.safetensors"}}, "which is not a file of its folder"),
        ({"weight_map": {"a": "/etc/passwd"}}, "which is not a file of its folder"),
        ({"weight_map": {}}, "names no files"), ({"weight_map": [1]}, "is damaged"), ([], "is damaged"),
        ({"weight_map": {"a": {}}}, "is damaged"), ({"weight_map": {"a": 1, "b": "x"}}, "is damaged"),
    ],
)  # fmt: skip
def test_an_index_of_weights_names_files_of_its_folder(index, said, folder):
    (folder / "model.safetensors").unlink()  # which would be preferred
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with refused(said):
        saltus.load(str(folder), "plain")


@pytest.mark.parametrize(
    ("file", "changes", "said"),
    [
        ("tokenizer_config.json", {"model_max_length": "long"}, "has no tokenizer that loads"),
        ("config.json", {"eos_token_id": "end"}, "eos_token_id"),
    ],
)
def test_settings_of_another_type_are_refused_when_they_are_read(file, changes, said, folder):
    (folder / "generation_config.json").unlink()
    changed(folder / file, **changes)
    with refused(said):
        saltus.load(str(folder), "plain")


def test_a_damaged_file_of_evabyte_is_one_line(tmp_path):
    folder = write_folder(tmp_path / "evabyte")
    changed(folder / "config.json", rms_norm_eps="small")
    with refused("a decoder's rms_norm_eps is 'small'"):
        load_model("evabyte", folder)
    changed(folder / "config.json", rms_norm_eps=1e-5)
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes().replace(b'"dtype"', b'"dtyqe"', 1))
    with refused("is damaged"):
        load_model("evabyte", folder)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"layers": 1 << 20}, "a model of 1,048,576 layers"), ({"intermediate": 1 << 20}, "by its saltus.json"),
        ({"hidden": 64}, "has states of 64 numbers"), ({"hidden_state_layers": 7}, "does not load (TypeError"),
        ({"rope_theta": "x"}, "does not load (Type"), ({"window": 1 << 20}, "query is (6, 32), but must be"),
    ],
)  # fmt: skip
def test_a_drafter_whose_settings_do_not_fit_its_weights_is_refused(changes, said, target, tiny_drafter, tmp_path):
    folder = shutil.copytree(tiny_drafter(target.model), tmp_path / "drafter")
    load_drafter_for_target(f"drafter:{folder}", target, "tiny")
    shape = json.loads((folder / "saltus.json").read_text())["settings"]
    changed(folder / "saltus.json", settings=shape | changes)
    with refused(said):
        load_drafter_for_target(f"drafter:{folder}", target, "tiny")


@pytest.mark.parametrize(
    "changes", [{"window": 1 << 20}, {"rank": 1 << 12}, {"untied_unembedding": True}, {"subspace_dim": 1 << 20}]
)
def test_heads_whose_settings_do_not_fit_their_weights_are_refused(changes, target, tiny_heads, tmp_path):
    folder = shutil.copytree(tiny_heads(target.model, circuit="cp"), tmp_path / "heads")
    load_drafter_for_target(f"heads:{folder}", target, "tiny")
    shape = json.loads((folder / "saltus.json").read_text())["settings"]
    changed(folder / "saltus.json", settings=shape | changes)
    with refused("by its saltus.json" if "untied_unembedding" not in changes else "lacks untied_unembedding"):
        load_drafter_for_target(f"heads:{folder}", target, "tiny")


@pytest.mark.parametrize("kind", ["drafter", "heads"])
def test_a_drafter_of_tokens_that_the_target_lacks_is_refused(kind, target, tiny_drafter, tiny_heads, tmp_path):
    made = tiny_drafter if kind == "drafter" else tiny_heads
    folder = shutil.copytree(made(target.model), tmp_path / "drafter")
    file = folder / f"{kind}.safetensors"
    weights = load_file(file)
    weights["tokens"][7] = 131_239
    save_file(weights, file)
    with refused("drafts token 131239, and the target has 300"):
        load_drafter_for_target(f"{kind}:{folder}", target, "tiny")


@pytest.mark.unchecked
def test_metadata_of_another_type_are_refused(target, tiny_drafter, tmp_path):
    folder = shutil.copytree(tiny_drafter(target.model), tmp_path / "drafter")
    for changes in ({"training": 3}, {"target_name": []}, {"target_fingerprint": {}}, {"target_signs": 1}):
        before = (folder / "saltus.json").read_text()
        changed(folder / "saltus.json", **changes)
        with refused("was changed or cut short"):
            load_drafter_for_target(f"drafter:{folder}", target, "tiny")
        (folder / "saltus.json").write_text(before)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"block_size": {}}, "does not load (TypeError"), ({"mask_token_id": True}, "has the mask token True"),
        ({"mask_token_id": -1}, "has the mask token -1"), ({"aux_hidden_state_layer_ids": 3}, "does not load"),
    ],
)  # fmt: skip
def test_a_published_drafter_with_settings_of_another_type_is_refused(changes, said, target, tmp_path):
    published_folder(tmp_path, "speculators", **changes)
    with refused(said):
        load_drafter_for_target(f"drafter:{tmp_path}", target, "tiny")


def test_a_published_head_that_is_damaged_is_one_line(target, tmp_path):
    published_head(tmp_path, "original", eagle_aux_hidden_state_layer_ids=3)
    with refused("does not load (TypeError"):
        load_drafter_for_target(f"drafter:{tmp_path}", target, "tiny")
    file = tmp_path / "pytorch_model.bin"
    file.write_bytes(file.read_bytes().replace(b"torch._utils", b"torch._utilz"))
    with refused("is damaged"):
        load_drafter_for_target(f"drafter:{tmp_path}", target, "tiny")


def test_a_link_that_leads_nowhere_is_called_so(folder):
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer.json").symlink_to("../blobs/12")
    with refused("tokenizer.json is a link to ../blobs/12, which is not there"):
        saltus.load(str(folder), "plain")
    (folder / "tokenizer.json").unlink()
    (folder / "model.safetensors").rename(folder / "elsewhere")
    (folder / "model.safetensors").symlink_to("../blobs/12")
    with refused("model.safetensors is a link to ../blobs/12, which is not there"):
        saltus.load(str(folder), "plain")


def test_a_model_inside_a_folder_is_named(folder, tmp_path):
    with refused(f"there is one in {folder}"):
        saltus.load(str(tmp_path), "plain")


@pytest.mark.parametrize("name", ["model-00001-of-00002.safetensors", "consolidated.safetensors"])
def test_weights_without_their_index_are_called_so(folder, name):
    (folder / "model.safetensors").rename(folder / name)
    with refused(f"has weights in {name}, but neither a model.safetensors nor a model.safetensors.index.json"):
        saltus.load(str(folder), "plain")


def test_a_type_of_model_that_nobody_knows_is_called_so(folder):
    changed(folder / "config.json", model_type="frobnicate")
    with refused("is of the type frobnicate, which Transformers"):
        saltus.load(str(folder), "plain")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"hidden_size": "32"}, "Field 'hidden_size' expected int, got str"),
        ({"hidden_act": "swoosh"}, "KeyError: 'swoosh'"),
    ],
)
def test_what_is_wrong_in_a_configuration_is_said(changes, said, folder):
    changed(folder / "config.json", **changes)
    with refused(said):
        saltus.load(str(folder), "plain")


def test_a_configuration_that_is_a_list_is_called_so(folder):
    (folder / "config.json").write_text("[]")
    with refused("config.json is no JSON object"):
        saltus.load(str(folder), "plain")


def test_a_chat_template_that_is_not_jinja_is_called_so(folder):
    (folder / "chat_template.jinja").write_text("{% for message in messages %}{{ message.content")
    engine = saltus.load(str(folder), "plain")
    with refused("is not Jinja (unexpected end of template"):
        engine.generate("the cat")


def test_a_drafter_in_place_of_a_model_is_refused_with_its_option(tiny_drafter):
    drafter = tiny_drafter()
    with refused(f"{drafter} holds no model, but what drafts for one (drafter); give it as ptp.model"):
        saltus.load(str(drafter))
