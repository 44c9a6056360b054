"""What is compared, a file each: `run(audit)` yields verdicts. Checks run in the order of `CHECKS`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from saltus.evaluation.audit.checks import graded, limits, logprobs, seeds, speed, streams, structured, texts
from saltus.evaluation.audit.context import Audit
from saltus.evaluation.audit.verdicts import Verdict

CHECKS: Mapping[str, Callable[[Audit], Iterator[Verdict]]] = {
    "texts": texts.run,
    "seeds": seeds.run,
    "logprobs": logprobs.run,
    "streams": streams.run,
    "limits": limits.run,
    "structured output": structured.run,
    "graded suites": graded.run,
    "speed": speed.run,
}
