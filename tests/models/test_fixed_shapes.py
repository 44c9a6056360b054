"""Fixed shapes, run without graphs: a row's arithmetic follows from its position and its tokens, not from who asks."""

import gc
from contextlib import contextmanager
from dataclasses import replace
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch

import saltus
from architectures import VOCAB, chain, random_tree, read, text, tiny
from saltus.core.canvas import continuation
from saltus.core.forward import ForwardInputs
from saltus.engine.decoder import MAX_DRAFT_TOKENS
from saltus.models.causal import CausalNetwork
from saltus.models.cuda import fixed_shape_attention, fixed_shapes, kv_pages
from saltus.models.cuda.fixed_shape_calls import FixedShape, FixedShapeSettings
from saltus.models.cuda.fixed_shapes import CallOutputs, tokens_found, why_not_fixed_shapes
from saltus.models.cuda.kv_pages import FixedShapeKVCache, KVPagePool

DTYPES = [torch.float32, torch.bfloat16]
NAMES = ["Llama", "Qwen3", "Mistral", "Gemma2", "Gemma3", "GPT2", "OPT", "Phi", "Cohere2", "GraniteSWA", "Llama4"]
LENGTH = 70
SMALL = FixedShapeSettings(rows_per_call=32, rows_per_group=4, prefill_chunk=16, page_size=16, pages_per_block=2)

each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "bfloat16"])
each_name = pytest.mark.parametrize("name", NAMES)


def small(name: str, dtype: torch.dtype = torch.float32, **changes) -> CausalNetwork:
    """Fixed shapes with borders so near that short texts cross them."""
    model = tiny(name, **changes).to(dtype)
    return CausalNetwork(model, fixed_shapes=True, fixed_shape_settings=replace(SMALL, max_tree_depth=16))


@pytest.fixture(scope="module")
def networks():
    made: dict[tuple[str, torch.dtype], CausalNetwork] = {}

    def network(name: str, dtype: torch.dtype) -> CausalNetwork:
        return made.setdefault((name, dtype), small(name, dtype))

    return network


@torch.inference_mode()
def fresh(network) -> FixedShapeKVCache:
    """A memory in whose pages nothing useful is left of the text before."""
    pool = network.fixed_shape_runner.pool
    for buffer in pool.buffers:
        if buffer is not None:
            buffer.view(len(buffer), pool.num_pages, -1)[:, pool.free_pages] = torch.nan
    return network.new_kv_cache()


def written(network, tokens, prompt: int, kv_cache=None) -> torch.Tensor:
    """The logits after the prompt and after each token behind it, as plain decoding gets them."""
    canvas, kv_cache, rows = continuation(tokens[:prompt], len(tokens) - prompt + 1), kv_cache or fresh(network), []
    for token in [*tokens[prompt:], None]:
        rows.append(network.forward([ForwardInputs(canvas)], [kv_cache])[0].logits[0])
        canvas = canvas if token is None else canvas.fill(np.array([token]))
    return torch.stack(rows)


