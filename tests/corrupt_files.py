"""Corrupt a tiny GGUF file and model folders in seeded ways, and load and use what comes out, in a process of its own.

`python corrupt_files.py FOLDER KIND FIRST STOP` takes the cases FIRST to STOP of a kind (gguf, folder, configuration,
quantised or metadata) from the originals in FOLDER; of the last three they are made there. It prints a JSON line for
each. A case that hangs or fills memory ends the process.
"""

from __future__ import annotations

import json
import random
import resource
import shutil
import signal
import struct
import sys
from functools import partial
from pathlib import Path
from typing import Any

CPU_SECONDS = 5  # for one case
MEMORY = 1 << 30  # bytes that all cases of a process may take beyond its start
EDGES: list[Any] = [
    None, True, False, -1, 0, 1, 2, 3, 7, 63, 1 << 20, 1 << 31, (1 << 32) - 1, 1 << 60, 1.5, -0.5, 1e300, float("nan"),
    float("inf"), "", "x", "<s>", "a" * 10_000, "\ud7ff\n", [], [1], ["a", "b"], [[]], {}, {"a": 1},
]  # fmt: skip
TEMPLATES = [
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "{{ 1 // 0 }}", "{{ a.b.c }}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "{{ 9 ** 9 ** 9 }}", "{{ 'a' * 10 ** 10 }}", "{% for", "{{ 7 }}",
    "{{ messages[9].content }}", "{{ raise_exception('no') }}", "", "{{ ''.__class__ }}",
    "{{ 'a' | center(10 ** 10) }}",
    "{% set n = namespace(x='ab') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}{{ n.x }}",
    "{{ messages[0].content + 1 }}", "{{ nothing() }}", "{{ '%d' % 'a' }}", "{{ strftime_now('%Q') }}",
]  # fmt: skip


# GGUF


def packed_string(content: str | bytes) -> bytes:
    content = content if isinstance(content, bytes) else content.encode("utf-8", "surrogatepass")
    return struct.pack("<Q", len(content)) + content


SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}


def packed_value(kind: int, value: Any) -> bytes:
    """A value of metadata; one that its type cannot hold becomes 1."""
    if kind == 8:
        return packed_string(value if isinstance(value, str | bytes) else "x")
    if kind == 9:
        inner, items = value
        return struct.pack("<IQ", inner, len(items)) + b"".join(packed_value(inner, item) for item in items)
    try:
        return struct.pack(f"<{SCALARS[kind]}", value)
    except (struct.error, OverflowError, TypeError):
        return struct.pack(f"<{SCALARS[kind]}", 1)


def read_parts(file: Path) -> tuple[list, list]:
    """Metadata (key, type, value) and tensors [name, dimensions, type, bytes] of a whole file, by the library gguf."""
    from gguf import GGUFReader, GGUFValueType

    reader = GGUFReader(file)
    metadata = []
    for key, field in reader.fields.items():
        if not key.startswith("GGUF."):
            value = field.contents()
            is_array = field.types[0] == GGUFValueType.ARRAY
            metadata.append([key, int(field.types[0]), (int(field.types[1]), value) if is_array else value])
    tensors = [
        [one.name, one.shape.tolist(), int(one.tensor_type), one.data.tobytes()] for one in reader.tensors
    ]  # fmt: skip
    return metadata, tensors


def gguf_bytes(metadata: list, tensors: list, choice: random.Random | None = None) -> bytes:
    """A file of these parts; `choice` corrupts counts or a tensor's offset."""
    counts = [len(tensors), len(metadata)]
    if choice is not None:
        counts[choice.randrange(2)] = choice.choice([0, 1, len(metadata) + 1, 1 << 20, 1 << 32, 1 << 60, (1 << 64) - 1])
    head = b"GGUF" + struct.pack("<IQQ", 3, *counts)
    head += b"".join(packed_string(key) + struct.pack("<I", kind) + packed_value(kind, value)
                     for key, kind, value in metadata)  # fmt: skip
    data = b""
    for name, dimensions, kind, content in tensors:
        head += packed_string(name) + struct.pack(f"<I{len(dimensions)}Q", len(dimensions), *dimensions)
        head += struct.pack("<IQ", kind, len(data))
        data += content + bytes(-len(content) % 32)
    return head + bytes(-len(head) % 32) + data


