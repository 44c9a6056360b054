"""Write a conversation with tools, calls and results as a chat template reads it.

Templates differ in what they refuse: system messages, roles that do not alternate, several calls at once, ids of other
lengths. What one refuses is written otherwise, and what it does not know is written as text, in its model's form.
"""

from __future__ import annotations

import hashlib
import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from itertools import count, groupby
from typing import Any

from saltus.engine.chat.message_parts import PROBE, writes_probe
from saltus.engine.chat.template_limits import render_chat
from saltus.engine.chat.tool_calls import HERMES, ToolCall, ToolFormat, has_other_format, tool_format
from saltus.engine.chat.tool_formats.json_calls import refuse_constant

Message = dict[str, Any]

SYSTEM_PROMPT = """\
You can call functions. These are their signatures:
<tools>
{tools}
</tools>
To call a function, write {how}:
{example}"""
EXAMPLE = ToolCall("the name", '{"an argument": "its value"}')
ID_LENGTH = 9  # letters and digits of a call's id, where a template asks for them, as Mistral's do
ID_LETTERS = "0123456789abcdefghijklmnopqrstuvwxyz"


def has_tools(messages: Sequence[Mapping[str, Any]]) -> bool:
    """True if there are calls or results of tools among the messages."""
    return any(message.get("tool_calls") not in (None, []) or message.get("role") == "tool" for message in messages)


@lru_cache(maxsize=8)
def template_knows_tools(tokenizer: Any, template: str) -> bool:
    """True if the tokenizer's chat template writes the tools that it is given, for calls of a form that is read."""
    tool = {"type": "function", "function": {"name": PROBE, "description": "", "parameters": {}}}
    return bool(template) and not has_other_format(template) and writes_probe(tokenizer, "?", [tool])


def readable_messages(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], tokenizer: Any
) -> list[Message]:
    """A conversation with calls as the chat template reads it: by fields, or as text where it does not know tools.

    If the template refuses whatever is tried, it is the conversation as it came. Errors: ValueError that names the
    field of a message that is wrong.
    """
    parsed = [_with_parsed_arguments(message, place) for place, message in enumerate(messages)]
    template, form = str(tokenizer.chat_template), tool_format(tokenizer)
    knows_tools = template_knows_tools(tokenizer, template)
    if "tool_calls" not in template or not (knows_tools or form != HERMES):
        written = _as_texts(messages, () if knows_tools else tools, form)
    else:
        if form.call_id:
            parsed = _with_ids_of(form, parsed)
        if _reads_written_arguments(tokenizer, template):
            parsed = list(map(_with_written_arguments, parsed))
        if _writes_single_calls(tokenizer, template):
            parsed = _with_single_calls(parsed)
        written = parsed if knows_tools else _with_tools(parsed, tools, form)
    first = written
    steps: list[Callable[[list[Message]], list[Message]]] = [
        list, _with_contents, _with_short_ids, _with_single_calls, _with_system_message_first, _merged,
        _without_system_messages,
    ]  # fmt: skip
    if knows_tools:
        steps.append(lambda _: _without_system_messages(_as_texts(messages, tools, form)))
    for step in steps:
        written = step(written)
        try:
            render_chat(tokenizer, written, tools=list(tools) if tools and knows_tools else None)
        except ValueError:
            continue
        return written
    return first


@lru_cache(maxsize=8)
def _reads_written_arguments(tokenizer: Any, template: str) -> bool:
    """True if the tokenizer's chat template takes the arguments of a call as a text alone, as DeepSeek's do."""
    return bool(template) and not _written_calls(tokenizer, [{}]) and bool(_written_calls(tokenizer, ["{}"]))


@lru_cache(maxsize=8)
def _writes_single_calls(tokenizer: Any, template: str) -> bool:
    """True if the tokenizer's chat template leaves out all calls of an answer but the first, as gpt-oss's does."""
    written = _written_calls(tokenizer, [{}, {}]) or _written_calls(tokenizer, ["{}", "{}"])
    return f"{PROBE}0" in written and f"{PROBE}1" not in written


def _written_calls(tokenizer: Any, arguments: Sequence[Any]) -> str:
    """What the chat template writes of calls with these arguments; empty if it refuses them."""
    calls = [
        {"id": f"{number:0{ID_LENGTH}}", "type": "function", "function": {"name": f"{PROBE}{number}", "arguments": one}}
        for number, one in enumerate(arguments)
    ]
    try:
        return render_chat(
            tokenizer, [{"role": "user", "content": "?"}, {"role": "assistant", "content": "", "tool_calls": calls}]
        )
    except ValueError:
        return ""