@each_dtype
@each_name
def test_logits_are_those_of_the_models_own_forward(networks, name, dtype):
    network, tokens = networks(name, dtype), text(LENGTH)
    network.model.set_attn_implementation("eager")
    try:
        with torch.inference_mode():
            own = network.model(torch.tensor(tokens[None]), use_cache=False).logits[0, 54:].float()
    finally:
        network.model.set_attn_implementation("saltus")
    off = (written(network, tokens, 55).float() - own).norm(dim=-1) / own.norm(dim=-1)
    assert off.max() < (1e-5 if dtype == torch.float32 else 0.05)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "dtype"), [*zip(["Llama", "Gemma2", "GPT2", "Cohere2", "GraniteSWA", "Llama4"], DTYPES * 3, strict=True)]
)
def test_however_a_text_is_asked_for_its_logits_are_the_same_bits(networks, name, dtype):
    """Token by token, by right branches among wrong ones that are moved when they become text, and read at once."""
    network, tokens = networks(name, dtype), text(LENGTH)
    plain = written(network, tokens, 20)
    draws, kv_cache, canvas = np.random.default_rng(1), fresh(network), continuation(tokens[:20], LENGTH - 19)
    while canvas.num_decided <= LENGTH - 20:
        done = canvas.num_decided
        nodes, parents, trunk = [], [], [-1]
        for _ in range(draws.integers(0, 12)):
            if draws.random() < 0.6 and len(trunk) < LENGTH - 19 - done:
                parents.append(trunk[-1])
                nodes.append(int(tokens[20 + done + len(trunk) - 1]))
                trunk.append(len(nodes) - 1)
            else:
                parents.append(int(draws.integers(-1, len(nodes))) if nodes else -1)
                nodes.append(int(draws.integers(3, VOCAB)))
        inputs = ForwardInputs(canvas, tuple(nodes), tuple(parents))
        logits = network.forward([inputs], [kv_cache])[0].logits
        assert torch.equal(logits[[node + 1 for node in trunk]], plain[done : done + len(trunk)])
        kept = int(draws.integers(1, len(trunk) + 1))
        canvas = canvas.fill(np.append(tokens, 3)[20 + done : 20 + done + kept])
    for done in (0, 3, 40):
        again = continuation(tokens[:20], LENGTH).fill(tokens[20 : 20 + done])
        assert torch.equal(network.forward([ForwardInputs(again)], [fresh(network)])[0].logits[0], plain[done])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Llama", "Mistral", "GPT2"])
def test_a_batch_a_long_prompt_and_a_tree_wider_than_a_call_give_the_same_bits(networks, name, monkeypatch):
    monkeypatch.setattr(fixed_shape_attention, "MAX_KEPT_BLOCKS", 8)  # the long prompt has 16, the first text one
    network = networks(name, torch.float32)
    batch = [
        ForwardInputs(continuation(text(5), 20), (3, 4, 5), (-1, 0, -1)),
        ForwardInputs(continuation(text(61, seed=2), 40), *random_tree(60, seed=3), output_hidden_states=True),
        ForwardInputs(continuation(text(300, seed=1), 20), *random_tree(9)),
    ]
    batch_outputs = network.forward(batch, [network.new_kv_cache() for _ in batch])
    for inputs, outputs in zip(batch, batch_outputs, strict=True):
        assert len(outputs.logits) == len(inputs.tokens) + 1
        for node in range(-1, len(inputs.tokens), 5):
            path = np.array(inputs.path_tokens(node), dtype=np.int64)
            grown = ForwardInputs(inputs.canvas.fill(path), output_hidden_states=inputs.output_hidden_states)
            alone = network.forward([grown], [fresh(network)])[0]
            assert torch.equal(outputs.logits[node + 1], alone.logits[0])
            if inputs.output_hidden_states:
                assert torch.equal(outputs.hidden_states[outputs.context_tokens_read + node], alone.hidden_states[-1])


