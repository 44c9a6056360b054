"""The part of a prompt that each of its tokens stands for, for the log-probabilities of a prompt that is echoed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from saltus.engine.detokenizer import Detokenizer

MAX_SKIPPED = 2  # characters between two tokens that belong to none, such as a space before a word


def prompt_texts(tokenizer: Any, text: str, tokens: Sequence[int]) -> list[str]:
    """The part of a prompt that each of its tokens stands for; all together are the prompt.

    Tokens that the tokenizer adds, such as its begin token, stand for nothing. A character in several tokens is
    the text of the last one.
    """
    shown = {token: added.content for token, added in tokenizer.added_tokens_decoder.items()}
    detokenizer, ends, place = Detokenizer(tokenizer, shown=shown), [], 0
    for token in tokens:
        new = detokenizer.add(token)
        found = text.find(new, place, place + len(new) + MAX_SKIPPED)
        if found < 0 and token not in shown:
            ends = _ends_by_offsets(tokenizer, text, tokens)
            break
        place = place if found < 0 or not new else found + len(new)
        ends.append(place)
    return [text[begin:end] for begin, end in zip([0, *ends], [*ends[:-1], len(text)], strict=False)]


def _ends_by_offsets(tokenizer: Any, text: str, tokens: Sequence[int]) -> list[int]:
    """Where each token ends, for tokenizers that change what they read, as by lower case. Unknown: all in the last."""
    for add_special_tokens in (True, False) if tokenizer.is_fast else ():
        found = tokenizer(text, add_special_tokens=add_special_tokens, return_offsets_mapping=True)
        if list(found.input_ids) == list(tokens):
            ends, following = [], len(text)
            for begin, end in reversed(found.offset_mapping):
                ends.append(min(end, following))
                following = min(following, begin) if end > begin else following
            ends.reverse()
            return [max(ends[: count + 1]) for count in range(len(ends))]
    return [0] * len(tokens)
