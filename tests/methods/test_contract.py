"""What every method must keep, whichever it is: the files of `methods/` are found by themselves."""

from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import pytest

from saltus import testing
from saltus.core.batch import run, run_batch
from saltus.core.canvas import continuation
from saltus.core.control.call_cost import CallCost
from saltus.core.control.controller import Controller
from saltus.core.coupling import pick_token
from saltus.core.distributions import TargetDistributions
from saltus.core.forward import ForwardInputs
from saltus.core.picking import Distribution, one_hot, probability, residual
from saltus.core.rules import match, reject
from saltus.core.sampling import Sampling
from saltus.core.tree import Tree
from saltus.methods import available_methods
from saltus.methods.shared import autoregressive
from saltus.testing import ToyDecoding, ToyNetwork, text_probabilities, toy_decoding, toy_network
from sampled_laws import cells, chance_of_a_miss, keeps_law

METHODS = [*available_methods(), "jacobi+lookup", "small_model+lookup", "ptp+lookup", "jacobi+lookup+small_model"]
PROMPT = [1, 2, 3, 4, 1, 2]
LENGTH = 24
SAMPLINGS = {
    "greedy": Sampling(),
    "sampled": Sampling(temperature=1.0),
    "top_k and top_p": Sampling(temperature=0.7, top_k=5, top_p=0.9),
    "min_p": Sampling(temperature=1.3, min_p=0.1),
    "by probability": Sampling(temperature=1.0, coupling="probability"),
    "by token id": Sampling(temperature=1.0, coupling="token-order"),
    "with Gumbel noise": Sampling(temperature=1.0, coupling="gumbel"),
    "with Gumbel noise, truncated": Sampling(0.8, top_k=4, repetition_penalty=1.2, banned=(3,), coupling="gumbel"),
    "greedy, penalised": Sampling(repetition_penalty=1.3),
    "penalised, banned and forced": Sampling(
        0.8, repetition_penalty=1.2, banned=(3,), forced_at_index=((0, 5), (4, 1), (5, 1))
    ),
}
every_method = pytest.mark.parametrize("method", METHODS)
every_sampling = pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
greedy_and_sampled = pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=1.0)], ids=["greedy", "T=1"])


def write(
    method: str, length: int = LENGTH, *, seed: int = 0, target: ToyNetwork | None = None, **settings
) -> ToyDecoding:
    return toy_decoding(
        method, PROMPT, length, target=target or toy_network(logit_scale=1.5), seed=seed, **settings
    ).run()


@lru_cache
def plain_text(sampling: Sampling, seed: int = 0) -> list[int]:
    return write("plain", seed=seed, sampling=sampling).tokens


def stairs() -> CallCost:
    """Calls whose time jumps, as on machines that like some widths."""
    return CallCost({1: 1.0, 2: 1.3, 3: 1.31, 4: 1.32, 5: 1.6, 8: 1.62, 9: 2.0, 16: 2.1})


@dataclass
class Reckless(Controller):
    """Any size at all, drafters asked or not: a function of its seed and of what it has been asked."""

    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.dice = np.random.default_rng(self.seed)

    def should_draft(self) -> bool:
        return bool(self.dice.random() < 0.7)

    def num_nodes(self, tree: Tree) -> int:
        return int(self.dice.integers(0, len(tree.tokens) + 1))


# ---------------------------------------------------------------------------------------------- match: the same text


@every_method
@every_sampling
@pytest.mark.unchecked
def test_a_method_writes_the_text_of_plain(method: str, sampling: Sampling):
    assert write(method, sampling=sampling).tokens == plain_text(sampling)


@every_method
@greedy_and_sampled
@pytest.mark.unchecked
def test_a_controller_cannot_change_the_text(method: str, sampling: Sampling):
    for seed in range(2):
        for controller in (
            Controller(adaptive=True),
            Controller(adaptive=True, call_cost=stairs()),
            Controller(max_draft_tokens=0),
            Controller(max_draft_tokens=1),
            Controller(max_draft_tokens=3, adaptive=True),
            Reckless(seed=seed),
            Reckless(max_draft_tokens=40, seed=seed + 100),
        ):
            written = write(method, seed=seed, sampling=sampling, controller=controller)
            assert written.tokens == plain_text(sampling, seed)
            assert written.networks["target"].max_draft_tokens <= controller.max_draft_tokens