@pytest.mark.parametrize("layers", [(), (1,)])
def test_hidden_states_are_those_of_all_tokens_that_a_call_read_and_of_all_nodes(layers):
    """Drafters read those of prompts, over chunks of them, and of whole texts that do not go on."""
    networks, tokens = (CausalNetwork(tiny("Llama")), small("Llama")), text(75)
    for network in networks:
        network.add_hidden_state_layers(layers)
    caches = [network.new_kv_cache() for network in networks]
    for known, nodes, more in ((40, (3, 4), 9), (73, (), 9), (75, (), 0)):
        inputs = ForwardInputs(
            continuation(tokens[:known], more), nodes, tuple(range(-1, len(nodes) - 1)), output_hidden_states=True
        )
        expected, found = (
            network.forward([inputs], [cache])[0] for network, cache in zip(networks, caches, strict=True)
        )
        assert found.context_tokens_read == expected.context_tokens_read
        torch.testing.assert_close(found.hidden_states, expected.hidden_states, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_the_default_shapes_agree_with_small_ones_but_for_rounding():
    tokens = text(60)
    wide = CausalNetwork(tiny("Llama"), fixed_shapes=True)
    torch.testing.assert_close(written(wide, tokens, 30), written(small("Llama"), tokens, 30), rtol=1e-4, atol=1e-4)


def watched(network, monkeypatch) -> list:
    """The shapes of all calls from now on, and the first position of each."""
    seen, runner = [], network.fixed_shape_runner
    evaluate = runner._run_static_inputs

    def run(inputs, queries):
        seen.append((inputs.shape.num_rows, inputs.shape.num_pages, int(inputs.positions[0])))
        return evaluate(inputs, queries)

    monkeypatch.setattr(runner, "_run_static_inputs", run)
    return seen


def test_every_decoding_call_has_one_height_and_prompts_are_read_by_chunks(monkeypatch):
    network = small("Llama")
    seen, kv_cache = watched(network, monkeypatch), network.new_kv_cache()
    network.forward([ForwardInputs(continuation(text(62), 40))], [kv_cache])
    assert seen == [(16, 2, 0), (16, 2, 16), (16, 4, 32), (16, 4, 48), (32, 4, 61)]
    seen.clear()
    grown = continuation(text(62), 40).fill(np.array([5]))
    network.forward([ForwardInputs(grown, (5, 6, 7, 8, 9), (-1, 0, 0, 1, 1))], [kv_cache])
    assert seen == [(32, 8, 62)], "a tree that crosses the border of a block takes one call"
    seen.clear()
    grown = grown.fill(np.array([5, 7, 4]))
    network.forward([ForwardInputs(grown)], [kv_cache])
    assert seen == [(32, 8, 65)]
    seen.clear()
    network.forward([ForwardInputs(grown)], [network.new_kv_cache()])
    assert [at for *_, at in seen] == [0, 16, 32, 48, 61], "what was written is read again as it was decoded"
    edited = text(62)
    edited[50] = 3
    seen.clear()
    network.forward([ForwardInputs(continuation(edited, 40))], [kv_cache])
    assert [at for *_, at in seen] == [48, 61], "chunks start at their own borders, wherever the memory ends"


def test_a_call_names_the_rows_that_somebody_reads():
    """Of the others, padding among them, no token is found on a GPU."""
    network = small("Llama")
    caches = [network.new_kv_cache() for _ in range(2)]
    canvases = [continuation(text(length), 40) for length in (20, 9)]
    network.forward([ForwardInputs(canvas, (5, 6), (-1, 0)) for canvas in canvases], caches)
    (inputs,) = [each for shape, each in network.fixed_shape_runner.static_inputs.items() if not shape.num_logits]
    assert np.flatnonzero(inputs.temperatures.numpy() >= 0).tolist() == [0, 1, 2, 4, 5, 6]


def test_a_text_that_is_gone_leaves_its_pages_to_the_next():
    network = small("Llama")
    pool, first, second = network.fixed_shape_runner.pool, network.new_kv_cache(), network.new_kv_cache()
    before = [read(network, text(40), kv_cache=kv_cache) for kv_cache in (first, second)]
    assert torch.equal(*before)
    assert not set(first.pages) & set(second.pages)
    pages, free = list(first.pages), len(pool.free_pages)
    assert len(pages) == 3, "40 positions are in pages of 16"
    del first
    gc.collect()
    assert len(pool.free_pages) == free + 3
    third = fresh(network)
    assert torch.equal(read(network, text(40), kv_cache=third), before[0])
    assert sorted(third.pages) == sorted(pages)


def test_a_pool_grows_and_its_texts_keep_what_they_knew(monkeypatch):
    monkeypatch.setattr(kv_pages, "MIN_PAGES", 4)
    network, tokens = small("Llama"), text(120)
    first, second = network.new_kv_cache(), network.new_kv_cache()
    read(network, tokens[:20], kv_cache=first)
    assert network.fixed_shape_runner.pool.num_pages == 4
    grown = read(network, tokens, kv_cache=second)
    assert network.fixed_shape_runner.pool.num_pages >= 10
    seen = watched(network, monkeypatch)
    assert torch.equal(grown, read(network, tokens, kv_cache=first))
    assert seen[0][-1] == 16, "the first chunk was not read again"


def test_a_pool_that_memory_was_too_small_for_asks_for_what_is_free_then(monkeypatch):
    pool, rows = KVPagePool(1, 16), torch.zeros(2, 1, 4)
    monkeypatch.setattr(KVPagePool, "_first_pages", lambda *_: 100)
    with monkeypatch.context() as patch:
        patch.setattr(KVPagePool, "_zeros", MagicMock(side_effect=MemoryError("full")))
        with pytest.raises(MemoryError):
            pool.allocate([(rows, rows)])
    monkeypatch.setattr(KVPagePool, "_first_pages", lambda *_: 7)
    pool.allocate([(rows, rows)])
    assert (pool.num_pages, pool.buffers[0].shape[1], sorted(pool.free_pages)) == (7, 7 * 16, list(range(1, 7)))


def test_a_failed_call_leaves_a_memory_that_still_tells_the_truth(monkeypatch):
    """It fails in the second layer: accepted nodes have been moved, and scratch is written over."""
    network, attend = small("Llama"), fixed_shape_attention.FixedShapeAttention.attend
    kv_cache, decided, tree = network.new_kv_cache(), text(20), random_tree(6)
    read(network, decided, *tree, kv_cache)
    grown = [*decided, *ForwardInputs(continuation(decided, 9), *tree).path_tokens(5), 4]

    def failing(self, module, *args):
        if module.layer_idx:
            raise MemoryError("full")
        return attend(self, module, *args)

    with monkeypatch.context() as patch:
        patch.setattr(fixed_shape_attention.FixedShapeAttention, "attend", failing)
        with pytest.raises(MemoryError):
            read(network, grown, *random_tree(9, seed=4), kv_cache)
    assert torch.equal(read(network, grown, *tree, kv_cache), read(network, grown, *tree))


def test_a_tree_of_the_largest_size_gets_the_bits_of_its_branches_alone():
    network, decided, tree = small("Llama"), text(20), random_tree(MAX_DRAFT_TOKENS)
    tree = tree[0], tuple(parent % 8 - 1 if node >= 8 else -1 for node, parent in enumerate(tree[1]))  # not deep
    rows, inputs = read(network, decided, *tree), ForwardInputs(continuation(decided, 99), *tree)
    for node in (0, 255, 256, MAX_DRAFT_TOKENS - 1):
        assert torch.equal(rows[node + 1], read(network, [*decided, *inputs.path_tokens(node)])[0])


def test_a_tree_deeper_than_a_call_is_refused():
    network = small("Llama")
    with pytest.raises(ValueError, match=r"17 deep.*larger max_draft_tokens"):
        chain(network, text(18))


def test_what_fixed_shapes_cannot_make_exact_says_so_and_goes_on(caplog, monkeypatch):
    monkeypatch.setenv("SALTUS_KERNELS", "off")  # which multiply by experts
    with caplog.at_level("WARNING", logger="saltus"):
        network = CausalNetwork(tiny("Mixtral"), fixed_shapes=True)
    assert not network.batch_invariant
    assert network.fixed_shape_runner is None
    assert "experts" in caplog.text
    assert "largest position" in why_not_fixed_shapes(
        tiny("Llama", rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4})
    )
    assert why_not_fixed_shapes(tiny("Gemma3")) is None


