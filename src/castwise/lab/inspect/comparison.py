"""What ``compare`` finds, as records."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from castwise.core.plans.plan import Plan
from castwise.core.plans.words import in_words
from castwise.core.ranks.text import named
from castwise.lab.result import Result

Verdict = Literal["born", "amplifies", "rounding", "passes", "exact", "unseen"]


@dataclass(frozen=True)
class Side:
    """What one direction shows at a call. Errors are relative: ``||b - a|| / ||a||`` of a tensor, the worst of those concerned.

    Attributes:
        verdict: ``born``: the call makes an error that rounding to its format does not explain. ``amplifies``: its error is that of
            rounding, which it makes much larger. ``rounding``: it is rounding, and most of it its own. ``passes``: most of it came
            in. ``exact``: no difference. ``unseen``: nothing could be compared.
        error: Of what the call makes: its outputs; in backward the gradients of its inputs and parameters.
        incoming: Of what it was given: its inputs; in backward the gradients of its outputs.
        own: Of what it makes when it is given what the first plan's run had.
        expected: The own error that rounding to the format explains.
        where: The tensor that ``own`` and ``expected`` are about; where it is said to be the largest element of one, they are
            ``max |b - a| / max |a|``, by which an error in few elements shows.
        rank: Of several processes the one that this was found on, which is the worst of all; None of a single one.
    """

    verdict: Verdict
    error: float | None = None
    incoming: float | None = None
    own: float | None = None
    expected: float | None = None
    where: str = ""
    rank: int | None = None

    @property
    def excess(self) -> float:
        """How many times the expected error the own one is; 0 where there is none."""
        return self.own / self.expected if self.own and self.expected else 0.0


@dataclass(frozen=True)
class CallComparison:
    """One call of one module under both plans.

    Attributes:
        path: Of the module, empty for the model, ``(loss)`` for the code around it.
        call: Which of its calls, from 0.
        kind: The module's class.
        format: That the second plan computes it in.
    """

    path: str
    call: int
    kind: str
    format: str
    forward: Side
    backward: Side

    @property
    def born(self) -> bool:
        """Whether an error arises here, in either direction."""
        return "born" in (self.forward.verdict, self.backward.verdict)

    @property
    def excess(self) -> float:
        """The larger excess of the two directions."""
        return max(self.forward.excess, self.backward.excess)

    @property
    def own(self) -> float:
        """The larger own error of the two directions."""
        return max(self.forward.own or 0.0, self.backward.own or 0.0)


@dataclass(frozen=True)
class TriedExemption:
    """The second plan with one module computing as under the first: what is left of the errors at the end.

    Attributes:
        path: Of the module.
        plan: That was tried.
        loss_error: Relative difference of the loss.
        output_error: Of the model's outputs.
        gradient_error: Of all gradients together.
        reason: Why it could not be tried; else empty.
    """

    path: str
    plan: str
    loss_error: float | None = None
    output_error: float | None = None
    gradient_error: float | None = None
    reason: str = ""


@dataclass(frozen=True)
class Comparison(Result):
    """What :func:`castwise.compare` found.

    Attributes:
        workload: Class of the model.
        plan_a: The reference.
        plan_b: What is compared with it.
        losses: Under the first plan and the second.
        output_error: Of the model's outputs; None where it has none that can be compared.
        gradient_error: Of all parameters' gradients together; None where nothing is trained.
        calls: In the order in which they began; the code of the loss first.
        tried: Modules in which an error arises or is largest, given the first plan's format.
        parameters: By path, the relative error of each gradient.
        loss_scale: That the second plan's gradients were taken with; None without one.
        strayed: Random draws that could not be replayed.
        notes: What could not be seen, in sentences.
        passes: Forward/backwards it took.
        environment: What it ran on, on the first rank.
        ranks: Processes that made it together. Each figure is that of the worst of them; ``strayed`` and ``passes`` are sums.
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

    @property
    def birthplaces(self) -> tuple[CallComparison, ...]:
        """The calls in which an error arises that rounding to the format does not explain, the furthest above it first."""
        return tuple(sorted((c for c in self.calls if c.born), key=lambda c: -c.excess))

    @property
    def loss_error(self) -> float | None:
        """Relative difference of the losses."""
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
        said["tried"] = [dataclasses.asdict(one) | {"words": in_words(one.plan)} for one in self.tried]
        births = [[call.path, call.call] for call in self.birthplaces]
        return dataclasses.asdict(self) | said | {"loss_error": self.loss_error, "birthplaces": births}

    def save(self, folder: str | os.PathLike[str]) -> Path:
        """Write ``compare.json`` and the page ``compare.html`` with its pictures into a folder, which is made.

        Returns:
            The page's path; where matplotlib or Jinja is missing there is no page, and it is that of the JSON.
        """
        return self._save(Path(folder) / "compare.html", Path(folder) / "compare.json")[0]


