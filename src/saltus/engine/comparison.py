"""Compare a method's texts with those of plain decoding, and measure the gap of logits where they differ."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest
from typing import Any

import numpy as np

from saltus.core.canvas import continuation
from saltus.core.forward import ForwardInputs
from saltus.engine.engine import Engine
from saltus.engine.prompts import Conversation, Prompt
from saltus.engine.results import Generation, Statistics

WARM_UP_TOKENS = 8


def compare_with_plain(
    engine: Engine,
    inputs: Sequence[Prompt],
    method: str,
    settings: Mapping[str, Any],
    on_prompt: Callable[[], Any] = lambda: None,
) -> dict[str, Any]:
    """Decode prompts with plain decoding and with a method, which go first in turn, and compare the texts.

    `settings` are those of `Engine.generate`; `on_prompt` is called after each prompt. Returns the number of prompts
    and of identical ones, the flips (prompt, position of the first different token, gap of the two logits), tokens per
    call, how many draft tokens the method's calls verified in all, and the speed-up.
    """
    counted: dict[str, list[Statistics]] = {"plain": [], "method": []}
    names = {"plain": "plain", "method": method}
    flips: list[dict[str, Any]] = []
    verified: list[int] = []  # draft tokens of each call
    warm_up(engine, next(Conversation(inputs[0]).turns()).prompt, (method, "plain"), settings)
    for number, prompt in enumerate(inputs):
        written = {}
        for side in ("plain", "method") if number % 2 == 0 else ("method", "plain"):
            written[side] = _generate_turns(engine, prompt, {**settings, "method": names[side]})
            counted[side] += [generation.statistics for generation in written[side]]
        verified += [call.num_draft_tokens for generation in written["method"] for call in generation.calls]
        if flip := _find_flip(engine, written["plain"], written["method"], settings["max_new_tokens"]):
            flips.append({"prompt": number, **flip})
        on_prompt()
    calls = sum(each.calls for each in counted["method"])
    seconds, plain_seconds = (sum(each.seconds for each in counted[side]) for side in ("method", "plain"))
    return {
        "prompts": len(inputs),
        "identical": len(inputs) - len(flips),
        "flips": flips,
        "tokens_per_call": sum(each.tokens for each in counted["method"]) / calls if calls else None,
        "draft_tokens_verified": sum(verified),
        "speedup": plain_seconds / seconds if seconds else None,
    }


def _generate_turns(engine: Engine, prompt: Prompt, settings: Mapping[str, Any]) -> list[Generation]:
    """The answers of all turns of a prompt, which is read anew."""
    conversation, generations = Conversation(prompt), []
    engine.decoder.prefix_tree.clear()
    for turn in conversation.turns():
        generations.append(engine.generate(turn.prompt, **settings))
        conversation.add_answer(generations[-1].text)
    return generations


def _find_flip(
    engine: Engine, plain: list[Generation], other: list[Generation], max_new_tokens: int
) -> dict[str, Any] | None:
    """The first difference between the texts of a prompt. Later turns are not compared: their prompts differ."""
    before = 0
    for own_token, other_token in zip(plain, other, strict=True):
        at = first_difference(own_token.tokens, other_token.tokens)
        if at is not None:
            gap = logit_gap(engine, own_token, other_token, at, max_new_tokens)
            return {"position": before + at, "logit_gap": gap}
        before += len(own_token.tokens)
    return None


def logit_gap(engine: Engine, plain: Generation, other: Generation, position: int, max_new_tokens: int) -> float:
    """The gap between the logits of the two tokens that differ, in the calls of plain decoding.

    The limit of new tokens counts, too: by LongRoPE it decides the angles of all positions.
    """
    assert position < min(len(plain.tokens), len(other.tokens)), (
        "a text ends with its end token, or at the common limit"
    )
    prompt, context = engine.encode(plain.prompt), engine.target.context_length
    canvas = continuation(prompt, max_new_tokens if context is None else min(max_new_tokens, context - len(prompt)))
    kv_cache = engine.network.new_kv_cache()
    logits = engine.network.forward([ForwardInputs(canvas)], [kv_cache])[0].logits[0]
    for token in plain.tokens[:position]:
        canvas = canvas.fill(np.array([token]))
        logits = engine.network.forward([ForwardInputs(canvas)], [kv_cache])[0].logits[0]
    row = logits.float()
    return abs(float(row[plain.tokens[position]] - row[other.tokens[position]]))


def warm_up(engine: Engine, prompt: Any, methods: Sequence[str], settings: Mapping[str, Any]) -> None:
    """Decode a few tokens with each method, so that no first call is measured."""
    few = min(WARM_UP_TOKENS, settings["max_new_tokens"])
    for method in methods:
        short: dict[str, Any] = {**settings, "method": method, "max_new_tokens": few}
        engine.generate(prompt, **short)
    engine.decoder.prefix_tree.clear()


def first_difference(tokens: Sequence[int], other: Sequence[int]) -> int | None:
    """The index of the first token that differs; None if all are equal. A shorter text differs at its end."""
    pairs = zip_longest((int(token) for token in tokens), (int(token) for token in other))
    return next((index for index, (a, b) in enumerate(pairs) if a != b), None)
