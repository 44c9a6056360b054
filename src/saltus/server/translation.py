"""Turn the requests of clients into requests of the engine."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from saltus.core.value_types import SettingError
from saltus.engine.chat.reasoning import Reasoning, reasoning_tags
from saltus.engine.encoding import PromptSettings
from saltus.engine.engine import Engine
from saltus.engine.grammar import MakesConstraint
from saltus.engine.infill import AnyRequest
from saltus.engine.infill_template import InfillTemplate
from saltus.engine.text_bounds import PromptTooLongError
from saltus.engine.text_request import TextRequest
from saltus.methods import make_methods, require_draft_models
from saltus.server.errors import CONTEXT_EXCEEDED, ApiError
from saltus.server.protocol import MAX_SEED, RANDOM_SEED, ContentPart, Message, SamplingFields, Speculative
from saltus.server.structured import Tools

DEFAULT_TEMPERATURE = 1.0  # OpenAI's
NO_PENALTIES = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
ROLES = {"developer": "system", "function": "tool"}  # as chat templates name them
KNOWN_ROLES = ("system", "developer", "user", "assistant", "tool", "function")  # OpenAI's


def conversation(messages: Sequence[Message], template: str = "") -> list[dict[str, Any]]:
    """Messages as the chat template reads them; the texts of a message's parts are joined.

    Errors: ApiError 400 for a role that neither OpenAI's API has nor the template names, such as a misspelled one.
    """
    chat = []
    for place, message in enumerate(messages):
        if message.role not in KNOWN_ROLES and not re.search(f"""(["']){re.escape(message.role)}\\1""", template):
            known = ", ".join(KNOWN_ROLES)
            raise ApiError(
                400,
                f"messages.{place}.role: {message.role!r} is unknown; choose from {known}",
                f"messages.{place}.role",
            )
        given = message.model_dump(exclude_none=True)
        role = ROLES.get(message.role, message.role)
        said = joined_text(message.content or "") or given.pop("refusal", "")
        if "function_call" in given and not given.get("tool_calls"):  # OpenAI's older form: one call without an id
            given["tool_calls"] = [{"type": "function", "function": given.pop("function_call")}]
        chat.append({**given, "role": role, "content": said})
        if "reasoning" in given:  # vLLM's newer name; templates know the older one
            chat[-1].setdefault("reasoning_content", given["reasoning"])
    return chat


def joined_text(content: str | Sequence[ContentPart]) -> str:
    """The text of a content that may be given in parts, which are lines of their own, as in other servers."""
    return content if isinstance(content, str) else "\n".join(part.text for part in content)


def completion_prompts(prompt: str | list[Any]) -> list[str | list[int]]:
    """The prompts of a completion request: texts, or token ids."""
    if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)):
        return [prompt]
    if not prompt:
        raise ApiError(400, "prompt is an empty list; give at least one text", "prompt")
    return list(prompt)


def requested_method(speculative: bool | Speculative, engine: Engine) -> str:
    """The method of a request. Errors: ApiError 400 for one that does not exist, or lacks its draft model here."""
    default = engine.method
    if speculative is True:
        return default
    if speculative is False:
        return "plain"
    method = "plain" if speculative.max_draft_tokens == 0 else speculative.method or default
    try:
        require_draft_models(make_methods(method, engine.decoder.options))
    except ValueError as error:
        raise ApiError(400, str(error), "speculative.method") from error
    return method


def chosen_seeds(body: SamplingFields, count: int = 1) -> list[int]:
    """The seeds of choices: the first is as asked for, else fresh. The i-th choice has the first seed plus i.

    Negative seeds are as good as others, but for RANDOM_SEED, which asks for a fresh one.
    """
    first = int.from_bytes(os.urandom(7)) if body.seed in (None, RANDOM_SEED) else body.seed
    return [(first + i) % (MAX_SEED + 1) for i in range(count)]


class ChatTexts(NamedTuple):
    """The texts of a conversation's answer, and what separates the parts of each."""

    requests: list[TextRequest]
    method: str
    tools: Tools
    reasoning: Reasoning | None


