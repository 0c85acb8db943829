"""``castwise.autocast``: torch.autocast, and plans beyond its lists, as a context manager and decorator."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from typing import Any, Self, TypeVar

import torch

from castwise import _torch, rules
from castwise.casting import frames, kernels
from castwise.casting.kernels import frame_of
from castwise.errors import PlanError
from castwise.formats import get_format
from castwise.plan import Plan, as_plan

__all__ = ["autocast", "default_device_type", "override_rows"]

_F = TypeVar("_F", bound=Callable[..., Any])
DEVICE_TYPES = tuple(_torch.AUTOCAST_KEYS)


def default_device_type() -> str:
    """Device type of the accelerator at hand, else ``"cpu"``."""
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is not None and accelerator.type in DEVICE_TYPES and torch.accelerator.is_available():
        return accelerator.type
    return "cpu"


def override_rows(plan: Plan, device_type: str) -> Mapping[str, rules.Row]:
    """Operators that a plan treats otherwise than torch.autocast does on this device type.

    A plan in which fp16 and bf16 meet also overrides torch's own ``widest`` operators, which refuse that mixture;
    they promote it to fp32.
    """
    rows = dict(rules.overrides(plan.rules, plan.ops, device_type))
    if {"fp16", "bf16"} <= plan.formats:
        for name, row in rules.base_table(plan.rules, device_type).items():
            if row.rule == "widest":
                rows.setdefault(name, row)
    return rows


@functools.lru_cache(maxsize=256)
def _resolve(
    plan: Any, dtype: Any, enabled: bool, cache_enabled: bool | None, device_type: str | None
) -> tuple[str, tuple[str, ...], str]:
    """Key of the frame that a call of :class:`autocast` means, the operators it overrides, its device type."""
    if isinstance(plan, str) and plan in DEVICE_TYPES:
        if device_type is not None and device_type != plan:
            raise PlanError(
                f"autocast({plan!r}, device_type={device_type!r}): two device types; give one of them"
            )
        plan, device_type = None, plan
    device = device_type or default_device_type()
    if device not in DEVICE_TYPES:
        raise PlanError(
            f"autocast(device_type={device!r}): not a device type that can be autocast; "
            f"allowed: {', '.join(DEVICE_TYPES)}"
        )
    if plan is None:
        name = get_format(dtype if dtype is not None else torch.get_autocast_dtype(device)).name
        resolved = as_plan(name)
    elif dtype is not None:
        raise PlanError(
            f"autocast({plan!r}, dtype={dtype}): a plan has its own compute format; leave dtype out"
        )
    else:
        resolved = as_plan(plan)
    if not enabled or not resolved.autocasts:
        surrounding = resolved.compute_dtype if enabled else torch.float32
        return frame_of(device, None, surrounding=surrounding).key, (), device
    rows = override_rows(resolved, device)
    frame = frame_of(device, resolved.compute_dtype, rows, cache=cache_enabled)
    return frame.key, tuple(rows), device


def _resolve_for_trace(
    plan: Any, dtype: Any, enabled: bool, cache_enabled: bool | None, device_type: str | None
) -> str:
    """As :func:`_resolve`, for Dynamo, which keeps the result as a constant of the graph."""
    frames.get_ready_for_compile()
    key, names, device = _resolve(plan, dtype, enabled, cache_enabled, device_type)
    if names:
        # The graph holds the casts once it is traced; the kernels are needed until then.
        frames.trace_leases.append(kernels.Lease(names, device))
    return key


_torch.mark_constant(_resolve_for_trace)


class autocast:  # noqa: N801 - a context manager, named as torch names it
    """Run operators by a precision plan inside a block or a function.

    A superset of ``torch.autocast``: every call that is right there is right here and does the same, through the
    same kernels, at the same speed. Beyond it: a plan with operator rules of its own; a preset or format name in
    place of a dtype; one instance may be entered again while it is active and shared between threads.

    Args:
        plan: A :class:`~castwise.Plan`, a preset (``"O1"``) or format name (``"bf16"``), a ``torch.dtype``, the path
            of a plan file; or, as in torch, the device type.
        dtype: As in torch, where ``plan`` is a device type or left out: bf16, fp16, or fp32 for no casting.
        enabled: False makes the block an fp32 island: nothing is cast inside.
        cache_enabled: Whether fp32 weights keep their low-precision copy until the outermost region ends. Give False
            where weights are changed by hand inside the region: that cannot be seen from here, and a stale copy
            would be used.
        device_type: ``"cpu"``, ``"cuda"``, ``"xpu"`` or ``"mps"``; by default the accelerator at hand, else the CPU.

    Operators outside the block are never affected. Overrides stay registered for as long as the instance lives: make
    one, enter it often, and keep it until backward is done where activation checkpointing recomputes what ran inside.

    Raises:
        PlanError: For a plan, dtype or device type that is not one of the allowed values.

    Source: the operator lists and the cast cache are PyTorch's (``aten/src/ATen/autocast_mode.h``).
    """

    def __init__(
        self,
        plan: Plan | str | os.PathLike[str] | torch.dtype | None = None,
        dtype: torch.dtype | str | None = None,
        enabled: bool = True,
        cache_enabled: bool | None = None,
        *,
        device_type: str | None = None,
    ) -> None:
        self._args = (plan, dtype, enabled, cache_enabled, device_type)
        if isinstance(plan, os.PathLike) or (isinstance(plan, str) and plan.endswith(".json")):
            plan = as_plan(plan)  # read now: the file may change, and _resolve remembers
        if torch.compiler.is_compiling():
            self._key = _resolve_for_trace(plan, dtype, enabled, cache_enabled, device_type)
        else:
            self._key, names, device = _resolve(plan, dtype, enabled, cache_enabled, device_type)
            self._frame = frames.graph_frames[self._key]
            self._lease = kernels.Lease(names, device) if names else None
            if names:
                frames.get_ready_for_compile()

    def __enter__(self) -> Self:
        if torch.compiler.is_compiling():
            frames.graph_push(self._key)
        else:
            frames.push_region(self._frame)
        return self

    def __exit__(self, *_: object) -> None:
        if torch.compiler.is_compiling():
            frames.graph_pop()
        else:
            frames.pop_region(self._frame)

    def __call__(self, function: _F) -> _F:
        """Decorate ``function`` so that every call of it runs inside this region."""

        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            with self:
                return function(*args, **kwargs)

        return run  # type: ignore[return-value]

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, self._args

    def __repr__(self) -> str:
        plan, dtype, enabled, cache_enabled, device_type = self._args
        return (
            f"autocast({plan!r}, dtype={dtype}, enabled={enabled}, cache_enabled={cache_enabled}, "
            f"device_type={device_type!r})"
        )


def _rebuild(
    plan: Any, dtype: Any, enabled: bool, cache_enabled: bool | None, device_type: str | None
) -> autocast:
    return autocast(plan, dtype, enabled, cache_enabled, device_type=device_type)
