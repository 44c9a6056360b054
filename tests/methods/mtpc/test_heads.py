"""Heads: what they say is the circuit's law, drafts from it keep the text's, and how they begin."""

import itertools
import json
import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from test_contract import PROMPT_3, SHORT, TEXTS, VOCAB, small_toy
from transformers import set_seed

import saltus
from reference_circuits import log_probability
from saltus.core.canvas import continuation
from saltus.core.distributions import TargetDistributions
from saltus.core.forward import NO_TOKEN, ForwardInputs, NodeKind
from saltus.core.noise import Noise
from saltus.core.picking import probabilities
from saltus.core.rules import match, reject
from saltus.core.sampling import Sampling
from saltus.engine.target_drafters import load_drafter_for_target
from saltus.methods.mtpc.drafter import Mtpc
from saltus.methods.mtpc.drawn_window import DrawnWindow
from saltus.methods.mtpc.files import load_heads
from saltus.methods.mtpc.gpu_heads import GraphedHeads
from saltus.methods.mtpc.heads import HeadModel, HeadShape, new_head_model
from saltus.methods.mtpc.network import HeadNetwork
from saltus.methods.shared import autoregressive, row_candidates
from saltus.methods.shared.drafter_files import METADATA_FILE, WEIGHTS_FILES, save_drafter
from saltus.methods.shared.query_chains import with_query_chains
from saltus.models.causal import CausalNetwork
from saltus.testing import ToyNetwork, text_probabilities, toy_decoding, toy_network
from saltus.training.data.seeded_generator import seeded_generator
from sampled_laws import keeps_law
from tiny_models import tiny_llama

KINDS = ("ff", "cp", "hmm", "btree")
each_kind = pytest.mark.parametrize("kind", KINDS)
SAMPLED = Sampling(temperature=1.0)


def heads(
    kind: str = "btree",
    vocab: int = 6,
    tokens: list[int] | None = None,
    seed: int = 0,
    hidden: int = 8,
    **settings: Any,
) -> HeadModel:
    """Heads with random weights, for a vocabulary of random embeddings."""
    dice = seeded_generator(seed, "heads")
    embeddings, unembedding = (torch.from_numpy(dice.normal(size=(vocab, hidden))).float() for _ in range(2))
    drafted = torch.arange(vocab) if tokens is None else torch.tensor(tokens)
    shape = HeadShape(**{"hidden": hidden, "circuit": kind, "window": 4, "rank": 3, "subspace_dim": 5} | settings)
    model = HeadModel(shape, drafted, embeddings, unembedding)
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(torch.from_numpy(dice.normal(0, 0.8, tuple(weight.shape))))
    return model.eval()


def ask(text: list[int], state: torch.Tensor | None = None) -> ForwardInputs:
    return ForwardInputs(continuation(np.array(text), 9), network_name="mtpc", hidden_states=state)


def all_laws(model: HeadModel, found: Any) -> torch.Tensor:
    """[*batch, window, rank, draft]"""
    return torch.stack([model.log_probabilities(found, place) for place in range(model.shape.window)], -3)


def table(model: HeadModel, state: torch.Tensor, last: int) -> dict[tuple[int, ...], float]:
    """The probability of every window, from the parameters by definition of the circuit."""
    circuit = model.shape.circuit_structure
    with torch.no_grad():
        found = model(state, torch.tensor(last))
        distributions = all_laws(model, found)
        windows = list(itertools.product(range(distributions.shape[-1]), repeat=circuit.window))
        leaves = torch.stack([distributions[torch.arange(circuit.window), :, list(window)] for window in windows])
        start, steps = (part.expand(len(windows), *part.shape) for part in (found.initial, found.transitions))
        values = log_probability(circuit, start, steps, leaves).exp()
    return {tuple(int(model.tokens[place]) for place in window): float(value)
            for window, value in zip(windows, values, strict=True)}  # fmt: skip


