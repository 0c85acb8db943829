"""Define the result of ``compare``, and merge the results of several ranks."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from castwise.core.plans.plan import Plan
from castwise.core.plans.words import in_words
from castwise.core.ranks.text import named
from castwise.lab.passes.choices import Choice, worst_choices
from castwise.lab.result import Result

if TYPE_CHECKING:
    from rich.console import RenderableType

Effect = Literal["born", "kernel", "amplifies", "rounding", "passes", "exact", "unseen"]


@dataclass(frozen=True)
class Side:
    """The error of one module call in one direction, forward or backward.

    The error of a tensor is relative: ``||b - a|| / ||a||``. Here ``a`` is the tensor under the reference plan, and
    ``b`` is the tensor under the second plan. If a call has several tensors, the tensor with the largest error
    counts. Rounding to a format explains an error of a certain size. An error above that size has another cause.

    Attributes:
        effect: What the call does to the error, as one of the following words. ``born``: the call makes an error that
            rounding to its format does not explain. ``kernel``: the call makes such an error, but only because
            torch's kernels for layers, such as layer norm, round more than their results. ``amplifies``: the call
            magnifies rounding errors. ``rounding``: most of the error is the rounding of the call itself. ``passes``:
            most of the error comes from the inputs. ``exact``: the plans do not differ. ``unseen``: nothing could be
            compared.
        error: The error of the call's results. In forward, the results are its outputs. In backward, they are the
            gradients of its inputs and parameters.
        incoming: The error of the tensors that the call receives. In forward, the call receives its inputs. In
            backward, it receives the gradients of its outputs.
        own: The error that the call itself makes. It is measured on the inputs that the call had under the reference
            plan.
        expected: The size of ``own`` that rounding to the call's format explains.
        where: The tensor that ``own`` and ``expected`` refer to. If the text says "largest element of", both are
            ``max |b - a| / max |a|``, which shows an error in few elements.
        rank: The rank with the worst result, if several processes took part. None for one process.
    """

    effect: Effect
    error: float | None = None
    incoming: float | None = None
    own: float | None = None
    expected: float | None = None
    where: str = ""
    rank: int | None = None

    @property
    def excess(self) -> float:
        """The error that the call itself makes, divided by the error that rounding explains.

        It is 0 if either error is missing or 0.
        """
        return self.own / self.expected if self.own and self.expected else 0.0


@dataclass(frozen=True)
class CallComparison:
    """The comparison of one call of one module under two plans.

    Attributes:
        path: The path of the module. It is empty for the model itself, and ``(loss)`` for the code of the loss.
        call: The number of this call among the calls of the same module, from 0.
        kind: The name of the module's class.
        format: The format in which the second plan computes the module.
        forward: The error of the forward pass.
        backward: The error of the backward pass.
    """

    path: str
    call: int
    kind: str
    format: str
    forward: Side
    backward: Side

    @property
    def born(self) -> bool:
        """Whether the call makes an error, forward or backward, that rounding to its format does not explain."""
        return "born" in (self.forward.effect, self.backward.effect)

    @property
    def in_kernels(self) -> bool:
        """Whether the call makes large errors only because of rounding inside torch's kernels.

        Rounding of the call's results to their format does not explain these errors.
        """
        return not self.born and "kernel" in (self.forward.effect, self.backward.effect)

    @property
    def excess(self) -> float:
        """The error that the call itself makes, divided by the error that rounding explains.

        It is the larger :attr:`Side.excess` of forward and backward.
        """
        return max(self.forward.excess, self.backward.excess)

    @property
    def own(self) -> float:
        """The relative error that the call itself makes, the larger of forward and backward."""
        return max(self.forward.own or 0.0, self.backward.own or 0.0)


@dataclass(frozen=True)
class TriedExemption:
    """The errors that remain when the second plan runs with one module in the reference plan's format.

    :func:`castwise.compare` tries this for the modules that make the largest errors.

    Attributes:
        path: The path of the module.
        plan: The changed second plan that was tried, as text.
        loss_error: The relative difference of the loss from the loss under the reference plan.
        output_error: The relative error of the model's outputs.
        gradient_error: The relative error of all parameter gradients together.
        reason: Why the changed plan could not be tried. Empty if it was tried.
    """

    path: str
    plan: str
    loss_error: float | None = None
    output_error: float | None = None
    gradient_error: float | None = None
    reason: str = ""


@dataclass(frozen=True)
class Comparison(Result):
    """The result of :func:`castwise.compare`: which module calls make errors under a second plan.

    A plan decides in which formats a model computes and stores its weights. :func:`castwise.compare` runs two plans
    on one batch, and takes the first plan as the reference. All errors are relative: the norm of the difference from
    the reference, divided by the norm of the reference.

    Attributes:
        workload: The name of the model's class.
        plan_a: The reference plan.
        plan_b: The plan that is compared with the reference plan.
        losses: The two losses, under ``plan_a`` and under ``plan_b``.
        output_error: The relative error of the model's outputs. None if no output can be compared.
        gradient_error: The relative error of all parameter gradients together. None if no parameter is trained.
        calls: One :class:`~castwise.inspection.comparison.CallComparison` for each call of a module. The loss comes
            first, then all calls in the order in which they started.
        tried: For each of the modules with the worst errors, the errors that remain if ``plan_b`` computes it in the
            format of ``plan_a``.
        parameters: The relative error of each parameter's gradient, by the parameter's path.
        loss_scale: The loss scale of the gradients under ``plan_b``. None if that plan has no loss scale.
        strayed: The number of random draws, such as dropout masks, that could not be repeated under the second plan.
        notes: What could not be observed, in sentences.
        passes: The number of forward and backward passes that were run.
        environment: The device and the versions of the first rank.
        ranks: The number of processes. With several, each figure is the worst rank's, but ``strayed`` and ``passes``
            are sums.
        choices: The operators with integer or boolean results, such as ``argmax``, whose results differ under
            ``plan_b``. Each is judged alone: all earlier integer or boolean results are replaced by those of
            ``plan_a``. Differences that rounding does not explain come first.
        collapsed: Which distinct values of an input of the model become equal under ``plan_b``, as a sentence without
            its full stop. Empty if the plan rounds no input, or no such values matter.
    """

    kind: ClassVar[str] = "compare"
    workload: str
    plan_a: Plan
    plan_b: Plan
    losses: tuple[float, float]
    output_error: float | None
    gradient_error: float | None
    calls: tuple[CallComparison, ...]
    tried: tuple[TriedExemption, ...]
    parameters: Mapping[str, float | None]
    loss_scale: float | None
    strayed: int
    notes: tuple[str, ...]
    passes: int
    environment: Mapping[str, Any]
    ranks: int = 1
    choices: tuple[Choice, ...] = ()
    collapsed: str = ""

    @property
    def birthplaces(self) -> tuple[CallComparison, ...]:
        """The module calls that make a larger error than rounding to their format explains.

        They are ordered by the error divided by the error that rounding explains, the largest first.
        """
        return tuple(sorted((c for c in self.calls if c.born), key=lambda c: -c.excess))

    @property
    def in_kernels(self) -> tuple[CallComparison, ...]:
        """The module calls that make a large error only because of rounding inside torch's kernels.

        They are ordered by the error divided by the error that rounding to the call's format explains, the largest
        first.
        """
        return tuple(sorted((c for c in self.calls if c.in_kernels), key=lambda c: -c.excess))

    @property
    def loss_error(self) -> float | None:
        """The difference of the two losses, divided by the loss under the reference plan.

        None if it is undefined, because the reference loss is 0 or a loss is not finite.
        """
        return relative(*self.losses)

    def _fields(self) -> dict[str, Any]:
        calls = [
            dataclasses.asdict(call)
            | {
                side: dataclasses.asdict(found) | {"excess": found.excess}
                for side, found in (("forward", call.forward), ("backward", call.backward))
            }
            for call in self.calls
        ]
        a, b = in_words(self.plan_a), in_words(self.plan_b)
        said: dict[str, Any] = {"plan_a": str(self.plan_a), "plan_b": str(self.plan_b), "calls": calls}
        said |= {"words_a": a, "words_b": b, "description": f"{b} against {a}"}
        said["choices"] = [choice.as_dict() for choice in self.choices]
        said["tried"] = [dataclasses.asdict(one) | {"words": in_words(one.plan)} for one in self.tried]
        said["birthplaces"] = [[call.path, call.call] for call in self.birthplaces]
        said["in_kernels"] = [[call.path, call.call] for call in self.in_kernels]
        return dataclasses.asdict(self) | said | {"loss_error": self.loss_error}

    def table(self, *, verbose: bool = False) -> RenderableType:
        """Return the answer and the calls with the largest errors, as text and tables for ``rich.print``.

        Args:
            verbose: Whether to list also the calls whose errors come from rounding inside torch's own kernels.
        """
        return super().table(verbose=verbose)

    def save(self, folder: str | os.PathLike[str]) -> Path:
        """Write ``compare.json`` and ``compare.html``, a page with plots, into a folder.

        Args:
            folder: The output folder, which is created if it does not exist.

        Returns:
            The path of the page. If matplotlib or Jinja is not installed, a warning is given, no page is written, and
            the path of the JSON file is returned.
        """
        return self._save(Path(folder) / "compare.html", Path(folder) / "compare.json")[0]


_SEVERITY: tuple[Effect, ...] = ("unseen", "exact", "passes", "rounding", "amplifies", "kernel", "born")


def worst_calls(by_rank: Sequence[Sequence[CallComparison]]) -> tuple[CallComparison, ...]:
    """Merge the calls of all ranks into one list, with the result of the worst rank for each call and direction.

    Calls that the first rank did not make come last.
    """
    found: dict[tuple[str, int], dict[int, CallComparison]] = {}
    for rank, calls in enumerate(by_rank):
        for call in calls:
            found.setdefault((call.path, call.call), {})[rank] = call

    def side(by: Mapping[int, Side]) -> Side:
        rank, one = max(
            by.items(),
            key=lambda item: (_SEVERITY.index(item[1].effect), item[1].excess, item[1].own or 0.0, item[1].error or 0.0),
        )  # fmt: skip
        return dataclasses.replace(one, rank=rank)

    return tuple(
        dataclasses.replace(
            next(iter(by.values())),
            forward=side({rank: call.forward for rank, call in by.items()}),
            backward=side({rank: call.backward for rank, call in by.items()}),
        )
        for by in found.values()
    )


def worst_of(found: Sequence[Comparison]) -> Comparison:
    """Merge the comparisons of all ranks into one, in which each figure is that of the rank where it is worst.

    All ranks must have tried the same modules in the first plan's format.
    """
    first = found[0]
    names = dict.fromkeys(name for one in found for name in one.parameters)
    return dataclasses.replace(
        first,
        losses=max((one.losses for one in found), key=lambda losses: _size(relative(*losses))),
        output_error=_largest(one.output_error for one in found),
        gradient_error=_largest(one.gradient_error for one in found),
        calls=worst_calls([one.calls for one in found]),
        tried=tuple(map(_worst_exemption, zip(*(one.tried for one in found), strict=True))),
        parameters={name: _largest(one.parameters.get(name) for one in found) for name in names},
        loss_scale=min((one.loss_scale for one in found if one.loss_scale is not None), default=None),
        strayed=sum(one.strayed for one in found),
        notes=said_by_rank([one.notes for one in found]),
        passes=sum(one.passes for one in found),
        ranks=len(found),
        choices=worst_choices(one.choices for one in found),
        collapsed=next((one.collapsed for one in found if one.collapsed), ""),
    )


def _worst_exemption(tried: tuple[TriedExemption, ...]) -> TriedExemption:
    return TriedExemption(
        tried[0].path,
        tried[0].plan,
        _largest(one.loss_error for one in tried),
        _largest(one.output_error for one in tried),
        _largest(one.gradient_error for one in tried),
        next((one.reason for one in tried if one.reason), ""),
    )


def _largest(values: Iterable[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)


def _size(value: float | None) -> float:
    return -1.0 if value is None else value


def said_by_rank(notes: Sequence[Sequence[str]]) -> tuple[str, ...]:
    """Return the notes of all ranks without duplicates; a note that not all ranks made starts with the ranks that did."""
    ranks: dict[str, list[int]] = {}
    for rank, said in enumerate(notes):
        for note in said:
            ranks.setdefault(note, []).append(rank)
    return tuple(
        note if len(having) == len(notes) else f"On {named(having)}: {note}" for note, having in ranks.items()
    )


def relative(one: float, other: float) -> float | None:
    """Return the relative difference of two numbers, |other - one| / |one|; None if it is undefined."""
    if one == other:
        return 0.0
    return abs(other - one) / abs(one) if one and math.isfinite(one) and math.isfinite(other) else None
