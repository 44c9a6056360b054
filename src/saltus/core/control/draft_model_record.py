"""Record what a draft model's calls take and bring, and find whether it should read a text at all."""

from __future__ import annotations

from dataclasses import dataclass

# Tokens that calls in a step may bring where the next token is not known without them: their first, and part of those
# after it.
FIRST_CALL_TOKENS = 1.5
STEPS_REMEMBERED = 32.0  # after which the past weighs 1/e: a text that differs from those before it shows soon
FIRST_STEPS = 8  # of the first text, which show what other drafters leave to a draft model
KEPT_OF_A_TEXT = 0.9  # of the record, at the beginning of the next text: what has not paid is tried again
SECONDS_RATE = 0.3  # weight of the latest observation in a mean of seconds
LENGTH_RATE = 0.2  # weight of the latest text in the mean length of texts


@dataclass
class DraftModelRecord:
    """What the calls of a draft model that reads the text take and bring, over all texts.

    Before its first call it reads the prompt, which may cost more than its drafts save in the rest of the text. Both
    are compared in tokens: a second is worth as many as are decided in it.
    """

    relative_size: float | None = None  # its bytes of weights by the target's, which its first calls are taken to cost
    step_seconds: float = 0.0  # that its calls of a step took, at the mean; 0: there were none
    token_seconds: float = 0.0  # that each token of a prompt took; 0: no prompt was read
    unknown: float = 0.0  # the sum over steps with calls of the chance that no other draft was right
    gained: float = 0.0  # by these calls, in tokens, less what their rows cost
    steps: float = 0.0  # recent ones, that the next two come from
    tokens: float = 0.0  # that were decided
    saved: float = 0.0  # tokens that calls did or would save
    text_tokens: float = 128.0  # of a text, at the mean
    prior: float = 4.0  # of `unknown` that counts as observed at the start

    def begin_text(self) -> None:
        """Weigh what was observed of calls less, and take them to be a little faster than they were."""
        self.gained, self.unknown = self.gained * KEPT_OF_A_TEXT, self.unknown * KEPT_OF_A_TEXT
        self.step_seconds *= KEPT_OF_A_TEXT**0.5
        self.token_seconds *= KEPT_OF_A_TEXT**0.5

    def end_text(self, num_tokens: int) -> None:
        """Record the length of a text."""
        self.text_tokens += LENGTH_RATE * (num_tokens - self.text_tokens)

    def tokens_of_calls(self, unknown: float) -> float:
        """Tokens that calls in a step bring, where no other draft is right with this probability."""
        return unknown * (self.gained + self.prior * FIRST_CALL_TOKENS) / (self.unknown + self.prior)

    def record_step(self, num_tokens: int, saved: float) -> None:
        """Add a step: the tokens that the step before it decided, and those that calls would save in this one."""
        kept = 1 - 1 / STEPS_REMEMBERED
        self.steps = self.steps * kept + 1
        self.tokens = self.tokens * kept + num_tokens
        self.saved = self.saved * kept + max(saved, 0.0)

    def record_calls(self, unknown: float, gain: float, seconds: float) -> None:
        """Add the calls of one step that read no prompt."""
        kept = 1 - 1 / (2 * STEPS_REMEMBERED)
        self.unknown, self.gained = self.unknown * kept + unknown, self.gained * kept + gain
        self.step_seconds = _mean(self.step_seconds, seconds)

    def record_prompt(self, num_tokens: int, seconds: float) -> None:
        """Add a call that read a prompt, or what was decided during a pause."""
        self.token_seconds = _mean(self.token_seconds, seconds / num_tokens)

    def tokens_saved(self, num_open: int) -> float:
        """How many of a text's next tokens calls would save, up to its likely end."""
        return self.saved / max(self.tokens, 1.0) * min(num_open, self.text_tokens)


def _mean(before: float, latest: float) -> float:
    return before + SECONDS_RATE * (latest - before) if before else latest
