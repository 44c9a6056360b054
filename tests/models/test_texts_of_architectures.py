"""Texts of models that are unlike Llama: the same whatever drafts, alone, in a batch, after other texts."""

from dataclasses import dataclass, field
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
SAMPLINGS = Sampling(), Sampling(temperature=0.8)


def by_turns(name: str, test: int) -> tuple[Sampling, list[str]]:
    """A sampling and methods for a network, in the first (0) or the second (1) of two tests.

    Methods and samplings are the same code whatever the network, and drafters compete in one tree. With one name per
    feature each test has the trees of all drafters and those of one, greedy in the one test and sampled in the other.
    With each other name one test has all drafters, and the other has one.
    """
    row, everything = NAMES.index(name), "+".join(METHODS)
    alone = METHODS[(row // 2 + test) % len(METHODS)]
    if name in ONE_PER_FEATURE:
        return SAMPLINGS[(row + test) % 2], [everything, alone]
    return SAMPLINGS[row % 2], [alone if (row + test) % 2 else everything]


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


@dataclass
class Example:
    """A target, checked as at load, a draft model of other weights, and a drafter that nobody trained."""

    name: str
    networks: dict[str, Any]
    plain_texts: dict[Sampling, list[list[int]]] = field(default_factory=dict)

    def plain(self, sampling: Sampling) -> list[list[int]]:
        """The texts of plain decoding, each alone."""
        if sampling not in self.plain_texts:
            self.plain_texts[sampling] = [write(self.networks, "plain", sampling, [n]).texts[0] for n in ALL]
        return self.plain_texts[sampling]


@pytest.fixture(scope="module", params=NAMES)
def example(request) -> Example:
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
    return Example(request.param, {"target": target, "small_model": draft, "ptp": untrained_drafter(target)})


def untrained_drafter(target: CausalNetwork) -> DraftNetwork:
    """A drafter of `ptp`, which reads the target's hidden states."""
    embeddings, output = target.model.get_input_embeddings(), target.model.get_output_embeddings()
    hidden = embeddings.weight.shape[1]
    shape = DrafterShape(hidden=hidden, intermediate=48, hidden_state_layers=(1,), heads=4, kv_heads=2)
    set_seed(7)
    model = DraftModel(shape, torch.arange(3, VOCAB), embeddings.weight.detach(), output.weight.detach())
    target.add_hidden_state_layers(shape.hidden_state_layers)
    return DraftNetwork(model.eval().to(torch.bfloat16), target)


@pytest.mark.unchecked
def test_a_text_alone_is_that_of_plain_decoding_and_so_is_one_after_a_kept_prefix(example):
    sampling, ways = by_turns(example.name, 0)
    networks, texts = example.networks, example.plain(sampling)
    assert len(texts[1]) == NEW_TOKENS
    assert supports_prefix_tree(networks["target"])
    for way in ways:
        before = write(networks, way, sampling, [1])
        assert before.texts == texts[1:2], way
        tree, kept = PrefixTree(), PROMPTS[1]
        tree.put(kept, before.kv_caches[0])
        taken = tree.take(kept)
        assert len(taken["target"].tokens) >= len(kept) - 1
        assert write(networks, way, sampling, [0, 1], [{}, taken]).texts == texts[:2], way


@pytest.mark.unchecked
def test_a_batch_of_four_on_the_memory_of_cancelled_texts_writes_those_of_plain_decoding(example):
    sampling, ways = by_turns(example.name, 1)
    for way in ways:
        cancelled = write(example.networks, way, sampling, ALL[::-1], rounds=3)
        written = write(example.networks, way, sampling, ALL, cancelled.kv_caches)
        assert written.texts == example.plain(sampling), way


def test_an_adapter_of_the_target_writes_the_texts_of_plain_decoding(example):
    """Greedy or sampled, and by one call or two, by turns."""
    turn, target = NAMES.index(example.name), example.networks["target"]
    sampling = SAMPLINGS[turn % 2]
    method = AdapterPtp("", 5, turn // 2 % 2 == 1, "one-hot", 6, False, "token-order")
    target.attach_adapter(adapter_for(target.model))
    try:
        assert write(example.networks, method, sampling, ALL).texts == example.plain(sampling)
    finally:
        target.attach_adapter(None)