def changed_metadata(metadata: list, choice: random.Random) -> list:
    """With one entry dropped, doubled, or of another type or value."""
    found = [list(entry) for entry in metadata]
    number = choice.randrange(len(found))
    entry = found[number]
    match choice.randrange(6):
        case 0:
            del found[number]
        case 1:
            found.append(entry)
        case 2:
            entry[1:] = [8, choice.choice(["", "x", "llama", "qwen2", "gpt2", "yarn", "linear", b"\xff\xfe"])]
        case 3 if entry[1] == 9:
            inner, items = entry[2]
            items = list(items)
            at = choice.randrange(len(items))
            items[at : at + choice.randrange(2)] = choice.choice([[], [choice.choice(EDGES)], [items[0]], ["a" * 5000]])
            entry[2] = inner, items
        case 4:
            kind = choice.choice([*SCALARS, 9])
            values = [choice.choice(EDGES) for _ in range(choice.randrange(4))]
            entry[1:] = [kind, (choice.choice([0, 4, 6, 8]), values) if kind == 9 else choice.choice(EDGES)]
        case _ if entry[1] in SCALARS:
            entry[2] = choice.choice(EDGES)
        case _:
            template = [8, choice.choice(TEMPLATES)]
            found = [[key, *(template if key.endswith("chat_template") else rest)] for key, *rest in found]
    return found


def changed_tensors(tensors: list, choice: random.Random) -> list:
    """With one tensor dropped, doubled, renamed, or of other dimensions or another type."""
    found = [list(tensor) for tensor in tensors]
    number = choice.randrange(len(found))
    tensor = found[number]
    match choice.randrange(6):
        case 0:
            del found[number]
        case 1:
            found.append(tensor)
        case 2:
            tensor[0] = choice.choice(["x", "", "blk.7.attn_q.weight", "output.weight", "rope_freqs.weight"])
        case 3:
            tensor[1] = [choice.choice([0, 1, 32, 256, 1 << 20, 1 << 60]) for _ in range(choice.randrange(4))]
        case 4:
            tensor[2] = choice.choice([0, 1, 2, 8, 12, 14, 30, 99])
        case _:
            tensor[3] = choice.choice([b"", tensor[3][:7], bytes([255]) * len(tensor[3]), bytes(len(tensor[3]))])
    return found


def corrupt_bytes(content: bytes, choice: random.Random, end: int | None = None) -> bytes:
    """Cut short, or with some bits flipped before `end`."""
    if choice.random() < 0.25:
        return content[: choice.randrange(len(content))]
    changed = bytearray(content)
    for _ in range(choice.randint(1, 4)):
        changed[choice.randrange(min(end or len(changed), len(changed)))] ^= 1 << choice.randrange(8)
    return bytes(changed)


def corrupt_gguf(parts: tuple[list, list], choice: random.Random) -> bytes:
    metadata, tensors = parts
    match choice.randrange(6):
        case 0:
            return corrupt_bytes(gguf_bytes(metadata, tensors), choice, end=choice.choice([64, 2000, 20_000, None]))
        case 1:
            return gguf_bytes(metadata, tensors, choice)
        case 2 | 3 | 4:
            return gguf_bytes(changed_metadata(metadata, choice), tensors)
        case _:
            return gguf_bytes(metadata, changed_tensors(tensors, choice))


# Folders


def change_json(value: Any, choice: random.Random) -> None:
    """Replace or delete something anywhere in a tree of JSON."""
    while True:
        keys = list(value) if isinstance(value, dict) else list(range(len(value)))
        key = choice.choice(keys)
        if isinstance(value[key], dict | list) and value[key] and choice.random() < 0.75:
            value = value[key]
        elif choice.random() < 0.25:
            del value[key]
            return
        else:
            value[key] = choice.choice([*EDGES, value[choice.choice(keys)]])
            return


