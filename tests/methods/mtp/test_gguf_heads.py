"""Heads in GGUF files draft what the same weights draft from a safetensors checkpoint, and change no text."""

import re
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Q
from safetensors.torch import load_file, save_file

import gguf_models
import saltus
from gguf_models import CASES
from mtp_checkpoints import layers_like_a_head
from saltus.core.canvas import continuation
from saltus.core.forward import ForwardInputs
from saltus.kernels.packed_weight import PackedWeight
from saltus.loading import gguf_index, sources
from saltus.methods.mtp.drafter import Mtp
from tiny_models import byte_tokenizer

FILES = ["deepseek2", "glm4moe", "qwen35", "qwen35moe", "qwen3next", "exaone4, windows", "mimo2", "nemotron_h_moe"]
PUBLISHED = {  # by the names of DeepSeek V3, those of Qwen
    "eh_proj": "mtp.fc", "enorm": "mtp.pre_fc_norm_embedding", "hnorm": "mtp.pre_fc_norm_hidden",
    "shared_head.norm": "mtp.norm",
}  # fmt: skip


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    """The kernels stay where they are."""
    for module in (sources, gguf_index):
        monkeypatch.setattr(module, "cache_folder", lambda: tmp_path / "cache")


def random_heads(model: Any, copies: bool, count: int = 1) -> dict[str, torch.Tensor]:
    """The tensors of modules by DeepSeek's names; their layers are like the model's last with attention."""
    generator, hidden = torch.Generator().manual_seed(3), model.config.hidden_size
    shapes = {name: weight.shape for name, weight in layers_like_a_head(model).state_dict().items()}
    if "1.norm.weight" in shapes:  # Nemotron's, whose converter makes one block of both layers
        shapes = {re.sub(r"1\.norm", "post_attention_norm", name): shape for name, shape in shapes.items()}
        shapes = {re.sub(r"^\d\.", "", name): shape for name, shape in shapes.items()}
    shapes |= {"eh_proj.weight": (hidden, 2 * hidden)}
    shapes |= {f"{name}.weight": (hidden,) for name in ("enorm", "hnorm", "shared_head.norm")}
    tensors = {}
    for number in range(model.config.num_hidden_layers, model.config.num_hidden_layers + count):
        for name, shape in shapes.items():
            drawn = 0.1 * torch.randn(shape, generator=generator)
            drawn = drawn if name.endswith("e_score_correction_bias") else drawn.bfloat16()
            tensors[f"model.layers.{number}.{name}"] = drawn + (len(shape) == 1)
        if copies:
            for name, of in (("embed_tokens", model.get_input_embeddings()), ("shared_head.head", model.lm_head)):
                tensors[f"model.layers.{number}.{name}.weight"] = of.weight.detach().clone()
    return tensors


def written(name: str, folder, formats, count: int = 1, **more) -> tuple[Any, dict[str, torch.Tensor], Any]:
    """A model, its heads and a file of both."""
    case, file = CASES[name], folder / "tiny.gguf"
    model = gguf_models.tiny(case)
    heads = random_heads(model, name in ("deepseek2", "glm4moe"), count)
    gguf_models.write(model, case, file, formats, later=heads, **more)
    return model, heads, file


def nemotrons_name(rest: str) -> str:
    """Of a tensor of the block in a file."""
    of_first = rest.startswith(("mixer.q", "mixer.k", "mixer.v", "mixer.o", "norm", "eh_proj", "enorm", "hnorm"))
    rest = rest.replace("shared_head.norm", "final_layernorm").replace("post_attention_norm", "norm")
    return f"mtp.layers.{0 if of_first else 1}.{rest}"


def write_safetensors(folder, model, heads, kind: str) -> None:
    """The same as a checkpoint of safetensors, by the published names."""
    model.save_pretrained(folder)
    layer, named = f"model.layers.{model.config.num_hidden_layers}.", {}
    for name, weight in heads.items():
        rest = name.removeprefix(layer)
        own = PUBLISHED.get(rest.removesuffix(".weight"))
        theirs = f"{own}.weight" if own else f"mtp.layers.0.{rest}"
        theirs = theirs if kind.startswith(("qwen", "exaone")) else name
        named[nemotrons_name(rest) if kind.startswith("nemotron") else theirs] = weight.contiguous()
    file = folder / "model.safetensors"
    save_file(load_file(file) | named, file, {"format": "pt"})
    byte_tokenizer().save_pretrained(folder)


