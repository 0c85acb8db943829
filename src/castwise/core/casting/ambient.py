"""A plan's casts without a block, for libraries that cast all code of a process."""

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
    """Casts by a plan in all code from :meth:`enter` to :meth:`leave`, for libraries whose users open no autocast block.

    Unlike ``castwise.autocast``, it also casts in threads to which torch passes the autocast state (DataParallel, a
    device's thread that recomputes a forward). It does not cast in backward, whoever calls it: its formulas run in the
    types of the forward. But it casts in the backward of autograd Functions written in Python, and in recomputed
    forwards. It does not cast in a forked worker of a DataLoader. Weights are cast at each use, unless the library
    enables torch's cache for a while (``torch.set_autocast_cache_enabled``) and calls :meth:`clear_cache` after it.

    Args:
        plan: Its compute format, rules and operators are used.
        device_type: Device type of the tensors that are cast.
        messages: By operator name, the error message for an operator that the plan bans, instead of castwise's.

    Raises:
        PlanError: The plan casts nothing, or there is no such device type.
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
        """Whether the casts are active, even if currently suspended."""
        return self._depth >= 0

    def suspended(self) -> frames.suspended:
        """A block on this thread without casts."""
        return frames.suspended(self.device_type)

    def clear_cache(self) -> None:
        """Drop low-precision copies of weights, as needed after writing weights by hand."""
        frames.clear_weight_cache()

    def enter(self) -> None:
        """Activate the casts; allowed again after :meth:`leave`.

        Raises:
            StateError: An ambient cast is already active on the device type.
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
        """End the casts, and undo everything. Does nothing if they are not active.

        Raises:
            StateError: Called on another thread than :meth:`enter`, or inside a block that was entered after it.
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
        """Casts are off during backward, except in the Python code of an autograd Function."""
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
    """Turn the casts off in a forked DataLoader worker, which only prepares data."""
    for device_type in frames.ambient:
        torch.set_autocast_enabled(device_type, False)


@functools.cache
def _forget_in_children() -> None:
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_leave_in_child)
