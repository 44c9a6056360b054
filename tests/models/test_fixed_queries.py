"""Queries of an adapter in fixed shapes: they draft as elsewhere, and leave all other rows as they are."""

import numpy as np
import pytest
import torch
from test_fixed_shapes import SMALL, replayed, small  # noqa: F401
from test_gated_lora import STARTS, adapter_for

import saltus
from architectures import random_tree, text, tiny
from saltus.core.canvas import continuation
from saltus.core.forward import ForwardInputs
from saltus.methods.shared.adapter_files import save_adapter
from saltus.methods.shared.query_chains import with_query_chains, with_token_queries
from saltus.models.causal import CausalNetwork

NAMES = ["Llama", "Qwen3", "Mistral", "Gemma2", "GPT2", "OPT"]
TREE = random_tree(7)
each_triple = pytest.mark.parametrize(
    ("name", "dtype", "query_start"),
    [("Llama", torch.bfloat16, "blank"), ("Gemma2", torch.float32, "last-token"), ("Gemma2", torch.bfloat16, "blank"),
     ("GPT2", torch.float32, "last-token")],
)  # fmt: skip
CHAINS = ((-1, (0.1,)), (2, (0.9, 0.3)), (6, (0.5, 0.2, 0.8, float("nan"))), (-1, (0.1, 0.7)))
LONG = ((-1, tuple(np.linspace(0.01, 0.99, 40))), (6, tuple(np.linspace(0.99, 0.01, 23))))  # deeper than a call is wide


def with_queries(length: int, chains=CHAINS, tree=TREE, **more) -> ForwardInputs:
    return with_query_chains(ForwardInputs(continuation(text(length), 60), *tree, **more), chains, 0.7)


def bare(inputs: ForwardInputs) -> ForwardInputs:
    count = inputs.num_draft_tokens
    return ForwardInputs(inputs.canvas, inputs.tokens[:count], inputs.parents[:count])


def logits(network: CausalNetwork, inputs: ForwardInputs) -> torch.Tensor:
    return network.forward([inputs], [network.new_kv_cache()])[0].logits


def gated(name: str, dtype=torch.float32, **settings) -> tuple[CausalNetwork, CausalNetwork]:
    """A network in fixed shapes and one by kernels, with one adapter."""
    fixed, ours = small(name, dtype), CausalNetwork(tiny(name).to(dtype))
    for network in (fixed, ours):
        network.attach_adapter(adapter_for(ours.model, **settings))
    return fixed, ours


