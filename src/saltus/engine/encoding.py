"""Turn a prompt or the messages of a conversation into tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from saltus.engine.results import PromptLike
from saltus.engine.template_limits import render_chat
from saltus.engine.text_bounds import require_fits
from saltus.engine.tool_calls import readable_messages


def encode_prompt(
    tokenizer: Any,
    prompt: PromptLike | Any,
    raw: bool,
    model_name: str,
    tools: Sequence[Mapping[str, Any]] = (),
    context: int | None = None,
) -> list[int]:
    """The token ids that the model reads, chat template included unless `raw`. Errors: ValueError of one line.

    With `raw` a prompt may be token ids itself; `Checkpoint.check_tokens` says whether the model has them.
    `tools` are what the answer may call, as OpenAI describes them. A text that has no room in `context` tokens is
    refused by its length.
    """
    if raw and is_tokens(prompt):
        tokens: Any = prompt
        return list(tokens)
    if not isinstance(prompt, str) and not is_conversation(prompt):
        raise ValueError(f"a prompt is of type {type(prompt).__name__}, but must be a str or a list of messages")
    if not prompt:
        raise ValueError("the prompt is empty; write at least a word")
    if isinstance(prompt, str):
        require_unicode(prompt, "the prompt")
    if uses_chat_template(tokenizer, prompt, raw):
        for number, message in enumerate(() if isinstance(prompt, str) else prompt, start=1):
            require_unicode(str(message.get("content") or ""), f"message {number}")
        text = require_unicode(_apply_chat_template(tokenizer, prompt, model_name, tools), "the prompt")
        require_fits([text], tokenizer, context, model_name, "the prompt")
        tokens = tokenizer(text, add_special_tokens=False).input_ids
    else:
        require_fits([str(prompt)], tokenizer, context, model_name, "the prompt")
        tokens = tokenizer(str(prompt)).input_ids
    if not tokens:
        raise ValueError("the prompt has no tokens; write at least a word")
    return list(tokens)


def uses_chat_template(tokenizer: Any, prompt: PromptLike, raw: bool) -> bool:
    """True if the prompt is put into the tokenizer's chat template."""
    return not isinstance(prompt, str) or (not raw and bool(tokenizer.chat_template))


def _apply_chat_template(
    tokenizer: Any, prompt: PromptLike, model_name: str, tools: Sequence[Mapping[str, Any]]
) -> str:
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    if not tokenizer.chat_template:
        raise ValueError(
            f"{model_name} has no chat template for messages; name one (--chat-template, chat_template=), such as"
            " vicuna, or give the prompt as one str"
        )
    unfinished = messages[-1].get("role") == "assistant" and not messages[-1].get("tool_calls")
    if tools or any(message.get("tool_calls") or message.get("role") == "tool" for message in messages):
        messages = readable_messages(messages, tools, tokenizer)
    try:
        return render_chat(
            tokenizer, messages, add_generation_prompt=not unfinished, continue_final_message=unfinished,
            tools=list(tools) or None,
        )  # fmt: skip
    except ValueError as error:
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
    """True for a list of prompts; a list of dicts is one conversation."""
    return is_sequence(prompt) and not (prompt and isinstance(prompt[0], Mapping))
