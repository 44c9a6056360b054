"""Turn a prompt or the messages of a conversation into tokens."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

from jinja2 import TemplateSyntaxError

from saltus.core.value_types import SettingError, about_setting
from saltus.engine.chat.control_tokens import control_tokens
from saltus.engine.chat.message_parts import template_loses_messages, template_reads_parts, with_parts
from saltus.engine.chat.template_limits import render_chat
from saltus.engine.chat.tool_messages import has_tools, readable_messages, template_knows_tools
from saltus.engine.settings import PromptLike
from saltus.engine.text_bounds import require_fits

ANSWER = "An answer."  # that stands in the chat template where its end is looked for
# What `chat_template_kwargs` may not set: arguments of the tokenizer's `apply_chat_template`.
RESERVED = frozenset({
    "conversation", "tools", "chat_template", "add_generation_prompt", "continue_final_message", "tokenize", "padding",
    "truncation", "max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs",
    "sanitize_control_tokens", "messages", "tokenizer",
})  # fmt: skip

log = logging.getLogger("saltus")


@dataclass(frozen=True)
class PromptSettings:
    """How a prompt becomes tokens; the fields are those of vLLM's requests, and `parse_special` is llama.cpp's."""

    raw: bool = False  # a str is not put into the chat template
    tools: Sequence[Mapping[str, Any]] = ()  # what the answer may call, as OpenAI describes them
    chat_template_kwargs: Mapping[str, Any] | None = None  # variables of the chat template
    add_generation_prompt: bool | None = None  # begin an answer; None: unless the final message is continued
    continue_final_message: bool | None = None  # None: if it is the assistant's, without calls
    add_special_tokens: bool | None = None  # the tokenizer's begin token; None: not to what a chat template wrote
    parse_special: bool = False  # control tokens that messages spell are tokens

    def continues(self, prompt: PromptLike | Any) -> bool:
        """True if the text goes on with the last message of a conversation."""
        if not is_conversation(prompt) or not prompt:
            return False
        messages: Any = prompt
        if self.continue_final_message is not None:
            return self.continue_final_message
        unfinished = messages[-1].get("role") == "assistant" and not messages[-1].get("tool_calls")
        return unfinished and not self.add_generation_prompt


def encode_prompt(
    tokenizer: Any,
    prompt: PromptLike | Any,
    settings: PromptSettings,
    model_name: str,
    context: int | None = None,
    end_tokens: frozenset[int] = frozenset(),
    unchecked_length: int = 0,
) -> list[int]:
    """The token ids that the model reads, chat template included unless `raw`. Errors: ValueError of one line.

    A prompt may be token ids itself; `Checkpoint.check_tokens` says whether the model has them. A text that has no room
    in `context` tokens is refused by its length, if it has more than `unchecked_length` characters.
    """
    if is_tokens(prompt):
        tokens: Any = prompt
        return list(tokens)
    if not isinstance(prompt, str) and not is_conversation(prompt):
        raise ValueError(
            f"a prompt is of type {type(prompt).__name__}, but must be a str, a list of messages, or one of token ids"
            + ("; give its tolist()" if hasattr(prompt, "tolist") else "")
        )
    if not prompt:
        raise ValueError("the prompt is empty; write at least a word")
    if isinstance(prompt, str):
        require_unicode(prompt, "the prompt")

    def require_room(text: str) -> None:
        if len(text) > unchecked_length:
            require_fits([text], tokenizer, context, model_name, "the prompt")

    if uses_chat_template(tokenizer, prompt, settings.raw):
        tokens = _encode_chat(tokenizer, prompt, settings, model_name, end_tokens, require_room)
    else:
        if settings.tools or settings.chat_template_kwargs:
            message = "tools and chat_template_kwargs are for conversations; give messages"
            raise SettingError(message, "chat_template_kwargs")
        require_room(str(prompt))
        tokens = tokens_of_text(tokenizer, str(prompt), settings.add_special_tokens is not False)
    if not tokens:
        raise ValueError("the prompt has no tokens; write at least a word")
    return list(tokens)


def tokens_of_text(tokenizer: Any, text: str, add_special_tokens: bool = True, parse_special: bool = True) -> list[int]:
    """The tokens of a text that is a prompt as it stands; without `parse_special` no word of it is a control token."""
    require_unicode(text, "the text")
    control = None if parse_special else control_tokens(tokenizer, "")
    if control is None or next(control.spans(text), None) is None:  # an encoder takes up to a second to make
        tokens = list(tokenizer(text, add_special_tokens=add_special_tokens, verbose=False).input_ids)
    else:
        begin = begin_tokens(tokenizer) if add_special_tokens else []
        tokens = [*begin, *control.encoder.encode(text, add_special_tokens=False).ids]
    return _begun_once(tokenizer, tokens)


def tokens_inside_text(tokenizer: Any, text: str, parse_special: bool = True) -> list[int]:
    """The tokens of a text that follows something, without a space before it."""

    def encode(part: str) -> list[int]:
        return tokens_of_text(tokenizer, part, add_special_tokens=False, parse_special=parse_special)

    mark, whole = encode("\n"), encode("\n" + text)
    # Tokenizers of Llama 2's kind put a space before a text, so it is read behind a line break.
    return whole[len(mark) :] if whole[: len(mark)] == mark and _puts_space_before(tokenizer) else encode(text)


def _puts_space_before(tokenizer: Any) -> bool:
    tokens = tokenizer("a", add_special_tokens=False).input_ids
    return tokenizer.convert_ids_to_tokens(tokens)[0].startswith("▁")


def tokens_after_prompt(tokenizer: Any, prompt: list[int], text: str) -> list[int]:
    """The tokens of a text behind a prompt, where the text may begin otherwise than alone."""
    whole = tokens_of_text(tokenizer, tokenizer.decode(prompt) + text, add_special_tokens=False)
    return whole[len(prompt) :] if whole[: len(prompt)] == prompt else tokens_inside_text(tokenizer, text)


def _begun_once(tokenizer: Any, tokens: list[int]) -> list[int]:
    """Tokens that begin with one begin token where both a text and the tokenizer have one."""
    if len(tokens) < 2 or not tokens[0] == tokens[1] == tokenizer.bos_token_id:
        return tokens
    log.warning("a prompt begins with %s, which the tokenizer adds, too; it is read once", tokenizer.bos_token)
    return tokens[1:]


def uses_chat_template(tokenizer: Any, prompt: PromptLike, raw: bool) -> bool:
    """True if the prompt is put into the tokenizer's chat template."""
    return not isinstance(prompt, str) or (not raw and bool(tokenizer.chat_template))


