"""Any-subset networks and the method assd: holes anywhere, the cache, equal texts, and the law of `reject`."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch

from saltus.core.batch import run
from saltus.core.canvas import HOLE, Canvas, infilling
from saltus.core.control.controller import Controller
from saltus.core.forward import NO_TOKEN, ForwardInputs, ForwardOutputs
from saltus.core.noise import Noise
from saltus.core.picking import Distribution, one_hot, probabilities
from saltus.core.rules import Rule, match, reject
from saltus.core.sampling import Sampling, token_distribution
from saltus.core.speculate import speculate
from saltus.methods import make_methods
from saltus.methods.assd.hole_paths import with_kernel
from saltus.methods.assd.hole_predictions import AnySubsetOutputs, HoleLogits, HolePredictions
from saltus.methods.assd.network import AnySubsetNetwork
from saltus.methods.assd.xlnet import XlnetNetwork
from saltus.methods.shared.draft_tree import Chooser, Likeliest, SharedNoise, grown_nodes
from saltus.methods.shared.logit_correction import PairwiseCorrection, corrected_logits
from saltus.methods.shared.query_chains import with_query_chains
from saltus.training.data.seeded_generator import seeded_generator
from sampled_laws import keeps_law
from tiny_models import tiny_llama, tiny_xlnet

MASK = 2
SAMPLED = Sampling(temperature=1.0)


def tiny_network(seed: int = 0, dtype: torch.dtype = torch.float32, **changes) -> AnySubsetNetwork:
    return AnySubsetNetwork(tiny_llama(seed, any_subset={"mask": MASK}, **changes).to(dtype))


def random_correction(vocab: int = 300, scale: float = 1.0, hidden: int = 32, told: float = 0.1) -> PairwiseCorrection:
    """Of rank 2."""

    def table(name: str, *shape: int) -> np.ndarray:
        return seeded_generator(0, name).normal(size=shape).astype(np.float32)

    tables = {name: np.float32(scale) * table(name, vocab, 2) for name in ("left", "second_left", "right")}
    return PairwiseCorrection(**tables, gate=np.float32(told) * table("told", hidden, 3))


def text_with_holes(length: int = 40, holes: int = 25, seed: int = 0) -> Canvas:
    dice = np.random.default_rng(seed)
    tokens = dice.integers(3, 300, size=length)
    tokens[dice.permutation(length)[:holes]] = HOLE
    return infilling(tokens)


def fill(
    canvas: Canvas, network, options: dict | None, seed: int = 0, sampling: Sampling = SAMPLED, rule: Rule = match
) -> tuple[list[int], int]:
    """The whole text, and the calls that it took."""
    method = "plain" if options is None else "assd"
    noise, calls = Noise(seed), []
    drafters = [one.drafter(noise, sampling, rule) for one in make_methods(method, {method: options or {}})]
    steps = []
    counted = Counted(network, calls)
    controller = Controller(32, adaptive=False)
    drafters = [one for one in drafters if one is not None]
    run(speculate(canvas, noise, sampling, drafters, steps.append, rule, controller), {"target": counted})
    last = steps[-1]
    return last.canvas.fill(last.tokens).tokens.tolist(), len(calls)


class Counted:
    def __init__(self, network, calls: list) -> None:
        self.network, self.calls = network, calls

    def new_kv_cache(self):
        return self.network.new_kv_cache()

    def forward(self, batch, kv_caches):
        self.calls.append(len(batch))
        return self.network.forward(batch, kv_caches)


def by_hand(network: AnySubsetNetwork, canvas: Canvas, drafts: list[int], hole: int) -> torch.Tensor:
    """Logits of a hole given the text and drafts of the first holes, by Transformers' own forward and a dense mask."""
    filled = canvas.fill(np.array(drafts, dtype=np.int64))
    places = [*filled.known_positions.tolist(), hole]
    tokens = [*filled.tokens[filled.known_positions].tolist(), MASK]
    count, given = len(tokens), len(canvas.given_positions)
    seen = torch.ones(count, count, dtype=torch.bool).tril()
    seen[:given, :given] = True
    model = tiny_llama(0, any_subset={"mask": MASK})
    model.set_attn_implementation("eager")
    mask = torch.where(seen, 0.0, -30000.0)[None, None]
    with torch.inference_mode():
        return model(
            input_ids=torch.tensor([tokens]), position_ids=torch.tensor([places]), attention_mask=mask, use_cache=False
        ).logits[0, -1]


