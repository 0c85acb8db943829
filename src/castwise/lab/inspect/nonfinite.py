"""``first_nonfinite``: the first operator that made NaN or an infinity, and what cures it.

A forward and backward of a copy of the model runs with every operator watched. What is not finite is followed from operator to
operator (:mod:`castwise.lab.inspect.origins`), so that an infinity that goes away again, such as a mask's, is no fault, and
what reaches the loss, a gradient or a buffer is known by where it came up. Then each suspect is put to the test: with finite
values in the place of what it made the pass is finite, and without that it is not. Where there are several, the first of them
is reported.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor, nn

from castwise.core.plans.plan import Plan, as_plan
from castwise.core.plans.words import in_words
from castwise.errors import PlanError
from castwise.lab.inspect.causes import ADVICE
from castwise.lab.inspect.cures import TriedCure, try_cures
from castwise.lab.inspect.origins import Kind, Origin, OriginTrace
from castwise.lab.inspect.passes import Pass, Passes
from castwise.lab.inspect.trace import OperatorRun
from castwise.lab.inspect.values import Values, is_finite, is_floating
from castwise.lab.parity.together import together
from castwise.lab.passes.observers import Observer
from castwise.lab.passes.passes import at_scale
from castwise.lab.result import Result
from castwise.lab.timing.environment import environment

if TYPE_CHECKING:
    import os

MOST_SUSPECTS = 8
"""So often a pass is run again to find out which of several suspects it is."""


@dataclass(frozen=True)
class FirstNonfinite(Result):
    """The first operator that made something that is not finite; true where there is one.

    Attributes:
        plan: What the model ran by.
        reached: What is not finite: ``loss``, ``gradient of PATH``, ``buffer PATH``; empty where all is finite.
        origin: What it comes from: an ``operator``; ``data``, a ``parameter`` or a ``buffer`` that held it before; a ``constant``
            of the program; ``memory`` that was never written to; ``unseen`` code; empty for nothing.
        name: Of the data, the parameter or the buffer.
        operator: Base name of the ATen operator, such as ``exp``; of the first reader where no operator made it.
        module: Path of the module that it belongs to; "" is the model itself, or the loss.
        in_model: Whether it belongs to a call of the model, not to the loss around it.
        call: Number of the module's call, from 0 on.
        phase: ``forward``, ``backward``, or ``recomputation`` of what a checkpoint left out.
        source: Line of code, as ``model.py, line 12, in forward``; in backward that of the forward operator.
        code: What is written there.
        node: In backward the node of autograd, as ``LogBackward0``.
        forward: In backward the forward operator.
        nan: Whether NaN was made, else infinities.
        cause: What kind of cause, a key of ``castwise.lab.inspect.causes.ADVICE``, or ``loss scale`` or ``underflow``.
        why: It with numbers, a clause.
        inputs: What the operator was given.
        outputs: What it made of it.
        became_nan: Where infinities became NaN, as ``_softmax in blocks.0.attn``; empty where they did not.
        through: Modules that it passed through, in order.
        confirmed: Whether finite values in its place made the pass finite.
        others: Further operators that reach the loss or a gradient by themselves, as ``exp in blocks.3``.
        trials: Plans that were tried.
        advice: What to do where no plan cures it.
        loss: What the loss was, as text.
        loss_scale: That gradients were taken with, 1 without one.
        operators: How many ran.
        harmless: How many of them made something that is not finite and that went away again.
        workload: The model's class.
        device: That it ran on.
        ranks: Of several processes those on which something is not finite; the finding is that of the first of them.
        note: What else to know, in a sentence.
    """

    kind: ClassVar[str] = "nonfinite"
    plan: Plan
    reached: tuple[str, ...] = ()
    origin: str = ""
    name: str = ""
    operator: str = ""
    module: str = ""
    in_model: bool = False
    call: int = 0
    phase: str = ""
    source: str = ""
    code: str = ""
    node: str = ""
    forward: str = ""
    nan: bool = False
    cause: str = ""
    why: str = ""
    inputs: tuple[Values, ...] = ()
    outputs: tuple[Values, ...] = ()
    became_nan: str = ""
    through: tuple[str, ...] = ()
    confirmed: bool = False
    others: tuple[str, ...] = ()
    trials: tuple[TriedCure, ...] = ()
    advice: str = ""
    loss: str = ""
    loss_scale: float = 1.0
    operators: int = 0
    harmless: int = 0
    workload: str = ""
    device: str = "cpu"
    ranks: tuple[int, ...] = ()
    note: str = ""

    def __bool__(self) -> bool:
        """Whether something is not finite."""
        return bool(self.reached)

    @property
    def cure(self) -> Plan | None:
        """The plan that changes least of those that were tried and made the pass finite; None where none did."""
        good = [trial for trial in self.trials if trial.finite]
        narrow = [trial for trial in good if trial.what not in ("fp32", "fp64")]
        return next((trial.plan for trial in (*narrow, *good)), None)

    @property
    def answer(self) -> str:
        """The finding in a sentence or two."""
        from castwise.report.nonfinite import headline

        return headline(self._said())

    def _said(self) -> dict[str, Any]:
        own = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        cure = self.cure
        return own | {
            "plan": str(self.plan),
            "words": in_words(self.plan),
            "found": bool(self),
            "cure": None if cure is None else str(cure),
            **{key: [dataclasses.asdict(values) for values in own[key]] for key in ("inputs", "outputs")},
            "trials": [{**vars(trial), "plan": str(trial.plan)} for trial in self.trials],
        }

    def _fields(self) -> dict[str, Any]:
        return self._said() | {
            "answer": self.answer,
            "description": "",
            "environment": dataclasses.asdict(environment(self.device)),
        }

    def save(self, folder: str | os.PathLike[str]) -> Path:
        """Write ``nonfinite.json`` and the page ``nonfinite.html`` into a folder, which is made.

        Returns:
            The path of the page; where Jinja is missing a warning says so, and it is that of the JSON file.
        """
        return self._save(Path(folder) / "nonfinite.html", Path(folder) / "nonfinite.json")[0]


@dataclass
class _Seen:
    """A pass and where what is not finite in it came from."""

    reached: dict[str, tuple[Origin, ...]] = field(default_factory=dict)
    origins: list[Origin] = field(default_factory=list)
    loss: str = ""
    scale: float = 1.0
    operators: int = 0

    def is_finite(self, in_loss: bool) -> bool:
        """Whether everything is finite, or the loss, where it alone is asked about."""
        return "loss" not in self.reached if in_loss else not self.reached

    def keys(self, in_loss: bool) -> frozenset[int | str]:
        """What stands for the suspects in other passes."""
        return frozenset(origin.key for origin in self.suspects(in_loss))

    def suspects(self, in_loss: bool) -> list[Origin]:
        """What reaches the loss, or all there is; what the program means only where there is nothing else."""
        of_loss = self.reached.get("loss", ())
        found = of_loss if in_loss else dict.fromkeys(itertools.chain.from_iterable(self.reached.values()))
        return [origin for origin in found if not origin.given] or list(found)


def first_nonfinite(
    model: nn.Module,
    loss: Callable[[nn.Module, Any], Tensor],
    batch: Any,
    plan: Plan | str | os.PathLike[str] = "fp32",
    *,
    device: Any = None,
    seed: int | None = None,
    loss_scale: float | None = None,
    cures: bool = True,
    group: Any = None,
) -> FirstNonfinite:
    """Find the first operator, forward or backward, whose inputs are finite and whose output is not.

    Only what reaches the loss, a gradient of a parameter or a buffer counts. The pass runs on copies, several times: the model,
    random numbers and process-wide settings are as they were afterwards, also where it raises. Waits for the device at every
    operator.

    Args:
        model: In any state of training, in DistributedDataParallel or compiled too. One that is sharded is copied whole on every rank.
        loss: From the model and the batch a floating tensor with one element.
        batch: On any device.
        plan: What the model runs by.
        device: By default that of the model's parameters.
        seed: Of random draws; by default they go on from where the generators stand.
        loss_scale: In the place of the plan's first loss scale.
        cures: Whether to try which plans cure it: a smaller loss scale, one operator or region in fp32, bf16 in the place of fp16.
        group: The process group whose ranks call this together, each with its own batch; by default those of a model in
            DistributedDataParallel or sharded by FSDP2, and this process alone of any other. Ranks run by themselves, and the finding
            of the first rank that has one is returned on all.

    Returns:
        The finding: ``.operator``, ``.module``, ``.source``, ``.cause``, ``.cure``, ``.table()``; true where there is one.

    Raises:
        WorkloadError: A model that cannot be copied, or a loss that fails or is not differentiable.
        PlanError: A plan that does not fit the model, or a loss scale for a plan without one.
        DeviceError: The device cannot run the plan.
    """

    def given() -> tuple[Plan]:
        chosen = as_plan(plan)
        if loss_scale is None:
            return (chosen,)
        if chosen.loss_scale is None or not (math.isfinite(loss_scale) and loss_scale > 0):
            raise PlanError(
                f"first_nonfinite(loss_scale={loss_scale!r}) with plan {chosen}: needs a positive number, and a plan with a loss "
                "scale, such as fp16-mixed"
            )
        return (at_scale(chosen, float(loss_scale)),)

    with together(model, "first_nonfinite", group=group) as ranks:
        (chosen,) = ranks.alike("first_nonfinite", ("plan",), given)
        found = ranks.every(
            lambda: _find(Passes("first_nonfinite", ranks, loss, batch, device, seed), chosen, cures)
        )
    if ranks.size == 1:
        return found[0]
    bad = tuple(rank for rank, finding in enumerate(found) if finding)
    return dataclasses.replace(found[bad[0] if bad else 0], ranks=bad)


def _find(passes: Passes, plan: Plan, cures: bool) -> FirstNonfinite:
    seen = _look(passes, plan)
    common: dict[str, Any] = {
        "plan": plan,
        "reached": tuple(seen.reached),
        "loss": seen.loss,
        "loss_scale": seen.scale,
        "operators": seen.operators,
        "workload": type(passes.model).__name__,
        "device": str(passes.device),
        "harmless": len({origin.place for origin in seen.origins if origin.kind == "operator"}),
    }
    if not seen.reached:
        note = "Compiled code ran in eager mode: if only the compiled run is not finite, the compiler's code causes it."
        return FirstNonfinite(**common, note=note if passes.compiled else "")
    culprit, confirmed, others = _culprit(passes, plan, seen)
    if culprit is None:
        return FirstNonfinite(
            **common,
            origin="unseen",
            cause="unseen",
            why="none of the recorded operators made it",
            advice=ADVICE["unseen"],
        )
    reaching = {origin.place for origins in seen.reached.values() for origin in origins}
    common["harmless"] = len({
        o.place for o in seen.origins if o.kind == "operator" and o.place not in reaching
    })
    kind, why = _cause(culprit)
    trials: list[TriedCure] = []
    place = culprit.place
    if cures and culprit.kind in ("operator", "constant", "unseen"):
        scaled = place is not None and place.phase == "backward" and "loss" not in seen.reached
        trials = try_cures(plan, place, passes.model, lambda p: _look(passes, p, watch=False).reached, scaled)
    kind, why = _with_trials(kind, why, trials, seen.scale)
    return FirstNonfinite(
        **common,
        **_said(culprit),
        cause=kind,
        why=why,
        confirmed=confirmed,
        others=tuple(map(_where, others)),
        trials=tuple(trials),
        advice=ADVICE.get(kind, ADVICE["overflow"]),
    )


def _look(
    passes: Passes, plan: Plan, mended: frozenset[int | str] = frozenset(), *, watch: bool = True
) -> _Seen:
    """Run a pass; with ``watch`` every operator is looked at."""
    traces: list[OriginTrace] = []
    before: dict[str, bool] = {}

    def observe(model: nn.Module, batch: Any) -> Observer:
        before.update({name: is_finite(b) for name, b in model.named_buffers() if is_floating(b)})
        if watch:
            traces.append(OriginTrace(model, batch, mended))
        return traces[0] if watch else Observer()

    ran = passes.run(plan, observe)
    trace = traces[0] if traces else None
    bad = {
        name: () if trace is None else trace.origins_of(tensor) for name, tensor in _not_finite(ran, before)
    }
    return _Seen(
        bad,
        [] if trace is None else trace.origins,
        f"{float(ran.loss):.6g}",
        ran.scale,
        0 if trace is None else trace.count,
    )


def _not_finite(ran: Pass, before: dict[str, bool]) -> Iterator[tuple[str, Tensor]]:
    """What a pass left that is not finite and should be, by what it is called."""
    if not is_finite(ran.loss):
        yield "loss", ran.loss
    for name, parameter in ran.model.named_parameters():
        if parameter.grad is not None and not is_finite(parameter.grad):
            yield f"gradient of {name}", parameter.grad
    for name, buffer in ran.model.named_buffers():
        if before.get(name) and is_floating(buffer) and not is_finite(buffer):
            yield f"buffer {name}", buffer


def _culprit(passes: Passes, plan: Plan, first: _Seen) -> tuple[Origin | None, bool, Sequence[Origin]]:
    """The first origin without which the pass would be finite, whether that was seen, and others that it takes too.

    Where the loss is not finite it is asked about the loss alone: what backward makes comes later.
    """
    in_loss = "loss" in first.reached
    suspects = sorted(first.suspects(in_loss), key=lambda o: -1 if o.place is None else o.place.index)
    if not suspects:
        return None, False, ()
    keys = first.keys(in_loss)
    mended, seen = keys, first
    for _ in range(MOST_SUSPECTS):  # what was hidden behind them may come up then
        seen = _look(passes, plan, mended)
        fresh = seen.keys(in_loss)
        if seen.is_finite(in_loss) or fresh <= mended:
            break
        mended |= fresh
    chosen = suspects
    if len(suspects) > 1:
        needed = [
            o for o in suspects[:MOST_SUSPECTS] if o.key in _look(passes, plan, keys - {o.key}).keys(in_loss)
        ]
        chosen = needed or suspects  # of infinities that go away beside one another none is needed by itself
    return chosen[0], seen.is_finite(in_loss), chosen[1:]


def _cause(origin: Origin) -> tuple[str, str]:
    if origin.kind == "operator" and origin.why is not None:
        return origin.why.kind, origin.why.sentence
    if origin.kind in ("data", "parameter", "buffer"):
        what = "NaN" if origin.nan else "infinities"
        return origin.kind, f"{origin.name} holds {what} before the pass"
    return origin.kind if origin.kind in ADVICE else "unknown", {
        "constant": "the program sets the value itself, as a number or a tensor made in Python",
        "memory": "uninitialised memory is read",
        "unseen": "it was in an operator's input before any recorded operator returned it",
    }.get(origin.kind, "")


def _with_trials(kind: str, why: str, trials: Sequence[TriedCure], scale: float) -> tuple[str, str]:
    """What the trials say of the cause beside what the operator's inputs do."""
    good = next((trial.what for trial in trials if trial.finite), "")
    if good.startswith("a loss scale"):
        return "loss scale", f"{why}; at {good} in the place of {scale:g} all gradients are finite"
    if good and kind in ("0/0", "division by zero", "log of zero"):
        return "underflow", f"{why}, by underflow: in {good} they are not"
    return kind, why


def _said(origin: Origin) -> dict[str, Any]:
    kind: Kind = origin.kind
    place = origin.place
    said: dict[str, Any] = {
        "origin": kind,
        "name": origin.name,
        "nan": origin.nan,
        "through": tuple(dict.fromkeys(origin.modules))[:32],
        "became_nan": "" if origin.nan_place is None else _at(origin.nan_place),
    }
    if origin.why is not None:
        said |= {"inputs": origin.why.inputs, "outputs": origin.why.outputs}
    if place is None:
        return said
    return said | {
        "operator": place.operator,
        "module": place.module,
        "in_model": place.inside,
        "call": place.call,
        "phase": place.phase,
        "source": str(place.line or ""),
        "code": "" if place.line is None else place.line.text,
        "node": place.node,
        "forward": place.forward,
    }


def _where(origin: Origin) -> str:
    """An origin in a few words."""
    return origin.name if origin.place is None else _at(origin.place)


def _at(place: OperatorRun) -> str:
    inside = place.module or ("the model" if place.inside else "the loss")
    return f"{place.operator} in {inside}" + (f" ({place.phase})" if place.phase != "forward" else "")