class _TemplateInputs(NamedTuple):
    """What the chat template is given."""

    messages: list[Any]
    tools: list[Any]
    variables: dict[str, Any]


def _encode_chat(
    tokenizer: Any,
    prompt: PromptLike | Any,
    settings: PromptSettings,
    model_name: str,
    end_tokens: frozenset[int],
    require_room: Callable[[str], None],
) -> list[int]:
    """The tokens of a conversation in the chat template; words of messages that read like control tokens stay words."""
    messages: list[Any] = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    _require_chat_template(tokenizer, model_name)
    _report_lost_messages(tokenizer, str(tokenizer.chat_template), model_name)
    for number, message in enumerate(messages, start=1):
        require_unicode(str(message.get("content") or ""), f"message {number}")
    given = _TemplateInputs(messages, list(settings.tools), dict(settings.chat_template_kwargs or {}))
    control = None if settings.parse_special else control_tokens(tokenizer, str(tokenizer.chat_template), end_tokens)
    shown = given if control is None else _TemplateInputs(*(control.marked(value) for value in given))
    text = require_unicode(_render(tokenizer, shown, settings, settings.continues(prompt), model_name), "the prompt")
    require_room(text)
    if control is None or shown == given:
        tokens = list(tokenizer(text, add_special_tokens=False, verbose=False).input_ids)
    else:
        tokens = control.encode(text)
    return _begun_once(tokenizer, [*(begin_tokens(tokenizer) if settings.add_special_tokens else ()), *tokens])


def conversation_text(
    tokenizer: Any, messages: Sequence[Mapping[str, Any]], settings: PromptSettings, model_name: str
) -> str:
    """A conversation as the chat template writes it. Errors: ValueError of one line."""
    _require_chat_template(tokenizer, model_name)
    given = _TemplateInputs(list(messages), list(settings.tools), dict(settings.chat_template_kwargs or {}))
    return require_unicode(_render(tokenizer, given, settings, settings.continues(messages), model_name), "the prompt")


