"""Texts of models with recurrent layers: those of plain decoding, whatever was drafted, shared, cancelled or kept."""

import queue

import numpy as np
import pytest
import torch

import saltus
from saltus.core.canvas import continuation
from saltus.core.forward import ForwardInputs
from saltus.engine.engine import Engine
from saltus.engine.prefix_tree import PrefixTree
from saltus.kernels import native
from saltus.models.cpu.hybrid_kv_cache import HybridKVCache, StateSizes
from saltus.models.memory_use import text_bytes
from saltus.server.engine_thread import EngineThread
from saltus.server.served_request import Limits, serve_text

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(native.load_kernels() is None, reason="layers with states need compiled kernels"),
]
NAMES = ["Lfm2", "Qwen3_5", "FalconH1", "GraniteMoeHybrid", "Mamba2"]
PROMPTS = ["the cat sat on the mat and the cat sat on the log and the", "one two one two one", "abc abc abd", "a b"]
SAMPLINGS = [{"temperature": 0.0}, {"temperature": 0.9}]
METHODS = ["lookup", "jacobi", "small_model", "small_model+lookup"]
LENGTH = 20


@pytest.fixture(scope="module", params=NAMES)
def engine(request, architecture_folder) -> Engine:
    draft = "Lfm2" if request.param != "Lfm2" else "Qwen3_5"
    options = {"small_model": {"model": str(architecture_folder(draft, 1)), "min_probability": 0.0}}
    return saltus.load(str(architecture_folder(request.param)), "lookup", options=options, adaptive=False, device="cpu")


def plain_texts(engine: Engine, prompts: list[str], **settings) -> list[list[int]]:
    """Each text alone, by a method without drafts, on a cache of its own."""
    texts = []
    for prompt in prompts:
        engine.decoder.prefix_tree.clear()
        texts.append(list(engine.generate(prompt, raw=True, method="plain", ignore_eos=True, **settings).tokens))
    return texts


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "sampled"])
def test_every_method_writes_the_texts_of_plain_alone_and_in_a_batch(engine, sampling):
    settings = {"max_new_tokens": LENGTH, "seed": 3, **sampling}
    expected = plain_texts(engine, PROMPTS, **settings)
    for method in METHODS:
        engine.decoder.prefix_tree.clear()
        together = engine.generate(PROMPTS, raw=True, method=method, ignore_eos=True, **settings)
        assert [list(each.tokens) for each in together] == expected, method
        again = engine.generate(PROMPTS[0], raw=True, method=method, ignore_eos=True, **settings)
        assert list(again.tokens) == expected[0], f"{method}, after a prefix hit"


def test_a_repeated_prompt_and_one_that_goes_on_are_not_read_again(engine):
    engine.decoder.prefix_tree.clear()
    first = engine.generate(PROMPTS[0], raw=True, max_new_tokens=LENGTH, ignore_eos=True)
    longer = PROMPTS[0] + first.text + " and then"
    expected = plain_texts(engine, [longer], max_new_tokens=LENGTH)
    engine.decoder.prefix_tree.clear()
    engine.generate(PROMPTS[0], raw=True, max_new_tokens=LENGTH, ignore_eos=True)
    prompt = engine.encode(PROMPTS[0], raw=True)
    assert len(engine.decoder.prefix_tree.take(prompt[:-1])["target"].tokens) == len(prompt) - 1
    goes_on = engine.generate(longer, raw=True, max_new_tokens=LENGTH, ignore_eos=True)
    assert list(goes_on.tokens) == expected[0]


