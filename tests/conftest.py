"""Fixtures and hooks for all tests."""

from __future__ import annotations

import contextlib
import gc
import os
import shutil
import socket
import sys
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from castwise.commands.jobs.tune_result import TuneResult
from castwise.core.casting import frames
from castwise.core.plans.plan import Plan
from castwise.lab.timing.processes import Home
from tests import schemas
from tests.here import DEVICE
from tests.processes import forked_home
from tests.soak import SOAKING, dealt

try:
    import hypothesis
except ModuleNotFoundError:  # the GPU tests need only pytest
    pass
else:
    # Tensor computations take as long as the machine's other work makes them.
    hypothesis.settings.register_profile("castwise", deadline=None)
    hypothesis.settings.load_profile("castwise")


def can_compile_cpp() -> bool:
    """Return whether torch.compile's default backend works: it needs a C++ compiler and Python's headers."""
    headers = Path(sysconfig.get_paths()["include"]) / "Python.h"
    return shutil.which(os.environ.get("CXX", "g++")) is not None and headers.is_file()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect tests that only a soak runs, and skip tests that need something this machine lacks."""
    if not SOAKING and (left := dealt(items)):
        config.hook.pytest_deselected(items=sorted(left, key=lambda item: item.nodeid))
        items[:] = [item for item in items if item not in left]
    no_gpu = pytest.mark.skip(reason="needs a CUDA device, and there is none")
    no_cpp = pytest.mark.skip(
        reason="needs a C++ compiler and Python's headers, for torch.compile's Inductor"
    )
    other_device = pytest.mark.skip(reason=f"tests CPUs, and this run uses {DEVICE}")
    no_inductor = pytest.mark.skip(reason="Inductor cannot compile for the simulated device")
    no_sparse = pytest.mark.skip(reason="the simulated device has only dense tensors")
    has_gpu, has_cpp = torch.cuda.is_available(), can_compile_cpp()
    for item in items:
        if item.get_closest_marker("cpu") and DEVICE != "cpu":
            item.add_marker(other_device)
        if item.get_closest_marker("sparse") and DEVICE == "sim":
            item.add_marker(no_sparse)
        if item.get_closest_marker("gpu") and not has_gpu:
            item.add_marker(no_gpu)
        if item.get_closest_marker("inductor") and not has_cpp:
            item.add_marker(no_cpp)
        if item.get_closest_marker("inductor") and DEVICE == "sim":
            item.add_marker(no_inductor)


@pytest.fixture(autouse=True, scope="session")
def one_home() -> Iterator[Callable[[Home], socket.socket]]:
    """Fork measuring processes from one fork of the tests' server, because a new interpreter would import torch again.

    Yields the function that starts an interpreter.
    """
    if DEVICE != "cpu" or torch.cuda.is_available():  # a process that has used a device cannot be forked
        yield Home.line
        return
    lines: list[socket.socket] = []

    def line(_: Home) -> socket.socket:
        if not lines:
            lines.append(stack.enter_context(forked_home()))
        return lines[0].dup()

    with pytest.MonkeyPatch.context() as patch, contextlib.ExitStack() as stack:
        real = Home.line
        patch.setattr(Home, "line", line)
        # The connection is a duplicate: only close it.
        patch.setattr("castwise.lab.timing.processes._end", socket.socket.close)
        yield real


@pytest.fixture(autouse=True, scope="session")
def files_follow_their_schemas() -> Iterator[None]:
    """Check that every plan and evidence file written by a test follows the published schema."""
    if not schemas.INSTALLED:  # the GPU tests need only pytest
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Plan, "save", schemas.checked_plans(Plan.save))
        patch.setattr(TuneResult, "save", schemas.checked_evidence(TuneResult.save))
        yield


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Use one thread, so that sums have one order and tests do not compete for cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True, scope="module")
def nothing_old_is_met() -> None:
    """Forget code compiled in earlier test files, because each later ``prepare`` would read all of its guards.

    Also exclude existing objects from garbage collection: many tests collect, some at each step, and two million
    objects of torch, Dynamo and Inductor cost a second each time.
    """
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()
    gc.collect()
    gc.freeze()
    gc.set_threshold(
        20_000, 20, 20
    )  # a test leaves little garbage; fewer collections save a twentieth of the time


@pytest.fixture(autouse=True)
def no_leftovers() -> Iterator[None]:
    """Check that no test leaves autocast on or another default dtype."""
    frames._kept.clear()  # kernels of blocks, kept for backward passes of other tests
    yield
    on = [device for device in {"cpu", "cuda", DEVICE} if torch.is_autocast_enabled(device)]
    for device in on:
        torch.set_autocast_enabled(device, False)
    assert not on, f"autocast is still on for {on} after the test"
    assert torch.get_default_dtype() is torch.float32
