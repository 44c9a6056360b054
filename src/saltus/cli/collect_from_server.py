"""`saltus collect text --endpoint`: a server of OpenAI's protocol writes the texts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from saltus.cli.collection import show_progress, tokenize_prompts, training_command
from saltus.cli.options import SERVER_PANEL, ServerKey, in_panel
from saltus.engine.prompts import Prompt

Endpoint = Annotated[
    str | None,
    in_panel(
        SERVER_PANEL,
        "--endpoint",
        metavar="URL",
        help="Let a running server of OpenAI's protocol write, such as vLLM's; of --model only the tokenizer is read.",
    ),
]
ServedModel = Annotated[
    str | None,
    in_panel(
        SERVER_PANEL,
        "--served-model",
        metavar="NAME",
        help="The model's name on the server. [dim]\\[default: the first that it lists][/dim]",
    ),
]


@dataclass(frozen=True)
class ServerOptions:
    """The server that writes, if one does."""

    endpoint: Endpoint = None
    served_model: ServedModel = None
    api_key: ServerKey = ""


def collect_from_server(
    inputs: Sequence[Prompt],
    file: Path,
    out: Path,
    server: ServerOptions,
    model: str,
    chat_template: str | None,
    settings: Mapping[str, Any],
    concurrency: int,
) -> None:
    """Let a server answer prompts, as texts of a model whose weights need not be here. Errors: ValueError."""
    from saltus.engine.chat.chat_template import read_chat_template
    from saltus.integrations.openai_endpoint import connect_endpoint
    from saltus.loading.load_model import load_tokenizer
    from saltus.loading.sources import resolve_tokenizer
    from saltus.training.data.endpoint_texts import collect_from_endpoint, endpoint_metadata
    from saltus.training.data.teacher_texts import CollectionPlan, prepare_folder
    from saltus.training.loop.checkpoint import lock_folder

    tokenizer = load_tokenizer(resolve_tokenizer(model))
    if chat_template is not None:
        tokenizer.chat_template = read_chat_template(chat_template)
    plan = CollectionPlan(tokenize_prompts(tokenizer, model, None, inputs, file), **settings)
    assert server.endpoint is not None
    endpoint = connect_endpoint(server.endpoint, tokenizer, server.served_model, server.api_key)
    with lock_folder(out):
        missing = prepare_folder(out, plan, endpoint_metadata(plan, endpoint, model, tokenizer))
        progress = collect_from_endpoint(endpoint, tokenizer, plan, missing, out, concurrency)
        show_progress(progress, plan, missing, out, training_command("ptp", out, model))
