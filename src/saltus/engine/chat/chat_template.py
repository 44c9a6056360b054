"""Read a chat template for a model that is published without one: a built-in one by name, or a Jinja file."""

from __future__ import annotations

import difflib
from pathlib import Path

from jinja2 import TemplateSyntaxError

from saltus.engine.chat.template_limits import check_chat_template

TEMPLATES_FOLDER = Path(__file__).parent / "chat_templates"


def built_in_chat_templates() -> list[str]:
    """Names of the chat templates that come with the package."""
    return sorted(file.stem for file in TEMPLATES_FOLDER.glob("*.jinja"))


def read_chat_template(name_or_file: str) -> str:
    """The Jinja text of a built-in template by its name, or of a file. Errors: ValueError of one line.

    It is what a Hugging Face tokenizer holds as `chat_template`.
    """
    names = built_in_chat_templates()
    if name_or_file in names:
        return (TEMPLATES_FOLDER / f"{name_or_file}.jinja").read_text(encoding="utf-8")
    try:
        text = Path(name_or_file).read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        near = difflib.get_close_matches(name_or_file, names, n=1)
        offer = f"did you mean {near[0]}?" if near else f"there are {', '.join(names)}, or give a Jinja file"
        raise ValueError(f"there is no chat template {name_or_file!r}; {offer}") from None
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ValueError(f"the chat template {name_or_file} cannot be read ({reason}); give a Jinja file") from None
    if not text.strip():
        raise ValueError(f"the chat template {name_or_file} is empty; write how messages become a text, in Jinja")
    try:
        check_chat_template(text)
    except TemplateSyntaxError as error:
        raise ValueError(
            f"the chat template {name_or_file}, line {error.lineno}: this is not Jinja ({error.message}); correct it"
        ) from None
    return text
