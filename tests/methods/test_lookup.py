"""Prompt lookup: where repeats go on, and how likely that is."""

import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from saltus.core.canvas import continuation
from saltus.core.noise import Noise
from saltus.core.rules import match
from saltus.core.sampling import Sampling
from saltus.core.tree import each_branch
from saltus.kernels import native
from saltus.methods import lookup
from saltus.methods.lookup import END_OF_REFERENCE, LIMITS, LONG_REPEAT, Lookup, RepeatIndex, branches, votes
from saltus.methods.shared.ngram_model import NgramModel
from saltus.methods.shared.repeat_paths import repeat_paths
from saltus.testing import toy_decoding, toy_network

texts = st.lists(st.integers(0, 3), min_size=1, max_size=40)


def offer(text: list[int], max_depth: int = 16, **options):
    drafter = Lookup(**options).drafter(Noise(0), Sampling(), match)
    return each_branch(drafter(continuation(text, max_depth + 1), None, max_depth))


def likeliest_first_token(found) -> int:
    return max(found, key=lambda branch: branch.acceptance_probabilities[0]).tokens[0]


def repeats_of(text: list[int], max_ngram_size: int, max_matches: int) -> list[tuple[int, int]]:
    """By comparing everything with everything."""
    found = {}
    for at in range(1, len(text)):
        size = 0
        while size < min(max_ngram_size, at) and text[at - 1 - size] == text[len(text) - 1 - size]:
            size += 1
        if size:
            found[at] = size
    latest = sorted(found, reverse=True)
    kept = set(latest[:max_matches]) | set([at for at in latest if found[at] >= LONG_REPEAT][:max_matches])
    return [(at, found[at]) for at in latest if at in kept]


@given(texts, st.integers(1, 20), st.integers(1, 9))
def test_repeats_are_those_that_a_slow_search_finds(text: list[int], max_ngram_size: int, max_matches: int):
    index = RepeatIndex(max(max_ngram_size, LONG_REPEAT), max_matches)
    index.read(np.array(text))
    assert index.repeats() == repeats_of(text, max(max_ngram_size, LONG_REPEAT), max_matches)


def test_a_longer_repeat_is_found_however_long_ago_it_was():
    text = [1, 2, 3, 9, *[0, 3] * 20, 1, 2, 3]
    assert likeliest_first_token(offer(text, max_matches=2)) == 9


@given(texts, st.data())
def test_reading_a_text_bit_by_bit_is_reading_it_at_once(text: list[int], data):
    whole, parts = RepeatIndex(8, 5), RepeatIndex(8, 5)
    whole.read(np.array(text))
    for end in sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=4))):
        parts.read(np.array(text[:end], dtype=np.int64))
    parts.read(np.array(text))
    assert parts.tokens == whole.tokens
    assert parts.repeats() == whole.repeats()


