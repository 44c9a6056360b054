"""How many tokens a call decides in a new domain, request by request, on a server that learns and on one that does not.

    python benchmarks/serve_learn.py --requests 2000                        # questions about SQL, made here
    python benchmarks/serve_learn.py --requests 2000 --text sentences.txt   # texts that begin like the lines of a file

The same requests go to both servers, one server after the other, so that none is measured while the other trains. For
each hundred: tokens a call, the 95th percentile of seconds a request, and the memory of the server's processes.
Learning begins anew (it is kept apart by an API key of its own, and reset). Exits with 1 if a text differs.

A frozen drafter is the same at every request, so that a part of them is enough for it: with `--frozen-every 4` the
server without learning answers every fourth, and gains compare these alone.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import queue
import random
import statistics
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psutil
from serve_load import own_server

KEY = "serve-learn-benchmark"
SERVERS = {"learning": ("--learn", "--learn-reset"), "frozen": ()}
TABLES = {
    "employees": ("name", "salary", "department", "hired_on", "city"),
    "orders": ("customer", "amount", "status", "ordered_on", "country"),
    "books": ("title", "author", "price", "year", "publisher"),
    "flights": ("origin", "destination", "duration", "airline", "price"),
    "students": ("name", "grade", "school", "birth_year", "course"),
    "products": ("name", "price", "category", "stock", "supplier"),
}
QUESTIONS = (
    "Write a SQL query that lists the {0} of all {table} where {1} is {value}.",
    "Write a SQL query that counts the {table} for each {0} and sorts them by {1}.",
    "Given a table {table} with the columns {0}, {1} and {2}, write a SQL query for the {value} highest values of {1}.",
    "Write a SQL statement that creates a table {table} with the columns {0}, {1} and {2}.",
    "Write a SQL statement that sets {0} to {value} for all {table} whose {1} is not empty.",
    "Write a SQL query for the average {1} of {table}, grouped by {0}, where {2} is more than {value}.",
)


def sql_questions() -> list[str]:
    """All questions, shuffled in the same way each time."""
    found = [
        question.format(*columns, table=table, value=value)
        for question in QUESTIONS
        for table, names in TABLES.items()
        for columns in itertools.permutations(names, 3)
        for value in (3, 10, 2020)
    ]
    random.Random(0).shuffle(found)
    return found


def bodies(args: argparse.Namespace) -> list[tuple[str, dict]]:
    """The route and the body of each request."""
    settings = {
        "model": args.model, "max_tokens": args.max_new_tokens, "temperature": args.temperature,
        "include_metrics": True,
    }  # fmt: skip
    if args.text is None:
        made = [("chat/completions", {"messages": [{"role": "user", "content": one}]}) for one in sql_questions()]
    else:
        lines = dict.fromkeys(line.strip() for line in args.text.read_text(encoding="utf-8").splitlines())
        made = [("completions", {"prompt": line}) for line in lines if line]
    if len(made) < args.requests:
        raise SystemExit(f"there are {len(made):,} prompts for {args.requests:,} requests; take fewer")
    return [(route, {**settings, **body, "seed": seed}) for seed, (route, body) in enumerate(made[: args.requests])]


@dataclass
class Run:
    """What came back for each request, by its number."""

    texts: dict[int, str] = field(default_factory=dict)
    tokens: dict[int, int] = field(default_factory=dict)
    calls: dict[int, int] = field(default_factory=dict)
    seconds: dict[int, float] = field(default_factory=dict)
    memory: list[float] = field(default_factory=list)  # in MB, after each 25

    def hundred(self, numbers: Sequence[int]) -> str:
        """Tokens a call, the 95th percentile of seconds, and memory."""
        answered = [n for n in numbers if n in self.texts]
        reached = sum(n <= numbers[-1] for n in self.texts) * len(self.memory) // len(self.texts)
        memory = self.memory[max(reached, 1) - 1]
        return f"{self.tokens_per_call(answered):9.3f} {self.late(answered):8.2f} {memory:8.0f}"

    def tokens_per_call(self, numbers: Sequence[int]) -> float:
        return sum(self.tokens[n] for n in numbers) / (sum(self.calls[n] for n in numbers) or math.nan)

    def late(self, numbers: Sequence[int]) -> float:
        return statistics.quantiles((self.seconds[n] for n in numbers), n=20)[-1] if len(numbers) > 1 else 0.0


def measure(url: str, requests: dict[int, tuple[str, dict]], clients: int, pause: float) -> Run:
    """Each client sends one request after the other, and rests for `pause` seconds between them."""
    run, lock, waiting = Run(), threading.Lock(), queue.SimpleQueue()
    for numbered in requests.items():
        waiting.put(numbered)

    def client() -> None:
        with httpx.Client(timeout=600, headers={"authorization": f"Bearer {KEY}"}) as http:
            while True:
                try:
                    number, (route, body) = waiting.get(block=False)
                except queue.Empty:
                    return
                started = time.perf_counter()
                answer = http.post(f"{url}/v1/{route}", json=body).raise_for_status().json()
                seconds = time.perf_counter() - started
                counts, choice = answer["metrics"]["speculative_decoding"], answer["choices"][0]
                with lock:
                    run.texts[number] = choice["message"]["content"] if "message" in choice else choice["text"]
                    run.tokens[number], run.calls[number] = counts["num_tokens"], counts["num_calls"]
                    run.seconds[number] = seconds
                    if len(run.texts) % 25 == 0 or len(run.texts) == len(requests):
                        run.memory.append(server_memory())
                time.sleep(pause)

    threads = [threading.Thread(target=client) for _ in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if len(run.texts) < len(requests):
        raise SystemExit(f"{len(requests) - len(run.texts)} requests got no answer from {url}")
    return run


def server_memory() -> float:
    """Of all processes that this one has started, in MB."""
    return sum(one.memory_info().rss for one in psutil.Process(os.getpid()).children(recursive=True)) / 1e6


def learned(url: str) -> dict[str, float]:
    """The metrics of learning."""
    lines = httpx.get(f"{url}/metrics").text.splitlines()
    pairs = (line.rsplit(" ", 1) for line in lines if line.startswith("saltus:learning") and "_created" not in line)
    return {name.partition(":")[2].replace('model_name="', "").split("{")[0]: float(value) for name, value in pairs}


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--model", default="smollm2-135m")
    options.add_argument("--method", default="ptp+lookup")
    options.add_argument("--requests", type=int, default=300)
    options.add_argument("--text", type=Path, help="lines that the texts begin with; without it questions about SQL")
    options.add_argument("--clients", type=int, default=1)
    options.add_argument("--pause", type=float, default=0.0, help="seconds between the requests of a client")
    options.add_argument("--learn-share", type=float, default=0.08)
    options.add_argument("--max-new-tokens", type=int, default=96)
    options.add_argument("--temperature", type=float, default=0.0)
    options.add_argument("--json", type=Path, help="write the figures of each request to this file")
    options.add_argument("--frozen-every", type=int, default=1, help="requests of which the frozen server has one")
    args = options.parse_args()
    requests, runs = dict(enumerate(bodies(args))), {}
    for name, more in SERVERS.items():
        share = ("--learn-share", str(args.learn_share)) if more else ()
        with own_server(args.method, args.model, 16, (*more, *share, "--api-key", KEY)) as url:
            asked = {n: one for n, one in requests.items() if more or n % args.frozen_every == 0}
            runs[name] = measure(url, asked, args.clients, args.pause)
            if more:
                print(", ".join(f"{key} {value:g}" for key, value in learned(url).items()), flush=True)
    learning, frozen = runs.values()
    if different := [n for n, text in frozen.texts.items() if text != learning.texts[n]]:
        raise SystemExit(f"{len(different)} texts differ, the first at request {different[0]}")
    print(f"{len(requests)} requests, {args.max_new_tokens} tokens each at most; the texts are the same")
    print(f"{'requests':>11}  " + "  ".join(f"{name + ': tokens/call, p95 s, MB':>27}" for name in runs) + "  gain")
    hundreds = [range(n, min(n + 100, len(requests))) for n in range(0, len(requests), 100)]
    for numbers in (*hundreds, range(len(requests))):
        columns = "  ".join(run.hundred(numbers) for run in runs.values())
        both = [n for n in numbers if n in frozen.texts]
        gain = learning.tokens_per_call(both) / frozen.tokens_per_call(both) - 1
        print(f"{numbers.start + 1:5}-{numbers.stop:<5}  {columns}  {gain:+6.1%}")
    if args.json is not None:
        kept = ("tokens", "calls", "seconds", "memory")
        args.json.write_text(json.dumps({name: {key: getattr(run, key) for key in kept} for name, run in runs.items()}))


if __name__ == "__main__":
    main()
