"""Attribute the differences between two plans to module calls: find which calls make errors and which pass errors on.

The *own error* of a call is the error that the call makes although it gets the first plan's inputs. The *expected error* is the
error that rounding to the call's format causes there (see :mod:`castwise.lab.inspect.compare`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from castwise.lab.inspect.comparison import CallComparison, Effect, Side
from castwise.lab.inspect.looks import Key, Look
from castwise.lab.inspect.runs import Difference, Run, differences
from castwise.lab.passes.observers import Call

LOSS = Call("(loss)", 0)
"""The code of the loss, outside the model."""
EXCESS = 4.0
"""An own error above this many times the expected error is not explained by the format's rounding."""
AMPLIFIES = 10.0
"""A call amplifies rounding if its expected error is this many times the rounding of its inputs."""
ROUNDING = 0.29
"""Root mean square error of rounding to nearest, in units of eps: a uniform error of up to half a unit has 1/sqrt(12)."""
HALF = 0.5
"""Largest error of rounding to nearest, in units of eps."""
MATTERS = 0.1
"""An own error below this share of the tensor's total error is too small to explain the total error."""
MOSTLY = 0.5
"""An own error of at least this share of the tensor's total error explains most of the total error. If exact kernels leave less
than this share of an own error, rounding inside the kernels explains that own error."""


@dataclass(frozen=True)
class Own:
    """The results of forward and backward passes in which each module call gets the inputs that it has under the first plan.

    Attributes:
        own: The errors that each call makes under the second plan.
        expected: The errors that rounding alone causes in each call.
        ran_base: The pass of the first plan, with which ``own`` and ``expected`` are compared.
        ran_own: The pass of the second plan.
        ran_expected: The pass of the first plan with perturbed inputs and weights.
        exact: As ``own`` with its pass, but with :class:`~castwise.lab.inspect.kernels.ExactKernels`; None if no such pass ran.
    """

    own: Look
    expected: Look
    ran_base: Run
    ran_own: Run
    ran_expected: Run
    exact: tuple[Look, Run] | None = None


class _Mark(NamedTuple):
    """One tensor that a call produces: its name, its errors, and the eps of the format in which the tensor is computed."""

    name: str
    error: Difference
    own: Difference | None
    expected: Difference | None
    eps: float
    exact: Difference | None = None

    @property
    def rounding(self) -> Difference:
        """The error of rounding the tensor once: root mean square, and maximum."""
        return Difference(ROUNDING * self.eps, HALF * self.eps)

    @property
    def explained(self) -> Difference:
        """The error that rounding explains: the call's expected error combined with rounding this tensor once."""
        expected = self.expected or Difference(0.0, 0.0)
        return Difference(*map(math.hypot, expected, self.rounding))

    @property
    def excesses(self) -> Difference:
        """The error that the call itself makes in this tensor, divided by the error that rounding explains."""
        return self._times_explained(self.own)

    @property
    def excess(self) -> float:
        return max(self.excesses)

    @property
    def unexplained(self) -> Effect | None:
        """The kind of error that the call itself makes in this tensor and that rounding does not explain; None if there is none.

        The error counts if its norm or its maximum is far above the explained error and is a notable share of the tensor's
        total error. The kind is ``kernel`` if exact kernels remove the error, and otherwise ``born``.
        """
        if self.own is None:
            return None
        far = [
            which
            for which, (excess, own, error) in enumerate(
                zip(self.excesses, self.own, self.error, strict=True)
            )
            if excess > EXCESS and own >= MATTERS * error
        ]
        if not far:
            return None
        left, exact = self._times_explained(self.exact), self.exact
        in_kernels = exact is not None and all(
            left[which] <= EXCESS and exact[which] <= MOSTLY * self.own[which] for which in far
        )
        return "kernel" if in_kernels else "born"

    def _times_explained(self, error: Difference | None) -> Difference:
        if error is None:
            return Difference(0.0, 0.0)
        both = zip(error, self.explained, strict=True)
        return Difference(*(own / explained if math.isfinite(explained) else 0.0 for own, explained in both))


_SEVERITY: Mapping[Effect | None, int] = {None: 0, "kernel": 1, "born": 2}


