"""Keep track of gradients between two updates of the loss scale: which are multiplied by the scale, and until when."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer
from torch.utils.weak import TensorWeakRef

from castwise.core import _torch
from castwise.core.scaler import gradients
from castwise.core.scaler.buffers import Buffers
from castwise.core.scaler.cleared import Cleared
from castwise.core.scaler.grad_scaler import STEPPED, GradScaler
from castwise.core.scaler.held import Held
from castwise.core.scaler.losses import DEFAULT
from castwise.core.scaler.nested import inside
from castwise.core.scaler.result import StepResult, peek, read_on_host
from castwise.core.scaler.step_guard import StepGuard, take_back
from castwise.core.scaler.written import Written
from castwise.errors import LossScaleError, NonFiniteError, StateError

_Ends = tuple[TensorWeakRef, TensorWeakRef]
"""Weak references to the first gradient of an optimizer and to the last."""

_Stepped = tuple[weakref.ref[torch.Tensor], weakref.ref[torch.Tensor], list[int], int]
"""Weak references to the first gradient of a step and to the last, their versions, and the next autograd node's number."""


class Window:
    """Decides when the loss scale is updated, and keeps track of which gradients are multiplied by it.

    A window is the time between two updates of the scale. It opens with the first backward pass. The scale is updated
    when the first backward pass after a step begins, which ends the window and opens the next one. Gradients that still
    exist then, because they are accumulated or were never cleared, are rescaled in place to the new scale. So gradients
    that are added to them have the same scale. Reading the scale or the state updates nothing.

    An optimizer *owns* gradients if its parameters have some after a backward pass.

    Args:
        scaler: The scaler that holds the scale.
        optimizers: A function that returns the optimizers of the :class:`~castwise.Amp`.
        strays: A function that returns the trained parameters that none of these optimizers updates.
        buffers: The buffers of the models, which are restored after a skipped step.
    """

    def __init__(
        self,
        scaler: GradScaler,
        optimizers: Callable[[], Iterable[Optimizer]],
        strays: Callable[[], Iterable[torch.Tensor]] = tuple,
        buffers: Buffers | None = None,
    ) -> None:
        self.scaler = scaler
        self.buffers = Buffers() if buffers is None else buffers
        before = weakref.WeakMethod(self._put_back_unstepped)
        self.buffers.before_forward = lambda: (look := before()) and look()
        window = weakref.ref(self)
        self.written = Written(
            lambda optimizer: bool(inside(optimizer)),
            lambda optimizer: (here := window()) and here.sync(optimizer),
        )

        def look() -> None:
            if (here := window()) is not None:
                here.written.look()

        self.buffers.look_at_weights, self.buffers.overflows = look, self.written.overflows
        self._optimizers = optimizers
        self._strays = strays
        self._stray: Held | None = None
        """The parameters outside the optimizers whose gradients are multiplied by the scale."""
        self.scales = scaler.is_enabled()
        self._owners: dict[int, Held] = {}
        """The parameters of each optimizer whose gradients are multiplied by the scale, by the optimizer's ``id``."""
        self._lent = False
        """Whether the user received the scale or a scaled loss, so that any new gradients may be multiplied by the scale."""
        self._begun = False
        """Whether a backward pass from a scaled loss that the user received has begun and has not ended."""
        self._task = -1
        """The number by which autograd identifies the last backward pass of a scaled loss that the user received."""
        self._handed_out = False
        """Whether gradients of a scaled loss were returned to the user, as by ``torch.autograd.grad``, and not set."""
        self.differentiated = False
        """Whether gradients were computed from a scaled loss, then unscaled, and returned to the user.

        It becomes False when the scale is updated.
        """
        self._returned: dict[int, tuple[str, torch.Tensor]] = {}
        """The unscaled gradients that were returned to the user, by the ``id`` of the optimizer of their parameters.

        An entry holds the name of the loss, and a tensor that is above zero if a gradient is not finite. It is removed
        when the optimizer steps.
        """
        self.settled = not self.scales
        """Whether gradients may be added now, since all existing ones have the current scale and no step was made."""
        self.in_backward = False
        """Whether ``Amp.backward`` is running, so that gradients are multiplied by the scale although it has not ended."""
        self.stepped = False
        """Whether a step was made, so that the scale is updated when the next backward pass begins."""
        self.used = False
        """Whether a loss was ever scaled."""
        scaler.is_over = lambda: self.stepped
        scaler.left_out = lambda: [flag for flags in self._dropped.values() for flag in flags.values()]
        scaler.returned = lambda: [*self._returned.values()]
        self._by_hand: dict[int, tuple[set[int], _Ends | None]] = {}
        """The parameters and gradients that an optimizer had when the user unscaled them, by the optimizer's ``id``.

        Before the step, the user may change or replace gradients and add parameters.
        """
        self._dropped: dict[int, dict[torch.device, torch.Tensor]] = {}
        # The optimizers, by id, whose gradients were dropped by other code than a closure that a step evaluates.
        self._given_up: set[int] = set()
        """Whether gradients that the user unscaled and then cleared were not finite, by the ``id`` of the optimizer."""
        self._cleared: dict[int, Cleared] = {}
        """Samples of the gradients of each optimizer that were cleared while scaled, by the optimizer's ``id``."""
        self._last: dict[int, _Stepped] = {}
        """The gradients with which each optimizer stepped last, by the optimizer's ``id``."""
        self.stepping: set[int] = set()
        """The ``id`` of each optimizer whose :meth:`step` is running."""
        self.hidden: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        """The gradients that are removed during a step that other code makes, because one is not finite.

        They are kept by the ``id`` of the optimizer, and put back after the step.
        """
        self.ranks_differ: Callable[[], bool] = lambda: False
        """Whether ranks agree on each step, so that all of them must make the same collective calls."""
        self._habits: dict[int, tuple[str, bool]] = {}
        """What each optimizer did at its last step, by the optimizer's ``id``.

        An entry holds the name of the loss whose scale the gradients had, and whether the optimizer was the first to step
        after an update of the scale. A rank that runs no backward pass before a step assumes that both are as before.
        """
        self.summed: list[Optimizer] = []
        """Optimizers that are being unscaled although this rank ran no backward pass for them.

        Their gradients are assumed to be multiplied by the scale, as on other ranks.
        """
        self.skips = 0
        """Number of steps that the host knows to have been skipped."""
        self.sync: Callable[[Optimizer], object] = lambda _: None
        """A function that copies the fp32 masters of an optimizer into the model, after the optimizer's step was undone."""
        self.evaluates = False
        """Whether a closure of an optimizer is running, so that gradients of other optimizers that it clears do not count
        as skipped steps."""
        self._unread: torch.Tensor | None = None

    @property
    def optimizers(self) -> list[Optimizer]:
        """The optimizers of the Amp, as a list in the order in which they were prepared."""
        return [*self._optimizers()]

    # --- opening ----------------------------------------------------------------------------------------------

    def open(self, name: str = DEFAULT, *, lend: bool = False, idle: bool = False) -> None:
        """Update the scale if a step was made, and rescale existing gradients to it. Call this before gradients are added.

        Args:
            name: The name of the loss whose scale is used from now on, if a step was made.
            lend: Whether the user receives the scaled loss, so that any new gradients may come from it.
            idle: Whether this rank adds no gradients. Gradients that came from no backward pass on this rank then stay
                as they are.
        """
        self.used = True
        self.summed.clear()
        if not self.settled or self._holds_plain():
            self._put_back_unstepped()
            self._by_hand.clear()
            # left by steps that raised an error; since a new backward begins, the user has dealt with the error
            self.hidden.clear()
            dropped = self._count_dropped()
            if self.scales:
                self._settle(name, dropped, self._count_returned(), idle)
            else:
                self.scaler._flags.restart()
            self.settled = True
        if lend:
            self._lend_unseen()

    def _put_back_unstepped(self) -> None:
        """Restore buffers if gradients were checked, were not finite, and the user made no step with them."""
        if not self.scaler.works or not (self._dropped or self.scaler._flags.states):
            return
        self.written.look()
        states = [
            state for state in self.scaler._flags.states.values() if state["stage"] is OptState.UNSCALED
        ]
        found = [*self._dropped.values(), *(state["found_inf_per_device"] for state in states)]
        flags = [flag for each in found for flag in each.values()]
        bad = read_on_host(flags)
        if bad is not False:
            self.buffers.put_back(None if bad else gradients.largest(flags, flags[0].device))

    def _holds_plain(self) -> bool:
        """Whether some gradients are not multiplied by the scale, as after a backward pass of an unscaled loss."""
        return self.scales and any(
            not self.is_scaled(optimizer) and gradients.lie_on(optimizer) for optimizer in self._optimizers()
        )

    def _count_dropped(self) -> dict[int, dict[torch.device, torch.Tensor]]:
        """Count a skipped step for gradients that were unscaled and then cleared without a step, if they were not finite.

        Returns:
            For the ``id`` of each optimizer whose gradients may be not finite, a tensor per device that is above zero
            if they are not.
        """
        dropped, self._dropped = self._dropped, {}
        given_up, self._given_up = self._given_up, set()
        if not self.scaler.works or not (dropped or self.scaler._flags.states):
            return {}
        found = {}
        for optimizer in self._optimizers():
            key = id(optimizer)
            flags = dropped.get(key, {})
            if self.scaler._flags.is_unscaled(optimizer) and not gradients.lie_on(optimizer):
                flags = flags or self.scaler._flags.states[key]["found_inf_per_device"]
            bad = read_on_host(flags.values())
            if bad is not False:
                found[key] = flags
                self.written.note_counted(key)
                skips = key in given_up or not self.evaluates
                self.count(StepResult(list(flags.values()), send=False), skips=skips)
                if bad and isinstance(self.scaler, StepGuard):
                    self.scaler.note_given_up(optimizer)
        return found

    def note_returned(
        self, inputs: Any, grads: Iterable[torch.Tensor | None], name: str | None = None
    ) -> None:
        """Record gradients that were computed from a scaled loss, then unscaled, and returned to the user.

        The user may set them on parameters or drop them. If no step follows before the next loss, the scale shrinks if
        gradients of parameters were not finite.

        Args:
            inputs: The tensors with respect to which the gradients were computed.
            grads: The gradients.
            name: The name of the loss, by default the first that was scaled since the last update of the scale.
        """
        each = (inputs,) if isinstance(inputs, torch.Tensor) else inputs
        by_input = {id(_stored(one)): grad for one, grad in zip(each, grads, strict=True) if grad is not None}
        home, name = self.scaler.scale_tensor().device, name or self.scaler._losses.current.name
        for optimizer in self._optimizers():
            found = [by_input[id(p)] for p in gradients.stored(optimizer) if id(p) in by_input]
            if found:
                flag = gradients.are_finite(found, home)
                known = self._returned.get(id(optimizer))
                if known is not None and known[0] == name:
                    flag = torch.maximum(known[1], flag)
                self._returned[id(optimizer)] = name, flag
                self.settled = False

    def _count_returned(self) -> dict[str, torch.Tensor]:
        """Count a skipped step for gradients that were returned to the user and then dropped, if they were not finite.

        Returns:
            For each loss whose gradients may be not finite, by name, a tensor that is above zero if they are not.
        """
        returned, self._returned = self._returned, {}
        found: dict[str, torch.Tensor] = {}
        for name, flag in returned.values():
            if read_on_host((flag,)) is not False:
                self.count(StepResult([flag], send=False), skips=not self.evaluates)
                found[name] = torch.maximum(found[name], flag) if name in found else flag
        return found

    def _settle(
        self,
        name: str,
        dropped: Mapping[int, Mapping[torch.device, torch.Tensor]],
        returned: dict[str, torch.Tensor],
        idle: bool,
    ) -> None:
        scaler = self.scaler
        scaled: dict[int, torch.Tensor] = {}
        plain: dict[int, torch.Tensor] = {}
        fed: list[Optimizer] = []
        for optimizer in self._optimizers():
            grads = gradients.held(optimizer)
            if grads and not (idle and not self.is_scaled(optimizer)):
                fed.append(optimizer)
                of = scaled if self.is_scaled(optimizer) else plain
                of.update((id(grad), grad) for grad in grads)
        old = scaler.scale_tensor().clone() if scaled and (self.stepped or dropped or returned) else None
        if not self.stepped:
            scaler._flags.restart()
        if dropped:
            scaler.note_dropped(dropped, self.stepped)
        if returned:
            scaler.note_left(returned)
        if self.stepped and scaler._flags.states:  # none if a state was loaded into the scaler since
            scaler.update()
        if self.stepped or dropped or returned:
            self._owners.clear()
        self.stepped = self._lent = self._begun = self._handed_out = self.differentiated = False
        if plain or old is not None:
            if scaler._losses.opened_by is None:
                scaler._losses.open(name)
            scale = scaler.scale_tensor()
            if plain:
                gradients.check_and_multiply(list(plain.values()), scale, scale.device)
            if old is not None:
                gradients.check_and_multiply(
                    list(scaled.values()), scale / old.to(scale.device), scale.device
                )
        if fed:
            self.fed(fed)

    def fed(self, optimizers: Iterable[Optimizer] | None = None) -> None:
        """Record after a backward pass that all gradients of these optimizers are multiplied by the scale.

        By default, all optimizers are meant. Gradients of parameters outside the optimizers are recorded too.
        """
        self._begun = False
        for optimizer in self._optimizers() if optimizers is None else optimizers:
            params = gradients.stored(optimizer)
            grads = [parameter.grad for parameter in params]
            if any(grad is not None for grad in grads):
                self._owners[id(optimizer)] = Held(params, grads)
        strays = [parameter for parameter in self._strays() if parameter.grad is not None]
        self._stray = Held(strays, [parameter.grad for parameter in strays]) if strays else None

    def lend(self, scaled: torch.Tensor) -> torch.Tensor:
        """Record that the user receives a scaled loss, and return the loss.

        When its backward pass begins, any new gradients may come from it. If the loss has no autograd graph, the user
        has asked for the scale itself, so any gradients may be multiplied by the scale from now on.
        """
        if self.scales:
            if scaled.requires_grad and not torch.compiler.is_compiling():
                scaled.register_hook(functools.partial(self._begin, _torch.tensors.is_transformed(scaled)))
            else:
                self._lend_unseen()
        return scaled

    def _lend_unseen(self) -> None:
        """Record that from now on gradients may be set or added without a backward pass that castwise notices."""
        self._lent = True
        self._owners.clear()

    def _begin(self, transformed: bool, _: torch.Tensor) -> None:
        self._begun = True
        self._task = _torch.autograd.graph_task_id()
        before = self._marks()

        def end() -> None:
            self.fed()
            if self._marks() == before and not self.scaler.asked:
                params = [p for optimizer in self._optimizers() for p in gradients.stored(optimizer)]
                self._handed_out = transformed or any(map(_torch.autograd.is_returned, params))

        # Queued twice, so that it runs after hooks that are queued during the backward and reduce gradients over ranks.
        _torch.autograd.on_graph_task_end(lambda: _torch.autograd.on_graph_task_end(end))

    def _marks(self) -> list[tuple[int, int]]:
        """Return the ``id`` and the version of each gradient, by which a later change is noticed."""
        grads = [grad for optimizer in self._optimizers() for grad in gradients.on_each(optimizer)]
        grads += [parameter.grad for parameter in self._strays()]
        return [*zip(map(id, grads), _torch.tensors.versions(grads), strict=True)]

    def _runs(self) -> bool:
        """Whether the backward pass of a scaled loss is running."""
        return self.in_backward or (self._task != -1 and _torch.autograd.graph_task_id() == self._task)

    def is_scaled(self, optimizer: Optimizer) -> bool:
        """Whether the gradients of an optimizer are multiplied by the loss scale."""
        key = id(optimizer)
        held = self._owners.get(key)
        if (held is not None and held.holds()) or self._runs():
            return True
        handed_out = (
            self._handed_out and not self.scaler.asked
        )  # if the user has asked for the scale, the gradients are taken to be divided by it
        return (self._lent or self._begun or handed_out) and key not in self.scaler._flags.states

    def were_replaced(self, optimizer: Optimizer) -> bool:
        """Whether all gradients of an optimizer that were multiplied by the scale were replaced without being cleared."""
        held = self._owners.get(id(optimizer))
        return held is not None and held.were_replaced()

    def cleared(self, by: Optimizer | torch.nn.Module) -> None:
        """Record that ``zero_grad`` of an optimizer or module ``by`` is about to clear gradients."""
        if not (self._owners or self._by_hand or self._stray is not None):
            return
        which = set(map(id, gradients.stored(by) if isinstance(by, Optimizer) else by.parameters()))
        scale = self.scaler._losses.current.scale
        for key, held in self._owners.items():
            lost = [parameter for parameter in held.owned() if id(parameter) in which]
            self._cleared.setdefault(key, Cleared()).note(lost, None if scale is None else peek(scale))
        for held in (*self._owners.values(), *([] if self._stray is None else [self._stray])):
            held.release(which)
        for key, (params, _) in self._by_hand.items() if self.scaler.works else ():
            state = self.scaler._flags.states.get(key)
            if state is None or state["stage"] is not OptState.UNSCALED or not params <= which:
                continue
            if flags := state["found_inf_per_device"]:  # none if they were cleared before
                self._dropped[key], state["found_inf_per_device"] = flags, {}
                if not self.evaluates:
                    self._given_up.add(key)
                self._put_back_unstepped()

    def _take_part(self, optimizer: Optimizer) -> None:
        """Update the scale on a rank that ran no backward pass since the last step, if other ranks step together with it.

        On the other ranks, the scale was updated when their backward pass began. Gradients on this rank are assumed to
        be a sum over ranks, so that they are multiplied by that scale. The code that makes ranks agree checks this for
        the optimizers in :attr:`summed`.
        """
        key, held = id(optimizer), self._owners.get(id(optimizer))
        if (held is not None and held.holds()) or self._runs():
            return
        known = self.scaler._flags.states.get(key)
        name, was_first = self._habits.get(key, (self.scaler._losses.current.name, False))
        over = self.stepped and was_first if known is None else known["stage"] is OptState.STEPPED
        if not over and (known is not None or self.is_scaled(optimizer)):
            return
        if self.ranks_differ():
            self.used = True
            if over:
                self.open(idle=True)
                self.scaler._losses.open(name)
            if gradients.move(optimizer):
                self.summed.append(optimizer)

    # --- unscaling --------------------------------------------------------------------------------------------

    def unscale_(self, optimizer: Optimizer, *, by_hand: bool = False) -> None:
        """Unscale an optimizer's gradients and check whether they are finite, unless that was done before.

        ``by_hand`` says that the user calls this and may change the gradients before the step, so that the step checks
        them again.

        Raises:
            StateError: The gradients were changed while they were scaled.
        """
        scaler = self.scaler
        if self.scales:
            if by_hand:
                _refuse_per_sample(optimizer)
            self._take_part(optimizer)
            needed = self._check(optimizer, "unscale_ by hand" if by_hand else "unscale_")
        else:
            needed = scaler.works and not scaler._flags.is_unscaled(optimizer)
        if needed:
            self.settled = False
            scaler.unscale_(optimizer)
        if self._by_hand:
            self._look_again(optimizer)
        if by_hand:
            self._look_at_step(optimizer)
            if scaler.works:
                self.written.note_unscaled(optimizer, scaler._flags.of((optimizer,)))

    def note_norm(
        self, optimizers: Iterable[Optimizer], norm: torch.Tensor, *, by_hand: bool = False
    ) -> None:
        """Record the norm of the gradients of these optimizers: if it is not finite, the step will be skipped.

        ``by_hand`` is as for :meth:`unscale_`.
        """
        self.settled = False
        for optimizer in optimizers:
            self._by_hand.pop(id(optimizer), None)
            if by_hand:
                self._look_at_step(optimizer)
        if self.scaler.works:
            self.scaler._flags.note_norm(optimizers, norm)

    def were_cleared(self, optimizer: Optimizer) -> bool:
        """Whether an optimizer's gradients seem to be computed from copies of scaled gradients that were then cleared.

        Waits for the device.
        """
        cleared = self._cleared.get(id(optimizer))
        return cleared is not None and cleared.were_used_for(gradients.stored(optimizer))

    def no_look_at_step(self, optimizer: Optimizer) -> None:
        """Forget the gradients of an optimizer that were unscaled, returned or cleared, since other code steps it."""
        self._by_hand.pop(id(optimizer), None)
        self._returned.pop(id(optimizer), None)
        self._cleared.pop(id(optimizer), None)

    def _look_at_step(self, optimizer: Optimizer) -> None:
        params = {id(_stored(p)) for group in optimizer.param_groups for p in group["params"]}
        self._by_hand[id(optimizer)] = params, _ends(gradients.on_each(optimizer))

    def _check(self, optimizer: Optimizer, call: str) -> bool:
        """Whether an optimizer's gradients must still be unscaled; ``call`` names the caller for error messages.

        They must if they come from the backward pass of a scaled loss, or if this rank has none but other ranks may.

        Raises:
            StateError: The gradients did not come from a scaled loss, were clipped or changed in a similar way before
                they were unscaled, or cannot be unscaled inside a running backward pass.
        """
        known, runs = self.scaler._flags.states.get(id(optimizer)), self._runs()
        if runs and (
            call == "unscale_ by hand"
            or self.scaler._losses.flags
            or (known is not None and known["stage"] is OptState.STEPPED and gradients.lie_on(optimizer))
        ):
            raise StateError(
                f"{call.split()[0]}({type(optimizer).__name__}): called inside a backward, whose later gradients will still "
                f"hold the loss scale. Inside a backward only amp.step(optimizer) may be called, once for each optimizer and "
                f"with one loss; unscale and clip "
                "after amp.backward(loss)"
            )
        if known is not None:
            return False  # unscaled already, and possibly stepped on
        if not self.is_scaled(optimizer):
            if gradients.move(optimizer) and not self.ranks_differ():
                raise StateError(
                    f"{call}({type(optimizer).__name__}): its gradients did not come from a scaled loss. Compute them by "
                    "amp.backward(loss), or by amp.scale(loss).backward(); for gradients computed otherwise, call "
                    "optimizer.step() itself"
                )
            self.scaler.scale_tensor()  # other ranks may have gradients and wait for this one
        held = self._owners.get(id(optimizer))
        if not (runs or self._handed_out) and held is not None and held.were_changed():
            raise StateError(
                f"{call}({type(optimizer).__name__}): its gradients were changed since the backward, or replaced, while the loss "
                "scale was still in them. Scaled gradients are too large by the factor of the scale, so clipping them or adding to "
                "them is wrong. Clear them with optimizer.zero_grad(). Then call amp.unscale_(optimizer) before any change of the "
                "gradients, even a division, or let castwise clip: amp.step(optimizer, max_norm=...)"
            )
        self._owners.pop(id(optimizer), None)
        return True

    # --- steps ------------------------------------------------------------------------------------------------

    def check_step(self, optimizers: Sequence[Optimizer], ranks_differ: Callable[[], bool]) -> None:
        """Raise if these optimizers have no gradients, or if one has already stepped with its gradients.

        Args:
            optimizers: The optimizers to be stepped.
            ranks_differ: A function that returns whether another rank can have gradients where this rank has none. It
                is called only if needed.

        Raises:
            StateError: There are no gradients, or a step was already made with them.
        """
        found = False
        for optimizer in optimizers:
            ends = gradients.ends(optimizer)
            found = found or ends is not None
            last = self._last.get(id(optimizer))
            if ends is None or last is None or last[0]() is not ends[0] or last[1]() is not ends[1]:
                continue
            state = self.scaler._flags.states.get(id(optimizer)) if self.scales else None
            known = state is not None and state["stage"] is OptState.STEPPED and not self._runs()
            if last[2] == _torch.tensors.versions(ends) and (
                known or last[3] == _torch.autograd.sequence_number()
            ):
                raise StateError(
                    f"step({type(optimizer).__name__}): it has already stepped with these gradients, and no backward was "
                    f"called in between. "
                    "Call amp.step(optimizer) once after each amp.backward(loss)"
                )
        if not found and not ranks_differ():
            raise StateError(
                f"step({_names(optimizers)}): no parameter has a gradient, so there is nothing to do. Call "
                f"amp.backward(loss) "
                "before it, and zero_grad() after it; leave the step out where the loss does not reach these parameters"
            )

    def step(self, optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> StepResult:
        """Unscale the gradients unless they are unscaled already, then step, or skip if a gradient is not finite.

        A closure is as for :meth:`GradScaler.step`, and calls ``Amp.backward``.

        Raises:
            StateError: Gradients did not come from a scaled loss, or were changed while they were scaled.
        """
        owned = self._owners.get(id(optimizer))
        if closure is not None:
            self.open()
            closure = self._wrap(optimizer, closure)
        elif self.scales:
            self._take_part(optimizer)
            self._get_ready(optimizer)
        elif self._by_hand:
            self._look_again(optimizer)
        self._returned.pop(id(optimizer), None)
        self._cleared.pop(id(optimizer), None)
        self.stepping.add(id(optimizer))
        try:
            if closure is None and self.written.begin_step(optimizer):
                result = self._skip(optimizer)
            else:
                result = self.scaler.take(optimizer, closure)
            if self.scales:
                self._owners.pop(id(optimizer), None)
                self._habits[id(optimizer)] = self.scaler._losses.current.name, not self.stepped
                self.stepped = True
            self._remember(optimizer)
        except BaseException as error:
            if self.scales and closure is None:
                self._take_back(optimizer, owned)
            if isinstance(error, (LossScaleError, NonFiniteError)):
                self.skips += 1
                self.buffers.put_back()
                self.buffers.end_window(optimizer)
            raise
        finally:
            self.stepping.discard(id(optimizer))
            if self.scales:
                self.settled = self.scaler.asked = False
        if result is not STEPPED:
            self.count(result, skips=not self.written.is_counted(optimizer))
        self.buffers.end_window(optimizer)
        return result

    def _skip(self, optimizer: Optimizer) -> StepResult:
        """Skip a step although its gradients are finite; they do not count as an overflow."""
        if not self.scaler._flags.is_unscaled(optimizer):
            self.scaler.unscale_(optimizer)
        state = self.scaler._flags.states[id(optimizer)]
        found = state["found_inf_per_device"]
        state["found_inf_per_device"] = {device: torch.ones_like(flag) for device, flag in found.items()}
        result = self.scaler.take(optimizer)
        state["found_inf_per_device"] = found
        return result

    def _remember(self, optimizer: Optimizer) -> None:
        ends = gradients.ends(optimizer)
        if ends is not None:
            first, last = map(weakref.ref, ends)
            self._last[id(optimizer)] = (
                first,
                last,
                _torch.tensors.versions(ends),
                _torch.autograd.sequence_number(),
            )

    def give_up(self, optimizers: Iterable[Optimizer]) -> None:
        """Make the next step of these optimizers check their gradients again, because a joint step of them has failed."""
        for optimizer in optimizers:
            if not self.scales:
                self.scaler._flags.forget(optimizer)
            elif self.scaler._flags.is_unscaled(optimizer):
                self._look_at_step(optimizer)

    def _take_back(self, optimizer: Optimizer, owned: Held | None) -> None:
        """Record after a failed step that gradients are still scaled, if the step's fused kernel was to unscale them.

        ``owned`` is the record of the optimizer's scaled gradients before the step.
        """
        take_back(optimizer)
        if self.scaler._flags.states[id(optimizer)]["stage"] is OptState.READY:
            self.scaler._flags.forget(optimizer)
            if owned is not None:
                self._owners[id(optimizer)] = owned

    def _get_ready(self, optimizer: Optimizer) -> None:
        if not self._check(optimizer, "step"):
            # also if a step was made before, since it left the gradients unscaled
            self.scaler._flags.states[id(optimizer)]["stage"] = OptState.UNSCALED
            self._look_again(optimizer)

    def _look_again(self, optimizer: Optimizer) -> None:
        if id(optimizer) not in self._by_hand:
            return
        known, ends = self._by_hand.pop(id(optimizer))
        if not self.scaler.works:
            return
        if ends is not None and all(end() is None for end in ends):  # the gradients were replaced or cleared
            self.scaler._flags.states[id(optimizer)]["found_inf_per_device"] = {}
        if self.scales:
            if self.scaler._unscaling.admit is not None:
                self.scaler._unscaling.admit(optimizer)
            params = [
                p for group in optimizer.param_groups for p in group["params"] if id(_stored(p)) not in known
            ]
            self._divide([parameter.grad for parameter in params if parameter.grad is not None])
        self.scaler.note_unscaled(optimizer)

    def _wrap(self, optimizer: Optimizer, closure: Callable[[], Any]) -> Callable[[], Any]:
        if not self.scales:
            return closure

        def evaluate() -> Any:
            self._owners.pop(id(optimizer), None)
            value = closure()
            if not self._owners.pop(id(optimizer), None) and not self._lent:
                raise StateError(
                    f"step({type(optimizer).__name__}, closure=...): the closure did not compute its gradients from a scaled loss; "
                    "call amp.backward(loss) in it instead of loss.backward()"
                )
            return value

        return evaluate

    def count(self, result: StepResult, *, skips: bool = True) -> None:
        """Count a step for :attr:`skipped_steps`, and restore the buffers that became non-finite if it was skipped.

        ``skips`` says whether a skipped step is counted. It is False for gradients that were cleared within another
        step.
        """
        if result.known:
            self.skips += result.skipped and skips
            if result.skipped:
                result.note_restored(self.buffers.put_back())
        else:
            flag = result.found_inf
            self._unread = flag if self._unread is None else self._unread + flag
            result.note_restored(self.buffers.put_back(flag))

    @property
    def skipped_steps(self) -> int:
        """How many steps were skipped so far. Waits for the device if a fused optimizer decided there whether to skip."""
        return self.skips + (0 if self._unread is None else int(self._unread.item()))

    # --- gradients hidden from steps of other code ------------------------------------------------------------

    def scales_strange(self, optimizer: Optimizer) -> bool:
        """Whether an optimizer that is not one of :attr:`optimizers` has gradients that are multiplied by the scale."""
        if any(known is optimizer for known in self._optimizers()):
            return False
        held = [*self._owners.values(), *([] if self._stray is None else [self._stray])]
        owned = {id(parameter) for some in held for parameter in some.owned()}
        if self._runs():
            owned.update(id(parameter) for parameter in self._strays() if parameter.grad is not None)
        # the same gradient tensors may have been set on another model's parameters
        lent = {id(p.grad) for some in held for p in some.owned()}
        return any(
            id(p) in owned or (p.grad is not None and id(p.grad) in lent) for p in gradients.stored(optimizer)
        )

    def let_go(self, optimizer: Optimizer | None = None) -> None:
        """Unscale the gradients of an optimizer, and stop keeping track of them.

        Without an optimizer, do so with the gradients of parameters that none of the optimizers updates.
        """
        if optimizer is not None:
            held = gradients.held(optimizer) if self.is_scaled(optimizer) else []
            self._owners.pop(id(optimizer), None)
        else:
            strays, self._stray = self._stray, None
            held = [p.grad for p in strays.owned() if p.grad is not None] if strays is not None else []
        if held:
            self._divide(held)

    def _divide(self, grads: list[torch.Tensor]) -> None:
        inverse = gradients.inverse(self.scaler.scale_tensor())
        gradients.check_and_multiply(grads, inverse, inverse.device)

    # --- state ------------------------------------------------------------------------------------------------

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the saved state of a scaler, and rescale existing gradients to the loaded scale."""
        if not self.scales:
            return
        used = self.used
        self.open()
        self.used = used
        self.fed()
        scaler, name = self.scaler, self.scaler._losses.opened_by
        held = {id(grad): grad for o in self._optimizers() for grad in gradients.held(o)}
        old = scaler.scale_tensor().clone()
        scaler.load_state_dict(dict(state))
        if held:
            if name is not None:
                scaler._losses.open(name)
            factor = scaler.scale_tensor() / old
            gradients.check_and_multiply(list(held.values()), factor, factor.device)


def _ends(grads: list[torch.Tensor | None]) -> _Ends | None:
    some = [grad for grad in grads if grad is not None]
    return (TensorWeakRef(some[0]), TensorWeakRef(some[-1])) if some else None


def _refuse_per_sample(optimizer: Optimizer) -> None:
    """Raise if an optimizer's parameters have per-sample gradients, as Opacus keeps them.

    The optimizer steps with these, and they are multiplied by the loss scale too.
    """
    if any(getattr(parameter, "grad_sample", None) is not None for parameter in gradients.stored(optimizer)):
        raise StateError(
            f"unscale_({type(optimizer).__name__}): its parameters have per-sample gradients (grad_sample), which also hold "
            f"the loss scale and cannot be unscaled here. Use a plan without a loss scale, such as 'bf16-mixed'"
        )


def _names(optimizers: Iterable[Optimizer]) -> str:
    return ", ".join(type(optimizer).__name__ for optimizer in optimizers)


def _stored(parameter: torch.Tensor) -> torch.Tensor:
    """Return the model's parameter of which this is an fp32 master, or the parameter itself if it is not a master."""
    return getattr(parameter, "stored", parameter)