def corrupt_file(file: Path, choice: random.Random) -> None:
    content = file.read_bytes()
    kind = choice.random()
    if kind < 0.1:
        file.unlink()
    elif kind < 0.2:
        file.write_bytes(corrupt_bytes(content, choice))
    elif file.suffix == ".json":
        tree = json.loads(content)
        for _ in range(choice.randint(1, 2)):
            if tree:
                change_json(tree, choice)
        if "chat_template" in tree and choice.random() < 0.5:
            tree["chat_template"] = choice.choice(TEMPLATES)
        file.write_text(json.dumps(tree))
    elif file.suffix == ".jinja":
        file.write_text(choice.choice(TEMPLATES))
    elif file.suffix == ".safetensors":
        length = struct.unpack("<Q", content[:8])[0]
        tree = json.loads(content[8 : 8 + length])
        change_json(tree, choice)
        header = json.dumps(tree).encode()
        file.write_bytes(struct.pack("<Q", len(header)) + header + content[8 + length :])
    else:
        file.write_bytes(corrupt_bytes(content, choice, end=2000))


def corrupt_folder(folder: Path, choice: random.Random) -> str:
    """Corrupt a file or two; what was done, in words."""
    files = sorted(file for file in folder.iterdir() if file.is_file())
    chosen = choice.sample(files, choice.choice([1, 1, 2]) if len(files) > 1 else 1)
    for file in chosen:
        corrupt_file(file, choice)
    return f"{folder.name}: {', '.join(file.name for file in chosen)}"


# A case


def use(engine: Any) -> None:
    """Two tokens, and two of a conversation where there is a chat template."""
    engine.generate("the cat", max_new_tokens=2, raw=True)
    engine.generate([{"role": "user", "content": "the cat"}], max_new_tokens=2)


def outcome(load: Any) -> dict[str, Any]:
    """What became of a case: used, refused in a line, or a fault."""
    try:
        use(load())
    except ValueError as error:
        text = str(error)
        fault = "\n" in text or not text or "allocate" in text
        return {"is": "fault" if fault else "refused", "text": text}
    except BaseException as error:
        import traceback

        trace = traceback.extract_tb(error.__traceback__)
        ours = [f"{Path(frame.filename).name}:{frame.lineno}" for frame in trace]
        return {"is": "fault", "text": f"{type(error).__name__}: {error}"[:300], "at": ours[-6:]}
    return {"is": "used"}


def run_cases(originals: Path, kind: str, numbers: range) -> None:
    import saltus
    from corrupt_configurations import architecture_folder, corrupt_copy, corrupt_metadata
    from saltus.loading import gguf_files, sources

    work = originals / f"work-{kind}-{numbers.start}"
    for module in (sources, gguf_files):
        module.cache_folder = lambda: work / "cache"
    parts = read_parts(originals / "tiny.gguf") if kind == "gguf" else ([], [])
    models = sorted(file.name for file in originals.glob("model-*"))
    drafters = sorted(file.name for file in originals.glob("drafter-*"))
    target = originals / models[0] if models else architecture_folder(originals, "Llama")
    use(saltus.load(str(target), "lookup", device="cpu"))
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY, size + MEMORY))
    for number in numbers:
        choice = random.Random(f"{kind} {number}")
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir()
        print(json.dumps({"begin": number}), flush=True)
        signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
        if kind == "gguf":
            path, what = work / f"{number}.gguf", ""
            path.write_bytes(corrupt_gguf(parts, choice))
        elif kind == "metadata":
            path = work / f"{number}.gguf"
            content, what = corrupt_metadata(originals, choice)
            path.write_bytes(content)
        elif kind in ("configuration", "quantised"):
            path, what = corrupt_copy(originals, work, kind, choice)
        else:
            path = work / choice.choice([*models, *drafters])
            shutil.copytree(originals / path.name, path)
            what = corrupt_folder(path, choice)
        given = {"model": str(path), "method": "lookup"}
        if path.name in drafters:
            method = path.name.split("-")[1]
            given = {"model": str(target), "method": method, "options": {method: {"model": str(path)}}}
        found = outcome(partial(saltus.load, device="cpu", **given))
        signal.setitimer(signal.ITIMER_PROF, 0)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
        print(json.dumps({"end": number, "what": what, "peak": peak, **found}), flush=True)
    shutil.rmtree(work, ignore_errors=True)


if __name__ == "__main__":
    run_cases(Path(sys.argv[1]), sys.argv[2], range(int(sys.argv[3]), int(sys.argv[4])))
