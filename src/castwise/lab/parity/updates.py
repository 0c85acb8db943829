"""Test the optimizer's updates under plans that store parameters in bf16 or fp16; correct gradients say nothing about them.

A copy of the model is trained in fp32. After 0, 4, 16, 64 and 256 steps, each of the next three steps is taken twice from the same
weights, gradients and optimizer state. It is taken once in fp32, and once by the plan's own optimizer with weights and state in
the formats in which the plan stores them. So this test finds

- updates that rounding drops, because they are small beside the weights that they change;
- an optimizer whose own arithmetic fails in the format: in fp16 Adam's eps of 1e-8 is 0, and so are its second moments.

What counts is the share of fp32's *update* that is missing, not the number of elements. With SGD, rounding often drops the updates
of half of the elements without harm, since these elements hold little of the update. Each parameter group of the optimizer is
tested by itself, since a small group can stand still while the whole moves. Updates shrink while a model learns, so late steps are
tested too.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import inspect
import itertools
import math
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from castwise.core.casting.trees import to_device
from castwise.core.devices import in_fp64
from castwise.core.model.arrival import widen_
from castwise.core.model.copying import copy_of
from castwise.core.plans.formats import LOW_DTYPES
from castwise.core.plans.plan import PRESETS, Plan
from castwise.core.plans.text import some
from castwise.core.session.amp import SessionView
from castwise.lab.parity.states import Optimizer
from castwise.lab.passes.isolation import seed_all, unmoved
from castwise.lab.passes.passes import under

LOST = 0.02
"""Maximum share of a parameter group's update that a plan may lose.

Shares up to 2.4 % did no harm in trainings of 600 steps; in trainings of 1,500 steps a loss of 2.4 % did.

Source: bench/results/updates-cpu.json, by bench/bench_updates.py.
"""
FAR = 0.5
"""Maximum share by which a plan may move a parameter group further than fp32 does."""
AFTER = (0, 4, 16, 64, 256)
"""Numbers of fp32 steps after which the plan's steps are compared with fp32's."""
COMPARED = 3
"""Number of steps compared each time."""
REPEATED = 0.01
"""Maximum difference between two fp32 steps, as a share of the step's norm, at which they count as equal. One is the training's own
step, and the other starts from copies of its weights, gradients and state dict."""
_FP32 = PRESETS["fp32"]
WARM_STEPS = 4
"""Steps before the step that :func:`one_update` observes: an optimizer's first step differs from later steps."""


@dataclass(frozen=True)
class UpdateLoss:
    """How the optimizer's updates under a plan differ from those in fp32.

    Attributes:
        lost: Share of a parameter group's update that the plan loses, for the worst group and step; below 0 if the plan moves the
            group too far.
        where: The parameters of the worst group.
        step: Number of the worst step.
        steps: Number of the last step that was compared.
        broken: A clause about the first tensor that the plan's optimizer made non-finite, or an empty string.
        still: A parameter group that has gradients but that fp32 changed in no compared step, so that nothing is known of its
            updates.
    """

    lost: float = 0.0
    where: str = ""
    step: int = 0
    steps: int = 0
    broken: str = ""
    still: str = ""

    @property
    def why(self) -> str:
        """The reason why the plan's updates make it unusable, as a clause; empty if the updates are sound."""
        if self.broken:
            return self.broken
        if self.lost > LOST:
            return f"rounding loses {self.lost:.0%} of the optimizer's update of {self.where} at step {self.step}"
        if self.lost < -FAR:
            return f"a step of the optimizer moves {self.where} {1.0 - self.lost:.2g} times as far as in fp32 at step {self.step}"
        return ""

    @property
    def unknown(self) -> str:
        """The reason why the updates of a plan without master weights are not known, as a clause; empty if they are known."""
        if not self.still:
            return ""
        return (
            f"in {self.steps} steps the optimizer does not change {self.still} in fp32 either, so the share that rounding "
            "loses is not known; give an optimizer whose learning rate is above 0"
        )

    @property
    def severity(self) -> float:
        """How far the updates differ from fp32's, divided by the largest difference that a plan may have; a plan fails above 1."""
        return math.inf if self.broken else max(self.lost / LOST, -self.lost / FAR)


