"""Bit for bit: however a token's logits are asked for, they are the same; and what comes back when shapes are free."""

from itertools import cycle

import numpy as np
import pytest
import torch

from architectures import chain, random_tree, read, text, tiny
from saltus.core.canvas import continuation
from saltus.core.forward import ForwardInputs
from saltus.loading.load_model import load_model
from saltus.models.causal import CausalNetwork
from saltus.models.cpu.chunked_prefill import MAX_ROWS_PER_CALL

DTYPES = [torch.bfloat16, torch.float32]
TRUNK = list(range(-1, 40))


def by_width(network, tokens, start: int, *widths: int) -> torch.Tensor:
    """The logits after each token behind the prompt, where calls take so many of them as nodes, by turns."""
    kv_cache, found, turns = network.new_kv_cache(), [], cycle(widths)
    while start < len(tokens):
        nodes = tokens[start : start + next(turns)]
        logits = read(network, tokens[:start], nodes, TRUNK[: len(nodes)], kv_cache)
        found.append(logits[1:])
        start += len(nodes)
    return torch.cat(found)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES, ids=["bfloat16", "float32"])
@pytest.mark.parametrize("name", ["Llama", "GPT2"])
def test_without_batch_invariance_there_are_the_differences_that_ours_do_not_have(name, dtype):
    """The same weights, the library's products and attention: wide calls round otherwise than narrow ones."""
    tokens = text(200)
    ours, free = (CausalNetwork(tiny(name).to(dtype), batch_invariant=exact) for exact in (True, False))
    one, eight = (by_width(ours, tokens, 40, width) for width in (1, 8))
    assert torch.equal(one, eight)
    one, eight = (by_width(free, tokens, 40, width) for width in (1, 8))
    different = (one != eight).any(-1).float().mean().item()
    assert different > 0.2, "if free shapes round alike here, this test proves nothing"
    assert (one - eight).norm() < 0.05 * one.norm(), "but it is rounding only"


# The default model


@pytest.fixture(scope="module", params=DTYPES, ids=["bfloat16", "float32"])
def network(request, model_folder) -> CausalNetwork:
    return CausalNetwork(load_model("the default model", model_folder, request.param))


@pytest.fixture(scope="module")
def tokens() -> np.ndarray:
    """A text of the model's vocabulary; what it says does not matter to rounding."""
    return np.random.default_rng(0).integers(100, 40_000, 400)


@pytest.fixture(scope="module")
def one_by_one(network, tokens) -> torch.Tensor:
    """The logits after tokens 64 to 96 as plain decoding gets them."""
    kv_cache = network.new_kv_cache()
    return torch.cat([read(network, tokens[:length], kv_cache=kv_cache) for length in range(65, 98)])


@pytest.mark.model
@pytest.mark.parametrize("widths", [(2, 4, 8, 16, 3), (33,)], ids=str)
def test_the_default_models_logits_do_not_depend_on_the_width_of_a_call(network, tokens, one_by_one, widths):
    assert torch.equal(by_width(network, tokens[:97], 64, *widths), one_by_one)


@pytest.mark.model
def test_the_default_models_logits_do_not_depend_on_how_the_prompt_was_read(network, tokens, one_by_one):
    for length in (65, 80, 97):
        assert torch.equal(read(network, tokens[:length])[0], one_by_one[length - 65])
    assert torch.equal(chain(network, tokens[:97])[64:], one_by_one)


@pytest.mark.model
def test_the_default_models_logits_do_not_depend_on_branches_beside_them(network, tokens, one_by_one):
    """Right tokens scattered over a tree of wrong ones, at other rows and slots than a chain's."""
    kv_cache, start = network.new_kv_cache(), 64
    for size in (5, 9, 30):
        draws = np.random.default_rng(size)
        nodes, parents, trunk = [], [], [-1]
        while len(nodes) < size:
            if draws.random() < 0.4:
                parents.append(trunk[-1])
                nodes.append(int(tokens[start + len(trunk) - 1]))
                trunk.append(len(nodes) - 1)
            else:
                parents.append(int(draws.integers(-1, len(nodes))) if nodes else -1)
                nodes.append(int(draws.integers(100, 40_000)))
        distributions = read(network, tokens[:start], nodes, parents, kv_cache)
        for depth, node in enumerate(trunk[1:]):
            assert torch.equal(distributions[node + 1], one_by_one[start - 64 + depth])
        start += len(trunk) - 1


@pytest.mark.model
def test_the_default_models_logits_do_not_depend_on_a_batch_or_its_extents(network, tokens):
    places = [slice(0, 30), slice(0, MAX_ROWS_PER_CALL + 70), slice(50, 63)]
    batch = [
        ForwardInputs(continuation(tokens[place], 40), *random_tree(nodes, seed=nodes))
        for place, nodes in zip(places, (7, 3, 12), strict=True)
    ]
    alone = [network.forward([inputs], [network.new_kv_cache()])[0].logits for inputs in batch]
    kv_caches = [network.new_kv_cache() for _ in batch]
    for _ in range(2):  # the prompts, then the same trees over memories of unlike extents
        for expected, outputs in zip(alone, network.forward(batch, kv_caches), strict=True):
            assert torch.equal(outputs.logits, expected)


@pytest.mark.model
@torch.inference_mode()
def test_the_default_model_is_no_further_from_the_truth_than_transformers_own_forward(network, tokens, model_folder):
    """Run natively and through Transformers' layers, against the same weights in float32; no activations in 8 bits."""
    if network.model.dtype == torch.bfloat16:
        network = CausalNetwork(load_model("the default model", model_folder, torch.bfloat16, arithmetic="bf16"))
    assert network.native_decoder is not None
    ways = [chain(network, tokens[:60]).float()]
    native_decoder, network.native_decoder = network.native_decoder, None
    try:
        ways.append(chain(network, tokens[:60]).float())
    finally:
        network.native_decoder = native_decoder
    rows = torch.tensor(tokens[None, :60])
    own = load_model("the default model", model_folder, network.model.dtype, weights="bf16")
    theirs = own(rows).logits[0].float()
    truth = own.float()(rows).logits[0]
    rounding = 1e-5 * truth.norm() + (theirs - truth).norm()
    for ours in ways:
        assert (ours - truth).norm() < 1.1 * rounding
