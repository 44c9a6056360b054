"""Random requests in one scheduler: each text, its ending and its log-probabilities are those of plain decoding alone.

Methods, settings, arrivals, cancellations, chunks of prompts, pauses for other clients and small prefix trees are drawn
for each case. `RANDOM_CASES=500 make test ARGS="-k random_requests"` draws more of them.
"""

import os
import random
from dataclasses import dataclass, field
from typing import Any

import pytest

import saltus
from saltus.engine.engine import Engine
from saltus.engine.prefix_tree import PrefixTree
from saltus.engine.scheduled_request import ScheduledRequest
from saltus.engine.scheduler import Scheduler
from saltus.engine.text_request import TextRequest
from saltus.kernels import native

pytestmark = [pytest.mark.slow, pytest.mark.unchecked]
CASES = int(os.environ.get("RANDOM_CASES", "8"))  # of each model
MODELS = ["Llama", "Gemma2", "GptOss", "Qwen3_5", "Mamba2"]
METHODS = [
    "plain", "lookup", "token_recycling+lookup", "jacobi", "small_model", "small_model+lookup", "jacobi+lookup",
    "jacobi+lookup+small_model",
]  # fmt: skip
WORDS = ["the", "cat", "sat", "on", "mat", "and", "dog", "log"]
CHOICES: dict[str, tuple[float, list[Any]]] = {  # how often a setting is given, and its values
    "temperature": (0.7, [0.3, 0.8, 1.0, 2.0, 1e-6]), "top_k": (0.2, [1, 5, 64, 300]),
    "top_p": (0.2, [0.9, 0.5, 0.0]), "min_p": (0.1, [0.05, 1.0]), "repetition_penalty": (0.2, [1.3, 0.8]),
    "presence_penalty": (0.15, [0.7, -1.0]), "frequency_penalty": (0.15, [0.4, -0.5]),
    "logit_bias": (0.1, [{5: 3.0, 0: -100.0}, {263: 100.0}]), "no_repeat_ngram_size": (0.15, [1, 2, 3]),
    "coupling": (0.4, ["gumbel", "probability", "token-order"]), "min_new_tokens": (0.15, [1, 4, 8]),
    "stop": (0.2, ["e", ["the", "at"], "<|user|>"]), "stop_token_ids": (0.1, [[7, 270], [263]]),
    "ignore_eos": (0.4, [True]), "skip_special_tokens": (0.2, [False]), "banned": (0.1, [[260, 263, 5]]),
    "forced_at_index": (0.05, [[(3, 40)]]), "top_logprobs": (0.3, [1, 20]),
}  # fmt: skip
NO_GRAMMAR = {"ignore_eos", "no_repeat_ngram_size", "banned", "stop_token_ids", "forced_at_index"}  # may leave no token


@dataclass
class Drawn:
    """A request, how and when it is decoded, and its text released so far."""

    prompt: str | list[int]
    method: str
    settings: dict[str, Any]
    arrival: int  # the step before which it comes
    cancelled_after: int | None  # steps
    client: str
    scheduled: ScheduledRequest | None = field(default=None, init=False)
    released: str = field(default="", init=False)


def draw_request(dice: random.Random, prompts: list, seed: int) -> Drawn:
    settings = {name: dice.choice(values) for name, (share, values) in CHOICES.items() if dice.random() < share}
    settings |= {"max_new_tokens": dice.choice([8, 16, 28]), "seed": seed, "raw": True, "logprobs": True}
    if not NO_GRAMMAR & settings.keys() and dice.random() < 0.3:
        settings["grammar"] = saltus.Grammar.regex(dice.choice(["[a-e ]{4,30}", "(the|cat) (sat|on)+", "(.|\n){0,40}"]))
    cancelled_after = dice.choice([None, None, None, None, 1, 3])
    return Drawn(
        dice.choice(prompts), dice.choice(METHODS), settings, dice.choice([0, 0, 1, 5, 15, 40]), cancelled_after,
        dice.choice("ab"),
    )  # fmt: skip


def draw_prompts(dice: random.Random) -> list:
    """Of words and of any tokens, most of them repetitive; some begin alike."""
    words = " ".join(dice.choices(WORDS, k=dice.randint(1, 6)))
    tokens = (dice.choices(range(3, 300), k=dice.randint(1, 14)) * 9)[: dice.randint(1, 90)]
    cuts = [tokens[: dice.randint(1, len(tokens))] for _ in range(2)]
    return [words, f"{words} " * dice.randint(2, 6), tokens, [*cuts[0], 9, 12], [*cuts[1], *cuts[0]]]


