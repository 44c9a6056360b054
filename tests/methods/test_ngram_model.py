"""The n-gram model of sample texts: its probabilities are those of the definition, by counting."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from saltus.methods.shared.ngram_model import CANDIDATES, CONFIDENCE, DISCOUNT, LEAST_COUNT, ORDER, NgramModel

texts = st.lists(st.lists(st.integers(0, 4), max_size=30), max_size=8)


def counts_after(samples: list[list[int]], context: tuple[int, ...]) -> Counter[int]:
    """In how many texts each token follows a context."""
    counts: Counter[int] = Counter()
    for text in samples:
        ends = range(len(context), len(text))
        counts.update({text[end] for end in ends if tuple(text[end - len(context) : end]) == context})
    return counts


def probability(samples: list[list[int]], context: tuple[int, ...], token: int) -> float:
    if not context:
        tokens = [each for text in samples for each in text]
        return tokens.count(token) / len(tokens)
    counts = counts_after(samples, context)
    shorter = DISCOUNT * len(counts) * probability(samples, context[1:], token)
    return (counts[token] - DISCOUNT + shorter) / counts.total()


@given(texts, st.lists(st.integers(0, 4), min_size=1, max_size=6))
def test_the_tokens_after_the_longest_known_context_have_the_probabilities_of_the_definition(samples, text):
    found = NgramModel.of_texts(samples).after(text)
    context: tuple[int, ...] = ()
    for length in range(1, min(ORDER, len(text)) + 1):
        count = counts_after(samples, tuple(text[-length:])).total()
        if count < (LEAST_COUNT if length > 1 else 1):
            break
        context = tuple(text[-length:])
    if not context:
        assert found == {}
        return
    counts = counts_after(samples, context)
    assert len(found) == min(len(counts), CANDIDATES)
    assert list(found.values()) == sorted(found.values(), reverse=True)
    for token, chance in found.items():
        assert chance == pytest.approx(CONFIDENCE * probability(samples, context, token), rel=1e-5)
    left = [probability(samples, context, token) for token in counts if token not in found]
    assert not left or CONFIDENCE * max(left) <= min(found.values()) * 1.00001


def test_contexts_do_not_reach_into_other_texts():
    model = NgramModel.of_texts([[1, 2], [3, 4]])
    assert model.after([2]) == model.after([4]) == {}
    assert [*model.after([1])] == [2]
    assert model.after([1, -1]) == {}
