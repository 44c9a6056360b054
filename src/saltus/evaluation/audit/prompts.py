"""The requests of a check without prompts of its own: short questions, and a text that prompts begin with."""

from __future__ import annotations

from saltus.evaluation.benchmarks.suites import load_tasks

SHARED_PREFIX = (
    "The following is the handbook of the lighthouse of Skarvholm. The lamp is lit at sunset and put out at sunrise. "
    "The keeper writes the weather, the wind and every passing ship into the log, in ink, and signs each page. The "
    "lens is cleaned each morning with a soft cloth, the brass once a week. Oil is brought by boat on the first day of "
    "each month; in storms the store must last for six weeks. In fog the bell is rung twice a minute. Visitors may "
    "climb the tower between ten and noon. The cat sleeps in the store and is fed at six. Whoever leaves the island "
    "tells the harbour before noon. Now answer a question of a visitor.\n\nQuestion: "
)


def default_prompts(count: int) -> list[str]:
    """Prompts of all kinds that come with Saltus, evenly spread."""
    return [task.prompt.turns[0] for task in load_tasks("quick", count)]
