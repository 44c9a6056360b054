"""A small model as drafter: what it is asked, when it stops, and what its laws are used for."""

import numpy as np
import pytest

from saltus import testing
from saltus.core.control.controller import Controller
from saltus.core.picking import probabilities
from saltus.core.rules import match, reject
from saltus.core.sampling import Sampling
from saltus.methods.small_model import SmallModel
from saltus.testing import recording_noise, toy_decoding, toy_drafter, toy_network

PROMPT = [1, 2, 3]
SAMPLED = Sampling(temperature=1.0)


def write(length: int = 40, *, error: float = 0.5, sharp: float = 2.0, **settings):
    drafting = {"min_probability": 0.0, "num_draft_tokens": 5}
    options = {"small_model": {name: settings.pop(name, default) for name, default in drafting.items()}}
    return toy_decoding(
        "small_model", PROMPT, length, target=toy_network(logit_scale=sharp), error=error, options=options, **settings
    ).run()


@pytest.mark.parametrize("rule", [match, reject])
@pytest.mark.parametrize("sampling", [Sampling(), SAMPLED], ids=["greedy", "T=1"])
def test_a_perfect_drafter_is_always_right(rule, sampling: Sampling):
    """Five drafts and the target's own token a call, to the end of the text."""
    written = write(42, error=0.0, rule=rule, sampling=sampling, num_draft_tokens=5)
    assert [len(step.tokens) for step in written.steps] == [6] * 7


@pytest.mark.parametrize("rule", [match, reject])
def test_a_useless_drafter_still_leaves_a_token_a_call(rule):
    written = write(40, error=30.0, rule=rule, sampling=SAMPLED)
    assert len(written.tokens) == 40
    assert len(written.steps) > 25


def test_the_drafter_writes_with_the_uniforms_of_the_text():
    """Under match a drafter's branch is what it would write itself with the same seed."""
    written = write(30, error=0.7, sampling=SAMPLED, num_draft_tokens=4, seed=5)
    for step in written.steps[:5]:
        own = toy_drafter(toy_network(), 0.7)
        own.name, own.allows_rewrites = "target", False
        text = step.canvas.decided_prefix.tolist()
        count = len(step.inputs.tokens)
        alone = toy_decoding("plain", text, count, target=own, seed=5, sampling=SAMPLED).run()
        assert list(step.inputs.tokens) == alone.tokens


@pytest.mark.slow
def test_more_tokens_are_right_under_match_than_with_uniforms_of_its_own():
    """Coupling: the laws of drafter and target resemble each other, so equal uniforms often pick equal tokens."""

    def calls(**settings) -> int:
        return sum(len(write(40, sampling=SAMPLED, seed=seed, **settings).steps) for seed in range(10))

    class Uncoupled(SmallModel):
        def drafter(self, noise, sampling, rule):
            return super().drafter(type(noise)(noise.seed + 1000), sampling, rule)

    coupled = calls()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(testing, "make_methods", lambda spec, options: [Uncoupled(**options["small_model"])])
        assert calls() > 1.2 * coupled


def test_reject_is_told_the_law_of_each_draft():
    written = write(20, error=0.7, sampling=SAMPLED, rule=reject, num_draft_tokens=3)
    drafter = toy_drafter(toy_network(), 0.7)
    for step in written.steps:
        assert step.inputs.draft_distributions is None or len(step.inputs.draft_distributions) == len(
            step.inputs.tokens
        )
        for node, distribution in enumerate(step.inputs.draft_distributions or ()):
            before = [*step.canvas.decided_prefix.tolist(), *step.inputs.path_tokens(step.inputs.parents[node])]
            expected = drafter.logits[before[-2], before[-1]].softmax(-1).numpy()
            assert probabilities(distribution, 6) == pytest.approx(expected, abs=1e-6)
    assert any(step.inputs.draft_distributions for step in written.steps)


