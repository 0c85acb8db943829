"""Decide from the differences of outputs whether a plan's outputs are as good as fp32's.

Everything is held against what rounding alone does: fp32's outputs when the weights and inputs are perturbed by up to half a unit
in the last place of the plan's format. This is called the *floor*. These ratios are compared with one line, each as a multiple of
the floor:

- the error of floating outputs, as the root of summed squares over batches;
- changed decisions of logits that the floor does not explain. A change is explained if fp32 has a smaller margin between the two
  classes than ``REACH`` lines times the floor of the row. A share of ``SLACK`` is allowed;
- changed integers, compared with the changes in the floor plus ``SLACK`` of all. If so many change in the floor that the line would
  be far even with all changed, integers are compared by value, as floating outputs are;
- infinite values and masks that are lost, compared with the floor plus ``SLACK`` of them.

The floor excuses an error only up to ``CONDITION`` eps of the format, relative to the spread of the outputs: of a row's logits
around their mean, of scores and values around the mean of all. Beyond that the format is too coarse for the model or its inputs; of
integers, nothing can be said then. A plan passes only where it could have failed: no floor excuses all.

Outputs that are missing, or have another shape although rounding changes none, fail, unless it is so in less than half of the
batches: that may be one decision, such as a box more, and is undecided. Outputs that the plan alone returns fail.

Each ratio has a 95 % interval over batches. A plan passes if all intervals end below the line, and fails if one begins above it.
Rare damage makes intervals wide. So a plan also fails if at least two batches have errors beyond ``FAR`` lines of the largest
floor of a batch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from castwise.lab.serve.outputs import Difference, Kind, rank_correlation, rare, spread
from castwise.lab.timing.stats import LEVEL, Ratio, ratio_of_sums

Verdict = Literal["pass", "fail", "undecided"]

LINE = 4.0
"""A plan passes if its outputs' errors are at most this multiple of the floor.