@each_kind
@pytest.mark.parametrize("untied", [False, True], ids=["shared", "untied"])
@pytest.mark.parametrize("told", [True, False], ids=["told", "known"])
def test_it_says_the_law_of_the_next_token_given_the_window_s_tokens_so_far(kind, told, untied):
    model, state = (
        heads(kind, embeds_last_token=told, untied_unembedding=untied, vocab=4),
        torch.randn(8, generator=torch.Generator().manual_seed(0)),
    )
    known = table(model, state, 2)
    assert sum(known.values()) == pytest.approx(1, abs=1e-5)
    network = HeadNetwork(model, None)
    kv_cache, drafts = network.new_kv_cache(), [1, 3, 0]
    begun = [] if told else [2]  # where the window begins with the text's last token
    for count in range(model.shape.num_draft_tokens):
        outputs = network.forward([ask([3, 2, *drafts[:count]], state[None] if not count else None)], [kv_cache])[0]
        before = (*begun, *drafts[:count])
        weights = np.zeros(4)
        for window, value in known.items():
            if window[: len(before)] == before:
                weights[window[len(before)]] += value
        assert outputs.logits[0].exp().numpy() == pytest.approx(weights / weights.sum(), abs=1e-5)
    over = network.forward([ask([3, 2, *drafts, 1])], [kv_cache])[0]
    assert over.logits.shape == (0, 4), "behind the window nothing is known"


def test_what_is_asked_in_another_order_is_answered_alike():
    """There is no hidden state: a memory only saves work."""
    network, state = HeadNetwork(heads(), None), torch.ones(1, 8)
    kv_cache = network.new_kv_cache()
    inputs = [[5], [5, 1], [5, 1, 2], [5, 3], [5, 1, 2], [5, 3, 3], [5]]
    first = network.forward([ask(inputs[0], state)], [kv_cache])[0]
    found = [first, *(network.forward([ask(text)], [kv_cache])[0] for text in inputs[1:])]
    for text, outputs in zip(inputs, found, strict=True):
        fresh = network.new_kv_cache()
        network.forward([ask([5], state)], [fresh])
        torch.testing.assert_close(network.forward([ask(text)], [fresh])[0].logits, outputs.logits)


def test_of_few_tokens_only_those_are_drafted_and_others_tell_nothing():
    network, state = HeadNetwork(heads(tokens=[1, 4, 5]), None), torch.ones(1, 8)
    kv_cache = network.new_kv_cache()
    outputs = network.forward([ask([0], state)], [kv_cache])[0]
    assert outputs.token_ids is not None
    assert outputs.token_ids.tolist() == [1, 4, 5]
    unknown = network.forward([ask([0, 3])], [kv_cache])[0].logits.exp()
    first = outputs.logits[0].exp()
    mean = sum(float(weight) * network.forward([ask([0, token])], [kv_cache])[0].logits.exp()
               for weight, token in zip(first, [1, 4, 5], strict=True))  # fmt: skip
    torch.testing.assert_close(unknown, mean)


@pytest.mark.parametrize("kind", ["ff", "cp"])
def test_of_many_tokens_the_likeliest_of_a_position_are_drafted_and_others_tell_nothing(kind, monkeypatch):
    monkeypatch.setattr("saltus.methods.mtpc.network.MAX_CANDIDATE_TOKENS", 3)
    model, state = heads(kind), torch.ones(1, 8)
    network = HeadNetwork(model, None)
    kv_cache = network.new_kv_cache()
    outputs = network.forward([ask([0], state)], [kv_cache])[0]
    with torch.no_grad():
        found = model(state[0], torch.tensor(0))
        shared = model.shared_logits(found.position_features)[0]
        kept = shared.topk(3 if kind == "cp" else 6).indices.sort().values  # one state needs no such saving
        distributions = model.log_probabilities(found, 0)[:, kept].exp()
        distribution = found.initial.exp() @ (distributions / distributions.sum(-1, keepdim=True))
    assert outputs.token_ids is not None
    assert outputs.token_ids.tolist() == kept.tolist()
    torch.testing.assert_close(outputs.logits[0].exp(), distribution)
    if kind == "cp":
        other = next(token for token in range(6) if token not in kept)
        unknown = network.forward([ask([0, other])], [kv_cache])[0]
        expected = found.initial.exp() @ kv_cache.distributions[1][1]
        torch.testing.assert_close(unknown.logits[0].exp(), expected)


