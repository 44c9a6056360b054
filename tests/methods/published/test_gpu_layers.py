"""Published drafters by our kernels for GPUs compute what torch does; without a GPU Triton's interpreter runs them."""

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

pytest.importorskip("triton")

from saltus.methods.published import gpu_block_layers, gpu_eagle_layers
from saltus.methods.published.dflash_model import DFlashModel, DFlashShape
from saltus.methods.published.dflash_network import DFlashNetwork
from saltus.methods.published.eagle_model import EagleModel, EagleShape
from saltus.methods.published.eagle_network import TorchEagleLayers
from saltus.methods.published.gpu_block_layers import GPUBlockLayers
from saltus.methods.published.gpu_eagle_layers import GPUEagleLayers
from saltus.methods.shared.context_layers import ContextLayers
from saltus.methods.shared.context_rows import ContextRows
from saltus.models.cuda.graphed_passes import READING

CUDA = torch.cuda.is_available()
DEVICE, DTYPE = ("cuda", torch.bfloat16) if CUDA else ("cpu", torch.float32)
BOUND = 0.06 if CUDA else 1e-5  # of the error's norm over the logits'
HIDDEN, VOCABULARY = 64, 90

pytestmark = pytest.mark.slow


def fill_randomly(model: nn.Module) -> None:
    """Draw weights in place of empty ones, and move the model to the device."""
    generator = torch.Generator().manual_seed(0)
    for name, weight in list(model.named_parameters()):
        drawn = torch.randn(weight.shape, generator=generator)
        drawn = 1 + drawn / 8 if weight.dim() == 1 and "bias" not in name else drawn * weight.shape[-1] ** -0.5
        path, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(path), attribute, nn.Parameter(drawn.to(DEVICE, DTYPE), requires_grad=False))


def head(**changes) -> EagleModel:
    shape = EagleShape(HIDDEN, 128, (1, 2), heads=2, kv_heads=1, head_dim=32, **changes)
    generator = torch.Generator().manual_seed(1)
    embeddings, unembedding = torch.randn(2, VOCABULARY, HIDDEN, generator=generator).to(DEVICE, DTYPE)
    tokens = torch.arange(3, 80, device=DEVICE)
    model = EagleModel(shape, tokens, embeddings, unembedding[tokens])
    fill_randomly(model)
    return model


def random_states(count: int, layers: int = 2) -> torch.Tensor:
    return torch.randn(count, layers * HIDDEN, generator=torch.Generator().manual_seed(count)).to(DEVICE, DTYPE)


def check_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    found, expected = found.float(), expected.float()
    assert found.shape == expected.shape
    assert ((found - expected).norm(dim=-1) / expected.norm(dim=-1)).max() < BOUND


@pytest.mark.parametrize(
    "changes",
    [
        {"norm_before_residual": True, "norm_output": True, "norm_each": True},
        {"layers": 2, "spans": (None, 6), "head_norms": True, "norm_all": True},
    ],
    ids=["one layer", "two layers"],
)
@torch.inference_mode()
def test_an_eagle_heads_rows_and_chains_are_those_of_torch(monkeypatch, changes):
    monkeypatch.setattr(gpu_eagle_layers, "READING", replace(READING, rows_per_call=32))  # a text takes several calls
    model = head(**changes)
    both = {"torch": TorchEagleLayers(model), "ours": GPUEagleLayers(copy.deepcopy(model), use_cuda_graphs=CUDA)}
    caches = {name: [layers.new_kv_cache() for _ in range(2)] for name, layers in both.items()}
    starts, queries = [0, 0], [4, 2]
    for counts in ((9, 70), (1, 3)):  # of which one text has a split of its pages
        tokens = [np.arange(count) + 5 for count in counts]
        ends = [start + count for start, count in zip(starts, counts, strict=True)]
        read, chains = {}, {}
        for name, layers in both.items():
            read[name] = layers.read(tokens, [random_states(count) for count in counts], caches[name], starts)
            last = torch.stack([rows[-1] for rows in read["torch"]])
            chains[name] = layers.chains(last, queries, caches[name], ends)
        for found, expected in zip(read["ours"], read["torch"], strict=True):
            check_close(found, expected)
        for found, expected, asked in zip(chains["ours"], chains["torch"], queries, strict=True):
            same = (found[0].argmax(-1) == expected[0].argmax(-1)).int().cumprod(0).sum()
            assert CUDA or same == asked  # a token that rounding decides ends the comparison
            for one, other in zip(found, expected, strict=True):
                check_close(one[: same + 1], other[: same + 1])
        starts = ends
    (alone,) = both["ours"].chains(last[:1], queries[:1], caches["ours"][:1], ends[:1])
    assert torch.equal(alone[0], chains["ours"][0][0])


@pytest.mark.parametrize("causal", [False, True])
@torch.inference_mode()
def test_a_dflash_drafters_blocks_are_those_of_torch(monkeypatch, causal):
    monkeypatch.setattr(gpu_block_layers, "READING", replace(READING, rows_per_call=32))
    shape = DFlashShape(HIDDEN, 128, (1, 2), mask_token=4, layers=2, heads=2, kv_heads=1, head_dim=32, causal=causal)
    generator = torch.Generator().manual_seed(1)
    embeddings, unembedding = torch.randn(2, VOCABULARY, HIDDEN, generator=generator).to(DEVICE, DTYPE)
    model = DFlashModel(shape, torch.arange(VOCABULARY), embeddings, unembedding)
    fill_randomly(model.own_modules())
    on_gpu = GPUBlockLayers(copy.deepcopy(model), use_cuda_graphs=CUDA)
    both = {
        "torch": DFlashNetwork(model, None, context_layers=ContextLayers(model.decoder)),
        "ours": DFlashNetwork(model, None, context_layers=on_gpu),
    }
    caches = {name: [network.new_kv_cache() for _ in range(2)] for name, network in both.items()}
    lengths = [0, 0]
    for counts in ((9, 70), (1, 3)):
        lengths = [length + count for length, count in zip(lengths, counts, strict=True)]
        found = {}
        for name, network in both.items():
            network._write_context([random_states(count) for count in counts], caches[name], lengths)
            blocks = model.block_inputs(torch.tensor([7, 8], device=DEVICE))
            texts = [
                ContextRows(block, cache, length, len(block), causal, causal)
                for block, cache, length in zip(blocks, caches[name], lengths, strict=True)
            ]
            found[name] = network.context_layers.run_together(texts)
        for one, other in zip(found["ours"], found["torch"], strict=True):
            check_close(one[0], other[0])
            check_close(one[1], other[1])
    (alone,) = on_gpu.run_together(texts[:1])
    assert torch.equal(alone[0], found["ours"][0][0])
