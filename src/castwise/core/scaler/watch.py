"""Guard steps that other code makes outside ``Amp.step``.

They may be steps of prepared optimizers, or of other optimizers that update the same parameters.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer

from castwise.core import _torch
from castwise.core.scaler import gradients
from castwise.core.scaler.closure import ClosureStep
from castwise.core.scaler.nested import inside
from castwise.core.scaler.result import StepResult, read_on_host
from castwise.core.scaler.step_guard import StepGuard, hand_over, take_back
from castwise.core.scaler.window import Window
from castwise.errors import StateError

_Log = Callable[[Callable[[], object]], object]

_AGAIN = 16
"""How often a closure is called again at most, at half the loss scale each time. The usual first scale is 2 ** 16."""

_scaling: weakref.WeakKeyDictionary[Optimizer, Window] = weakref.WeakKeyDictionary()
"""The :class:`Window` of each prepared optimizer, by whose loss scale the optimizer's gradients may be multiplied."""

_watches: weakref.WeakKeyDictionary[Optimizer, Watch] = weakref.WeakKeyDictionary()
"""The :class:`Watch` that guards the steps of each prepared optimizer."""
_closure_steps: weakref.WeakValueDictionary[int, ClosureStep] = weakref.WeakValueDictionary()
"""The step with a closure that an optimizer is making now, by the ``id`` of the optimizer."""


