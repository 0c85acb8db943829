"""The simulated accelerator as users of torch see it: ``torch.sim``, and tensors on ``"sim"``, ``"sim:0"`` and
``"sim:1"``.
"""

from __future__ import annotations

import contextlib
import enum
import hashlib
import os
import shutil
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import torch

NAME = "sim"
_LIBRARY = torch.library.Library("aten", "IMPL")
COUNT = 2
"""Number of devices, as in sim.cpp."""
SOURCE = Path(__file__).with_name("sim.cpp")
BUILD = Path(__file__).parents[2] / "build" / "sim"
HAS_FP64 = os.environ.get("CASTWISE_SIM_FP64", "1") != "0"
"""Whether the device supports float64, which Apple's and many others do not. It applies to the whole process."""
NO_COMPILER = "the simulated accelerator needs a C++ compiler, and there is none: install g++, or set CXX"


class Wait(enum.IntEnum):
    """Reasons why the host waits for the device, in the order of sim.cpp."""

    ITEM = 0
    SHAPE = 1
    TO_HOST = 2
    TO_DEVICE = 3
    SYNCHRONIZE = 4
    EVENT = 5


def compiler() -> str | None:
    """Return the C++ compiler, or None."""
    return shutil.which(os.environ.get("CXX", "g++"))


