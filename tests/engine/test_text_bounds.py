"""Texts that cannot fit are refused by their length, and no text that fits."""

import hypothesis
import pytest
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from saltus.engine import text_bounds
from saltus.engine.text_bounds import cut_to_context, require_fits, token_length
from tiny_models import END, byte_tokenizer, space_tokenizer

TOKENIZERS = {"bytes": byte_tokenizer(), "spaces": space_tokenizer(), "composed": byte_tokenizer()}
TOKENIZERS["composed"].backend_tokenizer.normalizer = normalizers.NFC()


@pytest.mark.parametrize("name", TOKENIZERS)
@hypothesis.given(
    st.lists(st.sampled_from(["the cat", " sat", "   ", "é", "e\u0301", "\u1112\u1161\u11ab", "€", "\x06", END]))
)
@hypothesis.example([])
@hypothesis.example(["\u1112\u1161\u11ab"] * 50)
def test_no_text_that_fits_is_refused(name, pieces):
    tokenizer, text = TOKENIZERS[name], "".join(pieces)
    assert token_length(tokenizer) is not None
    require_fits([text], tokenizer, len(tokenizer(text).input_ids), "tiny", "the prompt")


def test_bytes_that_no_token_has_do_not_count():
    """Such as control characters: byte-level tokenizers drop them."""
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend = Tokenizer(models.BPE({character: n for n, character in enumerate(sorted(set(alphabet) - {"Ć"}))}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    assert len(tokenizer("\x06" * 100 + "ab").input_ids) == 2
    require_fits(["\x06" * 100 + "ab"], tokenizer, 2, "tiny", "the prompt")
    with pytest.raises(ValueError, match=r"the prompt has 3 bytes, but tiny reads at most 2 tokens, .*; shorten it"):
        require_fits(["\x06" * 100, "abc"], tokenizer, 2, "tiny", "the prompt")


def test_the_vocabulary_is_not_looked_through_for_texts_with_fewer_bytes_than_the_context_has_tokens(monkeypatch):
    """It takes a tenth of a second or more, of the first request."""
    monkeypatch.setattr(text_bounds, "token_length", lambda tokenizer: pytest.fail("looked through"))
    require_fits(["ab", "cé"], TOKENIZERS["bytes"], 5, "tiny", "the prompt")
    assert cut_to_context("abcde", TOKENIZERS["bytes"], 5) == "abcde"
    require_fits(["a" * 100], TOKENIZERS["bytes"], None, "tiny", "the prompt")


def with_normalizer(normalizer) -> PreTrainedTokenizerFast:
    tokenizer = byte_tokenizer()
    tokenizer.backend_tokenizer.normalizer = normalizer
    return tokenizer


def with_stripping_token() -> PreTrainedTokenizerFast:
    from tokenizers import AddedToken

    tokenizer = byte_tokenizer()
    tokenizer.add_tokens([AddedToken("<mask>", lstrip=True)])
    return tokenizer


def with_unknown_token() -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.WordLevel({"<unk>": 0, "the": 1}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=backend)


@pytest.mark.parametrize(
    "make",
    [
        with_unknown_token, with_stripping_token, lambda: with_normalizer(normalizers.StripAccents()),
        lambda: with_normalizer(normalizers.Replace("  ", " ")),
    ],
    ids=["unknown", "stripping", "accents", "replaced"],
)  # fmt: skip
def test_where_a_token_may_stand_for_any_text_nothing_is_refused(make):
    require_fits(["a" * 10_000], make(), 1, "tiny", "the prompt")


def test_a_long_text_is_refused_before_it_is_tokenised(tiny_folder, monkeypatch):
    import saltus

    engine = saltus.load(str(tiny_folder()), "plain")
    monkeypatch.setattr(type(engine.tokenizer), "__call__", lambda *_, **__: 1 / 0)
    long = "a" * 7000
    for prompt, more in ((long, {"raw": True}), ([{"role": "user", "content": long}], {}), ("a", {"suffix": long})):
        with pytest.raises(ValueError, match=r"bytes, but .* reads at most 512 tokens"):
            engine.text_request(prompt, **more)
