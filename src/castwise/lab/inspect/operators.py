"""``operator_table``: list which operators run in which format under a plan, and where casts are made.

The table also shows which casts are avoidable. A cast is avoidable if the same tensor was cast to the same format before in the
same phase, or if the cast reverses the previous cast with no computation in between.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from castwise.core import _torch
from castwise.core.casting.trees import tensors_in
from castwise.core.plans.formats import get_format
from castwise.core.plans.plan import Plan, as_plan
from castwise.core.plans.words import in_words
from castwise.core.ranks.text import named
from castwise.errors import UnknownNameError, check_count
from castwise.lab.inspect.passes import Passes
from castwise.lab.inspect.trace import OperatorRun, Phase, Trace
from castwise.lab.parity.together import together
from castwise.lab.passes.observers import Args, Kwargs, Run
from castwise.lab.result import Result
from castwise.lab.timing.environment import environment

if TYPE_CHECKING:
    import os

Avoidable = Literal["", "repeated", "round trip"]
"""``repeated``: the tensor was cast to that format before. ``round trip``: the tensor was just cast from that format."""

_CASTS = frozenset({"_to_copy", "copy_", "_foreach_copy_"})


@dataclass(frozen=True)
class OperatorUse:
    """All calls of one operator in one format and one phase of a training step.

    Attributes:
        operator: The base name of the ATen operator.
        format: The format of the operator's floating inputs, such as ``fp32``. Mixed inputs are written as
            ``bf16+fp32``. If no input is floating, the output's format is given, and ``other`` if the output is not
            floating either.
        phase: ``forward``, ``backward``, or ``recomputation`` of checkpointed activations.
        calls: The number of calls in one forward and backward pass.
        time_s: The total time in seconds. It includes the dispatcher's work below autograd.
    """

    operator: str
    format: str
    phase: Phase
    calls: int
    time_s: float


@dataclass(frozen=True)
class RegionUse:
    """The operators and casts in a module's own code, without those of its submodules.

    Attributes:
        path: The path of the module. It is empty for the model itself and for the loss.
        calls: The number of operator calls.
        time_s: The total time of the operators, in seconds.
        formats: The number of operator calls in each format.
        casts: The number of casts among these calls.
        cast_bytes: The number of bytes that the casts read and write.
        avoidable_bytes: The number of bytes that the avoidable casts read and write.
    """

    path: str
    calls: int
    time_s: float
    formats: dict[str, int]
    casts: int
    cast_bytes: int
    avoidable_bytes: int


@dataclass(frozen=True)
class CastUse:
    """All casts that one line of code in one module makes between the same two formats.

    Attributes:
        module: The path of the module.
        source: The line of code. In backward it is the line of the forward operator.
        phase: ``forward``, ``backward``, or ``recomputation`` of checkpointed activations.
        before: The format before the cast.
        after: The format after the cast.
        calls: The number of casts in one forward and backward pass.
        bytes: The number of bytes read and written.
        time_s: The total time in seconds.
        avoidable: Why the casts are avoidable. ``repeated``: the tensor was cast to that format before. ``round
            trip``: the tensor was just cast from that format. Empty if they are not avoidable.
        first: For avoidable casts, the path of the module that made the earlier cast of the tensor.
    """

    module: str
    source: str
    phase: Phase
    before: str
    after: str
    calls: int
    bytes: int
    time_s: float
    avoidable: Avoidable
    first: str = ""


@dataclass(frozen=True)
class OperatorTable(Result):
    """The result of :func:`castwise.operator_table`: the operators that ran in each format, and the casts between formats.

    Attributes:
        plan: The plan that the model ran under. A plan decides the formats in which a model computes and stores its
            weights.
        operators: One entry for each operator, format and phase (forward, backward or recomputation), sorted by time.
        regions: The operators and casts of each module, in model order.
        casts: The casts of each line of code. Avoidable casts come first, and then casts are sorted by bytes.
        views: The number of calls that only make views. These calls are not in the other figures.
        workload: The name of the model's class.
        device: The device of the run.
        notes: Further remarks, in sentences.
        rank: The rank that this table describes, which is the slowest rank. None for one process.
        ranks_time_s: The total operator time of each rank, in seconds.
    """

    kind: ClassVar[str] = "operators"
    plan: Plan
    operators: tuple[OperatorUse, ...]
    regions: tuple[RegionUse, ...]
    casts: tuple[CastUse, ...]
    views: int
    workload: str
    device: str
    notes: tuple[str, ...] = ()
    rank: int | None = None
    ranks_time_s: tuple[float, ...] = ()

    @property
    def time_s(self) -> float:
        """The total time of all operators in one forward and backward pass, in seconds."""
        return sum(use.time_s for use in self.operators)

    @property
    def cast_bytes(self) -> int:
        """The number of bytes that all casts together read and write."""
        return sum(cast.bytes for cast in self.casts)

    @property
    def avoidable(self) -> tuple[CastUse, ...]:
        """The casts that could be avoided, because they repeat an earlier cast or reverse the previous cast."""
        return tuple(cast for cast in self.casts if cast.avoidable)

    @property
    def answer(self) -> str:
        """The result in one sentence: each format's share of the operators, and the share of the casts."""
        from castwise.report.operators import headline

        return headline(self._said())

    def _said(self) -> dict[str, Any]:
        own = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        uses = {
            key: [dataclasses.asdict(use) for use in own[key]] for key in ("operators", "regions", "casts")
        }
        return own | uses | {
            "plan": str(self.plan), "words": in_words(self.plan), "time_s": self.time_s, "cast_bytes": self.cast_bytes,
        }  # fmt: skip

    def _fields(self) -> dict[str, Any]:
        return self._said() | {
            "answer": self.answer,
            "description": "",
            "environment": dataclasses.asdict(environment(self.device)),
        }

    def save(self, folder: str | os.PathLike[str]) -> Path:
        """Write ``operators.json`` and ``operators.html``, a page for a browser, into a folder.

        Args:
            folder: The output folder, which is created if it does not exist.

        Returns:
            The path of the page. If Jinja is not installed, a warning is given, no page is written, and the path of
            the JSON file is returned.
        """
        return self._save(Path(folder) / "operators.html", Path(folder) / "operators.json")[0]