@given(texts, st.integers(0, 20))
def test_many_tokens_are_indexed_as_one_by_one(text: list[int], first: int):
    found = []
    for many, very_many in ((1_000, 1_000), (1, 1_000), (1, 1)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(lookup, "MANY_TOKENS", many)
            patch.setattr(lookup, "VERY_MANY_TOKENS", very_many)
            index = RepeatIndex(8, 5)
            index.add_reference(text[:first])
            index.read(np.array(text[first:], dtype=np.int64))
            index.read(np.array([*text[first:], 1, 2, 1], dtype=np.int64))
            found.append((index.tokens, index.chains))
    assert found[0] == found[1] == found[2]


def test_a_long_text_is_indexed_in_arrays_and_not_token_by_token():
    """Dictionaries of its n-grams took 200 bytes a token and four times as long, while all texts of a server waited."""
    index, text = RepeatIndex(8, 5), np.arange(20_000)
    tracemalloc.start()
    try:
        index.read(text)
        assert tracemalloc.get_traced_memory()[0] < 100 * len(text)
    finally:
        tracemalloc.stop()
    index.read(np.append(text, [5, 6, 7]))
    assert index.repeats() == [(8, 3)]


def test_a_step_indexes_new_tokens_alone_and_a_bounded_number_of_places_is_used():
    index = RepeatIndex(max_ngram_size=8, max_matches=4)
    index.read(np.zeros(500, dtype=np.int64))
    assert [at for at, _ in index.repeats()] == [499, 498, 497, 496]
    index.read(np.zeros(501, dtype=np.int64))
    assert [at for at, _ in index.repeats()] == [500, 499, 498, 497]


@pytest.mark.skipif(native.load_kernels() is None, reason="needs the compiled kernels")
@settings(deadline=None)
@given(
    st.lists(st.integers(0, 2) | st.just(END_OF_REFERENCE), max_size=60),
    st.integers(0, 50),
    st.sampled_from([1, 2, 8, 32]),
    st.sampled_from([3, 8, 64]),
    st.integers(1, 40),
    st.integers(1, 20),
    st.data(),
)
def test_the_kernel_finds_the_paths_of_the_definition_bit_for_bit(
    text, copies, max_matches, max_size, nodes, max_depth, data
):
    index = RepeatIndex(max_size, max_matches)
    index._append([*text, *[0, 1, 1] * copies])  # enough copies for repeats that are sure
    places = st.tuples(st.integers(0, max(len(index.tokens) - 1, 0)), st.integers(1, max_size))
    given = data.draw(st.lists(places, max_size=3)) if index.tokens else []
    samples = data.draw(st.none() | st.lists(st.lists(st.integers(0, 3), max_size=20), max_size=4))
    ngrams = None if samples is None else NgramModel.of_texts(samples)
    found = repeat_paths(
        index.tokens, given, index.chains, max_matches, max_size, nodes, max_depth, LIMITS, "lookup", ngrams
    )  # fmt: skip
    assert found is not None
    assert each_branch(found) == branches(index.tokens, given + index.repeats(), nodes, max_depth, ngrams=ngrams)


@given(texts, st.integers(1, 12), st.integers(1, 30))
def test_branches_fit_and_their_chances_are_chances(text: list[int], max_depth: int, nodes: int):
    found = offer(text, max_depth, num_draft_tokens=nodes)
    paths = {tuple(branch.tokens[:depth]) for branch in found for depth in range(1, len(branch.tokens) + 1)}
    assert len(paths) <= nodes
    for branch in found:
        assert 1 <= len(branch.tokens) == len(branch.acceptance_probabilities) <= max_depth
        assert all(0 < chance < 1 for chance in branch.acceptance_probabilities)
    roots = {branch.tokens[0]: branch.acceptance_probabilities[0] for branch in found}
    assert sum(roots.values()) < 1
    for branch in found:  # a leaf: no other one goes on from there
        assert sum(other.tokens[: len(branch.tokens)] == branch.tokens for other in found) == 1


def test_the_nodes_offered_are_the_likeliest_ones():
    text = [1, 2, 3, 4, 9, 1, 2, 3, 5, 9, 1, 2, 8, 6, 1, 2]

    def values(nodes: int) -> list[float]:
        """Path probabilities of all nodes, in falling order."""
        found = {}
        for branch in offer(text, num_draft_tokens=nodes):
            for depth in range(1, len(branch.tokens) + 1):
                found[tuple(branch.tokens[:depth])] = np.prod(branch.acceptance_probabilities[:depth])
        return sorted(found.values(), reverse=True)

    everything = values(30)
    for nodes in range(1, len(everything)):
        assert values(nodes) == everything[:nodes]


@given(texts)
def test_a_continuation_is_what_followed_a_repeat(text: list[int]):
    """The first token of each branch came after an earlier copy of the last token, the next ones after it."""
    for branch in offer(text):
        written = text + list(branch.tokens)
        starts = [at for at in range(1, len(text)) if text[at - 1] == text[-1]]
        assert any(written[at : at + len(branch.tokens)] == list(branch.tokens) for at in starts)


@pytest.mark.parametrize("period", [1, 2, 3, 7])
def test_a_periodic_text_goes_on_as_far_as_there_is_room(period: int):
    """A repeat that reaches the end of the text goes on in what it proposes."""
    text = (list(range(period)) * 20)[: 3 * period + 2]
    best = max(offer(text, 30, num_draft_tokens=60), key=lambda branch: len(branch.tokens))
    expected = [(len(text) + i) % period for i in range(30)]
    assert list(best.tokens) == expected


def test_without_a_repeat_nothing_is_offered():
    assert offer([1, 2, 3, 4]) == []
    assert offer([1]) == []


def test_longer_repeats_count_more():
    text = [5, 1, 2, 3, 7, 0, 3, 8, 0, 3, 8, 5, 1, 2, 3]
    assert likeliest_first_token(offer(text)) == 7


def test_later_places_and_agreeing_ones_count_more():
    assert votes([8, 7], [1, 1])[8] > votes([8, 7], [1, 1])[7]
    assert votes([7, 7, 7], [1, 1, 1])[7] > votes([7, 7], [1, 1])[7] > votes([7], [1])[7]
    assert votes([7], [8])[7] > votes([7], [3])[7] > votes([7], [1])[7]
    assert votes([8, 7, 7], [1, 1, 1])[7] > votes([8, 7, 7], [1, 1, 1])[8]


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 9)), min_size=1, max_size=12))
def test_votes_leave_something_for_what_was_never_seen(seen):
    probabilities = votes([token for token, _ in seen], [size for _, size in seen])
    assert set(probabilities) == {token for token, _ in seen}
    assert all(chance > 0 for chance in probabilities.values())
    assert sum(probabilities.values()) < 1


