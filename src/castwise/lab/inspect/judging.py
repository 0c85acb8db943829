"""From what crossed in the passes of a comparison to what each call did: where an error arises, and where it passes through."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from castwise.lab.inspect.comparison import CallComparison, Side, Verdict
from castwise.lab.inspect.looks import Key, Look
from castwise.lab.inspect.runs import Difference, Run, differences
from castwise.lab.passes.observers import Call

LOSS = Call("(loss)", 0)
"""The code around the model: the loss."""
EXCESS = 4.0
"""An operator's own error above this many times the expected one does not come from the format's rounding."""
AMPLIFIES = 10.0
"""A call amplifies rounding if its expected error is this many times the rounding of its inputs."""
ROUNDING = 0.29
"""The root mean square of rounding to nearest, in units of eps: an even spread over half a unit to both sides is 1/sqrt(12)."""
HALF = 0.5
"""The most that rounding to nearest makes, in units of eps."""
MATTERS = 0.1
"""An own error below this share of the error at the same place is not what that comes from."""
MOSTLY = 0.5
"""An own error from this share of the error at the same place on is most of it."""


@dataclass(frozen=True)
class Own:
    """What the passes with given values saw: the second plan's own errors, and what is expected of rounding."""

    own: Look
    expected: Look
    ran_base: Run
    ran_own: Run
    ran_expected: Run


class _Mark(NamedTuple):
    """One tensor that a call makes: its name, its errors, and the eps of the format it is made in."""

    name: str
    error: Difference
    own: Difference | None
    expected: Difference | None
    eps: float

    @property
    def rounding(self) -> Difference:
        """What rounding it once makes: in the mean, and at most."""
        return Difference(ROUNDING * self.eps, HALF * self.eps)

    @property
    def explained(self) -> Difference:
        """What is expected of its call, its own rounding included."""
        expected = self.expected or Difference(0.0, 0.0)
        return Difference(*map(math.hypot, expected, self.rounding))

    @property
    def excesses(self) -> Difference:
        """How many times what is explained the own error is."""
        if self.own is None:
            return Difference(0.0, 0.0)
        both = zip(self.own, self.explained, strict=True)
        return Difference(*(own / explained if math.isfinite(explained) else 0.0 for own, explained in both))

    @property
    def excess(self) -> float:
        return max(self.excesses)

    @property
    def born(self) -> bool:
        """Whether either is far above what is explained, and not small beside the error there."""
        if self.own is None:
            return False
        each = zip(self.excesses, self.own, self.error, strict=True)
        return any(excess > EXCESS and own >= MATTERS * error for excess, own, error in each)