@every_method
@greedy_and_sampled
@pytest.mark.unchecked
def test_a_length_limit_may_fall_anywhere(method: str, sampling: Sampling):
    plain = plain_text(sampling)
    for length in (0, 1, 2, 3, 5, 8, LENGTH - 1):
        assert write(method, length, sampling=sampling).tokens == plain[:length]


@every_method
@greedy_and_sampled
@pytest.mark.unchecked
def test_a_text_may_end_anywhere(method: str, sampling: Sampling):
    plain = plain_text(sampling)
    for end in (1, 2, 3, 5, 8, LENGTH):

        def stop(canvas, tokens, end=end) -> int | None:
            return end - canvas.num_decided if canvas.num_decided + len(tokens) >= end else None

        assert write(method, sampling=sampling, stop=stop).tokens == plain[:end]


@every_method
@greedy_and_sampled
@pytest.mark.unchecked
def test_a_text_ends_with_its_end_token(method: str, sampling: Sampling):
    plain = plain_text(sampling)
    for token in range(6):

        def stop(canvas, tokens, token=token) -> int | None:
            places = np.flatnonzero(tokens == token)
            return int(places[0]) + 1 if len(places) else None

        expected = plain[: plain.index(token) + 1] if token in plain else plain
        assert write(method, sampling=sampling, stop=stop).tokens == expected


@every_method
@greedy_and_sampled
def test_a_text_is_the_same_in_a_batch_that_others_join_and_leave(method: str, sampling: Sampling):
    target = toy_network(logit_scale=1.5)
    made = [
        toy_decoding(
            method, PROMPT[i % 4 :], 5 + 4 * i, target=target, seed=i, sampling=sampling, controller=controller
        )
        for i, controller in enumerate([None, Controller(adaptive=True), None, Reckless(seed=3), None, Reckless()])
    ]
    sequences, later = [one.sequence for one in made[:2]], [one.sequence for one in made[2:]]
    for _ in run_batch(sequences, made[0].networks):
        if later:
            sequences.append(later.pop(0))
    assert not later
    for i, one in enumerate(made):
        alone = toy_decoding(
            "plain", PROMPT[i % 4 :], 5 + 4 * i, target=toy_network(logit_scale=1.5), seed=i, sampling=sampling
        ).run()
        assert one.tokens == alone.tokens
    assert target.calls < sum(len(one.steps) for one in made), "texts shared calls"


@every_method
@pytest.mark.unchecked
def test_texts_differ_by_seed(method: str):
    texts = {tuple(write(method, seed=seed, sampling=Sampling(temperature=1.0)).tokens) for seed in range(3)}
    assert len(texts) == 3


# ----------------------------------------------------------------------------------- calls, and what leaves the loop


@every_method
@greedy_and_sampled
@pytest.mark.parametrize("rule", [match, reject])
def test_a_call_of_the_target_decides_at_least_one_token(method: str, sampling: Sampling, rule):
    written = write(method, sampling=sampling, rule=rule)
    assert written.networks["target"].calls == len(written.steps) <= LENGTH == len(written.tokens)
    assert all(len(step.tokens) >= 1 for step in written.steps)


@every_method
@greedy_and_sampled
@pytest.mark.parametrize("rule", [match, reject])
def test_nothing_unverified_leaves(method: str, sampling: Sampling, rule):
    """Each step hands out the accepted path and one token that the target's law after it supports."""
    for step in write(method, sampling=sampling, rule=rule).steps:
        path = step.inputs.path_tokens(step.last_node)
        assert step.tokens.tolist()[:-1] == path
        distributions = TargetDistributions(step.inputs, step.outputs, sampling, step.distributions.noise)
        for node, token in zip([-1, *step.inputs.matching_nodes(path)], step.tokens.tolist(), strict=True):
            assert probability(token, distributions[node]) > 0
            if rule is match:
                assert token == distributions.pick(node)


