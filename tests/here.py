"""The device that the tests run on, from CASTWISE_TEST_DEVICE: cpu (default), sim (the simulated device) or cuda."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch

from tests.device import sim

DEVICE = os.environ.get("CASTWISE_TEST_DEVICE", "cpu")
"""The type of the device that models, data and sessions are on."""

FP32_MATMUL = {"cpu": "bf16", "cuda": "tf32"}.get(DEVICE, "ieee")
"""A way to compute fp32 products on the device other than torch's default, if there is one."""

if DEVICE == sim.NAME:
    try:
        sim.register()
    except RuntimeError as error:
        raise SystemExit(str(error)) from None
    sim.register_in_interpreters()
if DEVICE != "cpu":
    torch.set_default_device(DEVICE)
    torch.backends.cudnn.deterministic = True  # many tests require equal bits in two runs


def init_process_group(**options: Any) -> None:
    """Start torch's default process group with gloo, for tensors on the host and on the device."""
    if DEVICE == sim.NAME:
        from tests.device import group

        group.init(**options)
    else:
        torch.distributed.init_process_group("gloo", **options)


def until_known(step: Callable[[], object], fused: bool = True) -> None:
    """Step; on a device that decides skips itself, repeat until the host must know about the first step."""
    for _ in range(6 if fused and DEVICE != "cpu" else 1):
        step()
        if fused and DEVICE != "cpu":
            torch.accelerator.synchronize()


@contextlib.contextmanager
def no_waits() -> Iterator[None]:
    """Make every wait of the host for the device raise."""
    if DEVICE == sim.NAME:
        with sim.no_waits():
            yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def waits() -> int:
    """Return how often the host has waited for the simulated device, except for events."""
    return sum(count for kind, count in sim.waits().items() if kind is not sim.Wait.EVENT)
