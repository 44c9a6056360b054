"""Text comes out as its tokens come in: whole characters, nothing taken back, stop strings never seen."""

from copy import copy

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from saltus.engine.detokenizer import (
    MAX_PENDING_TOKENS,
    REPLACEMENT,
    Detokenizer,
    TextOutput,
    check_stop_strings,
    text_decoder,
)
from tiny_models import byte_tokenizer, space_tokenizer

BYTES, SPACES = byte_tokenizer(), space_tokenizer()
tokens = st.lists(st.integers(0, len(BYTES) - 1), max_size=40)
characters = st.text(st.sampled_from("a bé你😀👩‍🚀\ufffd\u00a0"), max_size=20)


def pieces(ids, tokenizer=BYTES, context=()) -> list[str]:
    detokenizer = Detokenizer(tokenizer, context)
    return [detokenizer.add(token) for token in ids]


@given(characters)
def test_any_text_comes_back_from_its_tokens(text):
    for tokenizer in (BYTES, SPACES):
        ids = tokenizer(text, add_special_tokens=False).input_ids
        assert "".join(pieces(ids, tokenizer)) == tokenizer.decode(ids)
    assert BYTES.decode(BYTES(text).input_ids) == text


@pytest.mark.parametrize("tokenizer", [BYTES, SPACES], ids=["bytes", "spaces"])
def test_a_replacement_character_that_is_written_as_one_does_not_wait(tokenizer):
    ids = [tokenizer("a").input_ids[-1], *tokenizer("\ufffd", add_special_tokens=False).input_ids[-3:]]
    assert "".join(pieces(ids, tokenizer)) == "a\ufffd"
    assert "".join(pieces(ids[:-1], tokenizer)) == "a"


@given(tokens)
def test_broken_bytes_read_as_they_do_when_decoded_at_once(ids):
    assert "".join(pieces(ids)) == BYTES.decode(ids, skip_special_tokens=True).rstrip(REPLACEMENT)


@given(characters.filter(lambda text: REPLACEMENT not in text))
def test_a_character_is_never_shown_by_halves(text):
    for tokenizer in (BYTES, SPACES):
        assert not any(REPLACEMENT in piece for piece in pieces(tokenizer(text).input_ids, tokenizer))


def test_a_character_comes_with_its_last_byte():
    ids = BYTES("a😀b").input_ids
    assert len(ids) == 6
    assert pieces(ids) == ["a", "", "", "", "😀", "b"]


def test_what_is_whole_does_not_wait_for_what_is_not():
    half = BYTES("😀").input_ids[:2]
    assert pieces([*BYTES("a").input_ids, *half]) == ["a", "", ""]


def test_endless_broken_bytes_are_shown_in_the_end():
    byte = BYTES("😀").input_ids[1]
    assert "".join(pieces([byte] * (MAX_PENDING_TOKENS + 1))) == REPLACEMENT * (MAX_PENDING_TOKENS + 1)


@given(st.lists(st.sampled_from(["the", "cat", "sat", "😀", "你好"]), min_size=2, max_size=8), st.data())
def test_a_continuation_keeps_the_spaces_that_join_it_to_its_prompt(words, data):
    ids = SPACES(" ".join(words)).input_ids
    cut = data.draw(st.integers(1, len(ids) - 1))
    prompt = SPACES.decode(ids[:cut])
    if REPLACEMENT not in prompt:
        assert prompt + "".join(pieces(ids[cut:], SPACES, ids[:cut])) == " ".join(words)


def test_a_text_of_its_own_does_not_begin_with_a_space():
    assert "".join(pieces(SPACES("the cat").input_ids, SPACES)) == "the cat"


def test_broken_bytes_between_characters_do_not_repeat_what_was_said():
    emoji, letter = SPACES("😀", add_special_tokens=False).input_ids[-4:], SPACES("the").input_ids
    assert "".join(pieces([*emoji, emoji[0], *letter], SPACES)) == "😀\ufffd the"


def test_special_tokens_do_not_show_nor_split_characters():
    first, *rest = BYTES("é").input_ids
    assert "".join(pieces([first, BYTES.eos_token_id, *rest])) == "é"


