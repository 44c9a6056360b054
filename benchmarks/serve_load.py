"""Load a server with many clients at once: tokens a second, time to the first token, time between tokens.

    python benchmarks/serve_load.py --prompts spec_bench.jsonl --every 10 --servers auto,plain --clients 1,4,16

Starts `saltus serve` on this machine for each method, and with --llama-server llama.cpp's server on the same GGUF file;
or takes servers that run already: --endpoint NAME=URL. Clients send one prompt after another (closed loop), or prompts
come at random times (--rate, open loop). The servers take turns, and each combination is measured several times, each
time with a number before the prompts, so that no server has read them before. The same prompts give the same texts on
all servers of Saltus; the program exits with 1 if they do not.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import queue
import random
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

import httpx
from prompt_options import add_prompt_options, first_turns, in_turn

from saltus.engine.encoding import PromptSettings, encode_prompt
from saltus.loading.load_model import load_tokenizer
from saltus.loading.sources import resolve, resolve_tokenizer


@dataclass
class Run:
    """What clients saw of one server."""

    seconds: float
    tokens: int
    first: list[float] = field(default_factory=list)  # seconds to each text's first token
    between: list[float] = field(default_factory=list)  # seconds a token after it, by text
    texts: dict[int, str] = field(default_factory=dict)  # by prompt


class Summary(NamedTuple):
    """Of several runs."""

    rate: float  # tokens a second, the median
    first: float  # seconds to the first token, the median of all answers
    late: float  # and its 95th percentile
    between: float  # seconds between tokens, the median of all answers


@contextmanager
def own_server(method: str, model: str, max_num_seqs: int, more: Sequence[str] = ()) -> Iterator[str]:
    """The address of a server that is started for this method."""
    port = _free_port()
    command = [sys.executable, "-c", "from saltus.cli import main; main()", "serve", "--model", model]
    settings = ["--method", method, "--port", str(port), "--max-num-seqs", str(max_num_seqs), *more]
    with _process([*command, *settings], port) as url:
        yield url


@contextmanager
def llama_server(program: str, gguf: str, max_num_seqs: int, tokens: int) -> Iterator[str]:
    """The address of llama.cpp's server, with a slot of so many tokens for each text that Saltus decodes at once."""
    port = _free_port()
    command = [program, "-m", gguf, "--port", str(port), "-np", str(max_num_seqs), "-c", str(tokens * max_num_seqs)]
    with _process([*command, "-t", str(os.cpu_count()), "--jinja"], port) as url:
        yield url


