"""Detects the models and optimizers that a script trains, and makes them train under a castwise plan.

A model is prepared, together with the optimizers that update it, when the script first calls the model or wraps it in
DistributedDataParallel. The model is the outermost module that the script calls and whose parameters belong to an optimizer.
With gradients enabled, trainable parameters suffice. An optimizer that the script makes later is added at the next backward
pass.

If the plan has a loss scale, the tensor on which the script calls ``backward`` is scaled. Gradients are unscaled when
``backward`` returns, so that the script clips, accumulates and reads the same gradients as without a loss scale. A step whose
gradients are not finite updates nothing.

A model or optimizer that cannot be trained under the plan is reported once, and runs as it would without castwise.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from castwise.core import _torch
from castwise.core.casting import frames
from castwise.core.casting.trees import map_tensors
from castwise.core.masters import model_param_of
from castwise.core.masters.sync import sync
from castwise.core.model.arrival import low_tensors, widen_for
from castwise.core.model.borders import Border, Door, door_of, root_of, strip
from castwise.core.parallel import wrappers
from castwise.core.plans.formats import LOW, LOW_DTYPES
from castwise.core.plans.plan import Plan
from castwise.core.plans.text import some
from castwise.core.scaler import add_up, gradients, inside, is_watched, set_aside, watch_closure
from castwise.core.session import Amp, bypass
from castwise.core.session.amp import SessionView
from castwise.errors import CastwiseError, sentence

_PATIENCE = 1 << 31
"""The number of consecutive skipped steps after which castwise would raise an error: so large that it never does."""
_SMALLER, _SEEKS = 16.0, 8
"""If ``torch.autograd.grad`` returns non-finite gradients, it is called again with the loss scale divided by ``_SMALLER``.
After ``_SEEKS`` consecutive searches for a scale with finite gradients have failed, castwise no longer searches."""


def _say(text: str) -> None:
    print(f"castwise run: {text}", file=sys.stderr, flush=True)


class Follower:
    """Makes the models and optimizers of a script train under a plan, from :meth:`begin` to :meth:`end`.

    Args:
        plan: The plan that the script trains under.
        widen: If the script stores a model in bf16 or fp16, store it in fp32, except the parameters that the plan stores in a
            low-precision format.
        say: A function that is called with each message for the user.

    Attributes:
        sessions: The sessions that prepared the script's models, by device type.
        say: The function that is called with each message for the user.
    """

    def __init__(self, plan: Plan, *, widen: bool = False, say: Callable[[str], None] = _say) -> None:
        self.plan, self.widen = plan, widen
        self.sessions: dict[str, Amp] = {}
        self.say = say
        self._said: set[str] = set()
        self._left_alone: dict[str, None] = {}
        self._numbers = itertools.count()
        self._optimizers: weakref.WeakValueDictionary[int, Optimizer] = weakref.WeakValueDictionary()
        """The script's optimizers in the order in which they were made, which is the same on all ranks."""
        self._joined: weakref.WeakValueDictionary[int, Optimizer] = weakref.WeakValueDictionary()
        self._models: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        """The models that train under the plan; ``_joined`` holds their optimizers."""
        self._is_late = False
        self._stepping: Optimizer | None = None
        """The optimizer whose step is running, or whose last step raised an error."""
        self._scaling: Amp | None = None
        """The castwise session whose loss scale the running backward pass uses."""
        self._scale: torch.Tensor | None = None
        """The loss scale by which gradients are multiplied while a backward pass runs."""
        self._shown: torch.Tensor | None = None
        """The tensor whose gradient is temporarily unscaled while a hook runs."""
        self._retained: list[weakref.ref[torch.Tensor]] = []
        """Non-leaf tensors on which the script has called ``retain_grad``."""
        self._parts: weakref.WeakKeyDictionary[nn.Module, Border] = weakref.WeakKeyDictionary()
        """Submodules that the script has not called directly yet, of models that the plan stores in a low-precision format.

        The value is the :class:`~castwise.core.model.borders.Border` of the model.
        """
        self._known: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        """The modules of all models that were prepared, or that run as they would without castwise."""
        self._widened: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        """Models whose inputs are cast to fp32, since they were widened under a plan without low formats."""
        self._judged: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        """Optimizers that have stepped."""
        self._undo: list[Callable[[], None]] = []
        self._forwards = _torch.hooks.Forwards(self._forward)
        self._grad_scale: float | None = None
        """The loss scale at which ``torch.autograd.grad`` gave finite gradients, or None if no such scale is known."""
        self._seeks = 0
        """The number of consecutive searches that found no loss scale with finite gradients."""
        self._overflowed: torch.Tensor | None = None
        """Whether the last gradients of ``torch.autograd.grad`` were not finite, as a 0-dim tensor."""
        self._hidden: tuple[Optimizer, list[tuple[torch.Tensor, torch.Tensor]]] | None = None
        """An optimizer whose step runs, and parameters with gradients that it must not use."""
        self._skipped = 0
        """The number of skipped steps of optimizers that are not prepared."""
        self._begun = False

    def begin(self) -> None:
        """Start detecting the models, optimizers and backward passes of the script."""
        self._begun = True
        self._forwards.begin()
        wrappers.on_ddp(self._meet_ddp)
        self._undo = [
            _torch.optimizers.after_optimizers(self._meet_optimizer), _torch.hooks.before_calls(self._meet), _torch.autograd.around_backward(self._backward),
            _torch.steps.subscribe(self._begin_step, self._end_step),
            _torch.hooks.around_scripting(self._without_hooks), self._forwards.end,
        ]  # fmt: skip
        if self.plan.loss_scale is not None:
            for home, names, around in (
                (torch.Tensor, ("register_hook",), self._around_hooks),
                (
                    nn.Module,
                    ("register_full_backward_hook", "register_full_backward_pre_hook"),
                    self._around_hooks,
                ),
                (torch.Tensor, ("retain_grad",), self._around_retain_grad),
                (torch.Tensor, ("register_post_accumulate_grad_hook",), self._around_accumulate_hooks),
            ):
                self._undo += [_torch.hooks.around_function(home, name, around) for name in names]

    def end(self) -> None:
        """Stop detecting models and optimizers, and report how many steps were skipped. Prepared models stay prepared."""
        self._begun = False
        while self._undo:
            self._undo.pop()()
        if skipped := self.skipped_steps:
            self.say(
                f"{skipped} step{'s were' if skipped > 1 else ' was'} skipped because gradients were not finite"
            )
            restored = {name for amp in self.sessions.values() for name in amp.restored_buffers}
            if restored:
                self.say(
                    f"buffers that skipped steps had made non-finite were restored: {some(sorted(restored))}"
                )
        elif not self.sessions and self._left_alone:
            self._once(f"nothing ran under the plan, because {' and '.join(self._left_alone)}")
        elif not self.sessions:
            with_ = " with an optimizer of torch" if self._needs_optimizers else ""
            self._once(f"the script trained no model{with_}, so nothing ran under the plan")

    @property
    def skipped_steps(self) -> int:
        """The number of steps skipped so far because gradients were not finite."""
        return self._skipped + sum(amp.skipped_steps for amp in self.sessions.values())

    def _once(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            self.say(text)

    def _leave_alone(self, model: nn.Module, why: str) -> None:
        self._known.update(model.modules())
        name = type(model).__name__
        self._left_alone[f"{name} was left as it is ({why})"] = None
        self._once(f"{name} runs as it would without castwise: {why}")

    # --- detected models and optimizers ---------------------------------------------------------------------

    def _meet_optimizer(self, optimizer: Optimizer) -> None:
        if self._begun and optimizer not in self._optimizers.values():
            self._optimizers[next(self._numbers)] = (
                optimizer  # the optimizer's __init__ may still be running, so _join prepares it later
            )
            self._is_late = bool(self._models)

    def _begin_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        self._stepping = optimizer
        if optimizer not in self._judged:
            held = _held_by(optimizer)
            if all(held.isdisjoint(_held_by(known)) for known in self._optimizers.values()):
                self._judged.add(optimizer)
                self._meet_optimizer(optimizer)
                self._once(
                    f"{type(optimizer).__name__} made its first step as it would without castwise: it does not call "
                    "Optimizer.__init__, so it was detected then"
                )
        amp = self._scaling
        if amp is not None and _torch.autograd.graph_task_id() != -1 and optimizer in self._joined.values():
            self._hide()
            amp.unscale_(optimizer)  # a hook of the script steps the optimizer during the backward pass
        self._hide_from(optimizer)
        return watch_closure(optimizer, args, kwargs)

    def _hide_from(self, optimizer: Optimizer) -> None:
        """Hide gradients that are not finite from an optimizer that is not prepared, but updates a prepared model.

        It may update the same parameters as a prepared one, or contain that one and use its gradients itself.
        """
        self._show_to(optimizer)
        if self._hidden is not None or not self.sessions or is_watched(optimizer):
            return
        held = self._held()
        params = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        if not any(id(model_param_of(p)) in held for p in params):
            return
        if bool(gradients.are_finite([p.grad for p in params if p.grad is not None], params[0].device)):
            self._hidden = optimizer, [(p, p.grad) for p in params if p.grad is not None]
            self._skipped += not any(map(is_watched, inside(optimizer)))  # watched ones count their skips
            for parameter in params:
                parameter.grad = None

    def _show_to(self, optimizer: Optimizer) -> None:
        """Put gradients back that were hidden from a step of an optimizer, after it or after an error in it."""
        if self._hidden is not None and self._hidden[0] is optimizer:
            (_, hidden), self._hidden = self._hidden, None
            for parameter, grad in hidden:
                parameter.grad = grad if parameter.grad is None else parameter.grad

    def _end_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._stepping = None
        self._show_to(optimizer)
        if optimizer not in self._judged:
            self._judged.add(optimizer)
            seen = {id(p) for module in self._known for p in module.parameters(recurse=False)}
            held = _held_by(optimizer)
            if seen.isdisjoint(held):
                self._left_alone[
                    f"{type(optimizer).__name__} updates parameters that no call of a module used"
                ] = None
                self._once(
                    f"{type(optimizer).__name__} steps as it would without castwise: it updates parameters that no call of a module "
                    "used. A module runs under the plan when it or its forward is called: call model(...), not a method that computes "
                    "from the parameters themselves, and compile the model, not model.forward"
                )

    def _join(self) -> None:
        """Prepare the optimizers that the script made after their model was prepared."""
        if not self._is_late:
            return
        self._is_late = False
        for model in self._models:
            amp = Amp.of(model)
            for number in self._numbers_of(model) if amp is not None else ():
                optimizer = self._optimizers[number]
                if amp is not None and number not in self._joined:
                    try:
                        amp.prepare(model, optimizer)
                        self._joined[number] = optimizer
                    except CastwiseError as error:
                        kind = type(optimizer).__name__
                        why = sentence(error)
                        if self.plan.keeps_masters and Amp.of(model) is amp:
                            why = (
                                f"the plan {self.plan} keeps fp32 masters of {type(model).__name__} in the optimizers with "
                                "which it was prepared. Make all optimizers before the model's first call, or use a plan that "
                                "stores fp32, such as 'bf16-mixed' or 'fp16-mixed'"
                            )
                        self._once(f"{kind} steps as it would without castwise: {why}")

    def _meet(self, module: nn.Module) -> None:
        if module in self._known or not self._begun:
            if self._parts and module in self._parts and not frames.depth():
                Door(self._parts.pop(module)).put(module)
            return
        if frames.depth():  # a new submodule of a model that already trains under the plan
            self._known.update(module.modules())
            return
        model = wrappers.unwrap(module)
        if model in self._known:
            self._known.add(module)
        elif is_trained(model) and (
            self._numbers_of(model) or (torch.is_grad_enabled() and not self._needs_optimizers)
        ):
            self._prepare(model)
            self._known.add(module)

    def _forward(
        self, forward: Callable[..., Any], module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run the ``forward`` of a module: by the plan, too, if the script called it directly."""
        if not frames.depth():
            self._meet(module)
            border = door_of(module)
            if border is not None:
                sync(module)
                if module in self._widened:
                    args, kwargs = _with_fp32(module, args, kwargs)
                return border.run(module, functools.partial(forward, module), args, kwargs)
        return forward(module, *args, **kwargs)

    @contextlib.contextmanager
    def _without_hooks(self, what: Any) -> Iterator[None]:
        """Remove the hooks of a prepared model, and ours on ``forward``, for TorchScript, which cannot compile them."""
        with self._forwards.suspended(), contextlib.ExitStack() as put_back:
            if isinstance(what, nn.Module):
                strip(what, put_back.callback)
            yield

    def _meet_ddp(self, ddp: DistributedDataParallel, module: nn.Module) -> None:
        model = wrappers.unwrap(module)
        if self._begun and model not in self._known and is_trained(model):
            self._prepare(model)

    @property
    def _needs_optimizers(self) -> bool:
        """Whether a model can train under the plan only if a torch optimizer updates it."""
        return self.plan.loss_scale is not None or self.plan.stores_low

    def _numbers_of(self, model: nn.Module) -> list[int]:
        """Return the numbers of the optimizers that update a model, without those that share their groups with an optimizer around them.

        If an optimizer has groups of its own around another one, the inner one is prepared: it makes the updates.
        """
        holding = {
            number: optimizer for number, optimizer in self._optimizers.items() if holds(optimizer, model)
        }
        within = {id(outer): {*map(id, inside(outer))} for outer in holding.values()}
        left_out: set[int] = set()
        for number, outer in holding.items():
            own = set(map(id, outer.param_groups))
            inner = [known for known in holding.values() if id(known) in within[id(outer)]]
            before = [
                known
                for other, known in holding.items()
                if other < number and id(outer) not in within[id(known)]
            ]
            shared = [known for known in [*inner, *before] if not own.isdisjoint(map(id, known.param_groups))]
            left_out.update(map(id, shared if shared or not inner else [outer]))
        return [number for number, optimizer in holding.items() if id(optimizer) not in left_out]

    def _prepare(self, model: nn.Module) -> None:
        numbers = self._numbers_of(model)
        device_type = next(model.parameters()).device.type
        ours = {id(amp.scaler) for amp in self.sessions.values()}
        if torch.is_autocast_enabled(device_type):
            self._leave_alone(model, "the script runs it in torch.autocast")
        elif any(
            scaler.is_enabled() and id(scaler) not in ours
            for scaler in _torch.tensors.living(torch.amp.GradScaler)
        ):
            self._leave_alone(model, "the script scales its loss with a GradScaler")
        elif self.plan.stores_low and any(p.dtype is torch.float64 for p in model.parameters()):
            self._leave_alone(
                model,
                f"it has parameters in fp64, which the plan {self.plan} would mix with parameters in a low format",
            )
        elif self.plan.stores_low and not numbers:
            self._leave_alone(
                model, f"the plan {self.plan} needs an optimizer that is made before the model is wrapped"
            )
        elif self.plan.stores_low and self._stepping is not None and holds(self._stepping, model):
            kind = type(self._stepping).__name__
            self._leave_alone(
                model,
                f"its first call is inside a step of {kind}, so the plan {self.plan} cannot be applied in time",
            )
        else:
            optimizers = {number: self._optimizers[number] for number in numbers}
            widen = self.widen and widen_for(self.plan, model)
            widened = widen and low_tensors(model)
            try:
                self._session(device_type).prepare(model, *optimizers.values(), widen=widen)
            except CastwiseError as error:
                self._leave_alone(
                    model, sentence(error).replace("prepare(..., widen=True)", "castwise run --widen")
                )
                return
            if widened and self.plan.formats.isdisjoint(
                LOW
            ):  # plans that have a low-precision format cast the operators' inputs anyway
                model.register_forward_pre_hook(_with_fp32, with_kwargs=True)
                self._widened.add(model)
            self._models.add(model)
            self._joined.update(optimizers)
            self._known.update(model.modules())
            root = root_of(model) if self.plan.stores_low else None
            if (
                root is not None
            ):  # a submodule that is called directly would fail on its low-precision parameters
                self._parts.update((part, root) for part in model.modules() if part is not model)
            bypass.only_tell(model, self._once)
            self._once(f"{type(model).__name__} trains under {self.plan}")

    def _session(self, device_type: str) -> Amp:
        if device_type not in self.sessions:
            self.sessions[device_type] = Amp(self.plan, device=device_type, patience=_PATIENCE)
        return self.sessions[device_type]

    # --- backward -------------------------------------------------------------------------------------------

    def _backward(self, call: Callable[..., Any], outputs: Any, grads: Any, *args: Any, **kwargs: Any) -> Any:
        if not self._begun or _torch.autograd.graph_task_id() != -1:  # called inside another backward pass
            return call(outputs, grads, *args, **kwargs)
        self._hidden = None
        self._join()
        amp = None if self.plan.loss_scale is None else self._session_of(outputs)
        if amp is None:
            return call(outputs, grads, *args, **kwargs)
        leaves, hides = _torch.autograd.leaves_below(outputs)
        own = self._held()
        others = [leaf for leaf in leaves if id(leaf) not in own]
        if (
            len(others) == len(leaves) and not hides
        ):  # no gradient of this backward belongs to the plan's optimizers
            return call(outputs, grads, *args, **kwargs)
        outputs = tuple(out.float() if out.dtype in LOW_DTYPES else out for out in outputs)
        if not kwargs.get("accumulate_grad", True):
            return self._grad(amp, call, outputs, grads, *args, **kwargs)
        self._retained = [kept for kept in self._retained if kept() is not None]
        others += [tensor for kept in self._retained if (tensor := kept()) is not None]
        aside = set_aside(others)
        scale = amp.scale(torch.ones((), device=outputs[0].device))
        self._scaling, self._scale = amp, scale
        try:
            return call(outputs, _scaled(outputs, grads, scale), *args, **kwargs)
        finally:  # also after an error, which may have left scaled gradients
            self._scaling = self._scale = None
            for grad in [leaf.grad for leaf in others if leaf.grad is not None]:
                grad.div_(scale)
            add_up(aside)
            for optimizer in self._joined.values():
                if gradients.lie_on(optimizer):
                    amp.unscale_(optimizer)

    def _around_hooks(self, register: Callable[..., Any]) -> Callable[..., Any]:
        """Return a replacement of a function that registers gradient hooks. The hooks then get unscaled gradients."""

        def registered(place: Any, hook: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            def run(*given: Any) -> Any:
                scale = self._scale
                if scale is None:
                    return hook(*given)
                true = map_tensors(lambda grad: grad / scale, given)
                found = hook(*true)
                if found is None and isinstance(true[0], torch.Tensor) and _torch.tensors.version(true[0]):
                    found = true[0]  # the hook changed the gradient in place
                return map_tensors(lambda grad: grad * scale, found)

            run.__wrapped__ = hook  # type: ignore[attr-defined] # hooks are part of a module's pickle
            return register(place, run, *args, **kwargs)

        return registered

    def _hide(self) -> None:
        """Multiply the gradient that was unscaled for a hook by the loss scale again."""
        shown, self._shown = self._shown, None
        if shown is not None and self._scale is not None:
            _rescale(shown, self._scale)

    def _around_accumulate_hooks(self, register: Callable[..., Any]) -> Callable[..., Any]:
        """Return a replacement of ``register_post_accumulate_grad_hook``.

        While a hook runs, the gradient of its parameter is unscaled.
        """

        def registered(parameter: torch.Tensor, hook: Callable[..., Any]) -> Any:
            def run(parameter: torch.Tensor) -> None:
                if self._scale is not None:
                    self._shown = parameter
                    _rescale(parameter, 1 / self._scale)
                try:
                    hook(parameter)
                finally:
                    self._hide()

            return register(parameter, run)

        return registered

    def _around_retain_grad(self, retain: Callable[..., Any]) -> Callable[..., Any]:
        def retained(tensor: torch.Tensor) -> None:
            retain(tensor)
            if not tensor.is_leaf and all(kept() is not tensor for kept in self._retained):
                self._retained.append(weakref.ref(tensor))

        return retained

    def _held(self) -> set[int]:
        """Return the ``id`` of each model parameter whose gradient is unscaled through its optimizer."""
        return set().union(*map(_held_by, self._joined.values()))

    def _grad(
        self, amp: Amp, call: Callable[..., Any], outputs: Any, grads: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Run ``torch.autograd.grad`` with a loss scale, and return the gradients without the scale.

        A script may differentiate something other than a loss. For example, the gradients of a sum of outputs may overflow at
        a loss scale that suits a mean. The first call therefore keeps the autograd graph and is repeated with smaller scales,
        down to 1, until the gradients are finite. Later calls use the scale that was found.
        """
        retain, *more = args
        if self._overflowed is not None and bool(self._overflowed):
            self._grad_scale = None  # the script differentiates another function now: search again
        scale = (
            amp.scaler.scale_tensor().clone()
        )  # cloned: autograd saves this tensor if the result is differentiated again
        sought = self._grad_scale is None and self._seeks < _SEEKS
        if self._grad_scale is not None:
            scale.clamp_(max=self._grad_scale)
        while True:
            self._scale = scale
            try:
                found = call(outputs, _scaled(outputs, grads, scale), retain or sought, *more, **kwargs)
            finally:
                self._scale = None
            self._overflowed = (
                gradients.are_finite([grad for grad in found if grad is not None], scale.device) > 0
            )
            if not (sought and bool(self._overflowed) and bool(scale > 1.0)):
                break
            scale = (scale / _SMALLER).clamp_(min=1.0)
        if sought and not bool(self._overflowed):
            self._grad_scale, self._seeks = float(scale), 0
        elif sought:
            self._seeks += 1
        true = tuple(None if grad is None else grad / scale for grad in found)
        inputs = args[2]
        if not self._held().isdisjoint(
            map(id, inputs)
        ):  # the script may use these gradients in an optimizer step
            window = SessionView(amp).window
            window.open(amp.scaler._losses.current.name, idle=True)
            window.differentiated = True
            window.note_returned(inputs, true)
        return true

    def _session_of(self, outputs: Any) -> Amp | None:
        for output in outputs:
            if isinstance(output, torch.Tensor) and output.device.type in self.sessions:
                return self.sessions[output.device.type]
        return None


def _with_fp32(model: nn.Module, args: Any, kwargs: Any) -> Any:
    """Cast bf16 and fp16 inputs of a model to fp32, as a forward pre-hook.

    The script stores the model in bf16 or fp16, but the plan stores the model and computes in fp32 only.
    """
    return map_tensors(
        lambda tensor: tensor.float() if tensor.dtype in LOW_DTYPES else tensor, (args, kwargs)
    )


def _rescale(tensor: torch.Tensor, by: torch.Tensor) -> None:
    if tensor.grad is not None:
        with torch.no_grad():
            tensor.grad.mul_(by)


def _scaled(outputs: tuple[torch.Tensor, ...], grads: Any, scale: torch.Tensor) -> tuple[Any, ...]:
    return tuple(
        grad if grad is None else grad.to(output.dtype) * scale.to(output.device)
        for output, grad in zip(outputs, grads, strict=True)
    )


def _held_by(optimizer: Optimizer) -> set[int]:
    """Return the ``id`` of each model parameter that an optimizer updates."""
    return {id(model_param_of(p)) for group in optimizer.param_groups for p in group["params"]}


def is_trained(model: nn.Module) -> bool:
    """Whether any parameter of the model requires a gradient."""
    return any(parameter.requires_grad for parameter in model.parameters())


def holds(optimizer: Optimizer, model: nn.Module) -> bool:
    """Whether an optimizer updates any of a model's parameters."""
    own = {id(parameter) for parameter in model.parameters()}
    return any(id(parameter) in own for group in optimizer.param_groups for parameter in group["params"])
