"""A corpus of the target's hidden states: texts, a state for each token, and the uniform interval of each token."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
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
from saltus.core.picking import Coupling
from saltus.loading.model_identity import layers_digest, model_fingerprint
from saltus.training.data.uniform_intervals import Truncation, uniform_intervals
from saltus.training.loop.checkpoint import write_atomically
from saltus.training.loop.processes import ONE_PROCESS, Processes

TEXTS_PER_SHARD = 128
TOKENS_PER_CALL = 192  # tokens of a completion in one call


@dataclass(frozen=True)
class Sample:
    """A training text: prompt, completion, and the temperature at which it was sampled."""

    prompt: Sequence[int]
    completion: Sequence[int]
    temperature: float

    @property
    def tokens(self) -> list[int]:
        """Prompt and completion."""
        return [*map(int, self.prompt), *map(int, self.completion)]


def collect_hidden_states(
    network: Any,
    samples: Sequence[Sample],
    folder: Path,
    temperatures: Sequence[float] = (0.7, 1.0),
    coupling: Coupling = "probability",
    truncation: Truncation | None = None,
    processes: Processes = ONE_PROCESS,
) -> Iterator[int]:
    """Write shards of `TEXTS_PER_SHARD` texts; existing ones are kept. Yields how many texts are done.

    Several processes share the shards, and none is ready before all are.

    A shard holds `tokens` [tokens], the hidden states `features` [tokens, states], the uniform intervals `intervals`
    [temperatures, tokens, 2] (0, 0 for tokens of a prompt; NaN if the coupling has no uniforms) and `texts` [texts, 3]:
    prompt length, length, and temperature × 1,000. Errors: ValueError where the folder holds shards of another model,
    of other layers, temperatures or texts, or of another coupling.
    """
    metadata = {
        "target": model_fingerprint(network.model),
        "layers": layers_digest(network.model),
        "hidden_state_layers": list(network.hidden_state_layers),
        "temperatures": list(temperatures),
        "coupling": coupling,
        **truncation_metadata(truncation),
    }
    yield from write_shards(
        samples, folder, metadata, lambda sample: _read_text(network, sample, temperatures, coupling, truncation),
        processes,
    )  # fmt: skip


def truncation_metadata(truncation: Truncation | None) -> dict[str, Any]:
    """Top-k and top-p of uniform intervals in the metadata of shards: none where nothing is cut."""
    return asdict(truncation) if truncation else {}


def write_shards(
    samples: Sequence[Sample],
    folder: Path,
    metadata: dict[str, Any],
    read_text: Callable[[Sample], dict[str, Tensor]],
    processes: Processes = ONE_PROCESS,
    sharded: bool = False,
) -> Iterator[int]:
    """Write what `read_text` returns for each text, in shards; existing ones are kept. Yields how many texts are done.

    Processes write a part of the shards each. Where a model is `sharded` over them, all read every text, and the main
    one writes. Errors: ValueError where the folder holds shards with other metadata, or of other texts.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for number, start in enumerate(range(0, len(samples), TEXTS_PER_SHARD)):
        if number % processes.count != processes.rank and not sharded:
            continue
        file = folder / f"{number:05d}.safetensors"
        part = samples[start : start + TEXTS_PER_SHARD]
        sampled_at = [round(1000 * sample.temperature) for sample in part]
        of_texts = {"texts": texts_digest(part), "temperatures_of_texts": sampled_at}
        shard_metadata = {"metadata": json.dumps(metadata | of_texts)}
        if file.exists():
            wanted = json.loads(shard_metadata["metadata"])
            found = json.loads(_read_metadata(file).get("metadata", "{}"))
            for newer in ("layers", "temperatures_of_texts"):
                if not found.get(newer):  # an older shard, or packed weights
                    wanted.pop(newer, None)
            names = {**wanted, **found}
            if differs := next((name for name in names if wanted.get(name) != found.get(name)), None):
                what = {"target": "model", "layers": "model"}.get(differs, differs.replace("_", " "))
                raise ValueError(f"{file} holds states for other settings ({what}); take another --work")
        else:
            parts: dict[str, list[Tensor]] = {}
            for done, sample in enumerate(part):
                for name, tensor in read_text(sample).items():
                    parts.setdefault(name, []).append(tensor)
                yield start + done
            joined = {name: torch.cat(tensors, 1 if name == "intervals" else 0) for name, tensors in parts.items()}
            if processes.is_main or not sharded:
                _write_shard(file, joined, shard_metadata)
        yield start + len(part)
    processes.wait()
    if not folder.is_dir() or len(list(folder.glob("*.safetensors"))) < -(-len(samples) // TEXTS_PER_SHARD):
        raise ValueError(f"{folder} lacks files that other processes wrote; all machines must share its disk")


def _write_shard(file: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    content = save(tensors, metadata)
    write_atomically(file, lambda out: out.write(content))


def texts_digest(samples: Sequence[Sample]) -> str:
    """A digest of the texts' tokens."""
    text = json.dumps([[*map(int, sample.prompt), -1, *map(int, sample.completion)] for sample in samples])
    return blake2b(text.encode(), digest_size=16).hexdigest()


def _read_metadata(file: Path) -> dict[str, str]:
    """The metadata of a shard. Errors: ValueError for a damaged one."""
    try:
        with safe_open(file, "pt") as shard:
            return shard.metadata() or {}
    except Exception as error:
        raise ValueError(f"{file} is damaged ({error}); delete it, and give the same command again") from None


def _read_text(
    network: Any, sample: Sample, temperatures: Sequence[float], coupling: Coupling, truncation: Truncation | None
) -> dict[str, Tensor]:
    """One text. The completion is read as a chain of draft nodes, `TOKENS_PER_CALL` at a time."""
    completion, kv_cache = torch.tensor(sample.completion), network.new_kv_cache()
    nodes = len(completion) - 1
    logits, states = [], []
    for start in range(0, max(nodes, 1), TOKENS_PER_CALL):
        chain = tuple(sample.completion[start : min(start + TOKENS_PER_CALL, nodes)])
        canvas = continuation([*sample.prompt, *sample.completion[:start]], len(completion) - start)
        inputs = ForwardInputs(canvas, chain, tuple(range(-1, len(chain) - 1)), output_hidden_states=True)
        outputs = network.forward([inputs], [kv_cache])[0]
        logits.append(outputs.logits[1 if start else 0 :])  # row 0 repeats the last decided token
        states.append(outputs.hidden_states[outputs.context_tokens_read if start else 0 :])
    intervals = torch.zeros(len(temperatures), len(sample.prompt) + len(completion), 2, dtype=torch.float64)
    rows = torch.cat(logits)
    for index, temperature in enumerate(temperatures):
        of_tokens = uniform_intervals(rows, completion.to(rows.device), temperature, coupling, truncation)
        intervals[index, len(sample.prompt) :] = torch.stack([of_tokens.low, of_tokens.high], -1).cpu()
    features = torch.cat([*states, states[-1][-1:]]).cpu()  # the last token's state is never used: a placeholder
    texts = torch.tensor([[len(sample.prompt), features.shape[0], round(1000 * sample.temperature)]])
    return {
        "tokens": torch.tensor(sample.tokens, dtype=torch.int32),
        "features": features.to(torch.bfloat16),
        "intervals": intervals,
        "texts": texts,
    }


class ShardedRows:
    """The rows of several tensors as if concatenated. Rows of a file stay memory-mapped until they are indexed."""

    def __init__(self, parts: Sequence[Float[Tensor, "_ width"]]) -> None:
        self.parts, self.ends = parts, torch.tensor([len(part) for part in parts]).cumsum(0)

    def __len__(self) -> int:
        return int(self.ends[-1])

    def __getitem__(self, numbers: Int[Tensor, "*batch"]) -> Float[Tensor, "*batch width"]:
        rows, first = numbers.flatten(), self.parts[0]
        if len(self.parts) == 1:
            return first[numbers]
        gathered = first.new_empty(len(rows), first.shape[1])
        which = torch.bucketize(rows, self.ends, right=True)
        for part in which.unique().tolist():
            in_part = which == part
            gathered[in_part] = self.parts[part][rows[in_part] - (self.ends[part] - len(self.parts[part]))]
        return gathered.unflatten(0, numbers.shape)


@dataclass(frozen=True)
class HiddenStateCorpus:
    """All shards. Row i of the hidden states is the target's state at token i."""

    tokens: Int[Tensor, "tokens"]
    hidden_states: ShardedRows | Float[Tensor, "tokens states"]
    uniform_intervals: Float[Tensor, "temperatures tokens 2"]
    text_table: np.ndarray  # [texts, 4]: start, prompt length, length, temperature × 1,000
    temperatures: tuple[float, ...]  # of the intervals
    hidden_state_layers: tuple[int, ...]  # besides the last
    target_fingerprint: str
    coupling: Coupling = "probability"  # of the intervals


def load_hidden_states(folder: Path, num_texts: int | None = None) -> HiddenStateCorpus:
    """States stay in their files until they are used. Errors: ValueError without shards, or for a damaged one."""
    shards, texts, metadata = load_shards(
        folder, ("target", "hidden_state_layers", "temperatures", "coupling", "top_k", "top_p"), num_texts
    )
    return HiddenStateCorpus(
        shards["tokens"].long(), ShardedRows(shards.pop("features")), shards["intervals"], texts,
        tuple(metadata["temperatures"]), tuple(metadata["hidden_state_layers"]), metadata["target"],
        metadata["coupling"],
    )  # fmt: skip


def load_shards(
    folder: Path, same_keys: Sequence[str], num_texts: int | None = None
) -> tuple[dict[str, Any], np.ndarray, dict[str, Any]]:
    """The tensors of all shards ("features" as a list, by shard), the table of texts, and the metadata.

    Shards beyond the first `num_texts` texts, of an earlier run with more of them, are left out. Errors: ValueError
    without shards, for a damaged one, or where shards differ in one of `same_keys`.
    """
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ValueError(f"{folder} holds no shards of states; collect them first")
    if num_texts is not None:
        files = files[: -(-num_texts // TEXTS_PER_SHARD)]
    metadata = [json.loads(_read_metadata(file)["metadata"]) for file in files]
    for file, shard_metadata in zip(files, metadata, strict=True):
        if any(shard_metadata.get(name) != metadata[0].get(name) for name in same_keys):
            raise ValueError(f"{file} holds states of another model than {files[0]}; keep them in folders of their own")
    shards = [load_file(file) for file in files]
    parts: dict[str, Any] = {name: [shard[name] for shard in shards] for name in shards[0]}
    joined = {
        name: part if name == "features" else torch.cat(part, 1 if name == "intervals" else 0)
        for name, part in parts.items()
    }
    texts = joined.pop("texts").numpy()
    starts = np.concatenate([[0], np.cumsum(texts[:, 1])[:-1]])
    return joined, np.column_stack([starts, texts]), metadata[0]