class Judge:
    """Says what each call did.

    Args:
        ran_a: The first plan's pass.
        ran_b: The second's.
        free: What the second's pass saw.
        own: What the passes with given values saw; None where there are none.
        eps: Of the format that each module computes in, by path.
        formats: That the second plan computes each module in, by path.
        bordered: Paths of modules whose inputs a plan casts.
    """

    def __init__(
        self,
        ran_a: Run,
        ran_b: Run,
        free: Look,
        own: Own | None,
        eps: Mapping[str, float],
        formats: Mapping[str, str],
        bordered: frozenset[str],
    ) -> None:
        self._a, self._own = ran_a, own
        self._free, self._eps, self._formats, self._bordered = free, eps, formats, bordered
        self._made: dict[tuple[Call, bool], list[_Mark]] = {}
        self._taken: dict[tuple[Call, bool], list[float]] = {}
        for key, error in free.errors.items():
            self._put(key, error)
        self._put_loss(ran_a, ran_b)
        self._put_weights(ran_a, ran_b)

    def calls(self) -> tuple[CallComparison, ...]:
        """All calls of the first plan's pass, the loss first, each with what it did."""
        return tuple(
            CallComparison(
                path=call.path,
                call=call.number,
                kind=self._a.kinds.get(call.path, "loss"),
                format=self._formats[self._module(call)],
                forward=self._side(call, False),
                backward=self._side(call, True),
            )
            for call in (LOSS, *self._a.callers)
        )

    def _module(self, call: Call) -> str:
        return "" if call is LOSS else call.path

    def _put(self, key: Key, error: Difference | None) -> None:
        """File an error under the call that made the tensor, and under the one that takes it."""
        call = key.point.call
        caller = self._a.callers.get(call) or LOSS
        from_callee = (key.point.side == "out") is not key.back
        maker, taker = (call, caller) if from_callee else (caller, call)
        own, expected = (
            (None, None)
            if self._own is None
            else (self._own.own.errors.get(key), self._own.expected.errors.get(key))
        )
        if error is None:
            return
        name = _name(key) if maker is call else f"{_name(key)} of {call.path or 'the model'}"
        mark = _Mark(name, error, own, expected, self._eps[self._module(maker)])
        if (
            not from_callee
            and call.path in self._bordered
            and own is not None
            and own.norm <= 2 * ROUNDING * self._eps[call.path]
        ):  # a cast, which the border of the call does
            inside = mark._replace(name=f"cast of its {_name(key)}", eps=self._eps[call.path])
            self._made.setdefault((call, key.back), []).append(inside)
            mark = mark._replace(own=Difference(0.0, 0.0))
        self._made.setdefault((maker, key.back), []).append(mark)
        if taker is not maker:
            self._taken.setdefault((taker, key.back), []).append(error.norm)

    def _put_loss(self, ran_a: Run, ran_b: Run) -> None:
        def apart(one: Run, other: Run) -> Difference:
            off = abs(one.loss - other.loss) / (abs(one.loss) or 1.0)
            return Difference(off, off) if math.isfinite(off) else Difference(math.inf, math.inf)

        own = expected = None
        if self._own is not None:
            own = apart(self._own.ran_base, self._own.ran_own)
            expected = apart(self._own.ran_base, self._own.ran_expected)
        mark = _Mark("the loss", apart(ran_a, ran_b), own, expected, self._eps[""])
        self._made.setdefault((LOSS, False), []).append(mark)

    def _put_weights(self, ran_a: Run, ran_b: Run) -> None:
        """File the gradient of each parameter under the first call of its module, or of the nearest one above that was called."""
        free = differences(ran_b.gradients, ran_a.gradients)
        own: dict[str, Difference | None] = {}
        expected: dict[str, Difference | None] = {}
        if self._own is not None:
            base = self._own.ran_base.gradients
            own, expected = (
                differences(ran.gradients, base) for ran in (self._own.ran_own, self._own.ran_expected)
            )
        for name, error in free.items():
            path, _, last = name.rpartition(".")
            while path and Call(path, 0) not in self._a.callers:
                path, _, above = path.rpartition(".")
                last = f"{above}.{last}"
            if error is not None:
                mark = _Mark(
                    f"gradient of {last}",
                    error,
                    own.get(name),
                    expected.get(name),
                    self._eps[path],
                )
                self._made.setdefault((Call(path, 0), True), []).append(mark)

    def _side(self, call: Call, back: bool) -> Side:
        made = self._made.get((call, back), [])
        incoming = max(self._taken.get((call, back), []), default=None)
        if not made:
            return Side("unseen", incoming=incoming)
        error = max(mark.error.norm for mark in made)
        known = [mark for mark in made if mark.own is not None]
        if not known:
            return Side("exact" if error == 0.0 else "unseen", error, incoming)
        worst = max(known, key=lambda mark: (mark.born, mark.excess, mark.error.norm))
        assert worst.own is not None
        which = 1 if worst.born and worst.excesses.norm <= EXCESS else 0
        where = f"largest element of {worst.name}" if which else worst.name
        return Side(
            _verdict(known, worst, error, incoming),
            error,
            incoming,
            worst.own[which],
            worst.explained[which],
            where,
        )


def _verdict(made: Sequence[_Mark], worst: _Mark, error: float, incoming: float | None) -> Verdict:
    own = max(mark.own.norm for mark in made if mark.own is not None)
    if worst.born:
        return "born"
    if error == own == 0.0:
        return "exact"
    grown = error > 2 * (incoming or 0.0)
    if grown and any(mark.expected and mark.expected.norm > AMPLIFIES * mark.rounding.norm for mark in made):
        return "amplifies"
    return "rounding" if own >= MOSTLY * error else "passes"


def _name(key: Key) -> str:
    at = f" {key.point.at}" if key.point.at else ""
    return f"{'gradient of ' if key.back else ''}{'input' if key.point.side == 'in' else 'output'}{at}"


def suspects(calls: Sequence[CallComparison], count: int) -> Iterator[CallComparison]:
    """Modules to try in another format: where an error arises, else those with the largest own errors; each once."""
    seen: set[str] = set()
    born = sorted((call for call in calls if call.born), key=lambda call: -call.excess)
    for call in born or sorted(calls, key=lambda call: -call.own):
        if (
            call.path not in seen
            and call.path not in ("", LOSS.path)
            and call.own > 0.0
            and len(seen) < count
        ):
            seen.add(call.path)
            yield call
