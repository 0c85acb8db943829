"""Gradients between two updates of the scale: which optimizers own them, their scale, and when they end."""

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
from castwise.core.scaler.result import StepResult, peek, read_on_host
from castwise.core.scaler.step_guard import StepGuard, take_back
from castwise.errors import LossScaleError, NonFiniteError, StateError

_Ends = tuple[TensorWeakRef, TensorWeakRef]
"""The first gradient and the last."""

_Stepped = tuple[weakref.ref[torch.Tensor], weakref.ref[torch.Tensor], list[int], int]
"""The first gradient and the last, their versions, and the number of the next autograd node."""


class Window:
    """The time between two updates of a scale.

    It opens with the first backward; optimizers that hold gradients after a backward own it; the scale is updated when
    the first backward after a step begins. Gradients that still exist then, accumulated or never cleared, are rescaled
    in place to the new scale, so that gradients added to them have the same scale. Reading the scale or the state
    updates nothing.

    Args:
        scaler: The scaler.
        optimizers: Returns the optimizers that may own gradients.
        strays: Returns the trained parameters that no optimizer here holds.
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
        self._optimizers = optimizers
        self._strays = strays
        self._stray: Held | None = None
        """Parameters that no optimizer here holds and whose gradients hold the scale."""
        self.scales = scaler.is_enabled()
        self._owners: dict[int, Held] = {}
        """By optimizer, its parameters whose gradients hold the scale."""
        self._lent = False
        """Whether the user received the scale or a scaled loss, so that any new gradients may hold it."""
        self._begun = False
        """Whether a backward from a scaled loss that the user received has begun and has not ended."""
        self._task = -1
        """The graph task of that backward."""
        self._handed_out = False
        """Whether gradients of a scaled loss were returned, as torch.autograd.grad does, for the caller to set."""
        self.differentiated = False
        """Whether unscaled gradients that were computed through the scale were returned in this window, for the
        caller to set."""
        self._returned: dict[int, tuple[str, torch.Tensor]] = {}
        """By optimizer that has not stepped since: the loss whose unscaled gradients were returned, and their
        non-finite flag."""
        self.settled = not self.scales
        """Whether gradients may be added: all existing ones have the window's scale, and the window is not over."""
        self.in_backward = False
        """Whether the session's backward runs, so that gradients are scaled before it has ended."""
        self.stepped = False
        """Whether the window is over: its scale is updated when the next one opens."""
        self.used = False
        """Whether a scaled loss was ever requested."""
        scaler.is_over = lambda: self.stepped
        scaler.left_out = lambda: [flag for flags in self._dropped.values() for flag in flags.values()]
        scaler.returned = lambda: [*self._returned.values()]
        self._by_hand: dict[int, tuple[set[int], _Ends | None]] = {}
        """Parameters of optimizers that were unscaled explicitly, and their gradients: these may change or be
        replaced, and parameters may join, before the step."""
        self._dropped: dict[int, dict[torch.device, torch.Tensor]] = {}
        """By optimizer, the flags of gradients that were unscaled explicitly and cleared since."""
        self._cleared: dict[int, Cleared] = {}
        """By optimizer, a record of its gradients that were cleared with the scale in them since its last step."""
        self._last: dict[int, _Stepped] = {}
        """By optimizer, the gradients of its last step."""
        self.stepping: set[int] = set()
        """Optimizers that are being stepped by this window."""
        self.hidden: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        """By optimizer, parameters and the gradients that are hidden from a step outside ``Amp.step``."""
        self.ranks_differ: Callable[[], bool] = lambda: False
        """Whether ranks step together, so that all of them must make the same collective calls whatever each has
        done."""
        self._habits: dict[int, tuple[str, bool]] = {}
        """By optimizer, the loss whose scale its last gradients had, and whether it was the first to step in that
        window: a rank without a backward assumes that the next window is the same."""
        self.summed: list[Optimizer] = []
        """Optimizers that are being unscaled and whose gradients are only assumed on this rank to hold the scale, as
        on other ranks."""
        self.skips = 0
        self.sync: Callable[[Optimizer], object] = lambda _: None
        """Called with an optimizer whose step was undone: copies its masters into the model."""
        self.evaluates = False
        """Whether an optimizer steps with a closure, so that gradients of others that it clears do not count as
        skipped steps."""
        """Number of steps that the host knows to have been skipped."""
        self._unread: torch.Tensor | None = None

    @property
    def optimizers(self) -> list[Optimizer]:
        """The optimizers that may own gradients, in the order in which they were prepared."""
        return [*self._optimizers()]

    # --- opening ----------------------------------------------------------------------------------------------

    def open(self, name: str = DEFAULT, *, lend: bool = False, idle: bool = False) -> None:
        """Before gradients are added: update the scale if a step was made, and rescale existing gradients to it.

        A new window has the scale of the loss called ``name``. ``lend``: the user receives the scaled loss, so any new
        gradients may come from it. ``idle``: no gradients are added on this rank, and those that
        came from no backward here stay as they are.
        """
        self.used = True
        self.summed.clear()
        if not self.settled or self._holds_plain():
            self._put_back_unstepped()
            self._by_hand.clear()
            self.hidden.clear()  # left by steps that raised: a new backward means that the user has dealt with them
            dropped = self._count_dropped()
            if self.scales:
                self._settle(name, dropped, self._count_returned(), idle)
            else:
                self.scaler._flags.restart()
            self.settled = True
        if lend:
            self._lend_unseen()

    def _put_back_unstepped(self) -> None:
        """Restore buffers when gradients were checked and the user made no step on them."""
        if not self.scaler.works or not (self._dropped or self.scaler._flags.states):
            return
        states = [
            state for state in self.scaler._flags.states.values() if state["stage"] is OptState.UNSCALED
        ]
        found = [*self._dropped.values(), *(state["found_inf_per_device"] for state in states)]
        flags = [flag for each in found for flag in each.values()]
        bad = read_on_host(flags)
        if bad is not False:
            self.buffers.put_back(None if bad else gradients.largest(flags, flags[0].device))

    def _holds_plain(self) -> bool:
        """Whether gradients came from a backward without the scale since the window was opened."""
        return self.scales and any(
            not self.is_scaled(optimizer) and gradients.lie_on(optimizer) for optimizer in self._optimizers()
        )

    def _count_dropped(self) -> dict[int, dict[torch.device, torch.Tensor]]:
        """The flags of gradients that were unscaled and then dropped by the user's code."""
        dropped, self._dropped = self._dropped, {}
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
                self.count(StepResult(list(flags.values()), send=False), skips=not self.evaluates)
                if bad and isinstance(self.scaler, StepGuard):
                    self.scaler.note_given_up(optimizer)
        return found

    def note_returned(
        self, inputs: Any, grads: Iterable[torch.Tensor | None], name: str | None = None
    ) -> None:
        """Record unscaled gradients that were computed through the scale and returned, for the caller to set or to drop.

        Without a step before the next loss, the scale falls if gradients of parameters were not finite.
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
        """By loss, the flags of gradients that were returned and then dropped by the user's code."""
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
        """After a backward: make each optimizer (by default all) that holds gradients the owner of those gradients."""
        self._begun = False
        for optimizer in self._optimizers() if optimizers is None else optimizers:
            params = gradients.stored(optimizer)
            grads = [parameter.grad for parameter in params]
            if any(grad is not None for grad in grads):
                self._owners[id(optimizer)] = Held(params, grads)
        strays = [parameter for parameter in self._strays() if parameter.grad is not None]
        self._stray = Held(strays, [parameter.grad for parameter in strays]) if strays else None

    def lend(self, scaled: torch.Tensor) -> torch.Tensor:
        """Record that the user receives a scaled loss; once its backward begins, any gradients may come from it.

        If the loss has no graph, the user has asked for the scale itself, so any gradients may hold it from now on.
        """
        if self.scales:
            if scaled.requires_grad and not torch.compiler.is_compiling():
                scaled.register_hook(functools.partial(self._begin, _torch.tensors.is_transformed(scaled)))
            else:
                self._lend_unseen()
        return scaled

    def _lend_unseen(self) -> None:
        """From now on gradients may be set or added without a backward that castwise sees."""
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

        # Queued twice: a backward hook that reduces gradients between ranks is queued during the backward.
        _torch.autograd.on_graph_task_end(lambda: _torch.autograd.on_graph_task_end(end))

    def _marks(self) -> list[tuple[int, int]]:
        """The gradients on the parameters, with their versions."""
        grads = [grad for optimizer in self._optimizers() for grad in gradients.on_each(optimizer)]
        grads += [parameter.grad for parameter in self._strays()]
        return [*zip(map(id, grads), _torch.tensors.versions(grads), strict=True)]

    def _runs(self) -> bool:
        """Whether this is called inside a backward of a scaled loss."""
        return self.in_backward or (self._task != -1 and _torch.autograd.graph_task_id() == self._task)

    def is_scaled(self, optimizer: Optimizer) -> bool:
        """Whether the gradients of one of the window's optimizers hold its scale."""
        key = id(optimizer)
        held = self._owners.get(key)
        if (held is not None and held.holds()) or self._runs():
            return True
        handed_out = (
            self._handed_out and not self.scaler.asked
        )  # whoever asked for the scale has divided by it
        return (self._lent or self._begun or handed_out) and key not in self.scaler._flags.states

    def were_replaced(self, optimizer: Optimizer) -> bool:
        """Whether all gradients that held the scale were replaced by others without being cleared in between."""
        held = self._owners.get(id(optimizer))
        return held is not None and held.were_replaced()

    def cleared(self, by: Optimizer | torch.nn.Module) -> None:
        """Handle ``zero_grad`` of an optimizer or a module, of this session or another."""
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
                self._put_back_unstepped()

    def _take_part(self, optimizer: Optimizer) -> None:
        """Begin the window of a rank that had no backward since the last step, while other ranks step together with it.

        Their window began with a backward, so their scale was updated. Gradients on this rank are then assumed to be a
        sum over ranks, which holds that scale; the code that makes ranks agree ensures this (:attr:`summed`).
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
        """Unscale an optimizer's gradients and check them for infinities, unless both were done before.

        ``by_hand``: they may be changed before the step, so the step checks them again.

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

    def note_norm(
        self, optimizers: Iterable[Optimizer], norm: torch.Tensor, *, by_hand: bool = False
    ) -> None:
        """Use the norm of all gradients as the finite check; ``by_hand`` as for :meth:`unscale_`."""
        self.settled = False
        for optimizer in optimizers:
            self._by_hand.pop(id(optimizer), None)
            if by_hand:
                self._look_at_step(optimizer)
        if self.scaler.works:
            self.scaler._flags.note_norm(optimizers, norm)

    def were_cleared(self, optimizer: Optimizer) -> bool:
        """Whether an optimizer's gradients were computed from scaled gradients that were then cleared. Waits for the device."""
        cleared = self._cleared.get(id(optimizer))
        return cleared is not None and cleared.were_used_for(gradients.stored(optimizer))

    def no_look_at_step(self, optimizer: Optimizer) -> None:
        """Skip the check at the step for gradients that were unscaled explicitly or returned, since other code steps on them."""
        self._by_hand.pop(id(optimizer), None)
        self._returned.pop(id(optimizer), None)
        self._cleared.pop(id(optimizer), None)

    def _look_at_step(self, optimizer: Optimizer) -> None:
        params = {id(_stored(p)) for group in optimizer.param_groups for p in group["params"]}
        self._by_hand[id(optimizer)] = params, _ends(gradients.on_each(optimizer))

    def _check(self, optimizer: Optimizer, call: str) -> bool:
        """Whether gradients must be unscaled: they are unchanged since the backward of a scaled loss, or there are none here.

        Clipping writes or replaces every gradient, so a change of only one of several is not clipping; a reduction
        between ranks does not count as a change.
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
        """Check that there are gradients to step on, and that no step was made on them before.

        Args:
            optimizers: The optimizers to be stepped.
            ranks_differ: Returns whether another rank can have gradients where this one has none; called only if
                needed.

        Raises:
            StateError: There are no gradients, or a step was already made on them.
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
        """Unscale unless already unscaled, then step, or skip if a gradient is not finite.

        A closure is as for :meth:`GradScaler.step`, and calls the session's backward.

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
            self.count(result)
        self.buffers.end_window(optimizer)
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
        """After a failed joint step: forget the flags, or check again, since they hold only for the gradients of that moment."""
        for optimizer in optimizers:
            if not self.scales:
                self.scaler._flags.forget(optimizer)
            elif self.scaler._flags.is_unscaled(optimizer):
                self._look_at_step(optimizer)

    def _take_back(self, optimizer: Optimizer, owned: Held | None) -> None:
        """After a failed step: mark gradients as still scaled if they were to be unscaled by the step's fused kernel."""
        take_back(optimizer)
        if self.scaler._flags.states[id(optimizer)]["stage"] is OptState.READY:
            self.scaler._flags.forget(optimizer)
            if owned is not None:
                self._owners[id(optimizer)] = owned

    def _get_ready(self, optimizer: Optimizer) -> None:
        if not self._check(optimizer, "step"):
            # also after a step, which left them unscaled
            self.scaler._flags.states[id(optimizer)]["stage"] = OptState.UNSCALED
            self._look_again(optimizer)

    def _look_again(self, optimizer: Optimizer) -> None:
        if id(optimizer) not in self._by_hand:
            return
        known, ends = self._by_hand.pop(id(optimizer))
        if not self.scaler.works:
            return
        if ends is not None and all(end() is None for end in ends):  # other gradients, or none
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
        """Record a step, for :attr:`skipped_steps`; if it was skipped, restore the buffers that became non-finite.

        ``skips``: False for gradients that were cleared within another step.
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
        """How many steps were skipped so far. Waits for the device if a fused optimizer decided there."""
        return self.skips + (0 if self._unread is None else int(self._unread.item()))

    # --- gradients hidden from steps of other code ------------------------------------------------------------

    def scales_strange(self, optimizer: Optimizer) -> bool:
        """Whether an optimizer outside the window has gradients that hold its scale."""
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
        """Unscale gradients that hold the scale: those of an optimizer, or those of parameters in no optimizer here."""
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
        """Load a saved scaler's state; existing gradients are rescaled."""
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
    """Refuse per-sample gradients, as Opacus keeps them: they hold the loss scale too, and the optimizer steps on them."""
    if any(getattr(parameter, "grad_sample", None) is not None for parameter in gradients.stored(optimizer)):
        raise StateError(
            f"unscale_({type(optimizer).__name__}): its parameters have per-sample gradients (grad_sample), which also hold "
            f"the loss scale and cannot be unscaled here. Use a plan without a loss scale, such as 'bf16-mixed'"
        )


def _names(optimizers: Iterable[Optimizer]) -> str:
    return ", ".join(type(optimizer).__name__ for optimizer in optimizers)


def _stored(parameter: torch.Tensor) -> torch.Tensor:
    """The model's parameter behind a master; any other parameter itself."""
    return getattr(parameter, "stored", parameter)
