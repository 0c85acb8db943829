"""``castwise.autocast``, a context manager and decorator that does what torch.autocast does and also accepts plans."""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Callable, Mapping
from typing import Any, Self, TypeVar

import torch
from torch.cuda.amp import amp_definitely_not_available

from castwise.core import _torch, devices
from castwise.core.casting import frames, kernels, tracing
from castwise.core.casting.kernels import frame_of
from castwise.core.plans import rules
from castwise.core.plans.formats import LOW_DTYPES, get_format
from castwise.core.plans.plan import Plan, Region, as_plan
from castwise.core.plans.text import shown
from castwise.errors import PlanError, StateError, UnknownNameError

_F = TypeVar("_F", bound=Callable[..., Any])
_DTYPES = (*LOW_DTYPES, torch.float32)


def default_device_type() -> str:
    """Return the device type of the available accelerator, such as ``"cuda"``, or ``"cpu"`` without an accelerator."""
    return devices.accelerator() or "cpu"


def override_rows(plan: Plan, device_type: str) -> Mapping[str, rules.Row]:
    """Return the operators whose rule in a plan differs from torch.autocast's on a device type, with their rules.

    In torch.autocast, the operators with the rule ``widest`` refuse a mixture of fp16 and bf16. If a plan has both
    formats, these operators are returned too, since they then promote the mixture to fp32.
    """
    rows = dict(rules.overrides(plan.rules, plan.ops, device_type))
    if {"fp16", "bf16"} <= plan.formats:
        for name, row in rules.base_table(plan.rules, device_type).items():
            if row.rule == "widest":
                rows.setdefault(name, row)
    return rows


def _device_type(name: Any) -> Any:
    """Return the device type of a device such as ``"cuda:0"`` or ``"privateuseone"``, and anything else unchanged."""
    if not isinstance(name, str) or devices.has_autocast(name):
        return name
    kind = devices.type_of(name) if ":" in name or name == "privateuseone" else None
    return kind if devices.has_autocast(kind) else name


_Resolved = tuple[str, str, torch.dtype, bool]


def _resolve(
    plan: Any, dtype: Any, enabled: bool, cache_enabled: bool | None, device_type: str | None
) -> tuple[_Resolved, tuple[str, ...]]:
    """Parse the arguments of :class:`autocast`; see :func:`_parse`."""
    plan, device_type = _device_type(plan), _device_type(device_type)
    if dtype is None and (plan is None or devices.has_autocast(plan)):
        device = plan or device_type or default_device_type()
        if devices.has_autocast(device):
            dtype = torch.get_autocast_dtype(device)  # a script may have set it
    return _parse(plan, dtype, enabled, cache_enabled, device_type)


@functools.lru_cache(maxsize=256)
def _parse(
    plan: Any, dtype: Any, enabled: bool, cache_enabled: bool | None, device_type: str | None
) -> tuple[_Resolved, tuple[str, ...]]:
    """Parse the arguments of :class:`autocast`.

    Returns:
        The key of the block's :class:`Frame`, its device type, its dtype and whether it casts. Then the names of the
        operators that need an override.
    """
    if devices.has_autocast(plan):
        if device_type is not None and device_type != plan:
            raise PlanError(
                f"autocast({plan!r}, device_type={device_type!r}): two device types; give one of them"
            )
        plan, device_type = None, plan
        if enabled and device_type == "cuda" and amp_definitely_not_available():
            warnings.warn("CUDA is not available or torch_xla is imported. Disabling autocast.", stacklevel=3)
            enabled = False
    device = device_type or default_device_type()
    if not devices.has_autocast(device):
        raise PlanError(
            f"User specified an unsupported autocast device_type '{device}': autocast(device_type={device!r}) is not "
            f"allowed. Allowed: {', '.join(devices.autocast_types())}."
        )
    if plan is None:
        chosen = dtype if dtype is not None else torch.get_autocast_dtype(device)
        if not enabled and isinstance(chosen, torch.dtype):
            return (frame_of(device, None, surrounding=torch.float32).key, device, chosen, False), ()
        if isinstance(chosen, torch.dtype) and chosen not in _DTYPES:
            raise PlanError(
                f"autocast({device!r}, dtype={chosen}): In {device.upper()} autocast, but the target dtype is not "
                f"supported; allowed: {', '.join(map(str, _DTYPES))}. torch.autocast would warn and cast nothing; "
                "to cast nothing, give enabled=False"
            )
        resolved = as_plan(get_format(chosen).name)
    elif dtype is not None:
        raise PlanError(
            f"autocast({plan!r}, dtype={dtype}): a plan has its own compute format; leave dtype out"
        )
    else:
        try:
            resolved = as_plan(plan)
        except UnknownNameError as error:
            raise UnknownNameError(
                f"autocast({shown(plan)}): {error} Or a device type: {', '.join(devices.autocast_types())}."
            ) from None
    if not enabled or not resolved.autocasts:
        surrounding = resolved.compute_dtype if enabled else torch.float32
        key = frame_of(device, None, surrounding=surrounding).key
        return (key, device, resolved.compute_dtype, False), ()
    rows = override_rows(resolved, device)
    frame = frame_of(device, resolved.compute_dtype, rows, cache=cache_enabled)
    return (frame.key, device, resolved.compute_dtype, True), tuple(rows)


