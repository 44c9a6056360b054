"""Weights in memory of large pages: the same numbers, tied as before, and left alone where that is not possible."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType, quants
from safetensors.torch import load_file, save_model

from saltus.kernels import native
from saltus.kernels.packed_weight import PackedWeight
from saltus.loading import huge_pages
from saltus.loading.huge_pages import HUGE_PAGE, HugePages, place_in_huge_pages
from tiny_models import tiny_llama

mmap_only = pytest.mark.skipif(not hasattr(huge_pages.mmap, "MADV_HUGEPAGE"), reason="the system has no huge pages")


@pytest.fixture(autouse=True)
def _small_models_too(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(huge_pages, "LEAST_BYTES", 1)
    monkeypatch.delenv("SALTUS_HUGE_PAGES", raising=False)


@mmap_only
def test_moved_weights_are_the_same_and_stay_tied(tmp_path: Path):
    model = tiny_llama(tie_word_embeddings=True)
    before = {name: (tensor.clone(), tensor.data_ptr()) for name, tensor in model.state_dict().items()}
    parameters, tokens = dict(model.named_parameters()), torch.arange(5, 15)[None]
    logits = model(tokens).logits
    assert place_in_huge_pages(model)
    for name, tensor in model.state_dict().items():
        values, address = before[name]
        assert torch.equal(tensor, values)
        assert tensor.data_ptr() != address
    assert dict(model.named_parameters()) == parameters
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    assert torch.equal(model(tokens).logits, logits)
    save_model(model, str(tmp_path / "model.safetensors"))
    assert torch.equal(load_file(tmp_path / "model.safetensors")["model.norm.weight"], before["model.norm.weight"][0])


@mmap_only
def test_packed_weights_move_too():
    if native.load_kernels() is None:
        pytest.skip("packed weights need compiled kernels")
    blocks = quants.quantize(torch.randn(8, 64).numpy(), GGMLQuantizationType.Q8_0)
    layer = torch.nn.Linear(64, 8, bias=False)
    packed = PackedWeight.from_blocks(torch.from_numpy(blocks), GGMLQuantizationType.Q8_0)
    layer.weight = torch.nn.Parameter(packed, requires_grad=False)
    values, address = layer.weight.dequantize(), layer.weight.rows.data_ptr()
    assert place_in_huge_pages(layer)
    assert layer.weight.rows.data_ptr() != address
    assert torch.equal(layer.weight.dequantize(), values)


@mmap_only
def test_weights_that_are_made_in_huge_pages_stay_there():
    first, second = torch.nn.Linear(4, 8), torch.nn.Linear(8, 4)
    model: Any = torch.nn.Sequential(first, second)
    model.huge_pages = memory = HugePages()
    made = [memory.zeros(size) for size in (4 * 4 * 8, 3, huge_pages.CHUNK, 64)]
    assert made[0].data_ptr() % HUGE_PAGE == 0
    assert all(not bytes.any() for bytes in made)
    for value, each in enumerate(made, 1):
        each.fill_(value)
    assert [each.unique().tolist() for each in made] == [[1], [2], [3], [4]], "none overlaps another"
    first.weight.data = made[0].view(torch.float32).view(8, 4)
    assert copy.deepcopy(model).huge_pages is not memory
    other, bias = second.weight.data_ptr(), first.bias.data_ptr()
    assert place_in_huge_pages(model)
    assert first.weight.data_ptr() == made[0].data_ptr()
    assert other != second.weight.data_ptr(), "the others move"
    assert bias != first.bias.data_ptr()


def test_without_huge_pages_memory_is_zeros_all_the_same(monkeypatch: pytest.MonkeyPatch):
    memory = HugePages()
    monkeypatch.setenv("SALTUS_HUGE_PAGES", "0")
    assert memory.zeros(9).tolist() == [0] * 9
    monkeypatch.delenv("SALTUS_HUGE_PAGES")
    monkeypatch.delattr(huge_pages.mmap, "MADV_HUGEPAGE", raising=False)
    made = memory.zeros(9)
    assert made.tolist() == [0] * 9
    assert made not in memory


@pytest.mark.parametrize("why", ["switched off", "no memory", "too small", "no such pages"])
def test_weights_stay_where_they_cannot_be_moved(why: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    model = tiny_llama()
    address = model.lm_head.weight.data_ptr()
    if why == "switched off":
        monkeypatch.setenv("SALTUS_HUGE_PAGES", "0")
    elif why == "no memory":
        monkeypatch.setattr(huge_pages, "MEMORY_INFO", tmp_path / "meminfo")
        (tmp_path / "meminfo").write_text("MemTotal: 9 kB\nMemAvailable:       3 kB\n")
    elif why == "too small":
        monkeypatch.setattr(huge_pages, "LEAST_BYTES", 1 << 30)
    else:
        monkeypatch.delattr(huge_pages.mmap, "MADV_HUGEPAGE", raising=False)
    assert not place_in_huge_pages(model)
    assert model.lm_head.weight.data_ptr() == address
