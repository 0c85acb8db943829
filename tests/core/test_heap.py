"""The C heap: freed memory is kept while a plan with ``host_memory=keep`` is live, and no longer."""

from __future__ import annotations

import ctypes
import gc
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import castwise
from castwise.core import heap
from castwise.core.heap import HEAP, can_keep
from castwise.core.session import process
from castwise.errors import DeviceError
from castwise.lab.timing.served import page_faults

KEEP = "fp32+host_memory=keep"

needs_glibc = pytest.mark.skipif(not can_keep(), reason="the C library is not glibc")


def faults(mib: int = 24, blocks: int = 4, warmup: int = 8, times: int = 6) -> float:
    """Return the share of a step's pages that cause page faults; a step allocates, writes and frees blocks of the given
    MiB.

    The blocks come from malloc directly. A tensor would also make small allocations, which can end up behind its block
    at the end of the heap and keep the memory from being returned.
    """
    library = ctypes.CDLL(None)
    library.malloc.restype = ctypes.c_void_p
    for number in range(warmup + times):
        if number == warmup:  # the heap has grown by now
            before = page_faults()
        addresses = [library.malloc(mib << 20) for _ in range(blocks)]
        for address in addresses:
            ctypes.memset(address, 1, mib << 20)
        for address in addresses:
            library.free(ctypes.c_void_p(address))
    return (page_faults() - before) / times / (mib * blocks << 8)


def _freed() -> None:
    """Measure page faults before, under and after two live plans; runs in its own process."""
    given = faults()
    first, second = castwise.Amp(KEEP), castwise.Amp(f"{KEEP}+optimizer=as_given")
    first.prepare(nn.Linear(2, 2))
    assert HEAP.host_memory == "keep"
    other = second.prepare(nn.Linear(2, 2))
    kept = faults()
    first.close()
    still = faults()
    second.close()
    del other
    assert HEAP.host_memory == "as_given"
    after = faults()
    print(given, kept, still, after)


@needs_glibc
@pytest.mark.parametrize(
    "variables",
    [
        "",
        "MALLOC_MMAP_THRESHOLD_=33554432 MALLOC_TRIM_THRESHOLD_=4294967296",
        "GLIBC_TUNABLES=glibc.malloc.mmap_threshold=0x2000000:glibc.malloc.trim_threshold=4294967296",
    ],
)
def test_a_live_plan_keeps_memory_and_closing_it_gives_back_what_was_there(
    variables: str,
) -> None:
    """Closing the last plan restores the allocator settings, including those from the environment."""
    program = "from tests.core.test_heap import _freed; _freed()"
    environment = {**os.environ, **dict(word.split("=", 1) for word in variables.split())}
    told = subprocess.run(
        [sys.executable, "-c", program], check=True, env=environment, cwd=Path(__file__).parents[2],
        capture_output=True, text=True,
    ).stdout  # fmt: skip
    given, kept, still, after = map(float, told.split())
    assert max(kept, still) < 0.4, told
    assert max(given, after) < 0.4 if variables else min(given, after) > 0.6, told


@needs_glibc
def test_a_session_that_is_dropped_lets_go_of_it() -> None:
    amp = castwise.Amp(KEEP)
    model = nn.Linear(2, 2)
    amp.prepare(model)
    assert HEAP.host_memory == "keep"
    del amp, model
    gc.collect()
    assert HEAP.host_memory == "as_given"


@needs_glibc
@pytest.mark.parametrize("how", ["closed", "collected"])
def test_a_session_that_goes_while_settings_are_aside_lets_go_of_it_too(how: str) -> None:
    """A session that ends while settings are suspended, for instance during another session's audit, releases the heap
    too.
    """
    amp = castwise.Amp(KEEP)
    model = nn.Linear(2, 2)
    amp.prepare(model)
    with process.claims_aside():
        if how == "closed":
            amp.close()
        del amp, model
        gc.collect()
    assert HEAP.host_memory == "as_given"
    assert not process._claimed


def _grown() -> None:
    """Allocate batches of changing sizes with small results between them; runs in its own process."""

    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return ((x * self.w).relu() * self.w).relu()

    model, log = Scale(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    amp = castwise.Amp(KEEP, device="cpu")
    amp.prepare(model, optimizer)
    for step in range(40):
        out = model(torch.ones((34 + step // 2) << 18))
        log.append(out[:1024].detach().clone())
        amp.backward(out.mean())
        del out
        amp.step(optimizer)
        optimizer.zero_grad()
    peak = next(line for line in Path("/proc/self/status").read_text().splitlines() if "VmHWM" in line)
    assert int(peak.split()[1]) >> 10 < 1800, peak


@needs_glibc
def test_holes_that_nothing_fits_into_go_back_to_the_system() -> None:
    program = "from tests.core.test_heap import _grown; _grown()"
    subprocess.run([sys.executable, "-c", program], check=True, cwd=Path(__file__).parents[2])


@needs_glibc
def test_training_is_the_same_to_the_last_digit() -> None:
    losses = []
    for plan in ("bf16-mixed", "bf16-mixed+host_memory=keep"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 2))
        optimizer = torch.optim.AdamW(model.parameters())
        with castwise.Amp(plan) as amp:
            amp.prepare(model, optimizer)
            for _ in range(3):
                loss = model(torch.randn(4, 8)).square().mean()
                amp.backward(loss)
                amp.step(optimizer)
                optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[0] == losses[1]


def test_where_nobody_can_be_told_so_the_plan_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "can_keep", lambda: False)
    with pytest.raises(
        DeviceError,
        match=r"host_memory='keep', which needs glibc, and this system has another C library.* use 'as_given'",
    ):
        castwise.Amp(KEEP)


def test_another_c_library_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heap.sys, "platform", "darwin")
    heap._glibc.cache_clear()
    try:
        assert not can_keep()
    finally:
        monkeypatch.undo()
        heap._glibc.cache_clear()
