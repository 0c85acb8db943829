"""Raise alarms when values of a training cross thresholds, with hysteresis.

An alarm is raised once when a value crosses its line, and again only after it was cleared. Of each kind at most one alarm is
open at a time. If several modules cross a line, the alarm names the worst.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from castwise.errors import PlanError, UnknownNameError
from castwise.lab.watch.records import Alarm


@dataclass(frozen=True)
class Line:
    """The two thresholds of an alarm: the value at which it is raised, and the value at which it is cleared.

    A value between the two does not change the alarm. If ``raise_at`` is larger than ``clear_at``, large values are
    bad. Otherwise small values are bad.

    Attributes:
        raise_at: The threshold beyond which a value is bad, which raises the alarm.
        clear_at: The threshold beyond which a value is good, which clears the alarm. "Beyond" means here away from
            ``raise_at``.
        patience: The number of bad values in a row that raise the alarm.

    Raises:
        PlanError: ``raise_at`` and ``clear_at`` are equal or not finite numbers, or ``patience`` is not an integer of
            at least 1.
    """

    raise_at: float
    clear_at: float
    patience: int = 1

    def __post_init__(self) -> None:
        """Validate the fields."""
        numbers = (self.raise_at, self.clear_at)
        if not all(
            isinstance(n, (int, float)) and not isinstance(n, bool) and math.isfinite(n) for n in numbers
        ):
            raise PlanError(f"{self!r}: raise_at and clear_at must be finite numbers")
        if self.raise_at == self.clear_at:
            raise PlanError(
                f"{self!r}: raise_at and clear_at must differ: clear_at is below raise_at if small values are good, else above"
            )
        if isinstance(self.patience, bool) or not isinstance(self.patience, int) or self.patience < 1:
            raise PlanError(f"{self!r}: patience must be a whole number >= 1")

    def is_bad(self, value: float) -> bool:
        """Return whether a value is bad, so that it raises the alarm. NaN is bad."""
        if math.isnan(value):
            return True
        return value > self.raise_at if self.raise_at > self.clear_at else value < self.raise_at

    def is_good(self, value: float) -> bool:
        """Return whether a value is good, so that it clears the alarm."""
        return value < self.clear_at if self.raise_at > self.clear_at else value > self.clear_at


LINES: Mapping[str, Line] = MappingProxyType({
    "skipped_in_a_row": Line(4.5, 0.5),
    "skipped_share": Line(0.2, 0.05),
    "loss_scale": Line(1.0, 8.0),
    "nonfinite": Line(0.5, 0.25),
    "near_overflow": Line(0.25, 0.125),
    "underflow": Line(0.01, 0.003, patience=2),
    "update_ratio": Line(0.2, 0.05, patience=3),
    "grad_norm": Line(100.0, 10.0),
    "lost_updates": Line(0.1, 0.05),
    "loss": Line(12.0, 6.0),
    "moved": Line(3.0, 1.0),
    "no_gradient": Line(0.5, 0.25, patience=4),
    "no_update": Line(0.5, 0.25, patience=4),
    "audit": Line(0.5, 0.25),
})
"""The kinds of alarms, and the default thresholds of each. The list says which value is compared with the thresholds.

