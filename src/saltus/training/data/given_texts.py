"""Texts of a data set as training texts: tokenized, in the folders that `saltus collect text` writes (PTP, Alg. 2)."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any

from saltus.engine.encoding import answer_end_token, tokens_after_prompt
from saltus.engine.engine import Engine
from saltus.engine.text_files import read_jsonl, read_text, separate_texts
from saltus.loading.model_identity import model_fingerprint
from saltus.training.data.teacher_texts import METADATA_FILE, read_metadata, save_shard, shard_name
from saltus.training.loop.checkpoint import write_json

TEMPERATURE = 1.0  # a text of a data set is a sample of a distribution, not its likeliest text
TEXTS_PER_REPORT = 64  # drawing a bar takes longer than a text
FORMS = '"prompt" and "completion", "messages" that end with the assistant\'s, or "text"'


def read_rows(file: Path) -> list[dict[str, Any]]:
    """The objects of JSON lines, or (.txt) the texts between empty lines. Errors: ValueError, which names the place."""
    if file.suffix == ".txt":
        rows = [{"text": text} for text in separate_texts(read_text(file))]
        if not rows:
            raise ValueError(f"{file} holds no texts; write texts with empty lines between them")
        return rows
    rows = []
    for location, row in read_jsonl(file):
        if not isinstance(row, dict) or not _parts(row):
            raise ValueError(f"{location}: it must have {FORMS}")
        rows.append(row)
    if not rows:
        raise ValueError(f"{file} holds no texts; write one JSON object a line with {FORMS}")
    return rows


def _parts(row: Mapping[str, Any]) -> tuple[Any, str] | None:
    """What comes before a text, empty if nothing does, and the text; None for another form."""
    messages = row.get("messages")
    if isinstance(messages, list) and len(messages) > 1:
        last = messages[-1]
        known = isinstance(last, dict) and last.get("role") == "assistant" and isinstance(last.get("content"), str)
        return (messages[:-1], last["content"]) if known else None
    if isinstance(row.get("prompt"), str) and isinstance(row.get("completion"), str):
        return (row["prompt"], row["completion"]) if row["prompt"].strip() else None
    text = row.get("text")
    return ("", text) if isinstance(text, str) and text.strip() else None


def tokenize_row(engine: Engine, row: Mapping[str, Any]) -> tuple[list[int], list[int]]:
    """The tokens of the prompt and of its text, which ends with an end token. A bare text follows its first."""
    parts = _parts(row)
    assert parts is not None
    before, text = parts
    if not before:
        tokens = list(engine.tokenizer.encode(text))
        return tokens[:1], tokens[1:]
    ends, end = engine.target.end_tokens, answer_end_token(engine.tokenizer)
    end = end if end in ends else min(ends, default=None)
    prompt = list(engine.encode(before))
    return prompt, tokens_after_prompt(engine.tokenizer, prompt, text) + ([] if end is None else [end])


def write_given_texts(
    engine: Engine,
    file: Path,
    folder: Path,
    max_new_tokens: int | None,
    texts_per_shard: int,
    on_progress: Callable[[int], object] = lambda done: None,
) -> tuple[int, int]:
    """Write a file's texts for a model, each up to the model's context; returns how many, and how many were cut.

    Now and then `on_progress` gets how many texts were read. Errors: ValueError where the folder holds other texts.
    """
    texts, cut, context = [], 0, engine.target.context_length or 2**31
    rows = read_rows(file)
    for number, row in enumerate(rows, 1):
        if number % TEXTS_PER_REPORT == 0 or number == len(rows):
            on_progress(number)
        prompt, whole = tokenize_row(engine, row)
        completion = whole[: min(max(context - len(prompt), 0), max_new_tokens or context)]
        if prompt and completion:
            cut += len(completion) < len(whole)
            source = str(row.get("source") or row.get("category") or file.stem)
            texts.append({"source": source, "temperature": TEMPERATURE, "prompt": prompt, "completion": completion})
    if not texts:
        raise ValueError(f"{file} has no text that {engine.target.name} can read; give shorter prompts")
    digest = blake2b(json.dumps(texts).encode(), digest_size=16).hexdigest()
    metadata = {
        "model": engine.target.name, "fingerprint": model_fingerprint(engine.network.model), "given": True,
        "temperatures": [TEMPERATURE], "max_new_tokens": max_new_tokens, "prompts": digest, "questions": len(texts),
        "texts_per_file": texts_per_shard,
    }  # fmt: skip
    if (folder / METADATA_FILE).exists() and read_metadata(folder) != metadata:
        raise ValueError(f"{folder} holds other texts; write these into another folder")
    for number, start in enumerate(range(0, len(texts), texts_per_shard)):
        save_shard(folder / shard_name(number), texts[start : start + texts_per_shard])
    write_json(folder / METADATA_FILE, metadata)
    return len(texts), cut