@every_method
def test_a_refused_draft_is_not_kept_in_the_text(method: str):
    """The toys compare each canvas with the last one that they were shown; here they are shown to do so."""
    written = write(method, sampling=Sampling(temperature=1.0))
    canvas = written.steps[-1].canvas
    tampered = canvas.tokens.copy()
    tampered[len(PROMPT)] += 1
    kv_cache = written.sequence.kv_caches["target"]
    with pytest.raises(AssertionError, match="decided text never changes"):
        written.networks["target"].check(
            ForwardInputs(type(canvas)(tampered % 6, canvas.order, canvas.num_decided)), kv_cache
        )


# ------------------------------------------------------------------------------------------ reject: the law of the text

TEXTS = 1000
VOCAB, SHORT, PROMPT_3 = 3, 4, [0, 1, 2, 0, 1, 2, 0, 1]  # 81 texts
DISTANCE = 0.12  # Σ (q − p)² / p between the law of a wrong rule and the right one that must not go unseen


def small_toy() -> ToyNetwork:
    return toy_network(vocab=VOCAB, logit_scale=1.2, seed=8)


def test_the_test_of_laws_has_power():
    """At 1 in 10,000 false alarms, what is DISTANCE away is found in 99 of 100 runs."""
    law = text_probabilities(small_toy(), PROMPT_3, SHORT, Sampling(temperature=1.0))
    assert chance_of_a_miss(DISTANCE, TEXTS, cells(law, TEXTS).max() + 1) < 0.01


def is_law_kept(method: str, sampling: Sampling | None = None, **settings) -> bool:
    """By the texts that a method writes, whose law is that of the toy."""
    sampling = sampling or Sampling(temperature=1.0)
    settings = {"rule": reject, "error": 1.5} | settings
    controller, target = settings.pop("controller", None), small_toy()

    def write_text(seed: int) -> int:
        made = controller(seed) if controller else None
        written = toy_decoding(
            method, PROMPT_3, SHORT, target=target, seed=seed, sampling=sampling, controller=made, **settings
        ).run()
        return int("".join(map(str, written.tokens)), VOCAB)

    return keeps_law(write_text, text_probabilities(target, PROMPT_3, SHORT, sampling), TEXTS)


@pytest.mark.slow
@pytest.mark.parametrize("method", [*available_methods(), "jacobi+lookup+small_model"])
@pytest.mark.unchecked
def test_reject_keeps_the_law(method: str):
    assert is_law_kept(method)


@pytest.mark.slow
@pytest.mark.unchecked
def test_reject_keeps_the_law_of_a_truncated_sampling():
    assert is_law_kept("jacobi+lookup+small_model", Sampling(temperature=1.5, top_k=2))


def jump() -> CallCost:
    """One node is not worth its call, more of them may be."""
    return CallCost({1: 1.0, 2: 2.0, 3: 2.01, 4: 2.02})


@pytest.mark.slow
@pytest.mark.unchecked
@pytest.mark.parametrize("method", ["small_model+lookup", "jacobi"])
def test_reject_keeps_the_law_under_a_controller(method: str):
    acceptance = Controller().acceptance

    def controller(seed: int) -> Controller:
        return Controller(max_draft_tokens=3, adaptive=True, call_cost=jump(), acceptance=acceptance)

    assert is_law_kept(method, controller=controller, error=2.5)


@pytest.mark.slow
@pytest.mark.unchecked
def test_looking_ahead_before_dropping_drafts_is_caught():
    """The best size of all is right for `match`; it drops a draft for the chances of what would come after it."""

    @dataclass
    class Farsighted(Controller):
        def num_nodes(self, tree: Tree) -> int:
            rates = [
                (1 + sum(tree.expected_tokens[:n])) / self.call_cost.seconds_for(n + 1)
                for n in range(len(tree.expected_tokens) + 1)
            ]
            return int(np.argmax(rates))

    def controller(seed: int) -> Controller:
        return Farsighted(max_draft_tokens=3, adaptive=True, call_cost=jump())

    options = {"small_model": {"min_probability": 0.0}}
    assert not is_law_kept("small_model", controller=controller, options=options, error=2.5)