@each_kind
@pytest.mark.parametrize(
    "settings", [{}, {"embeds_last_token": False}, {"untied_unembedding": True}, {"tokens": [0, 2, 5]}]
)
def test_each_path_has_the_conditionals_that_one_token_after_another_gives(kind, settings, monkeypatch):
    """All paths of a window from one call, against the circuit observed token by token."""
    monkeypatch.setattr(row_candidates, "MAX_GAP", 1e4)  # no token is too unlikely
    network, text, state = HeadNetwork(heads(kind, **settings), None), [3, 2], torch.ones(1, 8)
    kv_cache, count = network.new_kv_cache(), 3
    queries = with_query_chains(ask(text, state), [(-1, [math.nan] * count)], 0.0)
    predictions = network.forward([queries], [kv_cache])[0].predictions
    assert predictions.num_positions == count
    for path in itertools.product(network.tokens.tolist(), repeat=count - 1):
        kv_cache = network.new_kv_cache()
        outputs = network.forward([ask(text, state)], [kv_cache])[0]
        for position in range(count):
            expected = dict(zip(outputs.token_ids.tolist(), outputs.logits[0].exp().tolist(), strict=True))
            ids, logits, rest = predictions.candidates(position, [*text, *path[:position]])
            assert dict(zip(ids.tolist(), np.exp(logits).tolist(), strict=True)) == pytest.approx(expected, abs=1e-5)
            assert rest == pytest.approx(0, abs=1e-5)
            outputs = network.forward([ask([*text, *path[: position + 1]])], [kv_cache])[0]


# -------------------------------------------------------------------------------------------------- the law of the text


def is_law_kept(target: ToyNetwork, model: HeadModel, sampling: Sampling, rule: Any = reject, **options: Any) -> bool:
    """By what is written with heads on a toy."""
    network = HeadNetwork(model, target)

    def write_text(seed: int) -> int:
        written = toy_decoding(
            "mtpc", PROMPT_3, SHORT, target=target, seed=seed, sampling=sampling, rule=rule,
            extra_networks={"mtpc": network}, options={"mtpc": {"min_probability": 0.0} | options},
        ).run()  # fmt: skip
        return int("".join(map(str, written.tokens)), VOCAB)

    return keeps_law(write_text, text_probabilities(target, PROMPT_3, SHORT, sampling), TEXTS)


def small_heads(kind: str, **settings: Any) -> HeadModel:
    chosen: dict[str, Any] = {"vocab": VOCAB, "hidden": 1, "window": 3, "rank": 2} | settings
    return heads(kind, **chosen)


@pytest.mark.slow
@pytest.mark.unchecked
def test_reject_keeps_the_law():
    assert is_law_kept(small_toy(), small_heads("hmm"), SAMPLED)


def drawn(network: HeadNetwork, state: torch.Tensor, uniforms: Any, temperature: float = 1.0) -> DrawnWindow:
    """A window drawn after the text [3, 2]."""
    inputs = replace(
        ask([3, 2], state[None]), tokens=(NO_TOKEN,) * len(uniforms), parents=tuple(range(-1, len(uniforms) - 1)),
        kinds=(NodeKind.UNIFORM_QUERY,) * len(uniforms), uniforms=tuple(uniforms), temperature=temperature,
    )  # fmt: skip
    return network.forward([inputs], [network.new_kv_cache()])[0].window


@pytest.mark.parametrize(
    ("kind", "told", "length"), [*itertools.product(KINDS, (True, False), (9,)), ("btree", True, 1), ("hmm", False, 1)]
)
@pytest.mark.unchecked
def test_a_drawn_window_follows_the_joint_law_given_what_is_decided(kind, told, length):
    """Enumerated: windows come as often as the circuit says, given the verifier's own token."""
    model, state = (
        heads(kind, embeds_last_token=told, vocab=4),
        torch.randn(8, generator=torch.Generator().manual_seed(0)),
    )
    with torch.no_grad():
        for weight in model.parameters():
            weight *= 0.4  # so that no window has nearly all of the probability
    network, begun = HeadNetwork(model, None), () if told else (2,)
    length = min(length, model.shape.num_draft_tokens)
    due: dict[tuple[int, ...], float] = {}
    for window, value in table(model, state, 2).items():
        if window[: len(begun)] == begun:
            part = window[len(begun) :][:length]
            due[part] = due.get(part, 0.0) + value
    weights, places = np.array([*due.values()]) / sum(due.values()), {window: place for place, window in enumerate(due)}
    rows = np.random.default_rng(length).random((800, length))
    assert keeps_law(lambda draw: places[tuple(drawn(network, state, rows[draw]).tokens)], weights, len(rows))


