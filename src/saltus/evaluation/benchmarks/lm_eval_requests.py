"""Translate lm_eval's generation requests: where the text ends, and how it is sampled."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

SAMPLING_SETTINGS = ("top_k", "top_p", "min_p", "repetition_penalty")
IGNORED_SETTINGS = {"num_beams": 1, "use_cache": True}  # accepted, since it changes nothing
DEFAULT_TOP_K = 50  # Transformers' defaults


@dataclass(eq=False)
class LmEvalRequest:
    """A request of lm_eval, and the engine's request for it."""

    context: str
    generation_kwargs: Mapping[str, Any]
    stop_strings: list[str]
    request: Any
    answer: str = ""


@dataclass
class EndCondition:
    """An `is_end` function: True if the text ends with this token. Stop strings may contain special tokens."""

    tokenizer: Any
    end_tokens: frozenset[int]
    stop_strings: tuple[str, ...]
    tokens: list[int] = field(default_factory=list)
    # tokens that a stop string can span; a few more, since other tokens may spell it
    window_tokens: int = field(init=False)

    def __post_init__(self) -> None:
        spelt = (self.tokenizer.encode(stop, add_special_tokens=False) for stop in self.stop_strings)
        self.window_tokens = 2 + max(map(len, spelt), default=0)

    def __call__(self, token: int) -> bool:
        self.tokens.append(token)
        if token in self.end_tokens:
            return True
        if not self.stop_strings:
            return False
        latest = self.tokenizer.decode(self.tokens[-self.window_tokens :])
        return any(stop in latest for stop in self.stop_strings)


def sampling_from_kwargs(generation_kwargs: Mapping[str, Any], model: Any) -> Any:
    """The sampling of `model.generate`: the request's settings, else the model's, else Transformers' defaults."""
    from saltus.core.sampling import Sampling

    given = {name: value for name, value in generation_kwargs.items() if name not in ("do_sample", "temperature")}
    for name, value in IGNORED_SETTINGS.items():
        if given.pop(name, value) != value:
            raise ValueError(f"generation argument {name} must be {value} here; leave it out")
    if unknown := sorted(given.keys() - set(SAMPLING_SETTINGS)):
        raise ValueError(
            f"generation argument {unknown[0]} is unknown to saltus; it can do {', '.join(SAMPLING_SETTINGS)}"
        )
    model_config = getattr(model, "generation_config", None)
    distribution: dict[str, Any] = {"top_k": DEFAULT_TOP_K} | {
        name: value for name in SAMPLING_SETTINGS if (value := getattr(model_config, name, None)) is not None
    }
    distribution |= {name: value for name, value in given.items() if value is not None}
    temperature = float(generation_kwargs.get("temperature") or 0.0)  # lm_eval has set it to 0 where do_sample is false
    if not temperature:
        distribution = {name: distribution[name] for name in ("repetition_penalty",) if name in distribution}
    return Sampling(temperature=temperature, **distribution)
