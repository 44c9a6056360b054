"""Texts of models that are unlike Llama: the same whatever drafts, alone, in a batch, after other texts."""

from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import pytest
import torch
from test_gated_lora import adapter_for
from transformers import set_seed

from architectures import DESCRIBED, LATENT_OF_WHOLE_BLOCKS, OF_WHOLE_BLOCKS, ONE_PER_FEATURE, VOCAB, text, tiny
from saltus.core.batch import SequenceState, run_batch
from saltus.core.canvas import continuation
from saltus.core.noise import Noise
from saltus.core.rules import match
from saltus.core.sampling import Sampling
from saltus.core.speculate import speculate
from saltus.engine.prefix_tree import PrefixTree, supports_prefix_tree
from saltus.engine.target_network import make_network
from saltus.kernels import native
from saltus.loading.packing import pack_places, packable_places
from saltus.methods import make_methods
from saltus.methods.ptp.drafter import AdapterPtp
from saltus.methods.ptp.network import DrafterShape, DraftModel, DraftNetwork
from saltus.models.causal import CausalNetwork

pytestmark = pytest.mark.slow

PACKED = ", packed"  # as by --weights q8_0, and multiplied by activations of 8 bits
NAMES = [
    *DESCRIBED, "Gemma4 of unlike heads", "Gemma4 of shared keys",
    *(name + PACKED for name in ("GptOss", "Qwen3Moe", "Llama4", "Lfm2Moe", "Gemma3n", "DeepseekV3")
      if native.load_kernels() is not None),
]  # fmt: skip
METHODS = ["lookup", "jacobi", "small_model", "ptp"]
SAMPLINGS = {"greedy": Sampling(), "sampled": Sampling(temperature=0.8)}


def by_turns(ways: list, test: int = 0) -> list[tuple[str, str, Any]]:
    """Names, samplings and ways to draft, for the first (0) or the second (1) of two tests.

    Methods and samplings are the same code whatever the network. With one name per feature each test tries every way,
    greedy in the one and sampled in the other. With each other name every way is tried in one of the tests, half of the
    ways greedy.
    """
    found = []
    for row, name in enumerate(NAMES):
        for number, way in enumerate(ways):
            if name in ONE_PER_FEATURE:
                found.append((name, row + number + test, way))
            elif (row + number + test) % 2 == 0:
                found.append((name, row // 2 + number // 2, way))
    return [(name, list(SAMPLINGS)[turn % 2], way) for name, turn, way in found]


REPEATED = text(5).tolist()
PROMPTS = [  # of lengths around the ends of windows and chunks of 12; repeated, so that lookup finds something
    [*REPEATED, *REPEATED], [*REPEATED, 7, *REPEATED, 8, *REPEATED], text(23, seed=3).tolist(), [5, 6, 5],
]  # fmt: skip
ALL, NEW_TOKENS = range(4), 16


@dataclass
class Written:
    """The texts of some prompts, and the KV caches that they leave."""

    texts: list[list[int]]
    kv_caches: list[dict]


def write(networks, method, sampling, numbers, kv_caches=(), rounds=None) -> Written:
    """Continue some prompts in one batch, on these caches; with `rounds` only that many calls of it.

    A method is named, or given.
    """
    methods = make_methods(method) if isinstance(method, str) else [method]
    states, texts = [], []
    for number, own_caches in zip_longest(numbers, kv_caches):
        noise, steps = Noise(number), []
        drafters = [drafter for one in methods if (drafter := one.drafter(noise, sampling, match)) is not None]
        generator = speculate(continuation(PROMPTS[number], NEW_TOKENS), noise, sampling, drafters, steps.append, match)
        states.append(SequenceState(generator, dict(own_caches or {})))
        texts.append(steps)
    running = list(states)
    for done, _ in enumerate(run_batch(running, networks), 1):
        if done == rounds:
            break
    tokens = [[int(token) for step in steps for token in step.tokens] for steps in texts]
    return Written(tokens, [state.kv_caches for state in states])


@pytest.fixture(scope="module")
def networks(request) -> dict[str, Any]:
    """A target, checked as at load, a draft model of other weights, and a drafter that nobody trained."""
    name, is_packed = request.param.removesuffix(PACKED), request.param.endswith(PACKED)
    sizes = LATENT_OF_WHOLE_BLOCKS if name == "DeepseekV3" else OF_WHOLE_BLOCKS
    models = [tiny(name, seed, **sizes if is_packed else {}).bfloat16() for seed in (0, 1)]
    with torch.no_grad():
        for mine, other in zip(models[1].parameters(), models[0].parameters(), strict=True):
            mine.lerp_(other, 0.9)
    if is_packed:
        for model in models:
            pack_places(packable_places(model, 32).values(), "q8_0", "int8")
    target, draft = make_network(models[0], "mine"), CausalNetwork(models[1])
    assert isinstance(target, CausalNetwork)
    return {"target": target, "small_model": draft, "ptp": untrained_drafter(target)}


def untrained_drafter(target: CausalNetwork) -> DraftNetwork:
    """A drafter of `ptp`, which reads the target's hidden states."""
    embeddings, output = target.model.get_input_embeddings(), target.model.get_output_embeddings()
    hidden = embeddings.weight.shape[1]
    shape = DrafterShape(hidden=hidden, intermediate=48, hidden_state_layers=(1,), heads=4, kv_heads=2)
    set_seed(7)
    model = DraftModel(shape, torch.arange(3, VOCAB), embeddings.weight.detach(), output.weight.detach())
    target.add_hidden_state_layers(shape.hidden_state_layers)
    return DraftNetwork(model.eval().to(torch.bfloat16), target)


@pytest.fixture(scope="module")
def plain(request, networks) -> tuple[Sampling, list[list[int]]]:
    """A sampling, and the texts of plain decoding, each alone."""
    sampling = SAMPLINGS[request.param]
    return sampling, [write(networks, "plain", sampling, [number]).texts[0] for number in ALL]


def each(ways: list, test: int = 0):
    return pytest.mark.parametrize(("networks", "plain", "way"), by_turns(ways, test), indirect=["networks", "plain"])


@each(METHODS)
@pytest.mark.unchecked
def test_a_text_alone_is_that_of_plain_decoding_and_so_is_one_after_a_kept_prefix(networks, plain, way):
    sampling, texts = plain
    assert len(texts[1]) == NEW_TOKENS
    before = write(networks, way, sampling, [1])
    assert before.texts == texts[1:2]
    assert supports_prefix_tree(networks["target"])
    tree, kept = PrefixTree(), PROMPTS[1]
    tree.put(kept, before.kv_caches[0])
    taken = tree.take(kept)
    assert len(taken["target"].tokens) >= len(kept) - 1
    assert write(networks, way, sampling, [0, 1], [{}, taken]).texts == texts[:2]


@each(METHODS, 1)
@pytest.mark.unchecked
def test_a_batch_of_four_on_the_memory_of_cancelled_texts_writes_those_of_plain_decoding(networks, plain, way):
    sampling, texts = plain
    cancelled = write(networks, way, sampling, ALL[::-1], rounds=3)
    assert write(networks, way, sampling, ALL, cancelled.kv_caches).texts == texts


@each(["one call", "two calls"])
def test_an_adapter_of_the_target_writes_the_texts_of_plain_decoding(networks, plain, way):
    sampling, texts = plain
    target = networks["target"]
    method = AdapterPtp("", 5, way == "two calls", "one-hot", 6, False, "token-order")
    target.attach_adapter(adapter_for(target.model))
    try:
        assert write(networks, method, sampling, ALL).texts == texts
    finally:
        target.attach_adapter(None)
