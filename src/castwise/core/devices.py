"""What torch says of the devices of this machine: the only place where it is asked, once for each kind of device.

torch decides which devices there are: the CPU, the accelerator that it was built for, or one that an extension adds under
a name of its own. So no other module has a list of names.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from castwise.core import _torch

_known: set[str] = set()
"""Names for which :func:`has_autocast` is true. Others are asked for again, since an extension may be imported later."""
_casting: set[str] = set()
"""Device types for which :func:`casts` is true."""


def has_autocast(name: object) -> bool:
    """Whether a value is the name of a device type that torch.autocast accepts, such as ``"cuda"``.

    A type for which torch has no module is none, since torch can neither count such devices nor wait for them.
    """
    return isinstance(name, str) and (name in _known or _accepted(name))


def _accepted(name: str) -> bool:
    if name in vars(torch) and type_of(name) == name and torch.amp.is_autocast_available(name):
        _known.add(name)
    return name in _known


def autocast_types() -> tuple[str, ...]:
    """Return the names of the device types that torch.autocast accepts, also of those that this machine does not have."""
    return tuple(filter(has_autocast, _torch.dispatcher.device_types()))


def type_of(name: Any) -> str | None:
    """Return the type of a device, given as a name, a ``torch.device`` or a number; None if torch knows no such device.

    An out-of-tree device has the name that its extension gave it, also if it is given as ``privateuseone``.
    """
    try:
        return torch.device(name).type
    except (RuntimeError, TypeError):
        return None


def accelerator() -> str | None:
    """Return the type of this machine's accelerator, such as ``"cuda"``, or None if there is none."""
    found = torch.accelerator.current_accelerator()
    return found.type if found is not None and is_available(found.type) else None


def choices() -> str:
    """Return text that names the devices of this machine, for error messages."""
    found = accelerator()
    if found is None:
        return "cpu"
    return f"cpu or {found}" + (f", or {found}:0 to {found}:{last}" if (last := count(found) - 1) else "")


def is_available(device_type: str) -> bool:
    """Whether this machine has a device of a type."""
    home = getattr(torch, device_type, None)
    return bool(home and hasattr(home, "is_available") and home.is_available())


def count(device_type: str) -> int:
    """Return how many devices of a type this machine has."""
    return int(torch.get_device_module(device_type).device_count())


def name_of(device: torch.device) -> str:
    """Return a device's name as its maker gave it, or its type if torch does not say."""
    home = torch.get_device_module(device)
    return str(home.get_device_name(device)) if hasattr(home, "get_device_name") else device.type


# --- formats ------------------------------------------------------------------------------------------------


def casts(device_type: str) -> bool:
    """Whether torch has autocast kernels for a device type. Without them, torch.autocast casts nothing."""
    if device_type not in _casting and _torch.dispatcher.autocast_registrations(device_type):
        _casting.add(device_type)
    return device_type in _casting


def low_dtypes(device_type: str) -> tuple[torch.dtype, ...]:
    """Return the 16-bit formats that a device computes in."""
    both = (torch.bfloat16, torch.float16)
    if device_type == "cuda":  # torch lists no formats for CUDA, and GPUs before Ampere may emulate bf16
        return both if torch.cuda.is_bf16_supported() else both[1:]
    listed = getattr(getattr(torch, device_type, None), "get_amp_supported_dtype", None)
    return both if listed is None else tuple(dtype for dtype in both if dtype in listed())


_FAILURES = (torch.OutOfMemoryError, torch.AcceleratorError)
"""Errors that say that a device failed now, and not that it lacks something."""


@functools.cache
def has_fp64(device: torch.device) -> bool:
    """Whether a device computes in fp64. MPS and some GPUs do not."""
    try:
        torch.ones((), dtype=torch.float32, device=device).double().reciprocal()
    except _FAILURES:
        raise
    except (RuntimeError, TypeError):
        return False
    return True


