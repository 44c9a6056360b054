"""Files that a user wrote: what is wrong with one is a line with its name and the cure."""

import gzip

import pytest

from saltus.engine.prompts import Conversation, read_prompts
from saltus.engine.text_files import read_jsonl, read_text, separate_texts, typed_text


@pytest.mark.parametrize(
    ("word", "text"),
    [
        ("h\udcc3\udca9 \udcf0\udc9f\udc98\udc80", "hé 😀"),  # as Python has it where the locale is C
        ("hé 😀", "hé 😀"),
        ("\udcff", "\udcff"),  # no UTF-8: refused later
    ],
)
def test_words_of_a_command_line_are_utf_8_in_any_locale(word, text):
    assert typed_text(word) == text
    prompts = read_prompts([word], None)
    assert prompts[0].turns == (text,)
    assert next(Conversation(prompts[0], system=word).turns()).prompt[0]["content"] == text


def test_a_text_is_read_with_a_mark_compressed_and_with_other_line_ends(tmp_path):
    written = b"\xef\xbb\xbfone\r\ntwo\n"
    (tmp_path / "a.txt").write_bytes(written)
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(written))
    assert {read_text(tmp_path / name) for name in ("a.txt", "a.txt.gz")} == {"one\ntwo\n"}


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.txt", b"one\n\xff", r"a\.txt, line 2: this is not UTF-8 text; convert the file to UTF-8"),
        ("a.gz", gzip.compress(b"one", mtime=0)[:-9], r"a\.gz is not a whole gzip file"),
        ("a.gz", b"one", r"a\.gz is not a whole gzip file"),
        (".", None, "is a folder; give a file"),
        ("none", None, "there is no file .*none; check the name"),
    ],
)
def test_what_is_no_text_is_named_with_the_cure(name, content, said, tmp_path):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=said):
        read_text(tmp_path / name)


def test_json_lines_have_their_numbers_though_some_are_empty(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text('{"a": 1}\n\n[2]\n')
    assert [*read_jsonl(file)] == [(f"{file}, line 1", {"a": 1}), (f"{file}, line 3", [2])]
    file.write_text("{}\n{\n")
    with pytest.raises(ValueError, match=r"rows\.jsonl, line 2: this is not JSON .*; write one JSON object a line"):
        [*read_jsonl(file)]


def test_a_plain_text_has_empty_lines_or_marks_between_its_texts():
    assert separate_texts("\n one\ntwo \n \n\n\nthree<|endoftext|>four\n") == ["one\ntwo", "three", "four"]
    assert separate_texts(" \n\n") == []