def test_a_row_is_the_law_of_its_hole_given_what_its_path_says():
    network, canvas = tiny_network(), text_with_holes()
    holes = canvas.open_positions
    tree = ForwardInputs(canvas, (7, 9, 8), (-1, 0, -1), output_hidden_states=True)
    inputs = with_query_chains(tree, [(0, [np.nan] * 2)], 1.0)
    outputs = network.forward([inputs], [network.new_kv_cache()])[0]
    wanted = [([], 0), ([7], 1), ([7, 9], 2), ([8], 1), ([7], 1), ([7], 2)]
    assert len(outputs.logits) == len(wanted)
    assert_features_say_the_logits(network, outputs)
    for row, (drafts, hole) in zip(outputs.logits, wanted, strict=True):
        torch.testing.assert_close(row, by_hand(network, canvas, drafts, int(holes[hole])), rtol=1e-3, atol=1e-3)


def assert_features_say_the_logits(network: AnySubsetNetwork, outputs: ForwardOutputs) -> None:
    """The state in each row is that of the same row's law."""
    with torch.no_grad():
        torch.testing.assert_close(network.model.lm_head(outputs.hidden_states), outputs.logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_remembered_changes_no_bit(dtype: torch.dtype):
    network, canvas = tiny_network(dtype=dtype), text_with_holes()
    kv_cache = network.new_kv_cache()
    for tokens in ((5, 6, 7), (11,), (12, 13)):
        nodes = (*tokens, 99)
        chain = tuple(range(-1, len(nodes) - 1))
        kept = network.forward([ForwardInputs(canvas, nodes, chain)], [kv_cache])[0]
        afresh = network.forward([ForwardInputs(canvas, nodes, chain)], [network.new_kv_cache()])[0]
        assert torch.equal(kept.logits, afresh.logits)
        assert canvas.num_decided == 0 or kept.context_tokens_read <= 1, "accepted nodes are not read again"
        canvas = canvas.fill(np.array([*tokens, 44]))


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_prepared_call_has_the_rows_of_any_other(seed: int, dtype: torch.dtype):
    """Trees, queries after some of their nodes, and holes in any order, with and without a memory."""
    random, network = np.random.default_rng(seed), tiny_network(dtype=dtype)
    canvas = text_with_holes(seed=seed)
    canvas = Canvas(canvas.tokens, random.permutation(canvas.order))
    prepared = network.prepared_filling
    assert prepared is not None
    for hidden in (True, False):
        parents = [int(random.integers(-1, node)) if node else -1 for node in range(int(random.integers(0, 7)))]
        inputs = ForwardInputs(canvas, tuple(random.integers(0, 300, len(parents)).tolist()), tuple(parents), hidden)
        if random.random() < 0.7:
            chains = [(int(random.integers(-1, len(parents))), [0.5] * int(random.integers(1, 4)))]
            inputs = with_query_chains(inputs, chains, 0.0)
        found, expected = [], []
        for each, outputs in ((prepared, found), (None, expected)):
            network.prepared_filling, kv_cache = each, network.new_kv_cache()
            for step in (inputs, replace(inputs, canvas=canvas.fill(np.array([7, 8])))):
                outputs.append(network.forward([step], [kv_cache])[0])
        for one, other in zip(found, expected, strict=True):
            assert torch.equal(one.logits, other.logits)
            assert (one.hidden_states is None) == (other.hidden_states is None)
            assert one.hidden_states is None or torch.equal(one.hidden_states, other.hidden_states)
        canvas = canvas.fill(np.array([5, 6, 7]))


def test_a_memory_of_another_text_is_forgotten():
    """Given tokens saw all of each other: with one less, or one more, all of them are others."""
    network, kv_cache = tiny_network(), None
    for tokens in (
        [5, 6, 7, 8, HOLE, HOLE],
        [5, 6, HOLE, HOLE, HOLE, 4],
        [5, 6, HOLE, HOLE, 9, 4],
        [5, 6, 9, HOLE, 4, 4],
    ):
        canvas = infilling(tokens)
        kv_cache = kv_cache or network.new_kv_cache()
        kept = network.forward(
            [ForwardInputs(canvas, (5,), (-1,)) if len(canvas.order) > 1 else ForwardInputs(canvas)], [kv_cache]
        )[0]
        afresh = network.forward([ForwardInputs(canvas)], [network.new_kv_cache()])[0]
        assert torch.equal(kept.logits[0], afresh.logits[0])


WAYS = [
    {},
    {"num_draft_tokens": 3, "ahead": 4},
    {"two_calls": True},
    {"draft": "bigram"},
    {"draft": "bigram", "num_draft_tokens": 2},
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", WAYS, ids=str)
@pytest.mark.parametrize("sampling", [Sampling(), SAMPLED, Sampling(0.7, top_p=0.9, repetition_penalty=1.2)])
def test_assd_fills_the_holes_that_plain_fills_with_the_same_tokens(options: dict, sampling: Sampling, dtype):
    network = tiny_network(dtype=dtype)
    for seed in range(3):
        network.pairwise_correction = random_correction() if seed else None
        canvas = text_with_holes(seed=seed, holes=25 - 10 * seed)
        plain, calls = fill(canvas, network, None, seed, sampling)
        assert calls == len(canvas.order)
        found, calls = fill(canvas, network, options, seed, sampling)
        assert found == plain
        if not options.get("two_calls"):
            assert calls <= len(canvas.order)


@pytest.mark.parametrize("free", [False, True], ids=["exact", "free"])
def test_texts_in_a_batch_are_those_alone(free: bool):
    network = AnySubsetNetwork(tiny_llama(any_subset={"mask": MASK}), batch_invariant=not free)
    canvases = [text_with_holes(seed=seed, length=30 + 7 * seed) for seed in range(3)]
    kv_caches = [network.new_kv_cache() for _ in canvases]
    batch = [
        ForwardInputs(canvas, (5, 6), (-1, 0), output_hidden_states=seed > 0) for seed, canvas in enumerate(canvases)
    ]
    together = network.forward(batch, kv_caches)
    for inputs, outputs in zip(batch, together, strict=True):
        alone = network.forward([inputs], [network.new_kv_cache()])[0]
        if free:
            torch.testing.assert_close(outputs.logits, alone.logits, rtol=1e-3, atol=1e-3)
        else:
            assert torch.equal(outputs.logits, alone.logits)
        if inputs.output_hidden_states:
            assert_features_say_the_logits(network, outputs)


def test_xlnet_sees_what_it_may():
    """A row does not change with what its query may not see, and does with what it may."""
    network, canvas = XlnetNetwork(tiny_xlnet()), text_with_holes()

    def rows(canvas: Canvas, *nodes: int) -> torch.Tensor:
        tree = ForwardInputs(canvas, nodes, tuple(range(-1, len(nodes) - 1)))
        inputs = with_query_chains(tree, [(-1, [np.nan] * 2)], 1.0)
        return network.forward([inputs], [network.new_kv_cache()])[0].logits

    one, other = rows(canvas, 7, 8, 9), rows(canvas, 7, 18, 9)
    same = [torch.equal(a, b) for a, b in zip(one, other, strict=True)]
    assert same == [True, True, False, False, True, True], "rows 0 and 1, and the queries, see nothing of node 1"
    assert torch.equal(one[0], one[4]), "a group's first query is for the first hole"
    assert not torch.equal(one[1], one[5]), "its second does not see node 0"
    for hole, token in enumerate((7, 8, 9)):
        alone = rows(canvas)
        assert torch.equal(alone[0], one[hole]), "what is asked with others has the bits of what is asked alone"
        canvas = canvas.fill(np.array([token]))


@pytest.mark.parametrize("options", WAYS, ids=str)
@pytest.mark.parametrize("sampling", [Sampling(), SAMPLED], ids=["greedy", "T=1"])
def test_xlnet_fills_the_same_whatever_the_method(options: dict, sampling: Sampling):
    network, canvas = XlnetNetwork(tiny_xlnet()), text_with_holes(24, 14)
    plain, calls = fill(canvas, network, None, 0, sampling)
    assert calls == 14
    assert fill(canvas, network, options, 0, sampling)[0] == plain


class HoleToy:
    """A law of a hole's nearest decided neighbours on both sides: small enough to enumerate all texts."""

    def __init__(self, vocab: int = 3, seed: int = 0, correction: PairwiseCorrection | None = None) -> None:
        self.correction = correction
        self.logits = torch.from_numpy(np.random.default_rng(seed).normal(size=(vocab + 1, vocab + 1, vocab)) * 1.5)

    def new_kv_cache(self) -> object:
        return object()

    def row(self, tokens: np.ndarray, hole: int) -> torch.Tensor:
        left = next((int(token) for token in tokens[:hole][::-1] if token != HOLE), -1)
        right = next((int(token) for token in tokens[hole + 1 :] if token != HOLE), -1)
        return self.logits[left, right]

    def forward(self, batch, kv_caches) -> list[ForwardOutputs]:
        return [self._reply(inputs) for inputs in batch]

    def _reply(self, inputs: ForwardInputs) -> ForwardOutputs:
        rows = torch.stack([self._answer(inputs, node) for node in range(-1, len(inputs.tokens))])
        states = torch.stack([self.state(self._hole(inputs, node)) for node in range(-1, len(inputs.tokens))])
        return AnySubsetOutputs(rows, states if self.correction is not None else None, correction=self.correction)

    @staticmethod
    def state(hole: int) -> torch.Tensor:
        """What the correction reads of a hole."""
        return torch.from_numpy(seeded_generator(0, "hole", hole).normal(size=3).astype(np.float32))

    def _hole(self, inputs: ForwardInputs, node: int) -> int:
        return int(
            inputs.canvas.open_positions[0 if node < 0 else inputs.depths[node] + (inputs.tokens[node] != NO_TOKEN)]
        )

    def _answer(self, inputs: ForwardInputs, node: int) -> torch.Tensor:
        path, at = [], node
        while at >= 0:
            if inputs.tokens[at] != NO_TOKEN:
                path.insert(0, inputs.tokens[at])
            at = inputs.parents[at]
        return self.row(inputs.canvas.fill(np.array(path, dtype=np.int64)).tokens, self._hole(inputs, node))


def joint(toy: HoleToy, canvas: Canvas, sampling: Sampling) -> np.ndarray:
    """The probability of every way to fill the holes."""
    vocab, found = toy.logits.shape[-1], []
    for filling in itertools.product(range(vocab), repeat=len(canvas.order)):
        chance, now = 1.0, canvas
        for token in filling:
            closed = now.num_decided > 0 and sampling.num_padding_after(now.num_decided - 1, int(now.new_tokens[-1]))
            said = (
                one_hot(int(now.new_tokens[-1]))
                if closed
                else token_distribution(toy.row(now.tokens, int(now.open_positions[0])), sampling)
            )
            chance *= probabilities(said, vocab)[token]
            now = now.fill(np.array([token]))
        found.append(chance)
    return np.array(found)


def is_law_kept(
    options: dict | None, rule: Rule, sampling: Sampling = SAMPLED, correction: PairwiseCorrection | None = None
) -> bool:
    """By the holes of one text, filled with many seeds, whose joint law is enumerated."""
    toy, canvas = HoleToy(correction=correction), infilling([1, HOLE, HOLE, 2, HOLE, 0, HOLE])

    def fill_holes(seed: int) -> int:
        filled, _calls = fill(canvas, toy, options, seed, sampling, rule)
        return int("".join(map(str, np.array(filled)[canvas.order])), 3)

    return keeps_law(fill_holes, joint(toy, canvas, sampling), 2000)


@pytest.mark.slow
@pytest.mark.unchecked
@pytest.mark.parametrize(
    ("options", "sampling"),
    [({}, Sampling(0.8, top_k=2)), ({"two_calls": True}, SAMPLED), ({"draft": "bigram"}, Sampling(0.8, top_k=2))],
    ids=str,
)
def test_reject_keeps_the_joint_law_over_the_holes(options: dict, sampling: Sampling):
    assert is_law_kept(options, reject, sampling)


@pytest.mark.slow
@pytest.mark.unchecked
@pytest.mark.parametrize("options", [{}, {"num_draft_tokens": 2, "ahead": 3}], ids=str)
def test_a_correction_leaves_the_law_as_it_is(options: dict):
    assert is_law_kept(options, reject, correction=random_correction(3, hidden=3))


CLOSING = Sampling(1.0, hole_end_tokens=((2, 0, 1), (2, 2, 3)))  # token 2 ends both holes of two tokens


@pytest.mark.slow
@pytest.mark.unchecked
@pytest.mark.parametrize("options", [{}, {"two_calls": True}, {"draft": "bigram"}], ids=str)
def test_the_joint_law_of_holes_that_a_token_closes(options: dict):
    assert is_law_kept(options, reject, CLOSING, correction=random_correction(3, hidden=3))


@pytest.mark.parametrize("options", WAYS, ids=str)
def test_closed_holes_are_filled_with_the_same_tokens_and_take_no_calls(options: dict):
    network = tiny_network()
    network.pairwise_correction = random_correction()
    tokens = np.array([5, 6, *[HOLE] * 12, 7, 8, *[HOLE] * 9, 9])
    for seed in range(8):
        first = fill(infilling(tokens), network, None, seed)[0][2]  # this token shall close holes
        sampling = Sampling(1.0, hole_end_tokens=((first, 0, 11), (first, 12, 20)))
        plain, calls = fill(infilling(tokens), network, None, seed, sampling)
        assert plain[2:14] == [first] * 12
        assert calls <= 10
        assert fill(infilling(tokens), network, options, seed, sampling)[0] == plain


class WaveringToy:
    """Holes at positions 1 to 10, closed by token 2; the laws of two of them change once a hole before is decided."""

    canvas = infilling([1, *[HOLE] * 10, 0])
    sampling = Sampling(1.0, hole_end_tokens=((2, 0, 9),))

    def new_kv_cache(self) -> object:
        return object()

    def row(self, tokens: np.ndarray, hole: int) -> torch.Tensor:
        decided = tokens[1] != HOLE
        law_ = {
            2: (0.85, 0.1, 0.05) if decided else (0.1, 0.85, 0.05),
            3: (0.7, 0.1, 0.2) if decided else (0.3, 0.2, 0.5),
        }
        return torch.tensor(law_.get(hole, (0.5, 0.49, 0.01))).log()

    forward, _reply, _answer, _hole, state = (
        HoleToy.forward, HoleToy._reply, HoleToy._answer, HoleToy._hole, staticmethod(HoleToy.state)
    )  # fmt: skip
    correction = None


@pytest.mark.slow
@pytest.mark.unchecked
@pytest.mark.parametrize("options", [{"num_draft_tokens": 3, "ahead": 7}, {"two_calls": True}], ids=str)
def test_what_was_drawn_has_no_say_in_later_laws(options: dict):
    """A blank that was drafted and not reached decides when laws are asked for: the next draws must not know it."""
    toy = WaveringToy()

    def third_token(seed: int) -> int | None:
        text, _calls = fill(toy.canvas, toy, options, seed, toy.sampling, reject)
        return None if 2 in text[1:3] else text[3]

    assert keeps_law(third_token, np.array([0.7, 0.1, 0.2]), 2000)


@pytest.mark.slow
@pytest.mark.unchecked
def test_drafts_that_are_told_another_law_are_caught(monkeypatch: pytest.MonkeyPatch):
    """As were it forgotten that a draft is linked to the one before it."""

    def reject_uncorrected(inputs: ForwardInputs, distributions) -> tuple[np.ndarray, int]:
        flat = tuple(
            None if one is None else Distribution(None, np.ones(3)) for one in inputs.draft_distributions or ()
        )
        return reject(replace(inputs, draft_distributions=flat or None), distributions)

    monkeypatch.setattr("saltus.methods.assd.drafter.reject", reject_uncorrected)
    assert not is_law_kept({}, reject_uncorrected, correction=random_correction(3, hidden=3))


class ChainToy(HoleToy):
    """Each token depends on its place and the two to its left, by just what the correction says."""

    def __init__(self) -> None:
        self.correction = random_correction(8, 1.5, hidden=3, told=1.0)
        self.correction.gate[:, -1] = 0  # what is known already is as sharp as what is added

    def row(self, tokens: np.ndarray, hole: int) -> torch.Tensor:
        said = np.zeros(2, dtype=np.float32)
        for table, token in ((self.correction.left, tokens[hole - 1]), (self.correction.second_left, tokens[hole - 2])):
            said += 0 if token == HOLE else table[token]
        return torch.from_numpy(
            self.correction.right @ (said * self.correction.position_inputs(self.state(hole)[None])[0, :-1])
        )


@pytest.mark.parametrize("rule", [match, reject])
def test_where_the_correction_says_all_every_draft_is_right(rule: Rule):
    """Of three drafts a call, asked for together and some of them calls ago; the first call has none."""
    toy = ChainToy()
    for ahead in (8, 30):
        canvas = infilling([1, 0, *[HOLE] * 29, 3, 5, *[HOLE] * 12, 2])
        _text, calls = fill(canvas, toy, {"num_draft_tokens": 3, "ahead": ahead}, 0, SAMPLED, rule)
        assert calls == 1 + 10, "41 holes, of which the first call fills one"


def predicted(correction: PairwiseCorrection, num_known: int) -> HoleLogits:
    """Logits 0…7 of a hole, and the correction of the model that predicted them."""
    outputs = AnySubsetOutputs(torch.arange(8.0)[None], torch.ones(1, 3), correction=correction)
    return HoleLogits(outputs, 0, num_known)


def test_a_correction_adds_what_a_distribution_did_not_know():
    """New tokens 0, 1, 2, 3 stand at 1, 2, 4, 5: between the second and the third one is given."""
    correction, order = random_correction(8, hidden=3), np.array([1, 2, 4, 5])
    weights, logits = correction.position_inputs(torch.ones(1, 3))[0], torch.arange(8.0)
    for index, knew, new, wanted in (
        (1, 1, [6], None),  # the token to its left is known
        (1, 0, [6], (6, None)),  # what stands before that is given
        (2, 0, [6, 7], None),  # a given one is its left neighbour
        (3, 2, [6, 7, 5], (5, None)),
        (3, 0, [6, 7, 5], (5, None)),  # two to its left one is given
    ):
        hole = predicted(correction, knew)
        found = hole.corrected(correction, hole.num_unknown(order, index), new[-2:])
        expected = logits.numpy() if wanted is None else corrected_logits(correction, logits.numpy(), weights, *wanted)
        np.testing.assert_array_equal(found, expected)
    row = np.arange(5)
    for knew, wanted in ((2, (7, None)), (1, (7, 6)), (0, (7, 6))):
        hole = predicted(correction, knew)
        found = hole.corrected(correction, hole.num_unknown(row, 3), [6, 7])
        np.testing.assert_array_equal(found, corrected_logits(correction, logits.numpy(), weights, *wanted))


@pytest.mark.filterwarnings("ignore:invalid value")
def test_a_correction_that_is_not_finite_is_left_out():
    correction = random_correction(8, hidden=3)
    correction.left[6] = np.inf
    assert predicted(correction, 0).corrected(correction, 1, [6]).tolist() == [*range(8)]


def predictions_in_bfloat16(vocab: int, unknown: list[int]) -> HolePredictions:
    """Of three holes, by two calls, for a correction of rank 16 whose tables bfloat16 can hold."""

    def rounded(name: str, *shape: int) -> torch.Tensor:
        return torch.from_numpy(seeded_generator(1, name).normal(size=shape)).bfloat16()

    tables = [rounded(name, vocab, 16).float().numpy() for name in ("left", "second_left", "right")]
    correction = with_kernel(PairwiseCorrection(*tables, gate=rounded("gate", 8, 17).float().numpy() * np.float32(0.1)))
    rows = [(2 * rounded(f"logits{i}", 3, vocab), rounded(f"states{i}", 3, 8)) for i in range(2)]
    outputs = [AnySubsetOutputs(*each, correction=correction) for each in rows]
    holes = [HoleLogits(outputs[0], 2, 0), HoleLogits(outputs[1], 1, 0), HoleLogits(outputs[1], 2, 0)]
    return HolePredictions(holes, unknown, correction, np.array([3, vocab + 7]), frozenset([5, 20]))


@pytest.mark.parametrize("vocab", [64, 150])
@pytest.mark.parametrize("text", [[], [9], [9, 30]], ids=len)
@pytest.mark.parametrize("unknown", [[0, 1, 2], [2, 0, 1]], ids=str)
@pytest.mark.parametrize(
    "choose",
    [Likeliest(3), SharedNoise(3, Sampling(temperature=0.9), Noise(4), np.arange(20, 30))],
    ids=["likeliest", "shared noise"],
)
def test_the_kernel_grows_the_paths_of_holes(vocab: int, text: list[int], unknown: list[int], choose: Chooser):
    predictions = predictions_in_bfloat16(vocab, unknown)
    assert predictions.grow is not None
    found, expected = predictions.grow(text, choose), grown_nodes(predictions, text, choose)
    if found is None:
        pytest.skip("no compiled kernels")
    assert len(found) > 3
    assert [node[:2] for node in found] == [node[:2] for node in expected]
    assert [node[2] for node in found] == pytest.approx([node[2] for node in expected], rel=0.01)
    assert predictions.grow(text, SharedNoise(3, Sampling(0.9, top_k=2), Noise(4), np.arange(20, 30))) is None


def test_nothing_banned_is_drafted_and_nothing_after_the_end_of_a_hole():
    predictions = predictions_in_bfloat16(64, [1, 1, 1])
    ids, logits, _ = predictions.candidates(0, [9])
    best = [int(ids[logits.argmax()])]
    predictions = replace(predictions, last_tokens=frozenset(best))
    for nodes in (grown_nodes(predictions, [9], Likeliest(1)), predictions.grow([9], Likeliest(1))):
        assert nodes is None or [token for _, token, _ in nodes] == best
    predictions = replace(predictions, banned=np.array(best), last_tokens=frozenset())
    for nodes in (grown_nodes(predictions, [9], Likeliest(64)), predictions.grow([9], Likeliest(16))):
        assert nodes is None or best[0] not in [token for _, token, _ in nodes]


def independent(inputs: ForwardInputs, distributions) -> tuple[np.ndarray, int]:
    """Each hole by its own law, and no verification: what drawing many holes in one step amounts to."""
    last = inputs.num_draft_tokens - 1
    return np.array([*inputs.tokens[: inputs.num_draft_tokens], distributions.pick(last)], dtype=np.int64), last


def without_resampling(inputs: ForwardInputs, distributions) -> tuple[np.ndarray, int]:
    """As σ-GPT: after a rejection the next token is drawn from the target's law and not from the residual."""
    tokens, node = reject(inputs, distributions)
    tokens[-1] = distributions.pick(node)
    return tokens, node


@pytest.mark.slow
@pytest.mark.unchecked
@pytest.mark.parametrize("wrong", [independent, without_resampling], ids=lambda rule: rule.__name__)
def test_a_wrong_rule_is_caught(wrong: Rule, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("saltus.methods.assd.drafter.reject", wrong)
    monkeypatch.setattr("saltus.methods.shared.query_chains.reject", wrong)
    assert not is_law_kept({}, wrong)
