"""Define each option of the command line once, and the groups of options that commands share."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from saltus.engine.method_options import DEFAULT_METHOD

if TYPE_CHECKING:
    from saltus.engine.grammar import Grammar

MODEL_PANEL, METHOD_PANEL, SAMPLING_PANEL, GRAMMAR_PANEL = "Model", "Method", "Sampling", "Grammar"
LENGTH_PANEL, PROMPT_PANEL, OUTPUT_PANEL, SERVER_PANEL = "Length", "Prompt", "Output", "Server"
KEY_VARIABLE = "SALTUS_API_KEY"  # of the environment


def in_panel(panel: str, *names: str, help: str, **settings: Any) -> Any:
    """An option in a panel of --help."""
    return typer.Option(*names, help=help, rich_help_panel=panel, **settings)


Model = Annotated[
    str,
    in_panel(
        MODEL_PANEL,
        "--model",
        "-m",
        metavar="MODEL",
        help="A short name ([i]saltus pull --help[/i] lists them), a hub id, a folder, or a GGUF file.",
    ),
]
Dtype = Annotated[
    str,
    in_panel(
        MODEL_PANEL, "--dtype", metavar="TYPE", help="float32, bfloat16 or float16; auto: as the model was saved."
    ),
]
Device = Annotated[
    str, in_panel(MODEL_PANEL, "--device", metavar="DEVICE", help="cpu, cuda or cuda:1; auto: a GPU if there is one.")
]

Weights = Annotated[
    str,
    in_panel(
        MODEL_PANEL,
        "--weights",
        metavar="FORMAT",
        help="file: as they are stored; bf16: expand packed ones; q8_0, q5_1, q5_0, q4_1, q4_0: pack those of a"
        " Hugging Face model, experts too, which changes the text.",
    ),
]

Arithmetic = Annotated[
    str,
    in_panel(
        MODEL_PANEL,
        "--arithmetic",
        metavar="KIND",
        help="How packed weights are multiplied on the CPU: int8 (activations of 8 bits) or bf16; auto: int8.",
    ),
]

ChatTemplate = Annotated[
    str | None,
    in_panel(
        MODEL_PANEL,
        "--chat-template",
        metavar="NAME|FILE",
        help="How messages become a text, if the model has no template of its own: vicuna, chatml, llama-2, alpaca, or"
        " a Jinja file.",
    ),
]

_METHOD_HELP = (
    "How to draft: auto (lookup; with --draft-model, or the model's own heads or drafter where they pay), lookup, …"
    " ([i]saltus methods[/i] lists them)."
)
Method = Annotated[str, in_panel(METHOD_PANEL, "--method", metavar="NAME", help=_METHOD_HELP)]
DraftModel = Annotated[
    str | None,
    in_panel(
        METHOD_PANEL,
        "--draft-model",
        metavar="MODEL",
        help="A smaller model that drafts (method small_model+lookup), best one of the same family.",
    ),
]
NumDraftTokens = Annotated[
    int | None,
    in_panel(
        METHOD_PANEL, "--num-draft-tokens", metavar="N", min=1, help="Tokens that the draft model proposes, at most."
    ),
]
Options = Annotated[
    list[str] | None,
    in_panel(
        METHOD_PANEL, "--option", metavar="METHOD.FIELD=VALUE", help="Set an option of a method; may be repeated."
    ),
]
MaxDraftTokens = Annotated[
    int | None,
    in_panel(
        METHOD_PANEL,
        "--max-draft-tokens",
        metavar="N",
        min=0,
        help="Draft tokens that one call verifies, 384 at most. Default: 31; with --rule reject, and with"
        " [i]--no-adaptive[/i] (bench, check), 16.",
    ),
]
NgramCorpus = Annotated[
    list[Path] | None,
    in_panel(
        METHOD_PANEL,
        "--ngram-corpus",
        metavar="FILE|FOLDER",
        help="Texts that lookup also copies from, such as a code base or documentation; may be repeated.",
    ),
]
NoAdaptive = Annotated[
    bool,
    in_panel(
        METHOD_PANEL,
        "--no-adaptive",
        help="Verify as many draft tokens as --max-draft-tokens, also those that do not pay.",
    ),
]
Rule = Annotated[
    str,
    in_panel(
        METHOD_PANEL,
        "--rule",
        metavar="RULE",
        help="match: the same text; reject: the same distribution (rejection sampling).",
    ),
]

Temperature = Annotated[
    float,
    in_panel(SAMPLING_PANEL, "--temperature", "-t", metavar="X", help="0: the most likely token; higher: more varied."),
]
TopP = Annotated[
    float,
    in_panel(SAMPLING_PANEL, "--top-p", metavar="X", help="Keep the most likely tokens with this total probability."),
]
TopK = Annotated[int, in_panel(SAMPLING_PANEL, "--top-k", metavar="N", help="Keep the N most likely tokens; 0: all.")]
MinP = Annotated[
    float,
    in_panel(SAMPLING_PANEL, "--min-p", metavar="X", help="Drop tokens less likely than this share of the likeliest."),
]
RepetitionPenalty = Annotated[
    float,
    in_panel(SAMPLING_PANEL, "--repetition-penalty", metavar="X", help="Above 1: earlier tokens become less likely."),
]
Coupling = Annotated[
    str,
    in_panel(
        SAMPLING_PANEL,
        "--coupling",
        metavar="NAME",
        help="Which token a position's random numbers pick: gumbel; or by inverse CDF, probability, token-order. It"
        " changes sampled texts; drafters that are conditioned on uniforms need the one of their training.",
    ),
]
DEFAULT_COUPLING = "gumbel"  # that of core.sampling, whose import takes seconds
Seed = Annotated[
    int,
    in_panel(SAMPLING_PANEL, "--seed", "-s", metavar="N", help="The same seed gives the same text, with every method."),
]

MaxNewTokens = Annotated[
    int, in_panel(LENGTH_PANEL, "--max-new-tokens", "-n", metavar="N", min=1, help="New tokens of an answer, at most.")
]
Stop = Annotated[
    list[str] | None, in_panel(LENGTH_PANEL, "--stop", metavar="TEXT", help="End before this text; may be repeated.")
]
IgnoreEos = Annotated[bool, in_panel(LENGTH_PANEL, "--ignore-eos", help="Go on after end tokens.")]

Prompts = Annotated[
    Path | None,
    in_panel(
        PROMPT_PANEL,
        "--prompts",
        "-f",
        metavar="FILE",
        help='JSON lines with "prompt", "messages", or "turns" (each answer enters the next turn), or (.txt) a prompt a'
        " line; - is stdin.",
    ),
]
Limit = Annotated[
    int | None, in_panel(PROMPT_PANEL, "--limit", metavar="N", min=1, help="Use only the first N prompts of the file.")
]
Raw = Annotated[
    bool, in_panel(PROMPT_PANEL, "--raw", help="Continue the prompt itself, without the model's chat template.")
]
System = Annotated[str | None, in_panel(PROMPT_PANEL, "--system", metavar="TEXT", help="The system message.")]

Colour = Annotated[
    bool | None,
    in_panel(
        OUTPUT_PANEL,
        "--colour/--no-colour",
        help="Colour the tokens by the call that decided them. [dim]\\[default: in a terminal][/dim]",
        show_default=False,
    ),
]
ServerKey = Annotated[
    str,
    in_panel(SERVER_PANEL, "--api-key", metavar="KEY", envvar=KEY_VARIABLE, help="Of the server.", show_default=False),
]
Json = Annotated[bool, in_panel(OUTPUT_PANEL, "--json", help="Print JSON, for programs.")]

DEFAULT_MODEL = "smollm2-135m"


@dataclass(frozen=True)
class ModelOptions:
    """Which model, and how it is loaded."""

    model: Model = DEFAULT_MODEL
    dtype: Dtype = "auto"
    device: Device = "auto"
    weights: Weights = "file"
    arithmetic: Arithmetic = "auto"
    chat_template: ChatTemplate = None


@dataclass(frozen=True)
class MethodOptions:
    """How to draft and verify."""

    method: Annotated[
        str | None, in_panel(METHOD_PANEL, "--method", metavar="NAME", help=_METHOD_HELP, show_default=DEFAULT_METHOD)
    ] = None
    option: Options = None
    draft_model: DraftModel = None
    num_draft_tokens: NumDraftTokens = None
    max_draft_tokens: MaxDraftTokens = None
    ngram_corpus: NgramCorpus = None
    rule: Rule = "match"


@dataclass(frozen=True)
class InfillMethodOptions(MethodOptions):
    """The same with the default method for texts with holes: `assd` for a model that fills holes anywhere."""

    method: Method = "auto"


@dataclass(frozen=True)
class SamplingOptions:
    """How tokens are sampled; the fields are keyword arguments of `Engine.generate`."""

    temperature: Temperature = 0.0
    top_p: TopP = 1.0
    top_k: TopK = 0
    min_p: MinP = 0.0
    repetition_penalty: RepetitionPenalty = 1.0
    coupling: Coupling = DEFAULT_COUPLING
    seed: Seed = 0


@dataclass(frozen=True)
class GrammarOptions:
    """What a whole text must be; at most one of them."""

    json_schema: Annotated[
        Path | None,
        in_panel(
            GRAMMAR_PANEL, "--json-schema", metavar="FILE", help="JSON that follows the JSON schema in this file."
        ),
    ] = None
    regex: Annotated[
        str | None,
        in_panel(GRAMMAR_PANEL, "--regex", metavar="PATTERN", help="A text that the regular expression matches."),
    ] = None
    grammar: Annotated[
        Path | None,
        in_panel(
            GRAMMAR_PANEL, "--grammar", metavar="FILE", help="A text of the grammar in this file, as Lark writes it."
        ),
    ] = None

    def read(self) -> Grammar | None:
        """The grammar, if there is one. Errors: ValueError of one line for one that no model can follow."""
        from saltus.engine.grammar import Grammar
        from saltus.engine.text_files import read_text

        given = [name for name in ("json_schema", "regex", "grammar") if getattr(self, name) is not None]
        if len(given) > 1:
            names = " and ".join("--" + name.replace("_", "-") for name in given)
            raise ValueError(f"{names} contradict each other; give one of them")
        if self.json_schema is not None:
            made = Grammar.json_schema(read_text(self.json_schema))
        elif self.grammar is not None:
            made = Grammar.lark(read_text(self.grammar))
        elif self.regex is not None:
            made = Grammar.regex(self.regex)
        else:
            return None
        made.validate()
        return made


def with_options(*, omit: tuple[str, ...] = (), **defaults: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Turn a command's parameters that are groups of options into those options.

    `omit` names options that this command does not have, `defaults` gives other defaults. In --help the options of a
    group stand where the group stands in the command's signature.
    """

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        hints = inspect.get_annotations(command, eval_str=True)  # also of one with @no_type_check
        parameters: list[inspect.Parameter] = []
        groups: dict[str, tuple[type, list[str]]] = {}
        for parameter in inspect.signature(command).parameters.values():
            kind = hints[parameter.name]
            if not dataclasses.is_dataclass(kind):
                parameters.append(parameter.replace(annotation=kind, kind=inspect.Parameter.KEYWORD_ONLY))
                continue
            types = get_type_hints(kind, include_extras=True)
            fields = [field for field in dataclasses.fields(kind) if field.name not in omit]
            groups[parameter.name] = kind, [field.name for field in fields]  # pyright: ignore[reportArgumentType]
            parameters += [
                inspect.Parameter(
                    field.name, inspect.Parameter.KEYWORD_ONLY, annotation=types[field.name],
                    default=defaults.get(field.name, field.default),
                )
                for field in fields
            ]  # fmt: skip

        @functools.wraps(command)
        def run(**given: Any) -> Any:
            found = {
                name: kind(**{field: given.pop(field) for field in fields}) for name, (kind, fields) in groups.items()
            }
            return command(**given, **found)

        run.__signature__ = inspect.Signature(parameters)  # pyright: ignore[reportAttributeAccessIssue]
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return run

    return decorate


def show_no_type_of_flags(command: Any, parent: Any = None) -> None:
    """Let the help name flags alone: after `--raw <bool>` users would type a value, which is another argument."""
    settings = command.context_settings  # those of the parent name -h
    context = command.context_class(command, info_name=command.name, parent=parent, **settings)
    for option in command.get_params(context):
        if getattr(option, "is_flag", False) and option.metavar is None:
            option.metavar = ""
    for inner in getattr(command, "commands", {}).values():
        show_no_type_of_flags(inner, context)
