"""Load a server with 1, 8 and 32 clients: tokens a second, time to the first token and between tokens.

Starts `saltus serve` for each method, as benchmarks/serve_load.py does; servers take turns, round by round, and the
texts of all must be the same.
"""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

import serve_load

from gpu.loaded_models import read_prompts
from gpu.part_results import Part
from gpu.table_lines import markdown_table
from saltus.methods import method_names

ROUNDS = 3
FEWEST_PROMPTS = 6

REHEARSAL = {"methods": "plain,lookup", "clients": "1,2", "tokens": 4}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(methods="plain,auto")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--clients", default="1,8,32")
    parser.add_argument("--tokens", type=int, default=64, help="of each answer, at most")
    parser.add_argument("--temperature", type=float, default=0.0)


def parts(args: argparse.Namespace) -> list[Part]:
    urls: dict[str, str] = {}  # of the servers that run, by method
    found = [
        Part({"what": "server", "method": method}, partial(start, args, urls, method), prepares={"what": "load"})
        for method in args.methods
    ]
    for clients in args.clients:
        for number in range(ROUNDS):
            facts = {"what": "load", "clients": clients, "round": number}
            found.append(Part(facts, partial(load, args, urls, clients, number)))
    return found


def start(args: argparse.Namespace, urls: dict[str, str], method: str) -> dict[str, Any]:
    """Start a server that runs until the stage ends, and let it answer once."""
    own = [option for option in args.option if option.partition(".")[0] in method_names(method)]
    more = ["--device", args.device, *(word for option in own for word in ("--option", option))]
    url = args.until_end.enter_context(serve_load.own_server(method, args.model, max(args.clients), more))
    serve_load.measure(url, args.model, read_prompts(args.prompts, 2), 1, _settings(args))
    urls[method] = url
    return {}


def _settings(args: argparse.Namespace) -> dict[str, Any]:
    return {"max_tokens": args.tokens, "temperature": args.temperature, "seed": 0}


def load(args: argparse.Namespace, urls: dict[str, str], clients: int, number: int) -> dict[str, Any]:
    """Let clients send prompts, each of which has a number before it, so that no server has read it before."""
    if not urls:
        raise ValueError("no server runs")
    prompts = read_prompts(args.prompts, max(FEWEST_PROMPTS, 2 * clients))
    numbered = [f"({clients}.{number}) {prompt}" for prompt in prompts]
    order = list(urls)[:: 1 if number % 2 == 0 else -1]
    runs = {
        method: serve_load.measure(urls[method], args.model, numbered, clients, _settings(args)) for method in order
    }
    expected = runs[next(iter(urls))].texts
    measured = {
        method: {"tokens": run.tokens, "seconds": run.seconds, "first": run.first, "between": run.between}
        for method, run in runs.items()
    }
    different = sum(run.texts[text] != expected[text] for run in runs.values() for text in expected)
    return {"servers": measured, "texts": len(expected), "different": different}


def tables(results: list[dict[str, Any]]) -> list[str]:
    """Medians over rounds, or over all answers."""
    cells = []
    loads = [result for result in results if result["what"] == "load"]
    for clients in dict.fromkeys(result["clients"] for result in loads):
        rounds = [result for result in loads if result["clients"] == clients]
        for method in dict.fromkeys(method for result in rounds for method in result["servers"]):
            own = [result["servers"][method] for result in rounds if method in result["servers"]]
            facts = serve_load.summarised([serve_load.Run(**one) for one in own])
            cells.append([
                clients, method, f"{facts.rate:,.1f}", f"{1000 * facts.first:.0f}", f"{1000 * facts.late:.0f}",
                f"{1000 * facts.between:.1f}", len(own),
            ])  # fmt: skip
    heads = ["clients", "method", "tokens/s", "first token, ms", "95th percentile, ms", "between tokens, ms", "rounds"]
    return markdown_table(heads, cells) if cells else []