def test_under_reject_chances_do_not_depend_on_the_token_that_was_drawn():
    """They are the mass of the likeliest token, whichever was drawn."""
    drafter = toy_drafter(toy_network(), 0.5)
    probabilities: dict[tuple[int, int], set[float]] = {}

    class Watching(Controller):
        def num_nodes(self, tree) -> int:
            if tree.acceptance_probabilities:
                probabilities.setdefault((self.text[-2], self.text[-1]), set()).add(tree.acceptance_probabilities[0])
            return super().num_nodes(tree)

    for seed in range(8):
        controller = Watching(adaptive=False)
        controller.text = list(PROMPT)
        written = toy_decoding(
            "small_model", PROMPT, 10, target=toy_network(), sampling=SAMPLED, rule=reject, seed=seed,
            controller=controller,
            stop=lambda canvas, tokens, c=controller: c.text.extend(tokens.tolist()),
        ).run()  # fmt: skip
        assert len(written.tokens) == 10
    for pair, found in probabilities.items():
        assert len(found) == 1, pair
        assert found.pop() == pytest.approx(float(drafter.logits[pair].softmax(-1).max()))


def test_drafts_are_drawn_with_fresh_uniforms_in_each_step():
    """A uniform that a draft has used once is spent: what was decided since may know it."""
    used: list[tuple[str, int]] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(testing, "Noise", recording_noise(used))
        write(30, error=1.0, sampling=SAMPLED, rule=reject)
    assert len(set(used)) == len(used)


@pytest.mark.parametrize("coupling", ["probability", "token-order"])
def test_it_stops_drafting_where_a_draft_is_unlikely(coupling):
    sampling = Sampling(temperature=1.0, coupling=coupling)
    sure, unsure = (
        write(40, sharp=sharp, sampling=sampling, min_probability=0.5, num_draft_tokens=8) for sharp in (12.0, 0.3)
    )
    assert np.mean([len(step.inputs.tokens) for step in sure.steps]) > 4
    assert max(len(step.inputs.tokens) for step in unsure.steps) == 1


def test_with_gumbel_noise_it_drafts_as_far_as_its_best_value_is_clear_of_the_others():
    """An unlikely token may be a likely draft: its noise is the target's, too."""
    sampling = Sampling(temperature=1.0, coupling="gumbel")
    sure, unsure = (
        write(40, sharp=sharp, sampling=sampling, min_probability=0.5, num_draft_tokens=8) for sharp in (12.0, 0.3)
    )
    assert np.mean([len(step.inputs.tokens) for step in sure.steps]) > 4
    lengths = [len(step.inputs.tokens) for step in unsure.steps]
    assert 1 < np.mean(lengths) < 4
    assert np.mean([len(step.tokens) for step in unsure.steps]) > 1.5


def test_it_drafts_no_more_than_there_is_room():
    written = write(4, error=0.0, num_draft_tokens=8)
    assert [len(step.inputs.tokens) for step in written.steps] == [3]
    assert written.networks["small_model"].calls == 3


def test_the_drafter_reads_no_decided_token_twice():
    """Its memory keeps the drafts that were right."""
    written = write(42, error=0.0, num_draft_tokens=5)
    drafter = written.networks["small_model"]
    assert drafter.calls == 5 * 7
    assert drafter.context_tokens_read == len(PROMPT) + 42 - 2, (
        "not the last two: the last draft, and the target's own token"
    )


def test_greedy_chances_are_the_models_own_probabilities():
    class Watching(Controller):
        def num_nodes(self, tree) -> int:
            seen.extend(tree.acceptance_probabilities)
            return super().num_nodes(tree)

    seen: list[float] = []
    write(20, controller=Watching(adaptive=False))
    assert all(0 < chance < 1 for chance in seen)
    assert len(set(seen)) > 1


@pytest.mark.parametrize(
    ("option", "value"), [("num_draft_tokens", 0), ("min_probability", 1.0), ("min_probability", -0.5)]
)
def test_options_out_of_range_are_refused_in_a_line(option: str, value):
    with pytest.raises(ValueError, match=rf"^small_model: {option} is {value}, but .*$"):
        SmallModel(**{option: value})
