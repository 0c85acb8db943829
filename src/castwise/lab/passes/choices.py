"""Compare the discrete choices of a reference run in fp32 with those of a run in a lower format.

A *choice* is an integer or boolean tensor that an operator computes from floating tensors: an index, a mask, an order, a route.
A choice has no gradient, so a comparison of gradients can miss a wrong choice. Near a tie (two experts with equal scores, a mask
at 0), rounding alone changes a choice, in fp32 too, and does no harm.

A changed element is *wrong* if rounding does not explain the change. To find out, the operator runs again in fp32 on the
reference's inputs, moved towards the inputs of the lower format. If the result is still the reference's, the change is wrong.
The inputs move by at most

- ``TOLERANCE`` * eps standard deviations, plus the rounding of the element's distance from the mean;
- half a unit, if the operator converts the numbers themselves to integers (``.long()``);
- nothing, if the input consists of whole numbers and the lower format has another whole number there. Since earlier choices are
  the reference's, such a number was computed wrong: positions above 256 in bf16, or above 2048 in fp16, are.

Whole numbers in floating format are choices too, where an operator rounds to them (``floor``, ``sign``, ``%``) and where Python
reads one (``int(mask.sum())``).

Each operator is judged alone: the run in the lower format continues with the reference's choices, as it does with the
reference's random draws.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from castwise.core import _torch
from castwise.core.casting.trees import map_tensors, tensors_in
from castwise.core.devices import widest_dtype
from castwise.core.plans.formats import FORMATS, LOW_DTYPES, Format
from castwise.core.plans.plan import Plan
from castwise.lab.passes.observers import Args, Kwargs, Observer, Run

TOLERANCE = 8.0
WRONG = 5e-3
"""A choice is wrong if more than this share of its elements is wrong."""
LEAST = 2
"""A choice is wrong only if at least this many of its elements are wrong."""
LARGEST = 1 << 24
"""Choices from more elements than this are not compared."""
LOSS = "(loss)"
_WHOLE = ("floor", "ceil", "round", "trunc", "sign", "sgn", "heaviside", "fmod", "remainder", "floor_divide")
"""Operators that round to whole numbers, if their input or another argument lets them."""
_NOT_CHOSEN = ("empty", "new_empty", "view", "_scaled_dot", "cudnn", "_cudnn", "miopen")


@dataclass(frozen=True)
class Choice:
    """The integer or boolean results of one operator that differ between fp32 and a plan.

    Such a result is a choice that the model makes, for example an ``argmax``, a mask or a route. A small difference
    is harmless if rounding explains it, as when two scores are nearly equal.

    Attributes:
        path: The path of the module whose code calls the operator. It is empty for the model itself, and ``(loss)``
            for the code of the loss.
        operator: The name of the operator, such as ``argmax``.
        elements: The number of integers or booleans that were compared.
        changed: The number of elements that differ from those in fp32.
        wrong: The number of elements that differ by more than rounding explains.
    """

    path: str
    operator: str
    elements: int
    changed: int
    wrong: int

    @property
    def share(self) -> float:
        """The share of the compared elements that differ from those in fp32."""
        return self.changed / self.elements

    @property
    def is_wrong(self) -> bool:
        """Whether the elements that rounding does not explain are too many for chance.

        At least two elements, and more than 0.5 % of all compared elements, must differ by more than rounding
        explains.
        """
        return self.wrong >= LEAST and self.wrong > WRONG * self.elements

    @property
    def what(self) -> str:
        """The operator's name, or "conversion to integers" for ``_to_copy`` and "item" for a number that Python reads."""
        names = {"_to_copy": "conversion to integers", "_local_scalar_dense": "item"}
        return names.get(self.operator, self.operator)

    def said(self, format: str) -> str:
        """Return a sentence that says how the operator's results differ from those in fp32.

        Args:
            format: The name of the plan's lower format, which the sentence names.
        """
        return (
            f"{self.what} in {self.path or 'the model itself'} chooses differently in {format}: {self.changed / self.elements:.1%} of "
            f"its results differ from fp32's, {self.wrong / self.elements:.1%} by more than rounding explains"
        )

    def as_dict(self) -> dict[str, Any]:
        """Return the fields and the properties ``what``, ``share`` and ``is_wrong`` as a dictionary for reports."""
        said = {"what": self.what, "share": self.share, "is_wrong": self.is_wrong}
        return dataclasses.asdict(self) | said


