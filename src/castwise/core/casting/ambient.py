"""Casting by a plan without an autocast block, for libraries that cast all code of a process."""

from __future__ import annotations

import dataclasses
import functools
import os
import threading
from collections.abc import Callable, Mapping
from typing import Any

import torch

from castwise.core import _torch
from castwise.core.casting import frames, kernels, tracing
from castwise.core.casting.context import override_rows
from castwise.core.plans.plan import Plan
from castwise.errors import PlanError, StateError


class AmbientAutocast:
    """Casts operators by a plan in all code that runs between :meth:`enter` and :meth:`leave`.

    It is meant for libraries whose users open no autocast block. A plan decides the formats in which operators
    compute. Unlike ``castwise.autocast``, this class also casts in threads to which torch passes the autocast state.
    These are the threads of DataParallel, and a device's thread in which backward recomputes a forward.

    Backward formulas are not cast, whoever calls backward. They run in the dtypes of the forward. Operators are cast
    in the backward of autograd Functions written in Python, and in recomputed forwards. They are not cast in forked
    workers of a DataLoader.

    Weights are cast at each use. A library can have the cast weights cached for a while. It enables torch's cache
    with ``torch.set_autocast_cache_enabled`` and calls :meth:`clear_cache` afterwards.

    Args:
        plan: The plan whose compute format, operator rules and operator overrides are used.
        device_type: The device type of the tensors that are cast.
        messages: For names of operators that the plan bans, error messages that replace those of castwise.

    Raises:
        PlanError: The plan casts nothing, or ``device_type`` is not known.
    """

    def __init__(self, plan: Plan, device_type: str, *, messages: Mapping[str, str] | None = None) -> None:
        if not plan.autocasts:
            raise PlanError(
                f"AmbientAutocast({str(plan)!r}): this plan casts no operators; give a plan whose compute is bf16 "
                "or fp16 and whose rules are not 'none'"
            )
        rows = dict(override_rows(plan, device_type))
        for name, message in (messages or {}).items():
            if name in rows:
                rows[name] = dataclasses.replace(rows[name], message=message)
        self.device_type = device_type
        self._frame = kernels.frame_of(device_type, plan.compute_dtype, rows, cache=False)
        self._lease: kernels.Lease | None = None
        self._thread = 0
        self._depth = -1
        self._restore_backward: tuple[Callable[[], None], ...] = ()

    @property
    def entered(self) -> bool:
        """Whether :meth:`enter` was called and :meth:`leave` was not. The casts may be suspended meanwhile."""
        return self._depth >= 0

    def suspended(self) -> frames.suspended:
        """Return a context manager that turns the casts off on the current thread."""
        return frames.suspended(self.device_type)

    def clear_cache(self) -> None:
        """Drop the cached bf16 or fp16 copies of weights. This is needed after your own code has changed weights."""
        frames.clear_weight_cache()

    def enter(self) -> None:
        """Turn the casts on. After :meth:`leave` they may be turned on again.

        Raises:
            StateError: Another ``AmbientAutocast`` is already active on the device type.
        """
        if self.device_type in frames.ambient:
            raise StateError(
                f"AmbientAutocast.enter(): an AmbientAutocast is already active on {self.device_type!r}; leave it first"
            )
        tracing.get_ready_for_compile()
        _forget_in_children()
        self._lease = kernels.Lease(self._frame.rows, self.device_type)
        self._thread, self._depth = threading.get_ident(), frames.depth()
        frames.push_block(self._frame)
        frames.ambient[self.device_type] = self._frame
        self._restore_backward = (
            _torch.autograd.around_backward(self._rest_in_backward),
            _torch.autograd.around_python_backward(self._enter_python_backward),
        )

    def leave(self) -> None:
        """Turn the casts off and undo all changes of :meth:`enter`.

        The method does nothing if the casts are off already.

        Raises:
            StateError: The call is on another thread than that of :meth:`enter`, or inside an autocast block that was
                entered after :meth:`enter`.
        """
        if not self.entered:
            return
        if self._thread != threading.get_ident() or frames.depth() != self._depth + 1:
            raise StateError(
                "ambient casts must end on the thread that began them, after every castwise.autocast block and forward that was "
                "entered later; leave those blocks first"
            )
        frames.pop_block()
        frames.ambient.pop(self.device_type, None)
        self._depth = -1
        for restore in self._restore_backward:
            restore()
        assert self._lease is not None
        self._lease.close()

    def _rest_in_backward(self, backward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with self.suspended():
            return backward(*args, **kwargs)

    def _enter_python_backward(self) -> Callable[[], None]:
        """Turn the casts on for the Python code of an autograd Function's backward, since they are off during backward.

        Returns:
            A function that restores the autocast state from before.
        """
        device_type, dtype = self.device_type, self._frame.dtype
        before = torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type)
        assert dtype is not None
        torch.set_autocast_dtype(device_type, dtype)
        torch.set_autocast_enabled(device_type, True)

        def leave() -> None:
            torch.set_autocast_enabled(device_type, before[0])
            torch.set_autocast_dtype(device_type, before[1])

        return leave


def _leave_in_child() -> None:
    """Turn the casts off in a forked process, usually a worker of a DataLoader, which only prepares data."""
    for device_type in frames.ambient:
        torch.set_autocast_enabled(device_type, False)


@functools.cache
def _forget_in_children() -> None:
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_leave_in_child)
