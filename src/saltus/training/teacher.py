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

from saltus.core.forward import Step
from saltus.core.sampling import Sampling
from saltus.engine import Engine, load
from saltus.networks.loading import first_line
from saltus.networks.trained_files import fingerprint
from saltus.training.checkpoint import put
from saltus.training.states import Sample
from saltus.writing import Text, write

PAPERS = "collect.json"


@dataclass(frozen=True)
class Question:
    """A prompt as the tokens that the model reads, and where it comes from."""

    source: str
    prompt: tuple[int, ...]


@dataclass(frozen=True)
class Plan:
    """What is to be written: every question answered at every temperature, `shard` texts a file.

    With a `block` the texts are written by Jacobi decoding, and its iterates are kept.
    """

    questions: Sequence[Question]
    temperatures: tuple[float, ...] = (0.0, 0.7)
    max_new_tokens: int = 256
    seed: int = 0
    shard: int = 128
    block: int = 0

    def __post_init__(self) -> None:
        for temperature in self.temperatures:
            Sampling(temperature=temperature)
        if self.seed < 0:
            raise ValueError(f"seed is {self.seed}, but must be 0 or more; take its absolute value")

    @property
    def texts(self) -> int:
        return len(self.questions) * len(self.temperatures)

    @property
    def files(self) -> list[str]:
        return [f"{number:05d}.jsonl.gz" for number in range(-(-self.texts // self.shard))]

    def part(self, number: int) -> list[tuple[int, float]]:
        """The texts of a shard: question and temperature of each."""
        here = range(number * self.shard, min((number + 1) * self.shard, self.texts))
        kinds = len(self.temperatures)
        return [(text // kinds, self.temperatures[text % kinds]) for text in here]

    def papers(self, engine: Engine) -> dict[str, Any]:
        """What a folder of these texts says of itself."""
        asked = json.dumps([[one.source, *map(int, one.prompt)] for one in self.questions])
        model = engine.network.model
        return {
            "model": engine.target.name,
            "fingerprint": fingerprint(model),
            "dtype": str(model.dtype).removeprefix("torch."),
            "free_shapes": engine.network.free,
            "temperatures": list(self.temperatures),
            "max_new_tokens": self.max_new_tokens,
            "seed": self.seed,
            "prompts": blake2b(asked.encode(), digest_size=16).hexdigest(),
            "questions": len(self.questions),
            "shard": self.shard,
            **({"block": self.block, "guessed_by": _adapter_of(engine)} if self.block else {}),
        }


@dataclass
class Iterated(Text):
    """A text that keeps what every call was asked: how many tokens were decided, and the guesses for those behind."""

    iterates: list[list[int]] = field(default_factory=list, init=False)

    def record(self, step: Step) -> None:
        super().record(step)
        self.iterates.append([step.canvas.done, *step.asked.guesses])


def _adapter_of(engine: Engine) -> str:
    """What tells the adapter that guesses for a target; empty where there is none."""
    adapter = engine.network.adapter
    if adapter is None:
        return ""
    digest = blake2b(digest_size=16)
    for name, weight in sorted(adapter.state_dict().items()):
        digest.update(name.encode() + weight.detach().cpu().float().numpy().tobytes())
    return digest.hexdigest()


def text_seed(seed: int, question: int) -> int:
    """The seed of the answers to a question: a function of both, whoever writes it and beside whom."""
    return int.from_bytes(blake2b(f"{int(seed)}/question/{int(question)}".encode(), digest_size=8).digest(), "little")


def begun(folder: Path, plan: Plan, engine: Engine) -> list[int]:
    """Say in the folder what its texts are; the numbers of the shards that it lacks.

    Errors: ValueError where it holds other texts, or a damaged shard.
    """
    papers = plan.papers(engine)
    if not (folder / PAPERS).exists():
        put(folder / PAPERS, lambda out: out.write((json.dumps(papers, indent=1) + "\n").encode()))
    found = read_papers(folder)
    names = [name for name in {**papers, **found} if name != "model"]
    differs = next((name for name in names if found.get(name) != papers.get(name)), None)
    if differs in ("prompts", "fingerprint"):
        what = "answers to other prompts" if differs == "prompts" else f"answers of another model ({found['model']})"
        raise ValueError(f"{folder} holds {what}; collect into another folder")
    if differs == "guessed_by":
        raise ValueError(f"{folder} holds guesses of another adapter; collect into another folder")
    if differs == "block" and not (plan.block and found.get("block")):
        what = "texts without iterates" if plan.block else "texts with the iterates of Jacobi decoding"
        raise ValueError(f"{folder} holds {what}; collect into another folder")
    if differs:
        name = differs.replace("_", "-")
        raise ValueError(
            f"{folder} was begun with {name} {found.get(differs)}, not {papers[differs]};"
            " give the same again, or collect into another folder"
        )
    return missing(folder, plan)


def read_papers(folder: Path) -> dict[str, Any]:
    """What a folder of texts says of itself. Errors: ValueError where it says nothing."""
    try:
        return json.loads((folder / PAPERS).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{folder} holds no {PAPERS}; name a folder of saltus collect text, or one file") from None
    except ValueError as error:
        raise ValueError(f"{folder / PAPERS} is damaged ({error}); delete the folder and collect again") from None


def missing(folder: Path, plan: Plan) -> list[int]:
    """The numbers of the shards that are still to be written. Errors: ValueError for one that is damaged."""
    left = []
    for number, name in enumerate(plan.files):
        if not (folder / name).exists():
            left.append(number)
        elif len(read_rows(folder / name)) != len(plan.part(number)):
            raise ValueError(f"{folder / name} is damaged (texts are missing); delete it and collect again")
    return left


def write_shard(engine: Engine, plan: Plan, number: int, folder: Path, batch_size: int) -> Iterator[tuple[int, int]]:
    """Write one shard; yields how many texts ended and tokens were written since the last time."""
    texts, context = [], engine.target.context
    for question, temperature in plan.part(number):
        prompt = plan.questions[question].prompt
        length = plan.max_new_tokens if context is None else min(plan.max_new_tokens, context - len(prompt))
        law, seed = Sampling(temperature=temperature), text_seed(plan.seed, question)
        texts.append((Iterated if plan.block else Text)(prompt, length, seed, law, engine.target.ends.__contains__))
    ended, tokens = 0, 0
    for _ in write(engine.ensembles[engine.method], texts, batch_size):
        now = sum(text.finished for text in texts), sum(len(text.calls) for text in texts)
        yield now[0] - ended, now[1] - tokens
        ended, tokens = now
    rows = [
        {"source": plan.questions[question].source, "temperature": temperature,
         "prompt": list(plan.questions[question].prompt), "completion": text.tokens,
         **({"seed": text.seed, "iterates": text.iterates} if isinstance(text, Iterated) else {})}
        for (question, temperature), text in zip(plan.part(number), texts, strict=True)
    ]  # fmt: skip
    data = "".join(json.dumps(row, separators=(",", ":")) + "\n" for row in rows).encode()
    put(folder / plan.files[number], lambda out: out.write(gzip.compress(data, mtime=0)))


def collect_here(
    engine: Engine, plan: Plan, numbers: Sequence[int], folder: Path, batch_size: int
) -> Generator[tuple[int, int]]:
    """`write_shard` for many, one after the other."""
    for number in numbers:
        yield from write_shard(engine, plan, number, folder, batch_size)


def collect_apart(
    plan: Plan, numbers: Sequence[int], folder: Path, loading: Mapping[str, Any], batch_size: int, processes: int
) -> Generator[tuple[int, int]]:
    """`write_shard` for many, dealt out over processes that each load the model and share the threads.

    A process whose parent is gone ends by itself. Errors: ValueError of one that failed or was killed.
    """
    waiting, spawn, live = deque(numbers), get_context("spawn"), {}
    threads = max(1, torch.get_num_threads() // processes)
    try:
        for _ in range(min(processes, len(waiting))):
            ours, theirs = spawn.Pipe()
            told = theirs, plan, folder, dict(loading), batch_size, threads
            process = spawn.Process(target=_serve, args=told, daemon=True)
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


def collect_on_cluster(
    plan: Plan,
    numbers: Sequence[int],
    folder: Path,
    loading: Mapping[str, Any],
    batch_size: int,
    processes: int,
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
    threads = max(1, torch.get_num_threads() // processes) if address == "local" else None
    told = plan, folder.resolve(), dict(loading), batch_size, threads
    gpus = 1 if str(loading["device"]).startswith("cuda") else None
    shards = ray.data.from_items([{"shard": number} for number in numbers], override_num_blocks=len(numbers))
    try:
        done = shards.map_batches(
            _ShardWriter, fn_constructor_args=told, batch_size=1,
            compute=ray.data.ActorPoolStrategy(size=min(processes, len(numbers))), num_gpus=gpus,
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

    def __init__(self, *told: Any) -> None:
        self.plan, self.folder, self.loading, self.batch_size, self.threads = told
        self.engine: Engine | None = None

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, list[Any]]:
        """Faults are told, since Ray sends on what an error says, but not which it is."""
        texts = tokens = 0
        try:
            if self.engine is None:
                if self.threads is not None:
                    torch.set_num_threads(self.threads)
                self.engine = load(**self.loading)
            for number in batch["shard"]:
                for ended, new in write_shard(self.engine, self.plan, int(number), self.folder, self.batch_size):
                    texts, tokens = texts + ended, tokens + new
        except Exception as error:
            return {"texts": [texts], "tokens": [tokens], "error": [_told(error)]}
        return {"texts": [texts], "tokens": [tokens], "error": [""]}


def _serve(
    parent: Connection, plan: Plan, folder: Path, loading: Mapping[str, Any], batch_size: int, threads: int
) -> None:
    """Write the shards whose numbers the parent sends; None is said after each."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent too, which ends us
    try:
        torch.set_num_threads(threads)
        engine = load(**loading)
        for number in iter(parent.recv, None):
            for done in write_shard(engine, plan, number, folder, batch_size):
                parent.send(done)
            parent.send(None)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return
    except Exception as error:
        parent.send(_told(error))


def _told(error: BaseException) -> str:
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


def read_teacher(where: Path) -> list[Sample]:
    """All texts of a file, or of a folder that is complete. Errors: ValueError."""
    if not where.is_dir():
        return read_texts(where)
    return [sample for file in shards(where, read_papers(where)) for sample in read_texts(file)]


def shards(folder: Path, papers: Mapping[str, Any]) -> list[Path]:
    """The files of a folder that says this of itself. Errors: ValueError where one is missing or damaged."""
    wanted = Plan([Question("", ())] * papers["questions"], tuple(papers["temperatures"]), shard=papers["shard"])
    if left := missing(folder, wanted):
        raise ValueError(
            f"{folder} lacks {len(left)} of {len(wanted.files)} shards; give the saltus collect that began it again"
        )
    return [folder / name for name in wanted.files]