class Attribution:
    """Computes the error that each call of a module makes, passes on or amplifies.

    Args:
        ran_a: The pass under the first plan.
        ran_b: The pass under the second plan.
        free: Errors seen in the second plan's pass, in which each call gets the inputs of that pass.
        own: Results of the passes whose calls get the first plan's inputs; None without such passes.
        eps: By module path, the eps of the format that the module computes in.
        formats: By module path, the format that the second plan computes the module in.
        bordered: Paths of modules whose inputs a plan casts.
        lowered: Paths of modules that a region of the second plan computes in a lower format; their errors are the plan's, not
            those of torch's kernels.
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
        lowered: frozenset[str] = frozenset(),
    ) -> None:
        self._a, self._own = ran_a, own
        self._free, self._eps, self._formats = free, eps, formats
        self._bordered, self._lowered = bordered, lowered
        self._made: dict[tuple[Call, bool], list[_Mark]] = {}
        self._taken: dict[tuple[Call, bool], list[float]] = {}
        for key, error in free.errors.items():
            self._put(key, error)
        self._put_loss(ran_a, ran_b)
        self._put_weights(ran_a, ran_b)

    def calls(self) -> tuple[CallComparison, ...]:
        """Return every call of the first plan's pass with its errors; the loss comes first."""
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
        """Record a tensor's error at the call that produced the tensor and at the call that consumes the tensor."""
        call = key.point.call
        caller = self._a.callers.get(call) or LOSS
        from_callee = (key.point.side == "out") is not key.back
        maker, taker = (call, caller) if from_callee else (caller, call)
        own = expected = exact = None
        if self._own is not None:
            own, expected = self._own.own.errors.get(key), self._own.expected.errors.get(key)
            exact = self._own.exact and self._own.exact[0].errors.get(key)
        if error is None:
            return
        name = _name(key) if maker is call else f"{_name(key)} of {call.path or 'the model'}"
        mark = _Mark(name, error, own, expected, self._eps[self._module(maker)], exact)
        if (
            not from_callee
            and call.path in self._bordered
            and own is not None
            and own.norm <= 2 * ROUNDING * self._eps[call.path]
        ):  # the plan's cast of an input, which belongs to this call
            inside = mark._replace(name=f"cast of its {_name(key)}", eps=self._eps[call.path])
            self._made.setdefault((call, key.back), []).append(inside)
            mark = mark._replace(own=Difference(0.0, 0.0))
        self._made.setdefault((maker, key.back), []).append(mark)
        if taker is not maker:
            self._taken.setdefault((taker, key.back), []).append(error.norm)

    def _put_loss(self, ran_a: Run, ran_b: Run) -> None:
        def difference(one: Run, other: Run) -> Difference:
            off = abs(one.loss - other.loss) / (abs(one.loss) or 1.0)
            return Difference(off, off) if math.isfinite(off) else Difference(math.inf, math.inf)

        own = expected = exact = None
        if self._own is not None:
            base = self._own.ran_base
            own, expected = difference(base, self._own.ran_own), difference(base, self._own.ran_expected)
            exact = self._own.exact and difference(base, self._own.exact[1])
        mark = _Mark("the loss", difference(ran_a, ran_b), own, expected, self._eps[""], exact)
        self._made.setdefault((LOSS, False), []).append(mark)

    def _put_weights(self, ran_a: Run, ran_b: Run) -> None:
        """Record the error of each parameter's gradient at the first call of the parameter's module.

        If that module is never called, the error is recorded at the first call of the nearest ancestor that is called.
        """
        free = differences(ran_b.gradients, ran_a.gradients)
        own: dict[str, Difference | None] = {}
        expected: dict[str, Difference | None] = {}
        exact: dict[str, Difference | None] = {}
        if self._own is not None:
            base = self._own.ran_base.gradients
            own, expected = (
                differences(ran.gradients, base) for ran in (self._own.ran_own, self._own.ran_expected)
            )
            exact = differences(self._own.exact[1].gradients, base) if self._own.exact else {}
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
                    exact.get(name),
                )
                self._made.setdefault((Call(path, 0), True), []).append(mark)

    def _side(self, call: Call, back: bool) -> Side:
        made = self._made.get((call, back), [])
        incoming = max(self._taken.get((call, back), []), default=None)
        if not made:
            return Side("unseen", incoming=incoming)
        error = max(mark.error.norm for mark in made)
        if call.path in self._lowered:
            made = [mark._replace(exact=None) for mark in made]
        known = [mark for mark in made if mark.own is not None]
        if not known:
            return Side("exact" if error == 0.0 else "unseen", error, incoming)
        worst = max(known, key=lambda mark: (_SEVERITY[mark.unexplained], mark.excess, mark.error.norm))
        assert worst.own is not None
        which = 1 if worst.unexplained and worst.excesses.norm <= EXCESS else 0
        where = f"largest element of {worst.name}" if which else worst.name
        return Side(
            _effect(known, worst, error, incoming),
            error,
            incoming,
            worst.own[which],
            worst.explained[which],
            where,
        )


def _effect(made: Sequence[_Mark], worst: _Mark, error: float, incoming: float | None) -> Effect:
    own = max(mark.own.norm for mark in made if mark.own is not None)
    if worst.unexplained:
        return worst.unexplained
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
    """Yield at most ``count`` calls, whose modules are then tried in another format.

    They are calls that make an error which rounding does not explain. If there are none, they are the calls that make the largest
    errors themselves. Each module occurs once.
    """
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
