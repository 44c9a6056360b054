"""Tool calls: constrain them to the schemas of their tools, and read them from the text.

A call is written in the form that the model's chat template shows (`tool_formats`, a module each). Templates without
tools get Hermes's form (`tool_messages`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence, Set
from dataclasses import replace
from typing import Any, Literal

from saltus.engine.chat.tool_formats.argument_schemas import texts_with_limits
from saltus.engine.chat.tool_formats.call_lists import GRANITE_3, MISTRAL_LISTS, PHI_4_MINI
from saltus.engine.chat.tool_formats.call_sections import DEEPSEEK_V3, DEEPSEEK_V3_1, KIMI_K2
from saltus.engine.chat.tool_formats.command import COMMAND
from saltus.engine.chat.tool_formats.gemma import GEMMA_4
from saltus.engine.chat.tool_formats.glm import GLM
from saltus.engine.chat.tool_formats.gpt_oss import GPT_OSS
from saltus.engine.chat.tool_formats.hermes import HERMES, PHI_4_TAGS
from saltus.engine.chat.tool_formats.invoke_tags import DEEPSEEK_V3_2, MINIMAX_M2
from saltus.engine.chat.tool_formats.llama import LLAMA
from saltus.engine.chat.tool_formats.mistral import MISTRAL
from saltus.engine.chat.tool_formats.olmo import OLMO
from saltus.engine.chat.tool_formats.qwen3_coder import QWEN3_CODER
from saltus.engine.chat.tool_formats.tool_format import Function, Markers, ToolCall, ToolFormat, overlap
from saltus.engine.grammar import Grammar
from saltus.engine.json_schemas import followed_schema

ToolChoice = Literal["auto", "required"]

FORMATS: tuple[ToolFormat, ...] = (  # the first that a template shows; Hermes's if it shows none
    GPT_OSS, QWEN3_CODER, GLM, MISTRAL, DEEPSEEK_V3_1, DEEPSEEK_V3, DEEPSEEK_V3_2, KIMI_K2, MINIMAX_M2, COMMAND, OLMO,
    GEMMA_4, PHI_4_MINI, PHI_4_TAGS, GRANITE_3, MISTRAL_LISTS, LLAMA,
)  # fmt: skip
OTHER_FORMATS = (  # not read, unless the template's form has them: Command R and R+, Gemma 3, DeepSeek V4 and others
    "to=functions.", "<|START_ACTION|>", "<start_function_call>", "<function=", "<arg_key>", "<function_calls>",
    "functools[", "｜DSML｜", "directly_answer", "directly-answer",
)  # fmt: skip
OTHER_MARKER = re.compile(r"""<[^<>\s'"]*(?i:tool[_▁]?calls?)[^<>\s'"]*>|\[TOOL_CALLS?\]""")
# such as older Nemotron's, and those of the forms that are read


def tool_format(tokenizer: Any) -> ToolFormat:
    """The form of calls that the tokenizer's chat template shows."""
    template = str(tokenizer.chat_template or "")
    return HERMES if has_other_format(template) else _shown_format(template)


def has_other_format(template: str) -> bool:
    """True for a chat template with calls that are not read. Its model is told of Hermes's form in words."""
    own = HERMES.markers | _shown_format(template).markers
    return any(form in template and form not in own for form in OTHER_FORMATS) or any(
        marker not in own for marker in OTHER_MARKER.findall(template)
    )


def _shown_format(template: str) -> ToolFormat:
    return next((form for form in FORMATS if form.is_shown_by(template)), HERMES)


def call_markers(tokenizer: Any) -> dict[int, str]:
    """The special tokens that mark a call, with their texts; empty where ordinary tokens spell them."""
    return _special_tokens(tokenizer, tool_format(tokenizer).markers)


