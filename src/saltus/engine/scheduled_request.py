"""One request in the scheduler, and how far it is."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeVar

from saltus.core.batch import SequenceState
from saltus.core.control.controller import Controller
from saltus.engine.decoding_setup import DecodingSetup
from saltus.engine.prompt_scores import PromptScores
from saltus.engine.request import Request


@dataclass(eq=False)
class ScheduledRequest:
    """One text to decode with a method, and its place among the others."""

    request: Request
    method: str
    max_draft_tokens: int | None = None  # of a call, at most; None: the engine's
    prompt_scores: PromptScores | None = None  # to be filled while the prompt is read
    client: str = ""  # who asks; clients take turns
    request_number: int = 0  # of what the client asked for, such as several choices: these take turns, too
    reuses_prefix: bool = True  # it reads no token that is in the prefix tree
    cached_tokens: int = field(default=0, init=False)  # of the prompt, found in the prefix tree
    setup: DecodingSetup | None = field(default=None, init=False, repr=False)  # from its first call on
    controller: Controller | None = field(default=None, init=False, repr=False)  # the same
    sequence: SequenceState | None = field(default=None, init=False, repr=False)  # from its first call to its last
    num_unread_tokens: int = field(default=0, init=False)  # of the prompt, to be read before the text is decoded
    prompt_is_cached: bool = field(default=False, init=False)  # its prompt is in the prefix tree
    ended: bool = field(default=False, init=False)
    failure: Exception | None = field(default=None, init=False)  # what ended it, and no other text
    failed_in_call: bool = field(default=False, init=False)

    @property
    def num_tokens(self) -> int:
        """The longest that the text can get."""
        return len(self.request.prompt) + self.request.max_new_tokens


AnyScheduled = TypeVar("AnyScheduled", bound=ScheduledRequest)
