"""Circuits: every quantity against the sum over all tokens and states, which small vocabularies allow."""

import itertools
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import reference_circuits
from reference_circuits import (
    levels,
    log_probability,
    most_probable_states,
    sample_states,
    scopes,
    state_posteriors,
    token_losses,
)
from saltus.methods.mtpc.circuits import (
    Circuit,
    CircuitFilter,
    chain_circuit,
    independent_circuit,
    mixture_circuit,
    tree_circuit,
)
from saltus.training.data.seeded_generator import seeded_generator

VOCAB = 3
BATCH = 2
SHAPES = [
    independent_circuit(1), independent_circuit(4), mixture_circuit(1, 3), mixture_circuit(4, 2),
    chain_circuit(1, 2), chain_circuit(2, 3), chain_circuit(4, 2),
    tree_circuit(1, 2), tree_circuit(2, 3), tree_circuit(3, 2), tree_circuit(4, 2), tree_circuit(5, 2),
]  # fmt: skip
shapes = pytest.mark.parametrize("circuit", SHAPES, ids=lambda one: f"{one.parents}-{one.position_latents}-{one.rank}")


def parameters(circuit: Circuit, seed: int = 0, batch: int = BATCH) -> tuple[Tensor, Tensor, Tensor]:
    """start, steps, and the laws of tokens [batch, window, rank, vocab], in float64."""
    generator, rank = seeded_generator(seed, "circuit"), circuit.rank
    sizes = (rank,), (circuit.num_latents - 1, rank, rank), (circuit.window, rank, VOCAB)
    start, steps, distributions = (torch.from_numpy(generator.normal(0, 1.5, (batch, *size))) for size in sizes)
    return start.log_softmax(-1), steps.log_softmax(-1), distributions.log_softmax(-1)


def evidence(distributions: Tensor, tokens: tuple[int | None, ...]) -> Tensor:
    """Leaves of a window, some of whose tokens are known."""
    leaves = torch.zeros(distributions.shape[:-1], dtype=distributions.dtype)
    for place, token in enumerate(tokens):
        if token is not None:
            leaves[..., place, :] = distributions[..., place, :, token]
    return leaves


def joint(circuit: Circuit, start: Tensor, steps: Tensor, distributions: Tensor) -> dict[tuple, Tensor]:
    """The probability [batch] of all states of all latents with all tokens, by definition."""
    found = {}
    for states in itertools.product(range(circuit.rank), repeat=circuit.num_latents):
        log = start[:, states[0]]
        for latent in range(1, circuit.num_latents):
            log = log + steps[:, latent - 1, states[circuit.parents[latent]], states[latent]]
        for tokens in itertools.product(range(VOCAB), repeat=circuit.window):
            own = log
            for place, token in enumerate(tokens):
                own = own + distributions[:, place, states[circuit.position_latents[place]], token]
            found[states, tokens] = own.exp()
    return found


def agrees(tokens: tuple, known: tuple) -> bool:
    return all(wanted is None or token == wanted for token, wanted in zip(tokens, known, strict=True))


def windows(circuit: Circuit) -> list[tuple[int | None, ...]]:
    """All whole windows, and some with holes."""
    every = list(itertools.product((None, *range(VOCAB)), repeat=circuit.window))
    return [known for number, known in enumerate(every) if None not in known or number % 7 == 0]


@shapes
def test_probabilities_of_any_evidence_are_sums_over_states_and_unknown_tokens(circuit):
    start, steps, distributions = parameters(circuit)
    table = joint(circuit, start, steps, distributions)
    for known in windows(circuit):
        expected = sum(value for (_, tokens), value in table.items() if agrees(tokens, known))
        found = log_probability(circuit, start, steps, evidence(distributions, known)).exp()
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=0)


@shapes
def test_it_is_normalised_smooth_and_decomposable(circuit):
    start, steps, distributions = parameters(circuit)
    nothing = evidence(distributions, (None,) * circuit.window)
    torch.testing.assert_close(log_probability(circuit, start, steps, nothing), torch.zeros(BATCH).double())
    assert scopes(circuit)[0] == set(range(circuit.window)), "all of the window is below the first latent"
    for latent in range(circuit.num_latents):
        parts = [scopes(circuit)[child] for child in circuit.children[latent]]
        parts += [{place} for place, holder in enumerate(circuit.position_latents) if holder == latent]
        assert sum(map(len, parts)) == len(scopes(circuit)[latent]), "factors of a product share no position"


