"""Choose which of the models that come with the package fills a text: one knows stories, one Python."""

from __future__ import annotations

import ast
import re
import textwrap
import warnings
from functools import lru_cache
from typing import TYPE_CHECKING

from saltus.loading.sources import SHIPPED_MODELS

if TYPE_CHECKING:
    from saltus.engine.infill_template import InfillTemplate

STORIES, CODE = "stories", "code"
# Characters a token of `code` over those of `stories` are 1.2 to 2.0 for Python, 1.3 to 1.7 for other programs and
# HTML, 0.6 to 0.8 for tales, and 0.95 to 1.29 for an encyclopaedia.
LEAST_CODE_RATIO = 1.3
# Stories and tales have 2.4 to 4.3 characters a token, half of them more than 3.9; German 1.8.
LEAST_CHARACTERS_PER_TOKEN = 2.2
LEAST_TOKENS = 12  # of a text that is judged by its tokens
PYTHON_LINE = re.compile(
    r"^[ \t]*((def|class) \w+.*|(if|elif|while|with|except) .*|for .+ in .*|else|try|finally):[ \t]*(#.*)?$"
    r"|^[ \t]*(import [\w.]+( as \w+)?|from [\w.]+ import .*)$",
    re.MULTILINE,
)

OTHER_MODELS = (
    "so expect noise; give a model of such texts by --model, for code one with fill-in-the-middle tokens, such as"
    " Qwen/Qwen2.5-Coder-0.5B"
)


def choose_model(template: InfillTemplate) -> tuple[str, str | None]:
    """The short name of the model, and a note where the text is unlike what it knows."""
    text = "".join(template.pieces)
    stories, code = (_num_tokens(name, text) for name in (STORIES, CODE))
    if _is_whole_python("x".join(template.pieces)) or (PYTHON_LINE.search(text) and code < stories):
        return CODE, None
    if stories < LEAST_TOKENS:
        return STORIES, None
    if stories >= LEAST_CODE_RATIO * code:
        return CODE, f"this text is unlike the Python that the model {CODE} knows, {OTHER_MODELS}"
    if len(text) < LEAST_CHARACTERS_PER_TOKEN * stories:
        return STORIES, f"this text is unlike the tales that the model {STORIES} knows, {OTHER_MODELS}"
    return STORIES, None


def check_model(template: InfillTemplate, given: str) -> str | None:
    """A note where the given model comes with the package, and another one of them fits the text better, or none."""
    if given not in (STORIES, CODE):
        return None
    fitting, note = choose_model(template)
    return note if note or fitting == given else f"this text is one for --model {fitting}, so expect noise of {given}"


def _is_whole_python(text: str) -> bool:
    """True for Python that is more than words or numbers with commas."""
    with warnings.catch_warnings(action="ignore"):
        try:
            parsed = ast.parse(textwrap.dedent(text))
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return False
    words = (ast.Name, ast.Constant, ast.Tuple)
    return not all(isinstance(statement, ast.Expr) and isinstance(statement.value, words) for statement in parsed.body)


def _num_tokens(name: str, text: str) -> int:
    return len(_tokenizer(name).encode(text, add_special_tokens=False).ids)


@lru_cache
def _tokenizer(name: str):
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(SHIPPED_MODELS[name] / "tokenizer.json"))
