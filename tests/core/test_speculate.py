"""The loop: what it records of drafting, and what it makes of constraints and of broken drafters."""

from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from saltus.core.batch import SequenceState, run
from saltus.core.canvas import continuation
from saltus.core.control.call_cost import CallCost
from saltus.core.control.controller import Controller
from saltus.core.forward import ForwardInputs, ForwardOutputs
from saltus.core.noise import Noise
from saltus.core.rules import match, reject
from saltus.core.sampling import Sampling
from saltus.core.speculate import speculate
from saltus.core.tree import Branch, DraftNodes
from saltus.engine.decoding_setup import _limit_to_context
from saltus.methods.jacobi.drafter import Jacobi
from saltus.methods.ptp.fused_drafter import FusedPtpDrafter
from saltus.testing import ToyDecoding, toy_decoding, toy_drafter, toy_network


class RecordingController(Controller):
    """It keeps what it is told of each step: its tokens, the seconds of draft models, whether they were used."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.told = []

    def record(self, tree, step, draft_seconds=0.0, other_seconds=0.0, drafters_on=False) -> None:
        self.told.append((len(step.tokens), draft_seconds, drafters_on))
        super().record(tree, step, draft_seconds, other_seconds, drafters_on)


def test_a_step_after_many_tokens_is_one_with_drafts_and_one_that_reads_a_prompt_says_nothing(monkeypatch):
    target = toy_network(vocab=6, logit_scale=10.0)
    draft_model = toy_drafter(target, name="ptp")
    evaluate = draft_model._evaluate
    monkeypatch.setattr(
        draft_model, "_evaluate", lambda inputs, kv_cache: replace(evaluate(inputs, kv_cache), seconds=0.01)
    )
    controller = RecordingController(31)
    controller.call_cost.seconds.update({1: 0.1, 32: 0.12})
    toy_decoding(
        "ptp+lookup", [1, 2] * 20, 200, target=target, controller=controller, extra_networks={"ptp": draft_model}
    ).run()
    assert max(tokens for tokens, *_ in controller.told) > 13
    used = [seconds for _, seconds, used in controller.told if used]
    assert len(used) > 3
    assert used.count(None) == 1, "the call that reads the prompt"
    assert set(used) == {None, 0.0, 0.01}, "where lookup is sure there is no call"
    assert controller.drafting_switch.with_drafts.tokens > controller.drafting_switch.without_drafts.tokens


class Alternating:
    """Even tokens at even places, odd ones at odd places; what is asked of another text is an error."""

    def allowed(self, text) -> np.ndarray:
        assert self.num_allowed((), text) == len(text), f"no text of this constraint: {text}"
        allowed = np.zeros(6, dtype=bool)
        allowed[len(text) % 2 :: 2] = True
        return allowed

    def num_allowed(self, text, tokens) -> int:
        places = range(len(text), len(text) + len(tokens))
        right = [0 <= token < 6 and token % 2 == place % 2 for place, token in zip(places, tokens, strict=True)]
        return right.index(False) if False in right else len(right)

    def fast_forward(self, text, max_tokens):
        return ()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("kind", ["independent", "one-hot", "categorical", "jacobi"])
def test_queries_need_not_follow_a_constraint_that_the_text_follows(kind, temperature):
    sampling, noise = Sampling(temperature), Noise(3)

    def written(drafters) -> list[int]:
        target, steps = toy_network(vocab=6, logit_scale=2.0), []
        target.adapter = lambda before, uniforms: target.logits[before]
        generator = speculate(
            continuation([1, 2], 30), noise, sampling, drafters, steps.append, constraint=Alternating(),
            controller=Controller(adaptive=False),
        )  # fmt: skip
        return ToyDecoding(SequenceState(generator), {"target": target}, steps).run().tokens

    jacobi = kind == "jacobi"
    drafter = Jacobi(model="any").drafter(noise, sampling, match) if jacobi else FusedPtpDrafter(noise, sampling, kind)
    plain = written([])
    assert Alternating().num_allowed((), plain) == 30
    assert written([drafter]) == plain


@pytest.mark.parametrize("method", ["small_model", "mtp"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("rule", [match, reject])
def test_a_draft_model_without_finite_logits_drafts_nothing(method, temperature, rule):
    settings = {"sampling": Sampling(temperature), "rule": rule}
    target = toy_network()
    broken = toy_drafter(target, name=method)
    broken.logits = broken.logits * float("nan")
    made = toy_decoding(method, [1, 2], 20, target=target, extra_networks={method: broken}, **settings).run()
    assert broken.calls
    assert made.tokens == toy_decoding("plain", [1, 2], 20, target=toy_network(), **settings).run().tokens


def test_where_hardly_a_draft_could_pay_for_its_row_nobody_looks_for_drafts():
    """As in a full batch, whose texts all wait while one of them drafts."""

    def times_asked(seconds: dict[int, float]) -> int:
        asked, text = [], continuation([1, 2], 9)
        controller = Controller(call_cost=CallCost({1: 1.0, **seconds}), batch_size=16)

        class Fused:
            def __call__(self, canvas, last, max_depth):
                asked.append("drafts")
                return []

            def add_draft_queries(self, inputs, probabilities, controller):
                asked.append("queries")
                return inputs

        decoding = speculate(text, Noise(0), Sampling(), [Fused()], lambda step: None, match, controller)
        run(decoding, {"target": toy_network()})
        return len(asked)

    assert times_asked({2: 1.9, 16: 12.0}) == 0
    assert times_asked({2: 1.5}) == 8 + 9, "for drafts but before the last token, and for queries"
    assert times_asked({2: 1.9, 16: 2.5}) == 8 + 9, "many drafts cost little each"


def returning(returned):
    def careless(canvas, last, max_depth):
        return returned

    return careless


def yielding(yielded, returned):
    def careless(canvas, last, max_depth):
        if yielded is not None:
            yield yielded
        yield from ()
        return returned

    return careless


def branch(*fields: Any, **more: Any) -> Branch:
    return Branch(*fields, **more)


def nodes(*columns: Any) -> DraftNodes:
    return DraftNodes(*columns)


def arrays(*columns: Any) -> DraftNodes:
    return DraftNodes(*map(np.array, columns))


class Careless:
    def __call__(self, canvas, last, max_depth):
        return [3, Branch([1], [0.5])]


@pytest.mark.unchecked
@pytest.mark.parametrize(
    ("drafter", "says"),
    [
        (returning(None), r"careless returned None; return a list of Branch, or \(\)"),
        (returning([([1, 2], [0.5, 0.5])]), r"careless returned \[\(\[1, 2\], \[0.5, 0.5\]\)\]; return"),
        (returning(Branch([1], [0.5])), r"careless returned Branch\(.*; return"),
        (returning(7), "careless returned 7; return"),
        (Careless(), r"Careless returned \[3, Branch"),
        (yielding(None, [(1, 0.5)]), r"careless returned \[\(1, 0.5\)\]; return"),
        (yielding(None, None), "careless returned None; return"),
        (yielding(Branch([1], [0.5]), None), r"careless yielded Branch\(.*; yield ForwardInputs, and return a list"),
        (_limit_to_context(64, returning([(1, 0.5)])), "careless returned"),
        (returning([branch(5, [0.5])]), "careless returned a faulty Branch: its tokens are 5; give a list"),
        (returning([branch([1.5], [0.5])]), r"its tokens are \[1.5\]; give a list of token ids"),
        (returning([branch([-1], [0.5])]), r"its tokens are \[-1\]; give"),
        (returning([branch("1", [0.5])]), "its tokens are '1'; give"),
        (returning([branch([1], None)]), "its acceptance_probabilities are None; give a list of numbers from 0 to 1"),
        (returning([branch([1], ["0.5"])]), r"its acceptance_probabilities are \['0.5'\]; give"),
        (returning([branch([1], [float("nan")])]), r"its acceptance_probabilities are \[nan\]; give"),
        (returning([branch([1], [-0.7])]), r"its acceptance_probabilities are \[-0.7\]; give"),
        (
            returning([branch([1, 6], [0.5, 0.5])]),
            r"its tokens are \[1, 6\]; the model's vocabulary has 6, so give ids",
        ),
        (returning([branch([1], [0.5], None)]), "its source is None; give a text"),
        (returning([branch([1], [0.5], distributions=[3])]), r"its distributions are \[3\]; give"),
        (returning([branch([1], [0.5], payoffs=["2"])]), r"its payoffs are \['2'\]; give a list of numbers"),
        (returning([branch([1, 2], [0.5])]), "it has 2 tokens, but 1 acceptance_probabilities; give one for each"),
        (returning([branch([1], [0.5], payoffs=[1, 2])]), "it has 1 tokens, but 2 payoffs; give one for each token"),
        (
            returning([nodes([1], np.array([-1]), np.array([0.5]))]),
            r"faulty DraftNodes: its tokens are \[1\]; give",
        ),
        (
            returning([arrays([1], [-1], [1])]),
            r"its acceptance_probabilities are array\(\[1\]\); give an array of float64",
        ),
        (returning([arrays([1], [-1, 0], [0.5])]), r"its parents are array\(\[-1, 0\]\); give"),
        (returning([arrays([1, 2], [-1, 1], [0.5, 0.5])]), "its parents are .*; give −1, or the number of an earlier"),
        (returning([arrays([6], [-1], [0.5])]), r"its tokens are array\(\[6\]\); the model's vocabulary has 6"),
        (returning([arrays([-1], [-1], [0.5])]), r"its tokens are array\(\[-1\]\); give token ids"),
        (returning([arrays([1, 2], [-1, 0], [0.5, np.nan])]), r"its acceptance_probabilities are .*nan\]\); give"),
        (returning([arrays([1], [-1], [1.5])]), r"its acceptance_probabilities are array\(\[1.5\]\); give"),
        (yielding(None, [branch([1], [0.5], distributions=[])]), "it has 1 tokens, but 0 distributions; give"),
    ],
)
def test_a_drafter_that_returns_no_drafts_is_an_error_that_names_it(drafter, says):
    decoding = speculate(continuation([1, 2], 4), Noise(0), Sampling(), [drafter], lambda step: None, vocab=6)
    with pytest.raises(ValueError, match=f"^the drafter test_speculate.*{says}"):
        next(decoding)


@pytest.mark.parametrize(("seconds", "adaptive", "calls"), [(1e-5, True, 5), (0.09, True, 1), (0.09, False, 5)])
def test_a_draft_model_goes_on_while_its_next_call_may_pay(monkeypatch, seconds, adaptive, calls):
    """A call of the target takes 0.1 s."""
    target, called = toy_network(vocab=6, logit_scale=0.5), []
    draft_model = toy_drafter(target, name="small_model")

    def count(network, name, seconds):
        evaluate = network._evaluate

        def timed(inputs, kv_cache):
            called.append(name)
            return replace(evaluate(inputs, kv_cache), seconds=seconds)

        monkeypatch.setattr(network, "_evaluate", timed)

    count(target, "target", 0.1)
    count(draft_model, "small_model", seconds)
    controller = Controller(31, adaptive)
    controller.call_cost.seconds.update({1: 0.1, 32: 0.12})
    toy_decoding(
        "small_model",
        [1, 2],
        12,
        target=target,
        controller=controller,
        extra_networks={"small_model": draft_model},
        options={"small_model": {"model": "it", "min_probability": 0.0}},
    ).run()
    assert called.index("target") == calls


def test_a_draft_model_is_not_called_where_another_drafter_offers_a_likely_token():
    def slow(canvas, last, max_depth):
        yield ForwardInputs(canvas, network_name="small_model")
        return [Branch([1], [0.5], "slow")]

    def calls(chance, seconds):
        controller = Controller(31)
        controller.call_cost.seconds.update({1: 0.1, 32: 0.12})
        drafters = [slow, lambda *_: [Branch([3], [chance], "quick")]]
        decoding = speculate(continuation([1, 2], 3), Noise(0), Sampling(), drafters, lambda _: None, match, controller)
        inputs, called = next(decoding), 0
        with suppress(StopIteration):
            while True:
                called += inputs.network_name == "small_model"
                rows = 1 + len(inputs.tokens)
                inputs = decoding.send(ForwardOutputs(torch.zeros(rows, 6), None, seconds, 1, rows))
        return called

    assert calls(0.95, 0.05) == 1  # at first nobody knows what it takes
    assert calls(0.05, 0.05) == calls(0.95, 1e-5) == 2  # each step but the last, which has no room for a draft
