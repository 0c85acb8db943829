"""``first_nonfinite``: find the first operator that returned NaN or an infinity, and what cures it.

One forward and backward pass of a copy of the model runs with every operator observed. Non-finite values are followed from
operator to operator (:mod:`castwise.lab.inspect.origins`), and each non-finite loss, gradient or buffer is traced to its origin.
An infinity that vanishes again, such as that of a mask, is no fault. Each origin is a *suspect*, which is then tested: if
replacing its non-finite results with finite values makes the pass finite, it is confirmed. If several suspects are confirmed, the
first is reported.
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
"""How often a pass is repeated to find out which of several origins of non-finite values is the cause."""


@dataclass(frozen=True)
class FirstNonfinite(Result):
    """The result of :func:`castwise.first_nonfinite`: the first operator that returned NaN or an infinity.

    It also has the cause, and plans that were tried as cures. The result is true in an ``if`` statement when the
    loss, a gradient or a buffer was not finite, and false when all were finite.

    Attributes:
        plan: The plan that the model ran under.
        reached: Everything that is not finite, as ``loss``, ``gradient of PATH`` or ``buffer PATH``. Empty if all is
            finite.
        origin: The kind of place where the first non-finite value arose. ``operator``: an operator with finite
            inputs. ``data``, ``parameter`` or ``buffer``: it was not finite before the run. ``constant``: a constant
            of the program. ``memory``: uninitialised memory. ``unseen``: code that could not be observed. Empty if
            all is finite.
        name: The name of the data, parameter or buffer that was not finite before.
        operator: The base name of the ATen operator, such as ``exp``. If the origin is no operator, this is the first
            operator that read the non-finite value.
        module: The path of the module that called the operator. It is empty for the model itself and for the loss.
        in_model: Whether the operator ran in the model. Otherwise it ran in the loss function around the model.
        call: The number of the module's call in which the operator ran, from 0.
        phase: ``forward``, ``backward``, or ``recomputation`` of checkpointed activations.
        source: The place in the code, such as ``model.py, line 12, in forward``. In backward it is the place of the
            forward operator.
        code: The text of that line of code.
        node: In backward, the autograd node, such as ``LogBackward0``.
        forward: In backward, the operator of the forward pass to which the node belongs.
        nan: Whether the operator returned NaN. If not, it returned infinities.
        cause: The kind of cause. It is a key of ``castwise.lab.inspect.causes.ADVICE``, or ``loss scale``, or
            ``underflow``.
        why: The cause as part of a sentence, with numbers.
        inputs: Statistics of the operator's inputs.
        outputs: Statistics of the operator's results.
        became_nan: The operator in which infinities became NaN, such as ``_softmax in blocks.0.attn``. Empty if they
            did not.
        through: The paths of the modules that the non-finite values passed through, in order.
        confirmed: Whether the pass became finite when the operator's non-finite results were replaced with finite
            values.
        others: Other operators whose non-finite results reach the loss or a gradient independently, such as ``exp in
            blocks.3``.
        trials: The plans that were run as possible cures.
        advice: What to do if no plan is a cure.
        loss: The value of the loss, as text.
        loss_scale: The loss scale of the gradients. It is 1 under a plan without a loss scale.
        operators: The number of operators that ran.
        harmless: The number of operators whose non-finite results vanished again, such as those of a mask.
        workload: The name of the model's class.
        device: The device of the run.
        ranks: The ranks that have a non-finite value, if there are several processes. The result is that of the first
            such rank.
        note: A further remark, in a sentence.
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
        """Whether the loss, a gradient or a buffer is not finite."""
        return bool(self.reached)

    @property
    def cure(self) -> Plan | None:
        """The plan with the smallest change under which the loss, all gradients and all buffers were finite.

        None if no plan that was tried made them finite.
        """
        good = [cure for cure in self.trials if cure.finite]
        narrow = [cure for cure in good if cure.what not in ("fp32", "fp64")]
        return next((cure.plan for cure in (*narrow, *good)), None)

    @property
    def answer(self) -> str:
        """The result in one or two sentences."""
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
            "trials": [{**vars(cure), "plan": str(cure.plan)} for cure in self.trials],
        }

    def _fields(self) -> dict[str, Any]:
        return self._said() | {
            "answer": self.answer,
            "description": "",
            "environment": dataclasses.asdict(environment(self.device)),
        }

    def save(self, folder: str | os.PathLike[str]) -> Path:
        """Write ``nonfinite.json`` and ``nonfinite.html``, a page for a browser, into a folder.

        Args:
            folder: The output folder, which is created if it does not exist.

        Returns:
            The path of the page. If Jinja is not installed, a warning is given, no page is written, and the path of
            the JSON file is returned.
        """
        return self._save(Path(folder) / "nonfinite.html", Path(folder) / "nonfinite.json")[0]


