"""What a caller may give of a text: its prompt and its settings."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict, get_type_hints

from saltus.core.picking import Coupling
from saltus.core.sampling import Sampling
from saltus.core.value_types import SettingError, hints_of, short_repr, typed_value
from saltus.engine.grammar import Grammar

PromptLike = str | Sequence[Mapping[str, Any]] | Sequence[int]
"""A text, the messages of a conversation, or token ids."""


class SamplingSettings(TypedDict, total=False):
    """How tokens are sampled; each setting has the default given here."""

    temperature: float  # 0: greedy decoding
    top_k: int  # 0: off
    top_p: float  # 1: off
    min_p: float  # 0: off
    repetition_penalty: float  # 1: off
    presence_penalty: float  # 0: off; OpenAI's, as are the next two
    frequency_penalty: float  # 0: off
    # what is added to the logits of tokens: {token: bias}, or (token, bias) by pairs
    logit_bias: Mapping[int, float] | Sequence[tuple[int, float]]
    no_repeat_ngram_size: int  # 0: off; no n-gram of so many tokens comes twice, the prompt's included
    coupling: Coupling  # "probability", "token-order" or "gumbel": which token a position's random numbers pick
    seed: int  # 0; without effect at temperature 0
    logprobs: bool  # False; True: log-probabilities of the tokens, by the softmax of the raw logits


class Settings(SamplingSettings, total=False):
    """The settings of `generate` and `stream`; each has the default given here."""

    max_new_tokens: int  # 256; the text ends earlier ("length") where the model's context ends
    min_new_tokens: int  # 0; before so many tokens there are no end tokens, and stop strings are not looked for
    stop: str | Sequence[str] | None  # strings that end the text; they are cut off, special tokens among them
    stop_token_ids: Sequence[int]  # (); more end tokens, also with ignore_eos
    skip_special_tokens: bool  # True; False: special tokens are shown in the text, but for those that end it
    raw: bool  # False: a `str` becomes a user message of the chat template, if there is one. True: it stays as it is
    ignore_eos: bool  # False; True: go on after end tokens
    grammar: Grammar | None  # None; what the whole text must be, such as `Grammar.json_schema({...})`
    chat_template_kwargs: Mapping[str, Any]  # {}; variables of the chat template, such as {"enable_thinking": False}
    add_generation_prompt: bool | None  # None; whether the chat template begins an answer
    continue_final_message: bool | None  # None: if it is the assistant's; the text goes on with the last message
    add_special_tokens: bool | None  # None: to a `str` that no chat template is for; the tokenizer's begin token
    parse_special: bool  # False; True: control tokens that messages spell become tokens, not words
    tools: Sequence[Mapping[str, Any]]  # (); functions that the answer to messages may call, as OpenAI describes them
    suffix: str | None  # None; a model with fill-in-the-middle tokens writes what stands between the prompt and this
    prediction: str | None  # None; what the text will probably repeat, such as code to be edited: `lookup` drafts it


class InfillSettings(SamplingSettings, total=False):
    """The settings of `infill` and `stream_infill`; each has the default given here."""

    suffix: str | None  # None; the text after a single hole, the text given being what stands before it
    open_tokens: int | None  # None: 24, of a causal model 128; a hole marked [[…]] has at most so many tokens


def make_sampling(settings: Mapping[str, Any], known: type[Any]) -> Sampling:
    """The sampling parameters among settings that `known` names. Errors: ValueError of one line."""
    ours = hints_of(Sampling)
    checked = {}
    for name, value in settings.items():
        if name not in ours:
            near = difflib.get_close_matches(name, [*get_type_hints(known), *ours], n=1)
            offer = f"did you mean {near[0]}?" if near else "see saltus.Settings"
            raise ValueError(f"there is no setting {short_repr(name)}; {offer}")
        checked[name] = (_biases if name == "logit_bias" else typed_value)(value, ours[name], name)
    return Sampling(**checked)


def _biases(value: Any, hint: Any, name: str) -> Any:
    """Biases by token, or pairs of both, as pairs. Errors: ValueError of one line."""
    pairs = value
    if isinstance(value, Mapping):
        pairs = [(int(key) if _is_number(key) else key, bias) for key, bias in value.items()]
    try:
        return typed_value(pairs, hint, name)
    except ValueError:
        message = f"{name} is {short_repr(value)}, but must be numbers by token id, such as {{5: -100}}"
        raise SettingError(message, name) from None


def _is_number(key: Any) -> bool:
    """True for a token id as JSON writes it."""
    return isinstance(key, str) and key.isdecimal()