@pytest.mark.slow
@pytest.mark.unchecked
@pytest.mark.parametrize("coupling", ["probability", "token-order", "gumbel"])
def test_match_keeps_the_law(coupling: str):
    sampling = Sampling(temperature=1.0, coupling=coupling)
    assert is_law_kept("jacobi+lookup+small_model", sampling, rule=match)


def without_residual(inputs: ForwardInputs, distributions: TargetDistributions) -> tuple[np.ndarray, int]:
    """Wrong: after a rejection, sample from P again instead of what is left of it."""
    return _wrong(inputs, distributions, lambda target, draft: target)


def draft_of_another_law(inputs: ForwardInputs, distributions: TargetDistributions) -> tuple[np.ndarray, int]:
    """Wrong: take each draft for one that any token was as likely to be."""
    flat = (Distribution(None, np.ones(VOCAB)),) * len(inputs.draft_distributions or ())
    return reject(replace(inputs, draft_distributions=flat or None), distributions)


def accept_too_much(inputs: ForwardInputs, distributions: TargetDistributions) -> tuple[np.ndarray, int]:
    """Wrong: a tolerance in the acceptance test."""
    return _wrong(inputs, distributions, None, slack=1.2)


def _wrong(
    inputs: ForwardInputs, distributions: TargetDistributions, left, slack: float = 1.0
) -> tuple[np.ndarray, int]:
    node, tokens = -1, []
    for position in inputs.canvas.open_positions:
        target = distributions[node]
        for sibling, child in enumerate(inputs.children(node)):
            token = inputs.tokens[child]
            draft: Distribution = (
                inputs.draft_distributions[child] if inputs.draft_distributions else None
            ) or one_hot(token)
            u = distributions.noise.uniforms(f"accept/{sibling}", [position])[0]
            if u * probability(token, draft) < slack * probability(token, target):
                tokens.append(token)
                node = child
                break
            target = (left or residual)(target, draft)
        else:
            tokens.append(pick_token(target, distributions.noise, "text", position))
            break
    return np.array(tokens, dtype=np.int64), node


@pytest.mark.slow
@pytest.mark.parametrize("rule", [without_residual, draft_of_another_law, accept_too_much])
@pytest.mark.unchecked
def test_a_wrong_rule_is_caught(rule, monkeypatch):
    """The faults are about uniforms, so under a coupling that has them. Drafts are drawn as for `reject`."""
    monkeypatch.setattr(autoregressive, "reject", rule)
    assert not is_law_kept("small_model", Sampling(temperature=1.0, coupling="probability"), rule=rule)


@pytest.mark.slow
@pytest.mark.unchecked
def test_dropping_drafts_for_their_token_is_caught():
    @dataclass
    class Choosy(Controller):
        def num_nodes(self, tree: Tree) -> int:
            return next((i for i, token in enumerate(tree.tokens) if token == 0), len(tree.tokens))

    assert not is_law_kept("small_model", controller=lambda seed: Choosy())


@pytest.mark.slow
@pytest.mark.unchecked
def test_drafting_with_the_uniforms_of_the_text_is_caught():
    """Picks by the text's uniforms are right for `match`; judged by `reject`, which uses them, they bend the law."""
    made = testing.make_methods

    def for_match(spec, options):
        method = made(spec, options)[0]
        object.__setattr__(
            method, "drafter", lambda noise, sampling, rule: type(method)().drafter(noise, sampling, match)
        )
        return [method]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(testing, "make_methods", for_match)
        assert not is_law_kept("small_model", Sampling(temperature=1.0, coupling="probability"))


def test_an_unknown_network_is_named_instead_of_awaited():
    def lost():
        yield ForwardInputs(continuation([1], 2), network_name="smal")

    with pytest.raises(ValueError, match="a network 'smal', but there are target"):
        run(lost(), {"target": toy_network()})
