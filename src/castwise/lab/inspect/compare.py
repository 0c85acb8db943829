"""``compare``: compare two plans call by call, and find the calls that make errors and the calls that pass errors on.

Five passes run forward and backward over one batch, at the same weights and random draws:

1. The first plan, which is the reference. Every value and gradient that enters or leaves a module call is kept.
2. The second plan. The difference of each such tensor from pass 1 is its *error*. It contains the call's own error and the
   error of the call's inputs.
3. The first plan again. Each call gets its inputs from pass 1, rounded to the formats of pass 2, so errors of earlier
   calls do not reach it. This pass is the reference for each call in isolation.
4. The second plan, where each call gets the same inputs as in pass 3. The difference of a call's output from pass 3 is the
   call's *own* error: the rounding inside that call, outside the calls nested in it.
5. The first plan, where each call gets the inputs of pass 3. Inputs and weights are perturbed at random by half a unit in the
   last place of the second plan's compute format. The change is the *expected* error, which rounding to that format causes in
   this call, with the conditioning of the computation.

6. Only if the model makes discrete choices (indices, masks, orders): the second plan, with its choices replaced by those of
   pass 1. This pass shows which choices differ, and which differ by more than rounding explains
   (:mod:`castwise.lab.passes.choices`).

If a call makes an error that rounding does not explain, pass 4 runs again with torch's own kernels made exact
(:class:`~castwise.lab.inspect.kernels.ExactKernels`). An error that then vanishes comes from rounding inside these kernels.

An own error far above the expected error is made in that call and is not explained by the format. If the expected error is
far above the rounding of the inputs, the call amplifies rounding errors in any implementation.

Source: TTrace (arXiv 2506.09280) derives tolerances from perturbed inputs and isolates a module by giving it the reference's input.
"""

from __future__ import annotations

import dataclasses
import math
import zlib
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from castwise.core.model.resolve import Resolution
from castwise.core.model.rounding import collapse
from castwise.core.plans.formats import FORMATS, LOW, LOW_DTYPES
from castwise.core.plans.plan import Plan, Region, as_plan
from castwise.core.session.process import find_device
from castwise.errors import CastwiseError, NonFiniteError, check_count, sentence, told
from castwise.lab.inspect.attribution import Attribution, Own, suspects
from castwise.lab.inspect.comparison import (
    CallComparison,
    Comparison,
    TriedExemption,
    relative,
    worst_calls,
    worst_of,
)
from castwise.lab.inspect.kernels import ExactKernels
from castwise.lab.inspect.looks import Key, Look
from castwise.lab.inspect.runs import Run, Runs, differences, total_difference
from castwise.lab.parity.parity import device_of, with_scale
from castwise.lab.parity.probes import dithered
from castwise.lab.parity.together import together
from castwise.lab.passes.choices import Changes, Choice, Choices, changed_choices, lowest_format
from castwise.lab.passes.observers import Call
from castwise.lab.timing.environment import Environment, environment

TRIES = 2
ROOM = 4.0
"""The loss scale is chosen so that the largest gradient stays this factor below overflow."""