@shapes
def test_the_law_of_any_token_given_any_others_is_the_mixture_of_its_states(circuit):
    start, steps, distributions = parameters(circuit)
    table = joint(circuit, start, steps, distributions)
    for known in windows(circuit):
        weights = state_posteriors(circuit, start, steps, evidence(distributions, known))
        torch.testing.assert_close(weights.exp().sum(-1), torch.ones(BATCH, circuit.window).double())
        for place in (place for place, token in enumerate(known) if token is None):
            found = (weights[:, place, :, None] + distributions[:, place]).logsumexp(-2).exp()
            expected = torch.stack([
                sum((value for (_, tokens), value in table.items() if agrees(tokens, known) and tokens[place] == token),
                    torch.zeros(()))
                for token in range(VOCAB)
            ], -1)  # fmt: skip
            torch.testing.assert_close(found, expected / expected.sum(-1, keepdim=True))


@shapes
def test_a_reader_of_arrays_expects_what_one_of_tensors_does(circuit):
    start, steps, distributions = (tensor[0] for tensor in parameters(circuit))
    leaves = evidence(distributions, (0, None, 2, 1, None)[: circuit.window])
    readers = CircuitFilter(circuit, start, steps), CircuitFilter(circuit, start.numpy(), steps.numpy())
    for leaf in leaves:
        torch.testing.assert_close(torch.from_numpy(readers[1].state_log_weights), readers[0].state_log_weights)
        readers[0].observe(leaf)
        readers[1].observe(leaf.numpy())


@shapes
def test_a_window_is_read_token_by_token(circuit):
    """What is expected before each token is its law given those before; what is told of it, by the chain rule."""
    start, steps, distributions = parameters(circuit)
    for known in itertools.product(range(VOCAB), repeat=circuit.window):
        leaves = evidence(distributions, known)
        reader = CircuitFilter(circuit, start, steps)
        for place in range(circuit.window):
            before = evidence(distributions, (*known[:place], *(None,) * (circuit.window - place)))
            torch.testing.assert_close(
                reader.state_log_weights, state_posteriors(circuit, start, steps, before)[:, place]
            )
            reader.observe(leaves[:, place])
        total = log_probability(circuit, start, steps, leaves)
        told = token_losses(circuit, start, steps, leaves)
        torch.testing.assert_close(-told.sum(-1), total)
        torch.testing.assert_close(-told[:, 0], log_probability(circuit,
            start, steps, evidence(distributions, (known[0], *(None,) * (circuit.window - 1)))
        ))  # fmt: skip


@shapes
def test_the_best_path_is_the_most_probable_of_all(circuit):
    start, steps, distributions = parameters(circuit)
    table = joint(circuit, start, steps, distributions)
    states, value = most_probable_states(circuit, start, steps, distributions.amax(-1))
    for row in range(BATCH):
        best = max(table, key=lambda path: float(table[path][row]))
        assert [best[0][holder] for holder in circuit.position_latents] == states[row].tolist()
        assert float(value[row].exp()) == pytest.approx(float(table[best][row]))
        chosen = distributions[row, torch.arange(circuit.window), states[row]].argmax(-1)
        assert tuple(chosen.tolist()) == best[1]


@shapes
def test_samples_follow_the_law_given_the_evidence(circuit):
    start, steps, distributions = (part[:1] for part in parameters(circuit))
    table = joint(circuit, start, steps, distributions)
    known = (1, *(None,) * (circuit.window - 1))
    count = 40_000
    uniforms = torch.from_numpy(seeded_generator(3, "uniforms").random((count, circuit.num_latents)))
    many = [part.expand(count, *part.shape[1:]) for part in (start, steps, evidence(distributions, known))]
    states = sample_states(circuit, *many, uniforms)
    expected: dict[tuple[int, ...], float] = {}
    for (latents, tokens), value in table.items():
        if agrees(tokens, known):
            own = tuple(latents[holder] for holder in circuit.position_latents)
            expected[own] = expected.get(own, 0.0) + float(value)
    total = sum(expected.values())
    for own, value in expected.items():
        share = value / total
        found = float((states == torch.tensor(own)).all(-1).double().mean())
        assert abs(found - share) < 5 * (share * (1 - share) / count) ** 0.5 + 1e-9


@pytest.mark.parametrize(
    ("circuit", "stages"), [(mixture_circuit(16, 2), 1), (tree_circuit(16, 2), 4), (chain_circuit(16, 2), 16)]
)
def test_a_window_is_drawn_in_a_stage_for_each_level(circuit, stages, monkeypatch):
    calls, drawn = [], reference_circuits._sample_states
    monkeypatch.setattr(reference_circuits, "_sample_states", lambda *given: calls.append(1) or drawn(*given))
    start, steps, distributions = parameters(circuit)
    uniforms = torch.from_numpy(seeded_generator(3, "uniforms").random((BATCH, circuit.num_latents)))
    sample_states(circuit, start, steps, evidence(distributions, (None,) * 16), uniforms)
    assert len(calls) == stages


