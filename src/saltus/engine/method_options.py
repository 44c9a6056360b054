"""Choose a method by a draft model, in the words of Transformers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

DEFAULT_METHOD = "auto"  # `saltus.methods.AUTO`, which takes a second to import

Options = Mapping[str, Mapping[str, Any]]


def with_draft_model(
    method: str | None, options: Options, draft_model: str | None, num_draft_tokens: int | None
) -> tuple[str, Options]:
    """The method and the options of methods, given perhaps a draft model and its number of draft tokens.

    A draft model is for the method `small_model`, and for `auto`, the default, which is then `small_model+lookup`.
    Errors: ValueError if the method is another one, or its options say something else.
    """
    given = {"model": draft_model, "num_draft_tokens": num_draft_tokens}
    given = {name: value for name, value in given.items() if value is not None}
    if not given:
        return DEFAULT_METHOD if method is None else method, options
    if method is None:
        method = DEFAULT_METHOD if draft_model else "small_model"  # which says that it lacks one
    if "small_model" not in method.split("+") and not (method == DEFAULT_METHOD and draft_model):
        raise ValueError(
            f"a draft model belongs to the method small_model, but the method is {method};"
            f" leave the method out, or take small_model+{method}"
        )
    own = options.get("small_model", {})
    for name, value in given.items():
        if name in own and own[name] != value:
            shown = "draft_model (--draft-model)" if name == "model" else "num_draft_tokens (--num-draft-tokens)"
            raise ValueError(f"{shown} is {value}, but the option small_model.{name} is {own[name]}; give one of them")
    return method, {**options, "small_model": {**own, **given}}
