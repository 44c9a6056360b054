"""Tool calls: describe tools in the prompt, constrain calls to their schemas, and parse them from the text.

A call is written in the form that the model's chat template shows. Templates without tools get Hermes's form, by a
system message.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from saltus.engine.grammar import JSON_FORM, Grammar
from saltus.engine.template_limits import render_chat

ToolChoice = Literal["auto", "required"]

SYSTEM_PROMPT = """\
You can call functions. These are their signatures:
<tools>
{tools}
</tools>
To call a function, write a JSON object with its name and arguments between <tool_call> tags:
<tool_call>
{{"name": "the name", "arguments": {{"an argument": "its value"}}}}
</tool_call>"""


@dataclass(frozen=True)
class ToolFormat:
    """How a model writes a call: `begin`, a JSON object of name and arguments, `end`."""

    begin: str  # "" if the whole text is the call
    end: str
    arguments: str  # the key


HERMES = ToolFormat("<tool_call>", "</tool_call>", "arguments")  # also Qwen 2.5 and 3
LLAMA = ToolFormat("", "", "parameters")  # Llama 3.1 and later


@dataclass(frozen=True)
class ToolCall:
    """A call in a text."""

    name: str
    arguments: str  # a JSON object


def tool_format(tokenizer: Any) -> ToolFormat:
    """The form of calls that the tokenizer's chat template shows."""
    template = str(tokenizer.chat_template or "")
    return LLAMA if '"parameters"' in template and HERMES.begin not in template else HERMES


def template_knows_tools(tokenizer: Any) -> bool:
    """True if the chat template writes the tools that it is given."""
    messages = [{"role": "user", "content": "?"}]
    tool = {"type": "function", "function": {"name": "saltus_probe", "description": "", "parameters": {}}}
    try:
        return "saltus_probe" in render_chat(tokenizer, messages, tools=[tool])
    except ValueError:
        return False


def readable_messages(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], tokenizer: Any
) -> list[dict[str, Any]]:
    """A conversation with calls as the chat template reads it: by fields, or as text where it does not know tools."""
    readable = [_with_parsed_arguments(message) for message in messages]
    if template_knows_tools(tokenizer):
        return readable
    readable = [_as_text(message) for message in readable]
    if tools:
        prompt = SYSTEM_PROMPT.format(tools="\n".join(json.dumps(tool.get("function", tool)) for tool in tools))
        if readable and readable[0].get("role") == "system":
            readable[0]["content"] = f"{readable[0]['content']}\n\n{prompt}"
        else:
            readable.insert(0, {"role": "system", "content": prompt})
    return readable


def tool_grammar(
    tools: Sequence[Mapping[str, Any]], choice: ToolChoice, several: bool, tokenizer: Any
) -> Grammar:  # fmt: skip
    """Texts whose calls follow the schemas of `tools`; with "required" they are calls and nothing else.

    Errors: ValueError.
    """
    form = tool_format(tokenizer)
    space = "\n" if form.begin else ""
    lines = ["call: " + " | ".join(f"call_{place}" for place in range(len(tools)))]
    for place, tool in enumerate(tools):
        function = tool["function"]
        head = f'{space}{json.dumps({"name": function["name"]})[:-1]}, "{form.arguments}": '
        schema = {"type": "object", **(function.get("parameters") or {}), "x-guidance": JSON_FORM}
        tail = "}" + space + form.end
        lines.append(f"call_{place}: {json.dumps(head)} %json {json.dumps(schema)} {json.dumps(tail)}")
    if form.begin in tokenizer.all_special_tokens:
        begin, head = form.begin, f"head: TEXT {form.begin}"
    else:
        begin, head = json.dumps(form.begin), f"head[lazy]: TEXT {json.dumps(form.begin)}"
    if choice == "required":
        start = f'start: {begin} call ("\\n" {begin} call)*' if several and form.begin else f"start: {begin} call"
    elif form.begin:
        start = f"start: (head call)* TEXT\nTEXT: /(.|\\n)*/\n{head}"
    else:
        start = "start: call | TEXT\nTEXT: /[^{](.|\\n)*/"
    return Grammar.lark("\n".join([start, *lines]))


