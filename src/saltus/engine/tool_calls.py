"""Tool calls: constrain them to the schemas of their tools, and parse them from the text.

A call is written in the form that the model's chat template shows. Templates without tools get Hermes's form
(`engine.tool_messages`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from saltus.engine import xml_tool_calls
from saltus.engine.grammar import Grammar
from saltus.engine.json_schemas import followed_schema

ToolChoice = Literal["auto", "required"]


@dataclass(frozen=True)
class ToolFormat:
    """How a model writes a call: `begin`, a JSON object of name and arguments or tags of them, `end`.

    With `between` the name stands before it and a JSON object of the arguments behind it.
    """

    begin: str  # "" if the whole text is the call
    end: str
    arguments: str  # their key in the object; "": they stand in tags of their own (engine/xml_tool_calls.py), or alone
    between: str = ""


HERMES = ToolFormat("<tool_call>", "</tool_call>", "arguments")  # also Qwen 2.5 and 3
LLAMA = ToolFormat("", "", "parameters")  # Llama 3.1 and later
QWEN3_CODER = ToolFormat("<tool_call>", "</tool_call>", "")  # Qwen3-Coder and 3.5, Nemotron 3
MISTRAL = ToolFormat("[TOOL_CALLS]", "", "", "[ARGS]")  # Mistral's since 2025: Devstral, Ministral 3, Magistral
TAGS = (QWEN3_CODER.begin, xml_tool_calls.BEGIN, xml_tool_calls.ARGUMENT)
OTHER_FORMS = (  # not read: gpt-oss, Command R, Gemma 3, Llama's in tags, GLM, OLMo, Phi
    "to=functions.", "<|START_ACTION|>", "<start_function_call>", "<function=", "<arg_key>", "<function_calls>",
    "functools[",
)  # fmt: skip
OTHER_MARKER = re.compile(r"""<[^<>\s'"]*(?i:tool[_▁]?calls?)[^<>\s'"]*>|\[TOOL_CALLS?\]""")
# as those of older ones of Mistral, DeepSeek, Gemma 4, Granite, Kimi, MiniMax, Nemotron; Hermes's own is one, too


@dataclass(frozen=True)
class ToolCall:
    """A call in a text."""

    name: str
    arguments: str  # a JSON object, as the model wrote it


def tool_format(tokenizer: Any) -> ToolFormat:
    """The form of calls that the tokenizer's chat template shows."""
    template = str(tokenizer.chat_template or "")
    if _is_qwen3_coder(template) or _is_mistral(template):
        return QWEN3_CODER if _is_qwen3_coder(template) else MISTRAL
    is_llama = '"parameters"' in template and HERMES.begin not in template and not has_other_form(template)
    return LLAMA if is_llama else HERMES


def has_other_form(template: str) -> bool:
    """True for a chat template with calls that are not read. Its model is told of Hermes's form in words."""
    own = {HERMES.begin, HERMES.end, *([MISTRAL.begin] if _is_mistral(template) else ())}
    markers = (marker for marker in OTHER_MARKER.findall(template) if marker not in own)
    forms = (marker for marker in OTHER_FORMS if marker != xml_tool_calls.BEGIN or not _is_qwen3_coder(template))
    return any(marker in template for marker in forms) or any(markers)


def _is_qwen3_coder(template: str) -> bool:
    return all(tag in template for tag in TAGS)


def _is_mistral(template: str) -> bool:
    return MISTRAL.begin in template and MISTRAL.between in template and "[CALL_ID]" not in template


def call_markers(tokenizer: Any) -> dict[int, str]:
    """The special tokens that mark a call, with their texts; empty where ordinary tokens spell them."""
    form, special = tool_format(tokenizer), set(tokenizer.all_special_tokens)
    markers = {form.begin, form.end, form.between} - {""}
    return {
        token: added.content for token, added in tokenizer.added_tokens_decoder.items()
        if added.content in markers and (added.special or added.content in special)
    }  # fmt: skip


