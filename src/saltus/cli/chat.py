"""The chat command."""

from __future__ import annotations

import difflib
import sys
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from saltus.cli import options as o
from saltus.engine.text_files import typed_text

COMMANDS_HELP = """/help          this list
/reset         forget the conversation
/method NAME   change the method: lookup, jacobi+lookup, plain, …
/seed NUMBER   change the seed of sampled answers
/colour        switch colours by call on or off
/exit          leave (also Ctrl-D); Ctrl-C stops an answer"""


@o.with_options()
def chat(
    *,
    model_options: o.ModelOptions,
    method_options: o.MethodOptions,
    system: o.System = None,
    max_new_tokens: o.MaxNewTokens = 512,
    stop: o.Stop = None,
    sampling_options: o.SamplingOptions,
    colour: o.Colour = False,
) -> None:
    """Chat with the model.

    [dim]/help lists commands; Ctrl-C stops an answer, Ctrl-D leaves.[/dim]

    [bold]Examples[/bold]

        saltus chat

        saltus chat --method jacobi+lookup --colour --system "You are a pirate."

        printf 'Hello!\\nWhat did I say?\\n' | saltus chat
    """
    from saltus.cli.open_engine import open_with_options

    engine, sampling = open_with_options(model_options, method_options, sampling_options)
    settings = {**sampling, "max_new_tokens": max_new_tokens, "stop": stop or ()}
    Chat(engine, engine.method, settings, system, bool(colour)).run()


@dataclass
class Chat:
    """A conversation and its current settings."""

    engine: Any
    method: str
    settings: dict[str, Any]
    system: str | None
    colour: bool
    history: list[dict[str, str]] = field(default_factory=list)
    ended: bool = False

    def run(self) -> None:
        """Read and answer until /exit or the end of input."""
        live = sys.stdin.isatty()
        if live:
            with suppress(ImportError):
                import readline  # noqa: F401  input() then edits lines and remembers them
            self._print_note("Ctrl-D leaves, /help says more.")
        self._reset()
        while not self.ended:
            try:
                line = typed_text(input(_input_prompt() if live else "")).strip()
            except EOFError:
                if live:
                    print()
                return
            except KeyboardInterrupt:
                if not live:
                    raise
                print()
                self._print_note("Ctrl-D or /exit leaves.")
                continue
            if line.startswith("/"):
                self._command(*line.split(maxsplit=1))
            elif line:
                self._answer(line)

    def _answer(self, line: str) -> None:
        from saltus.cli.coloured_text import ColouredTextWriter, line_width, terminal
        from saltus.cli.report import statistics_line

        console = terminal(colour=self.colour or None)
        painter = ColouredTextWriter(console, self.colour, line_width(console))
        inputs = [*self.history, {"role": "user", "content": line}]
        try:
            written = self.engine.stream(inputs, method=self.method, **self.settings)
            try:
                for chunk in written:
                    painter.write(chunk.text, chunk.call_index, len(chunk.tokens))
            except KeyboardInterrupt:
                if not sys.stdin.isatty():
                    raise
            finally:
                painter.finish_line()
        except ValueError as error:
            self._print_note(str(error))
            return
        generation = written.generation
        if generation.text:
            self.history = [*inputs, {"role": "assistant", "content": generation.text}]
        self._print_note(
            statistics_line(generation, self.method) if generation.tokens else "stopped before the first token"
        )

    def _command(self, name: str, value: str = "") -> None:
        commands = {
            "/help": lambda: self._print_note(COMMANDS_HELP),
            "/reset": self._reset,
            "/method": lambda: self._change_method(value),
            "/seed": lambda: self._change_seed(value),
            "/colour": self._change_colour,
            "/exit": self._exit,
        }
        if name in commands:
            return commands[name]()
        near = difflib.get_close_matches(name, commands, n=1)
        self._print_note(f"{name} is no command; {f'did you mean {near[0]}?' if near else '/help lists them'}")

    def _reset(self) -> None:
        if self.history:
            self._print_note("The conversation is forgotten.")
        self.history = [{"role": "system", "content": typed_text(self.system)}] if self.system else []

    def _change_method(self, value: str) -> None:
        from saltus.methods import available_methods, make_methods

        try:
            if value:
                make_methods(value)
                self.method = value
            self._print_note(
                f"The method is {self.method}." + ("" if value else f" There are {', '.join(available_methods())}.")
            )
        except ValueError as error:
            self._print_note(str(error))

    def _change_seed(self, value: str) -> None:
        if value.isdecimal():
            self.settings["seed"] = int(value)
        elif value:
            self._print_note(f"A seed is a whole number from 0 on, not {value!r}.")
            return
        greedy = " It matters at temperatures above 0 (--temperature)." if not self.settings["temperature"] else ""
        self._print_note(f"The seed is {self.settings['seed']}.{greedy}")

    def _change_colour(self) -> None:
        self.colour = not self.colour
        self._print_note("Each colour is one call." if self.colour else "Colours are off.")

    def _exit(self) -> None:
        self.ended = True

    def _print_note(self, line: str) -> None:
        from saltus.cli.answers import print_note

        print_note(line)


def _input_prompt() -> str:
    """The input prompt, with marks that tell readline which characters have no width."""
    return "\001\x1b[1;36m\002› \001\x1b[0m\002"