@dataclass
class _Seen:
    """What one forward and backward pass showed: what was not finite, and where the non-finite values came from.

    Attributes:
        reached: The origins of each non-finite loss, gradient or buffer, by its name.
        origins: All origins of non-finite values, also of those that vanished again.
    """

    reached: dict[str, tuple[Origin, ...]] = field(default_factory=dict)
    origins: list[Origin] = field(default_factory=list)
    loss: str = ""
    scale: float = 1.0
    operators: int = 0

    def is_finite(self, in_loss: bool) -> bool:
        """Whether loss, gradients and buffers are finite; with ``in_loss``, only the loss is checked."""
        return "loss" not in self.reached if in_loss else not self.reached

    def keys(self, in_loss: bool) -> frozenset[int | str]:
        """Return keys of the operators and tensors that may have caused the non-finite values.

        The keys are the same in other passes of the search.
        """
        return frozenset(origin.key for origin in self.suspects(in_loss))

    def suspects(self, in_loss: bool) -> list[Origin]:
        """Return the origins of non-finite values that may be the cause: with ``in_loss`` those that reach the loss, else all.

        An infinity that the program intends, such as that of a mask, is included only if there is no other origin.
        """
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
    """Find the first operator, forward or backward, that turned finite inputs into NaN or an infinity.

    Use this when a loss or a gradient is NaN or infinite. The function also finds the cause, and by default tries
    plans that may be a cure. A plan decides the formats in which a model computes and stores its weights. An operator
    counts only if its non-finite values reach the loss, a parameter's gradient or a buffer.

    Forward and backward run several times, on copies. The model, the random generators and process-wide settings are
    unchanged when the function returns or raises. It waits for the device at every operator.

    Args:
        model: The model, in any training state. It may be compiled or in DistributedDataParallel. A sharded model is
            copied whole on every rank.
        loss: A function ``loss(model, batch)`` that returns a floating tensor with one element.
        batch: The batch, on any device.
        plan: The plan that the model runs under.
        device: The device of the run. By default it is the device of the model's parameters.
        seed: The seed of random draws. By default the generators continue from their present state.
        loss_scale: A loss scale that replaces the plan's initial loss scale.
        cures: Whether to try plans that may make the pass finite. These have a smaller loss scale, one operator or
            module in fp32, or bf16 instead of fp16.
        group: The process group whose ranks call this function together, each with its own batch. By default it is
            the group of a model in DistributedDataParallel or sharded by FSDP2. Otherwise this process runs alone.
            The ranks run independently, and all return the result of the first rank that has a non-finite value.

    Returns:
        The result, which is true in an ``if`` statement when there is a non-finite value. Its main parts are
        ``.operator``, ``.module``, ``.source``, ``.cause``, ``.cure`` and ``.table()``.

    Raises:
        WorkloadError: The model cannot be copied, or the loss fails or is not differentiable.
        PlanError: The plan does not fit the model, or ``loss_scale`` is given for a plan without a loss scale.
        DeviceError: The device cannot run the plan.
    """

    def given() -> tuple[Plan]:
        chosen = as_plan(plan)
        if loss_scale is None:
            return (chosen,)
        if chosen.loss_scale is None or not (math.isfinite(loss_scale) and loss_scale > 0):
            raise PlanError(
                f"first_nonfinite(loss_scale={loss_scale!r}) with plan {chosen}: loss_scale must be a positive finite number, and "
                "the plan must have a loss scale, as fp16-mixed has"
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
        note = "Compiled code ran in eager mode: if only the compiled run is not finite, the compiler's code is the cause."
        return FirstNonfinite(**common, note=note if passes.compiled else "")
    culprit, confirmed, others = _culprit(passes, plan, seen)
    if culprit is None:
        return FirstNonfinite(
            **common,
            origin="unseen",
            cause="unseen",
            why="no recorded operator made the first non-finite value",
            advice=ADVICE["unseen"],
        )
    reaching = {origin.place for origins in seen.reached.values() for origin in origins}
    common["harmless"] = len({
        o.place for o in seen.origins if o.kind == "operator" and o.place not in reaching
    })
    kind, why = _cause(culprit)
    tried: list[TriedCure] = []
    place = culprit.place
    if cures and culprit.kind in ("operator", "constant", "unseen"):
        scaled = place is not None and place.phase == "backward" and "loss" not in seen.reached
        tried = try_cures(plan, place, passes.model, lambda p: _look(passes, p, watch=False).reached, scaled)
    kind, why = _with_cures(kind, why, tried, seen.scale)
    return FirstNonfinite(
        **common,
        **_said(culprit),
        cause=kind,
        why=why,
        confirmed=confirmed,
        others=tuple(map(_where, others)),
        trials=tuple(tried),
        advice=ADVICE.get(kind, ADVICE["overflow"]),
    )


def _look(
    passes: Passes, plan: Plan, mended: frozenset[int | str] = frozenset(), *, watch: bool = True
) -> _Seen:
    """Run forward and backward, and return what was not finite.

    With ``watch``, every operator is observed, so that the origins of the non-finite values are known.

    The non-finite results of the origins whose keys are in ``mended`` are replaced by finite values.
    """
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
    """Yield the names and values of the loss, the gradients and the buffers that are not finite after a pass.

    Buffers that were not finite before the pass are left out.
    """
    if not is_finite(ran.loss):
        yield "loss", ran.loss
    for name, parameter in ran.model.named_parameters():
        if parameter.grad is not None and not is_finite(parameter.grad):
            yield f"gradient of {name}", parameter.grad
    for name, buffer in ran.model.named_buffers():
        if before.get(name) and is_floating(buffer) and not is_finite(buffer):
            yield f"buffer {name}", buffer


def _culprit(passes: Passes, plan: Plan, first: _Seen) -> tuple[Origin | None, bool, Sequence[Origin]]:
    """Find out which of the origins of non-finite values is the cause, by running again with finite values in their place.

    If the loss is not finite, only the loss is tested, since the backward pass runs later.

    Returns:
        The first origin that is a cause, or None; whether the pass became finite when all suspected origins were replaced; and the
        other origins that are causes too.
    """
    in_loss = "loss" in first.reached
    suspects = sorted(first.suspects(in_loss), key=lambda o: -1 if o.place is None else o.place.index)
    if not suspects:
        return None, False, ()
    keys = first.keys(in_loss)
    mended, seen = keys, first
    for _ in range(MOST_SUSPECTS):  # fixing these origins may reveal others
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
        chosen = needed or suspects  # no single one is needed if, say, two infinities cancel
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
        "unseen": "an operator received the non-finite value, but no recorded operator returned it",
    }.get(origin.kind, "")


def _with_cures(kind: str, why: str, tried: Sequence[TriedCure], scale: float) -> tuple[str, str]:
    """Refine the kind and the description of a cause by what the cures show: a loss scale that is too large, or underflow."""
    good = next((cure.what for cure in tried if cure.finite), "")
    if good.startswith("a loss scale"):
        return "loss scale", f"{why}; with {good} instead of {scale:g} all gradients are finite"
    if good and kind in ("0/0", "division by zero", "log of zero"):
        return "underflow", f"{why}; the cause is underflow: with {good} the result is finite"
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
    """Describe in a few words where a non-finite value came from, such as ``exp in blocks.3``."""
    return origin.name if origin.place is None else _at(origin.place)


def _at(place: OperatorRun) -> str:
    inside = place.module or ("the model" if place.inside else "the loss")
    return f"{place.operator} in {inside}" + (f" ({place.phase})" if place.phase != "forward" else "")