class UpdateTest:
    """Compares steps of a plan's own optimizer with fp32's, a few at a time, later and later in a training.

    Each such comparison is called a stage. For a plan with master weights there are only early stages, since no update is rounded.

    Attributes:
        found: The result so far.
    """

    def __init__(self, training: Training, plan: Plan) -> None:
        self._training, self._plan = training, plan
        self._stages = list(AFTER if plan.lacks_masters else AFTER[:2])
        self._step_s = self._compared_s = 0.0
        self._still = dict.fromkeys(range(len(self._training.groups)), False)
        """Parameter groups without an update so far, and whether they had a gradient."""
        self.found = UpdateLoss()

    @property
    def next_s(self) -> float | None:
        """About how many seconds the next call of :meth:`stage` takes; None after the last stage."""
        if not self._stages:
            return None
        return (self._stages[0] - self._training.steps) * self._step_s + self._compared_s

    def stage(self) -> UpdateLoss:
        """Train in fp32 up to the next comparison, compare a few steps of the plan's optimizer with fp32's, and return the result.

        All steps of a stage are taken whatever is found: other ranks may wait for this rank in a collective of the loss.
        """
        training, began = self._training, time.monotonic()
        if count := self._stages.pop(0) - training.steps:
            for _ in range(count):
                training.step()
            self._step_s = (time.monotonic() - began) / count
        began, broken, broken_at = time.monotonic(), "", 0
        kept, whole = [0.0] * len(training.groups), [0.0] * len(training.groups)
        repeats = True
        for number in range(COMPARED):
            training.backward()
            before, own = training.values(), _step_of(training, self._plan)
            again = None if number and not own.broken else _step_of(training, _FP32)
            training.update()
            changes = _changes(training.values(), before)
            if own.broken and again is not None and not (broken or again.broken):
                broken, broken_at = own.broken, training.steps
            if (
                again is not None
            ):  # repeats is False if the state dict is incomplete, or steps draw random numbers
                repeats = again.repeats(changes)
            comparable = bool(own.changes) and repeats
            for index, group in enumerate(changes):
                whole[index] += sum(_dot(change, change) for change in group)
                ours = own.counted(index, before[index], group, comparable)
                kept[index] += sum(map(_dot, group, ours))
                pushed = any(p.grad is not None and p.grad.any() for p in training.params[index])
                if index in self._still:
                    self._still[index] |= pushed
        self._compared_s = time.monotonic() - began
        if not math.isfinite(sum(whole)):  # fp32 itself diverges
            self._stages = []
        elif broken:
            self._stages = []
            self.found = dataclasses.replace(
                self.found,
                broken=f"{broken} at step {broken_at}, where fp32 stays finite",
                step=broken_at,
                steps=broken_at,
            )
        else:
            self._add(kept, whole)
        return self.found

    def _add(self, kept: Sequence[float], whole: Sequence[float]) -> None:
        training, found = self._training, self.found
        for index, (where, own_kept, square) in enumerate(zip(training.groups, kept, whole, strict=True)):
            if not square:
                continue
            self._still.pop(index, None)
            here = dataclasses.replace(found, lost=1.0 - own_kept / square, where=where, step=training.steps)
            found = max(found, here, key=lambda one: one.severity)
        still = next((training.groups[index] for index, pushed in self._still.items() if pushed), "")
        self.found = dataclasses.replace(found, steps=training.steps, still=still)


def is_needed(plan: Plan) -> bool:
    """Whether a plan stores parameters in bf16 or fp16, so that its updates can differ from fp32's."""
    return plan.lacks_masters or plan.keeps_masters


def update_loss(training: Training, plan: Plan) -> UpdateLoss:
    """Run all stages of an :class:`UpdateTest` of a plan that stores parameters in bf16 or fp16, and return the result."""
    test = UpdateTest(training, plan)
    while test.next_s is not None:
        test.stage()
    return test.found


def one_update(training: Training) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Train for a few steps; yield each parameter's name, its weights before the last step, and the update of that step."""
    for _ in range(WARM_STEPS):
        training.step()
    before = [p.detach().clone() for p in training.model.parameters()]
    training.step()
    for (name, new), old in zip(training.model.named_parameters(), before, strict=True):
        yield name, old, new.detach() - old


def stored_change(weights: Tensor, update: Tensor, dtype: torch.dtype) -> Tensor:
    """Return how much an update changes weights that are stored in a format, in fp32; 0 where rounding drops the update."""
    stored = weights.to(dtype).float()
    moved = (stored + update).to(dtype).float()
    return torch.where(moved == stored, 0.0, moved - stored)