def widest_dtype(device: torch.device) -> torch.dtype:
    """Return fp64, or fp32 for a device that has no fp64."""
    return torch.float64 if has_fp64(device) else torch.float32


def in_fp64(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor in fp64; on the CPU if its device has no fp64, for which the host waits."""
    return (tensor if has_fp64(tensor.device) else tensor.cpu()).double()


# --- kernels ------------------------------------------------------------------------------------------------


@functools.cache
def has_fused(op: str, device_type: str) -> bool:
    """Whether a device type has the kernel of a fused optimizer, such as ``_fused_adam_``."""
    return _torch.optimizers.accepts_fused(op, device_type) and _torch.dispatcher.has_kernel(
        f"aten::{op}", device_type
    )


# --- events and transfers to the host -----------------------------------------------------------------------


def event(device: torch.device) -> torch.Event | None:
    """Record an event after the work that is queued on a device; return None if torch has no events for the device.

    Warns:
        UserWarning: There are none. This is said once for each device.
    """
    if not _has_events(device):
        return None
    made = torch.Event(device)
    made.record(
        torch.accelerator.current_stream(device)
    )  # without an argument, record() uses the stream of the current device
    return made


@functools.cache
def _has_events(device: torch.device) -> bool:
    try:
        torch.Event(device).record()
    except _FAILURES:
        raise
    except (RuntimeError, TypeError):
        warnings.warn(
            f"torch has no events for {device.type} devices, so the host waits for the device wherever a step may be skipped.",
            stacklevel=2,
        )
        return False
    return True


@functools.cache
def pins_memory(device_type: str) -> bool:
    """Whether tensors on the host can be pinned, so that copies from a device do not wait."""
    if device_type in ("cpu", "mps"):  # both compute in the host's memory
        return False
    try:
        return torch.empty((), device="cpu", pin_memory=True).is_pinned()
    except RuntimeError:
        return False


@functools.cache
def memory_statistics(device: torch.device) -> Any:
    """Return the module of torch that counts a device's memory, or None if torch does not count it.

    It has ``memory_allocated``, ``max_memory_allocated`` and ``reset_peak_memory_stats``.
    """
    for home in (torch.accelerator, torch.get_device_module(device)):
        # torch.accelerator raises ValueError for a CPU if there is a GPU
        with contextlib.suppress(RuntimeError, AttributeError, TypeError, ValueError):
            home.memory_allocated(device), home.max_memory_allocated(device)
            return home
    return None


def free_bytes(device: torch.device) -> int | None:
    """Return the bytes of memory that are free on a device; None if that is unknown.

    On the CPU, no more is free than the limits of this process's control groups leave, which containers set.
    """
    if device.type == "cpu":
        try:
            lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
            free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
        except (OSError, ValueError, StopIteration):
            return None
        return min([free, *_free_in_groups(Path("/proc/self/cgroup"), Path("/sys/fs/cgroup"))])
    of_device = getattr(torch.get_device_module(device), "mem_get_info", None)
    try:
        return None if of_device is None else int(of_device(device)[0])
    except (RuntimeError, NotImplementedError):
        return None


def _free_in_groups(groups: Path, mounted: Path) -> Iterator[int]:
    """Yield the bytes that each limit of memory leaves to the control groups of a process.

    Args:
        groups: The file that lists the groups, ``/proc/self/cgroup``.
        mounted: The folder where Linux shows all groups, or in a container often only its own.
    """
    try:
        lines = groups.read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if not controllers:
            base, limit, usage, cached = mounted, "memory.max", "memory.current", "inactive_file"
        elif "memory" in controllers.split(","):
            base, cached = mounted / "memory", "total_inactive_file"
            limit, usage = "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        here = base / path.strip("/")
        for folder in (here, *(outer for outer in here.parents if outer.is_relative_to(base))):
            with contextlib.suppress(OSError, ValueError):  # no such folder, or the limit is "max"
                counts = dict(each.split() for each in (folder / "memory.stat").read_text().splitlines())
                used = int((folder / usage).read_text()) - int(counts.get(cached, 0))
                yield max(0, int((folder / limit).read_text()) - used)


def empty_cache(device: torch.device) -> None:
    """Give memory that torch caches for a device back to it, if torch can."""
    for home in (torch.accelerator, torch.get_device_module(device)):
        with contextlib.suppress(RuntimeError, AttributeError):
            home.empty_cache()
            return


def is_capturing() -> bool:
    """Whether the accelerator's work is being captured as a graph, during which the host must not wait for it."""
    found = accelerator()
    ask = None if found is None else getattr(getattr(torch, found), "is_current_stream_capturing", None)
    return ask is not None and bool(ask())


@functools.cache
def profiler_activity(device_type: str) -> Any:
    """Return the activity by which torch's profiler times a device's own work, or None if it does not."""
    name = _torch.dispatcher.device_key(device_type)
    found = getattr(torch.profiler.ProfilerActivity, name, None)
    return found if device_type != "cpu" and found in torch.profiler.supported_activities() else None


# --- random numbers -----------------------------------------------------------------------------------------

_State = tuple[Callable[[], Any], Callable[[Any], object]]


def generator(device: torch.device) -> _State:
    """Return functions that get and set the state of the random generator of a device, or of its type's current device.

    Warns:
        UserWarning: torch has no access to the device's generator, so its state is not kept. This is said once for each
            device type.
    """
    if device.type == "cpu":
        return torch.get_rng_state, torch.set_rng_state
    home = torch.get_device_module(device)
    if not hasattr(home, "get_rng_state"):
        _warn_of_generator(device.type)
        return _nothing, _nothing
    if device.index is None or device.type == "mps":  # MPS is a single device, so its functions take no index
        return home.get_rng_state, home.set_rng_state
    return functools.partial(home.get_rng_state, device), lambda state: home.set_rng_state(state, device)


def generators(device_type: str) -> Iterator[_State]:
    """Yield functions that get and set the states of the random generators of the CPU and of all devices of a type."""
    yield torch.get_rng_state, torch.set_rng_state
    if device_type != "cpu":
        home = torch.get_device_module(device_type)
        if hasattr(home, "get_rng_state_all"):
            yield home.get_rng_state_all, home.set_rng_state_all
        else:
            yield generator(torch.device(device_type))


@contextlib.contextmanager
def same_random_numbers(device_types: Iterable[str]) -> Iterator[None]:
    """Restore the random generators of the CPU and of some device types after a ``with`` block."""
    kept = [(put, get()) for kind in {"cpu", *device_types} for get, put in generators(kind)]
    try:
        yield
    finally:
        for put, state in kept:
            put(state)


def _nothing(*_: object) -> None:
    pass


@functools.cache
def _warn_of_generator(device_type: str) -> None:
    warnings.warn(
        f"torch.{device_type} has no get_rng_state, so random numbers that are drawn on {device_type} devices are neither "
        "saved nor repeated.",
        stacklevel=2,
    )


# --- summary ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Features:
    """What torch says of a device, for a person to read.

    Attributes:
        count: The number of devices of this type.
        has: What it has.
        lacks: What it lacks.
    """

    count: int
    has: tuple[str, ...]
    lacks: tuple[str, ...]


def features(device: torch.device) -> Features:
    """Ask torch what a device has of all that castwise uses."""
    kind = device.type
    said: dict[str, object] = {"autocast kernels": casts(kind)}
    low = low_dtypes(kind)
    said |= {"bf16": torch.bfloat16 in low, "fp16": torch.float16 in low, "fp64": has_fp64(device)}
    said |= {"fused Adam": has_fused("_fused_adam_", kind), "fused SGD": has_fused("_fused_sgd_", kind)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        said |= {"events": _has_events(device), "random generators": generator(device)[0] is not _nothing}
    said |= {"pinned memory": pins_memory(kind), "memory statistics": memory_statistics(device)}
    has = tuple(name for name, found in said.items() if found)
    return Features(count(kind), has, tuple(name for name in said if name not in has))
