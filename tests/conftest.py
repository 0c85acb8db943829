"""What every test runs under."""

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
except ModuleNotFoundError:  # the tests for a GPU need pytest alone
    pass
else:
    # Examples that compute on tensors take as long as the machine's other work lets them.
    hypothesis.settings.register_profile("castwise", deadline=None)
    hypothesis.settings.load_profile("castwise")


def can_compile_cpp() -> bool:
    """Whether torch.compile's default backend can work here: it needs a C++ compiler and Python's headers."""
    headers = Path(sysconfig.get_paths()["include"]) / "Python.h"
    return shutil.which(os.environ.get("CXX", "g++")) is not None and headers.is_file()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave to a soak what is its, and skip tests that need what this machine lacks, saying so."""
    if not SOAKING and (left := dealt(items)):
        config.hook.pytest_deselected(items=sorted(left, key=lambda item: item.nodeid))
        items[:] = [item for item in items if item not in left]
    no_gpu = pytest.mark.skip(reason="needs a CUDA device, and there is none")
    no_cpp = pytest.mark.skip(
        reason="needs a C++ compiler and Python's headers, for torch.compile's Inductor"
    )
    other_device = pytest.mark.skip(reason=f"is about CPUs, and these tests run on {DEVICE}")
    no_inductor = pytest.mark.skip(reason="Inductor cannot compile for the simulated device")
    no_sparse = pytest.mark.skip(reason="the simulated device has no sparse tensors")
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
    """Processes that measure are forks of one, which is a fork of what tests fork: an interpreter would import torch again.

    What is yielded starts the interpreter.
    """
    if DEVICE != "cpu" or torch.cuda.is_available():  # a fork of a process that has used a device cannot
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
        patch.setattr("castwise.lab.timing.processes._end", socket.socket.close)  # theirs is a copy
        yield real


@pytest.fixture(autouse=True, scope="session")
def files_follow_their_schemas() -> Iterator[None]:
    """Every plan, and the evidence of every search, that a test has written follows the schema that is published."""
    if not schemas.INSTALLED:  # the tests for a GPU need pytest alone
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Plan, "save", schemas.checked_plans(Plan.save))
        patch.setattr(TuneResult, "save", schemas.checked_evidence(TuneResult.save))
        yield


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """One thread, so that sums have one order and no test spins on cores that others use."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True, scope="module")
def nothing_old_is_met() -> None:
    """What files before have compiled is forgotten: each ``prepare`` after it would read all of its guards.

    And what is there before a file's tests is out of the collector's sight: many of them collect, some at each step, and
    two million objects of torch, Dynamo and Inductor cost a second each time.
    """
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()
    gc.collect()
    gc.freeze()
    gc.set_threshold(
        20_000, 20, 20
    )  # what one test leaves is little: looking for it less often saves a twentieth


@pytest.fixture(autouse=True)
def no_leftovers() -> Iterator[None]:
    """No test leaves autocast on, or another default dtype behind, for the tests after it."""
    frames._kept.clear()  # kernels of blocks that backward passes of other tests might have needed
    yield
    on = [device for device in {"cpu", "cuda", DEVICE} if torch.is_autocast_enabled(device)]
    for device in on:
        torch.set_autocast_enabled(device, False)
    assert not on, f"autocast is still on for {on} after the test"
    assert torch.get_default_dtype() is torch.float32