- ``skipped_in_a_row``: the number of skipped steps in a row. Before the first step that is not skipped, while the loss scale is
still being searched, 16 are allowed.
- ``skipped_share``: the share of skipped steps among the last 64.
- ``loss_scale``: a dynamic loss scale, at each sample and each skipped step.
- ``nonfinite``: 1 if a step was not skipped although a gradient or an output is not finite.
- ``near_overflow``: the largest fp16 output of a module divided by 65504.
- ``underflow``: the ``underflow`` of a module (:class:`RegionSample`); damage below 0.01 does not show in training.
- ``update_ratio``: the ``update_ratio`` of a module.
- ``grad_norm``: the gradient norm divided by the median of the last 32 samples, from the ninth sample on.
- ``lost_updates``: the ``lost_updates`` over all modules. Training without fp32 master weights is worse if more than about 5 % are lost
(docs/numerics.md).
- ``loss``: how far a loss is above the median of earlier losses, in robust standard deviations. It counts if four losses in a
row are far above the median and above half of the first losses.
- ``moved``: how far the weights of a module moved since the previous sample, divided by the most that the optimizer's steps
explain.
- ``no_gradient``: 1 if all earlier samples of a module had a gradient, and now it has none, or less than 1e-4 of the smallest.
- ``no_update``: 1 if a step changed no weight although there are gradients. It is 0 after the learning rate has gradually
fallen to 0.
- ``audit``: 1 if an audit failed, 0 if it passed.
"""

_SAYS = {
    "skipped_in_a_row": (
        "{value:.0f} steps in a row were skipped because gradients were not finite{detail}. Check the data and the learning "
        "rate; castwise.first_nonfinite finds the operator"
    ),
    "skipped_share": (
        "{value:.0%} of the last 64 steps were skipped because gradients were not finite{detail}. Clip gradients, lower the "
        "learning rate or use a bf16 plan"
    ),
    "loss_scale": (
        "the loss scale has fallen to {value:g}: small gradients underflow in fp16. At every larger scale gradients "
        "overflow{detail}. Keep the modules that overflow in fp32 with a Region, or use a bf16 plan"
    ),
    "nonfinite": (
        "{where} had non-finite outputs or gradients in a step that was not skipped. castwise.first_nonfinite finds the "
        "operator"
    ),
    "near_overflow": (
        "outputs of {where} reach {value:.0%} of fp16's largest number, 65504. Run {where} in fp32, Region({region!r}, "
        "compute='fp32'), or use a bf16 plan"
    ),
    "underflow": (
        "rounding loses {value:.2g} of the squared norm of the gradients of the outputs of {where}. Use a larger loss scale, "
        "or run {where} in fp32, Region({region!r}, compute='fp32')"
    ),
    "update_ratio": (
        "one step changes the weights of {where} by {value:.2g} of their norm. Lower the learning rate, clip gradients, or warm "
        "up the learning rate"
    ),
    "grad_norm": (
        "the gradient norm is {value:.3g} times its median. Check the batch; clip gradients with amp.step(optimizer, "
        "max_norm=...)"
    ),
    "lost_updates": (
        "rounding drops {value:.0%} of the update: parameters are stored low without masters. Use a plan with masters, such as "
        "'bf16-master'"
    ),
    "loss": (
        "four losses in a row are far above the median, the last by {value:.3g} robust standard deviations. Check the data, the "
        "learning rate and what else writes to the weights"
    ),
    "moved": (
        "the weights of {where} have moved {value:.3g} times as far since the previous sample as the steps of the optimizer "
        "explain. Check what else writes to them, and the learning rate"
    ),
    "no_gradient": (
        "{where} no longer gets a gradient{detail}. Check for dead activations, detach() and no_grad(), and that the optimizer "
        "holds its parameters"
    ),
    "no_update": (
        "the steps of the optimizer change no weight although there are gradients. Check the learning rate and the optimizer's "
        "parameters"
    ),
    "audit": (
        "the plan's gradients now fail the comparison with fp32: {detail}. Tune again from these weights, or use an fp32 plan"
    ),
}


def lines_of(given: Mapping[str, Line | None] | None) -> dict[str, Line]:
    """Return the default lines, except those that ``given`` replaces or, with None, removes.

    Raises:
        UnknownNameError: A kind that does not exist.
        PlanError: A value that is not a line.
    """
    out = dict(LINES)
    if given is not None and not isinstance(given, Mapping):
        raise PlanError(f"Monitor(lines={given!r}): needs a mapping from kinds of alarms to Line or None")
    for kind, line in (given or {}).items():
        if kind not in LINES:
            raise UnknownNameError(f"Monitor(lines=...): no alarm {kind!r}; allowed: {', '.join(LINES)}")
        if line is None:
            del out[kind]
        elif isinstance(line, Line):
            out[kind] = line
        else:
            raise PlanError(
                f"Monitor(lines={{{kind!r}: {line!r}}}): needs castwise.lab.watch.Line(raise_at, clear_at) or None"
            )
    return out


@dataclass
class Alarms:
    """The alarms that are open, and the lines that raise them.

    Attributes:
        lines: The line of each kind of alarm.
        open: The open alarms, by kind and by the optimizer's index.
    """

    lines: Mapping[str, Line]
    open: dict[tuple[str, int], Alarm] = field(default_factory=dict)
    _bad: dict[tuple[str, int], int] = field(default_factory=dict)

    def see(
        self,
        kind: str,
        values: Mapping[str, float],
        step: int,
        optimizer: int = 0,
        detail: Callable[[], str] = str,
    ) -> Alarm | None:
        """Check the values of modules against the line of their kind; ``detail`` returns text to add to the alarm's message.

        Returns:
            The alarm that the values raised or cleared (then with ``cleared`` set); None if they did neither.
        """
        line = self.lines.get(kind)
        if line is None or not values:
            return None
        key = kind, optimizer
        low = line.raise_at < line.clear_at

        def badness(region: str) -> float:
            value = values[region]
            return math.inf if math.isnan(value) else -value if low else value

        region = max(values, key=badness)
        value = values[region]
        current = self.open.get(key)
        if current is not None:
            if not line.is_good(value):
                return None
            del self.open[key]
            self._bad.pop(key, None)
            return dataclasses.replace(current, cleared=step)
        self._bad[key] = self._bad.get(key, 0) + 1 if line.is_bad(value) else 0
        if self._bad[key] < line.patience:
            return None
        said = _SAYS[kind].format(value=value, region=region, where=region or "the model", detail=detail())
        alarm = self.open[key] = Alarm(kind, step, region, value, line.raise_at, said, optimizer=optimizer)
        return alarm

    def suspicious(self, optimizer: int) -> bool:
        """Whether some of the last values were bad, but too few in a row for an alarm."""
        return any(
            count > 0 and number == optimizer and (kind, number) not in self.open
            for (kind, number), count in self._bad.items()
        )

    def state(self) -> list[dict[str, Any]]:
        """Return the open alarms as plain values."""
        return [dataclasses.asdict(alarm) for alarm in self.open.values()]

    def load(self, state: list[dict[str, Any]]) -> None:
        """Restore open alarms."""
        alarms = [Alarm(**values) for values in state]
        self.open = {(alarm.kind, alarm.optimizer): alarm for alarm in alarms}
        self._bad = {}
