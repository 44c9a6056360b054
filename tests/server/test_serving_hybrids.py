"""Models with states, sinks and experts in the server: each text is that of its request alone, whatever runs beside."""

import json
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

import saltus
from saltus.kernels import native
from saltus.server.served_request import Limits
from tiny_server import serving

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(native.load_kernels() is None, reason="layers with states need compiled kernels"),
]
REQUESTS, CLIENTS = 120, 16  # of 60, two are alike but for seed, length and who leaves
BEGIN = "the cat sat on the mat and the cat sat on the log and the "
ENDS = ["one two one two", "abc abc abd", "x", "dog " * 12, "and then the end", "the log the log the log"]
METHODS = ["lookup", "jacobi", "jacobi+lookup", "plain"]


def request_body(number: int) -> dict:
    """Prompts that share beginnings or nothing, long and short, greedy and sampled, with and without an end."""
    beginning = BEGIN * (number % 4)
    return {
        "model": "tiny", "prompt": beginning + ENDS[number % len(ENDS)] + " " * (number % 3), "seed": number,
        "max_tokens": 4 + number % 29, "temperature": (0.0, 0.8, 1.0)[number % 3], "ignore_eos": True,
        "stream": number % 2 == 1, "stop": ["\u00e9", "qu"] if number % 5 == 0 else None,
        "speculative": {"method": METHODS[number % len(METHODS)]},
    }  # fmt: skip


def ask(http: httpx.Client, url: str, number: int) -> str | None:
    """The text of a request; of every ninth, which leaves after its first piece, nothing."""
    body = request_body(number)
    if not body["stream"]:
        reply = http.post(url, json=body)
        reply.raise_for_status()
        return reply.json()["choices"][0]["text"]
    pieces = []
    with http.stream("POST", url, json=body) as reply:
        reply.raise_for_status()
        for line in reply.iter_lines():
            if line.startswith("data: {"):
                pieces.append(json.loads(line[6:])["choices"][0]["text"])
                if number % 9 == 1:
                    return None
    return "".join(pieces)


@pytest.mark.parametrize("name", ["Qwen3_5", "NemotronH", "GptOss"])
def test_mixed_requests_of_many_clients_have_their_own_texts(architecture_folder, name):
    engine = saltus.load(str(architecture_folder(name)), "lookup", adaptive=False, device="cpu")
    with (
        serving(engine, Limits(max_batch=8)) as (_, address),
        httpx.Client(timeout=300) as http,
        ThreadPoolExecutor(CLIENTS) as clients,
    ):
        texts = list(clients.map(lambda number: ask(http, f"{address}/v1/completions", number), range(REQUESTS)))
    assert sum(text is None for text in texts) > REQUESTS // 25
    for number, text in enumerate(texts):
        body = request_body(number)
        if text is not None:
            engine.decoder.prefix_tree.clear()
            alone = engine.generate(
                body["prompt"], method="plain", raw=True, seed=body["seed"], max_new_tokens=body["max_tokens"],
                temperature=body["temperature"], ignore_eos=True, stop=body["stop"],
            )  # fmt: skip
            assert text == alone.text, body