def _special_tokens(tokenizer: Any, texts: Set[str]) -> dict[int, str]:
    """The special tokens among these texts."""
    special = set(tokenizer.all_special_tokens)
    return {
        token: added.content for token, added in tokenizer.added_tokens_decoder.items()
        if added.content in texts and (added.special or added.content in special)
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
    functions = [Function(tool["function"]["name"], _parameters(tool["function"], form)) for tool in tools]
    tokens = _special_tokens(tokenizer, form.markers | set(form.answer_markers))
    markers = Markers({text: token for token, text in tokens.items()})
    begin, (opening, closing) = markers(form.begin), form.section
    more = f"({form.between} {begin} call)*" if several and form.between is not None else ""
    calls = f"{markers(opening)} {begin} call {more} {markers(closing)}"
    before, before_answer = form.prefixes
    around = [f"{markers(text)}?" if text in markers.tokens else "" for text in form.answer_markers]
    text = " TEXT ".join(around)
    lines = ["TEXT: /(.|\\n)*/", *form.rules(functions, several, markers)]
    if choice == "required":
        start = f"start: {before} {calls}"
    elif answer is not None:
        start = f"start: {before} ({calls} | {before_answer} {' answer '.join(around)})\nanswer: %json {answer}"
    elif before_answer:
        start = f"start: {before} ({calls} | {before_answer} {text})"
    elif form.begin:
        call = f"call {more} {markers(closing)}" if closing else "call"
        start = f"start: {f'(head {call})* {text}' if several else f'head {call} | {text}'}"
        lines.append(markers.after_text("head", opening + form.begin))
    else:
        start = "start: call | OTHER\nOTHER: /[ \\t\\r\\n]*([^{ \\t\\r\\n](.|\\n)*)?/"
    return replace(Grammar.lark("\n".join([start, *lines])), has_reasoning=bool(before))


def _parameters(function: Mapping[str, Any], form: ToolFormat) -> dict[str, Any]:
    """The schema of a function's arguments. Errors: ValueError that names the function."""
    strict = bool(function.get("strict"))
    try:
        schema = followed_schema({"type": "object", **(function.get("parameters") or {})}, strict)
        limits = {} if form.quotes_texts else texts_with_limits(schema)
        if strict and (ignored := next(iter(limits.values()), form.not_followed(schema))):
            raise ValueError(f"this model's calls follow no {ignored}; leave it out")
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
        self.pieces: list[str] = []  # of a call that is not complete, in the place of the buffer
        self.scanner = form.new_scanner()
        self.at_start, self.after_call = True, False

    def read(self, text: str, last: bool = False) -> tuple[str, list[ToolCall]]:
        """The next text outside calls, and the calls that are complete. `last` releases what was held back."""
        parts = self.parts(text, last)
        content = "".join(part for part in parts if isinstance(part, str))
        return content, [part for part in parts if isinstance(part, ToolCall)]

    def parts(self, text: str, last: bool = False) -> list[str | ToolCall]:
        """As `read`, in the order of the text. All pieces of a call are read twice, however many they are."""
        parts: list[str | ToolCall] = []
        if self.in_call:
            self.pieces.append(text)
            if not self.scanner.read(text) and not last:
                return parts
            text, self.pieces = "".join(self.pieces), []
        self.buffer += text
        while self.buffer or (last and self.in_call):
            if not self.in_call:
                start, marker = self._next_marker()
                kept = self.buffer[:start].rstrip("\n") if start >= 0 else self._certain_text(last)
                if self.after_call and not kept.strip() and start < 0 and not last:
                    break  # space that belongs to a text, if one follows
                if kept.strip() or not self.after_call:  # no blank lines between calls
                    parts.append(kept)
                    self.after_call = False
                self.at_start = self.at_start and not kept
                if start < 0:
                    self.buffer = "" if last else self.buffer[len(kept) :]
                    break
                self.buffer, self.in_call = self.buffer[start + len(marker) :], marker == self.form.begin
                if not self.in_call:  # the begin or the end of a section
                    self.after_call = True
                    continue
                self.scanner = self.form.new_scanner()
                may_end = self.scanner.read(self.buffer)
            else:
                may_end = True
            reading = self.form.read(self.buffer, self.schemas, last) if may_end or last else None
            if reading is None:
                self.pieces, self.buffer = [self.buffer], ""
                break
            if reading.calls is None:
                parts.append(self.form.begin + self.buffer[: reading.size])
            parts += reading.calls or ()
            self.buffer, self.in_call, self.at_start = self.buffer[reading.size :], False, False
            self.after_call = bool(reading.calls)
        return [part for part in parts if isinstance(part, ToolCall) or (part and not self.required)]

    def _next_marker(self) -> tuple[int, str]:
        """Where the next call or the begin or end of a section of them begins, and with what; −1 if there is none."""
        if not self.form.begin:
            return (0 if self.at_start and self.buffer.lstrip().startswith("{") else -1), ""
        found = [(place, marker) for marker in self._markers if (place := self.buffer.find(marker)) >= 0]
        return min(found, default=(-1, ""))

    @property
    def _markers(self) -> list[str]:
        return [marker for marker in (self.form.begin, *self.form.section) if marker]

    def _certain_text(self, last: bool) -> str:
        """The start of the buffer that cannot belong to a call: calls begin after line breaks, which they swallow.

        At the end of a text the first half of a marker, such as "<", is taken for text, and more of it for a call that
        is cut off.
        """
        partial = max((overlap(self.buffer, marker) for marker in self._markers), default=0)
        if last and not any(2 * overlap(self.buffer, marker) > len(marker) for marker in self._markers):
            return self.buffer
        return self.buffer[: len(self.buffer) - partial].rstrip("\n")