Source: bench/bench_serving_parity.py, with planted failures, their sound twins and sound models of ``transformers``.
"""
REACH = 2.0
SLACK = 5e-3
RARE = 0.05
CONDITION = 8.0
FAR = 2.0
FP32_EPS = torch.finfo(torch.float32).eps


@dataclass(frozen=True)
class OutputError:
    """How one output under a plan differs from fp32's.

    The floor is the same difference between two fp32 runs, in one of which the weights and inputs are rounded at random to
    the plan's format.

    Attributes:
        name: The name of the output, such as ``logits`` or ``hidden_states.0``; a bare tensor is ``output``.
        kind: What the output is for: ``logits``, ``scores``, ``values`` or ``integers``.
        elements: The number of elements that were compared by value.
        error: The norm of the difference, divided by the norm of fp32's output. None for integers that were not compared by value.
        floor: The same for the floor.
        verdict: ``pass``, ``fail`` or ``undecided``.
        by: What decided: ``error``, ``decisions``, ``integers``, ``masks``, ``finite``, ``shape``, ``added`` or ``empty``.
        times: The quantity that decided, as a multiple of the floor.
        low: The lower end of the 95 % interval of ``times``.
        high: The upper end of the 95 % interval of ``times``.
        changed: The share of changed decisions: of the largest of a row of logits, or of integers.
        changed_by_rounding: The same share for the floor.
        unexplained: The share of changed decisions that rounding does not explain. None for other kinds than logits.
        top5_changed: The share of rows whose five largest logits changed.
        divergence: The mean KL divergence of the rows' probabilities from fp32's, in nats.
        divergence_p99: The 99th percentile of the KL divergence over rows.
        rank: Spearman's correlation of the scores with fp32's.
        rank_by_rounding: The same correlation for the floor.
        nonfinite: The number of elements that are NaN, or infinite where fp32's are finite.
        reshaped: The number of batches in which the output is missing or has another shape.
        lost: The share of infinite values and masks of fp32 that are neither that large nor of the same sign. None without any.
        coarse: Whether the format is too coarse for the model or its inputs: rounding them changes the outputs by more than
            8 eps of their spread, and only so much of the floor counts.
    """

    name: str
    kind: Kind
    elements: int
    error: float | None
    floor: float | None
    verdict: Verdict
    by: str
    times: float
    low: float
    high: float
    changed: float | None = None
    changed_by_rounding: float | None = None
    unexplained: float | None = None
    top5_changed: float | None = None
    divergence: float | None = None
    divergence_p99: float | None = None
    rank: float | None = None
    rank_by_rounding: float | None = None
    nonfinite: int = 0
    reshaped: int = 0
    lost: float | None = None
    coarse: bool = False

    def needed(self, batches: int, line: float) -> int | None:
        """Return the approximate number of batches that would decide; None if the output is decided or no number would.

        Args:
            batches: The number of batches that did not decide.
            line: The line.
        """
        reach = self.high - self.times if self.times < line else self.times - self.low
        distance = abs(line - self.times)
        unknown = self.by == "integers" and self.coarse
        if self.verdict != "undecided" or unknown or not distance or not math.isfinite(reach):
            return None
        return math.ceil(batches * max(1.0, (reach / distance) ** 2))

    def said(self, line: float) -> str:
        """Return a clause that says what decided.

        Args:
            line: The line.
        """
        if self.by == "finite":
            return (
                f"{self.name} has {self.nonfinite} values that are NaN, or infinite where fp32's are finite"
            )
        if self.by == "shape":
            return f"{self.name} is missing, or has another shape than in fp32, in {self.reshaped} of the batches"
        if self.by == "added":
            return f"{self.name} is returned under the plan, and not in fp32"
        if self.by == "empty":
            return f"{self.name} is empty"
        if self.by == "integers" and self.coarse:
            return (
                f"rounding the weights and inputs alone changes {self.changed_by_rounding:.0%} of the integers in {self.name} by much, so "
                "nothing can be said about them; compare the numbers from which they are made"
            )
        where = {"pass": "below", "fail": "above", "undecided": "on both sides of"}[self.verdict]
        if self.by == "decisions":
            low, high = (f"{end * SLACK / line:.2%}" for end in (self.low, self.high))
            return (
                f"{self.unexplained:.2%} of the decisions by {self.name} change where fp32 has a clear margin "
                f"(95 % interval {low} to {high}), {where} the {SLACK:.1%} that chance may explain"
            )
        times = (
            f"{self.times:.3g} times what rounding explains (95 % interval {self.low:.3g} to {self.high:.3g}), "
            f"{where} the line of {line:g}"
        )
        if self.by == "masks":
            return (
                f"{self.lost:.2%} of the infinite or masked values of {self.name} are lost; that is {times}"
            )
        if self.by == "integers":
            return f"{self.changed:.2%} of {self.name} change, {self.changed_by_rounding:.2%} by rounding alone; that is {times}"
        if self.coarse:
            return (
                f"rounding the weights and inputs alone changes {self.name} by {self.floor:.2g} of its norm, so the format is too "
                f"coarse for the model or its inputs; the error of {self.error:.2g} is {times}"
            )
        return f"the relative error of {self.name} is {self.error:.2g}, which is {times}"


def decide(
    name: str,
    kind: Kind,
    fp32: Sequence[torch.Tensor],
    plan: Sequence[Difference],
    floor: Sequence[Difference],
    line: float,
    eps: float,
) -> OutputError:
    """Decide about one output.

    Args:
        name: Its name.
        kind: What it is for.
        fp32: fp32's output of each batch.
        plan: The difference of the plan's output from fp32's, of each batch.
        floor: The difference that rounding makes, of each batch.
        line: The multiple of the floor up to which a plan passes.
        eps: The eps of the plan's format.
    """
    elements = sum(each.elements for each in plan)
    reshaped = sum(p.reshaped for p in plan)
    if reshaped and not any(f.reshaped for f in floor):
        return _missing(name, kind, reshaped, len(plan))
    masked = sum(p.masked for p in plan)
    if not elements and not masked:
        return OutputError(name, kind, 0, 0.0, 0.0, "pass", "empty", 0.0, 0.0, 0.0)
    ratios: dict[str, Ratio] = {}
    counted = 1.0
    changed, decisions = [f.changed for f in floor], [f.decisions for f in floor]
    some = [rare(x) for x in fp32] if kind == "integers" else []
    some = some if any(some) else decisions
    by_share = kind == "integers" and _can_fail(changed, some, line)
    if by_share:
        allowed = _allowed(changed, decisions, some, line)
        ratios["integers"] = ratio_of_sums([p.changed for p in plan], allowed)
    else:
        excused, counted = _excused(kind, fp32, plan, floor, eps, line)
        square = ratio_of_sums([p.error for p in plan], excused)
        ratios["error"] = Ratio(square.value**0.5, square.low**0.5, square.high**0.5, LEVEL, square.n)
    if kind == "logits":
        ratios["decisions"] = ratio_of_sums(
            [p.unexplained for p in plan], [SLACK / line * p.decisions for p in plan]
        )
    if masked:
        lost, masks = [f.lost for f in floor], [f.masked for f in floor]
        ratios["masks"] = ratio_of_sums([p.lost for p in plan], _allowed(lost, masks, masks, line))
    verdicts = {by: _verdict(ratio, line) for by, ratio in ratios.items()}
    if masked and not _can_fail(lost, masks, line):
        verdicts["masks"] = "undecided"
    if kind == "integers" and counted < 1.0:
        unknown = ratios.pop("error")
        ratios["integers"] = Ratio(unknown.value, unknown.low, math.inf, LEVEL, unknown.n)
        verdicts = {"integers": "undecided"}
    if kind != "integers" and _is_far(plan, [one / counted for one in excused], line):
        verdicts["error"] = "fail"
    nonfinite = sum(p.nonfinite for p in plan)
    if nonfinite:
        ratios["finite"], verdicts["finite"] = Ratio(math.inf, math.inf, math.inf, LEVEL, len(plan)), "fail"
    by = max(ratios, key=lambda each: (_ORDER.index(verdicts[each]), each == "finite", ratios[each].high))
    ratio = ratios[by]
    return OutputError(
        name, kind, elements, None if by_share else math.inf if nonfinite else _relative(plan),
        None if by_share else _relative(floor), verdicts[by], by, ratio.value, ratio.low, ratio.high, nonfinite=nonfinite,
        reshaped=reshaped, lost=sum(p.lost for p in plan) / masked if masked else None, coarse=counted < 1.0,
        **_decisions(kind, fp32, plan, floor),
    )  # fmt: skip


def added(name: str) -> OutputError:
    """Return the result of an output that is there under the plan alone."""
    return OutputError(name, "values", 0, math.inf, None, "fail", "added", math.inf, math.inf, math.inf)


def _missing(name: str, kind: Kind, batches: int, of: int) -> OutputError:
    """Return the result of an output that is not there under the plan, or has another shape, in some of the batches."""
    worst, few = math.inf, 2 * batches < of
    return OutputError(
        name, kind, 0, worst, None, "undecided" if few else "fail", "shape", worst, 0.0 if few else worst, worst, reshaped=batches,
    )  # fmt: skip


def _allowed(
    changed: Sequence[float], decisions: Sequence[int], some: Sequence[int], line: float
) -> list[float]:
    """Return how many changes count as one floor, of each batch: the share that rounding changes in all, and the slack.

    One batch's own share would be 0 or much more, by chance. The slack is at most ``RARE`` of what changes if all is lost.
    """
    count = max(1, sum(decisions))
    share = sum(changed) / count + min(SLACK, RARE * sum(some) / count) / line
    return [share * number for number in decisions]


def _can_fail(changed: Sequence[float], some: Sequence[int], line: float) -> bool:
    """Whether an output that is lost as a whole, with changes of ``some``, would be beyond the line, given what rounding changes."""
    return 2.0 * line * sum(changed) <= sum(some) or not sum(changed)


_ORDER = ("pass", "undecided", "fail")


def _verdict(ratio: Ratio, line: float) -> Verdict:
    return "pass" if ratio.high <= line else "fail" if ratio.low > line else "undecided"


def _excused(
    kind: Kind,
    fp32: Sequence[torch.Tensor],
    plan: Sequence[Difference],
    floor: Sequence[Difference],
    eps: float,
    line: float,
) -> tuple[list[float], float]:
    """Return the summed squares that excuse an error, of each batch, and which share of the floor they are.

    A constant, which has no floor, may be rounded to the format.
    """
    count = sum(p.elements for p in plan)
    centre = 0.0
    if kind != "logits" and count:
        centre = sum(float(torch.where(x.isfinite(), x, 0.0).sum()) for x in fp32) / count
    spreads, signals = [spread(x, kind, centre) for x in fp32], [p.signal for p in plan]
    floors = [f.error for f in floor]
    total, signal = math.fsum(floors), math.fsum(signals)
    # a constant, but for the rounding of fp32
    if not total or math.fsum(spreads) <= (2.0 * FP32_EPS) ** 2 * signal:
        return [eps**2 / 12.0 * size for size in signals], 1.0
    most = min(CONDITION * eps, 0.5 / line)  # so that an output that is lost as a whole fails
    counted = min(1.0, most**2 * math.fsum(spreads) / total)
    return [each * counted for each in floors], counted


def _is_far(plan: Sequence[Difference], excused: Sequence[float], line: float) -> bool:
    """Whether at least two batches have a mean squared error far beyond the largest that is excused in a batch."""
    most = max((one / p.elements for one, p in zip(excused, plan, strict=True) if p.elements), default=0.0)
    return sum(bool(p.elements) and p.error / p.elements > (FAR * line) ** 2 * most for p in plan) >= 2


def _relative(found: Sequence[Difference]) -> float:
    signal, error = (math.fsum(getattr(each, name) for each in found) for name in ("signal", "error"))
    return (error / signal) ** 0.5 if signal else 0.0 if not error else math.inf


def _decisions(
    kind: Kind, fp32: Sequence[torch.Tensor], plan: Sequence[Difference], floor: Sequence[Difference]
) -> dict[str, float | None]:
    out: dict[str, float | None] = {}
    count = sum(p.decisions for p in plan)
    if count:
        out["changed"] = sum(p.changed for p in plan) / count
        out["changed_by_rounding"] = sum(f.changed for f in floor) / count
    if kind == "logits":
        out["unexplained"] = sum(p.unexplained for p in plan) / max(1, count)
        tops = [p for p in plan if p.top is not None]
        if tops:
            out["top5_changed"] = sum(p.top or 0 for p in tops) / max(1, sum(p.decisions for p in tops))
        rows = [p.divergence.cpu() for p in plan if p.divergence is not None]
        if any(map(len, rows)):
            every = torch.cat(rows)
            out["divergence"] = float(every.mean())
            out["divergence_p99"] = float(every.kthvalue(math.ceil(0.99 * len(every))).values)
    if kind == "scores":
        out["rank"], out["rank_by_rounding"] = _rank(fp32, plan), _rank(fp32, floor)
    return out


def _rank(fp32: Sequence[torch.Tensor], found: Sequence[Difference]) -> float | None:
    scores = [each.output for each in found if each.output is not None]
    return rank_correlation(torch.cat([*fp32]), torch.cat(scores)) if len(scores) == len(fp32) else None
