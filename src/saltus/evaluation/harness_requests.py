"""Read what lm_eval asks to be generated: where the text ends, and by which law it is written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

LAW = ("top_k", "top_p", "min_p", "repetition_penalty")
SPELLED_OUT = {"num_beams": 1, "use_cache": True}  # what may be said, since it changes nothing
TOP_K = 50  # of Transformers, where neither the request nor the model says otherwise


@dataclass(eq=False)
class Job:
    """A request and its text."""

    context: str
    settings: Mapping[str, Any]
    stops: list[str]
    text: Any
    answer: str = ""


@dataclass
class Ending:
    """Told the tokens of a text: does it end with this one? Stop strings are looked for among special tokens too."""

    tokenizer: Any
    ends: frozenset[int]
    stops: tuple[str, ...]
    tokens: list[int] = field(default_factory=list)
    window: int = field(init=False)  # tokens that a stop string can take; a few more, since it may be spelt otherwise

    def __post_init__(self) -> None:
        spelt = (self.tokenizer.encode(stop, add_special_tokens=False) for stop in self.stops)
        self.window = 2 + max(map(len, spelt), default=0)

    def __call__(self, token: int) -> bool:
        self.tokens.append(token)
        if token in self.ends:
            return True
        latest = self.tokenizer.decode(self.tokens[-self.window :])
        return any(stop in latest for stop in self.stops)


def sampling_of(wanted: Mapping[str, Any], model: Any) -> Any:
    """The law that `model.generate` would use: the request's, else the model's own, else Transformers' defaults."""
    from saltus.core.sampling import Sampling

    given = {name: value for name, value in wanted.items() if name not in ("do_sample", "temperature")}
    for name, value in SPELLED_OUT.items():
        if given.pop(name, value) != value:
            raise ValueError(f"generation argument {name} must be {value} here; leave it out")
    if unknown := sorted(given.keys() - set(LAW)):
        raise ValueError(f"generation argument {unknown[0]} is unknown to saltus; it can do {', '.join(LAW)}")
    own = getattr(model, "generation_config", None)
    law: dict[str, Any] = {"top_k": TOP_K} | {
        name: value for name in LAW if (value := getattr(own, name, None)) is not None
    }
    law |= {name: value for name, value in given.items() if value is not None}
    temperature = float(wanted.get("temperature") or 0.0)  # lm_eval has set it to 0 where do_sample is false
    if not temperature:
        law = {name: law[name] for name in ("repetition_penalty",) if name in law}
    return Sampling(temperature=temperature, **law)
