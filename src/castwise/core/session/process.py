"""Set the process-wide settings of torch that plans ask for, and restore them.

Such settings are the precision of fp32 matrix products, and whether the process keeps freed host memory. Since they are
global, a plan *claims* its settings while it is live, and they are restored after it. If two live plans want different
values, the second raises an error.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch

from castwise.core import _torch, devices
from castwise.core.heap import HEAP, can_keep
from castwise.core.plans.formats import get_format
from castwise.core.plans.plan import Plan
from castwise.core.plans.text import shown
from castwise.errors import DeviceError, StateError

_lock = threading.RLock()  # a claim may be garbage-collected, and so closed, while its thread makes another


class _Setting(NamedTuple):
    """A claimed setting, its value before, and the claims that hold it.

    The claims are held weakly, since an interrupt can prevent a claim from being given up.
    """

    place: _Address
    value: str
    before: str
    holders: weakref.WeakSet[Claim]


_claimed: dict[str, _Setting] = {}
_aside: list[dict[str, _Setting]] = []
"""The claims that were held when each running :func:`claims_aside` began."""


class _Address(NamedTuple):
    """The name of a setting, and the object and attribute in which it is stored."""

    name: str
    owner: Any
    attribute: str = "fp32_precision"

    def put(self, value: str) -> None:
        setattr(self.owner, self.attribute, value)


def _addresses(device_type: str, what: str) -> Iterator[_Address]:
    """Yield the settings that a field of a plan determines on a device type. ``what`` is the name of the field."""
    if what == "host_memory":
        yield _Address(what, HEAP, what)
        return
    part = "matmul" if what == "fp32_matmul" else "conv"
    if device_type == "cuda":
        if part == "matmul":
            yield _Address("cuda.matmul", torch.backends.cuda.matmul)
        else:
            yield _Address("cudnn.conv", torch.backends.cudnn.conv)  # type: ignore[attr-defined]
    yield _Address(f"mkldnn.{part}", getattr(torch.backends.mkldnn, part))


def device_type_of(device: Any) -> str:
    """Return the type of a device, such as ``"cuda"``. The device may be a name, a ``torch.device`` or a number.

    Raises:
        DeviceError: The value is not a device, torch.autocast does not support its type, or there is no such device.
    """
    kind = devices.type_of(device)
    if kind is None:
        raise DeviceError(
            f"Amp(device={shown(device)}): torch knows no such device here; allowed: {devices.choices()}"
        )
    if not devices.has_autocast(kind):
        why = "not a device type that torch.autocast accepts"
        if torch.amp.is_autocast_available(kind):
            why = f"there is no module torch.{kind}, which the extension that brings the device registers"
        raise DeviceError(f"Amp(device={device!r}): {why}; allowed: {devices.choices()}")
    _check_there("Amp", torch.device(device))
    return kind


def find_device(call: str, device: Any, default: str) -> torch.device:
    """Return the device that the user named, or the default one, as a ``torch.device``.

    Args:
        call: The function that the user called, for error messages.
        device: The device that the user named, or None.
        default: The device to return for None.

    Raises:
        DeviceError: The value is not a device, or the device is not available.
    """
    wanted = device if device is not None else default
    if devices.type_of(wanted) is None:
        raise DeviceError(
            f"{call}(device={shown(wanted)}): torch knows no such device here; allowed: {devices.choices()}"
        )
    _check_there(call, where := torch.device(wanted))
    return where


def _check_there(call: str, device: torch.device) -> None:
    if not devices.is_available(device.type):
        raise DeviceError(
            f"{call}(device={str(device)!r}): no {device.type} device is available; use device='cpu', or leave device out"
        )
    if (
        device.type != "cpu"
        and device.index is not None
        and device.index >= (count := devices.count(device.type))
    ):
        raise DeviceError(
            f"{call}(device={str(device)!r}): there are only {count}, counted from 0; use a lower index"
        )


def check_device(plan: Plan, device_type: str) -> None:
    """Raise if a device cannot run a plan.

    Raises:
        DeviceError: The device lacks a feature. The message names the field of the plan, the feature and an
            alternative.
    """
    _check_there("Amp", torch.device(device_type))
    for name in ("fp32_matmul", "fp32_conv"):
        value = getattr(plan, name)
        if value == "tf32" and not _has_tf32(device_type):
            raise DeviceError(
                f"Plan {plan}: {name}='tf32', but this {device_type} device has no TF32; use 'ieee', the preset fp32, "
                "or, on a CPU with bf16, 'bf16'"
            )
        if value == "bf16" and device_type != "cpu":
            other = "'tf32' or 'ieee'" if _has_tf32(device_type) else "'ieee'"
            raise DeviceError(f"Plan {plan}: {name}='bf16' is for CPUs; on {device_type} use {other}")
        if value == "bf16" and device_type == "cpu" and not _torch.cpu.cpu_has_bf16():
            raise DeviceError(
                f"Plan {plan}: {name}='bf16', but this CPU has no bf16 instructions; use 'ieee'"
            )
    if plan.host_memory == "keep" and not can_keep():
        raise DeviceError(
            f"Plan {plan}: host_memory='keep', which needs glibc, and this system has another C library; use "
            f"'as_given'"
        )
    low = [get_format(dtype).name for dtype in devices.low_dtypes(device_type)]
    lacks = sorted(plan.formats & {"bf16", "fp16"} - {*low})
    if "fp64" in plan.formats and not devices.has_fp64(torch.device(device_type)):
        lacks.append("fp64")
    if lacks:
        instead = "fp32" if lacks[0] == "fp64" or not low else low[0]
        raise DeviceError(
            f"Plan {plan}: {device_type} ({devices.name_of(torch.device(device_type))}) does not compute in {lacks[0]}; use "
            f"{instead} instead"
        )
    if plan.autocasts and plan.rules == "native" and not devices.casts(device_type):
        raise DeviceError(
            f"Plan {plan}: torch has no autocast kernels for {device_type} devices, so nothing would be cast; import the "
            "extension that brings them, or use a plan that stores parameters low, such as 'bf16-true', or 'fp32'"
        )


def check_compiler(plan: Plan, device_type: str) -> None:
    """Raise if a plan compiles the model and torch cannot.

    Raises:
        DeviceError: There is no compiler for the device.
    """
    if plan.compile != "as_given" and (why := _torch.dynamo.why_not_compile(device_type)):
        raise DeviceError(
            f"Plan {plan}: compile={plan.compile!r}, but torch.compile cannot compile for {device_type} here: {why}; use "
            "compile='as_given'"
        )


def _has_tf32(device_type: str) -> bool:
    if device_type == "cuda":
        return torch.version.hip is None and torch.cuda.get_device_capability() >= (8, 0)
    return device_type == "cpu" and _torch.cpu.cpu_has_tf32()


class Claim:
    """Keeps a plan's process-wide settings in force from :meth:`take` to :meth:`close`."""

    def __init__(self, plan: Plan, device_type: str) -> None:
        self._plan = plan
        self._device_type = device_type
        self._held: list[_Address] = []

    @property
    def held(self) -> bool:
        """Whether this object claims any setting now."""
        return bool(self._held)

    def take(self) -> Claim:
        """Claim the plan's settings and put them in force. If one cannot be claimed, none is changed.

        Raises:
            StateError: Another live plan has claimed a setting with a different value.
        """
        try:
            for what in ("fp32_matmul", "fp32_conv", "host_memory"):
                value = getattr(self._plan, what)
                if value not in ("as_is", "as_given"):
                    for place in _addresses(self._device_type, what):
                        self._take(place, value, what)
        except BaseException:
            self.close()
            raise
        return self

    def _take(self, place: _Address, value: str, what: str) -> None:
        with _lock:
            self._held.append(place)
            setting = _claimed.get(place.name)
            if setting is None or not setting.holders:
                before = getattr(place.owner, place.attribute) if setting is None else setting.before
                setting = _claimed[place.name] = _Setting(place, value, before, weakref.WeakSet())
            elif setting.value != value:
                raise StateError(
                    f"prepare: this plan needs {what}={value!r}, but a live plan in this process needs {setting.value!r}, "
                    f"and the setting applies to the whole process. Close the other Amp first, or give both plans the same "
                    f"value."
                )
            setting.holders.add(self)
            if _claimed.get(place.name) is setting:
                place.put(value)
            else:  # a signal handler has meanwhile given up the last claim on the setting
                self._take(place, value, what)

    def close_collected(self) -> None:
        """Give the settings up when the Amp is garbage-collected, as :meth:`close` does.

        If an interrupt stops this, it is tried once more, since Python swallows exceptions of finalizers.
        """
        try:
            self.close()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Give the settings up. A setting that no other plan claims gets the value that it had before.

        An interrupted call can be repeated.
        """
        with _lock:
            for place in self._held:
                for claimed in _aside:
                    if place.name in claimed:
                        claimed[place.name].holders.discard(self)
                setting = _claimed.get(place.name)
                if setting is None:
                    continue
                setting.holders.discard(self)
                if not setting.holders:
                    place.put(setting.before)
                    del _claimed[place.name]
            self._held.clear()


@contextlib.contextmanager
def claims_aside() -> Iterator[None]:
    """Let code in a ``with`` block use other settings, as if no plan were live, and restore the claimed values after it.

    If a claim is given up meanwhile, by an Amp that is garbage-collected or closed in another thread, it stays given
    up.
    """
    before = settings()
    with _lock:
        claimed = dict(_claimed)
        _claimed.clear()
        _aside.append(claimed)
    try:
        yield
    finally:
        with _lock:
            _aside[:] = [other for other in _aside if other is not claimed]
            _claimed.clear()
            _claimed.update({name: setting for name, setting in claimed.items() if setting.holders})
            put_settings(before)
            for name, setting in claimed.items():
                if name not in _claimed:
                    setting.place.put(setting.before)


# --- signals --------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def interrupts_wait() -> Iterator[None]:
    """Delay Ctrl-C, and SIGTERM if it has a handler in Python, until the ``with`` block ends.

    This is needed because an interrupt inside TensorBoard's queue can leave its lock taken or its reader asleep, for
    two minutes or for ever.
    """
    came: list[Any] = []
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    held = {number: handler for number, handler in handlers.items() if callable(handler)}
    if threading.current_thread() is not threading.main_thread():
        held = {}
    for number in held:
        signal.signal(number, lambda *call: came.append(call))
    try:
        yield
    finally:
        for number, handler in held.items():
            signal.signal(number, handler)
        if came:
            held[came[0][0]](*came[0])


# --- settings that other processes take over ------------------------------------------------------------------


def _cudnn_tf32() -> bool | None:
    """Return ``torch.backends.cudnn.allow_tf32``, the older setting for whether cuDNN may use TF32.

    Return None if convolutions and recurrent layers have different precisions, since torch raises then.
    """
    try:
        return torch.backends.cudnn.allow_tf32
    except RuntimeError:
        return None


def _set_cudnn_tf32(value: bool | None) -> None:
    if value is not None:
        torch.backends.cudnn.allow_tf32 = value


def _attributes(
    name: str, owner: Any, *attributes: str
) -> Iterator[tuple[str, Callable[[], Any], Callable[[Any], Any]]]:
    for attribute in attributes:

        def put(value: Any, attribute: str = attribute) -> None:
            setattr(owner, attribute, value)

        def now(attribute: str = attribute) -> Any:
            return getattr(owner, attribute)

        yield f"{name}.{attribute}", now, put


def _all_settings() -> Iterator[tuple[str, Callable[[], Any], Callable[[Any], Any]]]:
    """Yield the name, the getter and the setter of each setting.

    Settings that change several others come before those that change only one.
    """
    backends: Any = torch.backends
    yield "threads", torch.get_num_threads, torch.set_num_threads
    yield "recursion limit", sys.getrecursionlimit, sys.setrecursionlimit
    yield "default dtype", torch.get_default_dtype, torch.set_default_dtype
    yield "default device", _default_device, torch.set_default_device
    yield "current device", _current_device, _put_current_device
    yield "flush denormal", lambda: sys.float_info.min / 2 == 0.0, torch.set_flush_denormal
    yield (
        "deterministic", torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode,
    )  # fmt: skip
    yield from _attributes("deterministic", torch.utils.deterministic, "fill_uninitialized_memory")
    yield (
        "anomalies", lambda: (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
        lambda value: torch.autograd.set_detect_anomaly(*value),
    )  # fmt: skip
    for device in devices.autocast_types():
        now, put = (partial(one, device) for one in (torch.get_autocast_dtype, torch.set_autocast_dtype))
        yield f"autocast.{device}", now, put
    yield "autocast cache", torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled
    # before the settings of cuDNN's parts, since this older setting changes a flag of its own that must agree with them
    yield "cudnn.allow_tf32", _cudnn_tf32, _set_cudnn_tf32
    yield from _attributes("fp32", backends, "fp32_precision")
    yield from _attributes("cudnn", backends.cudnn, "fp32_precision")
    yield "matmul precision", torch.get_float32_matmul_precision, torch.set_float32_matmul_precision
    for name, owner in (("cuda", backends.cuda), ("cudnn", backends.cudnn), ("mkldnn", backends.mkldnn)):
        for part in ("matmul", "conv", "rnn"):
            if hasattr(owner, part):
                yield from _attributes(f"{name}.{part}", getattr(owner, part), "fp32_precision")
    reduced = (
        "allow_fp16_reduced_precision_reduction",
        "allow_bf16_reduced_precision_reduction",
        "allow_fp16_accumulation",
    )
    yield from _attributes("cuda.matmul", backends.cuda.matmul, *reduced)
    yield from _attributes(
        "cudnn", backends.cudnn, "enabled", "benchmark", "benchmark_limit", "deterministic"
    )
    yield from _attributes("mkldnn", backends.mkldnn, "enabled", "deterministic", "allow_tf32")
    yield from _attributes("opt_einsum", backends.opt_einsum, "enabled", "strategy")
    yield from _attributes("quantized", backends.quantized, "engine")
    yield "fast path", backends.mha.get_fastpath_enabled, backends.mha.set_fastpath_enabled
    cuda = backends.cuda
    yield "flash", cuda.flash_sdp_enabled, cuda.enable_flash_sdp
    yield "memory efficient", cuda.mem_efficient_sdp_enabled, cuda.enable_mem_efficient_sdp
    yield "math", cuda.math_sdp_enabled, cuda.enable_math_sdp
    yield "cudnn attention", cuda.cudnn_sdp_enabled, cuda.enable_cudnn_sdp
    yield (
        "reduced attention",
        cuda.fp16_bf16_reduction_math_sdp_allowed,
        cuda.allow_fp16_bf16_reduction_math_sdp,
    )
    for library in (cuda.preferred_linalg_library, cuda.preferred_blas_library):
        yield library.__name__, library, library


def _default_device() -> torch.device | None:
    """Return torch's default device, or None for the CPU, since setting the CPU would add a torch mode to every call."""
    device = torch.get_default_device()
    return None if device == torch.device("cpu") else device