@pytest.mark.parametrize(
    ("name", "length", "chains", "query_start"),
    [
        (name, length, (CHAINS, LONG)[(at + i) % 2], STARTS[(at + i // 2) % 2])
        for i, name in enumerate(NAMES)
        for at, length in enumerate((28, 70))
    ],
)
def test_queries_draft_what_they_draft_by_kernels(name, length, chains, query_start):
    """Also across the border of an extent, in chains deeper than a call has rows, and beyond a sliding window."""
    fixed, ours = gated(name, query_start=query_start)
    inputs = with_queries(length, chains)
    torch.testing.assert_close(logits(fixed, inputs), logits(ours, inputs), rtol=1e-3, atol=1e-3)


def test_guesses_are_corrected_as_by_kernels():
    fixed, ours = gated("Llama")
    inputs = with_token_queries(ForwardInputs(continuation(text(28), 60), *TREE), text(50, seed=3).tolist(), 0.0)
    torch.testing.assert_close(logits(fixed, inputs), logits(ours, inputs), rtol=1e-3, atol=1e-3)


@each_triple
def test_all_other_rows_keep_their_bits(name, dtype, query_start):
    """Those of the call with queries, and those that are decided afterwards from its memory."""
    fixed, alone = gated(name, dtype, query_start=query_start)[0], small(name, dtype)
    for inputs in (with_queries(28), with_queries(70, LONG, output_hidden_states=True)):
        kv_cache, count = fixed.new_kv_cache(), 1 + inputs.num_draft_tokens
        assert torch.equal(fixed.forward([inputs], [kv_cache])[0].logits[:count], logits(alone, bare(inputs)))
        grown = inputs.canvas.fill(np.array([*inputs.path_tokens(6), 5]))
        after = with_query_chains(ForwardInputs(grown, *TREE), CHAINS, 0.7)
        outputs = fixed.forward([after], [kv_cache])[0]
        assert outputs.context_tokens_read == 1, "accepted drafts are kept, queries are not"
        assert torch.equal(outputs.logits[:count], logits(alone, bare(after)))


@each_triple
def test_queries_of_several_texts_share_calls_and_keep_their_bits(name, dtype, query_start):
    """Rows of queries as well as others, beside texts without queries, and again after accepted drafts."""
    network = gated(name, dtype, query_start=query_start)[0]
    guesses = with_token_queries(ForwardInputs(continuation(text(33, seed=4), 60), *TREE), [5, 6, 7, 8], 0.2)
    batch = [with_queries(28), guesses, bare(with_queries(40)), with_queries(70, LONG), with_queries(1)]
    caches = [network.new_kv_cache() for _ in batch]
    for _ in range(2):
        outputs = network.forward(batch, caches)
        for inputs, one in zip(batch, outputs, strict=True):
            assert torch.equal(one.logits, logits(network, inputs))
        grown = [inputs.canvas.fill(np.array([*inputs.path_tokens(6), 5])) for inputs in batch]
        trees = [ForwardInputs(canvas, *TREE) for canvas in grown]
        batch = [trees[0], *(with_query_chains(tree, CHAINS, 0.1 * n) for n, tree in enumerate(trees[1:]))]


def test_the_largest_tree_with_queries_fits():
    network = small("Llama")
    network.attach_adapter(adapter_for(network.model))
    tree = tuple(range(3, 12)) * 43, tuple([-1] * 387)
    inputs = with_token_queries(ForwardInputs(continuation(text(20), 200), *tree), text(125).tolist(), 0.0)
    assert len(logits(network, inputs)) == 513


def test_another_adapter_takes_the_place_of_the_first(replayed):  # noqa: F811
    """Graphs hold the addresses of weights and inputs, so those of the first adapter must not be replayed."""
    network, captured = replayed
    kv_cache, expected = network.new_kv_cache(), []
    for seed in (0, 1, 1):
        adapter = adapter_for(network.model, seed=seed)
        network.attach_adapter(adapter)
        plain = small("Llama")
        plain.attach_adapter(adapter)
        expected.append(logits(plain, with_queries(20)))
        for _ in range(2):
            assert torch.equal(network.forward([with_queries(20)], [kv_cache])[0].logits, expected[-1])
    assert not torch.equal(expected[0], expected[1])
    assert torch.equal(expected[1], expected[2])
    assert len(captured) == 1 + 3, "one for the prompt, and one with queries for each attached adapter"


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["Llama", "Gemma2", "GPT2"])
def test_on_a_gpu_rows_beside_queries_keep_their_bits_in_graphs(name):
    fixed, alone = (CausalNetwork(tiny(name).to("cuda", torch.bfloat16)) for _ in range(2))
    fixed.attach_adapter(adapter_for(fixed.model).to("cuda"))
    for inputs in (with_queries(28), with_queries(70, LONG), with_queries(28)):
        assert torch.equal(logits(fixed, inputs)[: 1 + inputs.num_draft_tokens], logits(alone, bare(inputs)))
    assert fixed.fixed_shape_runner.use_cuda_graphs, "it was captured"


@pytest.fixture
def on_an_accelerator(monkeypatch):
    """Every command loads its models as on CUDA, in fixed shapes, which are small."""

    make = CausalNetwork.__init__

    def in_fixed_shapes(self, model, batch_invariant=True, settings=None):
        assert batch_invariant, "nobody asked for less"
        make(self, model, True, SMALL, fixed_shapes=True)

    monkeypatch.setattr(CausalNetwork, "__init__", in_fixed_shapes)


def adapter_folder(model_folder, folder, settings=None, **training):
    model = saltus.load(str(model_folder), "plain", device="cpu").network.model
    save_adapter(adapter_for(model, **(settings or {})), folder, model, str(model_folder), training)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "temperature"),
    [("ptp", 0.8), ("ptp+lookup", 0.0), ("jacobi", 0.8), ("two calls", 0.0), ("ptp, last token", 0.8)],
)
def test_texts_with_an_adapter_are_those_of_plain_decoding(
    method, temperature, tiny_folder, tmp_path, on_an_accelerator
):
    method, two_calls = ("ptp", True) if method == "two calls" else (method, False)
    method, comma, _ = method.partition(",")
    name = method.partition("+")[0]
    training = {"form": "iterate" if name == "jacobi" else "one-hot", "window": 8, "coupling": "probability"}
    settings = {"query_start": "last-token"} if comma else {}
    folder = adapter_folder(tiny_folder(), tmp_path / "adapter", settings, **training)
    options = {"model": str(folder)} | ({"two_calls": True} if two_calls else {})
    engine = saltus.load(str(tiny_folder()), method, device="cpu", options={name: options}, adaptive=False)
    assert engine.network.compute_path == "fixed shapes"
    settings = {"max_new_tokens": 40, "temperature": temperature, "coupling": "probability", "ignore_eos": True}
    drafted, plain = (engine.generate("the cat sat on", method=each, **settings) for each in (method, "plain"))
    assert drafted.tokens == plain.tokens
    assert drafted.statistics.nodes_per_call > 0