class _Made(NamedTuple):
    """A choice that the reference made: the operator, copies of its arguments, and its integer and boolean results.

    The arguments are None if they have more than ``LARGEST`` elements.
    """

    path: str
    op: _torch.operators.OpOverload
    given: tuple[Args, Kwargs] | None
    results: list[Tensor]

    @property
    def is_choice(self) -> bool:
        """Whether the results are integers, booleans, or whole numbers in floating format."""
        return not any(
            t.is_floating_point() and bool((t != t.round()).any()) for t in self.results
        )  # NaN does not count as a whole number either


def _is_choice(op: _torch.operators.OpOverload, args: Args, kwargs: Kwargs) -> bool:
    """Whether an operator can choose (compute an index or a mask): it runs in forward, on floating tensors, without random draws."""
    return (
        _torch.autograd.graph_task_id() == -1
        and torch.Tag.nondeterministic_seeded not in op.tags
        and not op.overloadpacket.__name__.startswith(_NOT_CHOSEN)
        and any(t.is_floating_point() for t in tensors_in((args, kwargs)))
    )


def _chosen(op: _torch.operators.OpOverload, out: Any) -> list[Tensor]:
    """Return the integer and boolean tensors of an operator's result, or what may be whole numbers in floating format.

    Bytes count only as the result of a conversion. Elsewhere they are workspaces of kernels.
    """
    if op is _torch.operators.READ:
        return [torch.tensor(out, dtype=torch.float64, device="cpu")]
    name = op.overloadpacket.__name__
    return [
        t
        for t in tensors_in(out)
        if not (t.is_complex() or (t.is_floating_point() and name.rstrip("_") not in _WHOLE))
        and t.layout is torch.strided
        and (t.dtype is not torch.uint8 or name == "_to_copy")
    ]


class Choices(Observer):
    """Records the discrete choices (indices, masks) of a reference's forward pass.

    Attributes:
        tape: Each possible choice of the last pass, in order.
    """

    def __init__(self) -> None:
        self.tape: list[_Made] = []

    @property
    def chose(self) -> bool:
        """Whether the last pass made a choice."""
        return any(made.is_choice for made in self.tape)

    def around(self, model: nn.Module) -> contextlib.AbstractContextManager[object]:
        """Clear what the previous pass of the model left, and observe the next."""
        self.tape = []
        return super().around(model)

    def modules(self, model: nn.Module) -> Iterable[tuple[str, nn.Module]]:
        """Return all modules, so that it is known whose code calls an operator."""
        yield from model.named_modules()

    def operator(self, run: Run, op: _torch.operators.OpOverload, args: Args, kwargs: Kwargs) -> Any:
        """Run an operator, and record its integer and boolean results."""
        out = run(op, args, kwargs)
        if _is_choice(op, args, kwargs) and (results := _chosen(op, out)):
            path = self.running[-1].path if self.running else LOSS
            small = sum(t.numel() for t in tensors_in((args, kwargs))) <= LARGEST
            given = map_tensors(lambda t: t.detach().clone(), (args, kwargs)) if small else None
            self.tape.append(_Made(path, op, given, [t.clone() for t in results]))
        return out


