"""Read files and folders into a corpus that drafts copy from; what was sorted is kept in the cache folder."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np

from saltus.engine.text_files import read_text
from saltus.loading.progress import ProgressCallback, Stage, no_progress
from saltus.methods.shared.ngram_corpus import NgramCorpus
from saltus.storage.cache_files import disk_errors, has_digest, new_file_with_digest
from saltus.storage.cache_folder import cache_folder

VERSION = b"1"  # of the arrays
TOGETHER = 1 << 20  # characters that are tokenised at once
MAX_FILE_BYTES = 8 << 20  # of a file in a folder: larger ones are data
MAX_TOKENS = 1 << 30
SKIPPED_FOLDERS = {"__pycache__", "node_modules"}  # and those whose names begin with a dot


def load_corpus(
    paths: Sequence[str | Path], tokenizer: Any, num_token_ids: int = 2**31, progress: ProgressCallback = no_progress
) -> NgramCorpus:
    """The corpus of some files, and of all text files below some folders, in a tokenizer's tokens.

    A tokenizer may have more of them than a model has embeddings for: those from `num_token_ids` on are not drafted.

    It is sorted at its first use (a second or two for a million tokens), and then mapped from the cache folder. Errors:
    ValueError for a path that does not exist or that holds no text, and where the cache cannot be written.
    """
    texts = [text for path in paths for text in texts_at(Path(path))]
    if not any(texts):
        raise ValueError(f"the corpus {', '.join(map(str, paths))} is empty; give files with a text")
    key = blake2b(VERSION + tokenizer_identity(tokenizer).encode(), digest_size=12)
    for text in texts:
        key.update(blake2b(text.encode("utf-8", "surrogatepass")).digest())
    folder = cache_folder() / "corpora"
    files = [folder / f"{key.hexdigest()}-{name}.npy" for name in ("backwards", "places")]
    if not all(map(has_digest, files)):
        tokens = list(tokenized(texts, tokenizer, progress))
        if (count := sum(map(len, tokens))) > MAX_TOKENS:
            raise ValueError(f"the corpus has {count:,} tokens, and {MAX_TOKENS:,} are the most; give fewer files")
        corpus = NgramCorpus.of_texts(tokens)
        with disk_errors(folder, "a corpus"):
            for file, array in zip(files, (corpus.backwards, corpus.places), strict=True):
                with new_file_with_digest(file) as made, made.open("wb") as opened:
                    np.save(opened, array)
    return NgramCorpus(*(np.load(file, mmap_mode="r") for file in files), num_token_ids=num_token_ids)


def texts_at(path: Path) -> Iterator[str]:
    """The text of a file, or of all text files below a folder, in the order of their names."""
    if not path.is_dir():
        yield read_text(path)
        return
    found = False
    for file in sorted(path.rglob("*")):
        folders = file.relative_to(path).parts
        skipped = any(part.startswith(".") or part in SKIPPED_FOLDERS for part in folders)
        if skipped or not file.is_file() or file.stat().st_size > MAX_FILE_BYTES:
            continue
        try:
            text = read_text(file)
        except ValueError:  # not a text
            continue
        if text and "\0" not in text:
            found = True
            yield text
    if not found:
        raise ValueError(f"{path} has no text files; give a folder of texts, or a file")


def tokenized(texts: Sequence[str], tokenizer: Any, progress: ProgressCallback = no_progress) -> Iterator[list[int]]:
    """The tokens of each text."""
    total, done, waiting, size = sum(map(len, texts)), 0, [], 0
    for number, text in enumerate(texts, 1):
        waiting.append(text)
        size += len(text)
        if size >= TOGETHER or number == len(texts):
            yield from tokenizer(waiting, add_special_tokens=False, verbose=False).input_ids
            done, waiting, size = done + size, [], 0
            progress(Stage("reading the corpus", done, total))


def tokenizer_identity(tokenizer: Any) -> str:
    """A string that differs for tokenizers that split texts differently."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    return repr(sorted(tokenizer.get_vocab().items())) if backend is None else backend.to_str()