@pytest.mark.parametrize(("entries", "expected"), [(1, 2), (32, 2), (33, 4), (64, 4), (65, 8), (200, 16)])
def test_calls_attend_to_few_numbers_of_pages(entries, expected):
    assert FixedShapeSettings(page_size=16).num_pages(entries) == expected


# Graphs


def test_the_greatest_logits_are_found_in_any_dtype_and_vocabulary():
    logits = torch.zeros(3, 50_000, dtype=torch.bfloat16)
    logits[0, 40_001], logits[0, 40_003], logits[1, 299], logits[2, 7] = 2, 2, 1, torch.nan
    inputs = fixed_shape_attention.StaticInputs(FixedShape(1, 3, 1, 0), 32, torch.device("cpu"))
    found = tokens_found(CallOutputs.of(logits, logits[:, :4], inputs).found)[0]
    assert found.tolist() == [40_001, 299, -1]


@pytest.fixture
def replayed(monkeypatch):
    """Stand in for CUDA: a graph repeats the call that was captured, into the tensors that came out of it."""
    network, captured = small("Llama"), []
    runner, pool = network.fixed_shape_runner, network.fixed_shape_runner.pool
    evaluate = runner._run_static_inputs

    class Graph:
        def replay(self):
            inputs, queries, place, out = self.call
            assert pool.buffers[0].data_ptr() == place, "a graph goes with the buffers it was captured over"
            for old, new in zip(out, evaluate(inputs, queries), strict=True):
                old.copy_(new)

    @contextmanager
    def graph(made, *_, **__):
        calls = []

        def recorded(inputs, queries):
            out = CallOutputs(*(x.clone() for x in evaluate(inputs, queries)))
            calls.append((inputs, queries, pool.buffers[0].data_ptr(), out))
            return out

        with monkeypatch.context() as patch:
            patch.setattr(runner, "_run_static_inputs", recorded)
            yield
        (made.call,) = calls
        captured.append(made.call[0].shape)

    @contextmanager
    def nothing(*_):
        yield

    for name, stand_in in {
        "Stream": MagicMock(), "current_stream": MagicMock(), "stream": nothing, "CUDAGraph": Graph, "graph": graph,
        "graph_pool_handle": lambda: 1,
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, stand_in)
    runner.use_cuda_graphs = True
    return network, captured


