"""Training texts of any-subset models: stories and programs from files, and a tokenizer made of them."""

from __future__ import annotations

import ast
import csv
import json
import math
import textwrap
import warnings
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from saltus.engine.text_files import separate_texts

SPECIAL_TOKENS = ["<pad>", "<bos>", "<eos>", "<mask>", "<blank>"]
PAD, BOS, EOS, MASK, BLANK = range(len(SPECIAL_TOKENS))
NEWLINE_PIECE = "Ċ"  # "\n" in byte-level pieces
SENTENCES_PER_STORY = 12  # at most, in a table
MIN_TOKENS = 16  # of a text
OMITTED_FOLDERS = {"test", "tests", "site-packages", "dist-packages"}


def read_stories(file: Path) -> list[str]:
    """The stories of a plain text, or of a table (.csv) with columns document_id and text, one sentence a row.

    Errors: ValueError for a table without these columns.
    """
    if file.suffix == ".csv":
        with file.open(newline="", encoding="utf-8") as source:
            documents: dict[str, list[str]] = {}
            try:
                for row in csv.DictReader(source):
                    documents.setdefault(row["document_id"], []).append(" ".join((row["text"] or "").split()))
            except (KeyError, csv.Error) as error:
                reason = f"there is no column {error}" if isinstance(error, KeyError) else error
                raise ValueError(
                    f"{file} holds no stories ({reason}); give a table with document_id and text, or a plain text"
                ) from None
        return [
            " ".join(rows[start : start + SENTENCES_PER_STORY])
            for rows in documents.values()
            for start in range(0, len(rows), SENTENCES_PER_STORY)
        ]
    parts = separate_texts(file.read_text(encoding="utf-8", errors="ignore"))
    return [" ".join(part.split()) for part in parts if len(part.split()) >= 8]


def holds_programs(path: Path) -> bool:
    """True for a folder, and for JSON lines: `read_programs` reads them; `read_stories` reads other files."""
    return path.is_dir() or path.suffix == ".jsonl"


def read_programs(source: Path) -> Iterator[str]:
    """The functions of a folder, or the programs of JSON lines, each after its description. Errors: ValueError."""
    if source.is_dir():
        yield from _read_functions(source)
        return
    try:
        with source.open(encoding="utf-8") as lines:
            for row in map(json.loads, filter(str.strip, lines)):
                docstring = f'"""{row["text"]}"""\n' if row.get("text") else ""
                yield docstring + "\n".join(row["code"].expandtabs(4).splitlines()).rstrip() + "\n"
    except (OSError, ValueError, LookupError, AttributeError, TypeError) as error:
        raise ValueError(
            f"{source} holds no programs ({error}); give a folder, or lines of JSON with code and text"
        ) from None


def _read_functions(folder: Path) -> Iterator[str]:
    """The functions of three lines or more in a folder's Python files, dedented, except those of tests.

    A function inside a function is a part of that one's text only.
    """
    for file in sorted(folder.rglob("*.py")):
        if OMITTED_FOLDERS & set(file.relative_to(folder).parts):
            continue
        try:
            source = file.read_text(encoding="utf-8")
            with warnings.catch_warnings(action="ignore"):  # invalid escapes in these programs
                tree = ast.parse(source)
        except (SyntaxError, ValueError, RecursionError, OSError):
            continue
        lines = source.split("\n")
        for node in _outer_functions(tree):
            if (end := node.end_lineno or 0) - node.lineno >= 2:
                yield textwrap.dedent("\n".join(lines[node.lineno - 1 : end])).rstrip() + "\n"


def _outer_functions(tree: ast.Module) -> Iterator[ast.FunctionDef]:
    waiting = deque[ast.AST]([tree])
    while waiting:
        node = waiting.popleft()
        if isinstance(node, ast.FunctionDef):
            yield node
        else:
            waiting.extend(ast.iter_child_nodes(node))


def train_tokenizer(texts: Sequence[str], size: int) -> PreTrainedTokenizerFast:
    """Byte-level pieces that are frequent in these texts; no piece crosses the end of a line."""
    tokenizer = Tokenizer(models.BPE())
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split("\n", "isolated"), byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", BOS)])
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=SPECIAL_TOKENS, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<bos>", eos_token="<eos>", pad_token="<pad>", mask_token="<mask>"
    )


def split_tokens(tokens: list[int], length: int) -> list[np.ndarray]:
    """A text in equal parts of at most `length` tokens; parts below `MIN_TOKENS` are left out."""
    parts = np.array_split(np.array(tokens), math.ceil(len(tokens) / length))
    return [part for part in parts if len(part) >= MIN_TOKENS]