def text_requests(
    engine: Engine,
    prompt: Any,
    body: SamplingFields,
    seeds: Sequence[int],
    *,
    grammar: MakesConstraint | None = None,
    reasoning: Reasoning | None = None,
    **prompt_settings: Any,
) -> list[TextRequest]:
    """Requests of the engine for one prompt, which is tokenised once. Errors: ApiError 400 that names the field.

    `prompt_settings` are further arguments of the engine's `text_request`.
    """
    context, most = engine.target.context_length, body.most_new_tokens
    logprobs, top_logprobs = body.requested_logprobs
    sampling = sampling_settings(body)
    if most is not None and body.min_tokens > most:
        message = f"min_tokens is {body.min_tokens}, but the text has at most {most}; lower it"
        raise ApiError(400, message, "min_tokens")
    if reasoning is not None:
        prompt_settings |= {"shown_tokens": reasoning.shown_tokens, "reasoning_reader": reasoning.reader}
        grammar = None if grammar is None else reasoning.before(grammar)
    try:
        first = engine.text_request(
            prompt, max_new_tokens=max(context or 2**31, body.min_tokens) if most is None else most,
            min_new_tokens=body.min_tokens, seed=seeds[0], stop=body.stop, stop_token_ids=body.stop_token_ids or (),
            skip_special_tokens=body.skip_special_tokens, logprobs=logprobs, top_logprobs=top_logprobs,
            ignore_eos=body.ignore_eos, grammar=grammar, prediction=body.predicted_text,
            **prompt_settings, **sampling,
        )  # fmt: skip
    except PromptTooLongError as error:
        message = f"{error} (this model's maximum context length is {context:,} tokens)"
        raise ApiError(400, message, body.prompt_field, CONTEXT_EXCEEDED) from error
    except ValueError as error:
        raise ApiError(400, str(error), _field_of(error, body)) from error
    ends, prompt_tokens = first.output.end_tokens, first.request.prompt
    constraints = (
        None if grammar is None else grammar.constraint(engine.tokenizer, ends, prompt_tokens) for _ in seeds[1:]
    )
    return [first, *(first.with_seed(*each) for each in zip(seeds[1:], constraints, strict=True))]


def reasoning_of(engine: Engine, messages: Sequence[dict[str, Any]], body: Any) -> Reasoning | None:
    """What separates reasoning and answer; None for models without."""
    if (tags := reasoning_tags(engine.tokenizer)) is None:
        return None
    settings = PromptSettings(
        add_generation_prompt=getattr(body, "add_generation_prompt", None),
        continue_final_message=getattr(body, "continue_final_message", None),
    )
    continued = str(messages[-1].get("content") or "") if settings.continues(messages) else ""
    return Reasoning(engine.tokenizer, tags, continued, in_text=body.reasoning_format == "none")


def infill_request(
    engine: Engine, template: InfillTemplate, body: SamplingFields, open_tokens: int | None, seed: int
) -> AnyRequest:
    """A request of the engine for the holes of a text, which is taken as it is. Errors: ApiError 400."""
    try:
        return engine.infill_request(
            template, open_tokens=open_tokens, seed=seed, verbatim=True, **sampling_settings(body)
        )
    except ValueError as error:
        raise ApiError(400, str(error), _field_of(error, body)) from error


def sampling_settings(body: SamplingFields) -> dict[str, Any]:
    """Sampling settings of the request, as keyword arguments of the engine. Errors: ApiError 400."""
    penalties = {
        "repetition_penalty": float(body.repetition_penalty or body.repeat_penalty or 1.0),
        "presence_penalty": float(body.presence_penalty or 0.0),
        "frequency_penalty": float(body.frequency_penalty or 0.0),
    }
    for name in ("repeat_last_n", "penalty_last_n"):
        last = getattr(body, name)
        if last == 0:
            penalties = {}
        elif (last or 0) > 0 and penalties not in ({}, NO_PENALTIES):
            message = f"{name} is {last}, but penalties look at all tokens here; give -1, or 0 to switch them off"
            raise ApiError(400, message, name)
    return {
        "temperature": DEFAULT_TEMPERATURE if body.temperature is None else float(body.temperature),
        "top_p": 1.0 if body.top_p is None else float(body.top_p),
        "top_k": max(body.top_k or 0, 0),
        "min_p": float(body.min_p or 0.0),
        **NO_PENALTIES,
        **penalties,
        "logit_bias": tuple((token, float(bias)) for token, bias in (body.logit_bias or {}).items()),
    }


def _field_of(error: ValueError, body: SamplingFields) -> str | None:
    """The field of a request that an error of the engine is about; None if it is about no single one."""
    setting = error.setting if isinstance(error, SettingError) else None
    return body.prompt_field if setting == "prompt" else setting