class Changes(Observer):
    """Compares the discrete choices of a forward pass with recorded choices, and replaces them by the recorded choices.

    Args:
        tape: The choices that :class:`Choices` recorded.
        format: The coarsest format of the plan.

    Attributes:
        counts: By path and operator, numbers of elements compared, changed and wrong.
    """

    def __init__(self, tape: list[_Made], format: Format) -> None:
        self._tape, self._format = tape, format
        self._rest: list[_Made] = []
        self.counts: dict[tuple[str, str], Counter[str]] = {}

    def around(self, model: nn.Module) -> contextlib.AbstractContextManager[object]:
        """Clear what the previous pass of the model left, and observe the next."""
        self._rest, self.counts = [*self._tape], {}
        return super().around(model)

    def operator(self, run: Run, op: _torch.operators.OpOverload, args: Args, kwargs: Kwargs) -> Any:
        """Run an operator, and compare and replace its integer and boolean results."""
        out = run(op, args, kwargs)
        if not self._rest or not _is_choice(op, args, kwargs) or not (results := _chosen(op, out)):
            return out
        made = self._rest.pop(0)
        if made.op is not op or len(made.results) != len(results):
            self._rest = []  # the code took another branch
            return out
        if made.given is None or not made.is_choice:
            return out
        count = self.counts.setdefault((made.path, op.overloadpacket.__name__), Counter())
        again: list[Tensor] | None = None
        for at, (theirs, ours) in enumerate(zip(made.results, results, strict=True)):
            count["elements"] += theirs.numel()
            changed = _differ(ours, theirs)
            if bool(changed.any()):
                if again is None:
                    again = self._moved(made, args, kwargs, len(results))
                count["changed"] += int(changed.sum())
                count["wrong"] += int((changed & ~_differ(again[at], theirs)).sum())
            if ours.shape == theirs.shape:
                ours.copy_(theirs)  # a low format rounds whole numbers that it cannot hold
            else:
                self._rest = []
        return float(made.results[0]) if op is _torch.operators.READ else out

    def _moved(self, made: _Made, args: Args, kwargs: Kwargs, count: int) -> list[Tensor]:
        """Run the reference's operator again on moved inputs, and return its integer and boolean results.

        The reference's inputs are moved towards ``args`` and ``kwargs``, the arguments in the lower format, as far as rounding
        explains.
        """
        assert made.given is not None
        low = iter(tensors_in((args, kwargs)))
        converts = made.op.overloadpacket.__name__ == "_to_copy"

        def move(wide: Tensor) -> Tensor:
            moved = next(low, wide)
            if not wide.is_floating_point() or moved.shape != wide.shape:
                return wide
            return _towards(wide, moved, self._format, converts)

        wide, kwargs = map_tensors(move, made.given)
        dtype = next((t.dtype for t in tensors_in(args) if t.dtype in LOW_DTYPES), torch.float64)
        # a low kernel rounds a threshold too
        wide = tuple(
            float(torch.tensor(a, dtype=dtype, device="cpu")) if isinstance(a, float) else a for a in wide
        )
        return _chosen(made.op, made.op(*wide, **kwargs))


def _differ(ours: Tensor, theirs: Tensor) -> Tensor:
    """Return a mask of the elements that differ; every element differs if the shapes do."""
    return ours != theirs if ours.shape == theirs.shape else torch.ones_like(theirs, dtype=torch.bool)


def _towards(wide: Tensor, low: Tensor, format: Format, converts: bool) -> Tensor:
    """Move the numbers of ``wide`` towards those of ``low``, by at most what rounding to a format explains.

    With ``converts``, the numbers are converted to integers, so they move by at most half a unit.
    """
    x, y = (tensor.to(widest_dtype(tensor.device)) for tensor in (wide, low))
    finite = torch.isfinite(x) & torch.isfinite(y)
    if not bool(finite.any()):
        return wide
    known = x[finite]
    if bool((known == known.round()).all()):
        return torch.where(finite & (y != y.round()), y, x).to(wide.dtype)
    mean = known.mean()
    spread = known.std() if known.numel() > 1 else known.abs()
    most = format.eps * (TOLERANCE * spread + (x - mean).abs())
    if converts:
        most = most.clamp_max(0.5)
    return torch.where(finite, x + (y - x).clamp(-most, most), x).to(wide.dtype)


def changed_choices(passes: Iterable[Changes]) -> tuple[Choice, ...]:
    """Return the operators whose integer or boolean results differ from fp32's in any of the passes; wrong results come first."""
    total: dict[tuple[str, str], Counter[str]] = {}
    for one in passes:
        for place, count in one.counts.items():
            total.setdefault(place, Counter()).update(count)
    found = [
        Choice(*place, count["elements"], count["changed"], count["wrong"])
        for place, count in total.items()
        if count["changed"]
    ]
    return tuple(sorted(found, key=_order))


def worst_choices(by_rank: Iterable[Iterable[Choice]]) -> tuple[Choice, ...]:
    """Merge the ranks' comparisons of integer and boolean results: for each operator, keep that of the worst rank.

    Wrong results come first.
    """
    worst: dict[tuple[str, str], Choice] = {}
    for choice in itertools.chain.from_iterable(by_rank):
        place = choice.path, choice.operator
        worst[place] = min(worst.get(place, choice), choice, key=_order)
    return tuple(sorted(worst.values(), key=_order))


def _order(choice: Choice) -> tuple[bool, float, float]:
    return not choice.is_wrong, -choice.wrong / choice.elements, -choice.share


def lowest_format(plan: Plan) -> Format | None:
    """Return the format with the fewest digits in which a plan computes, or None if no format has fewer than fp32."""
    format = max((FORMATS[name] for name in plan.formats), key=lambda format: format.eps)
    return format if format.eps > FORMATS["fp32"].eps else None
