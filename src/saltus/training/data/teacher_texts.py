"""Let a model write what a drafter learns from: its answers to prompts, in shards that are whole or not there."""

from __future__ import annotations

import gzip
import json
import logging
import signal
from collections import deque
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch

from saltus.core.distributions import Step
from saltus.core.sampling import Sampling
from saltus.engine.engine import Engine, load
from saltus.engine.request import Request
from saltus.networks.loading.checkpoints import first_line
from saltus.networks.loading.drafter_files import model_fingerprint
from saltus.training.data.hidden_states import Sample
from saltus.training.loop.checkpoint import write_atomically

METADATA_FILE = "collect.json"


@dataclass(frozen=True)
class TokenizedPrompt:
    """A prompt as the tokens that the model reads, and where it comes from."""

    source: str
    prompt: tuple[int, ...]


@dataclass(frozen=True)
class CollectionPlan:
    """What is to be written: every question answered at every temperature, `shard` texts a file.

    With a `block` the texts are written by Jacobi decoding, and its iterates are kept.
    """

    prompts: Sequence[TokenizedPrompt]
    temperatures: tuple[float, ...] = (0.0, 0.7)
    max_new_tokens: int = 256
    seed: int = 0
    texts_per_shard: int = 128
    block_size: int = 0

    def __post_init__(self) -> None:
        for temperature in self.temperatures:
            Sampling(temperature=temperature)
        if self.seed < 0:
            raise ValueError(f"seed is {self.seed}, but must be 0 or more; take its absolute value")

    @property
    def num_texts(self) -> int:
        return len(self.prompts) * len(self.temperatures)

    @property
    def shard_names(self) -> list[str]:
        return [f"{number:05d}.jsonl.gz" for number in range(-(-self.num_texts // self.texts_per_shard))]

    def texts_of_shard(self, shard_number: int) -> list[tuple[int, float]]:
        """The texts of a shard: question and temperature of each."""
        here = range(
            shard_number * self.texts_per_shard, min((shard_number + 1) * self.texts_per_shard, self.num_texts)
        )
        kinds = len(self.temperatures)
        return [(text // kinds, self.temperatures[text % kinds]) for text in here]

    def metadata(self, engine: Engine) -> dict[str, Any]:
        """What a folder of these texts says of itself."""
        inputs = json.dumps([[one.source, *map(int, one.prompt)] for one in self.prompts])
        model = engine.network.model
        return {
            "model": engine.target.name,
            "fingerprint": model_fingerprint(model),
            "dtype": str(model.dtype).removeprefix("torch."),
            "free_shapes": engine.network.free_shapes,
            "temperatures": list(self.temperatures),
            "max_new_tokens": self.max_new_tokens,
            "seed": self.seed,
            "prompts": blake2b(inputs.encode(), digest_size=16).hexdigest(),
            "questions": len(self.prompts),
            "shard": self.texts_per_shard,
            **({"block": self.block_size, "guessed_by": _adapter_digest(engine)} if self.block_size else {}),
        }


@dataclass
class TrajectoryRequest(Request):
    """A text that keeps what every call was asked: how many tokens were decided, and the guesses for those behind."""

    iterates: list[list[int]] = field(default_factory=list, init=False)

    def record(self, step: Step) -> None:
        super().record(step)
        self.iterates.append([step.canvas.num_decided, *step.inputs.first_chain_tokens])


def _adapter_digest(engine: Engine) -> str:
    """What tells the adapter that guesses for a target; empty where there is none."""
    adapter = engine.network.adapter
    if adapter is None:
        return ""
    digest = blake2b(digest_size=16)
    for name, weight in sorted(adapter.state_dict().items()):
        digest.update(name.encode() + weight.detach().cpu().float().numpy().tobytes())
    return digest.hexdigest()


def text_seed(seed: int, prompt_number: int) -> int:
    """The seed of the answers to a question: a function of both, whoever writes it and beside whom."""
    return int.from_bytes(
        blake2b(f"{int(seed)}/question/{int(prompt_number)}".encode(), digest_size=8).digest(), "little"
    )


def prepare_folder(folder: Path, plan: CollectionPlan, engine: Engine) -> list[int]:
    """Say in the folder what its texts are; the numbers of the shards that it lacks.

    Errors: ValueError where it holds other texts, or a damaged shard.
    """
    papers = plan.metadata(engine)
    if not (folder / METADATA_FILE).exists():
        write_atomically(folder / METADATA_FILE, lambda out: out.write((json.dumps(papers, indent=1) + "\n").encode()))
    found = read_metadata(folder)
    names = [name for name in {**papers, **found} if name != "model"]
    differs = next((name for name in names if found.get(name) != papers.get(name)), None)
    if differs in ("prompts", "fingerprint"):
        what = "answers to other prompts" if differs == "prompts" else f"answers of another model ({found['model']})"
        raise ValueError(f"{folder} holds {what}; collect into another folder")
    if differs == "guessed_by":
        raise ValueError(f"{folder} holds guesses of another adapter; collect into another folder")
    if differs == "block" and not (plan.block_size and found.get("block")):
        what = "texts without iterates" if plan.block_size else "texts with the iterates of Jacobi decoding"
        raise ValueError(f"{folder} holds {what}; collect into another folder")
    if differs:
        name = differs.replace("_", "-")
        raise ValueError(
            f"{folder} was begun with {name} {found.get(differs)}, not {papers[differs]};"
            " give the same again, or collect into another folder"
        )
    return missing_shards(folder, plan)


def read_metadata(folder: Path) -> dict[str, Any]:
    """What a folder of texts says of itself. Errors: ValueError where it says nothing."""
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
    """The numbers of the shards that are still to be written. Errors: ValueError for one that is damaged."""
    left = []
    for number, name in enumerate(plan.shard_names):
        if not (folder / name).exists():
            left.append(number)
        elif len(read_rows(folder / name)) != len(plan.texts_of_shard(number)):
            raise ValueError(f"{folder / name} is damaged (texts are missing); delete it and collect again")
    return left


def write_shard(
    engine: Engine, plan: CollectionPlan, shard_number: int, folder: Path, batch_size: int
) -> Iterator[tuple[int, int]]:
    """Write one shard; yields how many texts ended and tokens were written since the last time."""
    texts, context = [], engine.target.context_length
    for question, temperature in plan.texts_of_shard(shard_number):
        prompt = plan.prompts[question].prompt
        length = plan.max_new_tokens if context is None else min(plan.max_new_tokens, context - len(prompt))
        distribution, seed = Sampling(temperature=temperature), text_seed(plan.seed, question)
        texts.append(
            (TrajectoryRequest if plan.block_size else Request)(
                prompt, length, seed, distribution, engine.target.end_tokens.__contains__
            )
        )
    ended, tokens = 0, 0
    for _ in engine.decoder.run(texts, engine.method, batch_size=batch_size, prefix_cache=False):
        now = sum(text.finished for text in texts), sum(len(text.calls) for text in texts)
        yield now[0] - ended, now[1] - tokens
        ended, tokens = now
    rows = [
        {"source": plan.prompts[question].source, "temperature": temperature,
         "prompt": list(plan.prompts[question].prompt), "completion": text.tokens,
         **({"seed": text.seed, "iterates": text.iterates} if isinstance(text, TrajectoryRequest) else {})}
        for (question, temperature), text in zip(plan.texts_of_shard(shard_number), texts, strict=True)
    ]  # fmt: skip
    data = "".join(json.dumps(row, separators=(",", ":")) + "\n" for row in rows).encode()
    write_atomically(folder / plan.shard_names[shard_number], lambda out: out.write(gzip.compress(data, mtime=0)))


def collect_in_process(
    engine: Engine, plan: CollectionPlan, shard_numbers: Sequence[int], folder: Path, batch_size: int
) -> Generator[tuple[int, int]]:
    """`write_shard` for many, one after the other."""
    for number in shard_numbers:
        yield from write_shard(engine, plan, number, folder, batch_size)


def collect_in_processes(
    plan: CollectionPlan,
    shard_numbers: Sequence[int],
    folder: Path,
    load_options: Mapping[str, Any],
    batch_size: int,
    num_processes: int,
) -> Generator[tuple[int, int]]:
    """`write_shard` for many, dealt out over processes that each load the model and share the threads.

    A process whose parent is gone ends by itself. Errors: ValueError of one that failed or was killed.
    """
    waiting, spawn, live = deque(shard_numbers), get_context("spawn"), {}
    threads = max(1, torch.get_num_threads() // num_processes)
    try:
        for _ in range(min(num_processes, len(waiting))):
            ours, theirs = spawn.Pipe()
            conditioning = theirs, plan, folder, dict(load_options), batch_size, threads
            process = spawn.Process(target=_worker, args=conditioning, daemon=True)
            process.start()
            theirs.close()
            live[ours] = process
            ours.send(waiting.popleft())
        while live:
            for connection in wait(list(live)):
                assert isinstance(connection, Connection)
                try:
                    said = connection.recv()
                except EOFError:
                    raise ValueError("a process that wrote texts was killed; take fewer --processes") from None
                if isinstance(said, str):
                    raise ValueError(said)
                if said is not None:
                    yield said
                elif waiting:
                    connection.send(waiting.popleft())
                else:
                    connection.send(None)
                    live.pop(connection).join()
    finally:
        for process in live.values():
            process.kill()


def collect_with_ray(
    plan: CollectionPlan,
    shard_numbers: Sequence[int],
    folder: Path,
    load_options: Mapping[str, Any],
    batch_size: int,
    num_processes: int,
    address: str,
) -> Generator[tuple[int, int]]:
    """`write_shard` for many, by Ray Data: each process of a cluster loads the model once. The folder is a shared one.

    Errors: ValueError where Ray is missing or cannot be reached, and of a process that failed.
    """
    try:
        import ray
        import ray.data
        from ray.exceptions import RayError
    except ImportError:
        raise ValueError("Ray is missing; pip install 'saltus[ray]', or leave --ray out") from None
    for talks in ("ray", "ray.data"):
        logging.getLogger(talks).setLevel(logging.CRITICAL)
    started = not ray.is_initialized()
    if started:
        try:
            ray.init(address, log_to_driver=False, logging_level=logging.ERROR)
        except ConnectionError as error:
            raise ValueError(
                f"there is no Ray cluster at {address} ({first_line(error)}); start one with ray start --head"
            ) from None
    ray.data.DataContext.get_current().enable_progress_bars = False
    threads = max(1, torch.get_num_threads() // num_processes) if address == "local" else None
    conditioning = plan, folder.resolve(), dict(load_options), batch_size, threads
    gpus = 1 if str(load_options["device"]).startswith("cuda") else None
    shards = ray.data.from_items(
        [{"shard": number} for number in shard_numbers], override_num_blocks=len(shard_numbers)
    )
    try:
        done = shards.map_batches(
            _ShardWriter, fn_constructor_args=conditioning, batch_size=1,
            compute=ray.data.ActorPoolStrategy(size=min(num_processes, len(shard_numbers))), num_gpus=gpus,
        )  # fmt: skip
        for row in done.iter_rows():
            if row["error"]:
                raise ValueError(row["error"])
            yield row["texts"], row["tokens"]
    except RayError as error:
        raise ValueError(f"Ray: {first_line(error)}; take fewer --processes, or look at its dashboard") from None
    finally:
        if started:
            ray.shutdown()


class _ShardWriter:
    """A process of a cluster: it loads the model once, and writes the shards whose numbers it is given."""

    def __init__(self, *conditioning: Any) -> None:
        self.plan, self.folder, self.load_options, self.batch_size, self.num_threads = conditioning
        self.engine: Engine | None = None

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, list[Any]]:
        """Faults are told, since Ray sends on what an error says, but not which it is."""
        texts = tokens = 0
        try:
            if self.engine is None:
                if self.num_threads is not None:
                    torch.set_num_threads(self.num_threads)
                self.engine = load(**self.load_options)
            for number in batch["shard"]:
                for ended, new in write_shard(self.engine, self.plan, int(number), self.folder, self.batch_size):
                    texts, tokens = texts + ended, tokens + new
        except Exception as error:
            return {"texts": [texts], "tokens": [tokens], "error": [_error_line(error)]}
        return {"texts": [texts], "tokens": [tokens], "error": [""]}


def _worker(
    parent: Connection,
    plan: CollectionPlan,
    folder: Path,
    load_options: Mapping[str, Any],
    batch_size: int,
    num_threads: int,
) -> None:
    """Write the shards whose numbers the parent sends; None is said after each."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent too, which ends us
    try:
        torch.set_num_threads(num_threads)
        engine = load(**load_options)
        for number in iter(parent.recv, None):
            for done in write_shard(engine, plan, number, folder, batch_size):
                parent.send(done)
            parent.send(None)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return
    except Exception as error:
        parent.send(_error_line(error))


def _error_line(error: BaseException) -> str:
    """In one line."""
    return f"{error}" if isinstance(error, ValueError) else f"{type(error).__name__}: {first_line(error)}"


def read_texts(file: Path) -> list[Sample]:
    """The texts of one file, JSON lines as they are or in gzip. Errors: ValueError for a damaged one."""
    return [Sample(row["prompt"], row["completion"], float(row["temperature"])) for row in read_rows(file)]


def read_rows(file: Path, keys: Sequence[str] = ("prompt", "completion", "temperature")) -> list[dict[str, Any]]:
    """The lines of such a file; each has the keys. Errors: ValueError for a damaged one."""
    try:
        data = file.read_bytes()
        text = gzip.decompress(data) if file.suffix == ".gz" else data
        rows = [json.loads(line) for line in text.decode().splitlines()]
        if lacking := next((key for row in rows for key in keys if key not in row), None):
            raise KeyError(lacking)
        return rows
    except FileNotFoundError:
        raise ValueError(f"there is no teacher text {file}; write it with saltus collect text") from None
    except (OSError, EOFError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{file} is damaged ({type(error).__name__}); delete it and collect again") from None


def read_teacher_texts(path: Path) -> list[Sample]:
    """All texts of a file, or of a folder that is complete. Errors: ValueError."""
    if not path.is_dir():
        return read_texts(path)
    return [sample for file in shard_paths(path, read_metadata(path)) for sample in read_texts(file)]


def shard_paths(folder: Path, metadata: Mapping[str, Any]) -> list[Path]:
    """The files of a folder that says this of itself. Errors: ValueError where one is missing or damaged."""
    wanted = CollectionPlan(
        [TokenizedPrompt("", ())] * metadata["questions"],
        tuple(metadata["temperatures"]),
        texts_per_shard=metadata["shard"],
    )
    if left := missing_shards(folder, wanted):
        raise ValueError(
            f"{folder} lacks {len(left)} of {len(wanted.shard_names)} shards; give the saltus collect that began it"
            " again"
        )
    return [folder / name for name in wanted.shard_names]