def compare(
    model: nn.Module,
    loss: Callable[[nn.Module, Any], Tensor],
    batch: Any,
    plan_a: Plan | str,
    plan_b: Plan | str,
    *,
    device: torch.device | str | None = None,
    seed: int = 0,
    tries: int = TRIES,
) -> Comparison:
    """Compare a plan with a reference plan on one batch, and find the module calls that make the errors.

    A plan decides the formats in which a model computes and stores its weights. Use this when a model trains worse
    under one plan than under another. The result has an entry for each call of a module, forward and backward. It
    tells whether the call itself makes an error or only passes on the errors of earlier calls.

    Calls with the same module path and number are compared with each other. Casts and operators that only one of the
    plans has thus do not matter. The function works on copies. The model, its gradients, the random generators and
    process-wide settings are unchanged when it returns, fails or is interrupted.

    The comparison runs five forward and backward passes, and six if the model makes discrete choices, such as an
    ``argmax`` or a mask. It runs one more pass for each module tried. It needs memory for about four times the
    activations of one pass, and waits for the device.

    If the model is in DistributedDataParallel or sharded by FSDP2, all its ranks must call this function together.
    Each rank passes its own batch. All ranks get the same result. For each call and direction it has the worst rank's
    errors and the number of that rank.

    Args:
        model: The model, in any training state. Its training and evaluation modes are kept. A sharded model is copied
            whole on every rank.
        loss: A function ``loss(model, batch)`` that returns a scalar tensor.
        batch: One batch, in the form that ``loss`` takes.
        plan_a: The reference plan, usually ``"fp32"``.
        plan_b: The plan to compare with the reference.
        device: The device of the run. By default it is the device of the model's parameters.
        seed: The seed of the random draws, from 0 to 2**32 - 1.
        tries: The number of modules that are tried in the reference plan's format, each in a run of its own, the
            worst first.

    Returns:
        The comparison. Its main parts are ``.birthplaces`` (the calls that make errors), ``.calls``, ``.tried``,
        ``.table()`` and ``.save(folder)``.

    Raises:
        WorkloadError: The model cannot be copied, or the loss is not a scalar or has no graph.
        NonFiniteError: The loss or a gradient is not finite under the reference plan.
        PlanError: A plan does not fit the model.
        DeviceError: The device cannot run a plan.
    """

    def given() -> tuple[Plan, Plan, int]:
        check_count("compare", "tries", tries, 0)
        return as_plan(plan_a), as_plan(plan_b), tries

    with together(model, "compare") as ranks:
        first, second, _ = ranks.alike("compare", ("plan_a", "plan_b", "tries"), given)
        where = ranks.each(lambda: find_device("compare", device, str(device_of(ranks.model))))
        eager = first.compile == second.compile == "as_given"

        def begun() -> _Comparing:
            runs = Runs(ranks.model, loss, batch, where, seed=seed, call="compare", repeats_draws=eager)
            return _Comparing(runs, first, second, environment(where))

        comparing = ranks.each(begun)
        calls = ranks.merge(ranks.each(comparing.run), worst_calls)
        tried = [call.path for call in suspects(calls, tries)]
        return ranks.merge(ranks.each(lambda: comparing.result(tried)), worst_of)


