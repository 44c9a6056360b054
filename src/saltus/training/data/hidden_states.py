"""Read texts with the target once, and keep what a drafter learns from: features, tokens, and edges of their picks."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from safetensors import safe_open
from safetensors.torch import load_file, save
from torch import Tensor

from saltus.core.canvas import continuation
from saltus.core.forward import ForwardInputs
from saltus.networks.loading.drafter_files import model_fingerprint
from saltus.training.data.uniform_intervals import uniform_intervals
from saltus.training.loop.checkpoint import write_atomically

TEXTS_PER_SHARD = 128  # texts of a file
TOKENS_PER_CALL = 192  # tokens of a completion that a call reads


@dataclass(frozen=True)
class Sample:
    """A text to learn from: what was asked, what was written, and at which temperature."""

    prompt: Sequence[int]
    completion: Sequence[int]
    temperature: float


def collect_hidden_states(
    network: Any, samples: Sequence[Sample], folder: Path, temperatures: Sequence[float] = (0.7, 1.0)
) -> Iterator[int]:
    """Write shards of `SHARD` texts; those that are there are kept. Yields how many texts are done.

    A shard holds `tokens` [tokens], `features` [tokens, states], `edges` [temperatures, tokens, 2] (0, 0 for tokens of
    a prompt) and `texts` [texts, 3]: prompt length, length, and the temperature it was written at, times 1,000.
    Errors: ValueError where the folder holds shards of another model, of other taps, temperatures or texts.
    """
    papers = {
        "target": model_fingerprint(network.model),
        "taps": list(network.hidden_state_layers),
        "temperatures": list(temperatures),
    }
    yield from write_shards(samples, folder, papers, lambda sample: _read_text(network, sample, temperatures))


def write_shards(
    samples: Sequence[Sample],
    folder: Path,
    metadata: dict[str, Any],
    read_text: Callable[[Sample], dict[str, Tensor]],
) -> Iterator[int]:
    """What `read` finds in each text, `SHARD` texts a file; those that are there are kept. Yields how many are done.

    `papers` say what was read with. Errors: ValueError where the folder holds shards of others, or of other texts.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for number, start in enumerate(range(0, len(samples), TEXTS_PER_SHARD)):
        file = folder / f"{number:05d}.safetensors"
        part = samples[start : start + TEXTS_PER_SHARD]
        made_of = {"papers": json.dumps(metadata | {"texts": _texts_digest(part)})}
        if file.exists():
            if _read_metadata(file) != made_of:
                raise ValueError(f"{file} holds states of another model or other texts; collect into another folder")
        else:
            kept: dict[str, list[Tensor]] = {}
            for done, sample in enumerate(part):
                for name, tensor in read_text(sample).items():
                    kept.setdefault(name, []).append(tensor)
                yield start + done
            joined = {name: torch.cat(tensors, 1 if name == "edges" else 0) for name, tensors in kept.items()}
            _write_shard(file, joined, made_of)
        yield start + len(part)