def _resolve_for_trace(
    plan: Any, dtype: Any, enabled: bool, cache_enabled: bool | None, device_type: str | None
) -> _Resolved:
    """Parse the arguments of :class:`autocast` as :func:`_resolve` does, while Dynamo traces its constructor.

    Dynamo calls this function during tracing and keeps the result as a constant, so the arguments must be constants
    too. A plan is passed as the result of :func:`_for_trace`. The reason is that Dynamo of torch 2.11 accepts no
    plan, and Dynamo of torch 2.13 passes a plan that is created while tracing before its fields are set.
    """
    tracing.get_ready_for_compile()
    if isinstance(plan, tuple):
        compute, rules_, ops, regions = plan
        parts = tuple(Region("*", compute=region) for region in regions if region is not None)
        plan = Plan(compute=compute, params="compute", regions=parts, rules=rules_, ops=ops)
    resolved, names = _resolve(plan, dtype, enabled, cache_enabled, device_type)
    if names and _torch.dynamo.is_exporting():
        _refuse_export()
    if names:
        # The override kernels are needed until the graph has been traced; then the graph holds their casts.
        tracing.trace_leases.append(kernels.Lease(names, resolved[1]))
    return resolved


_torch.dynamo.mark_constant(_resolve_for_trace)


def _refuse_export() -> None:
    """Raise the error for an autocast block whose casts would be missing from the graph that torch.export traces.

    Raises:
        StateError: Always.
    """
    raise StateError(
        "torch.export of castwise.autocast: the exported graph would lack casts. With strict=False it lacks those of a plan's own "
        "operator rules; with strict=True it lacks all casts of a castwise.autocast that the exported code creates. Export with "
        "strict=False and pass a dtype, or a plan without operator rules of its own; or use torch.autocast; or cast the model by hand"
    )


_torch.dynamo.mark_constant(_refuse_export)


def _for_trace(plan: Any) -> Any:
    """Return the parts of a plan that :func:`_resolve` reads, as strings. Anything else is returned unchanged."""
    if not isinstance(plan, Plan):
        return plan
    return plan.compute, plan.rules, plan.ops, tuple([region.compute for region in plan.regions])