def watch_closure(
    optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> _torch.steps.Call | None:
    """Guard a step with a closure of an optimizer that is not prepared yet, as a step pre-hook.

    The optimizer may be prepared during this step, when its closure first calls a model.
    """
    closure = _torch.steps.closure_of(args, kwargs)
    if optimizer in _watches or closure is None:
        return None
    return _torch.steps.with_closure(args, kwargs, _closure_step(optimizer, closure).evaluate)


def is_watched(optimizer: Optimizer) -> bool:
    """Whether an optimizer's steps are guarded: it is prepared, or it is inside a prepared one."""
    return optimizer in _watches


def _closure_step(optimizer: Optimizer, closure: Callable[[], Any]) -> ClosureStep:
    step = _closure_steps[id(optimizer)] = ClosureStep(
        optimizer,
        closure,
        functools.partial(_watches.get, optimizer),
        keep=not _torch.optimizers.evaluates_once(optimizer),
    )
    return step


class Watch:
    """Keeps steps that other code makes outside ``Amp.step`` from using gradients that are scaled or not finite.

    Such a step raises an error if its gradients are still multiplied by the loss scale, or if no loss was ever scaled.
    If a gradient is not finite, all gradients are removed for the step, since torch's optimizers ignore parameters
    without a gradient. A step with a closure first calls the closure again at smaller scales. If that does not help,
    what the step did so far is undone.
    """

    def __init__(self, window: Window) -> None:
        self._window = window
        self.tries = _AGAIN if window.scales else 0
        self._stepping = window.stepping
        self._around: dict[int, weakref.ref[Optimizer]] = {}
        """The prepared optimizer around another optimizer, by the ``id`` of the inner one."""

    def check_alone(self, optimizer: Optimizer) -> None:
        """Raise if an optimizer is already prepared by another Amp that has a loss scale.

        Raises:
            StateError: The optimizer would have two loss scales.
        """
        other = _scaling.get(optimizer)
        if self._window.scales and other is not None and other is not self._window:
            raise StateError(
                f"prepare: this {type(optimizer).__name__} is already prepared by another Amp with a loss scale, and one "
                f"optimizer cannot have two loss scales. Prepare both models with one Amp, or close() the other first"
            )

    def follow(self, optimizer: Optimizer, log: _Log) -> None:
        """Guard the steps of a prepared optimizer, and of the optimizers inside it.

        Before anything is changed, ``log`` is called with a function that undoes this. Undoing also unscales gradients
        that are still scaled, so that training can go on without castwise.
        """
        for each in (optimizer, *inside(optimizer)):
            if not _torch.optimizers.has_step_hooks(each):
                continue
            if each is not optimizer:
                self._around[id(each)] = weakref.ref(optimizer)
                log(functools.partial(self._leave, id(each)))
            self._follow(each, log)

    def _leave(self, key: int) -> None:
        self._around.pop(key, None)

    def _follow(self, optimizer: Optimizer, log: _Log) -> None:
        alive = weakref.ref(optimizer)

        def end() -> None:
            target = alive()
            if target is not None and _watches.get(target) is self:
                del _watches[target]
            if target is not None and self._window.scales:
                _scaling.pop(target, None)
                self._window.let_go(target)

        log(end)
        if self._window.scales:
            _scaling[optimizer] = self._window
        _watches[optimizer] = self
        _torch.steps.subscribe(self._before_step, self._after_step, of=optimizer, log=log)

    def _owner(self, optimizer: Optimizer) -> Optimizer:
        """Return the prepared optimizer: the given one, or the one around it."""
        around = self._around.get(id(optimizer), lambda: None)()
        if around is not None or optimizer in _watches:
            return optimizer if around is None else around
        # an optimizer that took over the attributes of a prepared one took its hooks, too
        known = self._window.optimizers
        return next((one for one in known if one.param_groups is optimizer.param_groups), optimizer)

    def refuse_strangers(self, log: _Log) -> None:
        """Make steps of optimizers that are not prepared raise if their gradients are multiplied by the loss scale.

        Before anything is changed, ``log`` is called with functions that undo this. Undoing also unscales the gradients
        of parameters outside the prepared optimizers.
        """
        alive, known = weakref.ref(self._window), self._around

        def look(optimizer: Optimizer, *_: object) -> None:
            window = alive()
            if window is None or window.stepping or id(optimizer) in known:
                return
            if window.scales_strange(optimizer):
                raise StateError(
                    f"{type(optimizer).__name__}.step(): the loss scale is still in its gradients, which came from amp.backward, and "
                    "this optimizer was not prepared, so its update would be too large by the factor of the scale. Call "
                    "amp.prepare(model, optimizer) with it before training, then amp.step(optimizer); or, if this optimizer "
                    "uses another optimizer's gradients, call amp.unscale_ on the other optimizer first"
                )

        log(self._window.let_go)
        _torch.steps.subscribe(look, log=log)

    def see_clearing(self, log: _Log) -> None:
        """Call :meth:`Window.cleared` before each ``zero_grad`` of any optimizer or module, which may clear scaled gradients.

        Before anything is changed, ``log`` is called with a function that undoes this.
        """

        def look(by: Any) -> None:
            window = alive()
            if window is not None:
                window.cleared(by)

        def end(_: object = None) -> None:
            _torch.optimizers.clearing.remove(look)

        alive = weakref.ref(self._window, end)
        log(end)
        _torch.optimizers.clearing.add(look)

    # --- hooks around a step ----------------------------------------------------------------------------------

    def _before_step(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> _torch.steps.Call | None:
        if self._is_stepped_by_amp(optimizer):
            return None
        owner = self._owner(optimizer)
        around = _closure_steps.get(id(owner))
        if id(owner) in self._stepping or (owner is not optimizer and around is not None and around.failed):
            return None
        within = id(optimizer) in self._window.hidden  # inside its own step, calling the base class's step
        self._unhide(optimizer)
        _closure_steps.pop(id(optimizer), None)
        closure = _torch.steps.closure_of(args, kwargs)
        if closure is None:
            self._guard(owner, optimizer, within=within)
            return None
        return _torch.steps.with_closure(args, kwargs, _closure_step(optimizer, closure).evaluate)

    # --- the interface Guard, used by steps with a closure -----------------------------------------------------

    def look_at_evaluation(self, optimizer: Optimizer, *, again: bool, zeros: bool) -> bool:
        """Check the gradients of an optimizer after its closure ran, see :class:`~castwise.core.scaler.closure.Guard`."""
        return bool(self._guard(self._owner(optimizer), optimizer, again=again, zeros=zeros))

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        """Return a context manager inside which gradients that are cleared do not count as skipped steps."""
        before, self._window.evaluates = self._window.evaluates, True
        try:
            yield
        finally:
            self._window.evaluates = before

    def scale(self) -> torch.Tensor:
        """Return a copy of the loss scale, a 0-dim tensor."""
        return self._window.scaler.scale_tensor().clone()

    def put_back_scale(self, scale: torch.Tensor) -> None:
        """Set the loss scale back to a value that :meth:`scale` returned."""
        self._window.scaler.scale_tensor().copy_(scale)

    def sync(self, optimizer: Optimizer) -> None:
        """Copy an optimizer's fp32 masters into the model."""
        self._window.sync(optimizer)

    def _guard(
        self,
        optimizer: Optimizer,
        by: Optimizer,
        *,
        again: bool = False,
        zeros: bool = False,
        within: bool = False,
    ) -> bool | None:
        """Check the gradients of a prepared optimizer before a step that other code makes.

        Args:
            optimizer: The prepared optimizer.
            by: The optimizer that steps: the prepared one, or one inside it.
            again: Whether the gradients will be computed again if they are not finite, so that no step is skipped yet.
            zeros: Whether to replace non-finite gradients by zeros instead of removing them, if ``again`` is false.
            within: Whether the step is part of a step that is skipped already.

        Returns:
            Whether a gradient is not finite, so that all were removed or replaced; None if only the device knows.

        Raises:
            StateError: The gradients are multiplied by the loss scale, or no loss was ever scaled.
        """
        window, scaler, key, unscaled = self._window, self._window.scaler, id(optimizer), False
        if window.scales:
            if window.is_scaled(optimizer) and gradients.move(optimizer):
                if window.were_replaced(optimizer):
                    raise StateError(
                        f"{type(by).__name__}.step(): its gradients were replaced after amp.backward while they still held "
                        "the loss scale, and without zero_grad() in between. Values computed from scaled gradients are too large "
                        "by the factor of the scale. Call amp.unscale_(optimizer) right after amp.backward(loss), before the "
                        "gradients are replaced, then amp.step(optimizer). If you set gradients of your own, call "
                        "optimizer.zero_grad() before"
                    )
                raise StateError(
                    f"{type(by).__name__}.step(): the loss scale is still in its gradients, so the update would be too large "
                    f"by that factor. Call amp.step(optimizer), or amp.unscale_(optimizer) first"
                )
            computed = key in scaler._flags.states or window.differentiated  # unscaled by now
            if not computed and window.were_cleared(optimizer):
                raise StateError(
                    f"{type(by).__name__}.step(): its gradients have the norm and the direction of scaled gradients that "
                    f"zero_grad() cleared since the last step, so they seem to be copies of scaled gradients, too large by "
                    "the factor of the scale. Call amp.unscale_(optimizer) after each amp.backward(loss) and before gradients are "
                    "copied, or compute them by amp.grad(loss, params), which returns unscaled gradients. If the gradients are "
                    "right, clear them and set them again"
                )
            if not window.used and gradients.move(optimizer):
                if not _torch.calls.called_by_a_scaler():
                    raise StateError(
                        f"{type(by).__name__}.step(): the plan has a loss scale, but no loss was ever scaled, so small "
                        "gradients are lost: backward was called without the session. In your own loop, call "
                        "amp.backward(loss), then amp.step(optimizer); for Accelerate and the Trainer of transformers use "
                        "castwise.integrations.huggingface; if other code scales the loss, use a plan with +loss_scale=none"
                    )
                window.used = True
            scaler.asked = False
            scaler.scale_tensor()
            # gradients from amp.grad went through the scale too, so the scale must fall if they are not finite
            unscaled = key in scaler._flags.states or window.differentiated
            scaler.note_unscaled(optimizer)
            flags = scaler._flags.states[key]["found_inf_per_device"]
            if unscaled:
                scaler._flags.states[key]["stage"] = OptState.STEPPED
                window.settled, window.stepped = False, True
            else:
                scaler._flags.forget(optimizer)
        elif isinstance(scaler, StepGuard):
            unscaled, flags = True, scaler.look(optimizer)
            scaler._flags.forget(optimizer)
        else:
            return False
        torn = not again and window.written.begin_step(optimizer)
        window.no_look_at_step(optimizer)
        bad = torn or read_on_host(flags.values())
        if bad is None and not _torch.optimizers.takes_flag(by):
            bad = any(flag.item() for flag in flags.values())
        if bad:
            window.buffers.put_back()
        params = [p for group in by.param_groups for p in group["params"] if bad and p.grad is not None]
        if bad and again:
            window.settled = False
            for parameter in params:
                parameter.grad = None
            return True
        within = within or (by is not optimizer and id(optimizer) in window.hidden)
        window.skips += bool(bad) and not (within or window.written.is_counted(optimizer))
        if bad is not None:
            window.buffers.end_window(optimizer)
        if unscaled and not within:
            scaler.note_outcome(optimizer, bad)
        if bad is None:
            (flag,) = flags.values() or (gradients.number(0.0, scaler.scale_tensor().device),)
            hand_over(by, flag)
            guards = isinstance(scaler, StepGuard) and not within
            result = StepResult(list(flags.values()), send=guards)
            if isinstance(scaler, StepGuard) and guards:
                scaler.note_on_its_way(optimizer, result)
            window.count(result)
            window.buffers.end_window(optimizer)
        elif bad:
            window.hidden[id(by)] = [(parameter, parameter.grad) for parameter in params]
            window.settled = False
            for parameter in params:
                parameter.grad = torch.zeros_like(parameter.grad) if zeros else None
        return bad

    def _after_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        step = _closure_steps.pop(id(optimizer), None)
        if step is None and self._is_stepped_by_amp(optimizer):
            return
        failed = step is not None and step.failed
        if id(self._owner(optimizer)) not in self._stepping:
            self._unhide(optimizer, whole=failed)
            take_back(optimizer)
        if step is not None and failed:
            step.end()

    def _is_stepped_by_amp(self, optimizer: Optimizer) -> bool:
        """Whether ``Amp.step`` steps an optimizer, which is inside no other: the usual case, to be found out fast."""
        return id(optimizer) in self._stepping and id(optimizer) not in self._around

    def _unhide(self, optimizer: Optimizer, *, whole: bool = False) -> None:
        for parameter, grad in self._window.hidden.pop(id(optimizer), ()):
            if whole or parameter.grad is None:
                parameter.grad = grad


_torch.tensors.never_trace(Watch._before_step)