@dataclass
class _Call:
    """One operator that ran, with its time and, if the operator is a cast, the formats and bytes of the cast."""

    place: OperatorRun
    format: str
    view: bool
    time_s: float = 0.0
    before: str = ""
    after: str = ""
    bytes: int = 0
    avoidable: Avoidable = ""
    first: str = ""

    @property
    def is_cast(self) -> bool:
        return bool(self.after)


class _Uses(Trace):
    """Records every operator that runs, with its time, and finds casts and whether they are avoidable."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.calls: list[_Call] = []
        self._waits = device.type != "cpu"
        self._cast: dict[tuple[Any, ...], str] = {}
        self._cast_from: dict[Any, tuple[int, str, str]] = {}

    def operator(self, run: Run, op: _torch.operators.OpOverload, args: Args, kwargs: Kwargs) -> Any:
        """Run an operator, and record its format and time and, if it is a cast, the cast."""
        place = self.place(op)
        given = [t for t in tensors_in((args, kwargs)) if t.is_floating_point()]
        dtypes = {tensor.dtype for tensor in given}
        keys = [_key(tensor) for tensor in given] if place.operator in _CASTS else []
        self._wait()
        start = time.perf_counter()
        out = run(op, args, kwargs)
        self._wait()
        spent = time.perf_counter() - start
        made = [t for t in tensors_in(out) if t.is_floating_point()]
        call = _Call(place, _format(dtypes or {t.dtype for t in made}), _torch.tensors.is_view(op), spent)
        if place.operator == "_to_copy" and given and made:
            self._note_cast(call, given[0], keys[0], made[0])
        elif place.operator == "copy_" and len(given) == 2:
            self._note_cast(call, given[1], keys[1], given[0])
        self.calls.append(call)
        return out

    def _wait(self) -> None:
        if self._waits:
            torch.accelerator.synchronize()

    def _note_cast(self, call: _Call, source: Tensor, key: tuple[Any, ...], target: Tensor) -> None:
        if source.dtype is target.dtype:
            return
        call.before, call.after = _name(source.dtype), _name(target.dtype)
        call.format = call.before
        call.bytes = source.numel() * (source.element_size() + target.element_size())
        place = call.place
        version, before, first = self._cast_from.get(_torch.tensors.memory_of(source), (-1, "", ""))
        if (version, before) == (_torch.tensors.version(source), call.after):
            call.avoidable, call.first = "round trip", first
        known = (*key, call.after, place.phase)
        if known in self._cast:
            call.avoidable, call.first = "repeated", self._cast[known]
        else:
            self._cast[known] = place.module
        self._cast_from[_torch.tensors.memory_of(target)] = (
            _torch.tensors.version(target),
            call.before,
            place.module,
        )


def operator_table(
    model: nn.Module,
    loss: Callable[[nn.Module, Any], Tensor],
    batch: Any,
    plan: Plan | str | os.PathLike[str] = "bf16-mixed",
    *,
    device: Any = None,
    seed: int | None = None,
    repeats: int = 3,
) -> OperatorTable:
    """Count and time the operators that run in each format under a plan, and find the casts between formats.

    A plan decides the formats in which a model computes and stores its weights. The result has figures for each
    operator, each module and each line of code that casts, in forward and backward. It also tells which casts could
    be avoided.

    The function runs a copy of the model and waits for the device at every operator. Compiled models run uncompiled.
    Compiling fuses operators and their casts, so the table describes the code as written.

    If the model is in DistributedDataParallel or sharded by FSDP2, all its ranks must call this function together.
    Each rank passes its own batch. All ranks get the slowest rank's table, which says whether other ranks ran other
    operators. Each rank runs a whole copy of the model, so the table contains no collectives.

    Args:
        model: The model, in any training state.
        loss: A function ``loss(model, batch)`` that returns a floating tensor with one element.
        batch: The batch, on any device.
        plan: The plan that the model runs under.
        device: The device of the run. By default it is the device of the model's parameters.
        seed: The seed of random draws. By default the generators continue from their present state.
        repeats: The number of timed passes, after one untimed pass. The fastest time of each call counts.

    Returns:
        The table. Its main parts are ``.operators``, ``.regions``, ``.casts``, ``.avoidable`` and ``.table()``.

    Raises:
        WorkloadError: The model cannot be copied, or the loss fails or is not differentiable.
        PlanError: The plan does not fit the model, or ``repeats`` is below 1.
        DeviceError: The device cannot run the plan.
    """

    def given() -> tuple[Plan]:
        check_count("operator_table", "repeats", repeats, 1)
        return (as_plan(plan),)

    with together(model, "operator_table") as ranks:
        (chosen,) = ranks.alike("operator_table", ("plan",), given)

        def table() -> OperatorTable:
            passes = Passes("operator_table", ranks, loss, batch, device, seed)
            runs = [_run(passes, chosen) for _ in range(repeats + 1)]
            return _table(passes, chosen, runs)

        return ranks.merge(ranks.each(table), _slowest)


def _table(passes: Passes, plan: Plan, runs: Sequence[list[_Call]]) -> OperatorTable:
    calls = runs[-1]
    for run in runs[1:-1]:
        if len(run) == len(calls):
            for call, other in zip(calls, run, strict=True):
                call.time_s = min(call.time_s, other.time_s)
    order = [path for path, _ in passes.model.named_modules()]
    seen = [call for call in calls if not call.view]
    return OperatorTable(
        plan,
        tuple(_operators(seen)),
        tuple(_regions(seen, order)),
        tuple(_casts(seen)),
        len(calls) - len(seen),
        type(passes.model).__name__,
        str(passes.device),
        tuple(_notes(passes, plan)),
    )


def _slowest(tables: Sequence[OperatorTable]) -> OperatorTable:
    """Return the table of the rank with the largest total time, with the total times of all ranks added."""
    times = tuple(table.time_s for table in tables)
    rank = times.index(max(times))
    own = _counts(tables[rank])
    others = [at for at, table in enumerate(tables) if _counts(table) != own]
    notes = tables[rank].notes
    if others:
        differing = dict.fromkeys(
            key[0] for at in others for key, _ in own.items() ^ _counts(tables[at]).items()
        )
        notes = (
            *notes,
            f"{named(others).capitalize()} ran different operators: {', '.join(sorted(differing)[:6])}.",
        )
    return dataclasses.replace(tables[rank], notes=notes, rank=rank, ranks_time_s=times)


def _counts(table: OperatorTable) -> dict[tuple[str, str, str], int]:
    return {(use.operator, use.format, use.phase): use.calls for use in table.operators}


def _run(passes: Passes, plan: Plan) -> list[_Call]:
    uses = _Uses(passes.device)
    passes.run(plan, lambda *_: uses)
    return uses.calls


def _operators(calls: Iterable[_Call]) -> list[OperatorUse]:
    found: dict[tuple[str, str, Phase], list[_Call]] = {}
    for call in calls:
        found.setdefault((call.place.operator, call.format, call.place.phase), []).append(call)
    uses = [OperatorUse(*key, len(many), sum(c.time_s for c in many)) for key, many in found.items()]
    return sorted(uses, key=lambda use: -use.time_s)


def _regions(calls: Iterable[_Call], order: list[str]) -> list[RegionUse]:
    found: dict[str, list[_Call]] = {path: [] for path in order}
    for call in calls:
        found[call.place.module].append(call)
    uses = []
    for path, many in found.items():
        formats: dict[str, int] = {}
        for call in many:
            formats[call.format] = formats.get(call.format, 0) + 1
        uses.append(
            RegionUse(
                path,
                len(many),
                sum(c.time_s for c in many),
                dict(sorted(formats.items())),
                sum(c.is_cast for c in many),
                sum(c.bytes for c in many),
                sum(c.bytes for c in many if c.avoidable),
            )
        )
    return [use for use in uses if use.calls]


def _casts(calls: Iterable[_Call]) -> list[CastUse]:
    found: dict[tuple[Any, ...], list[_Call]] = {}
    for call in calls:
        if call.is_cast:
            place = call.place
            key = (place.module, place.line, place.phase, call.before, call.after, call.avoidable, call.first)
            found.setdefault(key, []).append(call)
    uses = [
        CastUse(
            module=many[0].place.module,
            source=str(many[0].place.line or ""),
            phase=many[0].place.phase,
            before=many[0].before,
            after=many[0].after,
            calls=len(many),
            bytes=sum(c.bytes for c in many),
            time_s=sum(c.time_s for c in many),
            avoidable=many[0].avoidable,
            first=many[0].first,
        )
        for many in found.values()
    ]
    return sorted(uses, key=lambda use: (not use.avoidable, -use.bytes))


def _notes(passes: Passes, plan: Plan) -> Iterator[str]:
    if passes.device.type == "cpu" and "fp16" in plan.formats:
        yield "On a CPU fp16 matrix products are emulated, so their times are those of the emulation."
    if plan.compile != "as_given" or passes.compiled:
        yield "A compiler fuses operators and casts; this table shows the eager code."


def _key(tensor: Tensor) -> tuple[Any, ...]:
    """Return a key that identifies a tensor's present values: storage, offset, number of elements and version."""
    return (
        _torch.tensors.memory_of(tensor),
        tensor.storage_offset(),
        tensor.numel(),
        _torch.tensors.version(tensor),
    )


def _name(dtype: torch.dtype) -> str:
    try:
        return get_format(dtype).name
    except UnknownNameError:
        return str(dtype).removeprefix("torch.")


def _format(dtypes: set[torch.dtype]) -> str:
    return "+".join(sorted(map(_name, dtypes))) or "other"