def _as_texts(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], form: ToolFormat
) -> list[Message]:
    """The conversation without fields for tools: they stand in a system message, calls and results in texts."""
    written: list[Message] = []
    messages = _in_order_of_calls(messages)
    for place, message in enumerate(messages):
        text = _as_text(message, form)
        if message.get("role") == "tool" and place and messages[place - 1].get("role") == "tool":
            written[-1]["content"] += "\n" + text["content"]  # results of one answer belong together
        else:
            written.append(text)
    return _with_tools(written, tools, form)


def _with_tools(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], form: ToolFormat) -> list[Message]:
    """The conversation with the tools in its system message."""
    if not tools:
        return list(messages)
    how = "a JSON object with its name and arguments between <tool_call> tags" if form == HERMES else "a call such as"
    shown = "\n".join(json.dumps(tool.get("function", tool)) for tool in tools)
    prompt = SYSTEM_PROMPT.format(tools=shown, how=how, example=form.write([EXAMPLE]))
    if messages and messages[0]["role"] == "system":
        first = {**messages[0], "content": f"{messages[0].get('content') or ''}\n\n{prompt}"}
        return [first, *messages[1:]]
    return [{"role": "system", "content": prompt}, *messages]


def _in_order_of_calls(messages: Sequence[Mapping[str, Any]]) -> list[Message]:
    """Results in the order of their calls: a text has no ids, so that a result's place says which call it is of."""
    made: list[Message] = []
    places: dict[str, int] = {}  # of the calls of the answer before
    for is_result, group in groupby(map(dict, messages), lambda message: message.get("role") == "tool"):
        if is_result:
            made += sorted(group, key=lambda result: places.get(str(result.get("tool_call_id")), len(places)))
            continue
        made += group
        places = {str(call.get("id")): place for place, call in enumerate(made[-1].get("tool_calls") or ())}
    return made


def _as_text(message: Mapping[str, Any], form: ToolFormat) -> Message:
    """A message with its calls, or the result of one, as text."""
    content = str(message.get("content") or "")
    if message.get("role") == "tool":
        return {"role": "user", "content": f"<tool_response>\n{content}\n</tool_response>"}
    if calls := message.get("tool_calls"):
        content += ("\n" if content else "") + form.write([_as_call(call["function"]) for call in calls])
    return {"role": message.get("role"), "content": content}


def _as_call(function: Mapping[str, Any]) -> ToolCall:
    """The function of a call, with its arguments as they were written, if that is an object."""
    arguments = function.get("arguments")
    if not isinstance(arguments, str):
        return ToolCall(function["name"], json.dumps(arguments or {}, ensure_ascii=False))
    return ToolCall(function["name"], "{}" if _read_object(arguments) is None else arguments)


def _with_ids_of(form: ToolFormat, messages: Sequence[Message]) -> list[Message]:
    """The messages with ids of calls as the form has them, numbered in their order."""
    ids, numbers = {}, count()

    def id_of(call: Mapping[str, Any]) -> str:
        ids[call.get("id")] = own = form.call_id.format(name=call["function"]["name"], number=next(numbers))
        return own

    return _with_ids(messages, id_of, lambda given: ids.get(given, given))


def _with_ids(
    messages: Sequence[Message], id_of_call: Callable[[Mapping[str, Any]], str], id_of_result: Callable[[Any], Any]
) -> list[Message]:
    """The messages with other ids of calls and of their results."""
    made = []
    for message in messages:
        named = dict(message)
        if message.get("tool_calls"):
            named["tool_calls"] = [{**call, "id": id_of_call(call)} for call in message["tool_calls"]]
        if message.get("role") == "tool":
            named["tool_call_id"] = id_of_result(message.get("tool_call_id"))
        made.append(named)
    return made


def _with_written_arguments(message: Message) -> Message:
    """The message with the arguments of its calls as JSON texts."""
    calls = message.get("tool_calls")
    if not calls:
        return message
    functions = [{**call["function"], "arguments": _as_call(call["function"]).arguments} for call in calls]
    return {**message, "tool_calls": [{**call, "function": one} for call, one in zip(calls, functions, strict=True)]}


def _with_contents(messages: list[Message]) -> list[Message]:
    """Messages with an empty text where they have none."""
    return [message if message.get("content") is not None else {**message, "content": ""} for message in messages]


def _with_short_ids(messages: list[Message]) -> list[Message]:
    """Ids of calls as nine letters and digits, the same for the same id."""
    return _with_ids(messages, lambda call: _short_id(call.get("id")), _short_id)


def _short_id(given: Any) -> str:
    text = str(given)
    if len(text) == ID_LENGTH and text.isascii() and text.isalnum():
        return text
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()
    return "".join(ID_LETTERS[byte % len(ID_LETTERS)] for byte in digest[:ID_LENGTH])