def _require_chat_template(tokenizer: Any, model_name: str) -> None:
    if not tokenizer.chat_template:
        raise ValueError(
            f"{model_name} has no chat template for messages; name one (--chat-template, chat_template=), such as"
            " vicuna, or give the prompt as one str"
        )


@lru_cache(maxsize=8)
def _report_lost_messages(tokenizer: Any, template: str, model_name: str) -> None:
    """Log a line, once for a template, if the model would never read what the user writes."""
    if template_loses_messages(tokenizer, template):
        log.warning(
            "the chat template of %s leaves the user's message out, so the model does not read it; name another"
            " (--chat-template, chat_template=), or continue the text itself (--raw, raw=True)",
            model_name,
        )


def answer_end_token(tokenizer: Any) -> int | None:
    """The token that ends an assistant's message in the chat template; without one the tokenizer's end token."""
    if tokenizer.chat_template:
        messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": ANSWER}]
        given, settings = _TemplateInputs(messages, [], {}), PromptSettings(add_generation_prompt=False)
        tail = _render(tokenizer, given, settings, False, "the tokenizer").rpartition(ANSWER)[2]
        special = {*tokenizer.all_special_ids, *(i for i, t in tokenizer.added_tokens_decoder.items() if t.special)}
        for token in tokenizer(tail, add_special_tokens=False).input_ids:
            if token in special:
                return token
    return tokenizer.eos_token_id


def begin_tokens(tokenizer: Any) -> list[int]:
    """The begin token, if the tokenizer puts it before a text."""
    first = tokenizer("").input_ids[:1] if tokenizer.bos_token_id is not None else []
    return first if first == [tokenizer.bos_token_id] else []


def _render(tokenizer: Any, given: _TemplateInputs, settings: PromptSettings, continues: bool, model_name: str) -> str:
    """A conversation as the chat template writes it."""
    messages, tools, variables = given
    if reserved := sorted(RESERVED & variables.keys()):
        message = f"chat_template_kwargs are variables of the chat template, and {reserved[0]} is none; leave it out"
        raise SettingError(message, "chat_template_kwargs")
    begins = settings.add_generation_prompt
    if continues and begins:
        message = "add_generation_prompt and continue_final_message exclude each other; leave one out"
        raise SettingError(message, "add_generation_prompt")
    if tools or has_tools(messages):
        with about_setting("tool_calls"):
            messages = readable_messages(messages, tools, tokenizer)
        if not template_knows_tools(tokenizer, str(tokenizer.chat_template)):
            tools = []
    if template_reads_parts(tokenizer, str(tokenizer.chat_template)):
        messages = with_parts(messages)
    try:
        return render_chat(
            tokenizer, messages, add_generation_prompt=not continues if begins is None else begins,
            continue_final_message=continues, tools=tools or None, **variables,
        )  # fmt: skip
    except ValueError as error:
        if isinstance(error.__cause__, TemplateSyntaxError):
            raise ValueError(
                f"the chat template of {model_name} is not Jinja ({error}); name another (--chat-template,"
                " chat_template=), or continue the text itself (--raw, raw=True)"
            ) from error
        raise ValueError(
            f"the chat template of {model_name} refuses these messages ({error});"
            " each needs a role (user, assistant, system) and a content"
        ) from error


def require_unicode(text: str, what: str) -> str:
    """The text, or a ValueError if it has a lone surrogate, which no tokenizer takes."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{what} has a lone surrogate (U+{ord(text[error.start]):04X}) at character {error.start + 1},"
            " which stands for no character; give valid UTF-8"
        ) from None
    return text


def is_sequence(prompt: Any) -> bool:
    """True for a list or tuple."""
    return isinstance(prompt, Sequence) and not isinstance(prompt, str | bytes)


def is_tokens(prompt: Any) -> bool:
    """True for a list of token ids."""
    return is_sequence(prompt) and len(prompt) > 0 and all(type(token) is int for token in prompt)


def is_conversation(prompt: Any) -> bool:
    """True for a list of messages."""
    return is_sequence(prompt) and all(isinstance(message, Mapping) for message in prompt)


def is_batch(prompt: Any) -> bool:
    """True for a list of prompts; a list of dicts is one conversation, and one of numbers one prompt of token ids."""
    return is_sequence(prompt) and not (prompt and isinstance(prompt[0], Mapping | int))
