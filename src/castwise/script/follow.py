"""See what a script trains, and have it train by a plan.

A model is prepared when the script first calls it to train it, together with the optimizers that update it: the outermost
module with parameters that is called while gradients are on; or when DistributedDataParallel takes it in. An optimizer that is
made later joins then. What ``backward`` is called on is scaled where the plan has a loss scale, and gradients
are unscaled when it returns, so that the script clips, adds up and reads what it would without a scale. A step on gradients that
are not finite updates nothing.

What cannot be followed is said once, and runs as it would have without castwise.
"""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from castwise import _torch
from castwise.errors import CastwiseError, sentence
from castwise.masters import model_param_of
from castwise.parallel import wrappers
from castwise.plans.formats import LOW_DTYPES
from castwise.plans.plan import Plan
from castwise.scaler import add_up, gradients, set_aside
from castwise.session import Amp

_PATIENCE = 1 << 31
"""Steps in a row that may be skipped: the script goes on, as it would have without castwise."""


def _say(text: str) -> None:
    print(f"castwise run: {text}", file=sys.stderr, flush=True)


class Follower:
    """Follows a script's training from :meth:`begin` to :meth:`end`.

    Args:
        plan: What it is to train by.
        say: Called with each sentence that the user should know.

    Attributes:
        sessions: By device type, what has prepared the script's models.
    """

    def __init__(self, plan: Plan, say: Callable[[str], None] = _say) -> None:
        self.plan = plan
        self.sessions: dict[str, Amp] = {}
        self._say = say
        self._said: set[str] = set()
        self._optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._joined: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._models: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        """Those that train by the plan, as the optimizers in ``_joined`` do."""
        self._known: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        """Modules of models that are prepared, or are left alone."""
        self._undo: list[Callable[[], None]] = []
        self._begun = False

    def begin(self) -> None:
        """Look from now on."""
        self._begun = True
        wrappers.on_ddp(self._meet_ddp)
        self._undo = [
            _torch.after_optimizers(self._meet_optimizer), _torch.before_calls(self._meet), _torch.around_backward(self._backward)
        ]  # fmt: skip

    def end(self) -> None:
        """Look no more; what is prepared stays so. Say how many steps were skipped."""
        self._begun = False
        while self._undo:
            self._undo.pop()()
        skipped = sum(amp.skipped_steps for amp in self.sessions.values())
        if skipped:
            self._say(f"{skipped} steps were skipped, since a gradient was not finite")
        elif not self.sessions:
            by = " by one of torch's optimizers" if self.plan.loss_scale or self.plan.stores_low else ""
            self._once(f"no model was seen in training{by}, so nothing ran under the plan")

    def _once(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            self._say(text)

    def _leave_alone(self, model: nn.Module, why: str) -> None:
        self._known.update(model.modules())
        self._once(f"{type(model).__name__} runs as it would without castwise: {why}")

    # --- what is met ----------------------------------------------------------------------------------------

    def _meet_optimizer(self, optimizer: Optimizer) -> None:
        if not self._begun or optimizer in self._optimizers:
            return
        self._optimizers.add(optimizer)
        for model in list(self._models):
            amp = Amp.of(model)
            if amp is not None and _holds(optimizer, model):
                self._guarded(model, amp, [optimizer])

    def _meet(self, module: nn.Module) -> None:
        if module in self._known or not torch.is_grad_enabled() or not self._begun:
            return
        model = wrappers.unwrap(module)
        if model in self._known:
            self._known.add(module)
            return
        optimizers = self._optimizers_of(model)
        early = self.plan.loss_scale is None and not self.plan.stores_low  # the script may update it by hand
        if optimizers or (early and _is_trained(model)):
            self._prepare(model, optimizers)
            self._known.add(module)

    def _meet_ddp(self, ddp: DistributedDataParallel, module: nn.Module) -> None:
        model = wrappers.unwrap(module)
        if self._begun and model not in self._known and _is_trained(model):
            self._prepare(model, self._optimizers_of(model))

    def _optimizers_of(self, model: nn.Module) -> list[Optimizer]:
        return [optimizer for optimizer in self._optimizers if _holds(optimizer, model)]

    def _prepare(self, model: nn.Module, optimizers: list[Optimizer]) -> None:
        device_type = next(model.parameters()).device.type
        ours = {id(amp.scaler) for amp in self.sessions.values()}
        if torch.is_autocast_enabled(device_type):
            self._leave_alone(model, "the script autocasts it itself")
        elif any(_is_scaler(thing) and id(thing) not in ours for thing in gc.get_objects()):
            self._leave_alone(model, "the script scales its loss itself, by a GradScaler")
        elif self.plan.stores_low and not optimizers:
            self._leave_alone(model, f"the plan {self.plan} needs the optimizer before the model is wrapped")
        else:
            self._guarded(model, self._session(device_type), optimizers)

    def _guarded(self, model: nn.Module, amp: Amp, optimizers: list[Optimizer]) -> None:
        try:
            amp.prepare(model, *optimizers)
        except CastwiseError as error:
            self._leave_alone(model, sentence(error))
            return
        self._models.add(model)
        self._joined.update(optimizers)
        self._known.update(model.modules())
        self._once(f"{type(model).__name__} trains under {self.plan}")

    def _session(self, device_type: str) -> Amp:
        if device_type not in self.sessions:
            self.sessions[device_type] = Amp(self.plan, device=device_type, patience=_PATIENCE)
        return self.sessions[device_type]

    # --- backward -------------------------------------------------------------------------------------------

    def _backward(self, call: Callable[..., Any], outputs: Any, grads: Any, *args: Any, **kwargs: Any) -> Any:
        amp = self._session_of(outputs)
        # inside another backward the scale is there already
        if amp is None or self.plan.loss_scale is None or not self._begun or _torch.graph_task_id() != -1:
            return call(outputs, grads, *args, **kwargs)
        outputs = tuple(out.float() if out.dtype in LOW_DTYPES else out for out in outputs)
        if not kwargs.get("accumulate_grad", True):
            return self._grad(amp, call, outputs, grads, *args, **kwargs)
        strays = self._strays()
        aside = set_aside(strays)
        scale = amp.scale(torch.ones((), device=outputs[0].device))
        try:
            found = call(outputs, _scaled(outputs, grads, scale), *args, **kwargs)
            for grad in [p.grad for p in strays if p.grad is not None]:
                grad.div_(scale)
        finally:
            add_up(aside)
        for optimizer in self._joined:
            if gradients.lie_on(optimizer):
                amp.unscale_(optimizer)
        return found

    def _strays(self) -> list[torch.Tensor]:
        """Parameters of the models that no optimizer updates."""
        held = {
            id(model_param_of(p))
            for optimizer in self._joined
            for group in optimizer.param_groups
            for p in group["params"]
        }
        return list(
            {id(p): p for model in self._models for p in model.parameters() if id(p) not in held}.values()
        )

    def _grad(
        self, amp: Amp, call: Callable[..., Any], outputs: Any, grads: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """``torch.autograd.grad`` through the scale: gradients that are handed out hold none."""
        scale = amp.scaler.scale_tensor()
        found = call(outputs, _scaled(outputs, grads, scale), *args, **kwargs)
        return tuple(None if grad is None else grad / scale for grad in found)

    def _session_of(self, outputs: Any) -> Amp | None:
        for output in outputs:
            if isinstance(output, torch.Tensor) and output.device.type in self.sessions:
                return self.sessions[output.device.type]
        return None


def _scaled(outputs: tuple[torch.Tensor, ...], grads: Any, scale: torch.Tensor) -> tuple[Any, ...]:
    return tuple(
        grad if grad is None else grad.to(output.dtype) * scale.to(output.device)
        for output, grad in zip(outputs, grads, strict=True)
    )


def _is_trained(model: nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in model.parameters())


def _holds(optimizer: Optimizer, model: nn.Module) -> bool:
    own = {id(parameter) for parameter in model.parameters()}
    return any(id(parameter) in own for group in optimizer.param_groups for parameter in group["params"])


def _is_scaler(thing: object) -> bool:
    # isinstance would ask proxies, which answer with warnings
    return issubclass(type(thing), torch.amp.GradScaler) and thing.is_enabled()
