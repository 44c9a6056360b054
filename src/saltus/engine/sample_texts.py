"""The n-gram model of the sample texts that come with the package, in the tokens of a model."""

from __future__ import annotations

import gzip
import json
import logging
from collections.abc import Iterable
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np

from saltus.engine.corpus_files import tokenized, tokenizer_identity
from saltus.methods.shared.ngram_model import NgramModel
from saltus.shipped import SHIPPED
from saltus.storage.cache_files import disk_errors, has_digest, new_file_with_digest
from saltus.storage.cache_folder import cache_folder

log = logging.getLogger("saltus")

TEXTS = SHIPPED / "texts" / "answers.jsonl.gz"  # see the README there
VERSION = b"1"  # of the table
LEAST_VOCABULARY = 1024  # where tokens are little more than bytes, the last four of them predict little


def take_ngram_model(methods: Iterable[Any]) -> bool:
    """True if the options of one of the methods ask for an n-gram model."""
    return any(getattr(method, "ngram_model", False) for method in methods)


def load_ngram_model(tokenizer: Any, num_token_ids: int) -> NgramModel | None:
    """The model, made at the first use of a tokenizer (a second or two), then mapped from the cache folder.

    None for a model with fewer than LEAST_VOCABULARY tokens, or with fewer than the texts have.
    """
    if num_token_ids < LEAST_VOCABULARY:
        return None
    content = TEXTS.read_bytes()
    key = blake2b(VERSION + tokenizer_identity(tokenizer).encode() + content, digest_size=12)
    file = cache_folder() / "corpora" / f"{key.hexdigest()}-ngrams.npy"
    model = NgramModel(np.load(file, mmap_mode="r")) if has_digest(file) else _made(tokenizer, content, file)
    return model if int(model.slots["tokens"].max()) < num_token_ids else None


def _made(tokenizer: Any, content: bytes, file: Path) -> NgramModel:
    """The model of texts in compressed lines of JSON, also kept in a file where that can be written."""
    texts = [json.loads(line) for line in gzip.decompress(content).splitlines()]
    model = NgramModel.of_texts(tokenized(texts, tokenizer))
    try:
        with disk_errors(file.parent, "an n-gram model"), new_file_with_digest(file) as made, made.open("wb") as opened:
            np.save(opened, model.slots)
    except ValueError as error:  # it is made again the next time
        log.warning("%s", error)
    return model