def tool_grammar(
    tools: Sequence[Mapping[str, Any]], choice: ToolChoice, several: bool, tokenizer: Any, answer: str | None = None
) -> Grammar:  # fmt: skip
    """Texts whose calls follow the schemas of `tools`; with "required" they are calls and nothing else.

    Without `several` a text ends with its first call. With a JSON schema `answer` a text is calls, or JSON of it.

    What no grammar can follow in a schema is ignored, unless its tool is `strict`. Errors: ValueError of one line that
    names the tool.
    """
    form = tool_format(tokenizer)
    tokens = {text: f"<[{token}]>" for token, text in call_markers(tokenizer).items()}
    space = "\n" if form.begin else ""
    lines = ["call: " + " | ".join(f"call_{place}" for place in range(len(tools)))]
    for place, tool in enumerate(tools):
        function = tool["function"]
        end = tokens.get(form.end, json.dumps(form.end) if form.end else "")
        if form.between:
            between = tokens.get(form.between, json.dumps(form.between))
            schema = json.dumps(_parameters(function, form))
            lines.append(f"call_{place}: {json.dumps(function['name'])} {between} %json {schema}")
            continue
        if form == QWEN3_CODER:
            lines += xml_tool_calls.call_rules(f"call_{place}", function["name"], _parameters(function, form), end)
            continue
        head = f'{space}{json.dumps({"name": function["name"]})[:-1]}, "{form.arguments}": '
        tail = f"{json.dumps('}' + space)} {end}"
        lines.append(f"call_{place}: {json.dumps(head)} %json {json.dumps(_parameters(function, form))} {tail}")
    lines += xml_tool_calls.RULES if form == QWEN3_CODER else ()
    begin = tokens.get(form.begin, json.dumps(form.begin))
    gap = "" if form.between else '"\\n"'
    calls = f"{begin} call ({gap} {begin} call)*" if several and form.begin else f"{begin} call"
    if choice == "required":
        start = f"start: {calls}"
    elif answer is not None:
        start = f"start: {calls} | answer\nanswer: %json {answer}"
    elif form.begin:
        head = f"head: TEXT {begin}" if form.begin in tokens else f"head[lazy]: TEXT {begin}"
        rule = "(head call)* TEXT" if several else "head call | TEXT"
        start = f"start: {rule}\nTEXT: /(.|\\n)*/\n{head}"
    else:
        start = "start: call | TEXT\nTEXT: /[ \\t\\r\\n]*([^{ \\t\\r\\n](.|\\n)*)?/"
    return Grammar.lark("\n".join([start, *lines]))


def _parameters(function: Mapping[str, Any], form: ToolFormat) -> dict[str, Any]:
    """The schema of a function's arguments. Errors: ValueError that names the function."""
    strict = bool(function.get("strict"))
    try:
        schema = followed_schema({"type": "object", **(function.get("parameters") or {})}, strict)
        if strict and form == QWEN3_CODER and (limits := xml_tool_calls.texts_with_limits(schema)):
            raise ValueError(f"texts of this model's calls follow no {next(iter(limits.values()))}; leave it out")
        return schema
    except ValueError as error:
        cure = ", or strict" if strict else ""
        raise ValueError(f"the tool {function['name']!r} has a schema that no grammar follows: {error}{cure}") from None


