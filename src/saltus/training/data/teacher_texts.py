"""Teacher texts: answers of a model to prompts, in shards that are complete or absent."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

from saltus.core.distributions import Step
from saltus.core.picking import DEFAULT_COUPLING, Coupling
from saltus.core.sampling import Sampling
from saltus.engine.engine import Engine
from saltus.engine.request import Request
from saltus.engine.scheduler import run_requests
from saltus.loading.model_identity import layers_digest, model_fingerprint
from saltus.models.protocols import DrafterHost
from saltus.training.data.hidden_states import Sample
from saltus.training.loop.checkpoint import write_atomically, write_json

METADATA_FILE = "collect.json"


def shard_name(number: int) -> str:
    """The name of the file of a shard."""
    return f"{number:05d}.jsonl.gz"


@dataclass(frozen=True)
class TokenizedPrompt:
    """The token ids of a prompt, and where it comes from."""

    source: str
    prompt: tuple[int, ...]


@dataclass(frozen=True)
class CollectionPlan:
    """The texts to write: every prompt answered at every temperature, in shards.

    With a block size the texts are written by Jacobi decoding, and its iterates are recorded.
    """

    prompts: Sequence[TokenizedPrompt]
    temperatures: tuple[float, ...] = (0.0, 0.7)
    max_new_tokens: int = 256
    seed: int = 0
    texts_per_shard: int = 128
    block_size: int = 0
    coupling: Coupling = DEFAULT_COUPLING
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        for temperature in self.temperatures:
            self.sampling(temperature)
        if self.seed < 0:
            raise ValueError(f"seed is {self.seed}, but must be 0 or more; take its absolute value")

    def sampling(self, temperature: float) -> Sampling:
        """How the texts of a temperature are sampled."""
        return Sampling(temperature=temperature, top_k=self.top_k, top_p=self.top_p, coupling=self.coupling)

    @property
    def num_texts(self) -> int:
        return len(self.prompts) * len(self.temperatures)

    @property
    def shard_names(self) -> list[str]:
        return [shard_name(number) for number in range(-(-self.num_texts // self.texts_per_shard))]

    def texts_of_shard(self, shard_number: int) -> list[tuple[int, float]]:
        """The texts of a shard: prompt number and temperature of each."""
        here = range(
            shard_number * self.texts_per_shard, min((shard_number + 1) * self.texts_per_shard, self.num_texts)
        )
        kinds = len(self.temperatures)
        return [(text // kinds, self.temperatures[text % kinds]) for text in here]

    def metadata(self, engine: Engine) -> dict[str, Any]:
        """The metadata of a folder of these texts, written by an engine."""
        model = engine.network.model
        return {
            "model": engine.target.name,
            "fingerprint": model_fingerprint(model),
            "layers": layers_digest(model),
            "dtype": str(model.dtype).removeprefix("torch."),
            "free_shapes": not engine.network.batch_invariant,
            "coupling": self.coupling,
            **self.settings_metadata(),
            **({"block_size": self.block_size, "guessed_by": _adapter_digest(engine)} if self.block_size else {}),
        }

    def settings_metadata(self) -> dict[str, Any]:
        """The part of a folder's metadata that does not depend on who writes."""
        inputs = json.dumps([[prompt.source, *map(int, prompt.prompt)] for prompt in self.prompts])
        return {
            "temperatures": list(self.temperatures),
            "max_new_tokens": self.max_new_tokens,
            "seed": self.seed,
            **({"top_k": self.top_k} if self.top_k else {}),
            **({"top_p": self.top_p} if self.top_p < 1 else {}),
            "prompts": blake2b(inputs.encode(), digest_size=16).hexdigest(),
            "questions": len(self.prompts),
            "texts_per_file": self.texts_per_shard,
        }


@dataclass
class TrajectoryRequest(Request):
    """A request that records the inputs of every call: the number of decided tokens, and the guesses after them."""

    iterates: list[list[int]] = field(default_factory=list, init=False)

    def record(self, step: Step) -> None:
        super().record(step)
        self.iterates.append([step.canvas.num_decided, *step.inputs.first_chain_tokens])


