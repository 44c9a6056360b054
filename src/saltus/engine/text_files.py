"""Read texts and JSON lines that a user wrote; an error names the file, the line and the cure."""

from __future__ import annotations

import gzip
import json
import os
import re
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def typed_text(word: str) -> str:
    """A word of the command line as UTF-8, also where the locale knows ASCII only: there Python escapes its bytes."""
    try:
        return os.fsencode(word).decode("utf-8") if any("\udc80" <= letter <= "\udcff" for letter in word) else word
    except UnicodeError:
        return word


def read_stdin() -> str:
    """The text of stdin, which is UTF-8 whatever the locale is. Errors: ValueError."""
    try:
        return sys.stdin.buffer.read().decode("utf-8-sig")
    except UnicodeDecodeError:
        raise ValueError("stdin is not UTF-8 text; convert it first, for instance with iconv -t utf-8") from None


def read_text(file: Path) -> str:
    """A text in UTF-8, which may be compressed (.gz), with line ends "\\n". Errors: ValueError."""
    try:
        data = file.read_bytes()
        text = (gzip.decompress(data) if file.suffix == ".gz" else data).decode("utf-8-sig")
    except FileNotFoundError:
        raise ValueError(f"there is no file {file}; check the name") from None
    except IsADirectoryError:
        raise ValueError(f"{file} is a folder; give a file") from None
    except (gzip.BadGzipFile, zlib.error, EOFError):
        raise ValueError(f"{file} is not a whole gzip file; fetch it again") from None
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise ValueError(f"{file}, line {line}: this is not UTF-8 text; convert the file to UTF-8") from None
    except OSError as error:
        raise ValueError(f"{file} cannot be read: {error.strerror}") from None
    return text.replace("\r\n", "\n")


def separate_texts(text: str) -> list[str]:
    """The texts of a plain text, between which there are empty lines or `<|endoftext|>`."""
    return [part.strip() for part in re.split(r"<\|endoftext\|>|\n\s*\n", text) if part.strip()]


def parse_jsonl(text: str, name: str) -> Iterator[tuple[str, Any]]:
    """The values of JSON lines, each with its location for error messages. Errors: ValueError."""
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        location = f"{name}, line {number}"
        try:
            yield location, json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(
                f"{location}: this is not JSON ({error.msg} at column {error.colno}); write one JSON object a line"
            ) from None


def read_jsonl(file: Path) -> Iterator[tuple[str, Any]]:
    """The values of a file of JSON lines, each with its location. Errors: ValueError."""
    return parse_jsonl(read_text(file), str(file))