@pytest.mark.slow
def test_replayed_calls_give_the_same_bits_and_each_shape_is_captured_once(replayed, monkeypatch):
    """Over accepted branches, borders of blocks, other texts, and a pool that grows."""
    monkeypatch.setattr(kv_pages, "MIN_PAGES", 12)
    network, captured = replayed
    tokens, plain = text(LENGTH), small("Llama")
    expected = written(plain, tokens, 20)
    kv_cache, canvas = network.new_kv_cache(), continuation(tokens[:20], LENGTH - 19)
    while canvas.num_decided < LENGTH - 20:
        rest = tokens[len(canvas.decided_prefix) :][:6].tolist()
        inputs = ForwardInputs(canvas, (3, *rest), (-1, -1, *range(1, len(rest))))
        logits = network.forward([inputs], [kv_cache])[0].logits
        assert torch.equal(logits[[0, *range(2, len(logits))]], expected[canvas.num_decided :][: len(rest) + 1])
        canvas = canvas.fill(np.array([*rest, 3])[:5])
    assert len(set(captured)) == len(captured) == 4, "a prompt of 16; decoding over 32, 64 and 128 entries"
    assert torch.equal(read(network, tokens), read(plain, tokens))
    assert len(captured) == 6, "another text has the graphs of the first; a prompt over 64 and 128 entries is new"
    longer = text(200, seed=5)
    assert torch.equal(read(network, longer, *random_tree(9), kv_cache), read(plain, longer, *random_tree(9)))
    assert network.fixed_shape_runner.pool.num_pages > 12
    assert torch.equal(read(network, tokens, kv_cache=kv_cache), read(plain, tokens))


def test_what_cannot_be_captured_goes_on_without_graphs(replayed, monkeypatch, caplog):
    network, _ = replayed

    @contextmanager
    def refusing(*_, **__):
        raise RuntimeError("operation not permitted when stream is capturing")
        yield

    monkeypatch.setattr(torch.cuda, "graph", refusing)
    with caplog.at_level("WARNING", logger="saltus"):
        assert torch.equal(read(network, text(40)), read(small("Llama"), text(40)))
    assert not network.fixed_shape_runner.use_cuda_graphs
    assert caplog.text.count("cannot be captured") == 1