class ToolCallReader:
    """Separates the calls from the rest of a text as it arrives."""

    def __init__(self, form: ToolFormat) -> None:
        self.form = form
        self.buffer, self.in_call = "", False
        self.at_start, self.after_call = True, False

    def read(self, text: str, last: bool = False) -> tuple[str, list[ToolCall]]:
        """The next text outside calls, and the calls that are complete. `last` releases what was held back."""
        self.buffer += text
        content, calls = "", []
        while self.buffer or (last and self.in_call):
            if not self.in_call:
                start = self._start_of_call()
                kept = self.buffer[:start].rstrip("\n") if start >= 0 else self._certain_text(last)
                if kept.strip() or not self.after_call:  # no blank lines between calls
                    content, self.after_call = content + kept, False
                self.at_start = self.at_start and not kept
                if start < 0:
                    self.buffer = self.buffer[len(kept) :]
                    break
                self.buffer, self.in_call = self.buffer[start + len(self.form.begin) :], True
            end = self.buffer.find(self.form.end) if self.form.end else -1
            if end < 0 and not last:
                break
            body, end = (self.buffer, len(self.buffer)) if end < 0 else (self.buffer[:end], end + len(self.form.end))
            if (call := self._parse(body)) is not None:
                calls.append(call)
            else:
                content += self.form.begin + self.buffer[:end]
            self.buffer, self.in_call, self.at_start = self.buffer[end:], False, False
            self.after_call = call is not None
        return content, calls

    def _start_of_call(self) -> int:
        if self.form.begin:
            return self.buffer.find(self.form.begin)
        return 0 if self.at_start and self.buffer.lstrip().startswith("{") else -1

    def _certain_text(self, last: bool) -> str:
        """The start of the buffer that cannot belong to a call: calls begin after line breaks, which they swallow."""
        if last:
            return self.buffer
        begin = self.form.begin
        partial = next((size for size in range(len(begin) - 1, 0, -1) if self.buffer.endswith(begin[:size])), 0)
        return self.buffer[: len(self.buffer) - partial].rstrip("\n")

    def _parse(self, body: str) -> ToolCall | None:
        try:
            call = json.loads(body)
            arguments = call.get("arguments", call.get("parameters"))
        except (ValueError, AttributeError, RecursionError):
            return None
        if not isinstance(call.get("name"), str) or not isinstance(arguments, dict):
            return None
        return ToolCall(call["name"], json.dumps(arguments, ensure_ascii=False))


def _with_parsed_arguments(message: Mapping[str, Any]) -> dict[str, Any]:
    """The message with the arguments of its calls as objects: templates write them as JSON themselves."""
    parsed, calls = dict(message), message.get("tool_calls")
    if calls:
        if not isinstance(calls, Sequence) or not all(map(_is_call, calls)):
            raise ValueError(
                'tool_calls must be a list of objects such as {"function": {"name": "look", "arguments": "{}"}}'
            )
        parsed["tool_calls"] = [{**call, "function": _with_object(call["function"])} for call in calls]
    return parsed


def _is_call(given: Any) -> bool:
    function = given.get("function") if isinstance(given, Mapping) else None
    return isinstance(function, Mapping) and isinstance(function.get("name"), str)


def _with_object(function: Mapping[str, Any]) -> dict[str, Any]:
    """The function of a call with its arguments as an object."""
    arguments = function.get("arguments")
    try:
        arguments = json.loads(arguments or "{}") if isinstance(arguments, str) else arguments
        json.dumps(arguments)  # templates do so
    except (ValueError, TypeError, RecursionError):
        raise ValueError(f"the arguments of a call of {function['name']!r} are not JSON") from None
    return {**function, "arguments": arguments}


def _as_text(message: dict[str, Any]) -> dict[str, Any]:
    """A message with its calls, or the result of one, as Hermes's text."""
    content = str(message.get("content") or "")
    if message.get("role") == "tool":
        return {"role": "user", "content": f"<tool_response>\n{content}\n</tool_response>"}
    for call in message.get("tool_calls") or ():
        body = json.dumps({key: call["function"].get(key) for key in ("name", "arguments")}, ensure_ascii=False)
        content += ("\n" if content else "") + f"{HERMES.begin}\n{body}\n{HERMES.end}"
    return {"role": message.get("role"), "content": content}
