"""A LoRA adapter of PEFT loads with its base model, as PEFT itself merges it."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from test_text_parts import WHOLE
from transformers import AutoModelForCausalLM

import saltus
from quantised_models import CASES, write_quantised
from saltus.loading.load_model import load_model
from saltus.loading.peft_adapters import merge_adapter

peft = pytest.importorskip("peft")

KINDS = {
    "plain": {"r": 4, "lora_alpha": 9, "target_modules": ["q_proj", "down_proj"]},
    "rsLoRA": {"r": 4, "lora_alpha": 9, "target_modules": ["v_proj"], "use_rslora": True},
    "output layer": {"r": 4, "lora_alpha": 9, "target_modules": ["lm_head", "q_proj"]},
    "patterns": {
        "r": 4, "lora_alpha": 9, "target_modules": ["q_proj", "o_proj", "up_proj"], "rank_pattern": {"q_proj": 2},
        "alpha_pattern": {"layers.1.self_attn.q_proj": 20, "up_proj": 3},
    },
}  # fmt: skip


def adapter(base: Path, out: Path, **settings) -> torch.nn.Module:
    """Write an adapter of random weights; returns the merged model."""
    model = AutoModelForCausalLM.from_pretrained(base)
    model = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **settings))
    torch.manual_seed(1)
    for name, weight in model.named_parameters():
        if "lora_" in name:
            weight.data = torch.randn_like(weight)
    model.save_pretrained(out)
    return model.merge_and_unload()


@pytest.mark.parametrize("kind", KINDS)
def test_the_weights_are_those_that_peft_merges(tiny_folder, tmp_path, kind):
    merged = adapter(tiny_folder(), tmp_path, **KINDS[kind])
    engine = saltus.load(str(tmp_path), "lookup", adaptive=False)
    for (name, ours), theirs in zip(engine.model.named_parameters(), merged.parameters(), strict=True):
        assert torch.allclose(ours, theirs, atol=1e-5), name
    base = saltus.load(str(tiny_folder()), "plain")
    text = engine.generate("the cat sat", raw=True, max_new_tokens=12)
    assert text.tokens == engine.generate("the cat sat", raw=True, max_new_tokens=12, method="plain").tokens
    assert text.tokens != base.generate("the cat sat", raw=True, max_new_tokens=12).tokens


def test_layers_with_transposed_weights_are_merged_as_peft_merges_them(architecture_folder, tmp_path):
    base = architecture_folder("GPT2")
    merged = adapter(base, tmp_path, r=4, target_modules=["c_attn", "c_proj"], fan_in_fan_out=True)
    engine = saltus.load(str(tmp_path), "plain", adaptive=False, dtype="float32")
    for (name, ours), theirs in zip(engine.model.named_parameters(), merged.parameters(), strict=True):
        assert torch.allclose(ours, theirs, atol=1e-5), name


@pytest.mark.parametrize("name", ["Qwen3VL", "SmolVLM"])
def test_of_an_adapter_of_a_model_that_reads_images_the_text_part_is_merged(name, tmp_path):
    _, settings, vision, more = WHOLE[name]
    config = getattr(transformers, f"{name}Config")(text_config=settings, vision_config=vision, **more)
    kind, (base, out, meant) = getattr(transformers, f"{name}ForConditionalGeneration"), map(tmp_path.joinpath, "abc")
    kind(config).save_pretrained(base)
    patterns = {"alpha_pattern": {r"(language|text)_model\.layers\.1\.mlp\.up_proj": 3, "q_proj": 20}}
    model = peft.get_peft_model(
        kind.from_pretrained(base), peft.LoraConfig(target_modules="all-linear", init_lora_weights=False, **patterns)
    )
    model.save_pretrained(out)
    model.merge_and_unload().save_pretrained(meant)
    ours, theirs = (load_model(name, folder, torch.float32) for folder in (base, meant))
    merge_adapter(ours, out, name)
    for (path, weight), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert torch.allclose(weight, other, atol=1e-5), path


def test_an_adapter_is_merged_into_quantised_weights_as_numbers(tiny_folder, tmp_path):
    folder, meant, out = (tmp_path / name for name in ("quantised", "meant", "adapter"))
    shutil.copytree(tiny_folder(dtype=torch.bfloat16, hidden_size=64, intermediate_size=96), folder)
    settings, writer, _ = CASES["gptq"]
    write_quantised(folder, settings, writer, meant)
    merged = adapter(meant, out, **KINDS["plain"]).bfloat16()
    file = out / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"base_model_name_or_path": str(folder)}))
    engine = saltus.load(str(out), "lookup", adaptive=False, device="cpu")
    for (name, ours), theirs in zip(engine.model.named_parameters(), merged.parameters(), strict=True):
        assert torch.allclose(ours, theirs, rtol=0.01, atol=0.01), name


def test_a_tokenizer_beside_the_adapter_is_its_own(tiny_folder, tmp_path):
    adapter(tiny_folder(), tmp_path, **KINDS["plain"])
    other = tiny_folder(words="an altogether other vocabulary is learned here")
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(other / file, tmp_path)
    assert saltus.load(str(tmp_path), "plain").tokenizer.get_vocab() == saltus.load(str(other)).tokenizer.get_vocab()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"peft_type": "IA3"}, "an adapter of the kind IA3, which is not supported"),
        ({"use_dora": True}, "with DoRA"), ({"bias": "all"}, "with trained biases"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"), ({"lora_bias": True}, "with trained biases"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices"),
        ({"alora_invocation_tokens": [1]}, "of some tokens alone"),
        ({"layer_replication": [[0, 2], [0, 2]]}, "repeats layers"),
        ({"init_lora_weights": "pissa_niter_4"}, "(pissa_niter_4); save it with"),
        ({"init_lora_weights": "loftq"}, "(loftq); merge it"),
        ({"init_lora_weights": "corda"}, "for_weight_conversion"),
        ({"base_model_name_or_path": None}, "names no base model"),
        ({"base_model_name_or_path": "no such model"}, "is neither a folder nor a short name"),
    ],
)  # fmt: skip
def test_what_cannot_be_merged_is_one_line(tiny_folder, tmp_path, changes, said):
    adapter(tiny_folder(), tmp_path, **KINDS["plain"])
    file = tmp_path / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    with pytest.raises(ValueError, match=rf"^[^\n]*{re.escape(said)}[^\n]*$"):
        saltus.load(str(tmp_path), "plain")


def test_adapted_embeddings_are_one_line(tiny_folder, tmp_path):
    tied = tiny_folder(tie_word_embeddings=True)
    for base, module, said in ((tiny_folder(), "embed_tokens", "adapts embeddings"), (tied, "lm_head", "shares its")):
        adapter(base, tmp_path, r=4, target_modules=[module])
        with pytest.raises(ValueError, match=rf"^[^\n]*{said}[^\n]*$"):
            saltus.load(str(tmp_path), "plain")


def test_the_adapter_of_another_model_is_one_line(tiny_folder, tmp_path):
    adapter(tiny_folder(), tmp_path, **KINDS["plain"])
    file = tmp_path / "adapter_config.json"
    for base, said in ((tiny_folder(num_hidden_layers=1), "which is not for"), (tiny_folder(hidden_size=64), "shapes")):
        file.write_text(json.dumps(json.loads(file.read_text()) | {"base_model_name_or_path": str(base)}))
        with pytest.raises(ValueError, match=said):
            saltus.load(str(tmp_path), "plain")
    (tmp_path / "adapter_model.safetensors").write_bytes(b"x")
    with pytest.raises(ValueError, match="is damaged"):
        saltus.load(str(tmp_path), "plain")
