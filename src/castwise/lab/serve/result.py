"""The result of ``output_parity``."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, ClassVar

from castwise.core.plans.plan import Plan
from castwise.core.plans.words import in_words
from castwise.lab.result import Result
from castwise.lab.serve.verdicts import OutputError, Verdict


@dataclass(frozen=True)
class Metric:
    """A metric of ``evaluate`` in fp32 and under a plan.

    Attributes:
        name: The name of the metric.
        fp32: Its value in fp32.
        plan: Its value under the plan.
        noise: The root mean square change that random rounding of the weights makes, where it leaves the metric finite.
        explained: Whether rounding explains the change. It may be as large as the line times ``noise``, or 0.5 % of the
            metric. A change in either direction counts, since a metric does not say which direction is better.
        unknown: Whether rounding alone changes the metric by so much, or makes it infinite, that nothing can be said about it.
    """

    name: str
    fp32: float
    plan: float
    noise: float
    explained: bool
    unknown: bool = False

    @property
    def said(self) -> str:
        """A clause that says how the metric changes."""
        said = f"{self.name} is {self.plan:.4g}, and {self.fp32:.4g} in fp32, which rounding changes by {self.noise:.2g}"
        return said + " or makes infinite, so nothing can be said about it" * self.unknown


@dataclass(frozen=True)
class OutputParity(Result):
    """The result of :func:`castwise.output_parity`: whether a model's outputs under a plan are as good as in fp32.

    The result is true in an ``if`` statement when the plan passed.

    Attributes:
        plan: The plan that was tested.
        verdict: ``pass``, ``fail`` or ``undecided``.
        reason: The reason for the verdict, in a sentence.
        outputs: Each output's error.
        line: The multiple of the error of rounding up to which a plan passes.
        batches: The number of batches on which the plan was tested.
        samples: The number of samples in these batches: the sum of the first dimensions of the first output.
        longest: The sequence length up to which the plan was tested. None if the batches have no sequences.
        metrics: The metrics of ``evaluate``.
        note: A further remark, in a sentence.
    """

    kind: ClassVar[str] = "output-parity"
    plan: Plan
    verdict: Verdict
    reason: str
    outputs: tuple[OutputError, ...]
    line: float
    batches: int
    samples: int
    longest: int | None = None
    metrics: tuple[Metric, ...] = ()
    note: str = ""

    def __bool__(self) -> bool:
        """Whether the plan passed."""
        return self.verdict == "pass"

    def _fields(self) -> dict[str, Any]:
        return dataclasses.asdict(self) | {"plan": str(self.plan), "words": in_words(self.plan)}

    @property
    def worst(self) -> OutputError:
        """The output that decided."""
        return max(self.outputs, key=lambda each: (each.verdict == self.verdict, each.high))

    @property
    def value(self) -> float:
        """The quantity that decided, as a multiple of what rounding explains."""
        return self.worst.times

    @property
    def low(self) -> float:
        """The lower end of the 95 % interval of ``value``."""
        return self.worst.low

    @property
    def high(self) -> float:
        """The upper end of the 95 % interval of ``value``."""
        return self.worst.high

    @property
    def needed(self) -> int | None:
        """The approximate number of batches that would decide an undecided result; None if no number would."""
        found = [each.needed(self.batches, self.line) for each in self.outputs if each.verdict == "undecided"]
        known = [number for number in found if number is not None]
        return max(known) if known and len(known) == len(found) else None

    def explained(self) -> str:
        """Return the reason for the verdict in a sentence without its full stop."""
        wrong = [metric for metric in self.metrics if not metric.explained or metric.unknown]
        wrong.sort(key=lambda metric: metric.explained)
        if wrong and not any(each.verdict == "fail" for each in self.outputs):
            return wrong[0].said
        more = f" on {self.batches} batches; about {self.needed} would decide" if self.needed else ""
        return self.worst.said(self.line) + more