def test_different_continuations_share_their_beginning():
    """One tree, not one branch for each place."""
    text = [1, 2, 3, 4, 9, 1, 2, 3, 5, 9, 1, 2]
    tokens = [tuple(branch.tokens) for branch in branches(text, [(7, 2), (2, 2)], 9, 2)]
    assert tokens[:2] == [(3, 5), (3, 4)]


def test_a_very_long_repeat_is_followed_as_far_as_a_call_goes():
    """It is nearly certain, so all of its tokens are worth their rows, and nothing else is offered."""
    text = [*range(100, 200), 7, 120, 8, *range(100, 140)]
    (path,) = offer(text, max_depth=32, num_draft_tokens=40)
    assert path.tokens == list(range(140, 172))
    assert np.prod(path.acceptance_probabilities) > 0.5


def test_a_text_that_repeats_itself_takes_few_calls():
    """A greedy toy falls into a loop; once round, the loop is found in the text."""
    written = toy_decoding("lookup", [1, 2, 3], 60, target=toy_network()).run()
    assert len(written.tokens) == 60
    assert len(written.steps) < 20


@pytest.mark.parametrize("option", ["max_ngram_size", "max_matches", "num_draft_tokens"])
def test_options_below_one_are_refused_in_a_line(option: str):
    with pytest.raises(ValueError, match=f"^lookup: {option} is 0, but must be 1 or more$"):
        Lookup(**{option: 0})


def test_references_are_copied_from_and_their_ends_are_never_drafted():
    def longest(*expected: bool, text: list[int]) -> list[int]:
        drafter = Lookup().drafter(Noise(0), Sampling(), match)
        for tokens, is_expected in zip(([5, 6, 7, 8], [1, 2, 3]), expected, strict=True):
            drafter.add_reference(tokens, is_expected)
        found = each_branch(drafter(continuation(text, 6), None, 5))
        assert all(token >= 0 for branch in found for token in branch.tokens)
        return max((list(branch.tokens) for branch in found), key=len, default=[])

    assert longest(False, True, text=[9, 9, 4]) == [1, 2, 3], "it begins as what is expected"
    assert longest(False, False, text=[9, 9, 6]) == [7, 8], "and copies from any of them"
    assert longest(False, False, text=[9, 9, 4]) == []
    assert longest(False, False, text=[9, 8]) == [], "no draft goes on from one reference to the next"