class Training:
    """A copy of a model that is trained in fp32.

    Args:
        model: The model; it is copied, and tensors stored in bf16 or fp16 are widened to fp32.
        loss: ``loss(model, batch)`` -> scalar tensor.
        batches: Batches on any device.
        optimizer: ``optimizer(params)`` -> Optimizer.
        device: The device to train on.
        seed: Seed of the random numbers of the first step.

    Attributes:
        model: The copy.
        optimizer: The optimizer of the copy.
        groups: For each parameter group of the optimizer, a description of its parameters.
        params: The parameters of each group.
        steps: Number of steps so far.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Callable[[nn.Module, Any], Tensor],
        batches: Iterator[Any],
        optimizer: Optimizer,
        device: torch.device,
        seed: int = 0,
    ) -> None:
        self.model = copy_of(model).to(device)
        widen_(self.model)
        self.make, self.device, self.steps = optimizer, device, 0
        self.optimizer = optimizer(self.model.parameters())
        names = iter(_names(self.model, self.optimizer))
        self.groups = [
            some([next(names) for _ in group["params"]], most=2) for group in self.optimizer.param_groups
        ]
        self._restored = contextlib.ExitStack()
        self._restored.enter_context(unmoved(self.optimizer, self.model))
        self.params = [list(group["params"]) for group in self.optimizer.param_groups]
        self._loss, self._batches, self._seed = loss, batches, seed
        self._batch: Any = None

    def close(self) -> None:
        """Restore tensors outside the model that the optimizer has changed."""
        self._restored.close()

    @property
    def needs_closure(self) -> bool:
        """Whether the optimizer's step needs a closure that computes the gradients."""
        closure = inspect.signature(self.optimizer.step).parameters.get("closure")
        return closure is not None and closure.default is inspect.Parameter.empty

    def values(self) -> list[list[Tensor]]:
        """Return copies of the parameters, by parameter group of the optimizer."""
        return [[p.detach().clone() for p in group] for group in self.params]

    def backward(self) -> None:
        """Compute the loss of the next batch and its gradients."""
        self._batch = to_device(next(self._batches), self.device)
        self._evaluate()

    def update(self) -> None:
        """Let the optimizer take its step."""
        self.optimizer.step(*((self._evaluate,) if self.needs_closure else ()))
        self.steps += 1

    def step(self) -> None:
        """Compute the gradients of the next batch and let the optimizer take its step."""
        self.backward()
        self.update()

    def _evaluate(self) -> float:
        seed_all(self._seed + self.steps)
        self.optimizer.zero_grad()
        value = self._loss(self.model, self._batch)
        value.backward()
        return float(value.detach())


@dataclass(frozen=True)
class _Step:
    """One step that a plan's optimizer takes from copies of the fp32 training's weights, gradients and optimizer state.

    Attributes:
        formats: The dtypes in which the parameters are stored, by parameter group.
        changes: The changes of the parameters, by group; empty if the optimizer cannot step from given gradients or state.
        broken: A clause that says what is not finite after the step; otherwise empty.
        keeps: Whether the optimizer keeps what rounding drops for later steps, or rounds at random.
    """

    formats: list[list[torch.dtype]]
    changes: list[list[Tensor]] = field(default_factory=list)
    broken: str = ""
    keeps: bool = False

    def counted(
        self, index: int, olds: Sequence[Tensor], updates: Sequence[Tensor], comparable: bool
    ) -> Iterable[Tensor]:
        """Return the changes of one parameter group that count as the plan's.

        Args:
            index: Index of the group.
            olds: The parameters before the step.
            updates: fp32's updates of these parameters.
            comparable: Whether the step of the plan's optimizer can be compared with fp32's. Otherwise its changes are computed
                from fp32's updates, by rounding.
        """
        formats = self.formats[index]
        if not comparable:
            return updates if self.keeps else map(_stored, olds, updates, formats)
        own = self.changes[index]
        return map(_beyond_rounding, olds, updates, own, formats) if self.keeps else own

    def repeats(self, changes: list[list[Tensor]]) -> bool:
        """Whether this step makes the given changes, up to a small difference."""
        return bool(self.changes) and all(
            _dot(off, off) <= REPEATED**2 * _dot(change, change)
            for mine, group in zip(self.changes, changes, strict=True)
            for off, change in ((one - other, other) for one, other in zip(mine, group, strict=True))
        )