@each_kind
@pytest.mark.parametrize("told", [True, False], ids=["told", "known"])
@pytest.mark.parametrize("untied", [False, True], ids=["shared", "untied"])
def test_a_drawn_windows_distributions_are_those_of_drafting_token_by_token(kind, told, untied, monkeypatch):
    """Given the same tokens; also where positions draft likely tokens of their own."""
    model, state = (
        heads(kind, embeds_last_token=told, untied_unembedding=untied, vocab=4),
        torch.randn(8, generator=torch.Generator().manual_seed(3)),
    )
    monkeypatch.setattr("saltus.methods.mtpc.network.MAX_CANDIDATE_TOKENS", 3)
    network = HeadNetwork(model, None)
    window, kv_cache = drawn(network, state, [0.3, 0.9, 0.6, 0.1]), network.new_kv_cache()
    assert len(window.tokens) == model.shape.num_draft_tokens
    for count, found in enumerate(window.distributions):
        text = [3, 2, *window.tokens[:count]]
        outputs = network.forward([ask(text, None if count else state[None])], [kv_cache])[0]
        expected = np.zeros(4)
        expected[outputs.token_ids.numpy()] = outputs.logits[0].exp().numpy()
        assert probabilities(found, 4) == pytest.approx(expected / expected.sum(), abs=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "settings", "sampling"),
    [
        ("cp", {"embeds_last_token": False}, Sampling(0.7)),
        ("btree", {"tokens": [0, 2]}, Sampling(1.4)),
    ],
)
@pytest.mark.unchecked
def test_reject_keeps_the_law_where_windows_are_drawn_at_once(kind, settings, sampling):
    assert is_law_kept(small_toy(), small_heads(kind, **settings), sampling, draw="window")


def test_truncated_samplings_and_match_draft_token_by_token():
    target, network = toy_network(logit_scale=1.0), HeadNetwork(heads("btree", hidden=1), toy_network(logit_scale=1.0))
    for sampling, rule in ((Sampling(1.0, top_k=3), reject), (Sampling(), reject), (SAMPLED, match)):
        texts = [
            toy_decoding("mtpc", [1, 2, 3], 20, target=target, sampling=sampling, rule=rule,
                         extra_networks={"mtpc": network}, options={"mtpc": {"draw": draw}}).run().tokens
            for draw in ("tokens", "window")
        ]  # fmt: skip
        assert texts[0] == texts[1]


@pytest.mark.slow
@pytest.mark.unchecked
def test_reject_keeps_the_law_where_positions_have_likely_tokens_of_their_own(monkeypatch):
    monkeypatch.setattr("saltus.methods.mtpc.network.MAX_CANDIDATE_TOKENS", 2)
    assert is_law_kept(small_toy(), small_heads("btree"), SAMPLED)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "settings", "sampling"),
    [
        ("hmm", {"embeds_last_token": False}, Sampling(1.5, top_k=2)),
        ("btree", {"tokens": [0, 2]}, Sampling(1.0, top_p=0.7)),
        ("cp", {"embeds_last_token": False, "tokens": [1, 2]}, Sampling(0.8, banned=(1,))),
        ("btree", {"untied_unembedding": True}, Sampling(1.0, top_k=2)),
    ],
)
@pytest.mark.unchecked
def test_reject_keeps_the_law_of_truncated_samplings_with_few_tokens_and_with_known_ones(kind, settings, sampling):
    assert is_law_kept(small_toy(), small_heads(kind, **settings), sampling)


SHAPES = [{}, {"embeds_last_token": False}, {"tokens": [0, 2, 5]}, {"window": 3}, {"homogeneous": True}]
SAMPLINGS = [Sampling(), SAMPLED, Sampling(0.7, top_k=4, repetition_penalty=1.2)]


