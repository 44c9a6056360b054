"""Send a server many requests of mixed kinds at once: each must get the text that it gets alone, and memory stays flat.

    python benchmarks/serve_soak.py --prompts spec_bench.jsonl --every 60 --requests 1000 --clients 64

Starts `saltus serve` on this machine. Among the requests are streams, several choices, structured answers, tools,
predictions, clients that vanish, and requests that are wrong on purpose. First each different request is answered alone
by plain decoding; then all come at once. Exits with 1 if a text differs, if an answer is missing, if a wrong request is
answered with a fault of the server, or if the server's memory grows by a tenth in the second half.
"""

from __future__ import annotations

import argparse
import itertools
import json
import queue
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import httpx
import psutil
from prompt_options import add_prompt_options, first_turns
from serve_load import own_server

SCHEMA = {
    "type": "object",
    "properties": {"title": {"type": "string", "maxLength": 12}, "kind": {"enum": ["question", "request"]}},
    "required": ["title", "kind"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "look_up", "parameters": {
    "type": "object", "properties": {"word": {"type": "string", "maxLength": 8}}, "required": ["word"],
    "additionalProperties": False,
}}}  # fmt: skip
CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"


def good_requests(prompts: Sequence[str], max_tokens: int) -> list[tuple[str, dict[str, Any]]]:
    """Routes and bodies of each kind; all have seeds, so that each has one text."""
    found: list[tuple[str, dict[str, Any]]] = []
    for seed, prompt in enumerate(prompts):
        chat = {"messages": [{"role": "user", "content": prompt}], "max_tokens": max_tokens, "seed": seed}
        found += [
            (CHAT, {**chat, "temperature": 0}),
            (CHAT, {**chat, "temperature": 0.8, "top_p": 0.9}),
            (CHAT, {**chat, "stream": True, "n": 2}),
            (CHAT, {**chat, "prediction": {"type": "content", "content": prompt}, "frequency_penalty": 0.5}),
            (
                CHAT,
                {**chat, "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}},
            ),
            (CHAT, {**chat, "tools": [TOOL], "tool_choice": "required"}),
            (CHAT, {**chat, "stream": True, "stop": ["."], "speculative": {"method": "jacobi+lookup"}}),
            (
                COMPLETIONS,
                {"prompt": prompt, "max_tokens": max_tokens, "seed": seed, "logprobs": 2, "temperature": 0.5},
            ),
            (RESPONSES, {"input": prompt, "max_output_tokens": max_tokens, "seed": seed, "temperature": 0.7}),
        ]
    return found


BAD: list[tuple[str, bytes]] = [
    (CHAT, b'{"messages": [{"role": "user", "content": "a \\ud800"}]}'),
    (CHAT, b'{"messages": [{"role": "user", "content": "a"}], "temperature": NaN}'),
    (CHAT, b'{"messages": [{"role": "user", "content": "a"}], "max_tokens": -1}'),
    (COMPLETIONS, b'{"prompt": [999999999]}'),
    (COMPLETIONS, b'{"prompt": "' + 300_000 * b"word " + b'"}'),
    (COMPLETIONS, 20_000 * b"[" + 20_000 * b"]"),
    (RESPONSES, b"not json"),
    (CHAT, json.dumps({
        "messages": [{"role": "user", "content": "a"}],
        "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "strange"}}},
    }).encode()),
]  # fmt: skip


def content_of(body: bytes, streamed: bool) -> list[str]:
    """The text of each choice, with its calls."""
    texts: Counter[int] | dict[int, str] = {}
    if not streamed:
        events = [json.loads(body)]
    else:
        lines = [line.removeprefix("data: ") for line in body.decode().split("\n\n") if line.startswith("data: {")]
        events = [json.loads(line) for line in lines]
    for event in events:
        if "output" in event:
            return ["".join(part["text"] for item in event["output"] for part in item.get("content", ()))]
        for choice in event["choices"]:
            message = choice.get("message") or choice.get("delta") or {"content": choice.get("text")}
            calls = "".join(call["function"]["arguments"] for call in message.get("tool_calls") or ())
            texts[choice["index"]] = texts.get(choice["index"], "") + (message.get("content") or "") + calls
    return [texts[index] for index in sorted(texts)]


class Soak:
    """The requests that wait, and what came of the others."""

    def __init__(self, url: str, expected: dict[int, list[str]], good: Sequence[tuple[str, dict[str, Any]]]) -> None:
        self.url, self.expected, self.good = url, expected, good
        self.jobs: queue.SimpleQueue[tuple[str, int]] = queue.SimpleQueue()
        self.counts: Counter[str] = Counter()
        self.faults: list[str] = []
        self.lock = threading.Lock()

    def client(self) -> None:
        """Send one request after the other."""
        with httpx.Client(timeout=600) as http:
            while True:
                try:
                    kind, number = self.jobs.get(block=False)
                except queue.Empty:
                    return
                try:
                    self._count(kind, *getattr(self, kind)(http, number))
                except Exception as error:
                    self._count(kind, "lost", f"{kind} {number}: {type(error).__name__}: {error}")

    def _count(self, kind: str, outcome: str, fault: str = "") -> None:
        with self.lock:
            self.counts[f"{kind}: {outcome}"] += 1
            if fault:
                self.faults.append(fault)

    def text(self, http: httpx.Client, number: int) -> tuple[str, str]:
        """A request that gets a text; 429 is an answer, too, after which it is sent again."""
        route, body = self.good[number]
        while (answer := http.post(self.url + route, json=body)).status_code == 429:
            self._count("text", "asked to wait")
            time.sleep(float(answer.headers["retry-after"]))
        if answer.status_code != 200:
            return str(answer.status_code), f"{route} {number}: {answer.text[:200]}"
        found = content_of(answer.content, body.get("stream", False))
        same = found == self.expected[number]
        return ("as alone", "") if same else ("differs", f"{route} {number}: {found!r}, not {self.expected[number]!r}")

    def wrong(self, http: httpx.Client, number: int) -> tuple[str, str]:
        """A request that must be refused, and not as a fault of the server."""
        route, body = BAD[number % len(BAD)]
        answer = http.post(self.url + route, content=body, headers={"content-type": "application/json"})
        refused = 400 <= answer.status_code < 500
        return str(answer.status_code), "" if refused else f"{body[:80]!r} is answered {answer.status_code}"

    def vanish(self, http: httpx.Client, number: int) -> tuple[str, str]:
        """A client that reads the beginning of a stream and goes."""
        body = {"messages": [{"role": "user", "content": "Tell a long story."}], "stream": True, "seed": number}
        with http.stream("POST", self.url + CHAT, json=body) as answer:
            next(answer.iter_lines(), None)
        return "gone", ""


def resident_bytes(port: int) -> int:
    """Memory of the process that listens on a port."""
    owner = next(one.pid for one in psutil.net_connections("tcp") if one.laddr.port == port and one.status == "LISTEN")
    return psutil.Process(owner).memory_info().rss


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_prompt_options(options)
    options.add_argument("--requests", type=int, default=1000)
    options.add_argument("--clients", type=int, default=64)
    options.add_argument("--max-new-tokens", type=int, default=16)
    options.add_argument("--max-num-seqs", type=int, default=16)
    options.add_argument("--max-queue", type=int, default=24, help="so that some clients are asked to wait")
    options.add_argument("--method", default="auto")
    args = options.parse_args()
    good = good_requests([one for one in first_turns(options, args) if isinstance(one, str)], args.max_new_tokens)
    more = ["--max-queue", str(args.max_queue), "--ngram-cache", "8MB", "--kv-cache-memory-bytes", "500MB"]
    with own_server(args.method, args.model, args.max_num_seqs, more) as url:
        with httpx.Client(timeout=600) as http:
            expected = {}
            for number, (route, body) in enumerate(good):
                answer = http.post(url + route, json={**body, "speculative": False})
                if answer.status_code != 200:
                    raise SystemExit(f"{route} is answered {answer.status_code}: {answer.text[:200]}")
                expected[number] = content_of(answer.content, body.get("stream", False))
        print(f"{len(good)} different requests answered alone, by plain decoding", flush=True)
        soak = Soak(url, expected, good)
        kinds = [*itertools.islice(itertools.cycle(["text"] * 8 + ["wrong", "vanish"]), args.requests)]
        random.Random(0).shuffle(kinds)
        memory, port, started = [], int(url.rsplit(":", 1)[1]), time.perf_counter()
        for first in range(0, len(kinds), max(len(kinds) // 10, 1)):
            for number, kind in enumerate(kinds[first : first + max(len(kinds) // 10, 1)], start=first):
                soak.jobs.put((kind, number % len(good)))
            threads = [threading.Thread(target=soak.client) for _ in range(args.clients)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            memory.append(resident_bytes(port))
            print(f"{sum(soak.counts.values()):6} answers, {memory[-1] / 2**20:,.0f} MiB", flush=True)
    print(f"{args.clients} clients, {time.perf_counter() - started:.0f} s")
    for outcome, count in sorted(soak.counts.items()):
        print(f"{count:6}  {outcome}")
    grown = memory[-1] / memory[len(memory) // 2] - 1
    print(f"memory grew by {100 * grown:.1f} % in the second half")
    for fault in soak.faults[:10]:
        print(fault, file=sys.stderr)
    raise SystemExit(1 if soak.faults or grown > 0.1 else 0)


if __name__ == "__main__":
    main()