_SEVERITY: tuple[Verdict, ...] = ("unseen", "exact", "passes", "rounding", "amplifies", "born")


def worst_calls(by_rank: Sequence[Sequence[CallComparison]]) -> tuple[CallComparison, ...]:
    """Each call with what the worst rank found, forward and backward; those that some ranks alone made come last."""
    found: dict[tuple[str, int], dict[int, CallComparison]] = {}
    for rank, calls in enumerate(by_rank):
        for call in calls:
            found.setdefault((call.path, call.call), {})[rank] = call

    def side(by: Mapping[int, Side]) -> Side:
        rank, one = max(
            by.items(),
            key=lambda item: (_SEVERITY.index(item[1].verdict), item[1].excess, item[1].own or 0.0, item[1].error or 0.0),
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
    """One comparison of those of all ranks, which tried the same modules: each figure is the worst."""
    first = found[0]
    names = dict.fromkeys(name for one in found for name in one.parameters)
    return dataclasses.replace(
        first,
        losses=max((one.losses for one in found), key=lambda losses: _size(relative(*losses))),
        output_error=_largest(one.output_error for one in found),
        gradient_error=_largest(one.gradient_error for one in found),
        calls=worst_calls([one.calls for one in found]),
        tried=tuple(map(_worst_trial, zip(*(one.tried for one in found), strict=True))),
        parameters={name: _largest(one.parameters.get(name) for one in found) for name in names},
        loss_scale=min((one.loss_scale for one in found if one.loss_scale is not None), default=None),
        strayed=sum(one.strayed for one in found),
        notes=said_by_rank([one.notes for one in found]),
        passes=sum(one.passes for one in found),
        ranks=len(found),
    )


def _worst_trial(trials: tuple[TriedExemption, ...]) -> TriedExemption:
    return TriedExemption(
        trials[0].path,
        trials[0].plan,
        _largest(trial.loss_error for trial in trials),
        _largest(trial.output_error for trial in trials),
        _largest(trial.gradient_error for trial in trials),
        next((trial.reason for trial in trials if trial.reason), ""),
    )


def _largest(values: Iterable[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)


def _size(value: float | None) -> float:
    return -1.0 if value is None else value


def said_by_rank(notes: Sequence[Sequence[str]]) -> tuple[str, ...]:
    """The notes of all ranks, each once; with the ranks that have it where others have not."""
    ranks: dict[str, list[int]] = {}
    for rank, said in enumerate(notes):
        for note in said:
            ranks.setdefault(note, []).append(rank)
    return tuple(
        note if len(having) == len(notes) else f"On {named(having)}: {note}" for note, having in ranks.items()
    )


def relative(one: float, other: float) -> float | None:
    """|other - one| / |one| of two numbers; None where that is not a number."""
    if one == other:
        return 0.0
    return abs(other - one) / abs(one) if one and math.isfinite(one) and math.isfinite(other) else None