def _adapter_digest(engine: Engine) -> str:
    """A digest of the adapter that drafts for a target; empty where there is none."""
    adapter = engine.network.adapter if isinstance(engine.network, DrafterHost) else None
    if adapter is None:
        return ""
    digest = blake2b(digest_size=16)
    for name, weight in sorted(adapter.state_dict().items()):
        digest.update(name.encode() + weight.detach().cpu().float().numpy().tobytes())
    return digest.hexdigest()


def text_seed(seed: int, prompt_number: int) -> int:
    """The seed of the answers to a prompt; it does not depend on batches or processes."""
    return int.from_bytes(
        blake2b(f"{int(seed)}/question/{int(prompt_number)}".encode(), digest_size=8).digest(), "little"
    )


def prepare_folder(folder: Path, plan: CollectionPlan, metadata: Mapping[str, Any]) -> list[int]:
    """Write the folder's metadata; returns the numbers of the missing shards.

    A folder that was begun with the first of these prompts alone goes on with all. Errors: ValueError where it holds
    other texts, or a damaged shard.
    """
    if not (folder / METADATA_FILE).exists():
        write_json(folder / METADATA_FILE, metadata)
    begun = read_metadata(folder)
    if not begun.get("layers"):  # an older folder, or packed weights
        metadata, begun = (
            {name: value for name, value in each.items() if name != "layers"} for each in (metadata, begun)
        )
    known = begun.get("questions")
    if isinstance(known, int) and known < len(plan.prompts):
        first = replace(plan, prompts=plan.prompts[:known])
        if {**metadata, **first.settings_metadata(), "model": begun.get("model")} == begun:
            if first.num_texts % plan.texts_per_shard:  # its last shard gets more texts
                (folder / first.shard_names[-1]).unlink(missing_ok=True)
            begun = {**metadata, "model": begun["model"]}
            write_json(folder / METADATA_FILE, begun)
    names = [name for name in {**metadata, **begun} if name != "model"]
    differs = next((name for name in names if begun.get(name) != metadata.get(name)), None)
    if differs in ("prompts", "fingerprint", "layers"):
        what = "answers to other prompts" if differs == "prompts" else f"answers of another model ({begun['model']})"
        raise ValueError(f"{folder} holds {what}; collect into another folder")
    if differs == "guessed_by":
        raise ValueError(f"{folder} holds guesses of another adapter; collect into another folder")
    if differs == "block_size" and not (plan.block_size and begun.get("block_size")):
        what = "texts without iterates" if plan.block_size else "texts with the iterates of Jacobi decoding"
        raise ValueError(f"{folder} holds {what}; collect into another folder")
    if differs:
        name = differs.replace("_", "-")
        raise ValueError(
            f"{folder} was begun with {name} {begun.get(differs, 'off')}, not {metadata.get(differs, 'off')};"
            " give the same again, or collect into another folder"
        )
    return missing_shards(folder, plan)