class ToolCallReader:
    """Separates the calls from the rest of a text as it arrives. A call that is cut off is neither.

    With `required` the whole text is calls, so that what is no call is dropped, too. Arguments in tags are read by the
    schemas of `tools`.
    """

    def __init__(self, form: ToolFormat, required: bool = False, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        self.form, self.required = form, required
        self.schemas = {tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in tools}
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
                if self.after_call and not kept.strip() and start < 0 and not last:
                    break  # space that belongs to a text, if one follows
                if kept.strip() or not self.after_call:  # no blank lines between calls
                    content, self.after_call = content + kept, False
                self.at_start = self.at_start and not kept
                if start < 0:
                    self.buffer = "" if last else self.buffer[len(kept) :]
                    break
                self.buffer, self.in_call = self.buffer[start + len(self.form.begin) :], True
            end = self._end_of_call()
            if end < 0 and not last:
                break
            body = self.buffer if end < 0 else self.buffer[:end]
            rest = "" if end < 0 else self.buffer[end + len(self.form.end) :]
            call = self._parse(body, self.form.end if end < 0 else "")
            if call is not None:
                calls.append(call)
            elif end >= 0 or not self._may_begin_call(body) or (not self.form.begin and _size_of_object(body)):
                content += self.form.begin + self.buffer[: len(self.buffer) - len(rest)]
            self.buffer, self.in_call, self.at_start = rest, False, False
            self.after_call = call is not None
        return "" if self.required else content, calls

    def _start_of_call(self) -> int:
        if self.form.begin:
            return self.buffer.find(self.form.begin)
        return 0 if self.at_start and self.buffer.lstrip().startswith("{") else -1

    def _end_of_call(self) -> int:
        """Where the end of the call stands that the buffer begins with: the first one outside its strings; else −1."""
        if self.form.between:
            arguments = self.buffer.partition(self.form.between)[2]
            size = _size_of_object(arguments)
            return -1 if size is None else len(self.buffer) - len(arguments) + size
        end = self.buffer.find(self.form.end) if self.form.end else -1
        while end >= 0 and self._is_within_argument(self.buffer[:end]):
            end = self.buffer.find(self.form.end, end + 1)
        return end

    def _is_within_argument(self, body: str) -> bool:
        """True for the beginning of a call that breaks off within an argument."""
        if self.form == QWEN3_CODER:
            return body.lstrip().startswith(xml_tool_calls.BEGIN) and not xml_tool_calls.is_whole(body)
        return re.sub(r"\\.", "", body).count('"') % 2 > 0

    def _parse(self, body: str, cut_end: str) -> ToolCall | None:
        """The call that stands between the tags. A part of `cut_end` may follow it."""
        if self.form.between:
            name, _, arguments = body.partition(self.form.between)
            return None if _size_of_object(arguments) is None else ToolCall(name.strip(), arguments.strip())
        if self.form != QWEN3_CODER:
            return _parse(body, cut_end)
        whole, end, rest = body.rpartition(xml_tool_calls.END)
        found = xml_tool_calls.read_call(whole + end, lambda name: self.schemas.get(name, {}))
        return None if found is None or not cut_end.startswith(rest.strip()) else ToolCall(*found)

    def _may_begin_call(self, body: str) -> bool:
        """True for what is left of a call that is cut off."""
        if self.form.between:
            _, between, arguments = body.partition(self.form.between)
            return not between or "{".startswith(arguments.lstrip()[:1])
        begin, body = xml_tool_calls.BEGIN if self.form == QWEN3_CODER else '{"name"', body.lstrip()
        return begin.startswith(body) or body.startswith(begin)

    def _certain_text(self, last: bool) -> str:
        """The start of the buffer that cannot belong to a call: calls begin after line breaks, which they swallow.

        At the end of a text the first half of a marker, such as "<", is taken for text, and more of it for a call that
        is cut off.
        """
        begin = self.form.begin
        partial = next((size for size in range(len(begin) - 1, 0, -1) if self.buffer.endswith(begin[:size])), 0)
        if last and 2 * partial <= len(begin):
            return self.buffer
        return self.buffer[: len(self.buffer) - partial].rstrip("\n")


def _parse(body: str, cut_end: str = "") -> ToolCall | None:
    """The call that a JSON object stands for. A part of `cut_end` may follow it."""
    try:
        members, end = _object_members(body)
    except (ValueError, RecursionError):
        return None
    (name, _), (arguments, written) = (
        members.get("name", (None, "")),
        members.get("arguments", members.get("parameters", (None, ""))),
    )
    if not cut_end.startswith(body[end:].strip()) or not isinstance(name, str) or not isinstance(arguments, dict):
        return None
    return ToolCall(name, written)


def _object_members(text: str) -> tuple[dict[str, tuple[Any, str]], int]:
    """The members of the JSON object that a text begins with, each with its own text, and where the object ends.

    So numbers stay as they are written. Errors: ValueError if the text begins with no object.
    """
    decoder = json.JSONDecoder(parse_constant=_refuse_constant, parse_float=str, parse_int=str)
    space, members = re.compile(r"\s*"), {}

    def after(character: str, place: int) -> int:
        place = space.match(text, place).end()  # pyright: ignore[reportOptionalMemberAccess]: it matches anything
        if not text.startswith(character, place):
            raise ValueError(f"there is no {character!r}")
        return space.match(text, place + len(character)).end()  # pyright: ignore[reportOptionalMemberAccess]

    place = after("{", 0)
    while not text.startswith("}", place):
        key, place = decoder.raw_decode(text, after(",", place) if members else place)
        if not isinstance(key, str):
            raise ValueError("a key is no string")
        begin = after(":", place)
        value, place = decoder.raw_decode(text, begin)
        members[key] = value, text[begin:place]
        place = after("", place)
    return members, place + 1


def _size_of_object(text: str) -> int | None:
    """Where the JSON object ends that begins the text; None if it begins with none."""
    try:
        return _object_members(text)[1]
    except (ValueError, RecursionError):
        return None


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")