def drafts(engine, tokens, states) -> torch.Tensor:
    """The logits of the likeliest chain after given states."""
    network = Mtp().load_network(engine.network, "tiny")
    kv_cache, found = network.new_kv_cache(), []
    for _ in range(3):
        canvas = continuation(np.array([*tokens, *(int(each.argmax()) for each in found)]), 4)
        inputs = ForwardInputs(canvas, network_name="mtp", hidden_states=None if found else states)
        found.append(network.forward([inputs], [kv_cache])[0].logits[0])
    return torch.stack(found)


@pytest.mark.parametrize("name", FILES)
def test_drafts_are_those_of_the_safetensors_form(name, tmp_path):
    model, heads, file = written(name, tmp_path, [Q.Q8_0, Q.Q4_0, Q.F16, Q.F32])
    folder = tmp_path / "safetensors"
    model.config.num_nextn_predict_layers = 1
    write_safetensors(folder, model, heads, name)
    text = np.random.default_rng(0).integers(5, 250, 12)
    states = torch.randn(11, model.config.hidden_size, generator=torch.Generator().manual_seed(1)).bfloat16()
    expected = drafts(saltus.load(str(folder), "plain", device="cpu"), text, states)
    packed = saltus.load(str(file), "plain", device="cpu", arithmetic="bf16")
    assert torch.equal(drafts(packed, text, states), expected)
    assert torch.equal(drafts(saltus.load(str(file), "plain", device="cpu", weights="bf16"), text, states), expected)


@pytest.mark.slow
@pytest.mark.parametrize("name", FILES)
def test_texts_are_those_of_the_file_without_heads(name, tmp_path):
    case, model = CASES[name], gguf_models.tiny(CASES[name])
    gguf_models.write(model, case, bare := tmp_path / "bare.gguf", [Q.Q8_0])
    *_, file = written(name, tmp_path, [Q.Q8_0])
    engine = saltus.load(str(file), device="cpu")
    assert engine.decoder.chosen_method("auto") == "mtp+lookup"
    given: dict[str, Any] = {"max_new_tokens": 12, "temperature": 0.9, "raw": True, "ignore_eos": True}
    plain = saltus.load(str(bare), "plain", device="cpu").generate("one two one two", **given).tokens
    for method in ("plain", "mtp", "mtp+lookup"):
        found = engine.generate("one two one two", method=method, **given)
        assert found.tokens == plain
        assert found.statistics.draft_calls or method == "plain"


def test_heads_stay_packed(tmp_path):
    *_, file = written("glm4moe", tmp_path, [Q.Q8_0])
    engine = saltus.load(str(file), "mtp", device="cpu")
    network: Any = engine.decoder.setup("mtp").networks["mtp"]
    (module,) = network.modules
    packed = {name for name, weight in module.named_parameters() if isinstance(weight, PackedWeight)}
    assert {"projection.weight", "model.model.layers.0.mlp.experts.gate_up_proj"} <= packed
    model = engine.network.model
    assert module.model.get_input_embeddings() is model.get_input_embeddings(), "a copy is the target's"
    assert module.model.get_output_embeddings() is model.get_output_embeddings()


def test_several_heads_are_found(tmp_path):
    *_, file = written("deepseek2", tmp_path, [Q.Q8_0], count=2)
    engine = saltus.load(str(file), "mtp", device="cpu")
    network: Any = engine.decoder.setup("mtp").networks["mtp"]
    assert len(network.modules) == 2


def test_heads_that_are_not_whole_are_refused_but_not_their_model(tmp_path):
    def refused(**changes) -> str:
        *_, file = written("deepseek2", tmp_path, [Q.Q8_0], **changes)
        engine = saltus.load(str(file), device="cpu")
        assert engine.decoder.chosen_method("auto") == "lookup"
        with pytest.raises(ValueError, match="the heads in") as caught:
            engine.generate("one", method="mtp", max_new_tokens=2)
        assert "\n" not in str(caught.value)
        return str(caught.value)

    assert "lack model.layers.2.enorm.weight" in refused(left_out="blk.2.nextn.enorm.weight")
    extra = "blk.2.indexer.weight"
    line = refused(more=lambda out: out.add_tensor(extra, np.ones(32, np.float32)))
    assert "model.layers.2.indexer.weight, which Saltus does not know" in line
    file = tmp_path / "bare.gguf"
    gguf_models.write(gguf_models.tiny(CASES["deepseek2"]), CASES["deepseek2"], file, [Q.Q8_0])
    with pytest.raises(ValueError, match="has no heads"):
        saltus.load(str(file), "mtp", device="cpu")