def test_a_capture_that_runs_out_of_memory_says_so_and_leaves_the_graphs_on(replayed, monkeypatch):
    """Then the end of the capture fails, too, with an error that names no memory."""
    network, _ = replayed

    @contextmanager
    def full(*_, **__):
        try:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")
        finally:
            raise RuntimeError("operation failed due to a previous error during capture")
        yield

    monkeypatch.setattr(torch.cuda, "graph", full)
    with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate"):
        read(network, text(40))
    assert network.fixed_shape_runner.use_cuda_graphs


@pytest.mark.gpu
@each_dtype
@pytest.mark.parametrize("name", ["Llama", "Mistral", "Gemma2", "GPT2"])
def test_on_a_gpu_trees_and_plain_decoding_get_the_same_bits_from_graphs(name, dtype):
    network = CausalNetwork(tiny(name).to("cuda", dtype), fixed_shape_settings=SMALL)
    tokens = text(LENGTH)
    plain, kv_cache, canvas = written(network, tokens, 20), fresh(network), continuation(tokens[:20], LENGTH - 19)
    while canvas.num_decided < LENGTH - 20:
        rest = tokens[len(canvas.decided_prefix) :][:6].tolist()
        inputs = ForwardInputs(canvas, (3, *rest), (-1, -1, *range(1, len(rest))))
        logits = network.forward([inputs], [kv_cache])[0].logits
        assert torch.equal(logits[[0, *range(2, len(logits))]], plain[canvas.num_decided :][: len(rest) + 1])
        canvas = canvas.fill(np.array([*rest, 3])[:5])
    assert network.fixed_shape_runner.use_cuda_graphs, "it was captured"


# Whole texts


@pytest.fixture(scope="module")
def engines(tiny_folder):
    """The same model by kernels and by fixed shapes."""
    ours, fixed = (saltus.load(str(tiny_folder(max_position_embeddings=80)), "plain", device="cpu") for _ in range(2))
    network = CausalNetwork(fixed.network.model, fixed_shapes=True, fixed_shape_settings=SMALL)
    return ours, fixed.copy_with(network=network)


@pytest.mark.slow
@pytest.mark.parametrize(("method", "temperature"), [("plain", 0.0), ("jacobi+lookup", 0.8)])
def test_whole_texts_are_those_of_the_kernels(engines, method, temperature):
    """Long enough to reach the end of the context; in float32 no token of these is near enough to flip."""
    ours, fixed = engines
    settings = {"temperature": temperature, "seed": 3, "max_new_tokens": 200, "ignore_eos": True}
    prompts = ["the cat sat on the mat and the cat sat on the", "the dog"]
    expected = [ours.generate(prompt, method="plain", **settings).tokens for prompt in prompts]
    fixed.decoder.prefix_tree.clear()
    assert fixed.generate(prompts[0], method=method, **settings).tokens == expected[0]
    assert [one.tokens for one in fixed.generate(prompts, method=method, **settings)] == expected


def test_rows_of_logits_that_are_read_in_any_case_are_one_copy_with_the_tokens(monkeypatch):
    copied = []
    monkeypatch.setattr(fixed_shapes, "to_host", lambda *given: [copied.append(len(each)) or each for each in given])
    plain, drafted = (ForwardInputs(continuation([1], 9), (2,) * n, (-1,) * n, reads_logits=True) for n in (0, 33))
    logits = [*torch.zeros(40, 1, 4), torch.zeros(34, 4)]
    rows, *_ = fixed_shapes._on_host([plain] * 40 + [drafted], logits, [torch.zeros(3, 74)])
    assert copied == [3, 40]
    assert [len(each) for each in rows] == [1] * 40 + [34]