@pytest.fixture(scope="module", params=MODELS)
def engine(request, architecture_folder) -> Engine:
    if request.param in ("Qwen3_5", "Mamba2") and native.load_kernels() is None:
        pytest.skip("layers with states need compiled kernels")
    options = {"small_model": {"model": str(architecture_folder("Llama", 1)), "min_probability": 0.0}}
    dtype = "float32" if request.param == "Llama" else "bfloat16"
    return saltus.load(str(architecture_folder(request.param)), "lookup", options=options, dtype=dtype, device="cpu")


def result(text: TextRequest) -> tuple:
    request = text.request
    return (
        request.tokens, text.output.text, request.finish_reason, request.log_probabilities,
        request.top_log_probabilities,
    )  # fmt: skip


def plain_result(engine: Engine, drawn: Drawn) -> tuple:
    engine.decoder.prefix_tree.clear()
    text = engine.text_request(drawn.prompt, **drawn.settings)
    for _ in engine._run([text.request], "plain"):
        pass
    return result(text)


def end_within(dice: random.Random, drawn: Drawn, engine: Engine) -> None:
    """Let a text end somewhere, by a stop string or an end token that plain decoding writes there."""
    tokens, written, *_ = plain_result(engine, drawn)
    at = dice.randint(0, len(written))
    if stop := written[at : at + dice.randint(1, 5)]:
        drawn.settings["stop"] = [stop, "zz"]
    elif "grammar" not in drawn.settings:
        drawn.settings["stop_token_ids"] = [dice.choice(tokens)]


@pytest.mark.parametrize("number", range(CASES))
def test_random_requests_are_answered_as_plain_decoding_answers_each_alone(engine, number):
    check_random_requests(engine, random.Random(number), number)


def check_random_requests(engine: Engine, dice: random.Random, number: int) -> None:
    """Requests that are drawn by these dice."""
    prompts = draw_prompts(dice)
    requests = [draw_request(dice, prompts, seed=10 * number + i) for i in range(dice.choice([1, 4, 7]))]
    for drawn in dice.sample(requests, k=len(requests) // 2):
        end_within(dice, drawn, engine)
    expected = [plain_result(engine, drawn) for drawn in requests]

    tested = engine.copy_with(adaptive=dice.random() < 0.5, max_draft_tokens=dice.choice([1, 4, 16, 31, 100]))
    tree, chunk = PrefixTree(dice.choice([2**30, 20_000])), dice.choice([None, 1, 7, 16])
    scheduler = Scheduler(tested.decoder, dice.choice([1, 2, 16]), prefix_tree=tree, prefill_chunk_tokens=chunk)
    texts = [tested.text_request(drawn.prompt, **drawn.settings) for drawn in requests]
    for drawn, text, (tokens, *_) in zip(requests, texts, expected, strict=True):
        text.request.prediction = [token if dice.random() < 0.9 else 9 for token in tokens]  # lookup drafts them
        drawn.scheduled = ScheduledRequest(text.request, drawn.method, client=drawn.client)
    step, waiting = 0, list(requests)
    while waiting or scheduler.requests:
        for drawn in [each for each in waiting if each.arrival <= step]:
            scheduler.add(drawn.scheduled)
            waiting.remove(drawn)
        scheduler.step()
        step += 1
        for drawn, text in zip(requests, texts, strict=True):
            drawn.released += text.output.release(text.request.finished)
            cancelled = drawn.cancelled_after is not None and step == drawn.arrival + drawn.cancelled_after
            if cancelled and drawn.scheduled in scheduler.requests:
                scheduler.abort(drawn.scheduled)
    for drawn, text, wanted in zip(requests, texts, expected, strict=True):
        found = result(text)
        if not text.request.finished:  # it was cancelled
            count = len(found[0])
            wanted = (wanted[0][:count], found[1], None, *(each[:count] for each in wanted[3:]))
            assert drawn.cancelled_after is not None
        assert found == wanted, drawn
        assert text.output.text.startswith(drawn.released)
        assert drawn.released == text.output.text or not text.request.finished