def read_metadata(folder: Path) -> dict[str, Any]:
    """The metadata of a folder of texts. Errors: ValueError for a folder without it."""
    try:
        return json.loads((folder / METADATA_FILE).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(
            f"{folder} holds no {METADATA_FILE}; name a folder of saltus collect text, or one file"
        ) from None
    except ValueError as error:
        raise ValueError(
            f"{folder / METADATA_FILE} is damaged ({error}); delete the folder and collect again"
        ) from None


def missing_shards(folder: Path, plan: CollectionPlan) -> list[int]:
    """The numbers of the shards that do not exist. Errors: ValueError for a damaged one."""
    missing = []
    for number, name in enumerate(plan.shard_names):
        if not (folder / name).exists():
            missing.append(number)
        elif len(read_rows(folder / name)) != len(plan.texts_of_shard(number)):
            raise ValueError(f"{folder / name} is damaged (texts are missing); delete it and collect again")
    return missing


def write_shard(
    engine: Engine, plan: CollectionPlan, shard_number: int, folder: Path, batch_size: int
) -> Iterator[tuple[int, int]]:
    """Write one shard; yields the texts finished and the tokens written since the last yield."""
    requests, context = [], engine.target.context_length
    for number, temperature in plan.texts_of_shard(shard_number):
        prompt = plan.prompts[number].prompt
        length = plan.max_new_tokens if context is None else min(plan.max_new_tokens, context - len(prompt))
        sampling = plan.sampling(temperature)
        seed = text_seed(plan.seed, number)
        request_type = TrajectoryRequest if plan.block_size else Request
        requests.append(request_type(prompt, length, seed, sampling, engine.target.end_tokens.__contains__))
    ended, tokens = 0, 0
    for _ in run_requests(engine.decoder, requests, engine.method, batch_size=batch_size, prefix_tree=False):
        now = sum(request.finished for request in requests), sum(len(request.calls) for request in requests)
        yield now[0] - ended, now[1] - tokens
        ended, tokens = now
    rows = [
        {"source": plan.prompts[number].source, "temperature": temperature,
         "prompt": list(plan.prompts[number].prompt), "completion": request.tokens,
         **({"seed": request.seed, "iterates": request.iterates} if isinstance(request, TrajectoryRequest) else {})}
        for (number, temperature), request in zip(plan.texts_of_shard(shard_number), requests, strict=True)
    ]  # fmt: skip
    save_shard(folder / plan.shard_names[shard_number], rows)


def save_shard(file: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write the texts of a shard, atomically."""
    data = "".join(json.dumps(row, separators=(",", ":")) + "\n" for row in rows).encode()
    write_atomically(file, lambda out: out.write(gzip.compress(data, mtime=0)))


def read_texts(file: Path) -> list[Sample]:
    """The texts of a file of JSON lines, which may be compressed (.gz). Errors: ValueError for a damaged one."""
    return [Sample(row["prompt"], row["completion"], float(row["temperature"])) for row in read_rows(file)]


def read_rows(file: Path, keys: Sequence[str] = ("prompt", "completion", "temperature")) -> list[dict[str, Any]]:
    """The rows of a file of JSON lines. Errors: ValueError for a damaged file, or one of another form."""
    try:
        data = file.read_bytes()
        text = gzip.decompress(data) if file.suffix == ".gz" else data
        rows = [json.loads(line) for line in text.decode().splitlines()]
    except FileNotFoundError:
        raise ValueError(f"there is no teacher text {file}; write it with saltus collect text") from None
    except (gzip.BadGzipFile, zlib.error, EOFError, ValueError) as error:
        if file.suffix != ".gz":  # not one of ours
            raise ValueError(f"{file} is no file of JSON lines; {_cure(file)}") from None
        raise ValueError(f"{file} is damaged ({type(error).__name__}); delete it and collect again") from None
    except OSError as error:
        raise ValueError(f"{file} cannot be read: {error.strerror}") from None
    for number, row in enumerate(rows, 1):
        if missing := next((key for key in keys if not isinstance(row, dict) or key not in row), None):
            raise ValueError(f"{file}, line {number} has no {missing!r}; {_cure(file)}")
        for key in ("prompt", "completion"):
            if not isinstance(row[key], list) or not all(type(token) is int and token >= 0 for token in row[key]):
                raise ValueError(f"{file}, line {number}: {key!r} is no list of token ids; {_cure(file)}")
        if type(row["temperature"]) not in (int, float):
            raise ValueError(f"{file}, line {number}: 'temperature' is no number; {_cure(file)}")
    return rows


def _cure(file: Path) -> str:
    return (
        f"make training texts of it: saltus collect data --texts {file},"
        f" or of prompts: saltus collect text --prompts {file}"
    )


def read_teacher_texts(path: Path) -> list[Sample]:
    """All texts of a file, or of a complete folder. Errors: ValueError."""
    if not path.is_dir():
        return read_texts(path)
    return [sample for file in shard_paths(path, read_metadata(path)) for sample in read_texts(file)]


def shard_paths(folder: Path, metadata: Mapping[str, Any]) -> list[Path]:
    """The files of a folder with this metadata. Errors: ValueError where one is missing or damaged."""
    plan = CollectionPlan(
        [TokenizedPrompt("", ())] * metadata["questions"],
        tuple(metadata["temperatures"]),
        texts_per_shard=metadata["texts_per_file"],
    )
    if missing := missing_shards(folder, plan):
        raise ValueError(
            f"{folder} lacks {len(missing)} of {len(plan.shard_names)} shards; run its saltus collect command again"
        )
    return [folder / name for name in plan.shard_names]
