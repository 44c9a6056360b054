"""Corrupt configurations of every architecture, of quantised weights and of GGUF files, in seeded ways."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import gguf_models
from architectures import ARCHITECTURES, DESCRIBED, tiny
from corrupt_files import EDGES, SCALARS, change_json, corrupt_file, gguf_bytes, read_parts
from quantised_models import CASES, write_quantised
from tiny_models import TEMPLATE, byte_tokenizer


def places(tree: Any, kinds: tuple[type, ...]) -> list[tuple[Any, Any]]:
    """Every object or list in a tree of JSON with a key or number at which it has a value of some kinds."""
    found = []
    for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
        if type(value) in kinds:
            found.append((tree, key))
        if isinstance(value, dict | list):
            found += places(value, kinds)
    return found


def changed_size(size: int, others: list[int], choice: random.Random) -> int:
    """Another one: near it, of another thing, or one that cannot be."""
    near = [size + 1, size - 1, 2 * size, size // 2, 3 * size]
    return choice.choice([*near, *choice.sample(others, min(3, len(others))), 0, -1, -size, 1 << 20, 1 << 40])


def corrupt_configuration(tree: dict[str, Any], choice: random.Random) -> None:
    """Change up to three things: sizes, words, numbers, lists, or whatever `change_json` finds."""
    for _ in range(choice.choice([1, 1, 2, 3])):
        kind = choice.randrange(5)
        kinds: tuple[type, ...] = [(int,), (list,), (str,), (float, bool, type(None)), (int, list, str, float)][kind]
        found = places(tree, kinds)
        if kind == 4 or not found:
            change_json(tree, choice)
            continue
        where, key = choice.choice(found)
        if kind == 0:
            sizes = [holder[place] for holder, place in found]
            where[key] = changed_size(where[key], sizes, choice)
        elif kind == 1:
            items = where[key]
            where[key] = choice.choice([items[::-1], items[1:], items + items, [], items * 1000, items[:1]])
        elif kind == 2:
            words = [holder[place] for holder, place in found]
            where[key] = choice.choice([*words, "", "x", where[key].upper(), "silu", "full_attention", "linear"])
        else:
            where[key] = choice.choice(EDGES)


def architecture_folder(originals: Path, name: str, **changes: int) -> Path:
    """A folder with a tiny model of an architecture; made when it is first asked for."""
    folder = originals / "architectures" / "-".join([*name.split(), *changes])
    if not folder.exists():
        sizes = {
            key: 300
            for key in ("vocab_size", "vocab_size_per_layer_input")
            if key in {"vocab_size", *ARCHITECTURES[name]}
        }
        tiny(name, **sizes, eos_token_id=0, pad_token_id=1, bos_token_id=2, **changes).save_pretrained(folder)
        byte_tokenizer().save_pretrained(folder)
    return folder


def quantised_folder(originals: Path, case: str) -> Path:
    """A folder with a tiny model whose weights are quantised; made when it is first asked for."""
    folder = originals / "quantised" / case.replace(" ", "-")
    if not folder.exists():
        shutil.copytree(architecture_folder(originals, "Llama", hidden_size=96, intermediate_size=96), folder)
        write_quantised(folder, *CASES[case][:2], originals / "quantised" / f"meant-{folder.name}")
    return folder


def corrupt_copy(originals: Path, work: Path, kind: str, choice: random.Random) -> tuple[Path, str]:
    """A folder with a corrupt configuration, of an architecture or of quantised weights, and what it was before."""
    is_quantised = kind == "quantised"
    made = quantised_folder if is_quantised else architecture_folder
    original = made(originals, choice.choice(sorted(CASES) if is_quantised else DESCRIBED))
    path = work / original.name
    shutil.copytree(original, path)
    before = json.loads((path / "config.json").read_text())
    tree = json.loads((path / "config.json").read_text())
    if is_quantised and choice.random() < 0.3:
        corrupt_file(path / "model.safetensors", choice)
    else:
        corrupt_configuration(tree["quantization_config"] if is_quantised else tree, choice)
    (path / "config.json").write_text(json.dumps(tree))
    changed = {key: (before.get(key), tree.get(key)) for key in {*before, *tree} if before.get(key) != tree.get(key)}
    return path, f"{original.name}: {changed}"[:300]


def corrupt_metadata(originals: Path, choice: random.Random) -> tuple[bytes, str]:
    """A file of any architecture in which up to two entries of its sizes are others or of another type, or missing."""
    name = choice.choice(sorted(gguf_models.CASES))
    case, file = gguf_models.CASES[name], originals / f"{name.replace(', ', '-')}.gguf"
    if not file.exists():
        gguf_models.write(gguf_models.tiny(case), case, file, [gguf_models.Q.Q8_0])
    metadata, tensors = read_parts(file)
    metadata.append(["tokenizer.chat_template", 8, TEMPLATE])
    mine = [entry for entry in metadata if entry[0].startswith(f"{case.name}.")]
    sizes = [entry[2] for entry in mine if type(entry[2]) is int]
    changed = choice.sample(mine, choice.choice([1, 1, 2]))
    for entry in changed:
        if choice.random() < 0.15:
            metadata.remove(entry)
        elif type(entry[2]) is int and choice.random() < 0.7:
            entry[2] = changed_size(entry[2], sizes, choice)
        elif entry[1] == 9 and choice.random() < 0.7:
            inner, items = entry[2]
            items = list(items)
            entry[2] = inner, choice.choice([items[::-1], items[1:], items * 2, [], items * 1000])
        else:
            entry[1:] = [choice.choice([*SCALARS, 8]), choice.choice(EDGES)]
    return gguf_bytes(metadata, tensors), f"{case.name}: {[(entry[0], str(entry[2])[:40]) for entry in changed]}"