class _Comparing:
    """Runs the forward and backward passes of one comparison of two plans, and evaluates their results."""

    def __init__(self, runs: Runs, first: Plan, second: Plan, env: Environment) -> None:
        self._runs, self._first, self._second, self._env = runs, first, second, env
        self._notes: list[str] = []
        resolved = [runs.resolution(plan) for plan in (first, second)]
        self._formats = {path: module.compute for path, module in resolved[1].places.items()}
        self._eps = {
            path: max(_eps(plan, res, path) for plan, res in zip((first, second), resolved, strict=True))
            for path in self._formats
        }
        self._bordered = frozenset({"", *(module.path for res in resolved for module in res.borders)})
        self._lowered = frozenset(
            module.path
            for module in resolved[1].borders
            if module.compute in LOW and module.compute != module.around
        )
        self._a, self._b = Look(keep=True), Look()
        self._ran_a: Run
        self._ran_b: Run
        self._calls: tuple[CallComparison, ...] = ()
        self._choices: tuple[Choice, ...] = ()

    def run(self) -> tuple[CallComparison, ...]:
        """Run both plans forward and backward, with all passes of the comparison; return all module calls with their errors."""
        a, b = self._a, self._b
        if not self._runs.repeats_draws:
            self._runs.run(
                dataclasses.replace(self._first, compile="as_given")
            )  # this pass records which module calls which
        chosen = Choices()
        ran_a = self._runs.run_finite(
            self._first, a.begin, observer=chosen if self._runs.repeats_draws else None
        )
        if not math.isfinite(ran_a.loss) or not ran_a.finite:
            raise NonFiniteError(
                f"compare: the loss or a gradient is not finite under {self._first}, so nothing can be compared with it; "
                "castwise.first_nonfinite finds the operator that causes this"
            )
        b.reference = a.kept
        ran_b = self._runs.run_finite(_with_room(self._second, a, ran_a), b.begin)
        self._ran_a, self._ran_b = ran_a, ran_b
        self._calls = self._attributed(self._isolated(a, b, ran_a, ran_b))
        self._choices = self._changed(chosen, ran_b.scale)
        return self._calls

    def _attributed(self, own: Own | None) -> tuple[CallComparison, ...]:
        calls = Attribution(
            self._ran_a, self._ran_b, self._b, own, self._eps, self._formats, self._bordered, self._lowered
        ).calls()
        if own is None or own.exact or not self._runs.repeats_draws or not any(call.born for call in calls):
            return calls
        rules = tuple(
            name for name, _ in self._second.ops
        )  # errors of operators with a rule stay visible, since the rule can be dropped
        look = Look(reference=own.own.reference, put=own.own.put)
        ran = self._runs.run(
            self._second,
            *look.begin(self._ran_b.scale),
            scale=self._ran_b.scale,
            observer=ExactKernels(rules),
        )
        return self._attributed(dataclasses.replace(own, exact=(look, ran)))

    def result(self, suspects: Iterable[str]) -> Comparison:
        """Return the comparison, after a run of the second plan with each of the given modules in the first plan's format.

        Args:
            suspects: Paths of modules that may cause the errors.
        """
        a, b, ran_a, ran_b = self._a, self._b, self._ran_a, self._ran_b
        tried = [self._try(path, a, ran_a) for path in suspects]
        end_a, end_b = self._whole(self._first, ran_a), self._whole(self._second, ran_b)
        return Comparison(
            workload=ran_a.kinds[""],
            plan_a=self._first,
            plan_b=self._second,
            losses=(end_a.loss, end_b.loss),
            output_error=b.at_the_end(),
            gradient_error=total_difference(end_b.gradients, end_a.gradients),
            calls=self._calls,
            tried=tuple(tried),
            parameters={
                name: error and error.norm
                for name, error in differences(end_b.gradients, end_a.gradients).items()
            },
            loss_scale=None if self._second.loss_scale is None else ran_b.scale,
            strayed=ran_b.strayed,
            notes=(*self._notes, *_notes(a, b, ran_a, ran_b)),
            passes=self._runs.ran,
            environment=dataclasses.asdict(self._env),
            choices=self._choices,
            collapsed=self._collapsed(),
        )

    def _collapsed(self) -> str:
        """Say which distinct inputs of the model become equal in the format to which the second plan rounds them."""
        for key, value in self._a.kept.items():
            dtype = self._b.dtypes.get(key)
            if (
                key.point.call == Call("", 0)
                and key.point.side == "in"
                and not key.back
                and dtype in LOW_DTYPES
            ) and (said := collapse(self._ran_a.kinds[""], value, dtype)):
                return said
        return ""

    def _whole(self, plan: Plan, ran: Run) -> Run:
        """Return the forward and backward pass whose loss and gradients are reported.

        If the plan compiles, a new pass is run in which nothing is observed, so that the compiler can fuse across calls. Otherwise
        the given pass is returned.
        """
        if plan.compile == "as_given":
            return ran
        self._notes.append(
            f"Under {plan} each call was compiled separately: fusion across calls affects only the final loss and gradients "
            f"shown here."
        )
        return self._runs.run(plan, scale=ran.scale, whole=True)

    def _isolated(self, a: Look, b: Look, ran_a: Run, ran_b: Run) -> Own | None:
        """Run the passes that show which errors each call makes itself, and which of these errors rounding explains.

        They are passes 3 to 5 in the description of this module. In them each call gets inputs from the first plan's pass. None is
        returned if the loss fails with such inputs.
        """

        def rounded(key: Key, value: Tensor | None) -> Tensor | None:
            dtype = b.dtypes.get(key)
            if value is None or dtype is None or not value.is_floating_point():
                return value
            scale = b.scale if key.back else 1.0
            return (value * scale).to(dtype).to(value.dtype) / scale

        def begun(key: Key, arrived: Tensor) -> Tensor | None:
            return rounded(key, arrived if key.is_made_by_callee else a.kept.get(key))

        def given(key: Key, _: Tensor) -> Tensor | None:
            return rounded(key, (base if key.is_made_by_callee else a).kept.get(key))

        def moved(key: Key, arrived: Tensor) -> Tensor | None:
            value = given(key, arrived)
            if value is None:
                return None
            call = key.point.call
            taker = call if (key.point.side == "in") is not key.back else ran_a.callers.get(call)
            eps = self._eps["" if taker is None else taker.path]
            return _moved(value, eps, zlib.crc32(repr(key).encode()))

        base = Look(keep=True, put=begun)
        own = Look(reference=base.kept, put=given)
        expected = Look(reference=base.kept, put=moved)
        run = self._runs.run
        try:
            ran_base = run(self._first, *base.begin(ran_a.scale), scale=ran_a.scale)
            ran_own = run(self._second, *own.begin(ran_b.scale), scale=ran_b.scale)
            ran_expected = run(
                self._first, *expected.begin(ran_a.scale), change=self._move_weights, scale=ran_a.scale
            )
        except Exception as error:  # the user's code may fail on replaced values
            self._notes.append(
                f"A pass with values from the first plan failed, so the error that each call adds is unknown: {told(error)}"
            )
            return None
        return Own(own, expected, ran_base, ran_own, ran_expected)

    def _changed(self, chosen: Choices, scale: float) -> tuple[Choice, ...]:
        """Run the second plan with the first plan's discrete choices (indices, masks), and return the choices that differ.

        It is pass 6 in the description of this module. Nothing is run if the second plan computes only in fp32 or the model makes
        no choices. If the loss fails with replaced values, the choices compared until then are returned.
        """
        format = lowest_format(self._second)
        if format is None or not chosen.chose:
            return ()
        changes = Changes(chosen.tape, format)
        try:
            self._runs.run(self._second, scale=scale, observer=changes)
        except Exception as error:  # the user's code may fail on replaced values
            self._notes.append(f"Discrete choices could not be compared: {told(error)}")
        return changed_choices([changes])

    def _move_weights(self, model: nn.Module) -> None:
        for index, (name, parameter) in enumerate(model.named_parameters()):
            parameter.data.copy_(_moved(parameter.data, self._eps[name.rpartition(".")[0]], index))

    def _try(self, path: str, a: Look, ran_a: Run) -> TriedExemption:
        region = Region(path, compute=self._first.compute)
        plan = dataclasses.replace(self._second, regions=(*self._second.regions, region), provenance=None)
        look = Look(reference=a.kept)
        try:
            ran = self._runs.run_finite(_with_room(plan, a, ran_a), look.begin)
        except CastwiseError as error:
            return TriedExemption(path, str(plan), reason=sentence(error))
        return TriedExemption(
            path,
            str(plan),
            loss_error=relative(ran_a.loss, ran.loss),
            output_error=look.at_the_end(),
            gradient_error=total_difference(ran.gradients, ran_a.gradients),
        )


