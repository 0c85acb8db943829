"""Follow the steps of a session's optimizers, whether they are made by ``amp.step`` or by a plain ``optimizer.step()``."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

from torch import Tensor
from torch.optim import Optimizer

from castwise.core import _torch
from castwise.core.scaler import StepResult
from castwise.core.session.amp import Amp, SessionView


def follow(
    amp: Amp,
    losses: Callable[[Tensor, str], object],
    steps: Callable[[Sequence[Optimizer], StepResult], object],
    begin: Callable[[], object] | None = None,
) -> Callable[[], None]:
    """Call functions at each loss and each step of a session's optimizers.

    Unlike :meth:`castwise.Amp.listen`, this includes steps that do not go through :meth:`castwise.Amp.step`. For such a step
    the host waits to learn whether it was skipped. Only weak references to the session and the functions are held.

    Args:
        amp: The session.
        losses: A bound method that is called with each loss and its name.
        steps: A bound method that is called with the optimizers and the result of their step.
        begin: A bound method that is called before each step of an optimizer of the session.

    Returns:
        A function that ends the subscription.
    """
    session = weakref.ref(amp)
    heard, told = weakref.WeakMethod(losses), weakref.WeakMethod(steps)
    begun = None if begin is None else weakref.WeakMethod(begin)
    skips: dict[int, int] = {}

    def inside(optimizer: Optimizer) -> SessionView | None:
        alive = session()
        found = None if alive is None else SessionView(alive)
        return found if found is not None and found.members.holds(optimizer) else None

    def before(optimizer: Optimizer, *_: object) -> None:
        found = inside(optimizer)
        if found is None:
            return
        if begun is not None and (call := begun()) is not None:
            call()
        if id(optimizer) not in found.window.stepping:
            skips[id(optimizer)] = found.window.skipped_steps

    def after(optimizer: Optimizer, *_: object) -> None:
        was, found, call = skips.pop(id(optimizer), None), inside(optimizer), told()
        if was is not None and found is not None and call is not None:
            call((optimizer,), StepResult((), skipped=found.window.skipped_steps > was))

    def hear(loss: Tensor, name: str) -> None:
        if (call := heard()) is not None:
            call(loss, name)

    def tell(optimizers: Sequence[Optimizer], result: StepResult) -> None:
        if (call := told()) is not None:
            call(optimizers, result)

    silent = amp.listen(hear, tell)
    unhooked = weakref.finalize(amp, _torch.steps.subscribe(before, after))
    unhooked.atexit = False

    def end() -> None:
        silent()
        unhooked()

    return end
