"""What each token of a text stands for: all together are the text, for every kind of tokenizer."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from saltus.engine.detokenizer import Detokenizer, TextOutput
from saltus.engine.prompt_texts import prompt_texts
from saltus.engine.token_texts import TokenTexts, token_name, written_bytes
from tiny_models import byte_tokenizer, space_tokenizer

ADDED = "<|file_sep|>"


def with_added_tokens(tokenizer):
    tokenizer.add_tokens([AddedToken(ADDED, special=False, normalized=False)])
    return tokenizer


def llama_2_tokenizer():
    """A space before each text, by a normalizer, and a begin token."""
    definition = json.loads(space_tokenizer().backend_tokenizer.to_str())
    tokenizer = Tokenizer.from_str(json.dumps({**definition, "pre_tokenizer": None}))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def metaspace_tokenizer():
    """Unigram, as XLNet's and T5's, without bytes for what it does not know."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    texts = ["the cat sat on the mat", "a b é 你 😀 \n ."] * 5
    tokenizer.train_from_iterator(texts, trainers.UnigramTrainer(special_tokens=["<unk>", "</s>"], unk_token="<unk>"))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", unk_token="<unk>")


def word_tokenizer():
    """Lower case, in pieces of words: what it reads is not what it writes, and no decoder tells bytes."""
    words = ["[UNK]", "[END]", "the", "cat", "sat", "##s", ".", "a", "b"]
    tokenizer = Tokenizer(models.WordPiece({word: place for place, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizers.Lowercase(), pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="[END]", unk_token="[UNK]")


TOKENIZERS = {
    "bytes": byte_tokenizer(), "added": with_added_tokens(byte_tokenizer()), "spaces": space_tokenizer(),
    "llama-2": with_added_tokens(llama_2_tokenizer()), "metaspace": metaspace_tokenizer(), "words": word_tokenizer(),
}  # fmt: skip
OWN_BYTES = ("bytes", "added", "spaces", "llama-2")  # that have tokens for every byte
texts = st.text(st.sampled_from("the cat sab é你😀.\n"), min_size=1, max_size=20)


def written(tokenizer, tokens, shown=(), context=(), stop=()):
    """A text and its tokens, taken after each one as a stream does."""
    shown = {token: tokenizer.convert_ids_to_tokens(token) for token in shown}
    ends = frozenset([tokenizer.eos_token_id])
    output = TextOutput(
        Detokenizer(tokenizer, context, ends, shown), ends, tuple(stop), token_texts=TokenTexts(tokenizer, shown)
    )
    taken = []
    for token in tokens:
        ended = output.add(token)
        output.release()
        taken += output.token_texts.take(output.num_released, False)
        assert (
            "".join(one.text for one in taken)
            == output.text[: output.num_released][: sum(len(one.text) for one in taken)]
        )
        if ended:
            break
    output.release(True)
    return output.text, [*taken, *output.token_texts.take(output.num_released, True)]


def check(text, found, count):
    assert len(found) == count
    assert b"".join(one.content for one in found) == text.encode()
    assert "".join(one.text for one in found) == text


@pytest.mark.parametrize("kind", TOKENIZERS)
@given(text=texts)
def test_the_tokens_of_a_text_are_the_text(kind, text):
    tokenizer = TOKENIZERS[kind]
    tokens = tokenizer(text, add_special_tokens=False).input_ids
    shown, found = written(tokenizer, tokens)
    check(shown, found, len(tokens))
    assert [one.token for one in found] == tokens
    if kind in OWN_BYTES and shown == text:  # but for a half character at its end, and a space at its beginning
        assert all(one.content or one.drops_space for one in found)


@pytest.mark.parametrize("kind", TOKENIZERS)
@given(data=st.data())
def test_the_tokens_of_any_text_are_the_text(kind, data):
    """Broken characters, special tokens, end tokens and ids of a padded vocabulary are among them."""
    tokenizer = TOKENIZERS[kind]
    tokens = data.draw(st.lists(st.integers(0, len(tokenizer) + 3), max_size=12))
    shown, found = written(tokenizer, tokens)
    check(shown, found, len(found))


@pytest.mark.parametrize("kind", TOKENIZERS)
@given(text=texts, stop=st.text(st.sampled_from("the ca😀"), min_size=1, max_size=3))
def test_the_tokens_of_a_text_that_is_cut_at_a_stop_string_are_what_is_left(kind, text, stop):
    tokenizer = TOKENIZERS[kind]
    shown, found = written(tokenizer, tokenizer(text, add_special_tokens=False).input_ids, stop=[stop])
    check(shown, found, len(found))


@pytest.mark.parametrize("kind", OWN_BYTES)
def test_each_token_of_a_character_has_its_own_bytes(kind):
    tokenizer = TOKENIZERS[kind]
    tokens = tokenizer("a😀", add_special_tokens=False).input_ids[-4:]
    _, found = written(tokenizer, tokens, context=tokenizer("a").input_ids)
    assert [one.content for one in found] == [bytes([byte]) for byte in "😀".encode()]
    assert [one.text for one in found] == ["", "", "", "😀"]
    names = [token_name(tokenizer, token)[0] for token in tokens]
    assert names == ["\\xf0", "\\x9f", "\\x98", "\\x80"]
    assert token_name(tokenizer, tokens[0], prefix="bytes:")[0] == "bytes:\\xf0"


@pytest.mark.parametrize("kind", ["spaces", "llama-2", "metaspace"])
def test_a_space_belongs_to_the_word_after_it(kind):
    tokenizer = TOKENIZERS[kind]
    tokens = tokenizer("the the", add_special_tokens=False).input_ids
    (first, *_, last) = written(tokenizer, tokens)[1]
    assert (first.content, first.drops_space) == (first.text.encode(), True)
    if kind != "metaspace":  # whose pieces depend on its training
        assert (last.content, last.drops_space, token_name(tokenizer, last.token)[0]) == (b" the", False, " the")
        assert token_name(tokenizer, last.token, drops_space=True) == ("the", b"the")


def test_special_tokens_are_no_bytes_but_those_that_are_shown():
    tokenizer = TOKENIZERS["added"]
    user, added = tokenizer.convert_tokens_to_ids(["<|user|>", ADDED])
    tokens = [user, *tokenizer("a").input_ids, added]
    text, found = written(tokenizer, tokens)
    assert (text, [one.content for one in found]) == ("a" + ADDED, [b"", b"a", ADDED.encode()])
    text, found = written(tokenizer, tokens, shown=[user])
    assert (text, found[0].content) == ("<|user|>a" + ADDED, b"<|user|>")
    assert token_name(tokenizer, user) == ("<|user|>", b"")


def test_names_of_different_tokens_differ_but_for_half_characters():
    for tokenizer in TOKENIZERS.values():
        names = [token_name(tokenizer, token)[0] for token in range(len(tokenizer) + 4)]
        assert "" not in names
    assert written_bytes(b"\xff\xfe") == "\\xff\\xfe"


@pytest.mark.parametrize("kind", TOKENIZERS)
@given(text=texts, raw=st.booleans())
def test_the_tokens_of_a_prompt_are_the_prompt(kind, text, raw):
    tokenizer = TOKENIZERS[kind]
    tokens = tokenizer(text, add_special_tokens=raw).input_ids
    if tokens:
        found = prompt_texts(tokenizer, text, tokens)
        assert len(found) == len(tokens)
        assert "".join(found) == text


@pytest.mark.parametrize("kind", TOKENIZERS)
@given(data=st.data())
def test_the_tokens_of_a_prompt_of_tokens_are_the_prompt(kind, data):
    tokenizer = TOKENIZERS[kind]
    tokens = data.draw(st.lists(st.integers(0, len(tokenizer) + 3), min_size=1, max_size=12))
    text = tokenizer.decode(tokens, clean_up_tokenization_spaces=False)
    found = prompt_texts(tokenizer, text, tokens)
    assert len(found) == len(tokens)
    assert "".join(found) == text


def test_each_token_of_a_prompt_has_its_part():
    split = lambda kind, text: prompt_texts(TOKENIZERS[kind], text, TOKENIZERS[kind](text).input_ids)  # noqa: E731
    assert split("llama-2", "the cat") == ["", "the", " cat"]
    assert split("words", "The  CATS.") == ["The", "  CAT", "S", "."]
    assert split("bytes", "é<|user|>a") == ["", "é", "<|user|>", "a"]
    assert split("spaces", "😀 the")[-1] == " the"
