"""The n-gram model that comes with the package: made once for a tokenizer, and what `lookup` falls back on."""

import gzip
import json
import logging
from types import SimpleNamespace

import pytest

import saltus
from saltus.core.sampling import Sampling
from saltus.engine import sample_texts
from saltus.engine.request import Request
from saltus.engine.sample_texts import LEAST_VOCABULARY, load_ngram_model
from saltus.methods.shared.ngram_model import NgramModel

CONTENT = gzip.compress(b"".join(json.dumps(text).encode() + b"\n" for text in ["Once upon a time"] * 3))


@pytest.fixture(scope="module")
def engine():
    return saltus.load("code", method="lookup")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A cache folder of its own; the sample texts are few."""
    monkeypatch.setenv("SALTUS_CACHE", str(tmp_path))
    monkeypatch.setattr(sample_texts, "TEXTS", SimpleNamespace(read_bytes=lambda: CONTENT))
    return tmp_path


def test_the_model_is_made_once_for_a_tokenizer(engine, folder, monkeypatch):
    tokens = engine.tokenizer("Once upon a", add_special_tokens=False).input_ids
    time = engine.tokenizer(" time", add_special_tokens=False).input_ids[0]
    made = load_ngram_model(engine.tokenizer, 4096)
    assert made is not None
    assert made.after(tokens).keys() == {time}
    monkeypatch.setattr(NgramModel, "of_texts", None)
    again = load_ngram_model(engine.tokenizer, 4096)
    assert again is not None
    assert again.after(tokens) == made.after(tokens)
    with pytest.raises(TypeError, match="not callable"):
        load_ngram_model(saltus.load("stories").tokenizer, 4096)


def test_models_of_few_tokens_have_none(engine, folder, monkeypatch):
    assert load_ngram_model(engine.tokenizer, LEAST_VOCABULARY - 1) is None
    monkeypatch.setattr(sample_texts, "LEAST_VOCABULARY", 1)
    most = max(
        engine.tokenizer("Once upon a time", add_special_tokens=False).input_ids[1:]
    )  # the first is not predicted
    assert load_ngram_model(engine.tokenizer, most) is None
    assert load_ngram_model(engine.tokenizer, most + 1) is not None


def test_a_cache_that_cannot_be_written_is_a_warning(engine, folder, caplog):
    (folder / "corpora").write_text("no folder")
    with caplog.at_level(logging.WARNING, logger="saltus"):
        assert load_ngram_model(engine.tokenizer, 4096) is not None
    assert "an n-gram model" in caplog.text
    assert len(caplog.records) == 1


@pytest.mark.parametrize(
    ("settings", "has_model"),
    [({}, True), ({"rule": "reject"}, False), ({"options": {"lookup": {"ngram_model": False}}}, False)],
)
def test_lookup_gets_the_model_unless_it_is_told_otherwise(settings, has_model):
    setup = saltus.load("code", method="lookup", **settings).decoder.setup("lookup")
    (drafter,) = setup.new_drafters(Request([5, 6, 7], 8, 0, Sampling()))
    assert (drafter.ngram_model is not None) == has_model


def test_texts_are_those_of_plain_decoding_and_take_fewer_calls(engine):
    plain = saltus.load("code", method="plain").generate("def sum(numbers):", max_new_tokens=64)
    fewer = []
    for ngrams in (True, False):
        other = saltus.load("code", method="lookup", options={"lookup": {"ngram_model": ngrams}}, adaptive=False)
        answer = other.generate("def sum(numbers):", max_new_tokens=64)
        assert answer.text == plain.text
        fewer.append(answer.statistics.calls)
    assert fewer[0] < fewer[1]