def test_a_server_writes_every_text_as_if_it_were_alone(engine):
    cases = [(PROMPTS[i % 4] + " x" * (i // 4), METHODS[i % 3], i % 3 * 0.5, i) for i in range(12)]
    parts: queue.SimpleQueue = queue.SimpleQueue()
    jobs = [
        serve_text(
            engine.text_request(
                prompt, raw=True, seed=seed, max_new_tokens=LENGTH, temperature=temperature, ignore_eos=True
            ),
            method, lambda part, number=number: parts.put((number, part)),
        )
        for number, (prompt, method, temperature, seed) in enumerate(cases)
    ]  # fmt: skip
    engine_thread, ended, cancelled = EngineThread(engine, Limits(max_batch=4)), set(), {2, 5}
    engine_thread.submit(*jobs)
    engine_thread.start()
    try:
        while len(ended) < len(jobs) - len(cancelled):
            number, part = parts.get(timeout=60)
            if number in cancelled:
                engine_thread.cancel(jobs[number])
            elif part.finish_reason is not None:
                ended.add(number)
    finally:
        engine_thread.close()
    for number in sorted(ended):
        prompt, _, temperature, seed = cases[number]
        (alone,) = plain_texts(engine, [prompt], seed=seed, max_new_tokens=LENGTH, temperature=temperature)
        assert jobs[number].request.tokens == alone, cases[number]


def test_a_text_keeps_no_more_memory_than_computed(engine):
    network = engine.network
    kv_cache, tokens = network.new_kv_cache(), np.random.default_rng(0).integers(3, 300, 400)
    for end in (300, 320, 399, 400):
        network.forward([ForwardInputs(continuation(tokens[:end], 8), (3, 4, 5), (-1, 0, 0))], [kv_cache])
    buffers = [x for x in (kv_cache.keys, kv_cache.values) if x is not None and x.numel()]
    used = kv_cache.num_bytes + sum(x[:, :, : len(tokens)].numel() * x.element_size() for x in buffers)
    assert 0 < used <= text_bytes(network, len(tokens))


# The tree of prefixes


SIZES = StateSizes(64, 64, ((1, 4),))


def cache_of(tokens: list[int], positions: list[int]) -> HybridKVCache:
    """A cache whose keys and states at a place are made of the tokens up to there."""
    keys = torch.zeros(2, 1, len(tokens) + 3, 4)
    for at in range(len(tokens)):
        keys[:, :, at] = hash(tuple(tokens[: at + 1])) % 1_000_003
    snapshots = {at: state_of(tokens[:at]) for at in positions}
    cache = HybridKVCache(np.array(tokens), keys, -keys, sizes=SIZES, snapshots=snapshots)
    cache.num_read, cache.states = len(tokens), state_of(tokens)
    return cache


def state_of(tokens: list[int]) -> torch.Tensor:
    return torch.full((64,), hash(tuple(tokens)) % 251, dtype=torch.uint8)


def test_a_text_takes_the_prefix_up_to_a_snapshot():
    tree = PrefixTree()
    tree.put([1, 2, 3], {"target": cache_of([1, 2, 3, 4, 5, 6], [2, 4])}, ended=False)
    tree.put([1, 2, 3], {"target": cache_of([1, 2, 3, 9, 9], [3])})
    for asked, length in (([1, 2, 3, 4, 5, 6], 4), ([1, 2, 3, 4], 4), ([1, 2, 3, 7], 3), ([1, 2, 9], 2), ([1], 0)):
        found = tree.take(asked).get("target")
        assert (0 if found is None else len(found.tokens)) == length, asked
        if found is not None:
            assert found.tokens.tolist() == asked[:length]
            assert torch.equal(found.states, state_of(asked[:length]))
            expected = cache_of(asked[:length], [])
            assert expected.keys is not None
            assert torch.equal(found.keys[:, :, :length], expected.keys[:, :, :length])
            found.states.fill_(0)  # the tree's own is not written to
    assert len(tree.take([1, 2, 3, 9, 9, 1])["target"].tokens) == 5, "the states of a text that has ended"


def test_states_take_half_of_the_memory_and_the_oldest_are_dropped_first():
    tree = PrefixTree(64 * 6)
    for number in range(1, 6):
        tree.put([], {"target": cache_of([number], [1])}, ended=False)
        assert tree.num_bytes <= tree.max_bytes
    assert [bool(tree.take([number])) for number in range(1, 6)] == [False, False, True, True, True]
    tree.clear()
    assert tree.num_bytes == 0