def _current_device() -> tuple[str, int] | None:
    """Return the type and the index of the current accelerator, or None if the process has not used one."""
    found = torch.accelerator.current_accelerator()
    # A device whose module does not say whether it is in use is left alone: asking could take it into use.
    in_use = None if found is None else getattr(getattr(torch, found.type, None), "is_initialized", None)
    if found is None or in_use is None or not in_use():
        return None
    return found.type, torch.accelerator.current_device_index()


def _put_current_device(device: tuple[str, int] | None) -> None:
    if device is not None:
        torch.get_device_module(device[0]).set_device(device[1])


def settings() -> dict[str, Any]:
    """Return the settings of this process that affect torch's results and speed, by name.

    Settings that cannot be read are left out.
    """
    found = {}
    for name, now, _ in _all_settings():
        with contextlib.suppress(
            RuntimeError, AttributeError
        ):  # torch raises if a setting was changed by its new name and is read by its old one
            found[name] = now()
    return found


def put_settings(values: Mapping[str, Any]) -> None:
    """Apply settings that :func:`settings` returned, in this process or another. Values that are equal are not written."""
    for name, now, put in _all_settings():
        if name in values:
            with contextlib.suppress(RuntimeError, AttributeError):
                if now() == values[name]:
                    continue
            put(values[name])
