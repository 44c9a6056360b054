"""Training of a drafter on texts as they are written: states, evaluations, bounded memory, vocabulary."""

# ruff: noqa: F811  fixtures

from dataclasses import replace

import numpy as np
import pytest
import torch

from saltus.core.batch import SequenceState, run_batch
from saltus.core.canvas import continuation
from saltus.core.control.controller import Controller
from saltus.core.forward import ForwardInputs
from saltus.engine.scheduler import counting_generator
from saltus.methods.ptp.training.online import (
    LearningSettings,
    OnlineDrafterTraining,
    drafter_weights,
    recent_vocabulary,
)
from saltus.server.text_states import TextStates
from saltus.training.data.recent_texts import RecentText, RecentTexts, corpus_of
from tiny_server import PROMPT, engine  # noqa: F401

SETTINGS = LearningSettings(
    evaluation_texts=6, evaluation_windows=8, batch_texts=4, windows=6, steps_per_text=8, rate=1e-2, warm_up=5
)


def recorded(engine, prompt=PROMPT, method="ptp+lookup", end=None, prefill=0, predicted=(), **settings) -> RecentText:
    """A decoded text with the states that its calls returned."""
    setup, network = engine.decoder.setup(method), engine.network
    request = engine.text_request(prompt, raw=True, **{"max_new_tokens": 24, "ignore_eos": True, **settings}).request
    request.prediction = predicted
    if end is not None:
        request.is_end = lambda token: token == end
    states = TextStates(network, (*setup.networks["ptp"].model.shape.hidden_state_layers, None))
    request.on_step = states.record
    sequence = SequenceState(counting_generator(setup, request, Controller(adaptive=False)))
    if prefill:  # the prompt's first tokens were read in another call
        kv_cache = sequence.kv_caches["target"] = network.new_kv_cache()
        network.forward([ForwardInputs(continuation(request.prompt[:prefill], 1))], [kv_cache])
    for _ in run_batch([sequence], setup.networks):
        pass
    found = states.text(request)
    assert found is not None
    return found


def own_states(engine, tokens) -> torch.Tensor:
    """The states that a call over the whole text returns."""
    inputs = ForwardInputs(continuation(tokens, 1), output_hidden_states=True)
    return engine.network.forward([inputs], [engine.network.new_kv_cache()])[0].hidden_states


@pytest.mark.parametrize("prefill", [0, 3])
@pytest.mark.parametrize("method", ["ptp", "ptp+lookup"])
def test_the_states_of_calls_are_those_of_the_whole_text(engine, method, prefill):
    text = recorded(engine, method=method, prefill=prefill, temperature=0.7, seed=2)
    prompt = engine.encode(PROMPT, raw=True)
    whole = [*prompt, *engine.generate(PROMPT, raw=True, method="plain", max_new_tokens=24, ignore_eos=True,
                                       temperature=0.7, seed=2).tokens]  # fmt: skip
    assert text.prompt_length == min(len(prompt) - prefill, 32)
    assert text.tokens.tolist() == whole[-len(text.tokens) :]
    assert len(text.tokens) == text.prompt_length + 24
    expected = own_states(engine, whole)[-len(text.tokens) : -1].bfloat16()
    assert torch.equal(torch.from_numpy(text.states).view(torch.bfloat16), expected)


def test_a_text_that_ends_among_accepted_drafts_has_no_states_of_what_was_cut_off(engine):
    """A prediction drafts a run of tokens, and the text ends at one of them."""
    settings = {"max_new_tokens": 24, "ignore_eos": True, "temperature": 0.7, "seed": 2}
    whole = engine.generate(PROMPT, raw=True, method="plain", **settings)
    end = next(token for token in whole.tokens[13:] if whole.tokens.index(token) >= 13)
    text = recorded(engine, end=end, predicted=whole.tokens, **settings)
    kept = whole.tokens[: whole.tokens.index(end) + 1]
    assert text.tokens.tolist()[text.prompt_length :] == kept
    assert len(text.states) == len(text.tokens) - 1
    tokens = [*engine.encode(PROMPT, raw=True), *kept]
    expected = own_states(engine, tokens)[-len(text.tokens) : -1].bfloat16()
    assert torch.equal(torch.from_numpy(text.states).view(torch.bfloat16), expected)


def invented(number: int, length: int = 30) -> RecentText:
    tokens = np.random.default_rng(number).integers(5, 280, length)
    states = np.random.default_rng(-number - 1 + 1000).integers(0, 100, (length - 1, 64)).astype(np.int16)
    return RecentText(tokens, states, 4, 0.0)