def _with_single_calls(messages: list[Message]) -> list[Message]:
    """Answers with several calls as answers with one each, which its result follows."""
    made: list[Message] = []
    waiting: list[Message] = []  # answers whose results are to come

    for message in messages:
        calls = message.get("tool_calls") or ()
        if message.get("role") == "tool" and waiting:
            found = next(
                (one for one in waiting if one["tool_calls"][0].get("id") == message.get("tool_call_id")), waiting[0]
            )
            waiting.remove(found)
            made += [found, message]
            continue
        made += waiting
        waiting = []
        if len(calls) > 1:
            first = {**message, "tool_calls": [calls[0]]}
            waiting = [first, *({**message, "content": "", "tool_calls": [call]} for call in calls[1:])]
        else:
            made.append(message)
    return made + waiting


def _with_system_message_first(messages: list[Message]) -> list[Message]:
    """System messages in the midst of a conversation as the user's; those at its beginning as one."""
    begin = next((place for place, message in enumerate(messages) if message.get("role") != "system"), len(messages))
    text = "\n\n".join(str(message.get("content") or "") for message in messages[:begin])
    later = [
        {**message, "role": "user"} if message.get("role") == "system" else message for message in messages[begin:]
    ]
    return [*([{"role": "system", "content": text}] if begin else ()), *later]


def _merged(messages: list[Message]) -> list[Message]:
    """Users' messages, and answers, that follow on each other as one."""
    made: list[Message] = []
    for message in messages:
        before = made[-1] if made else {}
        if message.get("role") not in ("user", "assistant") or before.get("role") != message.get("role"):
            made.append(dict(message))
            continue
        texts = [one["content"] for one in (before, message) if one.get("content")]
        before["content"] = "\n".join(texts)
        if calls := [*(before.get("tool_calls") or ()), *(message.get("tool_calls") or ())]:
            before["tool_calls"] = calls
    return made


def _without_system_messages(messages: list[Message]) -> list[Message]:
    """System messages at the beginning of the users' messages that follow, and roles that alternate."""
    made, waiting = [], ""
    for message in messages:
        if message.get("role") == "system":
            waiting += f"{message.get('content') or ''}\n\n"
        elif message.get("role") == "user" and waiting:
            made.append({**message, "content": waiting + (message.get("content") or "")})
            waiting = ""
        else:
            made.append(message)
    if waiting:
        made.append({"role": "user", "content": waiting.rstrip("\n")})
    return _merged(made)


def _with_parsed_arguments(message: Mapping[str, Any], place: int) -> Message:
    """The message with the arguments of its calls as objects: templates write them as JSON themselves."""
    parsed, calls = dict(message), message.get("tool_calls")
    if calls is None:
        parsed.pop("tool_calls", None)  # for some templates the field alone is a call
        return parsed
    if not isinstance(calls, Sequence) or isinstance(calls, str) or not all(map(_is_call, calls)):
        raise ValueError(
            f"messages[{place}].tool_calls must be a list of objects such as"
            ' {"id": "1", "function": {"name": "look", "arguments": "{}"}}'
        )
    parsed["tool_calls"] = [{**call, "function": _with_object(call["function"], place)} for call in calls]
    return parsed


def _is_call(given: Any) -> bool:
    function = given.get("function") if isinstance(given, Mapping) else None
    named = isinstance(function, Mapping) and isinstance(function.get("name"), str)
    return named and isinstance(given.get("id", ""), str | None)


def _with_object(function: Mapping[str, Any], place: int) -> Message:
    """The function of a call with its arguments as an object. A text that is none counts as an empty one.

    Clients repeat such a text, of an answer that was cut off, in every later request of the conversation.
    """
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        return {**function, "arguments": _read_object(arguments) or {}}
    try:
        json.dumps(arguments)  # templates do so
    except (ValueError, TypeError, RecursionError):
        raise ValueError(
            f"messages[{place}].tool_calls: the arguments of a call of {function['name']!r} are not JSON"
        ) from None
    if not isinstance(arguments, Mapping | None):
        raise ValueError(
            f"messages[{place}].tool_calls: the arguments of a call of {function['name']!r} must be a JSON object"
        )
    return {**function, "arguments": arguments or {}}


def _read_object(text: str) -> dict[str, Any] | None:
    """The object that a JSON text is; None if it is none."""
    try:
        given = json.loads(text, parse_float=finite, parse_constant=refuse_constant)
        json.dumps(given)  # templates do so
    except (ValueError, RecursionError):
        return None
    return given if isinstance(given, dict) else None


def finite(written: str) -> float:
    """A number of JSON, the largest one for those beyond it: infinity is not JSON."""
    value = float(written)
    return value if math.isfinite(value) else math.copysign(sys.float_info.max, value)