def _with_room(plan: Plan, a: Look, ran_a: Run) -> Plan:
    """Return the plan with a smaller initial loss scale, at which the largest gradient of the reference does not overflow fp16.

    Training would settle there too. A plan without a dynamic loss scale is returned unchanged.
    """
    if plan.loss_scale is None or not plan.loss_scale.dynamic:
        return plan
    seen = [*(g for key, g in a.kept.items() if key.back), *ran_a.gradients.values()]
    largest = max((float(g.abs().max()) for g in seen if g.numel()), default=0.0)
    if not largest:
        return plan
    room = 2.0 ** math.floor(math.log2(FORMATS["fp16"].max / (ROOM * largest)))
    return with_scale(plan, min(plan.loss_scale.init, room))


def _eps(plan: Plan, resolution: Resolution, path: str) -> float:
    """Return the eps of the coarsest format in which the plan computes a module or stores its weights."""
    module = resolution.places[path]
    formats = [module.compute, *([module.stored] if module.stored else [])]
    if module.compute == "fp32":
        formats += [mode for mode in (plan.fp32_matmul, plan.fp32_conv) if mode in FORMATS]
    return max(FORMATS[name].eps for name in formats)


def _moved(tensor: Tensor, eps: float, seed: int) -> Tensor:
    """Perturb a tensor at random by up to half a unit in the last place of a format, which is given by its eps.

    If the tensor has that format itself, the perturbation is up to a whole unit, since rounding would remove a smaller one.
    """
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return tensor
    if tensor.is_complex():
        return torch.view_as_complex(_moved(torch.view_as_real(tensor), eps, seed))
    least = 2 * torch.finfo(tensor.dtype).eps  # a smaller change would be rounded away
    generator = torch.Generator(tensor.device).manual_seed(seed)
    wide = tensor.float() if tensor.dtype in LOW_DTYPES else tensor
    return torch.where(torch.isfinite(wide), dithered(wide, max(eps, least), generator), wide).to(
        tensor.dtype
    )


def _notes(a: Look, b: Look, ran_a: Run, ran_b: Run) -> list[str]:
    """Return sentences that say what could not be observed or compared."""
    out = []
    for ran, other, which in ((ran_a, ran_b, "first"), (ran_b, ran_a, "second")):
        alone = [call for call in ran.callers if call not in other.callers]
        if alone:
            names = ", ".join(f"{call.path or 'the model'} (call {call.number})" for call in alone[:3])
            out.append(
                f"{len(alone)} call{'s' * (len(alone) > 1)} ran only under the {which} plan: "
                f"{names}{', ...' * (len(alone) > 3)}."
            )
    changed = [key for key, error in b.errors.items() if error is None and key in a.kept]
    shapes = sorted({key.point.call.path for key in changed if b.shapes.get(key) != a.kept[key].shape})
    if shapes:
        out.append(
            f"Not compared, because shapes differ under the second plan: tensors of {', '.join(shapes[:3])}."
        )
    unseen = sorted({path for ran in (ran_a, ran_b) for path in ran.unseen})
    if unseen:
        out.append(
            f"Not compared: sparse tensors, nested tensors and tensor subclasses in {', '.join(unseen[:3])}."
        )
    if ran_b.strayed:
        out.append(
            f"{ran_b.strayed} random draws could not be replayed, so the second plan saw different noise from the first."
        )
    return out