def test_memory_is_bounded_and_the_oldest_texts_go_first():
    texts, kept = [invented(number) for number in range(9)], RecentTexts(4 * invented(0).nbytes)
    for text in texts:
        kept.add(text)
        assert kept.num_bytes == sum(each.nbytes for each in kept) <= kept.max_bytes
    assert [*kept] == texts[-4:]


def test_a_corpus_has_the_states_of_each_text():
    texts = [invented(number, 20 + number) for number in range(3)]
    corpus = corpus_of(texts, (1,), "target")
    for text, (start, prompt, length, temperature) in zip(texts, corpus.text_table, strict=True):
        assert (prompt, length, temperature) == (4, len(text.tokens), 0)
        assert corpus.tokens[start : start + length].tolist() == text.tokens.tolist()
        states = corpus.hidden_states[torch.arange(start, start + length - 1)]
        assert np.array_equal(states.view(torch.int16).numpy(), text.states)


def predictable(number: int) -> RecentText:
    """Runs of consecutive tokens, each with a state of its own."""
    tokens = 10 + (7 * number + np.arange(40)) % 20
    states = torch.from_numpy(np.random.default_rng(0).normal(size=(300, 64))).bfloat16()[tokens[:-1]]
    return RecentText(tokens, states.view(torch.int16).numpy(), 4, 0.7 * (number % 2))


@pytest.mark.parametrize("size", [1, 3, 50])
def test_tokens_of_recent_texts_take_the_places_of_unused_ones(size):
    drafted, counts = torch.arange(10, 10 + size), np.zeros(100, dtype=np.int64)
    counts[[3, 10, 90]] = 1, 5, 2
    found = recent_vocabulary(drafted, counts)
    assert len(found) == size
    assert found.tolist() == sorted(set(found.tolist()))
    assert 10 in found.tolist()
    assert {3, 90} <= set(found.tolist()) or size < 3
    assert recent_vocabulary(found, counts).tolist() == found.tolist()


def training(engine, settings=SETTINGS) -> OnlineDrafterTraining:
    model, network = engine.network.model, engine.decoder.setup("ptp+lookup").networks["ptp"]
    matrices = [model.get_input_embeddings().weight, model.get_output_embeddings().weight]
    embeddings, unembedding = (one.detach().bfloat16() for one in matrices)
    return OnlineDrafterTraining(drafter_weights(network.model), embeddings, unembedding, settings)


def rest(running: OnlineDrafterTraining) -> list:
    """Work until there is nothing left to do; the progress of all pieces."""
    found = []
    while not found or not found[-1].idle:
        found.append(running.advance())
    return found


@pytest.mark.slow
def test_a_drafter_is_evaluated_on_texts_before_it_learns_them_and_gets_better(engine):
    texts = [predictable(number) for number in range(18)]
    running, evaluations, learned = training(engine), [], []
    for number, text in enumerate(texts, start=1):
        running.add(text)
        learned_before = {id(one) for one in running.kept}
        pool = {id(one) for one in running.pool}
        assert not pool & learned_before
        for progress in rest(running):
            if progress.evaluation is not None:
                evaluations.append((number, progress.evaluation))
                assert (progress.drafter is not None) == progress.evaluation.passed
                if progress.drafter is not None:
                    learned.append(progress.drafter)
    assert [number for number, _ in evaluations] == [12, 18]  # the first six are learned without an evaluation
    assert evaluations[0][1].passed
    assert evaluations[0][1].trained > evaluations[0][1].served + 0.2
    assert running.steps <= SETTINGS.steps_per_text * len(texts)
    assert np.array_equal(learned[-1].tokens, running.served.tokens.numpy())
    assert not np.array_equal(learned[0].weights["fuse.weight"], running.initial.weights["fuse.weight"])


@pytest.mark.slow
def test_steps_come_between_evaluations_and_texts_that_arrive_together_are_learned(engine):
    number = SETTINGS.evaluation_texts
    running = training(engine, replace(SETTINGS, steps_between_evaluations=20))
    for each in range(3 * number):  # more than are kept for an evaluation
        running.add(predictable(each))
    found = [running.advance() for _ in range(20)]
    assert [progress.steps for progress in found] == [1] * 20
    for each in range(number):
        running.add(predictable(each))
    assert running.advance().steps == 0
    assert any(progress.evaluation is not None for progress in rest(running))