@pytest.mark.parametrize(
    ("kind", "sampling", "settings"),
    [(*pair, SHAPES[i % len(SHAPES)]) for i, pair in enumerate(itertools.product(KINDS, SAMPLINGS))],
)
def test_under_match_and_greedily_the_text_is_that_of_plain(kind, sampling, settings):
    target, prompt = toy_network(logit_scale=1.0), [1, 2, 3, 4]
    plain = toy_decoding("plain", prompt, 40, target=target, sampling=sampling).run()
    network = HeadNetwork(heads(kind, hidden=1, **settings), target)
    made = toy_decoding("mtpc", prompt, 40, target=target, sampling=sampling, extra_networks={"mtpc": network})
    assert made.run().tokens == plain.tokens
    assert any(step.inputs.tokens for step in made.steps), "it drafts"


def test_windows_of_several_texts_begin_together_as_each_alone():
    target = toy_network()
    network = HeadNetwork(heads("hmm", hidden=1), target)
    batch = [
        ForwardInputs(continuation(text, 4), hidden_states=torch.full((1, 1), 0.1 * len(text)))
        for text in ([1], [2, 3], [4])
    ]
    kv_caches = [network.new_kv_cache() for _ in batch]
    together = network.forward(batch, kv_caches)
    for ask, found in zip(batch, together, strict=True):
        alone = network.forward([ask], [network.new_kv_cache()])[0]
        torch.testing.assert_close(found.logits, alone.logits)
    assert network.forward([], []) == []


@pytest.mark.parametrize("settings", [{"circuit": "ff"}, {}, {"untied_unembedding": True}, {"rank": 1}])
def test_runs_of_a_fixed_size_have_the_outputs_of_as_many_texts_as_there_are(settings):
    model = heads(**{"kind": settings.pop("circuit", "btree"), **settings})
    run = GraphedHeads(model, use_cuda_graphs=False)
    generator = torch.Generator().manual_seed(0)
    for texts in (3, 1, 5, 2):
        states, tokens = torch.randn(texts, 8, generator=generator), torch.randint(6, (texts,), generator=generator)
        outputs = run(states, tokens)
        with torch.inference_mode():
            expected = model.draft_outputs(states, tokens)
        for name in ("initial", "transitions", "logits", "codes"):
            torch.testing.assert_close(getattr(outputs, name), getattr(expected, name))
    assert sorted(run.inputs) == [1, 2, 4, 8]


def afresh(rule):
    """A rule with uniforms of its own for every step, so that a place may be decided twice."""

    def decide(inputs: ForwardInputs, distributions: TargetDistributions) -> tuple[np.ndarray, int]:
        noise = Noise(distributions.noise.seed + 100_003 * (1 + inputs.canvas.num_decided))
        return rule(inputs, TargetDistributions(inputs, distributions.outputs, distributions.sampling, noise))

    return decide


def shortcut(inputs: ForwardInputs, distributions: TargetDistributions) -> tuple[np.ndarray, int]:
    """The paper's (Alg. 2): behind accepted drafts the verifier's replacement is dropped, and drafted for again.

    So a token's chance is min(p, q) + (1 − Σ min(p, q)) · p in place of p.
    """
    tokens, node = reject(inputs, distributions)
    if len(tokens) > 1 and inputs.children(node):
        return tokens[:-1], inputs.parents[node]
    return tokens, node


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rule", "keeps"), [(afresh(reject), True), (afresh(shortcut), False)], ids=["ours", "paper's"]
)
@pytest.mark.unchecked
def test_dropping_the_verifier_s_token_would_change_the_law_and_keeping_it_does_not(rule, keeps, monkeypatch):
    p, q = torch.tensor([0.7, 0.2, 0.1]).log(), torch.tensor([0.1, 0.3, 0.6]).log()
    target, model = ToyNetwork(p.double().expand(3, 3, 3)), small_heads("ff")
    logits = torch.stack([p, q, q])  # the first draft is always accepted
    model.shared_logits = lambda features: logits.expand(*features.shape[:-1], 3)
    monkeypatch.setattr(autoregressive, "reject", rule)  # so that drafts are drawn from laws for it too
    assert is_law_kept(target, model, SAMPLED, rule) == keeps