def build() -> Path:
    """Return the library, compiled once per source and torch; processes that need it at once each write a complete
    file.

    Raises:
        RuntimeError: There is no C++ compiler, or it failed.
    """
    if (command := compiler()) is None:
        raise RuntimeError(NO_COMPILER)
    what = hashlib.sha256(SOURCE.read_bytes() + f"{torch.__version__} {sys.platform}".encode()).hexdigest()[
        :16
    ]
    path = BUILD / f"sim-{what}.so"
    if not path.exists():
        from torch.utils import cpp_extension  # a slow import that is needed only once

        BUILD.mkdir(parents=True, exist_ok=True)
        beside = path.with_suffix(f".{os.getpid()}")
        words = [command, "-std=c++20", "-O1", "-fPIC", "-shared", "-w", str(SOURCE), "-o", str(beside)]
        words += [f"-I{folder}" for folder in cpp_extension.include_paths()]
        words += [f"-L{folder}" for folder in cpp_extension.library_paths()]
        words += ["-ltorch", "-ltorch_cpu", "-lc10", f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"]  # fmt: skip
        done = subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{command} cannot compile {SOURCE.name}:\n{done.stdout[:4000]}")
        beside.rename(path)
    return path


class Stream(torch.Stream):
    """A stream of the device."""

    def __new__(cls, device: Any = None, priority: int = 0) -> Self:
        return super().__new__(cls, device=_device(device), priority=priority)


class Event(torch.Event):
    """An event of the device."""

    def __new__(cls, enable_timing: bool = False, blocking: bool = False) -> Self:
        return super().__new__(cls, NAME, enable_timing=enable_timing, blocking=blocking)


def _device(device: Any = None) -> torch.device:
    index = device if isinstance(device, int) else None if device is None else torch.device(device).index
    return torch.device(NAME, torch.accelerator.current_device_index() if index is None else index)


def _index(device: Any = None) -> int:
    index = _device(device).index
    assert index is not None
    return index


@contextlib.contextmanager
def device(which: Any) -> Iterator[None]:
    """Make a device the current one."""
    before = torch.accelerator.current_device_index()
    if which is not None and (not isinstance(which, int) or which >= 0):
        torch.accelerator.set_device_index(_index(which))
    try:
        yield
    finally:
        torch.accelerator.set_device_index(before)


@contextlib.contextmanager
def stream(which: torch.Stream | None) -> Iterator[None]:
    """Make a stream the current one of its device."""
    if which is None:
        yield
        return
    before = torch.accelerator.current_stream(which.device)
    torch.accelerator.set_stream(which)
    try:
        yield
    finally:
        torch.accelerator.set_stream(before)


def waits() -> dict[Wait, int]:
    """Return how often the host has waited for the device, by reason."""
    return dict(zip(Wait, torch.ops.castwise_sim.waits(), strict=True))


@contextlib.contextmanager
def no_waits() -> Iterator[None]:
    """Make every wait of the host for the device raise, like ``torch.cuda.set_sync_debug_mode("error")``."""
    before = torch.ops.castwise_sim.forbid_waits(True)
    try:
        yield
    finally:
        torch.ops.castwise_sim.forbid_waits(before)


def as_kernels_see(tensor: torch.Tensor) -> torch.Tensor:
    """Return a CPU tensor on the memory of a device tensor."""
    return torch.ops.castwise_sim.as_kernels_see(tensor)  # type: ignore[no-any-return]


def _generator(device: Any = None) -> torch.Generator:
    return torch.ops.castwise_sim.default_generator(_index(device))  # type: ignore[no-any-return]


def _module() -> types.ModuleType:
    """Return the module ``torch.sim``, with the names of torch.cuda."""
    module: Any = types.ModuleType(f"torch.{NAME}")
    accelerator = torch.accelerator
    module.is_available = lambda: True
    module.is_initialized = lambda: True
    module._initialized = True  # torch.utils.checkpoint saves the device's random state only then
    module._is_in_bad_fork = torch.ops.castwise_sim.is_in_bad_fork
    module._lazy_init = module.init = lambda: None
    module.device_count = lambda: COUNT
    module.current_device = accelerator.current_device_index
    module.set_device = lambda which: accelerator.set_device_index(_index(which))
    module.synchronize = lambda which=None: accelerator.synchronize(_device(which))
    module.device = device
    module.get_device_name = lambda which=None: "simulated accelerator"
    module.get_amp_supported_dtype = lambda: [torch.float16, torch.bfloat16]
    module.is_bf16_supported = lambda *_, **__: True

    module.Stream, module.Event, module.stream = Stream, Event, stream
    module.current_stream = lambda which=None: accelerator.current_stream(_device(which))
    module.set_stream = accelerator.set_stream
    for name in ("memory_stats", "memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved", "reset_peak_memory_stats", "reset_accumulated_memory_stats"):  # fmt: skip
        call = getattr(accelerator, name)
        setattr(module, name, lambda which=None, call=call: call(_index(which)))
    module.empty_cache = accelerator.empty_cache
    module.mem_get_info = lambda which=None: accelerator.get_memory_info(_index(which))

    module.default_generators = tuple(map(_generator, range(COUNT)))
    module.get_rng_state = lambda which=None: _generator(which).get_state()
    module.set_rng_state = lambda state, which=None: _generator(which).set_state(state)
    module.get_rng_state_all = lambda: [_generator(i).get_state() for i in range(COUNT)]
    module.set_rng_state_all = lambda states: [
        _generator(i).set_state(state) for i, state in enumerate(states)
    ]
    module.manual_seed = lambda seed: _generator().manual_seed(seed)
    module.manual_seed_all = lambda seed: [_generator(i).manual_seed(seed) for i in range(COUNT)]
    module.seed = lambda: _generator().seed()
    module.seed_all = lambda: module.manual_seed_all(_generator().seed())
    module.initial_seed = lambda: _generator().initial_seed()
    return module  # type: ignore[no-any-return]


def register() -> None:
    """Register the device with torch in this process, before the first backward starts a thread per device.

    Raises:
        RuntimeError: As in :func:`build`.
    """
    if hasattr(torch, NAME):
        return
    torch.ops.load_library(build())
    torch.ops.castwise_sim.set_fp64(HAS_FP64)
    torch.utils.rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, _module())
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    for overload in ("Scalar", "ScalarList"):
        _LIBRARY.impl(f"_foreach_lerp_.{overload}", _foreach_lerp_, "PrivateUse1")
    _LIBRARY.impl("_foreach_zero_", _foreach_zero_, "PrivateUse1")


# Like CUDA's kernels, these do not count their writes.


def _foreach_lerp_(tensors: list[torch.Tensor], ends: list[torch.Tensor], weight: Any) -> None:
    torch._foreach_lerp_([*map(as_kernels_see, tensors)], [*map(as_kernels_see, ends)], weight)


def _foreach_zero_(tensors: list[torch.Tensor]) -> None:
    torch._foreach_zero_([*map(as_kernels_see, tensors)])


def register_in_interpreters() -> None:
    """Make interpreters started by this process register the device when they import torch, like an installed device."""
    package = BUILD / "castwise_sim-0.dist-info"
    if not package.exists():
        package.mkdir(parents=True, exist_ok=True)
        (package / "METADATA").write_text("Metadata-Version: 2.1\nName: castwise-sim\nVersion: 0\n")
        (package / "entry_points.txt").write_text("[torch.backends]\nsim = tests.device.sim:register\n")
    places = [str(BUILD), str(Path(__file__).parents[2])]
    sys.path += [each for each in places if each not in sys.path]  # castwise passes its own sys.path on
    given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    os.environ["PYTHONPATH"] = os.pathsep.join([
        *filter(None, given),
        *(each for each in places if each not in given),
    ])