def _write_shard(file: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    content = save(tensors, metadata)
    write_atomically(file, lambda out: out.write(content))


def _texts_digest(samples: Sequence[Sample]) -> str:
    text = json.dumps([[*map(int, one.prompt), -1, *map(int, one.completion)] for one in samples])
    return blake2b(text.encode(), digest_size=16).hexdigest()


def _read_metadata(file: Path) -> dict[str, str]:
    """What a shard says of itself. Errors: ValueError for a damaged one."""
    try:
        with safe_open(file, "pt") as shard:
            return shard.metadata() or {}
    except Exception as error:
        raise ValueError(f"{file} is damaged ({error}); delete it and collect again") from None


def _read_text(network: Any, sample: Sample, temperatures: Sequence[float]) -> dict[str, Tensor]:
    """One text: the completion hangs as a chain, from the prompt or, piece by piece, from what was read."""
    completion, kv_cache = torch.tensor(sample.completion), network.new_kv_cache()
    nodes = len(completion) - 1
    logits, states = [], []
    for start in range(0, max(nodes, 1), TOKENS_PER_CALL):
        chain = tuple(sample.completion[start : min(start + TOKENS_PER_CALL, nodes)])
        canvas = continuation([*sample.prompt, *sample.completion[:start]], len(completion) - start)
        inputs = ForwardInputs(canvas, chain, tuple(range(-1, len(chain) - 1)), output_hidden_states=True)
        outputs = network.forward([inputs], [kv_cache])[0]
        logits.append(outputs.logits[1 if start else 0 :])  # the last decided token is read again
        states.append(outputs.hidden_states[outputs.context_tokens_read if start else 0 :])
    found = torch.zeros(len(temperatures), len(sample.prompt) + len(completion), 2, dtype=torch.float64)
    for place, temperature in enumerate(temperatures):
        own = uniform_intervals(torch.cat(logits), completion, temperature)
        found[place, len(sample.prompt) :] = torch.stack([own.low, own.high], -1)
    features = torch.cat([*states, states[-1][-1:]])  # of the last token none is needed
    texts = torch.tensor([[len(sample.prompt), features.shape[0], round(1000 * sample.temperature)]])
    return {
        "tokens": torch.tensor([*sample.prompt, *sample.completion], dtype=torch.int32),
        "features": features.to(torch.bfloat16),
        "edges": found,
        "texts": texts,
    }


class ShardedRows:
    """Rows of several tensors under one numbering. Those of a file stay there, mapped, until they are asked for."""

    def __init__(self, parts: Sequence[Float[Tensor, "_ width"]]) -> None:
        self.parts, self.ends = parts, torch.tensor([len(part) for part in parts]).cumsum(0)

    def __len__(self) -> int:
        return int(self.ends[-1])

    def __getitem__(self, numbers: Int[Tensor, "*batch"]) -> Float[Tensor, "*batch width"]:
        rows, first = numbers.flatten(), self.parts[0]
        if len(self.parts) == 1:
            return first[numbers]
        found = first.new_empty(len(rows), first.shape[1])
        which = torch.bucketize(rows, self.ends, right=True)
        for part in which.unique().tolist():
            mine = which == part
            found[mine] = self.parts[part][rows[mine] - (self.ends[part] - len(self.parts[part]))]
        return found.unflatten(0, numbers.shape)


@dataclass(frozen=True)
class HiddenStateCorpus:
    """All shards together. Row i of the features is the target's state after it has read token i."""

    tokens: Int[Tensor, "tokens"]
    hidden_states: ShardedRows | Float[Tensor, "tokens states"]
    uniform_intervals: Float[Tensor, "temperatures tokens 2"]
    text_table: np.ndarray  # [texts, 4]: start, prompt length, length, temperature × 1,000
    temperatures: tuple[float, ...]  # of the edges
    hidden_state_layers: tuple[int, ...]  # layers whose states the features hold, besides the last
    target_fingerprint: str  # fingerprint


def load_hidden_states(folder: Path) -> HiddenStateCorpus:
    """Features stay in their files until they are used. Errors: ValueError: there are none, or one is damaged."""
    shards, texts, papers = load_shards(folder, ("target", "taps", "temperatures"))
    return HiddenStateCorpus(
        shards["tokens"].long(), ShardedRows(shards.pop("features")), shards["edges"], texts,
        tuple(papers["temperatures"]), tuple(papers["taps"]), papers["target"],
    )  # fmt: skip


def load_shards(folder: Path, same_keys: Sequence[str]) -> tuple[dict[str, Any], np.ndarray, dict[str, Any]]:
    """All shards together, where each text is (`States.texts`), and their papers, `alike` in what is named.

    Features are a list, by shard.

    Errors: ValueError where there are none, where one is damaged, or where they are not alike.
    """
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ValueError(f"{folder} holds no shards of states; collect them first")
    papers = [json.loads(_read_metadata(file)["papers"]) for file in files]
    for file, one in zip(files, papers, strict=True):
        if any(one.get(name) != papers[0].get(name) for name in same_keys):
            raise ValueError(f"{file} holds states of another model than {files[0]}; keep them in folders of their own")
    shards = [load_file(file) for file in files]
    names = shards[0].keys()
    parts: dict[str, Any] = {name: [shard[name] for shard in shards] for name in names}
    joined = {
        name: found if name == "features" else torch.cat(found, 1 if name == "edges" else 0)
        for name, found in parts.items()
    }
    texts = joined.pop("texts").numpy()
    starts = np.concatenate([[0], np.cumsum(texts[:, 1])[:-1]])
    return joined, np.column_stack([starts, texts]), papers[0]