@shapes
def test_gradients_are_those_of_finite_differences_and_of_posteriors(circuit):
    start, steps, distributions = parameters(circuit, batch=1)
    tokens = tuple(place % VOCAB for place in range(circuit.window))
    given_ = [part.clone().requires_grad_() for part in (start, steps, evidence(distributions, tokens))]
    assert torch.autograd.gradcheck(partial(log_probability, circuit), given_)
    log_probability(circuit, *given_).backward()
    posterior = state_posteriors(circuit, start, steps, evidence(distributions, tokens)).exp()
    torch.testing.assert_close(given_[2].grad, posterior)


@settings(max_examples=40)
@given(window=st.integers(1, 40))
def test_trees_of_any_window_halve_it_and_are_as_deep_as_its_logarithm(window):
    circuit = tree_circuit(window, 2)
    assert circuit.window == window
    assert circuit.num_latents == max(window - 1, 1)
    assert len(levels(circuit)) == max(0, (window - 1).bit_length() - 1)
    assert len(levels(chain_circuit(window, 2))) == window - 1
    for latent in range(1, circuit.num_latents):
        scope = sorted(scopes(circuit)[latent])
        assert scope == list(range(scope[0], scope[-1] + 1))


def test_equal_where_one_is_a_case_of_the_other():
    """A mixture of one is independent; a chain that never changes its state is a mixture, and so is such a tree."""
    distributions = parameters(mixture_circuit(4, 3))[2]
    start = parameters(mixture_circuit(4, 3))[0]
    leaves = evidence(distributions, (0, 2, 1, 1))
    stays = torch.eye(3).double().log().expand(BATCH, 3, 3, 3)
    expected = log_probability(mixture_circuit(4, 3), start, torch.zeros(BATCH, 0, 3, 3).double(), leaves)
    torch.testing.assert_close(log_probability(chain_circuit(4, 3), start, stays, leaves), expected)
    torch.testing.assert_close(log_probability(tree_circuit(4, 3), start, stays[:, :2], leaves), expected)
    alone = leaves[..., :1]
    one = log_probability(
        independent_circuit(4), torch.zeros(BATCH, 1).double(), torch.zeros(BATCH, 0, 1, 1).double(), alone
    )
    torch.testing.assert_close(one, alone.sum((-1, -2)))


@pytest.mark.parametrize(
    "circuit", [mixture_circuit(3, 2), chain_circuit(3, 2), tree_circuit(3, 2)], ids=["mixture", "chain", "tree"]
)
def test_tokens_that_some_states_cannot_write_rule_those_states_out(circuit):
    start, steps, distributions = parameters(circuit, batch=1)
    distributions[:, 0, 0, 1] = -torch.inf  # state 0 never writes token 1 at place 0
    weights = state_posteriors(circuit, start, steps, evidence(distributions, (1, None, None)))
    assert weights[0, 0].exp().tolist() == [0.0, 1.0]
    assert not weights.isnan().any()
    distributions[:, 0, 1, 1] = -torch.inf
    impossible = evidence(distributions, (1, None, None))
    assert log_probability(circuit, start, steps, impossible).exp().item() == 0
    uniforms = torch.full((1, circuit.num_latents), 0.5)
    for inputs in (
        lambda: state_posteriors(circuit, start, steps, impossible),
        lambda: sample_states(circuit, start, steps, impossible, uniforms),
        lambda: most_probable_states(circuit, start, steps, impossible),
        lambda: token_losses(circuit, start, steps, impossible),
    ):
        with pytest.raises(ValueError, match=r"evidence has probability 0.*give tokens"):
            inputs()


@pytest.mark.parametrize(
    "make", [lambda: mixture_circuit(4, 0), lambda: chain_circuit(3, -1), lambda: tree_circuit(4, 0)]
)
def test_a_rank_of_nothing_is_refused(make):
    with pytest.raises(ValueError, match=r"rank is .*, but must be 1 or more"):
        make()


def test_a_window_of_nothing_is_refused():
    for make in (lambda: mixture_circuit(0, 2), lambda: chain_circuit(0, 2), lambda: independent_circuit(0)):
        with pytest.raises(ValueError, match="window is 0, but must be 1 or more"):
            make()