@pytest.mark.parametrize("unknown", [False, True], ids=["special", "of a padded vocabulary"])
@pytest.mark.parametrize("tokenizer", [BYTES, SPACES], ids=["bytes", "spaces"])
def test_tokens_without_text_are_not_decoded_again_and_break_no_character(tokenizer, unknown):
    detokenizer, decoded = Detokenizer(tokenizer), []
    decode = detokenizer._text_of
    detokenizer._text_of = lambda tokens: decoded.append(len(tokens)) or decode(tokens)
    silent = [len(tokenizer) + 3 if unknown else tokenizer.eos_token_id] * (2 * MAX_PENDING_TOKENS)
    letters, emoji = (tokenizer(text, add_special_tokens=False).input_ids for text in ("the", "the 😀"))
    assert "".join(map(detokenizer.add, [*letters, *silent, *emoji[:-2], *silent, *emoji[-2:]])) == tokenizer.decode(
        letters + emoji
    )
    assert max(decoded) < MAX_PENDING_TOKENS


def script(stops=(), ends=()) -> TextOutput:
    return TextOutput(Detokenizer(BYTES), frozenset(ends), tuple(stops))


stops = st.lists(st.text(st.sampled_from("ath e"), min_size=1, max_size=4), min_size=1, max_size=3)


@settings(max_examples=200)
@given(st.text(st.sampled_from("ath ecos"), max_size=30), stops)
def test_a_text_ends_before_the_first_stop_string_wherever_token_borders_lie(text, stops):
    ids = BYTES(text).input_ids
    so_far = [BYTES.decode(ids[:count]) for count in range(len(ids) + 1)]
    count = next((n for n, said in enumerate(so_far) if any(stop in said for stop in stops)), None)
    one, read = script(stops), 0
    for token in ids:
        read += 1
        if one.add(token):
            break
    assert one.ended == (count is not None)
    if count is None:
        assert one.text == text
    else:
        assert read == count
        assert one.text == min((so_far[count].partition(stop)[0] for stop in stops), key=len)


@settings(max_examples=200)
@given(st.text(st.sampled_from("ath ecos"), max_size=30), stops, st.data())
def test_what_was_released_is_never_taken_back(text, stops, data):
    one, shown = script(stops), []
    for token in BYTES(text).input_ids:
        ended = one.add(token)
        if data.draw(st.booleans()):
            shown.append(one.release())
        if ended:
            break
    assert one.text.startswith("".join(shown))
    shown.append(one.release(final=True))
    assert "".join(shown) == one.text


def test_only_what_may_begin_a_stop_string_waits():
    one = script(["sat on"])
    shown, seen = "", {}
    for token in BYTES("the cat sat up").input_ids:
        one.add(token)
        shown += one.release()
        seen[one.text] = shown
    assert seen["the cat sat"] == "the cat "
    assert seen["the cat sat up"] == "the cat sat up"


class _CountingString(str):
    comparisons = 0

    def __lt__(self, other):
        _CountingString.comparisons += 1
        return super().__lt__(other)

    def startswith(self, *given):
        _CountingString.comparisons += 1
        return super().startswith(*given)


def test_many_stop_strings_are_not_compared_one_by_one():
    stops = [_CountingString(f"the cat {number:05} sat") for number in range(2000)]
    one = TextOutput(Detokenizer(BYTES), frozenset(), tuple(stops))
    for token in BYTES("so the cat 01234 s").input_ids:
        one.add(token)
    _CountingString.comparisons = 0
    assert one.release() == "so "
    assert 0 < _CountingString.comparisons < len(stops[0]) * 14


def test_an_end_token_ends_a_text_and_does_not_show():
    one = script(ends=[BYTES.eos_token_id])
    assert [one.add(token) for token in [*BYTES("a").input_ids, BYTES.eos_token_id]] == [False, True]
    assert one.text == "a"


def test_an_empty_stop_string_is_refused():
    with pytest.raises(ValueError, match="remove it"):
        check_stop_strings(["a", ""])
    assert check_stop_strings("ab") == ("ab",)
    assert check_stop_strings(None) == ()


@given(tokens)
def test_the_tokenizers_library_decodes_as_the_tokenizer_does(ids):
    for tokenizer in (BYTES, SPACES):
        known = [token for token in ids if token < len(tokenizer)]
        expected = tokenizer.decode(known, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        assert text_decoder(tokenizer)(known) == expected


def test_a_tokenizer_that_decodes_in_its_own_way_is_asked_itself():
    class Loud(type(BYTES)):
        def _decode(self, *args, **settings) -> str:
            return super()._decode(*args, **settings).upper()

    loud = copy(BYTES)
    loud.__class__ = Loud
    assert pieces(BYTES("a b").input_ids, loud) == ["A", " ", "B"]