def _step_of(training: Training, plan: Plan) -> _Step:
    model = copy_of(training.model)
    optimizer = training.make(model.parameters())
    names = _names(model, optimizer)
    bare = dataclasses.replace(plan, loss_scale=None, compile="as_given")
    with warnings.catch_warnings(), contextlib.ExitStack() as stack:
        warnings.simplefilter("ignore", UserWarning)  # prepare warns of eps in fp16, which is tested here
        stack.enter_context(unmoved(optimizer, model))
        amp = stack.enter_context(under(bare, model, training.device, optimizer))
        formats = [[p.dtype for p in group["params"]] for group in optimizer.param_groups]
        if training.needs_closure:
            return _Step(formats)
        for p, trained in zip(model.parameters(), training.model.parameters(), strict=True):
            if trained.grad is not None:
                p.grad = trained.grad.to(p.grad_dtype or p.dtype, copy=True)
        before = [[p.detach().clone() for p in group["params"]] for group in optimizer.param_groups]
        try:
            _continue_from(optimizer, training.optimizer, before)
        except Exception:  # any error that the optimizer's class raises
            return _Step(formats)
        optimizer.step()
        keeps = SessionView(amp).dropped.keeps
        changes = _changes([group["params"] for group in optimizer.param_groups], before)
    for name, change in zip(names, itertools.chain.from_iterable(changes), strict=True):
        if not bool(torch.isfinite(change).all()):
            return _Step(formats, broken=f"a step of the optimizer in {plan.compute} makes {name} non-finite")
    return _Step(formats, changes, keeps=keeps)


def _continue_from(
    optimizer: torch.optim.Optimizer, other: torch.optim.Optimizer, values: Sequence[Sequence[Tensor]]
) -> None:
    """Give an optimizer the state of another optimizer, in the formats in which its own first step creates this state.

    Args:
        optimizer: The optimizer that gets the state. It takes a step first, which is undone.
        other: The optimizer whose state is copied.
        values: The values of the first optimizer's parameters, which are restored after its step.
    """
    optimizer.step()
    formats = {
        p: {key: getattr(value, "dtype", None) for key, value in optimizer.state[p].items()}
        for p in optimizer.state
    }
    for group, olds in zip(optimizer.param_groups, values, strict=True):
        for p, old in zip(group["params"], olds, strict=True):
            p.detach().copy_(old)
    optimizer.load_state_dict(copy.deepcopy(other.state_dict()))  # casts all of it to the parameter's format
    theirs = [p for group in other.param_groups for p in group["params"]]
    ours = [p for group in optimizer.param_groups for p in group["params"]]
    for p, trained in zip(ours, theirs, strict=True):
        for key, format in formats.get(p, {}).items():
            value = other.state[trained].get(key) if trained in other.state else None
            if (
                isinstance(value, Tensor)
                and format is not None
                and optimizer.state[p][key].dtype is not format
            ):
                optimizer.state[p][key] = value.to(format)


def _changes(new: Sequence[Sequence[Tensor]], old: Sequence[Sequence[Tensor]]) -> list[list[Tensor]]:
    """Return the differences between new and old tensors, in fp32 or wider, by parameter group."""
    return [
        [_wide(one) - _wide(other) for one, other in zip(news, olds, strict=True)]
        for news, olds in zip(new, old, strict=True)
    ]


def _wide(tensor: Tensor) -> Tensor:
    """Return a tensor in fp32, or in its own format if that is wider."""
    return tensor.detach().to(torch.promote_types(tensor.dtype, torch.float32))


def _names(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
    """Return the paths of an optimizer's parameters in the model, in the optimizer's order."""
    names = {id(p): name for name, p in model.named_parameters()}
    groups = optimizer.param_groups
    return [names.get(id(p), "a tensor outside the model") for group in groups for p in group["params"]]


def _stored(old: Tensor, change: Tensor, dtype: torch.dtype) -> Tensor:
    """Return how much a change alters a parameter that is stored in a format, after rounding to that format."""
    return stored_change(old, change, dtype) if dtype in LOW_DTYPES else change


def _beyond_rounding(old: Tensor, update: Tensor, own: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the change of a parameter under the plan, without what rounding explains.

    It is fp32's update, plus the part of the difference between the plan's change (``own``) and fp32's update that rounding up or
    down does not explain. It is used if the plan's optimizer keeps what rounding drops.
    """
    if dtype not in LOW_DTYPES:
        return own
    limits = torch.finfo(dtype)
    place = limits.eps * torch.maximum(old.abs(), (old + own).abs()).clamp_min(limits.smallest_normal)
    off = own - update
    return update + off.sign() * (off.abs() - place).clamp_min(0.0)


def _dot(one: Tensor, other: Tensor) -> float:
    one, other = (torch.view_as_real(t) if t.is_complex() else t for t in (one, other))
    return float((in_fp64(one) * in_fp64(other)).sum())