def longest_text(model: str, prompts: Sequence[str], max_new_tokens: int) -> int:
    """Tokens of the longest prompt, with its number before it, and of its answer; a multiple of 256."""
    tokenizer = load_tokenizer(resolve_tokenizer(model))
    texts = [[{"role": "user", "content": numbered(prompt, 9999, 9)}] for prompt in prompts]
    longest = max(len(encode_prompt(tokenizer, text, PromptSettings(), model)) for text in texts)
    return -(-(longest + max_new_tokens) // 256) * 256


def numbered(prompt: str, clients: int, repeat: int) -> str:
    """The prompt of one repeat, which no server has read before."""
    return f"({clients}.{repeat}) {prompt}"


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@contextmanager
def _process(command: Sequence[str], port: int) -> Iterator[str]:
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(600):
            if process.poll() is not None:
                raise SystemExit(f"the server ended; try: {' '.join(command)}")
            try:
                httpx.get(f"{url}/health").raise_for_status()
                break
            except httpx.HTTPError:
                time.sleep(0.1)
        yield url
    finally:
        process.terminate()
        process.wait()


def measure(
    url: str, model: str, prompts: Sequence[str], clients: int, settings: dict, rate: float | None = None
) -> Run:
    """Send all prompts by so many clients, each of which waits for its answer before it sends the next.

    With a rate (prompts a second) a prompt also waits for its time; times are the same in each call. With as many
    clients as prompts none waits for another.
    """
    times = itertools.accumulate(random.Random(0).expovariate(rate) if rate else 0.0 for _ in prompts)
    waiting: queue.SimpleQueue[tuple[int, float, str]] = queue.SimpleQueue()
    for number, (due, prompt) in enumerate(zip(times, prompts, strict=True)):
        waiting.put((number, due, prompt))
    run, lock = Run(0.0, 0), threading.Lock()

    def client() -> None:
        with httpx.Client(timeout=600) as http:
            while True:
                try:
                    number, due, prompt = waiting.get(block=False)
                except queue.Empty:
                    return
                time.sleep(max(started + due - time.perf_counter(), 0.0))
                text, tokens, first, last = ask(http, url, model, prompt, settings)
                with lock:
                    run.tokens += tokens
                    run.first.append(first)
                    run.between += [(last - first) / (tokens - 1)] if tokens > 1 else []
                    run.texts[number] = text

    threads = [threading.Thread(target=client) for _ in range(clients)]
    started = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    run.seconds = time.perf_counter() - started
    if len(run.texts) != len(prompts):
        raise SystemExit(f"{len(prompts) - len(run.texts)} prompts got no answer from {url}")
    return run


def ask(http: httpx.Client, url: str, model: str, prompt: str, settings: dict) -> tuple[str, int, float, float]:
    """One streamed answer: its text, its tokens, and the seconds to its first and to its last piece."""
    body = {
        "model": model, "messages": [{"role": "user", "content": prompt}], "stream": True,
        "stream_options": {"include_usage": True}, **settings,
    }  # fmt: skip
    started, text, tokens, first, last = time.perf_counter(), "", 0, 0.0, 0.0
    with http.stream("POST", f"{url}/v1/chat/completions", json=body) as answer:
        if answer.status_code != 200:
            raise SystemExit(f"{url} answers {answer.status_code}: {answer.read().decode()[:200]}")
        for line in answer.iter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            event = json.loads(line.removeprefix("data: "))
            tokens = (event.get("usage") or {}).get("completion_tokens", tokens)
            for choice in event["choices"]:
                if piece := choice["delta"].get("content"):
                    text += piece
                    last = time.perf_counter() - started
                    first = first or last
    return text, tokens, first, last


def summarised(runs: Sequence[Run]) -> Summary:
    """What runs of the same load say together."""
    firsts = sorted(value for run in runs for value in run.first)
    return Summary(
        statistics.median(run.tokens / run.seconds for run in runs),
        statistics.median(firsts),
        firsts[int(0.95 * (len(firsts) - 1))],
        statistics.median(value for run in runs for value in run.between),
    )


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_prompt_options(options)
    options.add_argument("--servers", default="auto,plain", help="methods to serve with, by commas; may be empty")
    options.add_argument("--endpoint", action="append", default=[], metavar="NAME=URL", help="a server that runs")
    options.add_argument("--llama-server", metavar="PATH", help="llama.cpp's server, to be measured beside")
    options.add_argument("--clients", default="1,4,16", help="numbers of clients, by commas")
    options.add_argument("--rate", type=float, help="prompts a second that come, in place of --clients")
    options.add_argument("--max-num-seqs", type=int, default=16, help="texts that a server decodes at once")
    options.add_argument("--max-new-tokens", type=int, default=64)
    options.add_argument("--temperature", type=float, default=0.0)
    options.add_argument("--repeats", type=int, default=3)
    args = options.parse_args()
    prompts = [one for one in first_turns(options, args) if isinstance(one, str)]
    settings = {"max_tokens": args.max_new_tokens, "temperature": args.temperature, "seed": 0}
    counts = [len(prompts)] if args.rate else [int(count) for count in args.clients.split(",")]
    with ExitStack() as stack:
        servers = {
            method: stack.enter_context(own_server(method, args.model, args.max_num_seqs))
            for method in filter(None, args.servers.split(","))
        }
        own = set(servers)
        if args.llama_server:
            gguf, tokens = (
                str(resolve(args.model) / "model.gguf"),
                longest_text(args.model, prompts, args.max_new_tokens),
            )
            server = llama_server(args.llama_server, gguf, args.max_num_seqs, tokens)
            servers["llama.cpp"] = stack.enter_context(server)
        servers |= dict(pair.split("=", 1) for pair in args.endpoint)
        print(f"{len(prompts)} prompts, {args.max_new_tokens} tokens each at most, medians of {args.repeats} in turns")
        print(f"{'clients':>7}  {'server':16} {'tokens/s':>8}  {'first token':>11}  {'95th':>9}  {'between':>8}")
        for url in servers.values():
            measure(url, args.model, prompts[:2], 1, settings)  # to warm up
        for count in counts:
            runs: dict[str, list[Run]] = {name: [] for name in servers}
            for number in range(args.repeats):
                unread = [numbered(prompt, count, number) for prompt in prompts]
                for name, url in in_turn(servers.items(), number):
                    runs[name].append(measure(url, args.model, unread, count, settings, args.rate))
                texts = {name: runs[name][-1].texts for name in servers}
                if other := next((name for name in own if texts[name] != texts[next(iter(servers))]), None):
                    raise SystemExit(f"{other} wrote other texts with {count} clients")
            for name, measured in runs.items():
                facts = summarised(measured)
                print(
                    f"{count:7}  {name:16} {facts.rate:8.1f}  {1000 * facts.first:8.0f} ms "
                    f" {1000 * facts.late:6.0f} ms  {1000 * facts.between:5.1f} ms",
                    flush=True,
                )


if __name__ == "__main__":
    main()
