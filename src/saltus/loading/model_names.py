"""Compare names of models: hub ids, folders and files whose names differ may still hold the same model."""

from __future__ import annotations

import re
from pathlib import PurePosixPath

SNAPSHOT = re.compile(r".*models--([^/]+?)--([^/]+)/snapshots/[^/]+/?")  # of a hub id in Hugging Face's cache
PART = re.compile(r"-\d+-of-\d+$")  # of a file that is split
SIZE = re.compile(r"(\d+x)?[ae]?\d+(\.\d+)?[bm]")
PRECISION = re.compile(  # how weights are stored, and who named the file
    r"gguf|awq|gptq\w*|hf|meta|mlx|bnb|exl\d|marlin|autoround|quantized|quant|dynamic|static|block|unsloth|ud|imat\w*|i1"
    r"|(nv|mx)?fp\d+|bf16|f16|f32|int\d+|\d+bit|w\d+a\d+|i?q\d.*|k|s|m|l|xs|xl|xxs|\d+g"
)


def surely_differ(first: str, second: str) -> bool:
    """True if two names cannot be those of one model, in whatever precision or folder.

    Both must say a size, as `Qwen3-8B` does. They differ if the sizes do, or if each has a word that the other lacks:
    versions count, precisions do not. Two names of one owner on a hub differ by any word.
    """
    names = [_hub_id(name) for name in (first, second)]
    words = [_words(name) for name in names]
    sizes = [{word for word in own if SIZE.fullmatch(word)} for own in words]
    if not all(sizes):
        return False
    owners = [name.rpartition("/")[0].lower() for name in names]
    if owners[0] and owners[0] == owners[1] and "/" not in owners[0]:
        return words[0] != words[1]
    return sizes[0] != sizes[1] or not (words[0] <= words[1] or words[1] <= words[0])


def _hub_id(name: str) -> str:
    """A name without the file of a repository (`owner/name:file.gguf`), and without its place in the hub's cache."""
    name = name.replace("\\", "/").rstrip("/")
    if found := SNAPSHOT.fullmatch(name):
        return f"{found[1]}/{found[2]}"
    repository, _, file = name.partition(":")
    return repository if file and "/" in repository else PART.sub("", name.removesuffix(".gguf"))


def _words(name: str) -> frozenset[str]:
    """The words of a name's last part that say which model it is, letters apart from the versions that follow them."""
    last = re.sub(r"(?<=\d)_(?=\d)", ".", PurePosixPath(name).name.lower())
    words: set[str] = set()
    for word in re.split(r"[^a-z0-9.]+", last):
        if SIZE.fullmatch(word):
            words.add(word)
        elif not PRECISION.fullmatch(word):
            words |= set(re.findall(r"[a-z]+|\d+(?:\.\d+)*", word))
    return frozenset(words)
