"""Private API of optimizers: their hooks and settings, and functions that are called when optimizers are used."""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.optim.optimizer import _foreach_supported_types
from torch.utils._foreach_utils import _get_fused_kernels_supported_devices

from castwise.core._torch.hooks import around_function
from castwise.core._torch.operators import unobserved
from castwise.core._torch.release import RELEASE

_MARKS = ("_step_supports_amp_scaling", "_need_device_dtype_check_for_fused")
"""Attributes by which a GradScaler and a step treat an optimizer as fused. torch sets the second one during a step."""


@functools.cache
def fused_sgd_updates_low() -> bool:
    """Whether torch's fused SGD on a CPU updates parameters in bf16 and fp16.

    Before torch 2.14 it silently leaves most elements unchanged.
    """
    with unobserved(), torch.no_grad():
        for dtype, momentum in itertools.product((torch.bfloat16, torch.float16), (0.0, 0.5)):
            parameter = torch.ones(100, dtype=dtype, device="cpu")
            buffers = [torch.zeros_like(parameter)] if momentum else []
            torch._fused_sgd_(
                [parameter], [torch.ones_like(parameter)], buffers, weight_decay=0.0, momentum=momentum, lr=0.5,
                dampening=0.0, nesterov=False, maximize=False, is_first_step=True,
            )  # fmt: skip
            if not (parameter == 0.5).all():
                return False
    return True


def treat_as(made: type, kind: type) -> None:
    """Make optimizers use foreach kernels by default for parameters of the class ``made``, a subclass of ``kind``.

    This is done only if they use foreach kernels for ``kind``. torch compares the exact class, so it would update
    parameters of a subclass one by one.
    """
    if kind in _foreach_supported_types and made not in _foreach_supported_types:
        _foreach_supported_types.append(made)  # type: ignore[arg-type]


def accepts_fused(op: str, device_type: str) -> bool:
    """Whether the optimizer with the kernel ``op`` accepts ``fused=True`` on a device type, which may still lack the kernel.

    Adagrad of torch 2.11 refuses CUDA, although torch has the kernel.
    """
    if (op, device_type) == ("_fused_adagrad_", "cuda") and RELEASE < (2, 13):
        return False
    return device_type in _get_fused_kernels_supported_devices()


def takes_flag(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer's kernels read the non-finite flag of a GradScaler on the device.

    If they do, the host need not wait for the flag. An optimizer that was made fused and has loaded the options of one that was not
    still says that it reads the flag, and refuses it.
    """
    if not getattr(optimizer, "_step_supports_amp_scaling", False):
        return False
    return all(group["fused"] for group in optimizer.param_groups if "fused" in group)


def evaluates_once(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a step evaluates its closure once, before any update. All optimizers of torch except LBFGS do."""
    kind = type(optimizer)
    return kind.__module__.startswith("torch.optim.") and not issubclass(kind, torch.optim.LBFGS)


def mark_fused(optimizer: torch.optim.Optimizer) -> None:
    """Make a GradScaler pass its loss scale and its non-finite flag to an optimizer's fused kernel."""
    vars(optimizer)[_MARKS[0]] = True


def fused_marks(optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    """Return a function that undoes a later :func:`mark_fused`: it restores the attributes that the optimizer has now."""
    before = {name: value for name, value in vars(optimizer).items() if name in _MARKS}
    alive = weakref.ref(optimizer)

    def undo() -> None:
        if (found := alive()) is not None:
            for name in _MARKS:
                vars(found).pop(name, None)
            vars(found).update(before)

    return undo


def has_step_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Whether ``Optimizer.__init__`` has run. Some wrappers of optimizers omit it, and then accept no hooks."""
    return hasattr(optimizer, "_optimizer_step_pre_hooks") and hasattr(
        optimizer, "_optimizer_load_state_dict_post_hooks"
    )


def step_without_hooks(optimizer: torch.optim.Optimizer) -> None:
    """Step an optimizer without calling any hook, including the global hooks of all optimizers."""
    step: Any = type(optimizer).step
    getattr(step, "__wrapped__", step)(optimizer)


def load_hooks(optimizer: torch.optim.Optimizer) -> list[Callable[..., Any]]:
    """Return the hooks that an optimizer calls before and after it loads a state dict."""
    before, after = (
        getattr(optimizer, f"_optimizer_load_state_dict_{when}_hooks", {}) for when in ("pre", "post")
    )
    return [*before.values(), *after.values()]


def after_optimizers(look: Callable[[torch.optim.Optimizer], object]) -> Callable[[], None]:
    """Call ``look`` with each optimizer when it has been created. torch has no hook for this.

    Returns:
        A function that undoes the change.
    """
    home: Any = torch.optim.Optimizer
    original = home.__init__

    @functools.wraps(original)
    def made(self: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        look(self)

    home.__init__ = made

    def undo() -> None:
        if home.__init__ is made:
            home.__init__ = original

    return undo


class _Told:
    """Calls listeners before each call of some torch methods, or after each call with ``after=True``.

    A listener gets the object whose method is called. With ``after=True`` it gets the result of the call. torch's
    methods are restored when the last listener is removed.
    """

    def __init__(self, *places: tuple[Any, str], after: bool = False) -> None:
        self._places = places
        self._after = after
        self._looks: tuple[Callable[[Any], object], ...] = ()
        self._lock = threading.RLock()  # garbage-collecting a session meanwhile removes its function
        self._undo: list[Callable[[], None]] = []

    def add(self, look: Callable[[Any], object]) -> None:
        with self._lock:
            self._looks = (*self._looks, look)
            if not self._undo:
                self._undo = [around_function(home, name, self._around) for home, name in self._places]

    def remove(self, look: Callable[[Any], object]) -> None:
        with self._lock:
            self._looks = tuple(other for other in self._looks if other != look)
            while self._undo and not self._looks:
                self._undo.pop()()

    def _around(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def called(this: Any, *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():
                return call(this, *args, **kwargs)
            if self._after:
                this = call(this, *args, **kwargs)
            for look in self._looks:
                look(this)
            return this if self._after else call(this, *args, **kwargs)

        return called


clearing = _Told((torch.optim.Optimizer, "zero_grad"), (torch.nn.Module, "zero_grad"))
"""Calls its listeners before each ``zero_grad``, with the optimizer or the module."""
scaling = _Told((torch.amp.GradScaler, "scale"), after=True)
"""Calls its listeners with each loss that a ``torch.amp.GradScaler`` has scaled."""


@contextlib.contextmanager
def other_workers(loader: torch.utils.data.DataLoader[Any]) -> Iterator[None]:
    """Make ``iter(loader)`` create new worker processes inside a ``with`` block.

    Otherwise ``iter(loader)`` would restart the persistent workers of a loop that is still running. This relies on
    ``DataLoader(persistent_workers=True)`` keeping its one iterator as ``_iterator``.
    """
    kept, loader._iterator = loader._iterator, None
    try:
        yield
    finally:
        loader._iterator = kept
