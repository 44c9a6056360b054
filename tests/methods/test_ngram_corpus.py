"""A corpus: what followed a text's last tokens in other texts, found by a suffix array; kept in the cache folder."""

import numpy as np
import pytest

import saltus
from saltus.core.noise import Noise
from saltus.engine.corpus_files import load_corpus
from saltus.methods.shared.ngram_corpus import END_OF_TEXT, LEAST_AGREEING, NgramCorpus


def continuations(found) -> list[tuple[list[int], int]]:
    """Each continuation up to its end, and how much agrees before it."""
    return [
        (tokens[at : tokens.index(END_OF_TEXT, at)].tolist(), size) for tokens, repeats in found for at, size in repeats
    ]


def test_the_longest_agreement_comes_first_and_texts_do_not_run_into_each_other():
    corpus = NgramCorpus.of_texts([[0, 1, 2, 3, 4, 5], [9, 1, 2, 3, 4, 6, 7], [8, 8, 0, 1, 2, 3]])
    found = continuations(corpus.repeats([7, 0, 1, 2, 3, 4], 16, 8))
    assert found == [([5], 5), ([6, 7], 4)]
    assert corpus.repeats([8, 8, 0, 1], 16, 8)
    assert not corpus.repeats([4, 5, 9, 1], 16, 8)  # across texts
    assert not corpus.repeats([1, 2, 3], 16, 8)  # too few
    assert not NgramCorpus.of_texts([]).repeats([1, 2, 3], 16, 8)
    assert not corpus.repeats([1, 2, 3, 4, 5], 16, 8)  # nothing follows


def test_of_equal_agreements_what_follows_more_often_comes_first():
    texts = [[0, 1, 2, 3, 7]] * 2 + [[0, 1, 2, 3, 4]] * 30 + [[0, 1, 2, 3, 5]] * 8
    found = continuations(NgramCorpus.of_texts(texts).repeats([0, 1, 2, 3], 16, 10))
    firsts = [tokens[0] for tokens, _ in found]
    assert len(firsts) == 10
    assert firsts == sorted(firsts, key=[4, 5, 7].index)
    assert 6 <= firsts.count(4) <= 9  # 30 of 40


def test_all_places_are_found_and_no_others():
    """Against a search through the whole text."""
    noise = Noise(0)
    for trial in range(60):
        numbers = (noise.uniforms(f"trial {trial}", np.arange(130)) * 3).astype(int).tolist()
        texts = [numbers[:30], numbers[30:37], numbers[37:100], numbers[:5]]
        query = numbers[100:]
        flat = [token for text in texts for token in [*text, END_OF_TEXT]]
        agreeing = {}
        for place, token in enumerate(flat):
            size = 0
            while size < place and flat[place - 1 - size] == query[-1 - size]:
                size += 1
            if size >= LEAST_AGREEING and token != END_OF_TEXT:
                agreeing[place] = size
        found = continuations(NgramCorpus.of_texts(texts).repeats(query, 64, 1000))
        assert len(found) == len(agreeing)
        ends = {place: tuple(flat[place : flat.index(END_OF_TEXT, place)][:32]) for place in agreeing}
        assert sorted(tuple(tokens) for tokens, _ in found) == sorted(ends.values())
        if found:
            assert found[0][1] == max(agreeing.values())


@pytest.fixture
def code_base(tmp_path):
    """A folder of two texts, beside what is not read."""
    (tmp_path / "code" / ".git").mkdir(parents=True)
    (tmp_path / "code" / ".git" / "config").write_text("hidden hidden hidden")
    (tmp_path / "code" / "sub").mkdir()
    (tmp_path / "code" / "a.py").write_text("def area(width, height):\n    return width * height\n")
    (tmp_path / "code" / "sub" / "b.md").write_text("The area is the product of width and height.\n")
    (tmp_path / "code" / "data.bin").write_bytes(b"\x00\xff\xfe\x00")
    return tmp_path / "code"


def test_a_corpus_speeds_up_what_is_in_it_and_changes_no_text(tiny_folder, code_base):
    """The corpus is a text that the model writes; then one that has nothing to do with it."""
    engine = saltus.load(str(tiny_folder()), "lookup", adaptive=False)
    for sampling in ({}, {"temperature": 1.0, "seed": 3}):
        settings = {"max_new_tokens": 48, "raw": True, "ignore_eos": True, **sampling}
        expected = engine.generate("Once upon", **settings)
        text = [*engine.encode("Once upon", raw=True), *expected.tokens]
        found = engine.copy_with(corpus=NgramCorpus.of_texts([text])).generate("Once upon", **settings)
        assert found.tokens == expected.tokens
        assert len(found.calls) < len(expected.calls) / 2
    other = saltus.load(str(tiny_folder()), "lookup", adaptive=False, ngram_corpus=[code_base])
    assert other.decoder.setup("lookup").corpus is not None
    assert other.generate("Once upon", **settings).tokens == expected.tokens


def test_tokens_without_an_embedding_are_not_drafted():
    text = [1, 2, 3, 4, 5, 6, 99, 7]
    whole, limited = (
        NgramCorpus(corpus.backwards, corpus.places, *limit)
        for corpus in [NgramCorpus.of_texts([text])]
        for limit in [(), (50,)]
    )
    ending = [1, 2, 3, 4]
    assert list(whole.repeats(ending, 8, 4)[0][0]) == [5, 6, 99, 7, END_OF_TEXT]
    assert list(limited.repeats(ending, 8, 4)[0][0]) == [5, 6, END_OF_TEXT]
    assert list(limited.repeats([3, 4, 5, 6], 8, 4)[0][0]) == [END_OF_TEXT]


def test_files_and_folders_are_read_once(tiny_folder, code_base, monkeypatch, tmp_path):
    tokenizer = saltus.load(str(tiny_folder()), "plain").tokenizer
    monkeypatch.setenv("SALTUS_CACHE", str(tmp_path / "cache"))
    stages = []
    corpus = load_corpus([code_base], tokenizer, progress=stages.append)
    assert len(corpus) == sum(
        len(tokenizer(file.read_text(), add_special_tokens=False).input_ids) + 1
        for file in (code_base / "a.py", code_base / "sub" / "b.md")
    )
    assert stages
    assert stages[-1].done == stages[-1].total
    with monkeypatch.context() as patch:
        patch.setattr(NgramCorpus, "of_texts", None)  # not sorted again
        again = load_corpus([code_base], tokenizer)
    assert np.array_equal(again.backwards, corpus.backwards)
    assert np.array_equal(again.places, corpus.places)
    (code_base / "a.py").write_text("another text")
    assert len(load_corpus([code_base], tokenizer)) != len(corpus)


def test_what_is_no_corpus_is_refused_in_a_line(tiny_folder, tmp_path):
    tokenizer = saltus.load(str(tiny_folder()), "plain").tokenizer
    with pytest.raises(ValueError, match="there is no file"):
        load_corpus([tmp_path / "missing"], tokenizer)
    (tmp_path / "nothing.txt").write_text("")
    with pytest.raises(ValueError, match=r"nothing\.txt is empty"):
        load_corpus([tmp_path / "nothing.txt"], tokenizer)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="has no text files"):
        load_corpus([tmp_path / "empty"], tokenizer)