# --------------------------------------------------------------------------------------------------------- in the house


@pytest.fixture(scope="module")
def target():
    return tiny_llama()


def begun(target, kind: str, **settings) -> HeadModel:
    shape = HeadShape(**{"hidden": 32, "circuit": kind, "window": 5, "rank": 4} | settings)
    return new_head_model(shape, torch.arange(3, 290), target, seeded_generator(0, "begun"))


def said(model: HeadModel, states: torch.Tensor, last: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Log-probabilities of windows, whose tokens are places among those drafted."""
    found = model(states, last)
    distributions = all_laws(model, found)
    leaves = distributions.gather(-1, tokens[..., None, None].expand(*distributions.shape[:-1], 1))[..., 0]
    return log_probability(model.shape.circuit_structure, found.initial, found.transitions, leaves)


def test_all_circuits_begin_as_the_independent_one_and_part_from_there(target):
    set_seed(1)
    states, last, tokens = torch.randn(7, 32), torch.randint(0, 280, (7,)), torch.randint(0, 280, (7, 5))
    alone = said(begun(target, "ff"), states, last, tokens)
    for kind, untied in itertools.product(("cp", "hmm", "btree"), (False, True)):
        model = begun(target, kind, untied_unembedding=untied)
        found = said(model, states, last, tokens)
        torch.testing.assert_close(found, alone, rtol=1e-4, atol=1e-4)
        found.sum().backward()
        learned = model.untied_unembedding if untied else model.codes.weight
        assert learned.grad is not None
        parts = learned.grad.view(5, 4, -1)
        assert (parts[:, 0] - parts[:, 1]).abs().max() > 0.01 * parts.abs().max(), "components learn different things"


@pytest.mark.parametrize("kind", ["hmm", "btree"])
def test_states_may_begin_without_favour(target, kind):
    model = begun(target, kind, self_transition_init=0.0)
    with torch.no_grad():
        model.sums.weight.zero_()
    found = model(torch.randn(32), torch.tensor(5))
    torch.testing.assert_close(found.transitions.exp(), torch.full_like(found.transitions, 1 / model.shape.rank))


class ManyBytes(torch.nn.Module):
    """What EvaByte has that others have not: one unembedding of eight heads, and norms that count from 1."""

    def __init__(self) -> None:
        super().__init__()
        dice = seeded_generator(0, "bytes")
        self.config = SimpleNamespace(norm_add_unit_offset=True)
        self.norm = torch.nn.RMSNorm(16)
        self.inputs, self.outputs = torch.nn.Embedding(320, 16), torch.nn.Linear(16, 8 * 320, bias=False)
        with torch.no_grad():
            for weight in self.parameters():
                weight.copy_(torch.from_numpy(dice.normal(0, 0.3, tuple(weight.shape))))

    get_input_embeddings = lambda self: self.inputs  # noqa: E731
    get_output_embeddings = lambda self: self.outputs  # noqa: E731
    get_decoder = lambda self: self  # noqa: E731


@pytest.mark.parametrize("told", [True, False], ids=["told", "known"])
def test_heads_of_a_target_that_says_several_bytes_itself_begin_as_its_own(told):
    target, state = ManyBytes(), torch.randn(16, generator=torch.Generator().manual_seed(0))
    tokens = torch.arange(64, 320)  # bytes: 64 special tokens stand before them
    shape = HeadShape(16, "cp", window=8 - told, rank=3, untied_unembedding=True, embeds_last_token=told)
    model = new_head_model(shape, tokens, target, seeded_generator(0, "begun"))
    with torch.no_grad():
        model.fuse.weight.zero_()[:, :16] += torch.eye(16)  # without the noise that it begins with
        found = model(state, torch.tensor(70))
        distributions = all_laws(model, found).logsumexp(-2) - math.log(3)
        normed = state / (state.square().mean() + 1e-5).sqrt() * (1 + target.norm.weight)
        expected = target.outputs(normed).view(8, 320)[told:, 64:].log_softmax(-1)
    torch.testing.assert_close(distributions, expected, rtol=1e-3, atol=1e-3)
    with pytest.raises(
        ValueError, match="the target predicts 8 tokens by matrices of their own; set untied_unembedding=true"
    ):
        new_head_model(replace(shape, untied_unembedding=False), tokens, target, seeded_generator(0, "begun"))


def test_saved_and_loaded_heads_draft_and_are_refused_elsewhere(tiny_folder, tmp_path):
    folder = tiny_folder()
    engine = saltus.load(str(folder), "plain")
    target = engine.network.model
    save_drafter("heads", begun(target, "hmm", subspace_dim=3), tmp_path, "tiny", target, {"steps": 0})
    made = saltus.load(
        str(folder), "mtpc", options={"mtpc": {"model": str(tmp_path), "min_probability": 0.0}}, adaptive=False
    )
    for temperature in (0.0, 0.7):
        given = {"max_new_tokens": 20, "temperature": temperature}
        found = made.generate("the cat", **given)
        assert found.tokens == engine.generate("the cat", **given).tokens
        assert found.statistics.nodes_per_call > 1
    other = CausalNetwork(tiny_llama(seed=3))
    with pytest.raises(
        ValueError, match=r"was trained for tiny \(.*\), not another \(.*\); train it again with saltus"
    ):
        load_drafter_for_target(f"heads:{tmp_path}", other, "another")
    with pytest.raises(ValueError, match=r"no trained heads for another; train your own \(saltus train mtpc"):
        load_drafter_for_target("heads:auto", other, "another")
    (tmp_path / WEIGHTS_FILES["heads"]).write_bytes(b"nothing")
    with pytest.raises(ValueError, match=r"is damaged .*train the heads again"):
        load_heads(tmp_path, target, "tiny")
    papers = json.loads((tmp_path / METADATA_FILE).read_text())
    (tmp_path / METADATA_FILE).write_text(json.dumps(papers | {"kind": "drafter"}))
    with pytest.raises(ValueError, match=r"holds no heads, but something else; give a folder that saltus train mtpc"):
        load_heads(tmp_path, target, "tiny")


def test_a_window_longer_than_trained_is_drafted_as_far_as_it_goes(tiny_folder, tiny_heads):
    heads = {"model": str(tiny_heads(window=2)), "top_k": 1}
    made = saltus.load(str(tiny_folder()), "mtpc", options={"mtpc": heads}, adaptive=False)
    steps = made.generate("the cat", max_new_tokens=20).calls
    assert max(step.num_draft_tokens for step in steps) == 2


@pytest.mark.parametrize(("settings", "cure"), [
    ({"rank": 0}, "rank is 0, but must be 1 or more"),
    ({"window": 0}, "window is 0, but must be 1 or more"),
    ({"subspace_dim": 0}, "subspace_dim is 0"),
    ({"circuit": "tensor"}, "circuit is 'tensor', but must be one of ff, cp, hmm, btree"),
    ({"window": 1, "embeds_last_token": False}, "its first token is known; take 2 or more"),
])  # fmt: skip
def test_a_shape_of_nothing_is_refused_in_a_line(settings, cure):
    with pytest.raises(ValueError, match=cure):
        replace(HeadShape(8), **settings)


@pytest.mark.parametrize(
    ("option", "value"),
    [("num_draft_tokens", 0), ("top_k", 0), ("min_probability", 1.0), ("min_probability", -0.5), ("draw", "all")],
)
def test_options_out_of_range_are_refused_in_a_line(option, value):
    with pytest.raises(ValueError, match=rf"^mtpc: {option} is {value!r}, but .*$"):
        Mtpc(**{option: value})


def test_more_tokens_are_drafted_right_where_laws_agree():
    """Heads that know the target's law: with the text's own uniforms they draft what it writes."""
    target = toy_network(logit_scale=2.0)
    perfect = toy_decoding("mtpc", [1, 2, 3], 41, target=target, sampling=SAMPLED, error=0.0, rule=match,
                      options={"mtpc": {"num_draft_tokens": 4, "min_probability": 0.0}}).run()  # fmt: skip
    assert [len(step.tokens) for step in perfect.steps] == [1, *[5] * 8]