class autocast(torch.autocast):  # noqa: N801 - a context manager, named as torch names it
    """Casts the inputs of operators inside a ``with`` block or a decorated function, as a precision plan says.

    Use it in place of ``torch.autocast``. Every valid call of ``torch.autocast`` is valid here, does the same with the
    same kernels, and is as fast. In addition, a plan, the name of a preset or the name of a format can be passed in
    place of a dtype. So a plan can change how single operators are cast::

        with castwise.autocast("bf16-mixed+ops.exp=fp32", device_type="cuda"):
            loss = criterion(model(inputs), targets)

    Operators outside the block are not affected. An instance is also an instance of ``torch.autocast`` and has its
    attributes. It may be entered again while it is active, and several threads may share it.

    If a plan changes the rules of operators, kernels are registered for them as long as the instance exists. So create
    one instance and enter it often. If activation checkpointing recomputes code of the block, keep the instance until
    the backward pass has finished.

    Args:
        plan: A :class:`~castwise.Plan`, the name of a preset (``"O1"``) or format (``"bf16"``), a ``torch.dtype``, or
            the path of a plan file. It may also be the device type, as in torch.
        dtype: The dtype to which operators are cast, as in torch: bf16, fp16, or fp32 to cast nothing. Give it only if
            ``plan`` is a device type or is left out.
        enabled: Whether operators are cast. In a block with False, nothing is cast, even inside another autocast block.
        cache_enabled: Whether the bf16 or fp16 copies of fp32 weights are kept and reused until the outermost block
            ends. None uses torch's current setting. Pass False if your code changes weights inside the block, since the
            change is not detected and the old copy would be used.
        device_type: The type of device whose operators are cast, such as ``"cpu"`` or ``"cuda"``, or the name of an
            out-of-tree device. The default is the available accelerator, or else the CPU.

    Raises:
        PlanError: The plan, dtype or device type is not allowed.

    Source: the operator lists and the cache of cast weights are PyTorch's (``aten/src/ATen/autocast_mode.h``).
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
        if device_type is not None and not isinstance(device_type, str):
            raise PlanError(
                f"Expected `device_type` of type `str`, got: `{type(device_type)}`; allowed: {', '.join(devices.autocast_types())}"
            )
        if plan is not None and not isinstance(plan, (Plan, str, os.PathLike, torch.dtype)):
            raise PlanError(
                f"Expected `device_type` of type `str`, got: `{type(plan)}`: autocast({plan!r}); allowed: a device type "
                f"({', '.join(devices.autocast_types())}), a Plan, the name of a preset or format, a torch.dtype, or a path"
            )
        if isinstance(plan, os.PathLike) or (isinstance(plan, str) and plan.endswith(".json")):
            plan = as_plan(plan)  # read now: the file may change, and _resolve caches its result
        if torch.compiler.is_compiling():
            resolved = _resolve_for_trace(_for_trace(plan), dtype, enabled, cache_enabled, device_type)
        else:
            resolved, names = _resolve(plan, dtype, enabled, cache_enabled, device_type)
        self._key = resolved[0]
        cache = torch.is_autocast_cache_enabled() if cache_enabled is None else cache_enabled
        _torch.dynamo.set_autocast_attributes(self, *resolved[1:], cache)
        if not torch.compiler.is_compiling():
            self._frame = tracing.graph_frames[self._key]
            self.custom_backend_name = _torch.dynamo.custom_backend_name()
            if names:
                self._lease: kernels.Lease | None = kernels.Lease(names, self.device)
                tracing.get_ready_for_compile()
            else:
                self._lease = None
                tracing.get_ready_with_dynamo()

    def __init_subclass__(cls) -> None:
        tracing.trace_context(cls, autocast._is_torchs)

    def _is_torchs(self) -> bool:
        """Whether Dynamo may treat this instance as a plain ``torch.autocast``.

        It may if no live plan overrides how an operator casts.
        """
        return not kernels.registered(self.device)  # overrides of this instance are registered as well

    def __enter__(self) -> Self:
        if _torch.dynamo.is_exporting():
            if tracing.graph_frames[self._key].overrides or torch.compiler.is_dynamo_compiling():
                _refuse_export()
            super().__enter__()  # type: ignore[no-untyped-call]  # torch's own method puts the block into the graph
        elif torch.compiler.is_compiling():
            tracing.graph_push(self._key)
        else:
            frames.push_block(self._frame)
        return self

    def __exit__(self, *exception: object) -> None:
        if _torch.dynamo.is_exporting():
            super().__exit__(*exception)
        elif torch.compiler.is_compiling():
            tracing.graph_pop()
        else:
            frames.pop_block(self._frame)
            if self._lease is not None:
                frames.keep(self._lease)

    def __call__(self, function: _F) -> _F:
        """Decorate ``function`` so that every call of it runs inside this block."""
        return super().__call__(function)  # type: ignore[no-any-return,no-untyped-call]

    def __reduce__(self) -> tuple[Any, ...]:
        return functools.partial(autocast, device_type=self._args[-1]), self._args[:-1]

    def __repr__(self) -> str:
        plan, dtype, enabled, cache_enabled, device_type = self._args
        return (
            f"autocast({plan!r}, dtype={dtype}, enabled={enabled}, cache_enabled={cache_enabled}, "
            f"device_type={device_type!r})"
        )


tracing.trace_context(autocast, autocast._is_torchs)
