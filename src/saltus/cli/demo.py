"""The demo command: answer a question several tokens a call, beside plain decoding in the same run."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

import typer

from saltus.cli import options as o

QUESTION = """How do kangaroos move? Answer with the facts of this text.

Kangaroos are the only large animals that travel by leaping. A red kangaroo can leap nine metres in a single bound and \
reach 60 kilometres an hour. The tendons of its hind legs store energy like springs, so that hopping fast costs it no \
more than hopping slowly. At a slow pace a kangaroo uses its tail as a fifth leg: the tail carries the weight of the \
body while the hind legs swing forward. The shape of its legs and its heavy tail keep a kangaroo from walking \
backwards, which is said to be why it stands on the coat of arms of Australia, beside the emu."""

MAX_REPEATS, REPEAT_SECONDS = 4, 6.0  # of both ways of decoding, in turns: a single run's ratio is mostly noise


@o.with_options()
def demo(
    *,
    question: Annotated[
        str | None, typer.Argument(metavar="QUESTION", help="A question of your own.", show_default=False)
    ] = None,
    model_options: o.ModelOptions,
    method: o.Method = o.DEFAULT_METHOD,
    max_new_tokens: o.MaxNewTokens = 128,
    temperature: Annotated[
        float | None,
        o.in_panel(o.SAMPLING_PANEL, "--temperature", "-t", metavar="X", help="0 unless a seed is given, then 0.7."),
    ] = None,
    seed: Annotated[
        int | None, o.in_panel(o.SAMPLING_PANEL, "--seed", "-s", metavar="N", help="Sample the answer with this seed.")
    ] = None,
    colour: o.Colour = None,
) -> None:
    """Answer a question, coloured by call, and compare with plain decoding.

    [dim]The model is downloaded on first use. Runs follow a warm-up; short ones are repeated in turns.[/dim]

    [bold]Examples[/bold]

        saltus demo

        saltus demo --seed 1

        saltus demo --method jacobi+lookup "Write the numbers from 1 to 30."
    """
    from saltus.cli.open_engine import open_engine, validate_settings

    sampling: dict[str, Any] = {
        "temperature": (0.0 if seed is None else 0.7) if temperature is None else temperature,
        "seed": seed or 0,
    }
    validate_settings(method, chat_template=model_options.chat_template, **sampling)
    engine = open_engine(method=method, **asdict(model_options))
    settings = {**sampling, "max_new_tokens": max_new_tokens}
    _run_demo(engine, question or QUESTION, model_options.model, engine.method, settings, colour)


def _run_demo(
    engine: Any, question: str, model: str, method: str, settings: dict[str, Any], colour: bool | None
) -> None:
    from rich.padding import Padding
    from rich.text import Text

    from saltus.cli.answers import run_again, stream_answer
    from saltus.cli.coloured_text import ColouredTextWriter, legend, line_width, terminal
    from saltus.cli.report import comparison_line
    from saltus.engine.comparison import warm_up
    from saltus.kernels.model_weights import describe_weights

    console = terminal(colour=colour)
    coloured = console.is_terminal if colour is None else colour
    network = engine.network.model
    how = f"{describe_weights(network)} on {network.device}, {_describe_sampling(settings)}"
    console.print(Text.assemble((model, "bold"), " with ", (method, "bold"), f" ({how})\n"))
    shown = Padding(Text(question, "dim"), (0, 2)) if console.is_terminal else question
    console.print(shown, soft_wrap=not console.is_terminal, markup=False)
    console.print()
    if coloured:
        console.print(legend(), end="\n\n")
    warm_up(engine, question, (method, "plain"), settings)
    painter = ColouredTextWriter(console, coloured, line_width(console))
    generation = stream_answer(engine, question, painter, settings)
    console.file.flush()
    plain = run_again(engine, question, settings)
    seconds, repeats = generation.statistics.seconds + plain.statistics.seconds, []
    for number in range(min(MAX_REPEATS, int(REPEAT_SECONDS / max(seconds, 1e-3)))):
        order = (method, "plain") if number % 2 else ("plain", method)
        turn = {name: run_again(engine, question, settings, name) for name in order}
        repeats.append((turn[method], turn["plain"]))
    console.print()
    line = Text(comparison_line(generation, plain, method, repeats), "bold")
    console.print(line, soft_wrap=not console.is_terminal)


def _describe_sampling(settings: dict[str, Any]) -> str:
    return f"temperature {settings['temperature']:g}, seed {settings['seed']}" if settings["temperature"] else "greedy"
